#include "slow_device.h"

#include "engine.h"

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <utility>
#include <vector>

namespace trial {

namespace {

uint8_t kGuid[16] = {7};

SlowDevice & of(Device * device) { return *static_cast<SlowDevice *>(device->context); }

// What a call costs the host on a real device, roughly.
void spend(int64_t ns) {
    if (ns == 0) {
        return;
    }
    const auto end = std::chrono::steady_clock::now() + std::chrono::nanoseconds(ns);
    while (std::chrono::steady_clock::now() < end) {
    }
}

// ---- memory: host memory that claims not to be

template <typename Type>
void buffer_free(Buffer * buffer) {
    static_cast<SlowDevice *>(reinterpret_cast<Type *>(buffer->type)->context)->n_buffers--;
    std::free(buffer->context);
}

void * buffer_base(Buffer * buffer) { return buffer->context; }

void buffer_set(Buffer *, Tensor * tensor, const void * data, size_t offset, size_t size) {
    std::memcpy(static_cast<char *>(tensor->data) + offset, data, size);
}

void buffer_get(Buffer *, const Tensor * tensor, void * data, size_t offset, size_t size) {
    std::memcpy(data, static_cast<const char *>(tensor->data) + offset, size);
}

void buffer_memset(Buffer *, Tensor * tensor, uint8_t value, size_t offset, size_t size) {
    std::memset(static_cast<char *>(tensor->data) + offset, value, size);
}

void buffer_clear(Buffer * buffer, uint8_t value) { std::memset(buffer->context, value, buffer->size); }

template <typename Type>
Buffer * alloc(BufferType * type, size_t size) {
    const OutsideLibrary own;
    auto & slow = *static_cast<SlowDevice *>(reinterpret_cast<Type *>(type)->context);
    if (slow.n_left == 0) {
        return nullptr;
    }
    slow.n_left -= slow.n_left > 0 ? 1 : 0;
    slow.n_buffers++;
    void * memory = std::aligned_alloc(128, (size + 127) / 128 * 128);
    std::memset(memory, 0x7f, size);  // what was not written shows
    BufferInterface functions{};
    functions.free_buffer = buffer_free<Type>;
    functions.get_base = buffer_base;
    functions.set_tensor = buffer_set;
    functions.get_tensor = buffer_get;
    functions.memset_tensor = buffer_memset;
    functions.clear = buffer_clear;
    return slow.host.ggml_backend_buffer_init(type, functions, memory, size);
}

const char * type_name(BufferType *) { return "SLOW"; }
size_t alignment(BufferType *) { return 128; }
bool not_host(BufferType *) { return false; }

template <typename Type>
void fill(Type & type, SlowDevice & slow) {
    type.get_name = type_name;
    type.alloc_buffer = alloc<Type>;
    type.get_alignment = alignment;
    type.is_host = not_host;
    type.device = &slow.device;
    type.context = &slow;
}

// ---- a queue

struct Signal {
    std::mutex mutex;
    std::condition_variable reached;
    uint64_t recorded = 0, done = 0;
};

// A graph as it was when it was queued: sources are put back by callers, nodes are used again.
struct Snapshot {
    std::map<const Tensor *, std::unique_ptr<Tensor>> copies;
    std::vector<Tensor *> nodes;
    Graph graph{};

    Tensor * copy(const Tensor * tensor) {
        auto & made = copies[tensor];
        if (!made) {
            made = std::make_unique<Tensor>(*tensor);
        }
        return made.get();
    }

    explicit Snapshot(const Graph & from) {
        for (int i = 0; i < from.n_nodes; i++) {
            Tensor * node = copy(from.nodes[i]);
            for (Tensor *& source : node->src) {
                source = source ? copy(source) : nullptr;
            }
            nodes.push_back(node);
        }
        graph = from;
        graph.nodes = nodes.data();
        graph.uid = 0;
    }
};

// The kernels are not instrumented: read here what they will read, so that a sanitizer sees it.
void touch(const Host & host, const Tensor * node) {
    if (node->op != host.op_mul_mat_id) {
        return;
    }
    const Tensor *weights = node->src[0], *ids = node->src[2];
    volatile unsigned sum = 0;
    for (int64_t t = 0; t < ids->ne[1]; t++) {
        for (int64_t p = 0; p < ids->ne[0]; p++) {
            const char * at = static_cast<const char *>(ids->data) + static_cast<size_t>(t) * ids->nb[1] + static_cast<size_t>(p) * ids->nb[0];
            const int32_t expert = *reinterpret_cast<const int32_t *>(at);
            if (expert < 0 || expert >= weights->ne[2]) {
                std::fprintf(stderr, "slow device: expert %d of %d\n", expert, static_cast<int>(weights->ne[2]));
                std::abort();
            }
            const auto * data = static_cast<const unsigned char *>(weights->data) + static_cast<size_t>(expert) * weights->nb[2];
            for (size_t i = 0; i < weights->nb[2]; i += 64) {
                sum = sum + data[i];
            }
        }
    }
}

class Queue {
  public:
    Queue(SlowDevice & slow, Backend * real) : slow_(slow), real_(real), thread_([this] { work(); }) {}

    ~Queue() {
        put([this] { ended_ = true; });
        thread_.join();
        slow_.host.ggml_backend_free(real_);
    }

    void put(std::function<void()> task) {
        std::lock_guard<std::mutex> lock(mutex_);
        tasks_.push_back(std::move(task));
        changed_.notify_all();
    }

    void wait() {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [&] { return tasks_.empty() && !busy_; });
    }

    // As ggml's Vulkan does, nodes of graphs before are looked at until the queue is synchronized.
    void look(const Graph & graph) {
        for (const Tensor * node : unsynced_) {
            looked_ = looked_ + (node->buffer ? 1u : 0u);
        }
        unsynced_.insert(unsynced_.end(), graph.nodes, graph.nodes + graph.n_nodes);
    }

    void synchronized() { unsynced_.clear(); }

    void compute(const Graph & graph) {
        auto snapshot = std::make_shared<Snapshot>(graph);
        put([this, snapshot] {
            std::this_thread::sleep_for(std::chrono::microseconds(150));
            for (Tensor * node : snapshot->nodes) {
                touch(slow_.host, node);
            }
            real_->iface.graph_compute(real_, &snapshot->graph);
        });
    }

  private:
    void work() {
        std::unique_lock<std::mutex> lock(mutex_);
        while (!ended_) {
            changed_.wait(lock, [&] { return !tasks_.empty(); });
            auto task = std::move(tasks_.front());
            tasks_.pop_front();
            busy_ = true;
            lock.unlock();
            task();
            lock.lock();
            busy_ = false;
            changed_.notify_all();
        }
    }

    SlowDevice & slow_;
    Backend * real_;
    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<std::function<void()>> tasks_;
    bool busy_ = false, ended_ = false;
    std::vector<const Tensor *> unsynced_;
    volatile unsigned looked_ = 0;
    std::thread thread_;
};

Queue & queue(Backend * backend) { return *static_cast<Queue *>(backend->context); }

// ---- backend

const char * backend_name(Backend *) { return "SLOW0"; }

void backend_free(Backend * backend) {
    delete &queue(backend);
    delete backend;
}

void set_async(Backend * backend, Tensor * tensor, const void * data, size_t offset, size_t size) {
    const OutsideLibrary own;
    SlowDevice & slow = of(backend->device);
    slow.calls.uploads++;
    slow.calls.bytes += static_cast<int64_t>(size);
    if (locks.offered) {
        std::lock_guard<std::mutex> lock(locks.mutex);
        locks.read.push_back(data);
    }
    if (slow.idle) {
        spend(slow.copy_ns);
        std::memcpy(static_cast<char *>(tensor->data) + offset, data, size);
        return;
    }
    // Page-locked memory is read when the copy runs, not when it is queued.
    char * to = static_cast<char *>(tensor->data) + offset;
    queue(backend).put([=] { std::memcpy(to, data, size); });
}

void set_2d_async(Backend * backend, Tensor * tensor, const void * data, size_t offset, size_t size, size_t n, size_t to, size_t from) {
    const OutsideLibrary own;
    SlowDevice & slow = of(backend->device);
    slow.calls.uploads++;
    slow.calls.bytes += static_cast<int64_t>(size * n);
    char * target = static_cast<char *>(tensor->data) + offset;
    const auto copy = [=] {
        for (size_t i = 0; i < n; i++) {
            std::memcpy(target + i * to, static_cast<const char *>(data) + i * from, size);
        }
    };
    if (slow.idle) {
        spend(slow.copy_ns);
        copy();
    } else {
        queue(backend).put(copy);
    }
}

void get_async(Backend * backend, const Tensor * tensor, void * data, size_t offset, size_t size) {
    const OutsideLibrary own;
    const char * from = static_cast<const char *>(tensor->data) + offset;
    SlowDevice & slow = of(backend->device);
    slow.calls.reads++;
    if (slow.idle) {
        spend(slow.copy_ns);
        std::memcpy(data, from, size);
        return;
    }
    queue(backend).put([=] { std::memcpy(data, from, size); });
}

void synchronize(Backend * backend) {
    of(backend->device).calls.waits++;
    if (!of(backend->device).idle) {
        queue(backend).wait();
        queue(backend).synchronized();
    }
}

Status graph_compute(Backend * backend, Graph * graph) {
    const OutsideLibrary own;
    SlowDevice & slow = of(backend->device);
    if (slow.n_fail_after >= 0 && slow.n_graphs >= slow.n_fail_after) {
        return kFailed;
    }
    if (slow.throws) {
        std::exchange(slow.throws, nullptr)();
    }
    slow.n_graphs++;
    slow.calls.graphs++;
    slow.calls.nodes += graph->n_nodes;
    if (slow.idle) {
        spend(slow.graph_ns);
        return kSuccess;
    }
    queue(backend).look(*graph);
    queue(backend).compute(*graph);
    return kSuccess;
}

void event_record(Backend * backend, Event * event) {
    const OutsideLibrary own;
    of(backend->device).calls.events++;
    if (of(backend->device).idle) {
        return;
    }
    auto * signal = static_cast<Signal *>(event->context);
    uint64_t number;
    {
        std::lock_guard<std::mutex> lock(signal->mutex);
        number = ++signal->recorded;
    }
    queue(backend).put([=] {
        std::lock_guard<std::mutex> lock(signal->mutex);
        signal->done = std::max(signal->done, number);
        signal->reached.notify_all();
    });
}

void event_wait(Backend * backend, Event * event) {
    const OutsideLibrary own;
    of(backend->device).calls.events++;
    if (of(backend->device).idle) {
        return;
    }
    auto * signal = static_cast<Signal *>(event->context);
    uint64_t number;
    {
        std::lock_guard<std::mutex> lock(signal->mutex);
        number = signal->recorded;
    }
    queue(backend).put([=] {
        std::unique_lock<std::mutex> lock(signal->mutex);
        signal->reached.wait(lock, [&] { return signal->done >= number; });
    });
}

// ---- device

const char * device_name(Device * device) { return of(device).name; }
const char * device_description(Device *) { return "a slow device"; }
void device_memory(Device *, size_t * free, size_t * total) { *free = *total = size_t{1} << 34; }
DeviceKind device_kind(Device *) { return kGpu; }

void device_props(Device * device, Properties * properties) {
    *properties = Properties{};
    properties->name = device_name(device);
    properties->description = device_description(device);
    properties->type = kGpu;
}

Backend * device_init(Device * device, const char *) {
    const OutsideLibrary own;
    SlowDevice & slow = of(device);
    Backend * real = slow.cpu->iface.init_backend(slow.cpu, nullptr);
    Registry * registry = slow.cpu->registry;
    auto set_threads = reinterpret_cast<void (*)(Backend *, int)>(
        registry->iface.get_proc_address(registry, "ggml_backend_set_n_threads"));
    set_threads(real, 1);  // the engine's own threads are not instrumented
    auto * made = new Backend{};
    made->guid = &kGuid;
    made->iface.get_name = backend_name;
    made->iface.free = backend_free;
    made->iface.set_tensor_async = set_async;
    made->iface.set_tensor_2d_async = device->iface.event_new ? set_2d_async : nullptr;  // with and without
    made->iface.get_tensor_async = get_async;
    made->iface.synchronize = synchronize;
    made->iface.graph_compute = graph_compute;
    if (device->iface.event_new) {
        made->iface.event_record = event_record;
        made->iface.event_wait = event_wait;
    }
    made->device = device;
    made->context = new Queue(slow, real);
    return made;
}

BufferType * device_type(Device * device);

bool device_supports(Device * device, const Tensor * node) { return of(device).cpu->iface.supports_op(of(device).cpu, node); }
bool device_supports_type(Device * device, BufferType * type) { return type == device->iface.get_buffer_type(device); }

BufferType * host_type(Device * device) {
    SlowDevice & slow = of(device);
    return slow.refuses_host ? slow.refusing() : slow.host.ggml_backend_cpu_buffer_type();
}

// Locking takes its time, and some more once a test lets it end: whoever does not wait for it reads meanwhile.
bool lock_pages(void * address, size_t size) {
    locks.n_asked++;
    while (!locks.may_end) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    std::lock_guard<std::mutex> lock(locks.mutex);
    const auto * begin = static_cast<const char *>(address);
    for (const void * at : locks.read) {
        locks.n_early += at >= begin && at < begin + size ? 1 : 0;
    }
    if (locks.refused || size == 0 || !address) {
        return false;
    }
    locks.ranges[address] = size;
    locks.n_locked++;
    return true;
}

// The memory is still there then.
void unlock_pages(void * address) {
    std::lock_guard<std::mutex> lock(locks.mutex);
    const auto found = locks.ranges.find(address);
    if (found == locks.ranges.end()) {
        locks.n_unknown++;
        return;
    }
    const auto * bytes = static_cast<const volatile char *>(address);
    (void)bytes[0];
    (void)bytes[found->second - 1];
    locks.ranges.erase(found);
    locks.n_locked--;
}

void * registry_function(Registry *, const char * name) {
    if (locks.offered && std::strcmp(name, "ggml_backend_register_host_buffer") == 0) {
        return reinterpret_cast<void *>(lock_pages);
    }
    if (locks.offered && std::strcmp(name, "ggml_backend_unregister_host_buffer") == 0) {
        return reinterpret_cast<void *>(unlock_pages);
    }
    return nullptr;
}

Buffer * no_buffer(BufferType *, size_t) { return nullptr; }

Event * event_new(Device * device) {
    const OutsideLibrary own;
    return new Event{device, new Signal};
}

void event_free(Device *, Event * event) {
    delete static_cast<Signal *>(event->context);
    delete event;
}

void event_synchronize(Device * device, Event * event) {
    of(device).calls.waits++;
    auto * signal = static_cast<Signal *>(event->context);
    std::unique_lock<std::mutex> lock(signal->mutex);
    signal->reached.wait(lock, [&] { return signal->done >= signal->recorded; });
}

std::map<const Device *, BufferType *> & types() {
    static std::map<const Device *, BufferType *> made;
    return made;
}

BufferType * device_type(Device * device) { return types().at(device); }

}  // namespace

Locks locks;

BufferType * SlowDevice::refusing() {
    return cpu->registry->api_version == 2 ? reinterpret_cast<BufferType *>(&refusing_v2_) : reinterpret_cast<BufferType *>(&refusing_v3_);
}

SlowDevice::SlowDevice(const Host & h, Device * c, bool with_events) : host(h), cpu(c) {
    fill(type_v2_, *this);
    fill(type_v3_, *this);
    fill(refusing_v2_, *this);
    fill(refusing_v3_, *this);
    refusing_v2_.alloc_buffer = refusing_v3_.alloc_buffer = no_buffer;
    const bool old = c->registry->api_version == 2;
    types()[&device] = old ? reinterpret_cast<BufferType *>(&type_v2_) : reinterpret_cast<BufferType *>(&type_v3_);
    registry_.api_version = c->registry->api_version;
    registry_.iface.get_name = [](Registry *) { return "SLOW"; };
    registry_.iface.get_device_count = [](Registry *) { return size_t{1}; };
    registry_.iface.get_proc_address = registry_function;
    DeviceInterface & made = device.iface;
    made.get_name = device_name;
    made.get_description = device_description;
    made.get_memory = device_memory;
    made.get_type = device_kind;
    made.get_props = device_props;
    made.init_backend = device_init;
    made.get_buffer_type = device_type;
    made.supports_op = device_supports;
    made.supports_buft = device_supports_type;
    if (with_events) {
        made.event_new = event_new;
        made.event_free = event_free;
        made.event_synchronize = event_synchronize;
        made.get_host_buffer_type = host_type;
    }
    device.registry = &registry_;
    device.context = this;
}

}  // namespace trial
