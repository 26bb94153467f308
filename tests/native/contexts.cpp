// Several contexts at once, whose residents change.
#include <thread>

#include "bench.h"

namespace trial {

namespace {

// Contexts in threads of their own while the residents change all the time and other models come and go.
void threads_and_changes() {
    Shape shape;
    Bench bench("slots 3\nguests 2\nstage -1\ncpu_bytes_us 1000\nbus_bytes_us 1000\n", true);
    Layer layer(Bench::host(), shape, 0, 5, bench.wrapper->store.type, bench.inner_type);
    std::atomic<int> running{3};
    std::atomic<int64_t> steps{0};
    auto work = [&](unsigned number) {
        one_and_many(bench, shape, layer, number, {60, 5, 4, 9, 3}, [&] { steps++; });
        running--;
    };
    std::vector<std::thread> threads;
    for (unsigned number = 0; number < 3; number++) {
        threads.emplace_back(work, number);
    }
    threads.emplace_back([&] {
        std::mt19937 dice(99);
        while (running > 0) {
            const auto experts = random_choices(dice, 1, 3, shape.n_experts, true);
            CHECK(bench.wrapper->store.set_residents(0, 0, "exps", experts).empty());
            std::this_thread::yield();
        }
    });
    threads.emplace_back([&] {
        for (int turn = 0; running > 0; turn++) {
            Layer other(Bench::host(), shape, 0, turn, bench.wrapper->store.type, bench.inner_type);
            CHECK(other.ok && !bench.wrapper->report().empty());
            std::this_thread::sleep_for(std::chrono::milliseconds(5));
        }
    });
    for (auto & thread : threads) {
        thread.join();
    }
    CHECK(steps == 180);
    CHECK(!bench.wrapper->store.set_residents(0, 0, "exps", {1, 1, 2}).empty());
    CHECK(!bench.wrapper->store.set_residents(0, 0, "exps", {1, 2}).empty());
    CHECK(!bench.wrapper->store.set_residents(0, 7, "exps", {1, 2, 3}).empty());
}

// Models that are loaded, computed with and freed while another thread does the same with its own, by one device.
void models_come_and_go() {
    Shape shape;
    Bench bench("slots 3\nguests 1\ncpu_tokens 4\ncpu_bytes_us 1000\nbus_bytes_us 1000\n", true);
    const int there = bench.slow_device.n_buffers;
    const auto work = [&](unsigned number) {
        for (unsigned turn = 0; turn < 6; turn++) {
            Layer layer(Bench::host(), shape, 0, 5, bench.wrapper->store.type, bench.inner_type);
            CHECK(layer.ok);
            one_and_many(bench, shape, layer, 10 * number + turn, {4, 4, 4, 12, 4});
        }
    };
    std::thread first(work, 1u), second(work, 2u);
    work(3);
    first.join();
    second.join();
    CHECK(bench.wrapper->store.voice.last_fault().empty() && bench.counted("host_bytes") == 0);
    bench.wrapper.reset();
    CHECK(bench.slow_device.n_buffers == there);
}

// Slots that follow the choices, several contexts at once: every result is that of the layer without slots.
void follow_in_threads(const std::string & settings, bool events) {
    Shape shape;
    Bench bench("slots 4\n" + settings, true, events);
    Layer layer(Bench::host(), shape, 0, 5, bench.wrapper->store.type, bench.inner_type);
    auto work = [&](unsigned number) { one_and_many(bench, shape, layer, number, {50, 3, 2, 20, 3}); };
    std::thread other(work, 1u);
    work(2);
    CHECK(bench.wrapper->store.set_residents(0, 0, "exps", {7, 6, 5, 4}).empty());
    other.join();
    CHECK(bench.wrapper->report().find("\"admitted\":0") == std::string::npos);
}

void slots_follow() {
    const std::string changing[] = {"policy lru\nupload_bytes 1000000000\nrefill_bytes 1000000000\n",
                                    "policy lfu\nhalf_life 4\nprotect 1\nupload_bytes 20000\n",
                                    "policy lfu\nhalf_life 4\nupload_bytes 1000000000\nleast_misses 2\n"};
    std::string forced = "policy schedule\n";
    for (int step = 0; step < 100; step++) {
        for (int expert = 0; expert < 8; expert++) {
            forced += "move " + std::to_string(step) + " 0 " + std::to_string((step + expert) % 8) + " " + std::to_string(step % 4) + "\n";
        }
    }
    for (const std::string & policy : {changing[0], changing[1], changing[2], forced}) {
        for (int kind = 0; kind < 4; kind++) {
            const char * lanes = kind % 2 ? "guests 2\nstage -1\ncpu_bytes_us 1000\nbus_bytes_us 1000000\n" : "stage 0\n";
            follow_in_threads(policy + lanes + "lockstep " + (kind / 2 ? "1" : "0") + "\n", kind != 3);
        }
    }
}

// What is resident begins before the choices are known, in several layers and contexts, while the residents change: the
// rows are those of the CPU alone, and of the device that waits.
void begins_ahead() {
    Shape shape;
    shape.type = kQ8;
    const std::string costs = "slots 3\nstage 0\ncpu_bytes_us 1000\nbus_bytes_us 1000\nahead ";
    for (const char * ahead : {"1", "0"}) {
        Bench bench(costs + ahead, true);
        const Reference cpu(shape, 0);
        const Layers layers(shape, 3, bench.wrapper->store.type, bench.inner_type), plain(shape, 3, cpu.type, cpu.type);
        std::atomic<int> running{2};
        auto work = [&](unsigned number) {
            const Reference mine(shape, 0);
            std::mt19937 dice(number);
            Backend * backend = bench.backend();
            {
                Pass same(Bench::host(), plain.all, 1, 4, cpu.type, true, true);
                Pass pass(Bench::host(), layers.all, 1, 4, bench.inner_type, true, true);
                Pass many(Bench::host(), layers.all, 1500, 4, bench.inner_type);
                for (int step = 0; step < 40; step++) {
                    const auto x = random_values(dice, static_cast<size_t>(shape.n_in));
                    const auto ids = random_choices(dice, 1, 4, shape.n_experts, true);
                    same.set(mine.backend, x, ids);
                    pass.set(backend, x, ids);
                    CHECK(same.compute(mine.backend) == kSuccess && pass.compute(backend, step % 9 == 8) == kSuccess);
                    CHECK(difference(same.output(mine.backend), pass.output(backend)) < kClose);
                    if (step == 20) {  // more choices than the memory of renamed ones was made for
                        many.set(backend, random_values(dice, 1500 * 64), random_choices(dice, 1500, 4, shape.n_experts, true));
                        CHECK(many.compute(backend) == kSuccess);
                    }
                }
            }
            backend->iface.free(backend);
            running--;
        };
        std::thread other(work, 1u);
        std::thread changes([&] {
            std::mt19937 dice(99);
            while (running > 0) {
                CHECK(bench.wrapper->store.set_residents(0, 1, "exps", random_choices(dice, 1, 3, shape.n_experts, true)).empty());
                std::this_thread::sleep_for(std::chrono::milliseconds(2));
            }
        });
        work(2);
        other.join();
        changes.join();
        // The device looked up the slots if it was told to, and was sent none of the choices.
        Backend * backend = bench.backend();
        {
            Pass pass(Bench::host(), layers.all, 1, 2, bench.inner_type, true, true);
            pass.set(backend, std::vector<float>(64, 1.0f), {0, 1});
            CHECK(bench.wrapper->store.set_residents(0, 0, "exps", {0, 1, 2}).empty());
            CHECK(bench.wrapper->store.set_residents(0, 1, "exps", {1, 0, 3}).empty());
            CHECK(bench.wrapper->store.set_residents(0, 2, "exps", {2, 1, 0}).empty());
            const int64_t before = bench.slow_device.calls.uploads;
            CHECK(pass.compute(backend) == kSuccess);
            CHECK(bench.slow_device.calls.uploads - before == (*ahead == '1' ? 0 : 3));
            (void)pass.output(backend);
        }
        backend->iface.free(backend);
    }
}

// More graphs in turns than plans are kept, and nobody waits in between: what a plan has given to the device, which looks at
// it until it is waited for, outlives the plan.
void plans_make_room() {
    Shape shape;
    shape.type = kQ8;
    Bench bench("slots 3\nstage 0\ncpu_bytes_us 1000\nbus_bytes_us 1000\n", true);
    const Reference cpu(shape, 0);
    const Layers layers(shape, 2, bench.wrapper->store.type, bench.inner_type), plain(shape, 2, cpu.type, cpu.type);
    Backend * backend = bench.backend();
    {
        std::mt19937 dice(6);
        std::vector<std::unique_ptr<Pass>> passes;
        std::vector<std::vector<float>> right;
        for (int i = 0; i < 20; i++) {
            const auto x = random_values(dice, static_cast<size_t>(shape.n_in));
            const auto ids = random_choices(dice, 1, 4, shape.n_experts, true);
            Pass same(Bench::host(), plain.all, 1, 4, cpu.type, true, true);
            same.set(cpu.backend, x, ids);
            CHECK(same.compute(cpu.backend) == kSuccess);
            right.push_back(same.output(cpu.backend));
            passes.push_back(std::make_unique<Pass>(Bench::host(), layers.all, 1, 4, bench.inner_type, true, true));
            passes.back()->set(backend, x, ids);
        }
        for (auto & pass : passes) {
            CHECK(pass->compute(backend) == kSuccess);
        }
        for (size_t i = 0; i < passes.size(); i++) {
            CHECK(difference(right[i], passes[i]->output(backend)) < kClose);
        }
    }
    backend->iface.free(backend);
}

}  // namespace

const Tests kContexts = {
    {"threads_and_changes", threads_and_changes},
    {"models_come_and_go", models_come_and_go},
    {"slots_follow", slots_follow},
    {"begins_ahead", begins_ahead},
    {"plans_make_room", plans_make_room},
};

}  // namespace trial
