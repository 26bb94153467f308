#include "bench.h"

#include <cstdlib>

namespace trial {

std::atomic<int> failures{0};

Bench::Bench(const std::string & settings, bool slow, bool events, Device * other, Fault fault) : slow_device(host(), engine().cpu, events) {
    std::vector<Config> configs;
    std::string error;
    CHECK(parse_config(settings + "\nquiet 1\nthreads 3\n", configs, error));
    configs[0].fault = fault;
    Device * inner = other ? other : slow ? &slow_device.device : engine().cpu;
    wrapper = std::make_unique<Wrapper>(host(), inner, engine().cpu, configs[0], "TRIAL", inner->registry->api_version);
    shown.push_back(wrapper.get());
    fill_registry(registry, &shown, inner->registry->api_version);
    inner_type = inner->iface.get_buffer_type(inner);
}

Backend * Bench::backend() {
    Backend * made;
    {
        const InLibrary call;
        made = wrapper->device.iface.init_backend(&wrapper->device, nullptr);
    }
    if (!made) {
        return nullptr;
    }
    void * function = registry.iface.get_proc_address(&registry, "ggml_backend_set_n_threads");
    reinterpret_cast<void (*)(Backend *, int)>(function)(made, 1);
    return made;
}

int64_t Bench::counted(const std::string & what) {
    const std::string said = wrapper->report(), key = "\"" + what + "\":";
    int64_t sum = 0;
    for (size_t at = said.find(key); at != std::string::npos; at = said.find(key, at + 1)) {
        sum += std::atoll(said.c_str() + at + key.size());
    }
    return sum;
}

Reference::Reference(const Shape & shape, int seed)
    : type(engine().cpu->iface.get_buffer_type(engine().cpu)), layer(engine().host, shape, 0, seed, type, type),
      backend(engine().cpu->iface.init_backend(engine().cpu, nullptr)) {
    auto * registry = engine().cpu->registry;
    auto function = registry->iface.get_proc_address(registry, "ggml_backend_set_n_threads");
    reinterpret_cast<void (*)(Backend *, int)>(function)(backend, 1);
}

Reference::~Reference() { engine().host.ggml_backend_free(backend); }

std::vector<float> Reference::compute(int64_t tokens, int64_t places, const std::vector<float> & x, const std::vector<int32_t> & ids,
                                      bool shared) {
    Pass pass(engine().host, layer, tokens, places, type, shared);
    pass.set(backend, x, ids);
    CHECK(pass.compute(backend) == kSuccess);
    return pass.output(backend);
}

void one_and_many(Bench & bench, const Shape & shape, Layer & layer, unsigned number, const Steps & steps,
                  const std::function<void()> & stepped) {
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

Layers::Layers(const Shape & shape, int n, BufferType * weights_type, BufferType * bias_type) {
    for (int block = 0; block < n; block++) {
        made.push_back(std::make_unique<Layer>(Bench::host(), shape, block, 31 + block, weights_type, bias_type));
        all.push_back(made.back().get());
    }
}

}  // namespace trial
