// What a token costs the host in every layer of experts, on a device that computes nothing: time of the calling
// thread, and the calls that reach the device. Then how fast the CPU lane reads experts of a real size.
//
// Usage: PROGRAM ENGINE_FOLDER [host|lane]. One JSON object a line; host_work.py builds and runs it.
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>

#include "config.h"
#include "device.h"
#include "engine.h"
#include "slow_device.h"
#include "stream.h"

using namespace trial;

namespace {

constexpr int kLayers = 16, kExperts = 128, kChosen = 8, kFiller = 12;
constexpr int kQ8 = 8, kQ4K = 12;

int64_t thread_ns() {
    timespec now{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return static_cast<int64_t>(now.tv_sec) * 1000000000 + now.tv_nsec;
}

struct Wrapped {
    explicit Wrapped(const std::string & settings) : slow(engine().host, engine().cpu, true) {
        std::vector<Config> configs;
        std::string error;
        if (!parse_config(settings + "quiet 1\n", configs, error)) {
            std::fprintf(stderr, "%s\n", error.c_str());
            std::exit(2);
        }
        const int version = slow.device.registry->api_version;
        wrapper = std::make_unique<Wrapper>(engine().host, &slow.device, engine().cpu, configs[0], "TRIAL", version);
        shown.push_back(wrapper.get());
        fill_registry(registry, &shown, version);
        type = slow.device.iface.get_buffer_type(&slow.device);
        backend = wrapper->device.iface.init_backend(&wrapper->device, nullptr);
    }
    ~Wrapped() { backend->iface.free(backend); }

    SlowDevice slow;
    std::unique_ptr<Wrapper> wrapper;
    std::vector<Wrapper *> shown;
    Registry registry{};
    BufferType * type = nullptr;
    Backend * backend = nullptr;
};

// A token through layers of experts with other nodes in between, choices of its own in every layer.
struct Token {
    Token(Wrapped & on, const std::vector<std::unique_ptr<Layer>> & layers) : memory(engine().host, 2048, 2048) {
        const Host & h = engine().host;
        Context * c = memory.context;
        const Shape & shape = layers[0]->shape;
        Tensor * x = memory.tensor(kF32, {shape.n_in, 1, 1}, "input");
        for (const auto & layer : layers) {
            // Sorted by the graph itself, as routers do.
            Tensor * all = sorted(h, c, memory.tensor(kF32, {kExperts, 1}, "scores"));
            ids.push_back(all);
            Tensor * chosen = h.ggml_view_3d(c, all, kChosen, 1, 1, all->nb[1], all->nb[2], 0);
            for (int i = 0; i < kFiller; i++) {
                x = h.ggml_sqr(c, x);
            }
            Tensor * up = h.ggml_mul_mat_id(c, layer->up, x, chosen);
            Tensor * gate = h.ggml_mul_mat_id(c, layer->gate, x, chosen);
            Tensor * down = h.ggml_mul_mat_id(c, layer->down, h.ggml_swiglu_split(c, gate, up), chosen);
            x = h.ggml_view_3d(c, h.ggml_sqr(c, down), shape.n_in, 1, 1, down->nb[1], down->nb[2], 0);
        }
        graph = h.ggml_new_graph_custom(c, 2048, false);
        h.ggml_build_forward_expand(graph, x);
        graph->uid = h.ggml_graph_next_uid();
        memory.allocate(on.type);
    }

    // A share of the choices among the first experts, which have the slots.
    void choose(std::mt19937 & dice, int n_slots, int percent) {
        for (Tensor * all : ids) {
            std::vector<int32_t> values;
            while (values.size() < kExperts) {
                const bool hit = n_slots == kExperts || (n_slots && static_cast<int>(dice() % 100) < percent);
                const auto n = static_cast<unsigned>(hit ? n_slots : kExperts - n_slots);
                const auto expert = static_cast<int32_t>(dice() % n) + (hit ? 0 : n_slots);
                if (values.size() >= kChosen || std::find(values.begin(), values.end(), expert) == values.end()) {
                    values.push_back(expert);
                }
            }
            engine().host.ggml_backend_tensor_set(all, values.data(), 0, values.size() * sizeof(int32_t));
        }
    }

    trial::Memory memory;
    std::vector<Tensor *> ids;
    Graph * graph = nullptr;
};

std::vector<std::unique_ptr<Layer>> layers_of(Wrapped & on, const Shape & shape, int n) {
    std::vector<std::unique_ptr<Layer>> made;
    for (int block = 0; block < n; block++) {
        made.push_back(std::make_unique<Layer>(engine().host, shape, block, -1, on.wrapper->store.type, on.type));
    }
    return made;
}

void host_work(const char * what, const std::string & settings, int n_slots, int threads, int percent = 77) {
    Wrapped on(settings + "stage 0\nslots " + std::to_string(n_slots) + "\nthreads " + std::to_string(threads) + "\n");
    Shape shape;
    shape.type = kQ8;
    shape.n_in = 32;
    shape.n_hidden = 32;
    shape.n_experts = kExperts;
    {
        const auto layers = layers_of(on, shape, kLayers);
        Token token(on, layers);
        on.slow.idle = true;
        on.slow.copy_ns = on.slow.graph_ns = 0;
        std::mt19937 dice(1);
        std::vector<double> took;
        Calls before{}, & now = on.slow.calls;
        for (int turn = 0; turn < 400; turn++) {
            token.choose(dice, n_slots, percent);
            if (turn == 100) {  // plans are made, costs are measured
                before.graphs = now.graphs.load(), before.uploads = now.uploads.load(), before.reads = now.reads.load();
                before.waits = now.waits.load(), before.events = now.events.load();
            }
            const int64_t begin = thread_ns();
            on.backend->iface.graph_compute(on.backend, token.graph);
            if (turn >= 100) {
                took.push_back(static_cast<double>(thread_ns() - begin) / kLayers);
            }
        }
        std::sort(took.begin(), took.end());
        const double n = 300.0 * kLayers;
        const auto each = [&](std::atomic<int64_t> & a, std::atomic<int64_t> & b) { return static_cast<double>(a.load() - b.load()) / n; };
        std::printf("{\"what\":\"%s\",\"least_ns\":%.0f,\"ns\":%.0f,\"graphs\":%.2f,\"uploads\":%.2f,\"reads\":%.2f,\"waits\":%.2f,\"events\":%.2f}\n",
                    what, took[0], took[took.size() / 2], each(now.graphs, before.graphs), each(now.uploads, before.uploads),
                    each(now.reads, before.reads), each(now.waits, before.waits), each(now.events, before.events));
    }
}

// Experts of 2.65 MB, each read once before any is read again.
void lane(int threads) {
    Wrapped on("slots 0\nstage 0\nmemory plain\ncpu_bytes_us 20000\nthreads " + std::to_string(threads) + "\n");
    Shape shape;
    shape.type = kQ4K;
    shape.n_in = 2048;
    shape.n_hidden = 768;
    shape.n_experts = kExperts;
    {
        const auto layers = layers_of(on, shape, 3);
        Token token(on, layers);
        on.slow.idle = true;
        on.slow.copy_ns = on.slow.graph_ns = 0;
        std::mt19937 dice(1);
        std::vector<double> took;
        for (int turn = 0; turn < 30; turn++) {
            token.choose(dice, 0, 0);
            const int64_t begin = nanoseconds();
            on.backend->iface.graph_compute(on.backend, token.graph);
            took.push_back(static_cast<double>(nanoseconds() - begin));
        }
        std::sort(took.begin(), took.end());
        const double bytes = 3.0 * kChosen * 3 * 2048 * 768 / 256 * 144;
        std::printf("{\"what\":\"CPU lane, %d threads\",\"least_gb_s\":%.2f,\"gb_s\":%.2f,\"best_gb_s\":%.2f}\n", threads, bytes / took.back(),
                    bytes / took[took.size() / 2], bytes / took[0]);
    }
}

}  // namespace

int main(int n, char ** words) {
    if (n < 2) {
        return 2;
    }
    engine(words[1]);
    const std::string wanted = n > 2 ? words[2] : "host";
    if (wanted == "lane") {
        lane(1);
        lane(2);
        return 0;
    }
    const std::string cpu = "cpu_bytes_us 1000\n", both = "cpu_bytes_us 1000\nbus_bytes_us 900\nguests 2\n";
    host_work("all experts in slots", cpu, kExperts, 1);
    host_work("slots and CPU lane", cpu, 58, 1);
    host_work("slots, CPU lane and bus", both, 58, 1);
    // Nearly all choices, and all, by the seed: what slots that follow cost where the text changes nothing.
    const std::string follows = both + "policy lfu\nhalf_life 32\nupload_bytes 3264\nleast_misses 2\n";
    host_work("97 % of choices in slots", both, 58, 1, 97);
    host_work("97 %, slots that follow", follows, 58, 1, 97);
    host_work("all choices in slots", both, 58, 1, 100);
    host_work("all choices in slots, following", follows, 58, 1, 100);
    host_work("slots and CPU lane, 2 threads", cpu, 58, 2);
    host_work("CPU lane alone", cpu, 0, 1);
    return 0;
}
