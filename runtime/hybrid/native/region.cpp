// One region of a graph: choices read back, divided, and handed to the lanes.
#include <algorithm>
#include <cstring>

#include "stream.h"

namespace hybrid {

namespace {

constexpr size_t kInputAtOnce = 1 << 20;  // bytes of input rows that are read back together with the choices

// Sources of a region's products, put back at the end.
class Exchange {
  public:
    explicit Exchange(Region & region) : region_(region) {
        kept_.reserve(region.products.size());
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

// Whether the router's choices of a step are seen here for the first time, and are its own: not those of warm-up.
bool chooses(const Region & region) {
    const Role role = region.products[0].matrix->role;
    return (region.has_program || role == Role::kUp || role == Role::kGateUp) && region.n_places() != region.group->n_experts;
}

}  // namespace

Table table_of(const Group & group) {
    Table table;
    table.slot_of = &group.slot_of;
    table.n_experts = group.n_experts;
    table.n_slots = group.n_slots;
    return table;
}

// Whether a region's input is read back together with its choices.
bool Stream::reads_input(const Region & region) const {
    return region.cpu && region.n_tokens() <= store_.config.cpu_tokens && span(region.input, sizeof(float)) <= kInputAtOnce;
}

Status Stream::compute_region(Graph * graph, Region & region, std::string & fault) {
    Group & group = *region.group;
    if (prefetch_.holds(region)) {
        bool taken = false;
        const Status status = on_prefetched(graph, region, fault, taken);
        if (taken || status != kSuccess) {
            return status;
        }
    }
    if (region.ahead) {
        return compute_ahead(graph, region, fault);
    }
    const bool small = reads_input(region);
    Choices choices;
    if (!read_choices(region, choices, small)) {
        fault = "no host memory for the choices of the router";
        return kAllocFailed;
    }
    Table table = table_of(group);
    const bool events = !inner_->iface.synchronize || (inner_->iface.event_wait && store_.inner->iface.event_new);
    std::unique_lock<std::mutex> guests(group.guests, std::defer_lock);
    // Who holds the stage waits for no guests: others wait for the stage with guests in hand.
    if (group.n_guests && (prefetch_.active() ? guests.try_lock() : (guests.lock(), true))) {
        table.n_guests = group.n_guests;
        if (!events && group.guest_owner && group.guest_owner != this) {
            table.n_guests = 0;  // nothing tells when the other's reads end
        }
    }
    measure(region, table.n_guests);
    const bool may_repeat = region.quantised && region.n_tokens() == 1;
    const auto n_needed = may_repeat ? 1 : static_cast<int32_t>(choices.n_places);
    Residency::Turn turn(group.residency.get(), choices, chooses(region), n_needed, progress_);
    std::unique_lock<std::mutex> stage(stage_.mutex, std::defer_lock);
    table.n_stage = prefetch_.active() ? 0 : stage_.room(region);
    if (!group.n_guests && table.n_stage && !store_.config.bus_bytes_us && store_.bus_pace.is_due()) {
        measure_bus_by_stage(region, events);
    }
    table.cpu = region.cpu;
    table.may_repeat = may_repeat;
    table.expert_in = &group.expert_in;
    Costs cost = costs(region);
    if (region.n_tokens() > store_.config.cpu_tokens) {
        cost.cpu_pair = std::max(cost.cpu_pair, INT64_MAX / (choices.n_places * choices.n_tokens) / 2);
    }
    // Only a step that brings all of an expert can give it its slot.
    const bool whole = region.products.size() == group.matrices.size();
    std::vector<Tensor *> banks;
    for (;;) {
        table.n_empty = turn.n_empty();
        table.coming = whole && table.n_guests ? turn.coming() : nullptr;
        table.brings_coming = turn.on_demand();
        fault = router_.route(choices, table, cost, routing_);
        if (!fault.empty()) {
            return kFailed;
        }
        if (routing_.bank == Bank::kSlots) {
            break;
        }
        in_slots_ = group.expert_in;
        turn.keep({});
        turn.divided();
        turn.settle();  // no copy of a slot while it is written
        stage.lock();
        if (events || !stage_.banks[0].owner || stage_.banks[0].owner == this) {
            banks = stage_.tensors(region);
            if (!banks.empty()) {
                break;
            }
        }
        stage.unlock();
        table.n_stage = 0;
        turn.again();
    }
    const bool comes = routing_.bank == Bank::kSlots && turn.keep(routing_.uploads);
    if (!comes) {
        turn.divided();
    }
    // The CPU's threads begin before anything else is queued: what the host queues meanwhile costs no time.
    const bool with_cpu = !routing_.pairs.empty();
    if (with_cpu && !small && !read_input(region, true)) {
        fault = "no host memory for the input of a layer";
        return kAllocFailed;
    }
    if (with_cpu && !start_lane(region)) {
        fault = "no host memory for the rows that the CPU computes";
        return kAllocFailed;
    }
    const int64_t started = nanoseconds();
    group.counters.decide_ns += started - decided_;
    Status status = kSuccess;
    if (!routing_.device) {
        status = run_others(graph, region);
    } else if (!upload_positions()) {
        fault = "no memory on the device for the choices of the router";
        status = kAllocFailed;
    } else if (routing_.bank == Bank::kStage) {
        status = on_stage(graph, region, banks);
    } else {
        status = on_slots(graph, region);
    }
    remember_cold(region, table);
    count(region, choices);
    turn.rest();
    group.counters.launch_ns += nanoseconds() - started;
    if (comes && status == kSuccess) {
        turn.brought();
        turn.divided();
        slots_written_ = true;
    }
    if (stage.owns_lock()) {
        stage.unlock();
    }
    if (guests.owns_lock()) {
        guests.unlock();
    }
    if (with_cpu) {
        finish_lane(region, started);
    }
    if (with_cpu && status == kSuccess) {
        const int64_t begin = nanoseconds();
        write_rows(region);
        group.counters.rows_ns += nanoseconds() - begin;
    }
    return status;
}

// What large batches use of the experts without slots decides whether those of the next one are brought ahead.
void Stream::remember_cold(Region & region, const Table & table) {
    if (Prefetch::large(region)) {
        region.group->cold_used = router_.cold_used(table);
        region.group->cold_tokens = region.n_tokens();
    }
}

bool Stream::queue_choices(Region & region, Choices & choices, bool with_input) {
    const int64_t begin = nanoseconds();
    const Tensor * ids = region.ids;
    const size_t size = span(ids, sizeof(int32_t));
    char * data = ids_.room(size);
    if (!data || (with_input && !read_input(region, false))) {
        return false;
    }
    get_async(ids, data, 0, size);
    choices.data = data;
    choices.place_stride = ids->nb[0];
    choices.token_stride = ids->nb[1];
    choices.n_places = ids->ne[0];
    choices.n_tokens = ids->ne[1];
    region.group->counters.ahead_ns += nanoseconds() - begin;
    return true;
}

bool Stream::read_choices(Region & region, Choices & choices, bool with_input) {
    if (!queue_choices(region, choices, with_input)) {
        return false;
    }
    const int64_t waits = nanoseconds();
    synchronize();
    decided_ = nanoseconds();
    region.group->counters.wait_ns += decided_ - waits;
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

bool Stream::make_positions(size_t size) {
    if (size <= positions_bytes_) {
        return true;
    }
    // All work that reads the old one is done: choices were just waited for.
    if (positions_memory_) {
        host_.ggml_backend_buffer_free(positions_memory_);
        host_.ggml_free(positions_context_);
        positions_memory_ = nullptr;
        positions_context_ = nullptr;
        positions_bytes_ = 0;
        positions_by_shape_.clear();
    }
    const int64_t n = static_cast<int64_t>((size + 16383) / 16384 * 4096);
    positions_context_ = host_.ggml_init(InitParams{host_.ggml_tensor_overhead() * 2, nullptr, true});
    if (!positions_context_) {
        renumber();
        return false;
    }
    positions_ = host_.ggml_new_tensor(positions_context_, kI32, 1, &n);
    positions_memory_ = host_.ggml_backend_alloc_ctx_tensors_from_buft(positions_context_, store_.inner_type);
    if (!positions_memory_) {
        host_.ggml_free(positions_context_);
        positions_context_ = nullptr;
        renumber();
        return false;
    }
    renumber();
    positions_bytes_ = static_cast<size_t>(n) * sizeof(int32_t);
    return true;
}

bool Stream::upload_positions() {
    const size_t size = routing_.positions.size() * sizeof(int32_t);
    char * data = renamed_.room(size);
    if (!data || !make_positions(size)) {
        return false;
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
            for (uint64_t & each : region->stage_uids) {
                each = plan->uid ? host_.next_uid() : 0;
            }
            if (region->ahead && !positions_memory_) {
                region->ahead.reset();
            } else if (region->ahead) {
                region->before_uid = host_.next_uid();
                region->ahead->renamed->buffer = positions_->buffer;
                region->ahead->renamed->data = positions_->data;
            }
        }
    }
}

// One tensor of every shape: captured graphs compare addresses.
Tensor * Stream::renamed_for(const Region & region) {
    for (auto & shaped : positions_by_shape_) {
        if (shaped->ne[0] == region.n_places() && shaped->ne[1] == region.n_tokens()) {
            return shaped.get();
        }
    }
    positions_by_shape_.push_back(std::make_unique<Tensor>(*positions_));
    Tensor * renamed = positions_by_shape_.back().get();
    renamed->ne[0] = region.n_places();
    renamed->ne[1] = region.n_tokens();
    renamed->nb[1] = static_cast<size_t>(region.n_places()) * sizeof(int32_t);
    renamed->nb[2] = renamed->nb[3] = renamed->nb[1] * static_cast<size_t>(region.n_tokens());
    return renamed;
}

Status Stream::run_device(Graph * graph, Region & region, const std::vector<Tensor *> & banks, uint64_t uid) {
    Tensor * renamed = renamed_for(region);
    Exchange exchange(region);
    for (size_t i = 0; i < region.products.size(); i++) {
        exchange.set(i, banks.empty() ? region.products[i].slots : banks[i], renamed);
    }
    return run_nodes(graph, region.begin, region.end, uid);
}

// Experts that stand together in the file and on the device, in one copy.
void Stream::bring(const Matrix & matrix, Tensor * bank, const Upload & first, size_t n) {
    const size_t each = matrix.tensor->nb[2];
    const char * data = static_cast<const char *>(matrix.tensor->data) + static_cast<size_t>(first.expert) * each;
    set_async(bank, data, static_cast<size_t>(first.position) * each, n * each);
    matrix.group->counters.upload_bytes += static_cast<int64_t>(n * each);
}

// All matrices of one expert to where it is a guest.
void Stream::bring_guest(const Region & region, const Upload & upload) {
    for (const Strip & strip : region.strips) {
        Matrix & matrix = *strip.first;
        if (strip.n == 1) {
            bring(matrix, matrix.slots, upload, 1);
            continue;
        }
        const size_t each = matrix.tensor->nb[2];
        const char * data = matrix.host() + static_cast<size_t>(upload.expert) * each;
        inner_->iface.set_tensor_2d_async(inner_, matrix.slots, data, static_cast<size_t>(upload.position) * each, each, strip.n,
                                          strip.device_step, strip.host_step);
        matrix.group->counters.upload_bytes += static_cast<int64_t>(strip.n * each);
    }
}

Status Stream::on_slots(Graph * graph, Region & region) {
    Group & group = *region.group;
    if (routing_.guests) {
        wait_for(group.guests_read, group.guest_owner);
    }
    if (!routing_.uploads.empty()) {
        for (const Upload & upload : routing_.uploads) {
            bring_guest(region, upload);
        }
        group.counters.uploads += static_cast<int64_t>(routing_.uploads.size());
    }
    const Status status = run_device(graph, region, {}, region.slots_uid);
    if (status == kSuccess && routing_.uploads.empty()) {
        measure_device(region);
    }
    if (routing_.guests) {
        record(group.guests_read);
        group.guest_owner = this;
    }
    return status;
}

// Residents are copied on the device, the others brought; experts that lie together come in one piece.
Status Stream::on_stage(Graph * graph, Region & region, const std::vector<Tensor *> & banks) {
    Group & group = *region.group;
    Stage::Bank & bank = stage_.banks[0];
    wait_for(bank.read, bank.owner);
    Status status = kSuccess;
    const bool copied = copy_residents(store_, inner_, region, banks, kept_, status);
    if (status != kSuccess) {
        return status;
    }
    std::vector<Parcel> parcels;
    for (size_t i = 0; i < region.products.size(); i++) {
        const Matrix & matrix = *region.products[i].matrix;
        const size_t each = matrix.tensor->nb[2];
        const auto bring = [&](int32_t expert, int32_t position, size_t n) {
            parcels.push_back(Parcel{banks[i], static_cast<size_t>(position) * each, matrix.host() + static_cast<size_t>(expert) * each, n * each});
        };
        for (int32_t slot = 0; !copied && slot < group.n_slots; slot++) {
            const int32_t expert = in_slots_[static_cast<size_t>(slot)];
            if (expert >= 0) {
                bring(expert, slot, 1);
            }
        }
        const auto & uploads = routing_.uploads;
        for (size_t first = 0, n; first < uploads.size(); first += n) {
            for (n = 1; first + n < uploads.size() && uploads[first + n].expert == uploads[first].expert + static_cast<int32_t>(n); n++) {
            }
            bring(uploads[first].expert, uploads[first].position, n);
        }
        group.counters.upload_bytes += static_cast<int64_t>(uploads.size() * each);
    }
    if (!is_paged(region) || !store_.ring.upload(inner_, parcels)) {
        for (const Parcel & parcel : parcels) {
            set_async(parcel.to, parcel.from, parcel.offset, parcel.size);
        }
    }
    group.counters.uploads += static_cast<int64_t>(routing_.uploads.size());
    group.counters.staged++;
    status = run_device(graph, region, banks, region.stage_uids[0]);
    record(bank.read);
    bank.owner = this;
    return status;
}

// All experts are in a bank of the stage, or will be when the device comes to them.
// `taken` stays false where a token names an expert twice, which the device may not meet: then others compute it.
Status Stream::on_prefetched(Graph * graph, Region & region, std::string & fault, bool & taken) {
    prefetch_.pump();  // while the device computes what leads to the choices
    Choices choices;
    if (!read_choices(region, choices, false)) {
        fault = "no host memory for the choices of the router";
        return kAllocFailed;
    }
    bool repeated = false;
    const Table table = table_of(*region.group);
    fault = router_.rename(choices, table, routing_, repeated);
    Status status = fault.empty() ? kSuccess : kFailed;
    prefetch_.await(inner_);
    taken = !repeated;
    if (status == kSuccess && taken) {
        if (region.group->residency && chooses(region)) {
            region.group->residency->note(choices);
        }
        remember_cold(region, table);
        count(region, choices);
        if (!upload_positions()) {
            fault = "no memory on the device for the choices of the router";
            status = kAllocFailed;
        } else {
            status = run_device(graph, region, prefetch_.banks(), region.stage_uids[prefetch_.bank()]);
        }
    }
    record(prefetch_.read_event());
    prefetch_.done();
    return status;
}

}  // namespace hybrid
