// Tests of the native library on an engine's CPU backend: one name an argument, run under sanitizers by
// tests/test_hybrid_native.py. Usage: PROGRAM ENGINE_FOLDER [NAME...]
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <set>
#include <thread>

#include "config.h"
#include "device.h"
#include "engine.h"
#include "slow_device.h"
#include "stream.h"

using namespace trial;

namespace {

int failures = 0;

#define CHECK(what) \
    do { \
        if (!(what)) { \
            std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #what); \
            failures++; \
        } \
    } while (0)

constexpr double kClose = 1e-5;
constexpr double kQuantised = 0.03;  // activations of eight bits here, of more there
constexpr int kQ8 = 8;

// ---- parts

void reads_settings() {
    std::vector<Config> found;
    std::string error;
    CHECK(parse_config("# a comment\nslots 3\nguests 2\nmemory mapped\nresident 4 8 7,0,3\nresident 5 8 -\n", found, error));
    CHECK(found.size() == 1 && found[0].slots == 3 && found[0].guests == 2 && found[0].memory == hybrid::Memory::kMapped);
    CHECK(found[0].resident(4, 8)->experts == (std::vector<int32_t>{7, 0, 3}));
    CHECK(found[0].resident(5, 8)->experts.empty() && !found[0].resident(4, 9));
    CHECK(parse_config("device A\nslots 1\ndevice B\nreport /a folder/r.json\n", found, error));
    CHECK(found.size() == 2 && found[1].device == "B" && found[1].report == "/a folder/r.json" && found[1].slots == 0);
    for (const char * wrong : {"slots", "slots x", "slots -1", "slots 3 4", "resident 1 8 8", "resident 1 8 1,1", "resident 1 8 1,",
                               "resident 1 8", "memory disk", "quiet yes", "unknown 1", "resident 1 8 1\nresident 1 8 2"}) {
        CHECK(!parse_config(wrong, found, error) && error.find("line ") == 0);
    }
}

void knows_names() {
    int block;
    std::string kind;
    Role role;
    CHECK(expert_name("blk.12.ffn_gate_up_exps.weight", block, kind, role) && block == 12 && kind == "exps" && role == Role::kGateUp);
    CHECK(expert_name("blk.0.ffn_down_chexps.weight", block, kind, role) && kind == "chexps" && role == Role::kDown);
    for (const char * other : {"blk.0.ffn_gate_exps.bias", "blk.0.ffn_gate_exps.scale", "blk.0.ffn_norm_exps.weight", "blk.0.ffn_gate.weight",
                               "blk.0.ffn_gate_exps.weight.lora_a", "output.weight", "blk.x.ffn_up_exps.weight", "blk.0.ffn_up_shexp.weight", ""}) {
        CHECK(!expert_name(other, block, kind, role));
    }
}

// Every choice goes to exactly one lane, and the device can do what it is given.
void divides_choices() {
    std::mt19937 dice(1);
    Router router;
    Routing made;
    for (int turn = 0; turn < 3000; turn++) {
        const auto n = static_cast<int32_t>(1 + dice() % 16);
        std::vector<int32_t> slot_of(static_cast<size_t>(n), -1);
        int32_t n_slots = 0;
        for (int32_t e = 0; e < n; e++) {
            slot_of[static_cast<size_t>(e)] = dice() % 2 ? n_slots++ : -1;
        }
        const int64_t tokens = 1 + dice() % 5, places = 1 + dice() % n;
        auto chosen = random_choices(dice, tokens, places, n, dice() % 2);
        Choices choices{reinterpret_cast<const char *>(chosen.data()), 4, static_cast<size_t>(places) * 4, places, tokens};
        Table table{&slot_of, n, n_slots, static_cast<int32_t>(dice() % 4), static_cast<int32_t>(dice() % 2 ? n : 0), true, tokens == 1 && dice() % 2};
        const Costs costs{static_cast<int64_t>(1 + dice() % 100), static_cast<int64_t>(1 + dice() % 100), static_cast<int64_t>(dice() % 50)};
        CHECK(router.route(choices, table, costs, made).empty());
        CHECK(made.n_hits + made.n_uploaded + made.n_cpu == tokens * places);
        CHECK(made.n_cpu == static_cast<int64_t>(made.pairs.size()));
        const int32_t bank = made.bank == Bank::kStage ? table.n_stage : table.n_slots + table.n_guests;
        std::vector<int32_t> where = slot_of;
        std::set<int32_t> used;
        for (const Upload & upload : made.uploads) {
            CHECK(upload.position >= table.n_slots && upload.position < bank && used.insert(upload.position).second);
            where[static_cast<size_t>(upload.expert)] = upload.position;
        }
        std::set<std::pair<int32_t, int32_t>> by_cpu;
        for (const Pair & pair : made.pairs) {
            CHECK(pair.expert == choices.at(pair.token, pair.place) && by_cpu.insert({pair.token, pair.place}).second);
        }
        for (int32_t t = 0; made.device && t < tokens; t++) {
            std::set<int32_t> taken;
            for (int32_t p = 0; p < places; p++) {
                const int32_t position = made.positions[static_cast<size_t>(t * places + p)];
                CHECK(position >= 0 && position < bank);
                CHECK(taken.insert(position).second || table.may_repeat);
                CHECK(by_cpu.count({t, p}) || position == where[static_cast<size_t>(choices.at(t, p))]);
            }
        }
        CHECK(made.device || made.n_cpu == tokens * places);
    }
    std::vector<int32_t> slot_of(4, -1), outside{0, 4};
    Choices choices{reinterpret_cast<const char *>(outside.data()), 4, 8, 2, 1};
    CHECK(router.route(choices, Table{&slot_of, 4, 0, 0, 0, true, false}, Costs{}, made) == "expert 4 was chosen of 4");
    outside[1] = 1;
    CHECK(!router.route(choices, Table{&slot_of, 4, 0, 0, 0, false, false}, Costs{}, made).empty());
}

class Counting : public Job {
  public:
    explicit Counting(int64_t n) : seen(static_cast<size_t>(n)) { n_chunks = n; }
    void chunk(int64_t index, int) override { seen[static_cast<size_t>(index)]++; }
    std::vector<std::atomic<int>> seen;
};

void shares_work() {
    Pool pool;
    std::vector<std::thread> callers;
    for (int caller = 0; caller < 3; caller++) {
        callers.emplace_back([&] {
            for (int turn = 0; turn < 60; turn++) {
                pool.rouse(9);  // more than there are cores
                for (int n : {0, 1, 7, 200}) {
                    Counting job(n);
                    pool.run(job, 9);
                    for (auto & each : job.seen) {
                        CHECK(each == 1);
                    }
                }
                pool.rest();
            }
        });
    }
    for (auto & caller : callers) {
        caller.join();
    }
}

// ---- whole layers

struct Bench {
    Bench(const std::string & settings, bool slow, bool events = true, Device * other = nullptr) : slow_device(host(), engine().cpu, events) {
        std::vector<Config> configs;
        std::string error;
        CHECK(parse_config(settings + "\nquiet 1\nthreads 3\n", configs, error));
        Device * inner = other ? other : slow ? &slow_device.device : engine().cpu;
        wrapper = std::make_unique<Wrapper>(host(), inner, engine().cpu, configs[0], "TRIAL", inner->registry->api_version);
        shown.push_back(wrapper.get());
        fill_registry(registry, &shown, inner->registry->api_version);
        inner_type = inner->iface.get_buffer_type(inner);
    }

    static const Host & host() { return engine().host; }
    // One thread of the engine's own: its pool spins, and is not instrumented. The lane has its number in the settings.
    Backend * backend() {
        Backend * made = wrapper->device.iface.init_backend(&wrapper->device, nullptr);
        void * function = registry.iface.get_proc_address(&registry, "ggml_backend_set_n_threads");
        reinterpret_cast<void (*)(Backend *, int)>(function)(made, 1);
        return made;
    }

    SlowDevice slow_device;
    std::unique_ptr<Wrapper> wrapper;
    std::vector<Wrapper *> shown;
    Registry registry{};
    BufferType * inner_type;
};

struct Reference {
    explicit Reference(const Shape & shape, int seed)
        : type(engine().cpu->iface.get_buffer_type(engine().cpu)), layer(engine().host, shape, 0, seed, type, type),
          backend(engine().cpu->iface.init_backend(engine().cpu, nullptr)) {
        auto * registry = engine().cpu->registry;
        auto function = registry->iface.get_proc_address(registry, "ggml_backend_set_n_threads");
        reinterpret_cast<void (*)(Backend *, int)>(function)(backend, 1);
    }
    ~Reference() { engine().host.ggml_backend_free(backend); }

    std::vector<float> compute(int64_t tokens, int64_t places, const std::vector<float> & x, const std::vector<int32_t> & ids, bool shared) {
        Pass pass(engine().host, layer, tokens, places, type, shared);
        pass.set(backend, x, ids);
        CHECK(pass.compute(backend) == kSuccess);
        return pass.output(backend);
    }

    BufferType * type;
    Layer layer;
    Backend * backend;
};

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
    for (int turn = 0; turn < (other ? 20 : 60); turn++) {
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

// Steps of one token, every so often one of many; tokens of a step are computed by so many experts each.
struct Steps {
    int count, every;
    int64_t places, many, places_of_many;
};

// A context of its own: every result is that of the layer without slots, whatever others do meanwhile.
void one_and_many(Bench & bench, const Shape & shape, Layer & layer, unsigned number, const Steps & steps,
                  const std::function<void()> & stepped = [] {}) {
    Reference reference(shape, 5);
    std::mt19937 dice(number);
    Backend * backend = bench.backend();
    {
        Pass one(Bench::host(), layer, 1, steps.places, bench.inner_type);
        Pass many(Bench::host(), layer, steps.many, steps.places_of_many, bench.inner_type);
        for (int step = 0; step < steps.count; step++) {
            Pass & pass = step % steps.every == steps.every - 1 ? many : one;
            const int64_t tokens = pass.ids->ne[1], places = pass.ids->ne[0];
            const auto x = random_values(dice, static_cast<size_t>(shape.n_in * tokens));
            const auto ids = random_choices(dice, tokens, places, shape.n_experts, true);
            pass.set(backend, x, ids);
            CHECK(pass.compute(backend, step % 7 == 6) == kSuccess);
            CHECK(difference(reference.compute(tokens, places, x, ids, true), pass.output(backend)) < kClose);
            stepped();
        }
    }
    backend->iface.free(backend);
}

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

// Several layers of one buffer type, each block its own values.
struct Layers {
    Layers(const Shape & shape, int n, BufferType * weights_type, BufferType * bias_type) {
        for (int block = 0; block < n; block++) {
            made.push_back(std::make_unique<Layer>(Bench::host(), shape, block, 31 + block, weights_type, bias_type));
            all.push_back(made.back().get());
        }
    }
    std::vector<std::unique_ptr<Layer>> made;
    std::vector<Layer *> all;
};

// A prompt through layers of which most experts are brought, against the CPU alone; `n` batches of several sizes.
void pass_prompts(Bench & bench, const Layers & layers, int n, unsigned seed) {
    const Shape & shape = layers.all[0]->shape;
    const Reference cpu(shape, 0);
    const Layers plain(shape, static_cast<int>(layers.all.size()), cpu.type, cpu.type);
    std::mt19937 dice(seed);
    Backend * backend = bench.backend();
    for (int turn = 0; turn < n; turn++) {
        const int64_t tokens = turn % 4 == 3 ? 1 : 10 + dice() % 8, places = 4;
        Pass pass(Bench::host(), layers.all, tokens, places, bench.inner_type), same(Bench::host(), plain.all, tokens, places, cpu.type);
        for (int again = 0; again < 2; again++) {
            const auto x = random_values(dice, static_cast<size_t>(shape.n_in * tokens));
            const int64_t named = again && turn % 3 == 0 ? shape.n_experts / 2 : shape.n_experts;  // half of them at times
            const auto ids = random_choices(dice, tokens, places, named, turn % 5 != 4);
            same.set(cpu.backend, x, ids);
            pass.set(backend, x, ids);
            CHECK(same.compute(cpu.backend) == kSuccess && pass.compute(backend) == kSuccess);
            CHECK(difference(same.output(cpu.backend), pass.output(backend)) < kClose);
        }
    }
    backend->iface.free(backend);
}

int64_t counted(Bench & bench, const std::string & what) {
    const std::string said = bench.wrapper->report(), key = "\"" + what + "\":";
    int64_t sum = 0;
    for (size_t at = said.find(key); at != std::string::npos; at = said.find(key, at + 1)) {
        sum += std::atoll(said.c_str() + at + key.size());
    }
    return sum;
}

void prompts_ahead() {
    const std::string costs = "cpu_tokens 4\ncpu_bytes_us 1\nbus_bytes_us 1000000\n";
    for (int n_slots = 0; n_slots < 8; n_slots += 3) {
        for (int variant = 0; variant < 4; variant++) {
            Shape shape;
            shape.fused = variant == 1;
            const bool two = variant != 2, events = variant != 3;
            Bench bench(costs + "slots " + std::to_string(n_slots) + "\nguests 1\nbanks " + (two ? "2" : "1"), true, events);
            const Layers layers(shape, 5, bench.wrapper->store.type, bench.inner_type);
            pass_prompts(bench, layers, 8, static_cast<unsigned>(n_slots));
            CHECK(counted(bench, "staged") > 0);
            // Both banks were used where there are two and events order them.
            const int64_t bank = static_cast<int64_t>(bench.host().ggml_nbytes(layers.all[0]->up)) * (shape.fused ? 1 : 2) +
                                 static_cast<int64_t>(bench.host().ggml_nbytes(layers.all[0]->down));
            const int64_t wanted = two && events ? 2 * bank : bank;
            CHECK(counted(bench, "stage_bytes") >= wanted && counted(bench, "stage_bytes") < wanted + bank / 2);
        }
    }
}

// Contexts whose prompts take turns at the stage while the residents change, one of whose devices fails.
void prompts_of_many() {
    Shape shape;
    Bench bench("cpu_tokens 4\ncpu_bytes_us 1000\nbus_bytes_us 1000\nslots 3\nguests 2\n", true);
    const Layers layers(shape, 4, bench.wrapper->store.type, bench.inner_type);
    std::atomic<int> running{3};
    std::vector<std::thread> threads;
    for (unsigned number = 0; number < 3; number++) {
        threads.emplace_back([&, number] {
            pass_prompts(bench, layers, 10, number);
            running--;
        });
    }
    threads.emplace_back([&] {
        std::mt19937 dice(5);
        while (running > 0) {
            const int block = static_cast<int>(dice() % 4);
            CHECK(bench.wrapper->store.set_residents(0, block, "exps", random_choices(dice, 1, 3, shape.n_experts, true)).empty());
            std::this_thread::yield();
        }
    });
    for (auto & thread : threads) {
        thread.join();
    }
    Backend * backend = bench.backend();
    {
        Pass pass(Bench::host(), layers.all, 12, 4, bench.inner_type);
        std::mt19937 dice(1);
        pass.set(backend, random_values(dice, 12 * 64), random_choices(dice, 12, 4, 8, true));
        for (int left = 0; left < 9; left++) {
            bench.slow_device.n_fail_after = bench.slow_device.n_graphs.load() + left;
            CHECK(pass.compute(backend) == kFailed);
            bench.slow_device.n_fail_after = -1;
            CHECK(pass.compute(backend) == kSuccess);
            (void)pass.output(backend);
        }
    }
    backend->iface.free(backend);
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
                                    "policy lfu\nhalf_life 4\nprotect 1\nupload_bytes 20000\n"};
    std::string forced = "policy schedule\n";
    for (int step = 0; step < 100; step++) {
        for (int expert = 0; expert < 8; expert++) {
            forced += "move " + std::to_string(step) + " 0 " + std::to_string((step + expert) % 8) + " " + std::to_string(step % 4) + "\n";
        }
    }
    for (const std::string & policy : {changing[0], changing[1], forced}) {
        for (int kind = 0; kind < 4; kind++) {
            const char * lanes = kind % 2 ? "guests 2\nstage -1\ncpu_bytes_us 1000\nbus_bytes_us 1000000\n" : "stage 0\n";
            follow_in_threads(policy + lanes + "lockstep " + (kind / 2 ? "1" : "0") + "\n", kind != 3);
        }
    }
}

// Prompts whose experts are brought ahead, in contexts whose single tokens exchange them.
void prompts_while_slots_follow() {
    for (const char * policy : {"policy lru\nupload_bytes 1000000000\n", "policy lfu\nhalf_life 4\nupload_bytes 60000\nlockstep 1\n"}) {
        Shape shape;
        Bench bench(std::string("cpu_tokens 4\ncpu_bytes_us 1\nbus_bytes_us 1000000\nslots 5\nguests 1\n") + policy, true);
        const Layers layers(shape, 4, bench.wrapper->store.type, bench.inner_type);
        std::vector<std::thread> threads;
        for (unsigned number = 0; number < 3; number++) {
            threads.emplace_back([&, number] { pass_prompts(bench, layers, 12, number); });
        }
        for (auto & thread : threads) {
            thread.join();
        }
        CHECK(counted(bench, "admitted") > 0 && counted(bench, "staged") > 0);
    }
}

// With bytes enough, the slots hold the experts that were used last; with a half-life that never ends, those used most.
void scores_are_kept() {
    std::mt19937 dice(3);
    for (const Policy policy : {Policy::kLru, Policy::kLfu}) {
        Adaptation how;
        how.policy = policy;
        how.half_life = 1 << 14;
        how.upload_bytes = 1 << 20;
        std::vector<int32_t> slot_of(16, -1), expert_in{3, 1, 2, 0, 9};
        for (size_t slot = 0; slot < expert_in.size(); slot++) {
            slot_of[static_cast<size_t>(expert_in[slot])] = static_cast<int32_t>(slot);
        }
        const std::vector<char> sent(16, 0);
        Scores scores(how, 0, 16, expert_in);
        std::vector<double> known(16, -1000.0);
        for (size_t rank = 0; rank < expert_in.size(); rank++) {
            const double start = policy == Policy::kLru ? -1.0 - static_cast<double>(rank) : (1 << 11) * (1.0 - static_cast<double>(rank) / 5);
            known[static_cast<size_t>(expert_in[rank])] = start;
        }
        for (int step = 0; step < 200; step++) {
            const auto ids = random_choices(dice, 1, 3, 16, true);
            scores.step(Choices{reinterpret_cast<const char *>(ids.data()), 4, 12, 3, 1}, 100);
            for (size_t p = 0; p < 3; p++) {
                double & score = known[static_cast<size_t>(ids[p])];
                score = policy == Policy::kLru ? step * 10.0 + 9.0 - static_cast<double>(p) : std::max(score, 0.0) + std::exp2(step / 16384.0);
            }
            Admission found{};
            while (scores.next(slot_of, expert_in, sent, found)) {
                const auto slot = static_cast<size_t>(found.slot);
                CHECK(std::find(ids.begin(), ids.end(), expert_in[slot]) == ids.end());
                slot_of[static_cast<size_t>(expert_in[slot])] = -1;
                slot_of[static_cast<size_t>(found.expert)] = found.slot;
                expert_in[slot] = found.expert;
            }
            double least = 1e9, best = -1e9;
            for (size_t e = 0; e < 16; e++) {
                const bool chosen = std::find(ids.begin(), ids.end(), static_cast<int32_t>(e)) != ids.end();
                least = slot_of[e] >= 0 && !chosen ? std::min(least, known[e]) : least;
                best = slot_of[e] < 0 ? std::max(best, known[e]) : best;
            }
            CHECK(best <= least + 0.02);
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
    CHECK(counted(bench, "hits") == 3 * 3 * 8 && counted(bench, "steps") == 9);
    backend->iface.free(backend);
}

// A device that has memory for so many buffers only: slots that do not fit are said in one line, a stage that does not is done
// without, and nothing is left behind.
void memory_is_refused() {
    Shape shape;
    const std::string costs = "slots 3\ncpu_tokens 4\ncpu_bytes_us 1\nbus_bytes_us 1000000\nstage ";
    for (const bool with_stage : {true, false}) {
        for (int left = 0; left < 12; left++) {
            Bench bench(costs + (with_stage ? "-1" : "0"), true);
            const std::string before = bench.wrapper->store.voice.last_fault();
            const int there = bench.slow_device.n_buffers;
            Reference reference(shape, 5);
            Backend * backend = bench.backend();
            {
                bench.slow_device.n_left = left;
                Layer layer(Bench::host(), shape, 0, 5, bench.wrapper->store.type, bench.inner_type);
                const std::string said = bench.wrapper->store.voice.last_fault();
                // Slots are made again as matrices come; a bias lies on the device too.
                CHECK(layer.ok == (left >= 4));
                const bool fits = said.empty();
                CHECK(fits || (said.find("on the device for 3 slots of blk.0.ffn_") != std::string::npos && said.find('\n') == std::string::npos));
                CHECK(fits == (left >= 3));
                if (layer.ok) {
                    bench.slow_device.n_left = -1;
                    Pass pass(Bench::host(), layer, 12, 4, bench.inner_type);
                    std::mt19937 dice(3);
                    const auto x = random_values(dice, static_cast<size_t>(shape.n_in * 12));
                    const auto ids = random_choices(dice, 12, 4, shape.n_experts, true);
                    pass.set(backend, x, ids);
                    bench.slow_device.n_left = left - 4;
                    const Status status = pass.compute(backend);
                    bench.slow_device.n_left = -1;
                    CHECK(status == kSuccess || (status == kAllocFailed && !bench.wrapper->store.voice.last_fault().empty()));
                    if (status == kSuccess) {
                        CHECK(difference(reference.compute(12, 4, x, ids, true), pass.output(backend)) < kClose);
                    }
                    CHECK(left < 11 || status == kSuccess);
                }
            }
            backend->iface.free(backend);
            bench.wrapper.reset();
            CHECK(bench.slow_device.n_buffers == there);
        }
    }
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
        (void)pass.output(backend);
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

const std::pair<const char *, void (*)()> kTests[] = {
    {"reads_settings", reads_settings},
    {"knows_names", knows_names},
    {"divides_choices", divides_choices},
    {"shares_work", shares_work},
    {"any_layer_on_the_cpu", any_layer_on_the_cpu},
    {"any_layer_on_a_slow_device", any_layer_on_a_slow_device},
    {"any_layer_on_a_device", any_layer_on_a_device},
    {"threads_and_changes", threads_and_changes},
    {"prompts_ahead", prompts_ahead},
    {"prompts_of_many", prompts_of_many},
    {"slots_follow", slots_follow},
    {"prompts_while_slots_follow", prompts_while_slots_follow},
    {"scores_are_kept", scores_are_kept},
    {"begins_ahead", begins_ahead},
    {"guests_come_in_one_piece", guests_come_in_one_piece},
    {"is_not_cut_where_all_is_resident", is_not_cut_where_all_is_resident},
    {"memory_is_refused", memory_is_refused},
    {"faults_are_returned", faults_are_returned},
    {"reports_what_was_done", reports_what_was_done},
};

}  // namespace

int main(int n, char ** words) {
    if (n < 2) {
        for (const auto & [name, test] : kTests) {
            std::puts(name);
        }
        return 0;
    }
    engine(words[1]);
    for (const auto & [name, test] : kTests) {
        bool wanted = n == 2 && test != any_layer_on_a_device;
        for (int i = 2; i < n; i++) {
            wanted = wanted || std::strcmp(words[i], name) == 0;
        }
        if (wanted) {
            test();
            std::printf("%s %s\n", name, failures ? "failed" : "ok");
            std::fflush(stdout);
        }
    }
    return failures ? 1 : 0;
}
