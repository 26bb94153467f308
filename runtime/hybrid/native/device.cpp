#include "device.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "buffers.h"
#include "stream.h"

namespace hybrid {

namespace {

uint8_t kStreamGuid[16] = {0x9e, 0x41, 0x0c, 0x77, 0x5a, 0x13, 0x4d, 0x2b, 0x8f, 0x60, 0x3e, 0xd1, 0x94, 0x2a, 0xb7, 0x01};
uint8_t kLenderGuid[16] = {0x9e, 0x41, 0x0c, 0x77, 0x5a, 0x13, 0x4d, 0x2b, 0x8f, 0x60, 0x3e, 0xd1, 0x94, 0x2a, 0xb7, 0x02};

Wrapper & wrapper(Device * device) { return *static_cast<Wrapper *>(device->context); }
Device * inner(Device * device) { return wrapper(device).store.inner; }
bool is_stream(const Backend * backend) { return backend->guid == &kStreamGuid; }
Stream & stream(Backend * backend) { return *static_cast<Stream *>(backend->context); }
Backend * unwrapped(Backend * backend) { return is_stream(backend) ? stream(backend).inner() : backend; }

// ---- backend

const char * backend_name(Backend * backend) { return wrapper(backend->device).name.c_str(); }

void backend_free(Backend * backend) {
    Wrapper & of = wrapper(backend->device);
    {
        std::lock_guard<std::mutex> lock(of.streams_mutex);
        of.streams.erase(std::find(of.streams.begin(), of.streams.end(), &stream(backend)));
    }
    delete &stream(backend);
    delete backend;
}

void set_async(Backend * backend, Tensor * tensor, const void * data, size_t offset, size_t size) {
    stream(backend).set_async(tensor, data, offset, size);
}

void get_async(Backend * backend, const Tensor * tensor, void * data, size_t offset, size_t size) {
    stream(backend).get_async(tensor, data, offset, size);
}

void set_2d_async(Backend * backend, Tensor * tensor, const void * data, size_t offset, size_t size, size_t n, size_t to, size_t from) {
    Stream & mine = stream(backend);
    std::lock_guard<std::recursive_mutex> lock(mine.api());
    mine.inner()->iface.set_tensor_2d_async(mine.inner(), tensor, data, offset, size, n, to, from);
}

void get_2d_async(Backend * backend, const Tensor * tensor, void * data, size_t offset, size_t size, size_t n, size_t from, size_t to) {
    Stream & mine = stream(backend);
    std::lock_guard<std::recursive_mutex> lock(mine.api());
    mine.inner()->iface.get_tensor_2d_async(mine.inner(), tensor, data, offset, size, n, from, to);
}

bool copy_async(Backend * from, Backend * to, const Tensor * source, Tensor * target) {
    Backend *a = unwrapped(from), *b = unwrapped(to);
    return b->iface.cpy_tensor_async && b->iface.cpy_tensor_async(a, b, source, target);
}

void synchronize(Backend * backend) { stream(backend).synchronize(); }
Status graph_compute(Backend * backend, Graph * graph) { return stream(backend).compute(graph); }

void event_record(Backend * backend, Event * event) {
    Stream & mine = stream(backend);
    std::lock_guard<std::recursive_mutex> lock(mine.api());
    mine.inner()->iface.event_record(mine.inner(), event);
}

void event_wait(Backend * backend, Event * event) {
    Stream & mine = stream(backend);
    std::lock_guard<std::recursive_mutex> lock(mine.api());
    mine.inner()->iface.event_wait(mine.inner(), event);
}

void optimize_v2(Backend * backend, Graph * graph) {
    Backend * real = unwrapped(backend);
    reinterpret_cast<OptimizeV2>(real->iface.graph_optimize)(real, graph);
}

void optimize_v3(Backend * backend, Graph * graph, OptimizeParams * params) {
    Backend * real = unwrapped(backend);
    reinterpret_cast<OptimizeV3>(real->iface.graph_optimize)(real, graph, params);
}

// What the wrapped backend lacks, the wrapper lacks too: the engine then takes the ways it takes there.
BackendInterface backend_functions(const BackendInterface & real, int version) {
    BackendInterface made{};
    made.get_name = backend_name;
    made.free = backend_free;
    made.set_tensor_async = real.set_tensor_async ? set_async : nullptr;
    made.get_tensor_async = real.get_tensor_async ? get_async : nullptr;
    made.set_tensor_2d_async = real.set_tensor_2d_async ? set_2d_async : nullptr;
    made.get_tensor_2d_async = real.get_tensor_2d_async ? get_2d_async : nullptr;
    made.cpy_tensor_async = real.cpy_tensor_async ? copy_async : nullptr;
    made.synchronize = real.synchronize ? synchronize : nullptr;
    made.graph_compute = graph_compute;
    made.event_record = real.event_record ? event_record : nullptr;
    made.event_wait = real.event_wait ? event_wait : nullptr;
    if (real.graph_optimize) {
        made.graph_optimize = version == 2 ? reinterpret_cast<void *>(optimize_v2) : reinterpret_cast<void *>(optimize_v3);
    }
    return made;
}

// ---- device

const char * device_name(Device * device) { return wrapper(device).name.c_str(); }
const char * device_description(Device * device) { return inner(device)->iface.get_description(inner(device)); }
void device_memory(Device * device, size_t * free, size_t * total) { inner(device)->iface.get_memory(inner(device), free, total); }

DeviceKind device_kind(Device * device) {
    // To the engine a GPU, whatever it is: only such devices are given layers.
    const DeviceKind kind = inner(device)->iface.get_type(inner(device));
    return kind == kIntegratedGpu ? kIntegratedGpu : kGpu;
}

void device_props(Device * device, Properties * properties) {
    inner(device)->iface.get_props(inner(device), properties);
    properties->name = device_name(device);
    properties->type = device_kind(device);
}

Backend * device_init(Device * device, const char * params) {
    Wrapper & of = wrapper(device);
    Backend * real = inner(device)->iface.init_backend(inner(device), params);
    if (!real) {
        return nullptr;
    }
    std::unique_ptr<Stream> work;
    try {
        auto made = std::make_unique<Backend>();
        work = std::make_unique<Stream>(of.store, of.pool, of.stage, real);
        made->guid = &kStreamGuid;
        made->iface = backend_functions(real->iface, of.shown->api_version);
        made->device = device;
        made->context = work.get();
        std::lock_guard<std::mutex> lock(of.streams_mutex);
        of.streams.push_back(work.get());
        (void)work.release();
        return made.release();
    } catch (...) {
        if (!work) {
            of.host.ggml_backend_free(real);
        }
        of.store.voice.caught("a context");
        return nullptr;
    }
}

BufferType * device_type(Device * device) { return inner(device)->iface.get_buffer_type(inner(device)); }
BufferType * device_host_type(Device * device) { return inner(device)->iface.get_host_buffer_type(inner(device)); }

Buffer * device_from_pointer(Device * device, void * address, size_t size, size_t most) {
    return inner(device)->iface.buffer_from_host_ptr(inner(device), address, size, most);
}

// Operators over experts of ours: products only. The device is asked as if it had the weights in its own memory.
bool device_supports(Device * device, const Tensor * node) {
    Wrapper & of = wrapper(device);
    if (of.store.owns(node) && node->op == of.host.op_none) {
        return true;
    }
    for (int i = 0; i < kMaxSources; i++) {
        if (!of.store.owns(node->src[i])) {
            continue;
        }
        if (node->op == of.host.op_view || node->op == of.host.op_reshape) {
            return true;  // nothing is computed
        }
        if (i != 0 || node->op != of.host.op_mul_mat_id) {
            return false;
        }
        Tensor product = *node, weights = *node->src[0];
        weights.buffer = nullptr;
        product.src[0] = &weights;
        return inner(device)->iface.supports_op(inner(device), &product);
    }
    return inner(device)->iface.supports_op(inner(device), node);
}

bool device_supports_type(Device * device, BufferType * type) {
    return type == wrapper(device).store.type || inner(device)->iface.supports_buft(inner(device), type);
}

bool device_offloads(Device * device, const Tensor * node) { return inner(device)->iface.offload_op(inner(device), node); }
Event * event_new(Device * device) { return inner(device)->iface.event_new(inner(device)); }
void event_free(Device * device, Event * event) { inner(device)->iface.event_free(inner(device), event); }
void event_synchronize(Device * device, Event * event) { inner(device)->iface.event_synchronize(inner(device), event); }

// ---- the lender

const char * lender_name(Device * device) { return wrapper(device).lender_name.c_str(); }
const char * lender_description(Device *) { return "experts of a hybrid device, computes nothing"; }
void lender_memory(Device *, size_t * free, size_t * total) { *free = *total = 0; }
DeviceKind lender_kind(Device *) { return kAccelerator; }

void lender_props(Device * device, Properties * properties) {
    *properties = Properties{};
    properties->name = lender_name(device);
    properties->description = lender_description(device);
    properties->type = kAccelerator;
    properties->caps.buffer_from_host_ptr = wrapper(device).store.config.memory == Memory::kMapped;
    properties->caps.mmap_support = true;
}

const char * lender_backend_name(Backend * backend) { return wrapper(backend->device).lender_name.c_str(); }
void lender_backend_free(Backend * backend) { delete backend; }
Status lender_compute(Backend *, Graph * graph) { return graph->n_nodes ? kFailed : kSuccess; }

Backend * lender_init(Device * device, const char *) {
    auto * made = new (std::nothrow) Backend{};
    if (!made) {
        return nullptr;
    }
    made->guid = &kLenderGuid;
    made->iface.get_name = lender_backend_name;
    made->iface.free = lender_backend_free;
    made->iface.graph_compute = lender_compute;
    made->device = device;
    return made;
}

BufferType * lender_type(Device * device) { return wrapper(device).store.type; }
bool lender_supports(Device *, const Tensor *) { return false; }
bool lender_supports_type(Device * device, BufferType * type) { return type == wrapper(device).store.type; }

Buffer * lender_from_pointer(Device * device, void * address, size_t size, size_t) {
    return map_experts(wrapper(device).store, address, size);
}

const char * type_name_v2(BufferType * type) {
    return wrapper(reinterpret_cast<BufferTypeV2 *>(type)->device).type_name.c_str();
}

const char * type_name_v3(BufferType * type) {
    return wrapper(reinterpret_cast<BufferTypeV3 *>(type)->device).type_name.c_str();
}

// ---- registry

std::vector<Wrapper *> & wrappers(Registry * registry) { return *static_cast<std::vector<Wrapper *> *>(registry->context); }

const char * registry_name(Registry *) { return "HYBRID"; }
size_t registry_count(Registry * registry) { return 2 * wrappers(registry).size(); }

Device * registry_device(Registry * registry, size_t index) {
    Wrapper & of = *wrappers(registry)[index / 2];
    return index % 2 ? &of.lender : &of.device;
}

void set_n_threads(Backend * backend, int n) {
    if (!is_stream(backend)) {
        return;
    }
    stream(backend).set_threads(n);
    Device * real = inner(backend->device);
    void * function = real->registry->iface.get_proc_address
                          ? real->registry->iface.get_proc_address(real->registry, "ggml_backend_set_n_threads")
                          : nullptr;
    if (function) {
        reinterpret_cast<void (*)(Backend *, int)>(function)(stream(backend).inner(), n);
    }
}

void set_abort_callback(Backend * backend, bool (*callback)(void *), void * data) {
    if (!is_stream(backend)) {
        return;
    }
    stream(backend).set_abort(callback, data);
    Device * real = inner(backend->device);
    void * function = real->registry->iface.get_proc_address
                          ? real->registry->iface.get_proc_address(real->registry, "ggml_backend_set_abort_callback")
                          : nullptr;
    if (function) {
        reinterpret_cast<void (*)(Backend *, bool (*)(void *), void *)>(function)(stream(backend).inner(), callback, data);
    }
}

// Only what holds for a wrapper too: no split buffers of the wrapped device, no communication between devices.
void * registry_function(Registry *, const char * name) {
    if (std::strcmp(name, "ggml_backend_set_n_threads") == 0) {
        return reinterpret_cast<void *>(set_n_threads);
    }
    if (std::strcmp(name, "ggml_backend_set_abort_callback") == 0) {
        return reinterpret_cast<void *>(set_abort_callback);
    }
    return nullptr;
}

}  // namespace

Wrapper::Wrapper(const Host & h, Device * wrapped, Device * cpu, const Config & config, const std::string & n, int version)
    : host(h), name(n), lender_name(n + "_LENDER"), type_name(n + "_EXPERTS"), store(host, wrapped, config), stage(store),
      shown(&registry) {
    registry.api_version = version;
    make_type(version);
    make_device(cpu);
    make_lender();
}

Wrapper::~Wrapper() { store.write_report(); }

void Wrapper::make_type(int version) {
    fill_type(type_v2_, type_name_v2);
    fill_type(type_v3_, type_name_v3);
    type_v2_.device = type_v3_.device = &lender;
    type_v2_.context = type_v3_.context = &store;
    store.type = version == 2 ? reinterpret_cast<BufferType *>(&type_v2_) : reinterpret_cast<BufferType *>(&type_v3_);
}

void Wrapper::make_device(Device *) {
    const DeviceInterface & real = store.inner->iface;
    DeviceInterface & made = device.iface;
    made.get_name = device_name;
    made.get_description = device_description;
    made.get_memory = device_memory;
    made.get_type = device_kind;
    made.get_props = device_props;
    made.init_backend = device_init;
    made.get_buffer_type = device_type;
    made.get_host_buffer_type = real.get_host_buffer_type ? device_host_type : nullptr;
    made.buffer_from_host_ptr = real.buffer_from_host_ptr ? device_from_pointer : nullptr;
    made.supports_op = device_supports;
    made.supports_buft = device_supports_type;
    made.offload_op = real.offload_op ? device_offloads : nullptr;
    made.event_new = real.event_new ? event_new : nullptr;
    made.event_free = real.event_free ? event_free : nullptr;
    made.event_synchronize = real.event_synchronize ? event_synchronize : nullptr;
    device.registry = &registry;
    device.context = this;
}

void Wrapper::make_lender() {
    DeviceInterface & made = lender.iface;
    made.get_name = hybrid::lender_name;
    made.get_description = lender_description;
    made.get_memory = lender_memory;
    made.get_type = lender_kind;
    made.get_props = lender_props;
    made.init_backend = lender_init;
    made.get_buffer_type = lender_type;
    made.buffer_from_host_ptr = store.config.memory == Memory::kMapped ? lender_from_pointer : nullptr;
    made.supports_op = lender_supports;
    made.supports_buft = lender_supports_type;
    lender.registry = &registry;
    lender.context = this;
}

void fill_registry(Registry & registry, std::vector<Wrapper *> * of, int version) {
    registry.api_version = version;
    registry.iface = RegistryInterface{registry_name, registry_count, registry_device, registry_function};
    registry.context = of;
    for (Wrapper * each : *of) {
        each->device.registry = each->lender.registry = &registry;
        each->shown = &registry;
    }
}

}  // namespace hybrid
