#include "prefetch.h"

#include <algorithm>

#include "stream.h"

namespace hybrid {

namespace {

constexpr int64_t kEnough = 4;  // choices of a batch for each expert: then nearly all are used
// Of a thousand experts without a slot, used by the batch before: with fewer, bringing what is used costs less than
// what bringing everything under the computation saves (half of them: 0.76 times as fast, docs/findings-hybrid.md).
constexpr int kMostUsed = 700;

}  // namespace

Prefetch::~Prefetch() {
    if (uploads_) {
        store_.host.ggml_backend_free(uploads_);
    }
}

// A second queue, and events between the two.
bool Prefetch::able() {
    if (uploads_ || refused_) {
        return uploads_ != nullptr;
    }
    const Backend * inner = stream_.inner();
    const bool events = inner->iface.event_wait && inner->iface.event_record && store_.inner->iface.event_new;
    refused_ = !events || !inner->iface.set_tensor_async || !inner->iface.synchronize || store_.config.banks < Stage::kBanks;
    if (!refused_) {
        uploads_ = store_.inner->iface.init_backend(store_.inner, nullptr);
        refused_ = !uploads_;
    }
    std::lock_guard<std::mutex> lock(stage_.mutex);
    for (Stage::Bank & bank : stage_.banks) {
        if (!refused_ && !bank.arrived) {
            bank.arrived = store_.inner->iface.event_new(store_.inner);
        }
    }
    return uploads_ != nullptr;
}

bool Prefetch::large(const Region & region) {
    return region.n_tokens() * region.n_places() >= kEnough * region.group->n_experts;
}

bool Prefetch::pays(const Region & region) const {
    const Group & group = *region.group;
    // A batch of half the size says little about this one.
    const bool few = group.cold_used.load() < kMostUsed && 2 * group.cold_tokens.load() >= region.n_tokens();
    return !group.whole() && region.n_tokens() > store_.config.cpu_tokens && large(region) &&
           stage_.room(region) == group.n_experts && !few;
}

void Prefetch::begin(const Plan & plan) {
    if (uploads_ && !kept_.empty()) {
        uploads_->iface.synchronize(uploads_);  // done long ago: the graph before waited for it
        kept_.let_go();
    }
    held_.reserve(plan.regions.size());
    regions_.reserve(plan.regions.size());
    for (const auto & region : plan.regions) {
        Residency * residency = region->group->residency.get();
        const bool again = std::find(held_.begin(), held_.end(), residency) != held_.end();
        if (!pays(*region)) {
            continue;
        }
        stream_.finish_slots();
        if (residency && !again && !residency->hold()) {
            continue;
        }
        if (residency && !again) {
            held_.push_back(residency);
        }
        regions_.push_back(region.get());
    }
    if (regions_.size() < Stage::kBanks || !able()) {
        regions_.clear();  // nothing would be brought under something else
        let_go();
        return;
    }
    lock_ = std::unique_lock<std::mutex>(stage_.mutex);
    at_ = next_ = 0;
    for (const Region * region : regions_) {
        for (int bank = 0; bank < Stage::kBanks; bank++) {
            if (stage_.tensors(*region, bank).empty()) {
                regions_.clear();
                lock_.unlock();
                let_go();
                return;
            }
        }
    }
    queue(*regions_[next_], 0);
    next_++;
}

void Prefetch::pump() {
    // The bank of the region after this one was read last by the one before: its reads are queued.
    if (next_ < regions_.size() && next_ <= at_ + 1) {
        queue(*regions_[next_], static_cast<int>(next_ % Stage::kBanks));
        next_++;
    }
}

// Filling chunks of page-locked memory keeps a thread busy: not this one, which has the device to keep busy.
void Prefetch::queue(const Region & region, int bank) {
    banks_[bank] = stage_.tensors(region, bank);
    sent_[bank] = 0;
    if (store_.ring.taken() && is_paged(region)) {
        sent_[bank] = loader_.put([this, &region, bank] { send(region, bank); });
    } else {
        send(region, bank);
    }
}

void Prefetch::send(const Region & region, int bank) {
    const Group & group = *region.group;
    if (stage_.banks[bank].read) {
        uploads_->iface.event_wait(uploads_, stage_.banks[bank].read);
    }
    Status status = kSuccess;
    const bool copied = copy_residents(store_, uploads_, region, banks_[bank], kept_, status) && status == kSuccess;
    std::vector<Parcel> parcels;
    int64_t n_cold = 0;
    for (size_t i = 0; i < region.products.size(); i++) {
        const Matrix & matrix = *region.products[i].matrix;
        const size_t each = matrix.tensor->nb[2];
        const auto bring = [&](int32_t expert, int64_t position, int64_t n) {
            parcels.push_back(Parcel{banks_[bank][i], static_cast<size_t>(position) * each, matrix.host() + static_cast<size_t>(expert) * each,
                                     static_cast<size_t>(n) * each});
        };
        for (int32_t slot = 0; !copied && slot < group.n_slots; slot++) {
            bring(std::max(group.expert_in[static_cast<size_t>(slot)], 0), slot, 1);
        }
        n_cold = 0;
        for (int32_t expert = 0, n; expert < group.n_experts; expert += n) {
            n = 1;
            if (group.slot_of[static_cast<size_t>(expert)] >= 0) {
                continue;
            }
            while (expert + n < group.n_experts && group.slot_of[static_cast<size_t>(expert + n)] < 0) {
                n++;
            }
            bring(expert, group.n_slots + n_cold, n);
            n_cold += n;
        }
    }
    if (is_paged(region)) {
        store_.ring.upload(uploads_, parcels);
    } else {
        Ring::directly(uploads_, parcels);
    }
    uploads_->iface.event_record(uploads_, stage_.banks[bank].arrived);
    region.group->counters.uploads += n_cold;
    region.group->counters.upload_bytes += n_cold * region.expert_bytes;
    region.group->counters.staged++;
}

// An event that is yet to be recorded holds up nobody: the thread that records it is waited for first.
void Prefetch::await(Backend * inner) {
    loader_.wait(sent_[bank()]);
    inner->iface.event_wait(inner, stage_.banks[bank()].arrived);
}

void Prefetch::done() {
    stage_.banks[bank()].owner = &stream_;
    at_++;
}

void Prefetch::end() {
    if (!active() && held_.empty()) {
        return;
    }
    loader_.drain();
    if (uploads_ && at_ < next_) {
        try {
            uploads_->iface.synchronize(uploads_);  // an end in the middle: nobody waits for what is on its way
        } catch (...) {
            // A device that is lost: the error that led here tells.
        }
    }
    regions_.clear();
    if (lock_.owns_lock()) {
        lock_.unlock();
    }
    let_go();
}

void Prefetch::let_go() {
    for (Residency * residency : held_) {
        residency->release(stream_.progress());
    }
    held_.clear();
}

bool copy_residents(const Store & store, Backend * by, const Region & region, const std::vector<Tensor *> & bank, Kept & kept,
                    Status & status) {
    const int64_t n_slots = region.group->n_slots;
    status = kSuccess;
    if (n_slots == 0) {
        return true;
    }
    const Host & host = store.host;
    const size_t n = region.products.size();
    const size_t size = host.ggml_tensor_overhead() * (3 * n + 1) + host.ggml_graph_overhead_custom(16 + n, false);
    kept.reserve();
    Context * context = host.ggml_init(InitParams{size, nullptr, true});
    if (!context) {
        status = kAllocFailed;
        return false;
    }
    kept.keep(context);
    Graph * graph = host.ggml_new_graph_custom(context, 16 + n, false);
    bool can = true;
    for (size_t i = 0; i < n; i++) {
        const Tensor * slots = region.products[i].matrix->slots;
        const int64_t shape[3] = {slots->ne[0], slots->ne[1], n_slots};
        Tensor * ends[2];
        for (int end = 0; end < 2; end++) {
            ends[end] = host.ggml_new_tensor(context, slots->type, 3, shape);
            ends[end]->buffer = end ? bank[i]->buffer : slots->buffer;
            ends[end]->data = end ? bank[i]->data : slots->data;
        }
        Tensor * copy = host.ggml_cpy(context, ends[0], ends[1]);
        copy->buffer = ends[1]->buffer;
        copy->data = ends[1]->data;
        can = can && store.inner->iface.supports_op(store.inner, copy);
        host.ggml_build_forward_expand(graph, copy);
    }
    if (can) {
        status = by->iface.graph_compute(by, graph);
    }
    return can;
}

}  // namespace hybrid
