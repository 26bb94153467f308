#include "stream.h"

#include <algorithm>
#include <thread>

namespace hybrid {

namespace {

constexpr size_t kMostPlans = 8;

// A part of a graph that keeps what fusion asks of the whole.
Graph slice(const Graph & graph, int begin, int end, uint64_t uid) {
    Graph part = graph;
    part.size = 0;
    part.n_nodes = end - begin;
    part.n_leafs = 0;
    part.nodes = graph.nodes + begin;
    part.grads = part.grad_accs = part.leafs = nullptr;
    part.uid = uid;
    return part;
}

// Sources of the products whose experts all have slots, put back at the end.
class Residents {
  public:
    explicit Residents(const Plan & plan) : plan_(plan) {
        each([](const Product & product) { product.node->src[0] = product.slots; });
    }
    ~Residents() {
        each([](const Product & product) { product.node->src[0] = product.source; });
    }
    Residents(const Residents &) = delete;
    Residents & operator=(const Residents &) = delete;

  private:
    template <typename F>
    void each(F f) const {
        for (const auto & region : plan_.resident) {
            std::for_each(region->products.begin(), region->products.end(), f);
        }
    }

    const Plan & plan_;
};

}  // namespace

// ---- life

Stream::Stream(Store & store, Pool & pool, Stage & stage, Backend * inner)
    : store_(store), host_(store.host), pool_(pool), stage_(stage), inner_(inner), prefetch_(store, stage, *this), kept_(host_), ids_(store), input_(store),
      renamed_(store), rows_(store) {
    store_.join(this);
    if (inner->iface.set_tensor_2d_async) {
        store_.set_copies_strips();
    }
}

Stream::~Stream() {
    synchronize();
    stage_.forget(this);
    store_.part(this);
    if (read_) {
        store_.inner->iface.event_free(store_.inner, read_);
    }
    if (positions_memory_) {
        host_.ggml_backend_buffer_free(positions_memory_);
    }
    if (positions_context_) {
        host_.ggml_free(positions_context_);
    }
    host_.ggml_backend_free(inner_);
}

size_t Stream::host_bytes() const {
    return ids_.bytes() + input_.bytes() + renamed_.bytes() + rows_.bytes() + lane_.bytes();
}

int Stream::threads() const {
    if (store_.config.threads) {
        return store_.config.threads;
    }
    return n_threads_ ? n_threads_ : std::max(1, static_cast<int>(std::thread::hardware_concurrency() / 2));
}

// ---- transfers

void Stream::synchronize() {
    std::lock_guard<std::recursive_mutex> lock(api_);
    if (inner_->iface.synchronize) {
        inner_->iface.synchronize(inner_);
    }
    kept_.let_go();
    slots_written_ = false;
    progress_->finished.store(progress_->queued, std::memory_order_release);
}

void Stream::set_async(Tensor * tensor, const void * data, size_t offset, size_t size) {
    std::lock_guard<std::recursive_mutex> lock(api_);
    if (inner_->iface.set_tensor_async && tensor->buffer->type == store_.inner_type) {
        inner_->iface.set_tensor_async(inner_, tensor, data, offset, size);
    } else {
        synchronize();
        host_.ggml_backend_tensor_set(tensor, data, offset, size);
    }
}

void Stream::get_async(const Tensor * tensor, void * data, size_t offset, size_t size) {
    std::lock_guard<std::recursive_mutex> lock(api_);
    const Buffer * buffer = tensor->view_src ? tensor->view_src->buffer : tensor->buffer;
    if (inner_->iface.get_tensor_async && buffer->type == store_.inner_type) {
        inner_->iface.get_tensor_async(inner_, tensor, data, offset, size);
    } else {
        synchronize();
        host_.ggml_backend_tensor_get(tensor, data, offset, size);
    }
}

// What another stream queued on memory that both use ends before what this one queues next.
void Stream::wait_for(Event * event, Stream * owner) {
    if (owner && owner != this && event && inner_->iface.event_wait) {
        inner_->iface.event_wait(inner_, event);
    }
}

void Stream::record(Event *& event) {
    const DeviceInterface & device = store_.inner->iface;
    if (!event && device.event_new && inner_->iface.event_record) {
        event = device.event_new(store_.inner);
    }
    if (event) {
        inner_->iface.event_record(inner_, event);
    }
}

// ---- a graph

Plan * Stream::plan_of(Graph * graph, std::string & fault) {
    clock_++;
    for (size_t i = 0; i < plans_.size();) {
        Plan & plan = *plans_[i];
        if (plan.version != store_.version() || !plan.uid) {
            drop(plans_.begin() + static_cast<ptrdiff_t>(i));
            continue;
        }
        if (plan.uid == graph->uid && plan.n_nodes == graph->n_nodes) {
            plan.used = clock_;
            return &plan;
        }
        i++;
    }
    auto made = make_plan(store_, graph, fault);
    if (!made) {
        return nullptr;
    }
    made->used = clock_;
    if (plans_.size() >= kMostPlans) {
        drop(std::min_element(plans_.begin(), plans_.end(), [](auto & a, auto & b) { return a->used < b->used; }));
    }
    plan_ahead(graph, *made);
    plans_.push_back(std::move(made));
    return plans_.back().get();
}

// Nodes of its own were given to the device: see Kept.
void Stream::drop(std::vector<std::unique_ptr<Plan>>::iterator plan) {
    const auto & regions = (*plan)->regions;
    if (std::any_of(regions.begin(), regions.end(), [](const auto & region) { return region->ahead != nullptr; })) {
        synchronize();
    }
    plans_.erase(plan);
}

Status Stream::compute(Graph * graph) {
    try {
        store_.fill(*this, *graph);
        Step step(store_.gate);
        std::lock_guard<std::recursive_mutex> lock(api_);
        std::string fault;
        const Status status = compute_in_step(graph, fault);
        if (!fault.empty()) {
            store_.voice.fault(fault);
        }
        return status;
    } catch (...) {
        return store_.voice.caught("a step");
    }
}

// What others see is whole again before an exception leaves the step.
Status Stream::compute_in_step(Graph * graph, std::string & fault) {
    try {
        Plan * plan = plan_of(graph, fault);
        if (!plan) {
            return kFailed;
        }
        if (plan->resident.empty()) {
            return compute_plan(graph, *plan, fault);
        }
        const Residents residents(*plan);
        const Status status = compute_plan(graph, *plan, fault);
        count_resident(*plan);
        return status;
    } catch (...) {
        give_up();
        throw;
    }
}

void Stream::give_up() {
    if (at_work_) {
        lane_.finish(pool_, at_work_->work, threads());
        at_work_ = nullptr;
    }
    prefetch_.end();
    if (awake_) {
        pool_.rest();
        awake_ = false;
    }
}

Status Stream::compute_plan(Graph * graph, Plan & plan, std::string & fault) {
    if (plan.regions.empty()) {
        return inner_->iface.graph_compute(inner_, graph);
    }
    prefetch_.begin(plan);
    Status status = kSuccess;
    int at = 0;
    for (auto & region : plan.regions) {
        if (abort_ && abort_(abort_data_)) {
            status = kAborted;
            break;
        }
        const int64_t begin = nanoseconds();
        if (region->begin > at || region->ahead) {
            status = run_before(graph, *region, at);
        }
        region->group->counters.ahead_ns += nanoseconds() - begin;
        if (!awake_) {
            pool_.rouse(threads());  // it wakes while the device computes
            awake_ = true;
        }
        if (status == kSuccess) {
            status = compute_region(graph, *region, fault);
        }
        if (status != kSuccess) {
            break;
        }
        at = region->end;
    }
    prefetch_.end();
    if (awake_) {
        pool_.rest();
        awake_ = false;
    }
    if (status == kSuccess && at < graph->n_nodes) {
        status = run_nodes(graph, at, graph->n_nodes, plan.after_uid);
    }
    return status;
}

void Stream::count_resident(const Plan & plan) {
    for (const auto & region : plan.resident) {
        Counters & counters = region->group->counters;
        const int64_t n = region->n_places() * region->n_tokens();
        counters.steps++;
        if (region->n_places() == region->group->n_experts) {
            counters.all_at_once += n;
            continue;
        }
        counters.hits += n;
        counters.count_rows(region->n_tokens(), region->n_places(), [&](size_t) { return region->n_places(); });
    }
}

Status Stream::run_nodes(Graph * graph, int begin, int end, uint64_t uid) {
    Graph part = slice(*graph, begin, end, uid);
    return inner_->iface.graph_compute(inner_, &part);
}

Status Stream::run_before(Graph * graph, const Region & region, int begin) {
    if (!region.ahead) {
        return run_nodes(graph, begin, region.begin, region.before_uid);
    }
    Graph part = slice(*graph, begin, region.begin, region.before_uid);
    part.nodes = const_cast<Tensor **>(region.ahead->nodes.data());
    part.n_nodes = static_cast<int>(region.ahead->nodes.size());
    return inner_->iface.graph_compute(inner_, &part);
}

Status Stream::run_others(Graph * graph, Region & region) {
    for (const auto & [begin, end] : region.others) {
        const Status status = run_nodes(graph, begin, end, 0);
        if (status != kSuccess) {
            return status;
        }
    }
    return kSuccess;
}

}  // namespace hybrid
