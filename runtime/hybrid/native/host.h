// The engine that hosts this library: its functions by name, and the numbers and layouts it was built with.
#pragma once

#include <string>
#include <vector>

#include "abi.h"

namespace hybrid {

// Functions of libggml-base (all of them in one file where the engine is linked statically).
#define HYBRID_HOST_FUNCTIONS(X) \
    X(Context *, ggml_init, (InitParams)) \
    X(void, ggml_free, (Context *)) \
    X(size_t, ggml_tensor_overhead, ()) \
    X(size_t, ggml_graph_overhead_custom, (size_t, bool)) \
    X(Tensor *, ggml_new_tensor, (Context *, int, int, const int64_t *)) \
    X(size_t, ggml_nbytes, (const Tensor *)) \
    X(size_t, ggml_row_size, (int, int64_t)) \
    X(size_t, ggml_type_size, (int)) \
    X(bool, ggml_is_quantized, (int)) \
    X(const char *, ggml_type_name, (int)) \
    X(const char *, ggml_op_name, (int)) \
    X(void, ggml_set_output, (Tensor *)) \
    X(Tensor *, ggml_mul_mat_id, (Context *, Tensor *, Tensor *, Tensor *)) \
    X(Tensor *, ggml_add_id, (Context *, Tensor *, Tensor *, Tensor *)) \
    X(Tensor *, ggml_add, (Context *, Tensor *, Tensor *)) \
    X(Tensor *, ggml_mul, (Context *, Tensor *, Tensor *)) \
    X(Tensor *, ggml_sqr, (Context *, Tensor *)) \
    X(Tensor *, ggml_scale, (Context *, Tensor *, float)) \
    X(Tensor *, ggml_clamp, (Context *, Tensor *, float, float)) \
    X(Tensor *, ggml_silu, (Context *, Tensor *)) \
    X(Tensor *, ggml_gelu, (Context *, Tensor *)) \
    X(Tensor *, ggml_relu, (Context *, Tensor *)) \
    X(Tensor *, ggml_tanh, (Context *, Tensor *)) \
    X(Tensor *, ggml_sigmoid, (Context *, Tensor *)) \
    X(Tensor *, ggml_reglu_split, (Context *, Tensor *, Tensor *)) \
    X(Tensor *, ggml_geglu_split, (Context *, Tensor *, Tensor *)) \
    X(Tensor *, ggml_swiglu_split, (Context *, Tensor *, Tensor *)) \
    X(Tensor *, ggml_swiglu_oai, (Context *, Tensor *, Tensor *, float, float)) \
    X(Tensor *, ggml_geglu_erf_split, (Context *, Tensor *, Tensor *)) \
    X(Tensor *, ggml_geglu_quick_split, (Context *, Tensor *, Tensor *)) \
    X(Tensor *, ggml_swiglu, (Context *, Tensor *)) \
    X(Tensor *, ggml_swiglu_swapped, (Context *, Tensor *)) \
    X(Tensor *, ggml_view_3d, (Context *, Tensor *, int64_t, int64_t, int64_t, size_t, size_t, size_t)) \
    X(Tensor *, ggml_reshape_3d, (Context *, Tensor *, int64_t, int64_t, int64_t)) \
    X(Tensor *, ggml_cpy, (Context *, Tensor *, Tensor *)) \
    X(Tensor *, ggml_get_rows, (Context *, Tensor *, Tensor *)) \
    X(Graph *, ggml_new_graph_custom, (Context *, size_t, bool)) \
    X(void, ggml_build_forward_expand, (Graph *, Tensor *)) \
    X(int, ggml_graph_n_nodes, (Graph *)) \
    X(Tensor *, ggml_graph_node, (Graph *, int)) \
    X(uint64_t, ggml_graph_next_uid, ()) \
    X(const char *, ggml_backend_buft_name, (BufferType *)) \
    X(Buffer *, ggml_backend_buft_alloc_buffer, (BufferType *, size_t)) \
    X(size_t, ggml_backend_buft_get_alignment, (BufferType *)) \
    X(size_t, ggml_backend_buft_get_alloc_size, (BufferType *, const Tensor *)) \
    X(bool, ggml_backend_buft_is_host, (BufferType *)) \
    X(Buffer *, ggml_backend_buffer_init, (BufferType *, BufferInterface, void *, size_t)) \
    X(void, ggml_backend_buffer_free, (Buffer *)) \
    X(void *, ggml_backend_buffer_get_base, (Buffer *)) \
    X(size_t, ggml_backend_buffer_get_size, (Buffer *)) \
    X(BufferType *, ggml_backend_buffer_get_type, (Buffer *)) \
    X(void, ggml_backend_buffer_set_usage, (Buffer *, int)) \
    X(int, ggml_backend_buffer_init_tensor, (Buffer *, Tensor *)) \
    X(Buffer *, ggml_backend_alloc_ctx_tensors_from_buft, (Context *, BufferType *)) \
    X(void, ggml_backend_tensor_set, (Tensor *, const void *, size_t, size_t)) \
    X(void, ggml_backend_tensor_get, (const Tensor *, void *, size_t, size_t)) \
    X(void, ggml_backend_synchronize, (Backend *)) \
    X(const char *, ggml_backend_name, (Backend *)) \
    X(void, ggml_backend_free, (Backend *)) \
    X(const char *, ggml_backend_dev_name, (Device *)) \
    X(Registry *, ggml_backend_dev_backend_reg, (Device *)) \
    X(BufferType *, ggml_backend_cpu_buffer_type, ())

// Those that a build may lack.
#define HYBRID_OPTIONAL_FUNCTIONS(X) \
    X(Tensor *, ggml_swiglu_clamp, (Context *, Tensor *, Tensor *, float)) \
    X(const TypeTraits *, ggml_get_type_traits_cpu, (int)) \
    X(size_t, ggml_backend_dev_count, ()) \
    X(Device *, ggml_backend_dev_get, (size_t))

// Kinds of gated linear units and of other operators that a row of hidden values may pass through.
enum class Act : uint8_t {
    kReglu,
    kGeglu,
    kSwiglu,
    kSwigluOai,
    kGegluErf,
    kGegluQuick,
    kSwigluClamp,
    kSilu,
    kGelu,
    kRelu,
    kTanh,
    kSigmoid,
    kSquare,
    kScale,
    kClamp,
    kAdd,
    kMul,
    kBias,
    kUnknown,
};

struct Named {
    const char * name;
    void * function;
};

class Host {
  public:
#define HYBRID_DECLARE(result, name, arguments) result(*name) arguments = nullptr;
    HYBRID_HOST_FUNCTIONS(HYBRID_DECLARE)
    HYBRID_OPTIONAL_FUNCTIONS(HYBRID_DECLARE)
#undef HYBRID_DECLARE

    // Numbers of this build, found by building such nodes.
    int op_none = 0, op_mul_mat_id = -1, op_add_id = -1, op_glu = -1, op_unary = -1, op_view = -1, op_reshape = -1;
    int op_add = -1, op_mul = -1, op_sqr = -1, op_scale = -1, op_clamp = -1, op_cpy = -1;
    int flag_output = 0;
    int oai_alpha = -1, oai_limit = -1, clamp_limit = -1;  // places in op_params
    int glu_kinds[7] = {-1, -1, -1, -1, -1, -1, -1};       // by Act
    int unary_kinds[5] = {-1, -1, -1, -1, -1};             // by Act, from kSilu on

    // Fill the functions from a table that was given, and from the libraries that these addresses lie in.
    // Returns what is missing, "" when all are there.
    std::string find(const Named * table, size_t n_table, const std::vector<const void *> & addresses);

    // Prove tensors, graphs and numbers; what does not match, or "".
    std::string probe();

    // Prove the tables of functions of a device, and of a backend and a buffer of it; what does not match, or "".
    std::string probe_device(Device * device);

    // What a GLU or unary node computes; kUnknown for numbers that were not found.
    Act act_of(const Tensor * node) const;

    // How often a tensor is used by nodes of the graph; -1 when it is not in it.
    int uses(const Graph * graph, const Tensor * tensor) const;

    uint64_t next_uid() const { return ggml_graph_next_uid(); }

  private:
    std::string probe_numbers(Context * context);
    std::string probe_graph(Context * context);
};

float float_param(const Tensor * node, int index);

}  // namespace hybrid
