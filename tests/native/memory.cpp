// Memory that is refused, of the device and of the host.
#include <dlfcn.h>

#include <cstdlib>
#include <new>

#include "bench.h"

extern "C" const char __executable_start, etext;

namespace {

// Whether an allocation is the library's: it is part of this program here, the engine is not. What the C++ library
// allocates by code of its own (text that grows) comes from elsewhere, and is never refused.
bool is_refused(const void * caller) {
    using namespace trial;
    const char * at = static_cast<const char *>(caller);
    if (!in_library || allocations_left < 0 || at < &__executable_start || at >= &etext) {
        return false;
    }
    return allocations_left == 0 || allocations_left-- == 0;
}

}  // namespace

// Not inline, or the compiler sees memory that new made be freed by free.
__attribute__((noinline)) void * operator new(size_t size) {
    void * made = is_refused(__builtin_return_address(0)) ? nullptr : std::malloc(size ? size : 1);
    if (!made) {
        throw std::bad_alloc();
    }
    return made;
}

__attribute__((noinline)) void operator delete(void * memory) noexcept { std::free(memory); }
__attribute__((noinline)) void operator delete(void * memory, size_t) noexcept { std::free(memory); }

namespace trial {

namespace {

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

constexpr int kChoices = 4;

// One allocation of the library after the other is refused, while a model is loaded.
void refuse_while_loading(Bench & bench) {
    bool refused = true;
    for (int64_t left = 0; refused; left++) {
        Memory weights(Bench::host());
        weights.tensor(kF32, {64, 96, 8}, "blk.0.ffn_up_exps.weight");
        weights.tensor(kF32, {64, 8}, "blk.0.ffn_up_exps.bias");
        weights.tensor(kF32, {96, 64, 8}, "blk.0.ffn_down_exps.weight");
        allocations_left = left;
        refused = !weights.allocate(bench.wrapper->store.type, true);
        allocations_left = -1;
        CHECK(!refused || bench.wrapper->store.voice.last_fault().find("no host memory for ") == 0);
    }
}

// And in a context's first step: the same step then works. Choices change, or nothing would follow them.
void refuse_in_a_step(Bench & bench, const Layers & layers, const Layers & plain, const Reference & cpu, int64_t tokens) {
    const auto begins = [&](const char * what) { return bench.wrapper->store.voice.last_fault().find(what) == 0; };
    std::mt19937 dice(4);
    const auto x = random_values(dice, static_cast<size_t>(layers.all[0]->shape.n_in * tokens));
    Pass pass(Bench::host(), layers.all, tokens, 4, bench.inner_type), same(Bench::host(), plain.all, tokens, 4, cpu.type);
    std::vector<std::vector<int32_t>> choices;
    std::vector<std::vector<float>> right;
    for (int i = 0; i < kChoices; i++) {
        choices.push_back(random_choices(dice, tokens, 4, layers.all[0]->shape.n_experts, true));
        same.set(cpu.backend, x, choices.back());
        CHECK(same.compute(cpu.backend) == kSuccess);
        right.push_back(same.output(cpu.backend));
    }
    int64_t left = 0;
    for (int through = 0; through < kChoices; left++) {  // with all of them nothing was refused
        const auto turn = static_cast<size_t>(left % kChoices);
        allocations_left = left;
        Backend * backend = bench.backend();
        const int64_t rest = allocations_left;
        allocations_left = -1;
        if (!backend) {
            CHECK(begins("no host memory for a context"));
            continue;
        }
        pass.set(backend, x, choices[turn]);
        allocations_left = rest;
        const Status status = pass.compute(backend);
        const bool refused = allocations_left == 0;
        allocations_left = -1;
        through = refused ? 0 : through + 1;
        CHECK(status == kSuccess || (status == kAllocFailed && begins("no host memory for ") && pass.compute(backend) == kSuccess));
        CHECK(difference(right[turn], pass.output(backend)) < kClose);
        backend->iface.free(backend);
    }
}

// Each refusal is one line and leaves all as it was.
void host_memory_is_refused() {
    Shape shape;
    const std::string follows = "slots 6\npolicy lru\nupload_bytes 1000000000\nrefill_bytes 1000000000\n";
    const std::pair<std::string, int64_t> lanes[] = {{"slots 3\nguests 2\ncpu_bytes_us 1000\nbus_bytes_us 1000\nstage 0\n", 1},
                                                     {"slots 3\nguests 1\ncpu_tokens 4\ncpu_bytes_us 1\nbus_bytes_us 1000000\n", 12},
                                                     {follows + "guests 0\nstage 0\n", 1},
                                                     {follows + "guests 2\ncpu_bytes_us 1\nbus_bytes_us 1000000\nstage 0\n", 1}};
    for (const auto & [settings, tokens] : lanes) {
        Bench bench(settings, true);
        const Reference cpu(shape, 0);
        const int there = bench.slow_device.n_buffers;
        refuse_while_loading(bench);
        CHECK(bench.slow_device.n_buffers == there && bench.counted("host_bytes") == 0);
        const Layers layers(shape, 2, bench.wrapper->store.type, bench.inner_type), plain(shape, 2, cpu.type, cpu.type);
        refuse_in_a_step(bench, layers, plain, cpu, tokens);
        CHECK((bench.counted("admitted") > 0) == (settings.find("policy lru") != std::string::npos));
    }
    Bench bench("slots 3\nmemory plain\n", true);
    CHECK(!Bench::host().ggml_backend_buft_alloc_buffer(bench.wrapper->store.type, size_t{1} << 47));
    CHECK(bench.wrapper->store.voice.last_fault() == "no 134217728 MiB of host memory for experts");
}

// A step that begins before the experts' memory is locked: the device reads none of it until it is.
void step_while_locking(Bench & bench, const Shape & shape, Layer & layer) {
    Backend * backend = bench.backend();
    {
        Pass pass(Bench::host(), layer, 1, 3, bench.inner_type);
        pass.set(backend, std::vector<float>(static_cast<size_t>(shape.n_in), 1.0f), {0, 1, 5});
        locks.may_end = true;
        CHECK(pass.compute(backend) == kSuccess);
        (void)pass.output(backend);
    }
    backend->iface.free(backend);
}

// Memory that is locked while it is written, that the device does not lock, and that it does not have.
void pages_are_locked_meanwhile() {
    Shape shape;
    setenv("GGML_CUDA_REGISTER_HOST", "1", 1);  // then the engine's own functions are used, where there are any
    for (const char * memory : {"locked", "refused", "not offered", "none"}) {
        const bool offered = std::string(memory) == "locked" || std::string(memory) == "refused";
        locks.offered = offered;
        locks.refused = std::string(memory) == "refused";
        locks.read.clear();
        const int asked = locks.n_asked;
        Bench bench("slots 3\nguests 1\nmemory pinned\n", true);
        bench.slow_device.refuses_host = std::string(memory) == "none";
        {
            Layer unused(Bench::host(), shape, 0, 3, bench.wrapper->store.type, bench.inner_type);  // freed at once
            CHECK(unused.ok);
        }
        CHECK(locks.n_locked == 0);
        {
            locks.may_end = false;
            Layer layer(Bench::host(), shape, 0, 5, bench.wrapper->store.type, bench.inner_type);
            CHECK(layer.ok);
            step_while_locking(bench, shape, layer);
            one_and_many(bench, shape, layer, 2, {6, 3, 4, 9, 3});
            CHECK(locks.n_locked == (std::string(memory) == "locked" ? 1 : 0));
            CHECK(locks.n_asked - asked >= (offered ? 1 : 0) && locks.n_asked - asked <= (offered ? 2 : 0));
            CHECK(bench.wrapper->store.voice.last_fault().empty());
        }
        CHECK(locks.n_locked == 0 && locks.n_unknown == 0 && locks.n_early == 0 && bench.counted("host_bytes") == 0);
    }
    locks.offered = locks.refused = false;
}

// By CUDA's driver, which TRIAL_DRIVER stands for: for the device that is wrapped, its context in hand, and undone. It is
// asked where the engine's functions refuse, and not where the engine is told to lock nothing.
void pages_are_locked_by_the_driver() {
    const char * path = std::getenv("TRIAL_DRIVER");
    void * driver = path ? dlopen(path, RTLD_NOW) : nullptr;
    CHECK(driver);
    if (!driver) {
        return;
    }
    const auto ask = [&](const char * what) { return reinterpret_cast<int (*)()>(dlsym(driver, what))(); };
    Shape shape;
    setenv("GGML_CUDA_REGISTER_HOST", "1", 1);
    for (const int turn : {0, 1, 2, 3}) {
        const bool refuses = turn == 1, unwanted = turn == 3;
        locks.offered = locks.refused = turn >= 2;
        if (unwanted) {
            setenv("GGML_CUDA_NO_PINNED", "", 1);
        }
        const int asked = locks.n_asked;
        reinterpret_cast<void (*)(bool)>(dlsym(driver, "trial_refuses"))(refuses);
        Bench bench("slots 3\nguests 1\nmemory pinned\n", true);
        bench.slow_device.name = "CUDA7";
        const int calls = ask("trial_calls");
        {
            Layer layer(Bench::host(), shape, 0, 5, bench.wrapper->store.type, bench.inner_type);
            CHECK(layer.ok);
            one_and_many(bench, shape, layer, 2, {6, 3, 4, 9, 3});
            CHECK(ask("trial_locked") == (refuses || unwanted ? 0 : 1) && ask("trial_calls") == calls + (unwanted ? 0 : 1));
            CHECK(locks.n_asked == asked + (turn == 2 ? 1 : 0));
        }
        CHECK(ask("trial_locked") == 0 && ask("trial_held") == 0);
        CHECK(bench.wrapper->store.voice.last_fault().empty());
    }
    unsetenv("GGML_CUDA_NO_PINNED");
    locks.offered = locks.refused = false;
}

}  // namespace

const Tests kMemory = {
    {"memory_is_refused", memory_is_refused},
    {"host_memory_is_refused", host_memory_is_refused},
    {"pages_are_locked_meanwhile", pages_are_locked_meanwhile},
    {"pages_are_locked_by_the_driver", pages_are_locked_by_the_driver},
};

}  // namespace trial
