// Other residents by a file, while contexts compute.
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <thread>

#include "bench.h"
#include "orders.h"

namespace trial {

namespace {

// A folder of this test alone, with one file that is replaced whole.
struct OrderFile {
    OrderFile() {
        char made[] = "/tmp/atsplan-orders-XXXXXX";
        CHECK(mkdtemp(made));
        folder = made;
        path = folder + "/orders";
    }
    ~OrderFile() {
        (void)std::remove(path.c_str());
        (void)rmdir(folder.c_str());
    }
    OrderFile(const OrderFile &) = delete;
    OrderFile & operator=(const OrderFile &) = delete;

    void write(const std::string & text, mode_t mode = 0600) const {
        const std::string part = path + ".part";
        std::ofstream(part) << text;
        CHECK(chmod(part.c_str(), mode) == 0 && std::rename(part.c_str(), path.c_str()) == 0);
    }

    std::string folder, path;
};

std::string order(int number, const std::string & lines) { return "order " + std::to_string(number) + "\n" + lines + "end\n"; }

std::string listed(const std::vector<int32_t> & experts) {
    std::string made;
    for (const int32_t expert : experts) {
        made += (made.empty() ? "" : ",") + std::to_string(expert);
    }
    return made;
}

// Until a report has the words, for ten seconds at most.
bool said(Bench & bench, const std::string & words) {
    for (int turn = 0; turn < 5000; turn++) {
        if (bench.wrapper->report().find(words) != std::string::npos) {
            return true;
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    return false;
}

std::string settings(const OrderFile & file, const std::string & more) {
    return "resident 0 8 0,1,2\nresident 1 8 0,1,2\norders " + file.path + "\nreport_ms 1\nstage -1\ncpu_bytes_us 1000\nbus_bytes_us 1000\n" + more;
}

void orders_are_read() {
    Order found;
    std::string error;
    CHECK(parse_order("order 3\nresident 0 8 5,1\nresident 1 4 -\nend\n", found, error) && found.number == 3);
    CHECK(found.residents.size() == 2 && found.residents[0].experts == (std::vector<int32_t>{5, 1}));
    CHECK(parse_order("order 9223372036854775807\nend", found, error) && found.residents.empty());
    for (const char * wrong :
         {"", "\n", "order 3\n", "end\n", "order 0\nend\n", "order -1\nend\n", "order 9223372036854775808\nend\n", "order 3 4\nend\n",
          "order 3\nend\nend\n", "order 3\nend\nresident 0 8 1\n", "order 3\norder 4\nend\n", "order 3\nresident 0 8 8\nend\n",
          "order 3\nresident 0 8 1,1\nend\n", "order 3\nresident 0 8 1\nresident 0 8 2\nend\n", "order 3\nslots 3\nend\n",
          "order 3\nresident 0 8 1 2\nend\n", "order 3\nresident 0 8 1,\nend\n"}) {
        CHECK(!parse_order(wrong, found, error) && !error.empty());
    }
    std::string noise("order 3\nresident 0 8 ");
    std::mt19937 dice(7);
    for (int turn = 0; turn < 2000; turn++) {
        noise[dice() % noise.size()] = static_cast<char>(dice() % 256);
        (void)parse_order(noise + (turn % 2 ? "1\nend\n" : ""), found, error);
    }
}

// Two contexts compute all the time; what is in the file changes what is in the slots, and nothing of the rows.
void follow(const std::string & more, bool stays) {
    const OrderFile file;
    Shape shape;
    Bench bench(settings(file, more), true);
    Layer layer(Bench::host(), shape, 0, 5, bench.wrapper->store.type, bench.inner_type);
    std::atomic<bool> over{false};
    auto work = [&](unsigned number) {
        while (!over) {
            one_and_many(bench, shape, layer, number, {12, 5, 4, 9, 3});
        }
    };
    std::thread first(work, 1u), second(work, 2u);
    std::mt19937 dice(5);
    for (int number = 1; number <= 12; number++) {
        const auto experts = random_choices(dice, 1, 3, shape.n_experts, true);
        file.write(order(number, "resident 0 8 " + listed(experts) + "\n"));
        CHECK(said(bench, "\"order\":" + std::to_string(number) + ",\"order_fault\":\"\""));
        CHECK(!stays || said(bench, "\"resident\":[" + listed(experts) + "]"));
        file.write(number % 2 ? "order 99\nresident 0 8 3,4" : std::string(1000, '\0'));
        CHECK(said(bench, "\"order\":" + std::to_string(number) + ",\"order_fault\":\"" + (number % 2 ? "it has no end" : "line 1 is")));
        CHECK(!stays || said(bench, "\"resident\":[" + listed(experts) + "]"));
    }
    over = true;
    first.join();
    second.join();
    CHECK(bench.wrapper->store.voice.last_fault().empty());
}

void orders_are_followed() {
    follow("guests 2\n", true);
    follow("guests 0\n", true);
    follow("guests 1\npolicy lfu\nhalf_life 4\nprotect 1\nupload_bytes 1000000000\n", false);
    follow("guests 1\npolicy lfu\nhalf_life 4\nupload_bytes 1000000000\nleast_misses 2\n", false);
}

// What is not to be followed changes nothing and is said; a model that comes later has what was ordered last.
void orders_are_refused() {
    const OrderFile file;
    Shape shape;
    Bench bench(settings(file, "guests 1\n"), true);
    const Layer layer(Bench::host(), shape, 0, 5, bench.wrapper->store.type, bench.inner_type);
    file.write(order(5, "resident 0 8 7,6,5\n"));
    CHECK(said(bench, "\"order\":5,\"order_fault\":\"\""));
    const auto refused = [&](const std::string & text, mode_t mode, const std::string & fault) {
        file.write(text, mode);
        CHECK(said(bench, "\"order_fault\":\"" + fault));
        CHECK(said(bench, "\"resident\":[7,6,5]"));
        file.write("end\n");  // then the next fault is a new one
        CHECK(said(bench, "\"order_fault\":\"line 1 is not understood"));
    };
    const std::string other = "resident 0 8 1,2,3\n";
    refused(order(6, "resident 0 8 1,2\n"), 0600, "block 0: 2 experts for 3 slots");
    refused(order(7, "resident 3 8 1,2,3\n"), 0600, "block 3: 3 experts for 0 slots");
    refused(order(8, "resident 0 16 1,2,3\n"), 0600, "block 0: 3 experts for 0 slots");
    refused(order(9, other), 0620, "it is not this user's alone");
    refused(order(10, other), 0602, "it is not this user's alone");
    refused(std::string((16 << 20) + 1, 'x'), 0600, "it is too large");
    CHECK(std::remove(file.path.c_str()) == 0 && symlink("/dev/zero", file.path.c_str()) == 0);
    CHECK(said(bench, "\"order_fault\":\"it is no file that can be read") && said(bench, "\"resident\":[7,6,5]"));
    file.write(order(11, "resident 0 8 7,6,5\nresident 1 8 4,6,2\n"));
    CHECK(said(bench, "\"order\":11,\"order_fault\":\"\""));
    const Layer later(Bench::host(), shape, 1, 5, bench.wrapper->store.type, bench.inner_type);
    CHECK(said(bench, "\"resident\":[4,6,2]"));
}

}  // namespace

const Tests kOrders = {
    {"orders_are_read", orders_are_read},
    {"orders_are_followed", orders_are_followed},
    {"orders_are_refused", orders_are_refused},
};

}  // namespace trial
