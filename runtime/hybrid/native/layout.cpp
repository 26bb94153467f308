// Proof, before first use, of what no version number covers: tensors, graphs, numbers of operators, tables.
#include <cmath>
#include <cstring>

#include "host.h"

namespace hybrid {

namespace {

constexpr size_t kGraphSize = 32;
constexpr float kFirst = 1.625f, kSecond = 7.375f;  // parameters that no other field holds

int place_of(const Tensor * node, float value) {
    for (int i = 0; i < kOpParams; i++) {
        if (float_param(node, i) == value) {
            return i;
        }
    }
    return -1;
}

struct Scratch {
    const Host & host;
    Context * context;
    explicit Scratch(const Host & h) : host(h) {
        const size_t size = host.ggml_tensor_overhead() * 64 + host.ggml_graph_overhead_custom(kGraphSize, false);
        context = host.ggml_init(InitParams{size, nullptr, true});
    }
    ~Scratch() {
        if (context) {
            host.ggml_free(context);
        }
    }
    Scratch(const Scratch &) = delete;
    Scratch & operator=(const Scratch &) = delete;
};

// A tensor of known shape shows where each field lies.
bool tensor_fits(const Host & host, Context * context) {
    const int64_t shape[4] = {32, 5, 3, 2};
    const Tensor * t = host.ggml_new_tensor(context, kF32, 4, shape);
    bool fits = t->type == kF32 && !t->buffer && !t->data && !t->view_src && !t->src[0] && t->op == 0;
    size_t stride = 4;
    for (int i = 0; i < kMaxDims; i++) {
        fits = fits && t->ne[i] == shape[i] && t->nb[i] == stride;
        stride *= static_cast<size_t>(shape[i]);
    }
    return fits && !t->extra && t->name[0] == '\0' && host.ggml_nbytes(t) == stride;
}

}  // namespace

float float_param(const Tensor * node, int index) {
    float value;
    std::memcpy(&value, &node->op_params[index], sizeof value);
    return value;
}

std::string Host::probe() {
    Scratch scratch(*this);
    if (!scratch.context) {
        return "no memory to look at its layouts";
    }
    const char * names[2] = {ggml_type_name(kF32), ggml_type_name(kI32)};
    if (!names[0] || !names[1] || std::strcmp(names[0], "f32") != 0 || std::strcmp(names[1], "i32") != 0) {
        return "this build numbers tensor types in a way not known here";
    }
    if (!tensor_fits(*this, scratch.context)) {
        return "this build lays out tensors in a way not known here";
    }
    std::string fault = probe_numbers(scratch.context);
    return fault.empty() ? probe_graph(scratch.context) : fault;
}

std::string Host::probe_numbers(Context * context) {
    const int64_t weights[3] = {32, 8, 4}, input[3] = {32, 1, 2}, choice[2] = {2, 2}, bias[2] = {8, 4};
    Tensor * w = ggml_new_tensor(context, kF32, 3, weights);
    Tensor * x = ggml_new_tensor(context, kF32, 3, input);
    Tensor * ids = ggml_new_tensor(context, kI32, 2, choice);
    Tensor * product = ggml_mul_mat_id(context, w, x, ids);
    if (product->src[0] != w || product->src[1] != x || product->src[2] != ids || product->ne[0] != 8 ||
        product->ne[1] != 2 || product->ne[2] != 2) {
        return "this build lays out the sources of a tensor in a way not known here";
    }
    Tensor * other = ggml_mul_mat_id(context, w, x, ids);
    op_mul_mat_id = product->op;
    op_add_id = ggml_add_id(context, product, ggml_new_tensor(context, kF32, 2, bias), ids)->op;
    op_add = ggml_add(context, product, other)->op;
    op_mul = ggml_mul(context, product, other)->op;
    op_sqr = ggml_sqr(context, product)->op;
    const Tensor * scaled = ggml_scale(context, product, kFirst);
    const Tensor * clamped = ggml_clamp(context, product, kFirst, kSecond);
    op_scale = scaled->op;
    op_clamp = clamped->op;
    if (place_of(scaled, kFirst) != 0 || place_of(clamped, kFirst) != 0 || place_of(clamped, kSecond) != 1) {
        return "this build keeps the parameters of operators in a way not known here";
    }
    const Tensor * part = ggml_view_3d(context, product, 4, 2, 2, product->nb[1], product->nb[2], 16);
    op_view = part->op;
    op_reshape = ggml_reshape_3d(context, product, 8, 4, 1)->op;
    op_cpy = ggml_cpy(context, product, other)->op;
    if (part->view_src != product || part->view_offs != 16 || part->src[0] != product) {
        return "this build lays out views in a way not known here";
    }
    const Tensor * glus[6] = {ggml_reglu_split(context, product, other),
                              ggml_geglu_split(context, product, other),
                              ggml_swiglu_split(context, product, other),
                              ggml_swiglu_oai(context, product, other, kFirst, kSecond),
                              ggml_geglu_erf_split(context, product, other),
                              ggml_geglu_quick_split(context, product, other)};
    for (int i = 0; i < 6; i++) {
        glu_kinds[i] = glus[i]->op_params[0];
    }
    op_glu = glus[0]->op;
    oai_alpha = place_of(glus[3], kFirst);
    oai_limit = place_of(glus[3], kSecond);
    if (ggml_swiglu_clamp) {
        const Tensor * limited = ggml_swiglu_clamp(context, product, other, kSecond);
        glu_kinds[6] = limited->op_params[0];
        clamp_limit = place_of(limited, kSecond);
    }
    const Tensor * whole = ggml_swiglu(context, product);
    const Tensor * swapped = ggml_swiglu_swapped(context, product);
    if (whole->op_params[0] != glu_kinds[2] || whole->op_params[1] != 0 || swapped->op_params[1] != 1 || whole->src[1]) {
        return "this build marks the halves of gated units in a way not known here";
    }
    const Tensor * unaries[5] = {ggml_silu(context, product), ggml_gelu(context, product), ggml_relu(context, product),
                                 ggml_tanh(context, product), ggml_sigmoid(context, product)};
    for (int i = 0; i < 5; i++) {
        unary_kinds[i] = unaries[i]->op_params[0];
    }
    op_unary = unaries[0]->op;
    Tensor * marked = ggml_new_tensor(context, kF32, 2, bias);
    const int before = marked->flags;
    ggml_set_output(marked);
    flag_output = marked->flags & ~before;
    return flag_output ? "" : "this build marks outputs in a way not known here";
}

std::string Host::probe_graph(Context * context) {
    const std::string unknown = "this build lays out graphs in a way not known here";
    const int64_t shape[2] = {8, 4};
    Tensor * a = ggml_new_tensor(context, kF32, 2, shape);
    Tensor * once = ggml_sqr(context, a);
    Tensor * twice = ggml_mul(context, once, once);
    Graph * graph = ggml_new_graph_custom(context, kGraphSize, false);
    if (graph->size != static_cast<int>(kGraphSize) || graph->n_nodes != 0 || graph->n_leafs != 0 || graph->uid != 0) {
        return unknown;
    }
    ggml_build_forward_expand(graph, twice);
    // The node list stands right behind the struct: that gives its size.
    const auto size = reinterpret_cast<char *>(graph->nodes) - reinterpret_cast<char *>(graph);
    if (size != static_cast<ptrdiff_t>(sizeof(Graph)) || graph->n_nodes != 2 || graph->n_leafs != 1 ||
        ggml_graph_n_nodes(graph) != 2 || graph->nodes[0] != once || graph->nodes[1] != twice ||
        ggml_graph_node(graph, 1) != twice || graph->leafs[0] != a || graph->grads || graph->grad_accs) {
        return unknown;
    }
    if (uses(graph, once) != 2 || uses(graph, a) != 1 || uses(graph, twice) != 0) {
        return "this build counts the uses of a node in a way not known here";
    }
    const uint64_t first = ggml_graph_next_uid();
    return first != 0 && ggml_graph_next_uid() != first ? "" : "this build numbers graphs in a way not known here";
}

std::string Host::probe_device(Device * device) {
    Registry * registry = ggml_backend_dev_backend_reg(device);
    if (registry != device->registry || device->iface.get_name(device) != ggml_backend_dev_name(device)) {
        return "this build lays out devices in a way not known here";
    }
    if (registry->api_version != 2 && registry->api_version != 3) {
        return "its backends speak version " + std::to_string(registry->api_version) + " of ggml's interface; 2 and 3 are known here";
    }
    BufferType * type = device->iface.get_buffer_type(device);
    Buffer * buffer = ggml_backend_buft_alloc_buffer(type, 4096);
    if (!buffer) {
        return "not even 4096 bytes can be allocated on the device";
    }
    const bool buffer_fits = buffer->type == ggml_backend_buffer_get_type(buffer) && buffer->type == type &&
                             buffer->size == ggml_backend_buffer_get_size(buffer) &&
                             buffer->iface.get_base(buffer) == ggml_backend_buffer_get_base(buffer);
    ggml_backend_buffer_free(buffer);
    if (!buffer_fits) {
        return "this build lays out buffers in a way not known here";
    }
    Backend * backend = device->iface.init_backend(device, nullptr);
    if (!backend) {
        return "the device cannot be started";
    }
    const bool backend_fits = backend->device == device && backend->iface.graph_compute &&
                              backend->iface.get_name(backend) == ggml_backend_name(backend);
    ggml_backend_free(backend);
    return backend_fits ? "" : "this build lays out backends in a way not known here";
}

Act Host::act_of(const Tensor * node) const {
    if (node->op == op_glu) {
        for (int i = 0; i < 7; i++) {
            if (glu_kinds[i] >= 0 && glu_kinds[i] == node->op_params[0]) {
                return static_cast<Act>(i);
            }
        }
    } else if (node->op == op_unary) {
        for (int i = 0; i < 5; i++) {
            if (unary_kinds[i] == node->op_params[0]) {
                return static_cast<Act>(static_cast<int>(Act::kSilu) + i);
            }
        }
    }
    return Act::kUnknown;
}

int Host::uses(const Graph * graph, const Tensor * tensor) const {
    const HashSet & set = graph->visited;
    if (!set.size || !set.used || !set.keys || !graph->use_counts) {
        return -1;
    }
    const size_t start = (reinterpret_cast<uintptr_t>(tensor) >> 4) % set.size;
    for (size_t at = start;;) {
        if (!(set.used[at / 32] >> (at % 32) & 1u)) {
            return -1;
        }
        if (set.keys[at] == tensor) {
            return graph->use_counts[at];
        }
        at = (at + 1) % set.size;
        if (at == start) {
            return -1;
        }
    }
}

}  // namespace hybrid
