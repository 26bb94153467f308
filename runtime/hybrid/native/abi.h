// What ggml's backends and this library share in memory: our own declarations of its interfaces.
//
// The version number that a backend states covers the tables of functions (2: b10068 to b10434 and later,
// 3: b11434 and later). What it does not cover (tensors, graphs, numbers of operators) is proven by looking
// before first use: see layout.cpp.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hybrid {

constexpr int kMaxDims = 4;
constexpr int kMaxSources = 10;
constexpr int kMaxName = 64;
constexpr int kOpParams = 16;

struct Buffer;
struct BufferType;  // as the host sees it: a table of functions, a device, a context; size by API version
struct Device;
struct Backend;
struct Registry;
struct Event;
struct Context;
struct OptimizeParams;

enum Status : int { kAllocFailed = -2, kFailed = -1, kSuccess = 0, kAborted = 1 };
enum DeviceKind : int { kCpu = 0, kGpu = 1, kIntegratedGpu = 2, kAccelerator = 3, kMeta = 4 };
enum Usage : int { kUsageAny = 0, kUsageWeights = 1 };
enum TypeNumber : int { kF32 = 0, kI32 = 26 };

struct Tensor {
    int32_t type;
    Buffer * buffer;
    int64_t ne[kMaxDims];
    size_t nb[kMaxDims];
    int32_t op;
    int32_t op_params[kOpParams];
    int32_t flags;
    Tensor * src[kMaxSources];
    Tensor * view_src;
    size_t view_offs;
    void * data;
    char name[kMaxName];
    void * extra;
    char padding[8];
};

struct HashSet {
    size_t size;
    uint32_t * used;  // one bit a key
    Tensor ** keys;
};

struct Graph {
    int32_t size;
    int32_t n_nodes;
    int32_t n_leafs;
    Tensor ** nodes;
    Tensor ** grads;
    Tensor ** grad_accs;
    Tensor ** leafs;
    int32_t * use_counts;  // by position in `visited`
    HashSet visited;
    int32_t order;
    uint64_t uid;  // equal and not 0: the same graph; 0: not known
};

struct InitParams {
    size_t mem_size;
    void * mem_buffer;
    bool no_alloc;
};

// ---- buffer types: the only table that differs between the two versions besides graph_optimize

struct BufferTypeV2 {
    const char * (*get_name)(BufferType *);
    Buffer * (*alloc_buffer)(BufferType *, size_t);
    size_t (*get_alignment)(BufferType *);
    size_t (*get_max_size)(BufferType *);
    size_t (*get_alloc_size)(BufferType *, const Tensor *);
    bool (*is_host)(BufferType *);
    Device * device;
    void * context;
};

struct BufferTypeV3 {
    const char * (*get_name)(BufferType *);
    Buffer * (*alloc_buffer)(BufferType *, size_t);
    Buffer * (*alloc_buffer_n)(BufferType *, Tensor **, int);
    size_t (*get_alignment)(BufferType *);
    size_t (*get_max_size)(BufferType *);
    size_t (*get_alloc_size)(BufferType *, const Tensor *);
    size_t (*get_alloc_size_n)(BufferType *, Tensor **, int);
    bool (*is_host)(BufferType *);
    Device * device;
    void * context;
};

struct BufferInterface {
    void (*free_buffer)(Buffer *);
    void * (*get_base)(Buffer *);
    Status (*init_tensor)(Buffer *, Tensor *);
    void (*memset_tensor)(Buffer *, Tensor *, uint8_t, size_t, size_t);
    void (*set_tensor)(Buffer *, Tensor *, const void *, size_t, size_t);
    void (*get_tensor)(Buffer *, const Tensor *, void *, size_t, size_t);
    void (*set_tensor_2d)(Buffer *, Tensor *, const void *, size_t, size_t, size_t, size_t, size_t);
    void (*get_tensor_2d)(Buffer *, const Tensor *, void *, size_t, size_t, size_t, size_t, size_t);
    bool (*cpy_tensor)(Buffer *, const Tensor *, Tensor *);
    void (*clear)(Buffer *, uint8_t);
    void (*reset)(Buffer *);
};

struct Buffer {
    BufferInterface iface;
    BufferType * type;
    void * context;
    size_t size;
    int32_t usage;
};

// ---- backends: streams of work on a device

struct BackendInterface {
    const char * (*get_name)(Backend *);
    void (*free)(Backend *);
    void (*set_tensor_async)(Backend *, Tensor *, const void *, size_t, size_t);
    void (*get_tensor_async)(Backend *, const Tensor *, void *, size_t, size_t);
    void (*set_tensor_2d_async)(Backend *, Tensor *, const void *, size_t, size_t, size_t, size_t, size_t);
    void (*get_tensor_2d_async)(Backend *, const Tensor *, void *, size_t, size_t, size_t, size_t, size_t);
    bool (*cpy_tensor_async)(Backend *, Backend *, const Tensor *, Tensor *);
    void (*synchronize)(Backend *);
    void * (*graph_plan_create)(Backend *, const Graph *);
    void (*graph_plan_free)(Backend *, void *);
    void (*graph_plan_update)(Backend *, void *, const Graph *);
    Status (*graph_plan_compute)(Backend *, void *);
    Status (*graph_compute)(Backend *, Graph *);
    void (*event_record)(Backend *, Event *);
    void (*event_wait)(Backend *, Event *);
    void * graph_optimize;  // version 2: (Backend *, Graph *); version 3: (Backend *, Graph *, OptimizeParams *)
};

using OptimizeV2 = void (*)(Backend *, Graph *);
using OptimizeV3 = void (*)(Backend *, Graph *, OptimizeParams *);

struct Backend {
    uint8_t (*guid)[16];
    BackendInterface iface;
    Device * device;
    void * context;
};

struct Event {
    Device * device;
    void * context;
};

// ---- devices

struct Capabilities {
    bool async;
    bool host_buffer;
    bool buffer_from_host_ptr;
    bool events;
    bool mmap_support;
};

struct Properties {
    const char * name;
    const char * description;
    size_t memory_free;
    size_t memory_total;
    DeviceKind type;
    const char * device_id;
    Capabilities caps;
};

struct DeviceInterface {
    const char * (*get_name)(Device *);
    const char * (*get_description)(Device *);
    void (*get_memory)(Device *, size_t *, size_t *);
    DeviceKind (*get_type)(Device *);
    void (*get_props)(Device *, Properties *);
    Backend * (*init_backend)(Device *, const char *);
    BufferType * (*get_buffer_type)(Device *);
    BufferType * (*get_host_buffer_type)(Device *);
    Buffer * (*buffer_from_host_ptr)(Device *, void *, size_t, size_t);
    bool (*supports_op)(Device *, const Tensor *);
    bool (*supports_buft)(Device *, BufferType *);
    bool (*offload_op)(Device *, const Tensor *);
    Event * (*event_new)(Device *);
    void (*event_free)(Device *, Event *);
    void (*event_synchronize)(Device *, Event *);
};

struct Device {
    DeviceInterface iface;
    Registry * registry;
    void * context;
};

struct RegistryInterface {
    const char * (*get_name)(Registry *);
    size_t (*get_device_count)(Registry *);
    Device * (*get_device)(Registry *, size_t);
    void * (*get_proc_address)(Registry *, const char *);
};

struct Registry {
    int32_t api_version;
    RegistryInterface iface;
    void * context;
};

// ---- the CPU backend's kernels

struct TypeTraits {
    void (*from_float)(const float *, void *, int64_t);
    void (*vec_dot)(int, float *, size_t, const void *, size_t, const void *, size_t, int);
    int32_t vec_dot_type;
    int64_t n_rows;
};

}  // namespace hybrid
