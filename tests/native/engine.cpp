#include "engine.h"

#include <dlfcn.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>

#include "platform.h"

namespace trial {

namespace {

void * load(const std::string & path) {
    void * library = dlopen(path.c_str(), RTLD_NOW);
    library = library ? library : dlopen((path + ".0").c_str(), RTLD_NOW);  // packages for running have no other name
    if (!library) {
        std::fprintf(stderr, "%s\n", dlerror());
        std::exit(2);
    }
    return library;
}

}  // namespace

// The registry of a backend's library: builds that load their backends export one function, the others one each.
Registry * registry_of(const std::string & path, const char * own) {
    void * library = load(path);
    void * start = dlsym(library, "ggml_backend_init");
    start = start ? start : dlsym(library, own);
    Registry * registry = start ? reinterpret_cast<Registry * (*)()>(start)() : nullptr;
    if (!registry || registry->iface.get_device_count(registry) == 0) {
        std::fprintf(stderr, "no device in %s\n", path.c_str());
        std::exit(2);
    }
    return registry;
}

Engine & engine(const char * given) {
    static Engine made;
    static std::string folder;
    if (made.cpu) {
        return made;
    }
    folder = given;
    const char * kernels = std::getenv("TRIAL_CPU_LIBRARY");
    load(folder + "/libggml-base.so");
    Registry * registry = registry_of(folder + "/" + (kernels ? kernels : "libggml-cpu.so"), "ggml_backend_cpu_reg");
    Device * device = registry->iface.get_device(registry, 0);
    std::string fault = made.host.find(nullptr, 0, {reinterpret_cast<const void *>(device->iface.get_name)});
    fault = fault.empty() ? made.host.probe() : fault;
    fault = fault.empty() ? made.host.probe_device(device) : fault;
    if (!fault.empty()) {
        std::fprintf(stderr, "%s\n", fault.c_str());
        std::exit(2);
    }
    made.cpu = device;
    if (const char * library = std::getenv("TRIAL_DEVICE_LIBRARY")) {
        const bool cuda = std::string(library).find("cuda") != std::string::npos;
        registry = registry_of(folder + "/" + library, cuda ? "ggml_backend_cuda_reg" : "ggml_backend_vk_reg");
        made.device = registry->iface.get_device(registry, 0);
    }
    return made;
}

thread_local int64_t allocations_left = -1;
thread_local bool in_library = false;

Memory::Memory(const Host & host, size_t n_tensors, size_t n_nodes) : host_(host) {
    const size_t size = host.ggml_tensor_overhead() * n_tensors + host.ggml_graph_overhead_custom(n_nodes, false);
    context = host.ggml_init(InitParams{size, nullptr, true});
}

Memory::~Memory() {
    if (buffer) {
        host_.ggml_backend_buffer_free(buffer);
    }
    host_.ggml_free(context);
}

Tensor * Memory::tensor(int type, std::vector<int64_t> shape, const char * name) {
    Tensor * made = host_.ggml_new_tensor(context, type, static_cast<int>(shape.size()), shape.data());
    std::snprintf(made->name, sizeof made->name, "%s", name);
    return made;
}

bool Memory::allocate(BufferType * type, bool weights) {
    {
        const InLibrary call;
        buffer = host_.ggml_backend_alloc_ctx_tensors_from_buft(context, type);
    }
    if (buffer && weights) {
        host_.ggml_backend_buffer_set_usage(buffer, kUsageWeights);
    }
    return buffer != nullptr;
}

Layer::Layer(const Host & host, const Shape & s, int block, int seed, BufferType * weights_type, BufferType * bias_type)
    : shape(s), weights(host), biases(host) {
    const std::string prefix = "blk." + std::to_string(block) + ".ffn_";
    const int64_t inner = s.fused ? 2 * s.n_hidden : s.n_hidden;
    up = weights.tensor(s.type, {s.n_in, inner, s.n_experts}, (prefix + (s.fused ? "gate_up" : "up") + "_exps.weight").c_str());
    if (!s.fused) {
        gate = weights.tensor(s.type, {s.n_in, inner, s.n_experts}, (prefix + "gate_exps.weight").c_str());
    }
    down = weights.tensor(s.type, {s.n_hidden, s.n_in, s.n_experts}, (prefix + "down_exps.weight").c_str());
    gate_bias = biases.tensor(kF32, {inner, s.n_experts}, (prefix + "gate_exps.bias").c_str());
    ok = weights.allocate(weights_type, true) && biases.allocate(bias_type, true);
    std::mt19937 dice(static_cast<unsigned>(seed));
    for (Tensor * tensor : {up, gate, down, gate_bias}) {
        if (ok && tensor) {
            const auto rows = static_cast<size_t>(tensor->ne[1] * tensor->ne[2]), width = static_cast<size_t>(tensor->ne[0]);
            const auto values = seed < 0 ? std::vector<float>(rows * width) : random_values(dice, rows * width);
            std::vector<char> made(host.ggml_nbytes(tensor));
            const auto convert = host.ggml_get_type_traits_cpu(tensor->type)->from_float;
            for (size_t row = 0; tensor->type != kF32 && row < rows; row++) {
                convert(values.data() + row * width, made.data() + row * tensor->nb[1], tensor->ne[0]);
            }
            host.ggml_backend_tensor_set(tensor, tensor->type == kF32 ? static_cast<const void *>(values.data()) : made.data(), 0, made.size());
        }
    }
}

Pass::Pass(const Host & h, const std::vector<Layer *> & layers, int64_t n_tokens, int64_t n_places, BufferType * type, bool shared_input,
           bool sorts)
    : host(h), memory(h) {
    const Shape & s = layers[0]->shape;
    x = memory.tensor(kF32, {s.n_in, shared_input ? 1 : n_places, n_tokens}, "input");
    // Choices are the first columns of a wider table, as after a sort.
    scores = sorts ? memory.tensor(kF32, {s.n_experts, n_tokens}, "scores") : nullptr;
    all_ids = sorts ? sorted(h, memory.context, scores) : memory.tensor(kI32, {s.n_experts, n_tokens}, "sorted");
    ids = h.ggml_view_3d(memory.context, all_ids, n_places, n_tokens, 1, all_ids->nb[1], all_ids->nb[2], 0);
    out = x;
    for (const Layer * layer : layers) {
        out = experts(*layer, out);
    }
    graph = h.ggml_new_graph_custom(memory.context, 64, false);
    h.ggml_build_forward_expand(graph, out);
    graph->uid = h.ggml_graph_next_uid();
    memory.allocate(type);
}

Tensor * Pass::experts(const Layer & layer, Tensor * input) {
    const Shape & s = layer.shape;
    const Host & h = host;
    Context * c = memory.context;
    const int64_t n_places = ids->ne[0], n_tokens = ids->ne[1];
    Tensor * up = h.ggml_mul_mat_id(c, layer.up, input, ids);
    Tensor * hidden;
    if (s.fused) {
        up = s.biased ? h.ggml_add_id(c, up, layer.gate_bias, ids) : up;
        Tensor * halves[2];
        for (size_t i = 0; i < 2; i++) {
            halves[i] = h.ggml_view_3d(c, up, s.n_hidden, n_places, n_tokens, up->nb[1], up->nb[2], i * static_cast<size_t>(s.n_hidden) * 4);
        }
        hidden = h.ggml_swiglu_split(c, halves[0], halves[1]);
    } else {
        Tensor * gate = h.ggml_mul_mat_id(c, layer.gate, input, ids);
        gate = s.biased ? h.ggml_add_id(c, gate, layer.gate_bias, ids) : gate;
        hidden = s.biased ? h.ggml_swiglu_oai(c, gate, up, 1.7f, 2.0f) : h.ggml_swiglu_split(c, gate, up);
    }
    return h.ggml_mul_mat_id(c, layer.down, hidden, ids);
}

void Pass::set(Backend * backend, const std::vector<float> & input, const std::vector<int32_t> & choices) {
    host.ggml_backend_synchronize(backend);
    host.ggml_backend_tensor_set(x, input.data(), 0, input.size() * sizeof(float));
    if (scores) {
        std::vector<float> ranks(static_cast<size_t>(host.ggml_nbytes(scores)) / sizeof(float), -1.0f);
        for (int64_t t = 0; t < ids->ne[1]; t++) {
            for (int64_t p = 0; p < ids->ne[0]; p++) {
                ranks[static_cast<size_t>(t * scores->ne[0] + choices[static_cast<size_t>(t * ids->ne[0] + p)])] = 1.0f / static_cast<float>(p + 1);
            }
        }
        host.ggml_backend_tensor_set(scores, ranks.data(), 0, ranks.size() * sizeof(float));
        return;
    }
    std::vector<int32_t> wide(static_cast<size_t>(all_ids->ne[0] * all_ids->ne[1]), 1 << 20);
    for (int64_t t = 0; t < ids->ne[1]; t++) {
        std::copy_n(choices.begin() + t * ids->ne[0], ids->ne[0], wide.begin() + t * all_ids->ne[0]);
    }
    host.ggml_backend_tensor_set(all_ids, wide.data(), 0, wide.size() * sizeof(int32_t));
}

// The whole graph, or as callbacks cut it: every node alone, without a number.
Status Pass::compute(Backend * backend, bool cut) {
    for (int i = 0; cut && i < graph->n_nodes; i++) {
        Graph one = *graph;
        one.nodes = graph->nodes + i;
        one.n_nodes = 1;
        one.n_leafs = 0;
        one.uid = 0;
        const Status status = backend->iface.graph_compute(backend, &one);
        if (status != kSuccess) {
            return status;
        }
    }
    const InLibrary call;
    return cut ? kSuccess : backend->iface.graph_compute(backend, graph);
}

std::vector<float> Pass::output(Backend * backend) const {
    host.ggml_backend_synchronize(backend);
    std::vector<float> values(host.ggml_nbytes(out) / sizeof(float));
    host.ggml_backend_tensor_get(out, values.data(), 0, values.size() * sizeof(float));
    return values;
}

Tensor * sorted(const Host & host, Context * context, Tensor * values) {
    static void * const found = function_in(library_of(reinterpret_cast<const void *>(host.ggml_mul_mat_id)), "ggml_argsort");
    return reinterpret_cast<Tensor * (*)(Context *, Tensor *, int)>(found)(context, values, 1);
}

std::vector<float> random_values(std::mt19937 & dice, size_t n) {
    std::normal_distribution<float> normal(0.0f, 0.3f);
    std::vector<float> values(n);
    std::generate(values.begin(), values.end(), [&] { return normal(dice); });
    return values;
}

std::vector<int32_t> random_choices(std::mt19937 & dice, int64_t n_tokens, int64_t n_places, int64_t n_experts, bool distinct) {
    std::vector<int32_t> found;
    std::vector<int32_t> all(static_cast<size_t>(n_experts));
    std::iota(all.begin(), all.end(), 0);
    for (int64_t t = 0; t < n_tokens; t++) {
        std::shuffle(all.begin(), all.end(), dice);
        for (int64_t p = 0; p < n_places; p++) {
            found.push_back(distinct ? all[static_cast<size_t>(p)] : static_cast<int32_t>(dice() % static_cast<unsigned>(n_experts)));
        }
    }
    return found;
}

double difference(const std::vector<float> & a, const std::vector<float> & b) {
    double most = 0, size = 1e-9;
    for (size_t i = 0; i < a.size(); i++) {
        const double apart = std::abs(static_cast<double>(a[i]) - b[i]);
        most = std::isnan(apart) ? INFINITY : std::max(most, apart);
        size = std::max(size, std::abs(static_cast<double>(a[i])));
    }
    return a.size() == b.size() ? most / size : INFINITY;
}

}  // namespace trial
