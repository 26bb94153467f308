// Slots on the device: their memory, their first experts, and others between steps.
#include <algorithm>

#include "store.h"
#include "stream.h"

namespace hybrid {

// Slots of a block's matrices lie together, in the order of the matrices on the host: see Strip. Those that were there
// before a matrix came are made again, as long as nothing was brought to them.
bool Store::make_slots(Matrix & matrix) {
    Group & group = *matrix.group;
    if (group.n_slots + group.n_guests == 0) {
        return true;
    }
    std::vector<Matrix *> together{&matrix};
    if (!group.used) {
        together.insert(together.end(), group.matrices.begin(), group.matrices.end());
        free_places(group);
    }
    std::sort(together.begin(), together.end(), [](const Matrix * a, const Matrix * b) { return a->host() < b->host(); });
    bool placed = place_slots(group, together);
    // Perhaps too much in one piece.
    for (size_t i = 0; !placed && together.size() > 1 && i < together.size(); i++) {
        if (!place_slots(group, {together[i]})) {
            break;
        }
        placed = i + 1 == together.size();
    }
    if (!placed) {
        const auto count = static_cast<size_t>(group.n_slots + group.n_guests);
        voice.fault("no " + mebibytes(count * matrix.tensor->nb[2]) + " on the device for " + std::to_string(count) + " slots of " +
                    matrix.tensor->name);
    }
    return placed;
}

bool Store::place_slots(Group & group, const std::vector<Matrix *> & matrices) {
    const size_t alignment = host.ggml_backend_buft_get_alignment(inner_type);
    std::vector<Tensor *> slots;
    std::vector<size_t> sizes;
    slots.reserve(matrices.size());
    sizes.reserve(matrices.size());
    group.places.reserve(group.places.size() + 1);  // what is made below has its owner
    Place made;
    made.context = host.ggml_init(InitParams{host.ggml_tensor_overhead() * (matrices.size() + 1), nullptr, true});
    for (size_t i = 0; made.context && i < matrices.size(); i++) {
        const Tensor * tensor = matrices[i]->tensor;
        const int64_t shape[3] = {tensor->ne[0], tensor->ne[1], group.n_slots + group.n_guests};
        slots.push_back(host.ggml_new_tensor(made.context, tensor->type, 3, shape));
        sizes.push_back(host.ggml_backend_buft_get_alloc_size(inner_type, slots[i]));
    }
    // Matrices of equal experts at equal distances, however the device pads each.
    size_t total = 0;
    for (size_t i = 0; i < slots.size(); i++) {
        for (size_t j = 0; j < slots.size(); j++) {
            sizes[i] = slots[i]->nb[2] == slots[j]->nb[2] ? std::max(sizes[i], sizes[j]) : sizes[i];
        }
        sizes[i] = (sizes[i] + alignment - 1) / alignment * alignment;
        total += sizes[i];
    }
    made.memory = made.context ? host.ggml_backend_buft_alloc_buffer(inner_type, total) : nullptr;
    bool placed = made.memory != nullptr;
    if (placed) {
        host.ggml_backend_buffer_set_usage(made.memory, kUsageWeights);
        auto * at = static_cast<char *>(host.ggml_backend_buffer_get_base(made.memory));
        for (size_t i = 0; i < slots.size(); at += sizes[i], i++) {
            slots[i]->buffer = made.memory;
            slots[i]->data = at;
            placed = placed && host.ggml_backend_buffer_init_tensor(made.memory, slots[i]) == kSuccess;
        }
    }
    if (!placed) {
        if (made.memory) {
            host.ggml_backend_buffer_free(made.memory);
        }
        if (made.context) {
            host.ggml_free(made.context);
        }
        return false;
    }
    for (size_t i = 0; i < slots.size(); i++) {
        matrices[i]->slots = slots[i];
    }
    group.places.push_back(made);
    return true;
}

// For devices that look up slots by themselves; where residents follow the text they do not.
void Store::write_table(Group & group) {
    if (!config.ahead || group.residency || group.n_guests || !group.n_slots || group.whole()) {
        return;
    }
    const auto n = static_cast<int64_t>(group.n_experts);
    if (!group.table) {
        group.places.reserve(group.places.size() + 1);
        const int64_t shape[2] = {1, n};
        Place made;
        made.context = host.ggml_init(InitParams{host.ggml_tensor_overhead() * 2, nullptr, true});
        if (!made.context) {
            return;
        }
        Tensor * table = host.ggml_new_tensor(made.context, kI32, 2, shape);
        made.memory = host.ggml_backend_alloc_ctx_tensors_from_buft(made.context, inner_type);
        if (!made.memory) {
            host.ggml_free(made.context);
            return;
        }
        group.places.push_back(made);
        group.table = table;
    }
    const std::vector<int32_t> slots = table_values(group.slot_of, group.n_slots);
    host.ggml_backend_tensor_set(group.table, slots.data(), 0, slots.size() * sizeof(int32_t));
}

std::vector<int32_t> Store::table_values(const std::vector<int32_t> & slot_of, int32_t n_slots) const {
    std::vector<int32_t> slots(slot_of);
    std::replace(slots.begin(), slots.end(), -1, 0);
#if defined(ATSPLAN_HYBRID_FAULTS)
    for (int32_t & slot : slots) {
        slot = config.fault != Fault::kWrongSlot ? slot : slot ? slot - 1 : std::min(1, n_slots - 1);
    }
#else
    (void)n_slots;
#endif
    return slots;
}

void Store::free_places(Group & group) {
    for (const Place & place : group.places) {
        host.ggml_backend_buffer_free(place.memory);
        host.ggml_free(place.context);
    }
    group.places.clear();
    group.table = nullptr;
    for (Matrix * matrix : group.matrices) {
        matrix->slots = nullptr;
    }
}

// Only what this graph computes with: another model may be in the middle of being loaded, which nothing tells
// when its loader reads a file straight into the experts' memory.
void Store::fill(Stream & stream, const Graph & graph) {
    if (!unfilled_.load(std::memory_order_acquire)) {
        return;
    }
    {
        Step step(gate);
        if (unfilled_in(graph).empty()) {
            return;
        }
    }
    await_pages(graph);
    Change change(gate);
    stream.synchronize();
    const int64_t begin = nanoseconds();
    int64_t bytes = 0;
    for (Group * group : unfilled_in(graph)) {
        if (!group->filled) {
            fill_group(*group, stream, bytes);
        }
    }
    stream.synchronize();
    const int64_t micros = std::max<int64_t>((nanoseconds() - begin) / 1000, 1);
    if (!bus_bytes_us.load() && bytes > (16 << 20)) {
        bus_bytes_us = std::max<int64_t>(bytes / micros, 1);
    }
    unfilled_ = std::any_of(models_.begin(), models_.end(), [](auto & model) {
        return std::any_of(model->groups.begin(), model->groups.end(), [](auto & group) { return !group->filled; });
    });
}

// What slots are filled from is locked by then. Nobody else is kept waiting: who computes with experts holds their memory.
void Store::await_pages(const Graph & graph) {
    std::vector<std::shared_ptr<LockedPages>> waited;
    {
        Step step(gate);
        for (const Group * group : unfilled_in(graph)) {
            for (const Matrix * matrix : group->matrices) {
                const auto & pages = matrix->home->pages;
                if (pages && std::find(waited.begin(), waited.end(), pages) == waited.end()) {
                    waited.push_back(pages);
                }
            }
        }
    }
    for (const auto & pages : waited) {
        if (!pages->ready()) {
            voice.note("the device does not lock the experts' memory: uploads will be slower");
        }
    }
}

std::vector<Group *> Store::unfilled_in(const Graph & graph) const {
    std::vector<Group *> found;
    for (int i = 0; i < graph.n_nodes; i++) {
        const Tensor * node = graph.nodes[i];
        if (node->op == host.op_mul_mat_id && owns(node->src[0])) {
            const Matrix * matrix = find(node->src[0]);
            if (matrix && !matrix->group->filled) {
                found.push_back(matrix->group);
            }
        }
    }
    return found;
}

// Neighbours in the file that are neighbours in the slots go in one copy. Nobody else is in a step: the ring is free.
void Store::fill_group(Group & group, Stream & stream, int64_t & bytes) {
    std::vector<Parcel> parcels;
    bool paged = false;
    for (Matrix * matrix : group.matrices) {
        paged = paged || !matrix->home->locked();
        const size_t each = matrix->tensor->nb[2];
        const auto * data = static_cast<const char *>(matrix->tensor->data);
        const auto & in = group.expert_in;
        for (size_t slot = 0; slot < in.size();) {
            size_t n = 1;
            while (in[slot] >= 0 && slot + n < in.size() && in[slot + n] == in[slot] + static_cast<int32_t>(n)) {
                n++;
            }
            if (in[slot] >= 0) {
                parcels.push_back(Parcel{matrix->slots, slot * each, data + static_cast<size_t>(in[slot]) * each, n * each});
                bytes += static_cast<int64_t>(n * each);
            }
            slot += n;
        }
    }
    const std::lock_guard<std::recursive_mutex> lock(stream.api());
    if (!paged || !ring.upload(stream.inner(), parcels)) {
        for (const Parcel & parcel : parcels) {
            stream.set_async(parcel.to, parcel.from, parcel.offset, parcel.size);
        }
    }
    write_table(group);
    group.filled = group.used = true;
}

std::string Store::set_residents(int number, int block, const std::string & kind, const std::vector<int32_t> & experts) {
    Change change(gate);
    Group * group = nullptr;
    for (auto & model : models_) {
        for (auto & each : model->groups) {
            if (model->number == number && each->block == block && each->kind == kind) {
                group = each.get();
            }
        }
    }
    if (!group) {
        return "no model " + std::to_string(number) + " with experts in block " + std::to_string(block);
    }
    if (experts.size() != static_cast<size_t>(group->n_slots)) {
        return std::to_string(experts.size()) + " experts for " + std::to_string(group->n_slots) + " slots";
    }
    std::vector<int32_t> slot_of(static_cast<size_t>(group->n_experts), -1);
    for (size_t slot = 0; slot < experts.size(); slot++) {
        const int32_t expert = experts[slot];
        if (expert < 0 || expert >= group->n_experts || slot_of[static_cast<size_t>(expert)] >= 0) {
            return "expert " + std::to_string(expert) + " is named twice or not there";
        }
        slot_of[static_cast<size_t>(expert)] = static_cast<int32_t>(slot);
    }
    if (group->whole()) {
        return "";  // all of them are there, each in the slot of its number
    }
    // What needs memory comes first: afterwards nothing is refused any more.
    const std::vector<int32_t> values = group->table ? table_values(slot_of, group->n_slots) : std::vector<int32_t>();
    if (group->residency) {
        group->residency->finish();
        group->residency->sow(experts);
    }
    {
        // Every queued read of the slots, from every context, ends before one is overwritten.
        std::lock_guard<std::mutex> lock(streams_mutex_);
        for (Stream * stream : streams_) {
            stream->synchronize();
        }
    }
    for (Matrix * matrix : group->matrices) {
        const size_t each = matrix->tensor->nb[2];
        for (size_t slot = 0; slot < experts.size(); slot++) {
            const auto expert = static_cast<size_t>(experts[slot]);
            if (group->filled && group->expert_in[slot] != experts[slot]) {
                const char * data = static_cast<const char *>(matrix->tensor->data) + expert * each;
                host.ggml_backend_tensor_set(matrix->slots, data, slot * each, each);
            }
        }
    }
    group->expert_in = experts;
    group->slot_of = slot_of;
    if (group->table) {
        host.ggml_backend_tensor_set(group->table, values.data(), 0, values.size() * sizeof(int32_t));
    }
    return "";
}

}  // namespace hybrid
