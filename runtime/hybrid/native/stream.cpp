#include "stream.h"

#include <algorithm>
#include <cstring>
#include <thread>

namespace hybrid {

namespace {

constexpr size_t kMostPlans = 8;
constexpr size_t kInputAtOnce = 1 << 20;  // bytes of input rows that are read back together with the choices
constexpr int64_t kDeviceBytesUs = 200000;  // copies within a device, a guess that no choice hangs on
constexpr int64_t kStageStart = 50000;      // ns

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

// Sources of a region's products, put back at the end.
class Exchange {
  public:
    explicit Exchange(Region & region) : region_(region) {
        for (Product & product : region.products) {
            kept_.emplace_back(product.node->src[0], product.node->src[2]);
        }
    }
    ~Exchange() {
        for (size_t i = 0; i < kept_.size(); i++) {
            region_.products[i].node->src[0] = kept_[i].first;
            region_.products[i].node->src[2] = kept_[i].second;
        }
    }
    Exchange(const Exchange &) = delete;
    Exchange & operator=(const Exchange &) = delete;

    void set(size_t product, Tensor * weights, Tensor * choices) {
        region_.products[product].node->src[0] = weights;
        if (choices) {
            region_.products[product].node->src[2] = choices;
        }
    }

  private:
    Region & region_;
    std::vector<std::pair<Tensor *, Tensor *>> kept_;
};

// Bytes from the first to the last value of a tensor of rows.
size_t span(const Tensor * t, size_t value) {
    return static_cast<size_t>(t->ne[2] - 1) * t->nb[2] + static_cast<size_t>(t->ne[1] - 1) * t->nb[1] +
           static_cast<size_t>(t->ne[0] - 1) * t->nb[0] + value;
}

}  // namespace

// ---- host memory for transfers

char * Transfer::room(size_t size) {
    if (size <= size_) {
        return data_;
    }
    release();
    const size_t rounded = (size + 65535) / 65536 * 65536;
    const auto host_type = store_.inner->iface.get_host_buffer_type;
    if (host_type && host_type(store_.inner)) {
        buffer_ = store_.host.ggml_backend_buft_alloc_buffer(host_type(store_.inner), rounded);
        data_ = buffer_ ? static_cast<char *>(store_.host.ggml_backend_buffer_get_base(buffer_)) : nullptr;
    }
    if (!data_) {
        plain_.resize(rounded);
        data_ = plain_.data();
    }
    size_ = rounded;
    return data_;
}

void Transfer::release() {
    if (buffer_) {
        store_.host.ggml_backend_buffer_free(buffer_);
    }
    buffer_ = nullptr;
    data_ = nullptr;
    size_ = 0;
}

// ---- life

Stream::Stream(Store & store, Pool & pool, Stage & stage, Backend * inner)
    : store_(store), host_(store.host), pool_(pool), stage_(stage), inner_(inner), ids_(store), input_(store),
      renamed_(store), rows_(store) {
    store_.join(this);
}

Stream::~Stream() {
    synchronize();
    stage_.forget(this);
    store_.part(this);
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
            plans_.erase(plans_.begin() + static_cast<ptrdiff_t>(i));
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
        plans_.erase(std::min_element(plans_.begin(), plans_.end(), [](auto & a, auto & b) { return a->used < b->used; }));
    }
    plans_.push_back(std::move(made));
    return plans_.back().get();
}

Status Stream::compute(Graph * graph) {
    store_.fill(*this);
    Step step(store_.gate);
    std::lock_guard<std::recursive_mutex> lock(api_);
    std::string fault;
    Plan * plan = plan_of(graph, fault);
    if (!plan) {
        store_.voice.fault(fault);
        return kFailed;
    }
    if (plan->regions.empty()) {
        return inner_->iface.graph_compute(inner_, graph);
    }
    pool_.rouse(threads());
    Status status = kSuccess;
    int at = 0;
    for (auto & region : plan->regions) {
        if (abort_ && abort_(abort_data_)) {
            status = kAborted;
            break;
        }
        if (region->begin > at) {
            status = run_nodes(graph, at, region->begin, region->before_uid);
        }
        if (status == kSuccess) {
            status = compute_region(graph, *region, fault);
        }
        if (status != kSuccess) {
            break;
        }
        at = region->end;
    }
    pool_.rest();
    if (status == kSuccess && at < graph->n_nodes) {
        status = run_nodes(graph, at, graph->n_nodes, plan->after_uid);
    }
    if (!fault.empty()) {
        store_.voice.fault(fault);
    }
    return status;
}

Status Stream::run_nodes(Graph * graph, int begin, int end, uint64_t uid) {
    Graph part = slice(*graph, begin, end, uid);
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

// ---- a region

Status Stream::compute_region(Graph * graph, Region & region, std::string & fault) {
    Group & group = *region.group;
    if (group.whole()) {
        return run_whole(graph, region);
    }
    if (!store_.cpu_bytes_us.load() && region.cpu) {
        measure_cpu(region);
    }
    const auto & input = *region.input;
    const bool small = region.cpu && region.n_tokens() <= store_.config.cpu_tokens && span(&input, sizeof(float)) <= kInputAtOnce;
    Choices choices;
    if (!read_choices(region, choices, small)) {
        fault = "no host memory for the choices of the router";
        return kAllocFailed;
    }
    Table table;
    table.slot_of = &group.slot_of;
    table.n_experts = group.n_experts;
    table.n_slots = group.n_slots;
    const bool events = !inner_->iface.synchronize || (inner_->iface.event_wait && store_.inner->iface.event_new);
    std::unique_lock<std::mutex> guests(group.guests, std::defer_lock);
    if (group.n_guests) {
        guests.lock();
        table.n_guests = group.n_guests;
        if (!events && group.guest_owner && group.guest_owner != this) {
            table.n_guests = 0;  // nothing tells when the other's reads end
        }
    }
    std::unique_lock<std::mutex> stage(stage_.mutex, std::defer_lock);
    table.n_stage = stage_.room(region);
    table.cpu = region.cpu;
    table.may_repeat = region.quantised && region.n_tokens() == 1;
    Costs cost = costs(region);
    if (region.n_tokens() > store_.config.cpu_tokens) {
        cost.cpu_pair = std::max(cost.cpu_pair, INT64_MAX / (choices.n_places * choices.n_tokens) / 2);
    }
    std::vector<Tensor *> banks;
    for (;;) {
        fault = router_.route(choices, table, cost, routing_);
        if (!fault.empty()) {
            return kFailed;
        }
        if (routing_.bank == Bank::kSlots) {
            break;
        }
        stage.lock();
        if (events || !stage_.owner || stage_.owner == this) {
            banks = stage_.tensors(region);
            if (!banks.empty()) {
                break;
            }
        }
        stage.unlock();
        table.n_stage = 0;
    }
    count(region, choices);
    work_.pairs = routing_.pairs;
    if (!routing_.pairs.empty() && !small && !read_input(region, true)) {
        fault = "no host memory for the input of a layer";
        return kAllocFailed;
    }
    Status status;
    if (!routing_.device) {
        status = run_others(graph, region);
    } else if (!upload_positions()) {
        fault = "no memory on the device for the choices of the router";
        return kAllocFailed;
    } else if (routing_.bank == Bank::kStage) {
        status = on_stage(graph, region, banks);
        stage.unlock();
    } else {
        status = on_slots(graph, region);
    }
    if (guests.owns_lock()) {
        guests.unlock();
    }
    if (status == kSuccess && !routing_.pairs.empty() && !run_lane(region)) {
        fault = "no host memory for the rows that the CPU computes";
        return kAllocFailed;
    }
    return status;
}

// Every expert has the slot of its own number: nothing is to be decided.
Status Stream::run_whole(Graph * graph, Region & region) {
    Counters & counters = region.group->counters;
    counters.steps++;
    (region.n_places() == region.group->n_experts ? counters.all_at_once : counters.hits) += region.n_places() * region.n_tokens();
    Exchange exchange(region);
    for (size_t i = 0; i < region.products.size(); i++) {
        exchange.set(i, region.products[i].slots, nullptr);
    }
    return run_nodes(graph, region.begin, region.end, region.slots_uid);
}

bool Stream::read_choices(Region & region, Choices & choices, bool with_input) {
    const Tensor * ids = region.ids;
    const size_t size = span(ids, sizeof(int32_t));
    char * data = ids_.room(size);
    if (!data || (with_input && !read_input(region, false))) {
        return false;
    }
    get_async(ids, data, 0, size);
    const int64_t begin = nanoseconds();
    synchronize();
    region.group->counters.wait_ns += nanoseconds() - begin;
    choices.data = data;
    choices.place_stride = ids->nb[0];
    choices.token_stride = ids->nb[1];
    choices.n_places = ids->ne[0];
    choices.n_tokens = ids->ne[1];
    return true;
}

bool Stream::read_input(Region & region, bool wait) {
    const Tensor * input = region.input;
    char * data = input_.room(span(input, sizeof(float)));
    if (!data) {
        return false;
    }
    get_async(input, data, 0, span(input, sizeof(float)));
    if (wait) {
        synchronize();
    }
    inputs_.clear();
    for (int64_t t = 0; t < input->ne[2]; t++) {
        for (int64_t p = 0; p < input->ne[1]; p++) {
            const char * row = data + static_cast<size_t>(t) * input->nb[2] + static_cast<size_t>(p) * input->nb[1];
            inputs_.push_back(reinterpret_cast<const float *>(row));
        }
    }
    return true;
}

bool Stream::upload_positions() {
    const size_t size = routing_.positions.size() * sizeof(int32_t);
    char * data = renamed_.room(size);
    if (!data) {
        return false;
    }
    if (size > positions_bytes_) {
        // All work that reads the old one is done: choices were just waited for.
        if (positions_memory_) {
            host_.ggml_backend_buffer_free(positions_memory_);
            host_.ggml_free(positions_context_);
            positions_memory_ = nullptr;
            positions_context_ = nullptr;
            positions_bytes_ = 0;
            positions_by_shape_.clear();
            renumber();
        }
        const int64_t n = static_cast<int64_t>((size + 16383) / 16384 * 4096);
        positions_context_ = host_.ggml_init(InitParams{host_.ggml_tensor_overhead() * 2, nullptr, true});
        if (!positions_context_) {
            return false;
        }
        positions_ = host_.ggml_new_tensor(positions_context_, kI32, 1, &n);
        positions_memory_ = host_.ggml_backend_alloc_ctx_tensors_from_buft(positions_context_, store_.inner_type);
        if (!positions_memory_) {
            host_.ggml_free(positions_context_);
            positions_context_ = nullptr;
            return false;
        }
        positions_bytes_ = static_cast<size_t>(n) * sizeof(int32_t);
    }
    std::memcpy(data, routing_.positions.data(), size);
#if defined(ATSPLAN_HYBRID_FAULTS)
    if (store_.config.fault == Fault::kWrongSlot) {
        auto * first = reinterpret_cast<int32_t *>(data);
        *first = *first ? *first - 1 : 1;
    }
#endif
    set_async(positions_, data, 0, size);
    return true;
}

// Graphs that the device keeps for these numbers hold addresses that are gone.
void Stream::renumber() {
    for (auto & plan : plans_) {
        for (auto & region : plan->regions) {
            region->slots_uid = plan->uid ? host_.next_uid() : 0;
            region->stage_uid = plan->uid ? host_.next_uid() : 0;
        }
    }
}

Status Stream::run_device(Graph * graph, Region & region, const std::vector<Tensor *> & banks, uint64_t uid) {
    // One tensor of every shape: captured graphs compare addresses.
    Tensor * renamed = nullptr;
    for (auto & shaped : positions_by_shape_) {
        if (shaped->ne[0] == region.n_places() && shaped->ne[1] == region.n_tokens()) {
            renamed = shaped.get();
        }
    }
    if (!renamed) {
        positions_by_shape_.push_back(std::make_unique<Tensor>(*positions_));
        renamed = positions_by_shape_.back().get();
        renamed->ne[0] = region.n_places();
        renamed->ne[1] = region.n_tokens();
        renamed->nb[1] = static_cast<size_t>(region.n_places()) * sizeof(int32_t);
        renamed->nb[2] = renamed->nb[3] = renamed->nb[1] * static_cast<size_t>(region.n_tokens());
    }
    Exchange exchange(region);
    for (size_t i = 0; i < region.products.size(); i++) {
        exchange.set(i, banks.empty() ? region.products[i].slots : banks[i], renamed);
    }
    return run_nodes(graph, region.begin, region.end, uid);
}

Status Stream::on_slots(Graph * graph, Region & region) {
    Group & group = *region.group;
    if (!routing_.uploads.empty()) {
        wait_for(group.guests_read, group.guest_owner);
        for (const Upload & upload : routing_.uploads) {
            for (Product & product : region.products) {
                Matrix & matrix = *product.matrix;
                const size_t each = matrix.tensor->nb[2];
                const char * data = static_cast<const char *>(matrix.tensor->data) + static_cast<size_t>(upload.expert) * each;
                set_async(matrix.slots, data, static_cast<size_t>(upload.position) * each, each);
                group.counters.upload_bytes += static_cast<int64_t>(each);
            }
        }
        group.counters.uploads += static_cast<int64_t>(routing_.uploads.size());
    }
    const Status status = run_device(graph, region, {}, region.slots_uid);
    if (!routing_.uploads.empty()) {
        record(group.guests_read);
        group.guest_owner = this;
    }
    return status;
}

// Residents are copied on the device, the others brought; experts that lie together come in one piece.
Status Stream::on_stage(Graph * graph, Region & region, const std::vector<Tensor *> & banks) {
    Group & group = *region.group;
    wait_for(stage_.read, stage_.owner);
    bool copied = false;
    Status status = copy_residents(region, banks, copied);
    if (status != kSuccess) {
        return status;
    }
    for (size_t i = 0; i < region.products.size(); i++) {
        const Tensor * tensor = region.products[i].matrix->tensor;
        const size_t each = tensor->nb[2];
        const auto * data = static_cast<const char *>(tensor->data);
        for (int32_t slot = 0; !copied && slot < group.n_slots; slot++) {
            const int32_t expert = group.expert_in[static_cast<size_t>(slot)];
            if (expert >= 0) {
                set_async(banks[i], data + static_cast<size_t>(expert) * each, static_cast<size_t>(slot) * each, each);
            }
        }
        for (const Upload & upload : routing_.uploads) {
            set_async(banks[i], data + static_cast<size_t>(upload.expert) * each, static_cast<size_t>(upload.position) * each, each);
            group.counters.upload_bytes += static_cast<int64_t>(each);
        }
    }
    group.counters.uploads += static_cast<int64_t>(routing_.uploads.size());
    group.counters.staged++;
    status = run_device(graph, region, banks, region.stage_uid);
    record(stage_.read);
    stage_.owner = this;
    return status;
}

Status Stream::copy_residents(Region & region, const std::vector<Tensor *> & banks, bool & copied) {
    const int64_t n_slots = region.group->n_slots;
    copied = n_slots == 0;
    if (copied) {
        return kSuccess;
    }
    const size_t n = region.products.size();
    const size_t size = host_.ggml_tensor_overhead() * (3 * n + 1) + host_.ggml_graph_overhead_custom(16 + n, false);
    Context * context = host_.ggml_init(InitParams{size, nullptr, true});
    if (!context) {
        return kAllocFailed;
    }
    Graph * graph = host_.ggml_new_graph_custom(context, 16 + n, false);
    bool can = true;
    for (size_t i = 0; i < n; i++) {
        const Tensor * slots = region.products[i].matrix->slots;
        const int64_t shape[3] = {slots->ne[0], slots->ne[1], n_slots};
        Tensor * ends[2];
        for (int end = 0; end < 2; end++) {
            ends[end] = host_.ggml_new_tensor(context, slots->type, 3, shape);
            ends[end]->buffer = end ? banks[i]->buffer : slots->buffer;
            ends[end]->data = end ? banks[i]->data : slots->data;
        }
        Tensor * copy = host_.ggml_cpy(context, ends[0], ends[1]);
        copy->buffer = ends[1]->buffer;
        copy->data = ends[1]->data;
        can = can && store_.inner->iface.supports_op(store_.inner, copy);
        host_.ggml_build_forward_expand(graph, copy);
    }
    Status status = kSuccess;
    if (can) {
        status = inner_->iface.graph_compute(inner_, graph);
        copied = true;
    }
    host_.ggml_free(context);
    return status;
}

// ---- the CPU lane

bool Stream::run_lane(Region & region) {
    const int64_t begin = nanoseconds();
    const size_t n_first = region.has_program ? region.products.size() - 1 : 1;
    work_.first.clear();
    for (size_t i = 0; i < n_first; i++) {
        work_.first.push_back(region.products[i].weights);
    }
    work_.program = region.has_program ? &region.program : nullptr;
    work_.first_rows = region.first_rows;
    work_.result = region.result;
    work_.last = region.products.back().weights;
    work_.stale_row = store_.config.fault == Fault::kStaleRow;
    work_.exchanged = store_.config.fault == Fault::kExchanged;
    const auto n_inputs = static_cast<int32_t>(region.input->ne[1]);
    order_.resize(work_.pairs.size());
    for (size_t p = 0; p < work_.pairs.size(); p++) {
        Pair & pair = work_.pairs[p];
        pair.input = pair.token * n_inputs + pair.place % n_inputs;
        order_[p] = static_cast<int32_t>(p);
    }
    // Rows that lie together in the output stand together here, whoever computes them.
    std::sort(order_.begin(), order_.end(), [&](int32_t a, int32_t b) {
        const Pair &x = work_.pairs[static_cast<size_t>(a)], &y = work_.pairs[static_cast<size_t>(b)];
        return x.token != y.token ? x.token < y.token : x.place < y.place;
    });
    for (size_t row = 0; row < order_.size(); row++) {
        work_.pairs[static_cast<size_t>(order_[row])].row = static_cast<int32_t>(row);
    }
    const size_t bytes = work_.pairs.size() * static_cast<size_t>(work_.n_out()) * sizeof(float);
    auto * rows = reinterpret_cast<float *>(rows_.room(bytes));
    if (!rows) {
        return false;
    }
    work_.inputs = inputs_.data();
    work_.outputs = rows;
    lane_.compute(host_, pool_, work_, inputs_.size(), threads());
    region.group->counters.cpu_ns += nanoseconds() - begin;
    write_rows(region, rows);
    return true;
}

// Over what the device computed for these choices; the queue keeps the order.
void Stream::write_rows(Region & region, const float * rows) {
    const Tensor * out = region.output;
    const auto width = static_cast<size_t>(out->ne[0]) * sizeof(float);
    for (size_t row = 0; row < order_.size();) {
        const Pair & pair = work_.pairs[static_cast<size_t>(order_[row])];
        size_t n = 1;
        while (row + n < order_.size() && out->nb[1] == width) {
            const Pair & next = work_.pairs[static_cast<size_t>(order_[row + n])];
            if (next.token != pair.token || next.place != pair.place + static_cast<int32_t>(n)) {
                break;
            }
            n++;
        }
        const size_t offset = static_cast<size_t>(pair.token) * out->nb[2] + static_cast<size_t>(pair.place) * out->nb[1];
        set_async(region.output, rows + row * static_cast<size_t>(out->ne[0]), offset, n * width);
        row += n;
    }
}

// ---- costs and counts

Costs Stream::costs(const Region & region) const {
    const auto time = [&](int64_t bytes, int64_t bytes_us, int64_t guess) {
        return std::max<int64_t>(bytes * 1000 / (bytes_us ? bytes_us : guess), 1);
    };
    Costs found;
    found.cpu_pair = time(region.expert_bytes, store_.cpu_bytes_us.load(), 20000);
    found.bus_expert = time(region.expert_bytes, store_.bus_bytes_us.load(), 12000);
    found.stage = kStageStart + time(region.expert_bytes * region.group->n_slots, kDeviceBytesUs, kDeviceBytesUs);
    return found;
}

// Once after loading: how fast the lane reads weights, by a product of its own with the first experts.
void Stream::measure_cpu(Region & region) {
    const Weights & weights = region.products[0].weights;
    const std::vector<float> zeros(static_cast<size_t>(weights.n_in), 0.0f);
    const float * input = zeros.data();
    LaneWork work;
    work.first.push_back(weights);
    const int32_t n = std::min<int32_t>(8, region.group->n_experts);
    for (int32_t expert = 0; expert < n; expert++) {
        work.pairs.push_back(Pair{expert, 0, expert, 0, expert});
    }
    std::vector<float> rows(static_cast<size_t>(n) * static_cast<size_t>(weights.n_out));
    work.inputs = &input;
    work.outputs = rows.data();
    int64_t best = INT64_MAX;
    for (int turn = 0; turn < 3; turn++) {
        const int64_t begin = nanoseconds();
        lane_.compute(host_, pool_, work, 1, threads());
        best = std::min(best, nanoseconds() - begin);
    }
    const int64_t bytes = static_cast<int64_t>(weights.expert_bytes) * n;
    store_.cpu_bytes_us = std::max<int64_t>(bytes * 1000 / std::max<int64_t>(best, 1), 1);
}

void Stream::count(Region & region, const Choices & choices) {
    Counters & counters = region.group->counters;
    counters.steps++;
    if (choices.n_places == region.group->n_experts) {
        counters.all_at_once += choices.n_places * choices.n_tokens;  // warm-up: no choice of a router
        return;
    }
    counters.hits += routing_.n_hits;
    counters.uploaded += routing_.n_uploaded;
    counters.cpu += routing_.n_cpu;
    if (region.products[0].matrix->role == Role::kDown) {
        return;  // the same choices as of the products before it
    }
    for (int64_t t = 0; t < choices.n_tokens; t++) {
        for (int64_t p = 0; p < choices.n_places; p++) {
            counters.chosen[static_cast<size_t>(choices.at(t, p))].fetch_add(1, std::memory_order_relaxed);
        }
    }
}

}  // namespace hybrid
