#include "store.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "platform.h"
#include "stream.h"

namespace hybrid {

namespace {

std::string mebibytes(size_t bytes) { return std::to_string((bytes + (1 << 20) - 1) >> 20) + " MiB"; }

bool ends_with(const std::string & text, const std::string & end) {
    return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

}  // namespace

bool expert_name(const char * name, int & block, std::string & kind, Role & role) {
    int read = 0;
    if (std::sscanf(name, "blk.%d.ffn_%n", &block, &read) != 1 || read == 0 || block < 0) {
        return false;
    }
    const std::string rest = name + read;
    const std::pair<const char *, Role> roles[] = {
        {"gate_up_", Role::kGateUp}, {"gate_", Role::kGate}, {"up_", Role::kUp}, {"down_", Role::kDown}};
    for (const auto & [word, meaning] : roles) {
        const size_t length = std::strlen(word);
        if (rest.compare(0, length, word) == 0 && ends_with(rest, "exps.weight")) {
            kind = rest.substr(length, rest.size() - length - std::strlen(".weight"));
            role = meaning;
            return kind.find_first_not_of("abcdefghijklmnopqrstuvwxyz") == std::string::npos;
        }
    }
    return false;
}

Weights Matrix::weights() const {
    Weights found;
    found.data = static_cast<const char *>(tensor->data);
    found.type = tensor->type;
    found.n_in = tensor->ne[0];
    found.n_out = tensor->ne[1];
    found.row_bytes = tensor->nb[1];
    found.expert_bytes = tensor->nb[2];
    return found;
}

Store::Store(const Host & h, Device * device, const Config & c)
    : host(h), inner(device), inner_type(device->iface.get_buffer_type(device)), config(c), courier(h, device, bus_bytes_us) {
    voice.set_quiet(c.quiet);
    cpu_bytes_us = c.cpu_bytes_us;
    bus_bytes_us = c.bus_bytes_us;
    reporter_.start(c.report.empty() ? 0 : c.report_ms, [this] { write_report(); });
}

Store::~Store() = default;

// ---- memory

ExpertBuffer * Store::allocate(size_t size) {
    auto made = std::make_unique<ExpertBuffer>();
    made->store = this;
    made->size = size;
    const auto host_type = inner->iface.get_host_buffer_type;
    if (config.memory != Memory::kPlain && host_type && host_type(inner)) {
        made->real = host.ggml_backend_buft_alloc_buffer(host_type(inner), size);
        made->base = made->real ? static_cast<char *>(host.ggml_backend_buffer_get_base(made->real)) : nullptr;
        if (!made->base) {
            voice.note("no " + mebibytes(size) + " of page-locked memory for experts: uploads will be slower");
        }
    }
    if (!made->base) {
        made->base = static_cast<char *>(allocate_pages(size));
    }
    if (!made->base) {
        voice.fault("no " + mebibytes(size) + " of host memory for experts");
        return nullptr;
    }
    Change change(gate);
    host_bytes_ += size;
    return made.release();
}

ExpertBuffer * Store::map(void * address, size_t size) {
    auto made = std::make_unique<ExpertBuffer>();
    made->store = this;
    made->size = size;
    made->base = static_cast<char *>(address);
    made->mapped = true;
    return made.release();
}

void Store::release(ExpertBuffer * buffer) {
    {
        Change change(gate);
        version_++;
        Model * model = buffer->model;
        for (size_t g = 0; model && g < model->groups.size(); g++) {
            if (model->groups[g]->residency) {
                model->groups[g]->residency->finish();
            }
        }
        if (model && --model->n_buffers == 0) {
            for (auto & group : model->groups) {
                retired_.push_back(describe(*group, model->number));
            }
        }
        for (auto & [data, matrix] : buffer->matrices) {
            auto & of = matrix->group->matrices;
            of.erase(std::find(of.begin(), of.end(), matrix.get()));
            if (of.empty()) {
                free_places(*matrix->group);
            }
        }
        for (Buffer * other : buffer->beside) {
            host.ggml_backend_buffer_free(other);
        }
        if (model && model->n_buffers == 0) {
            for (auto & group : model->groups) {
                if (group->guests_read) {
                    inner->iface.event_free(inner, group->guests_read);
                }
            }
            loading_ = loading_ == model ? nullptr : loading_;
            models_.erase(std::find_if(models_.begin(), models_.end(), [&](auto & m) { return m.get() == model; }));
        }
        host_bytes_ -= buffer->mapped ? 0 : buffer->size;
    }
    write_report();
    if (buffer->real) {
        host.ggml_backend_buffer_free(buffer->real);
    } else if (!buffer->mapped) {
        free_pages(buffer->base, buffer->size);
    }
    delete buffer;
}

// ---- tensors

Status Store::add(ExpertBuffer & buffer, Buffer * of, Tensor * tensor) {
    if (tensor->view_src) {
        return kSuccess;
    }
    (void)of;
    Change change(gate);
    int block = 0;
    std::string kind;
    Role role;
    Status status = kSuccess;
    if (!expert_name(tensor->name, block, kind, role) || tensor->ne[3] != 1 || tensor->ne[2] > INT32_MAX) {
        beside(buffer, tensor, status);
        return status;
    }
    Model * model = model_of(tensor->name);
    if (buffer.model != model) {
        if (buffer.model) {
            // Names that come twice in one buffer: not how files are loaded.
            voice.fault(std::string(tensor->name) + " is there twice");
            return kFailed;
        }
        buffer.model = model;
        model->n_buffers++;
    }
    auto matrix = std::make_unique<Matrix>();
    matrix->tensor = tensor;
    matrix->role = role;
    matrix->group = group_of(*model, block, kind, static_cast<int32_t>(tensor->ne[2]));
    matrix->home = &buffer;
    if (!make_slots(*matrix)) {
        return kAllocFailed;
    }
    matrix->group->matrices.push_back(matrix.get());
    matrix->group->filled = false;
    unfilled_ = true;
    buffer.matrices[tensor->data] = std::move(matrix);
    version_++;
    return kSuccess;
}

// What is no expert weight (biases, adapters) lives on the device as if it had been allocated there.
void Store::beside(ExpertBuffer & buffer, Tensor * tensor, Status & status) {
    const size_t size = host.ggml_backend_buft_get_alloc_size(inner_type, tensor);
    Buffer * made = host.ggml_backend_buft_alloc_buffer(inner_type, size);
    if (!made) {
        voice.fault("no " + mebibytes(size) + " on the device for " + tensor->name);
        status = kAllocFailed;
        return;
    }
    host.ggml_backend_buffer_set_usage(made, kUsageWeights);
    buffer.beside.push_back(made);
    const void * loaded = buffer.mapped ? tensor->data : nullptr;
    tensor->buffer = made;
    tensor->data = host.ggml_backend_buffer_get_base(made);
    status = static_cast<Status>(host.ggml_backend_buffer_init_tensor(made, tensor));
    if (status == kSuccess && loaded) {
        host.ggml_backend_tensor_set(tensor, loaded, 0, host.ggml_nbytes(tensor));
    }
}

Model * Store::model_of(const std::string & name) {
    if (!loading_ || std::find(loading_->names.begin(), loading_->names.end(), name) != loading_->names.end()) {
        models_.push_back(std::make_unique<Model>());
        loading_ = models_.back().get();
        loading_->number = next_model_++;
    }
    loading_->names.push_back(name);
    return loading_;
}

Group * Store::group_of(Model & model, int block, const std::string & kind, int32_t n_experts) {
    for (auto & group : model.groups) {
        if (group->block == block && group->kind == kind && group->n_experts == n_experts) {
            return group.get();
        }
    }
    model.groups.push_back(std::make_unique<Group>());
    Group & made = *model.groups.back();
    made.block = block;
    made.kind = kind;
    made.n_experts = n_experts;
    made.counters.chosen = std::vector<std::atomic<int64_t>>(static_cast<size_t>(n_experts));
    set_table(made);
    if (config.adaptation.policy != Policy::kStatic && made.n_slots && !made.whole()) {
        made.residency = std::make_unique<Residency>(courier, config.adaptation, made);
    }
    return &made;
}

void Store::set_table(Group & group) {
    const auto n = static_cast<size_t>(group.n_experts);
    std::vector<int32_t> experts;
    if (const Resident * line = config.resident(group.block, group.n_experts)) {
        experts = line->experts;
    } else {
        for (int32_t e = 0; e < std::min(config.slots, group.n_experts); e++) {
            experts.push_back(e);
        }
    }
    if (experts.size() == n) {
        std::sort(experts.begin(), experts.end());  // then no choice needs renaming
    }
    group.n_slots = static_cast<int32_t>(experts.size());
    group.n_guests = std::min(config.guests, group.n_experts - group.n_slots);
    group.slot_of.assign(n, -1);
    group.expert_in = experts;
    for (size_t slot = 0; slot < experts.size(); slot++) {
        group.slot_of[static_cast<size_t>(experts[slot])] = static_cast<int32_t>(slot);
    }
}

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
    std::vector<int32_t> slots(group.slot_of);
    std::replace(slots.begin(), slots.end(), -1, 0);
#if defined(ATSPLAN_HYBRID_FAULTS)
    for (int32_t & slot : slots) {
        slot = config.fault != Fault::kWrongSlot ? slot : slot ? slot - 1 : std::min(1, group.n_slots - 1);
    }
#endif
    host.ggml_backend_tensor_set(group.table, slots.data(), 0, slots.size() * sizeof(int32_t));
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

void Store::written(ExpertBuffer & buffer, const Tensor * tensor) {
    Change change(gate);
    const auto found = buffer.matrices.find(tensor->data);
    if (found != buffer.matrices.end()) {
        found->second->group->filled = false;
        unfilled_ = true;
    }
}

// ---- steps

bool Store::owns(const Tensor * tensor) const { return tensor && tensor->buffer && tensor->buffer->type == type; }

Matrix * Store::find(const Tensor * weights) const {
    const Tensor * root = weights->view_src ? weights->view_src : weights;
    auto * buffer = static_cast<ExpertBuffer *>(root->buffer->context);
    if (!buffer) {
        return nullptr;  // a load without memory
    }
    const auto found = buffer->matrices.find(root->data);
    return found == buffer->matrices.end() ? nullptr : found->second.get();
}

const std::vector<float> * Store::bias(Group & group, const Tensor * tensor) {
    std::lock_guard<std::mutex> lock(group.biases_mutex);
    auto & values = group.biases[tensor->data];
    if (values.empty()) {
        values.resize(host.ggml_nbytes(tensor) / sizeof(float));
        host.ggml_backend_tensor_get(tensor, values.data(), 0, values.size() * sizeof(float));
        if (config.fault == Fault::kWrongBias) {
            std::rotate(values.begin(), values.begin() + tensor->ne[0], values.end());
        }
    }
    return &values;
}

void Store::join(Stream * stream) {
    courier.join(stream);
    std::lock_guard<std::mutex> lock(streams_mutex_);
    streams_.push_back(stream);
}

void Store::part(Stream * stream) {
    courier.part(stream);
    Change change(gate);
    for (auto & model : models_) {
        for (auto & group : model->groups) {
            if (group->guest_owner == stream) {
                group->guest_owner = nullptr;  // it has finished all its work before it ends
            }
        }
    }
    std::lock_guard<std::mutex> lock(streams_mutex_);
    streams_.erase(std::find(streams_.begin(), streams_.end(), stream));
}

// ---- slots

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

// Neighbours in the file that are neighbours in the slots go in one copy.
void Store::fill_group(Group & group, Stream & stream, int64_t & bytes) {
    for (Matrix * matrix : group.matrices) {
        const size_t each = matrix->tensor->nb[2];
        const auto * data = static_cast<const char *>(matrix->tensor->data);
        const auto & in = group.expert_in;
        for (size_t slot = 0; slot < in.size();) {
            size_t n = 1;
            while (in[slot] >= 0 && slot + n < in.size() && in[slot + n] == in[slot] + static_cast<int32_t>(n)) {
                n++;
            }
            if (in[slot] >= 0) {
                stream.set_async(matrix->slots, data + static_cast<size_t>(in[slot]) * each, slot * each, n * each);
                bytes += static_cast<int64_t>(n * each);
            }
            slot += n;
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
    if (group->residency) {
        group->residency->finish();
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
        write_table(*group);
    }
    return "";
}

}  // namespace hybrid
