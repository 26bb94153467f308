#include "store.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <exception>

#include "platform.h"
#include "stream.h"

namespace hybrid {

namespace {

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
    : host(h), inner(device), inner_type(device->iface.get_buffer_type(device)), config(c), courier(h, device, bus_bytes_us),
      ring(h, device, config), orders_(c.orders) {
    voice.set_quiet(c.quiet);
    cpu_bytes_us = c.cpu_bytes_us;
    bus_bytes_us = c.bus_bytes_us;
    reporter_.start(c.report.empty() && c.orders.empty() ? 0 : c.report_ms, [this] {
        follow_orders();
        write_report();
    });
}

Store::~Store() = default;

// ---- memory

ExpertBuffer * Store::allocate(size_t size) {
    auto made = std::make_unique<ExpertBuffer>();
    made->store = this;
    made->size = size;
    const auto host_type = inner->iface.get_host_buffer_type;
    const Locker locker = config.memory == Memory::kPinned ? locker_of(inner) : Locker();
    if (locker) {
        made->pages = std::make_shared<LockedPages>(locker, size);
        made->base = made->pages->base();
    } else if (config.memory != Memory::kPlain && host_type && host_type(inner)) {
        made->real = host.ggml_backend_buft_alloc_buffer(host_type(inner), size);
        made->base = made->real ? static_cast<char *>(host.ggml_backend_buffer_get_base(made->real)) : nullptr;
        if (!made->base) {
            voice.note("no " + mebibytes(size) + " of page-locked memory for experts: uploads will be slower");
        }
    }
    if (!made->base && !locker) {
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

void Store::release(ExpertBuffer * buffer) noexcept {
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
            retire(*model);
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
                free_places(*group);
                if (group->guests_read) {
                    inner->iface.event_free(inner, group->guests_read);
                }
            }
            for (auto & [thread, loading] : loading_) {
                loading = loading == model ? nullptr : loading;
            }
            models_.erase(std::find_if(models_.begin(), models_.end(), [&](auto & m) { return m.get() == model; }));
        }
        host_bytes_ -= buffer->mapped ? 0 : buffer->size;
    }
    write_report();
    if (buffer->real) {
        host.ggml_backend_buffer_free(buffer->real);
    } else if (!buffer->mapped && !buffer->pages) {
        free_pages(buffer->base, buffer->size);
    }
    delete buffer;
}

// What became of its blocks stays known, as long as there is memory for that.
void Store::retire(const Model & model) noexcept {
    try {
        for (const auto & group : model.groups) {
            retired_.push_back(describe(*group, model.number));
        }
    } catch (const std::exception &) {
        voice.lacks("a report");
    }
}

// ---- tensors

Status Store::add(ExpertBuffer & buffer, Tensor * tensor) {
    if (tensor->view_src) {
        return kSuccess;
    }
    Change change(gate);
    int block = 0;
    std::string kind;
    Role role;
    Status status = kSuccess;
    if (!expert_name(tensor->name, block, kind, role) || tensor->ne[3] != 1 || tensor->ne[2] > INT32_MAX) {
        beside(buffer, tensor, status);
        return status;
    }
    Model * model = model_of(buffer, tensor->name);
    if (!model) {
        voice.fault(std::string(tensor->name) + " is there twice");  // not how files are loaded
        return kFailed;
    }
    if (!buffer.model) {
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
    Group & group = *matrix->group;
    group.matrices.reserve(group.matrices.size() + 1);  // both lists have it, or neither
    Matrix * added = matrix.get();
    buffer.matrices[tensor->data] = std::move(matrix);
    group.matrices.push_back(added);
    group.filled = false;
    unfilled_ = true;
    version_++;
    return kSuccess;
}

// What is no expert weight (biases, adapters) lives on the device as if it had been allocated there.
void Store::beside(ExpertBuffer & buffer, Tensor * tensor, Status & status) {
    const size_t size = host.ggml_backend_buft_get_alloc_size(inner_type, tensor);
    buffer.beside.reserve(buffer.beside.size() + 1);
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

// The one that the buffer is of, or that this thread is loading; a name that comes again begins another.
Model * Store::model_of(const ExpertBuffer & buffer, const std::string & name) {
    Model *& loading = loading_[std::this_thread::get_id()];
    Model * found = buffer.model ? buffer.model : loading;
    const bool again = found && std::find(found->names.begin(), found->names.end(), name) != found->names.end();
    if (!found || (again && !buffer.model)) {
        models_.push_back(std::make_unique<Model>());
        found = loading = models_.back().get();
        found->number = next_model_++;
    } else if (again) {
        return nullptr;
    }
    found->names.push_back(name);
    return found;
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

const Resident * Store::resident(const Group & group) const {
    const Resident * line = resident_of(ordered_, group.block, group.n_experts);
    return line ? line : resident_of(config.residents, group.block, group.n_experts);
}

void Store::set_table(Group & group) {
    const auto n = static_cast<size_t>(group.n_experts);
    std::vector<int32_t> experts;
    if (const Resident * line = resident(group)) {
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
    const Resident * planned = resident_of(config.residents, group.block, group.n_experts);
    const int32_t guests = planned && planned->guests >= 0 ? planned->guests : config.guests;
    group.n_guests = std::min(guests, group.n_experts - group.n_slots);
    group.slot_of.assign(n, -1);
    group.expert_in = experts;
    for (size_t slot = 0; slot < experts.size(); slot++) {
        group.slot_of[static_cast<size_t>(experts[slot])] = static_cast<int32_t>(slot);
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
    std::lock_guard<std::mutex> lock(streams_mutex_);
    streams_.reserve(streams_.size() + 1);
    courier.join(stream);
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

}  // namespace hybrid
