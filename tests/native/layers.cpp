// Whole layers in one context: any shape, any residents, and what the device is asked for meanwhile.
#include <cstdlib>
#include <new>
#include <stdexcept>

#include "bench.h"

namespace trial {

namespace {

std::string some_settings(std::mt19937 & dice) {
    const char * stage[] = {"0", "-1", "5"};
    const char * costs[] = {"cpu_bytes_us 1000\nbus_bytes_us 1000\n", "cpu_bytes_us 1\nbus_bytes_us 1000000\n",
                            "cpu_bytes_us 1000000\nbus_bytes_us 1\n", ""};
    std::string text = "slots " + std::to_string(dice() % 9) + "\nguests " + std::to_string(dice() % 4);
    text += std::string("\nstage ") + stage[dice() % 3] + "\n" + costs[dice() % 4];
    return text + "regions " + (dice() % 4 ? "1" : "0") + "\n";
}

void any_layer(bool slow, Device * other = nullptr, double close = kClose) {
    // The software Vulkan device ends by itself with more tokens at once.
    const int64_t most_tokens = other ? 4 : 12;
    std::mt19937 dice(7);
    const char * turns = std::getenv("TRIAL_TURNS");  // settings and shapes to try
    for (int turn = 0; turn < (other ? 20 : turns ? std::atoi(turns) : 60); turn++) {
        Shape shape;
        shape.fused = dice() % 3 == 0;
        shape.biased = dice() % 3 == 0;
        shape.type = other && dice() % 2 ? kQ8 : kF32;
        const std::string settings = some_settings(dice);
        Bench bench(settings, slow, dice() % 3 != 0, other);
        Reference reference(shape, turn);
        Backend * backend = bench.backend();
        {
            Layer layer(Bench::host(), shape, 0, turn, bench.wrapper->store.type, bench.inner_type);
            CHECK(layer.ok);
            for (int step = 0; step < 6; step++) {
                const int64_t tokens = dice() % 2 ? 1 : 1 + dice() % most_tokens;
                const int64_t places = step == 0 ? shape.n_experts : 1 + dice() % shape.n_experts;
                const bool shared = dice() % 2, cut = dice() % 4 == 0, sorts = other && dice() % 2;
                Pass pass(Bench::host(), layer, tokens, places, bench.inner_type, shared, sorts);
                for (int again = 0; again < 2; again++) {
                    const auto x = random_values(dice, static_cast<size_t>(shape.n_in * tokens * (shared ? 1 : places)));
                    const auto ids = random_choices(dice, tokens, places, shape.n_experts, dice() % 4 != 0 || other);
                    pass.set(backend, x, ids);
                    CHECK(pass.compute(backend, cut) == kSuccess);
                    const double apart = difference(reference.compute(tokens, places, x, ids, shared), pass.output(backend));
                    if (!(apart < (shape.type == kF32 ? close : kQuantised))) {
                        std::fprintf(stderr, "turn %d step %d: %g apart, %d tokens, %d places, cut %d, %s", turn, step, apart,
                                     static_cast<int>(tokens), static_cast<int>(places), cut, settings.c_str());
                        failures++;
                    }
                }
            }
        }
        backend->iface.free(backend);
    }
}

void any_layer_on_the_cpu() { any_layer(false); }
void any_layer_on_a_slow_device() { any_layer(true); }

// The device that TRIAL_DEVICE_LIBRARY names; its kernels may round to fewer bits.
void any_layer_on_a_device() {
    CHECK(engine().device);
    if (engine().device) {
        any_layer(false, engine().device, 5e-3);
    }
}

// Layers of that device's own memory and queue, with nothing of ours in between: what ends here is no fault of ours.
void the_device_by_itself() {
    CHECK(engine().device);
    if (!engine().device) {
        return;
    }
    Device * device = engine().device;
    BufferType * type = device->iface.get_buffer_type(device);
    std::mt19937 dice(7);
    for (int turn = 0; turn < 20; turn++) {
        const Shape shape;
        Backend * backend = device->iface.init_backend(device, nullptr);
        {
            Layer layer(Bench::host(), shape, 0, turn, type, type);
            for (int step = 0; step < 6; step++) {
                const int64_t tokens = 1 + dice() % 4, places = 1 + dice() % shape.n_experts;
                Pass pass(Bench::host(), layer, tokens, places, type);
                const auto x = random_values(dice, static_cast<size_t>(shape.n_in * tokens));
                const auto ids = random_choices(dice, tokens, places, shape.n_experts, true);
                pass.set(backend, x, ids);
                CHECK(pass.compute(backend) == kSuccess);
                CHECK(pass.output(backend).size() == static_cast<size_t>(shape.n_in * tokens * places));
            }
        }
        backend->iface.free(backend);
    }
}

// Three matrices of one expert come in one copy where they are of one shape, or by themselves.
void guests_come_in_one_piece() {
    for (const char * merge : {"1", "0"}) {
        Shape shape;
        shape.n_hidden = shape.n_in;
        Bench bench(std::string("slots 2\nguests 2\nstage 0\ncpu_bytes_us 1\nbus_bytes_us 1000000\nmerge ") + merge, true);
        Reference reference(shape, 5);
        Layer layer(Bench::host(), shape, 0, 5, bench.wrapper->store.type, bench.inner_type);
        Backend * backend = bench.backend();
        {
            Pass pass(Bench::host(), layer, 1, 4, bench.inner_type);
            std::mt19937 dice(2);
            for (int step = 0; step < 6; step++) {
                const auto x = random_values(dice, static_cast<size_t>(shape.n_in));
                const std::vector<int32_t> ids{0, 4 + step % 4, 1, 2 + step % 2};
                pass.set(backend, x, ids);
                const int64_t before = bench.slow_device.calls.uploads;
                CHECK(pass.compute(backend) == kSuccess);
                // Two guests, and the renamed choices.
                CHECK(step == 0 || bench.slow_device.calls.uploads - before == (*merge == '1' ? 2 : 6) + 1);
                CHECK(difference(reference.compute(1, 4, x, ids, true), pass.output(backend)) < kClose);
            }
        }
        backend->iface.free(backend);
    }
}

// Lanes are measured in the first step and, as told there, in the 500th after it, not in between: twenty experts come by the
// bus then that nobody chose, and are not counted as brought. Costs that are given are never measured.
void lanes_are_measured_again() {
    const std::string guests = "slots 3\nguests 1\nstage 0\n", none = "slots 3\nguests 0\nstage -1\ncpu_bytes_us 1000000000\n";
    for (const std::string & settings : {guests, guests + "cpu_bytes_us 1000\nbus_bytes_us 1000\n", none, none + "bus_bytes_us 1000\n"}) {
        const bool given = settings.find("bus_bytes_us") != std::string::npos;
        const int tokens = settings.find("guests 0") != std::string::npos ? 2 : 1;  // without guests the bus brings batches only
        Shape shape;
        Bench bench(settings, true);
        Layer layer(Bench::host(), shape, 0, 5, bench.wrapper->store.type, bench.inner_type);
        Backend * backend = bench.backend();
        {
            Pass pass(Bench::host(), layer, tokens, 2, bench.inner_type);
            const std::vector<int32_t> ids{0, 2, 1, 2};
            pass.set(backend, std::vector<float>(static_cast<size_t>(shape.n_in * tokens), 1.0f), {ids.begin(), ids.begin() + 2 * tokens});
            CHECK(pass.compute(backend) == kSuccess);
            (void)pass.output(backend);
            bench.slow_device.idle = true;  // only what reaches the device counts from here on
            const auto one = static_cast<int64_t>(layer.up->nb[2] + layer.gate->nb[2] + layer.down->nb[2]);
            for (int step = 1; step < 505; step++) {
                const int64_t before = bench.slow_device.calls.bytes;
                CHECK(pass.compute(backend) == kSuccess);
                const int64_t experts = (bench.slow_device.calls.bytes - before) / one;
                CHECK(experts == (step == 500 && !given ? 20 : 0));
            }
            CHECK(bench.counted("uploads") == 0 && bench.counted("upload_bytes") == 0);
        }
        backend->iface.free(backend);
    }
}

// Where every expert has a slot, the graph is the device's as a whole.
void is_not_cut_where_all_is_resident() {
    Shape shape;
    Bench bench("slots 8\n", true);
    const Reference cpu(shape, 0);
    const Layers layers(shape, 3, bench.wrapper->store.type, bench.inner_type), plain(shape, 3, cpu.type, cpu.type);
    Backend * backend = bench.backend();
    {
        Pass pass(Bench::host(), layers.all, 2, 4, bench.inner_type), same(Bench::host(), plain.all, 2, 4, cpu.type);
        std::mt19937 dice(2);
        for (int step = 0; step < 3; step++) {
            const auto x = random_values(dice, static_cast<size_t>(shape.n_in * 2));
            const auto ids = random_choices(dice, 2, 4, shape.n_experts, true);
            pass.set(backend, x, ids);
            same.set(cpu.backend, x, ids);
            const int before = bench.slow_device.n_graphs;
            CHECK(pass.compute(backend) == kSuccess && same.compute(cpu.backend) == kSuccess);
            CHECK(bench.slow_device.n_graphs - before == 1);
            CHECK(difference(same.output(cpu.backend), pass.output(backend)) < kClose);
            CHECK(bench.wrapper->store.owns(layers.all[0]->up));
        }
        CHECK(pass.out->src[0] == layers.all[2]->down);  // put back
    }
    CHECK(bench.counted("hits") == 3 * 3 * 8 && bench.counted("steps") == 9);
    backend->iface.free(backend);
}

void faults_are_returned() {
    Shape shape;
    Bench bench("slots 3\n", true);
    Layer layer(Bench::host(), shape, 0, 5, bench.wrapper->store.type, bench.inner_type);
    Backend * backend = bench.backend();
    {
        Pass pass(Bench::host(), layer, 1, 2, bench.inner_type);
        pass.set(backend, std::vector<float>(64, 1.0f), {3, 8});
        CHECK(pass.compute(backend) == kFailed);
        CHECK(bench.wrapper->store.voice.last_fault() == "expert 8 was chosen of 8");
        pass.set(backend, std::vector<float>(64, 1.0f), {3, -1});
        CHECK(pass.compute(backend, true) == kFailed);
        pass.set(backend, std::vector<float>(64, 1.0f), {3, 1});
        CHECK(pass.compute(backend) == kSuccess);
        const Tensor * before = pass.out->src[0];
        bench.slow_device.n_fail_after = bench.slow_device.n_graphs.load();
        CHECK(pass.compute(backend) == kFailed);
        CHECK(pass.out->src[0] == before);  // put back all the same
        bench.slow_device.n_fail_after = -1;
        CHECK(pass.compute(backend) == kSuccess);
        // What the device throws is its own fault, whatever it is; memory that is out is none.
        const int64_t faults = bench.wrapper->store.voice.n_faults();
        const auto thrown = [&](std::function<void()> what, Status status, const std::string & said) {
            bench.slow_device.throws = std::move(what);
            CHECK(pass.compute(backend) == status);
            CHECK(bench.wrapper->store.voice.last_fault() == said);
            CHECK(pass.out->src[0] == before && pass.compute(backend) == kSuccess);
        };
        thrown([] { throw std::runtime_error("the device\nis lost"); }, kFailed, "a step: the device is lost");
        thrown([] { throw 7; }, kFailed, "a step: a fault of the inner device");
        thrown([] { throw std::bad_alloc(); }, kAllocFailed, "no host memory for a step");
        CHECK(bench.wrapper->store.voice.n_faults() == faults + 3);
        bench.wrapper->store.voice.lacks("a report");
        CHECK(bench.wrapper->store.voice.n_faults() == faults + 3);
        (void)pass.output(backend);
    }
    backend->iface.free(backend);
}

// Each layer has the guests of its own line, or as many as the others: none, one, three of at most two, and two.
void guests_differ_by_layer() {
    Bench bench("guests 2\nstage 0\nresident 0 8 5,1,6 0\nresident 1 8 0,2 1\nresident 2 8 0,1,2,3,4,5 3\nresident 3 8 4,7\n", true);
    Backend * backend = bench.backend();
    Shape shape;
    std::mt19937 dice(3);
    {
        std::vector<std::unique_ptr<Layer>> layers;
        for (int block = 0; block < 4; block++) {
            layers.push_back(std::make_unique<Layer>(Bench::host(), shape, block, 5, bench.wrapper->store.type, bench.inner_type));
            Reference reference(shape, 5);
            Pass pass(Bench::host(), *layers.back(), 1, 4, bench.inner_type);
            for (int step = 0; step < 6; step++) {
                const auto x = random_values(dice, 64);
                const auto ids = random_choices(dice, 1, 4, shape.n_experts, true);
                pass.set(backend, x, ids);
                CHECK(pass.compute(backend) == kSuccess);
                CHECK(difference(reference.compute(1, 4, x, ids, true), pass.output(backend)) < kClose);
            }
        }
        const std::string said = bench.wrapper->report();
        size_t at = 0;
        for (const char * each : {"\"slots\":3,\"guests\":0", "\"slots\":2,\"guests\":1", "\"slots\":6,\"guests\":2", "\"slots\":2,\"guests\":2"}) {
            at = said.find(each, at);
            CHECK(at != std::string::npos);
        }
    }
    backend->iface.free(backend);
}

void reports_what_was_done() {
    Shape shape;
    Bench bench("slots 4\nguests 0\nstage 0\n", true);
    auto layer = std::make_unique<Layer>(Bench::host(), shape, 3, 5, bench.wrapper->store.type, bench.inner_type);
    Backend * backend = bench.backend();
    {
        Pass pass(Bench::host(), *layer, 1, 4, bench.inner_type);
        pass.set(backend, std::vector<float>(64, 1.0f), {0, 1, 6, 7});
        CHECK(pass.compute(backend) == kSuccess && pass.compute(backend) == kSuccess);
        Pass all(Bench::host(), *layer, 1, 8, bench.inner_type);
        all.set(backend, std::vector<float>(64, 1.0f), {0, 1, 2, 3, 4, 5, 6, 7});
        CHECK(all.compute(backend) == kSuccess);
        (void)all.output(backend);
    }
    const std::string said = bench.wrapper->report();
    CHECK(said.find("\"hits\":4,\"uploaded\":0,\"cpu\":4,\"all_at_once\":8") != std::string::npos);
    CHECK(said.find("\"chosen\":[2,2,0,0,0,0,2,2]") != std::string::npos);
    CHECK(said.find("\"resident\":[0,1,2,3]") != std::string::npos && said.find("\"freed\":[]") != std::string::npos);
    backend->iface.free(backend);
    layer.reset();
    CHECK(bench.wrapper->report().find("\"blocks\":[],\"freed\":[{\"model\":0,\"block\":3") != std::string::npos);
    CHECK(bench.wrapper->report().find("\"host_bytes\":0,") != std::string::npos);
}

}  // namespace

const Tests kLayers = {
    {"any_layer_on_the_cpu", any_layer_on_the_cpu},
    {"any_layer_on_a_slow_device", any_layer_on_a_slow_device},
    {"any_layer_on_a_device", any_layer_on_a_device},
    {"the_device_by_itself", the_device_by_itself},
    {"guests_come_in_one_piece", guests_come_in_one_piece},
    {"lanes_are_measured_again", lanes_are_measured_again},
    {"is_not_cut_where_all_is_resident", is_not_cut_where_all_is_resident},
    {"faults_are_returned", faults_are_returned},
    {"guests_differ_by_layer", guests_differ_by_layer},
    {"reports_what_was_done", reports_what_was_done},
};

}  // namespace trial
