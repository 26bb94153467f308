#include "residency.h"

#include <algorithm>

#include "store.h"

namespace hybrid {

Residency::Residency(Courier & courier, const Adaptation & how, Group & group)
    : courier_(courier), how_(how), group_(group), scores_(std::make_unique<Scores>(how, group.block, group.n_experts, group.expert_in)),
      on_its_way_(static_cast<size_t>(group.n_experts)) {}

// What has arrived may be used from now on.
void Residency::receive(bool wait) {
    while (!sent_.empty()) {
        const Sent & first = sent_.front();
        if (!first.arrived->load(std::memory_order_acquire)) {
            if (!wait) {
                late++;
                return;
            }
            waited++;
            courier_.wait(first.arrived);
        }
        group_.slot_of[static_cast<size_t>(first.expert)] = first.slot;
        group_.expert_in[static_cast<size_t>(first.slot)] = first.expert;
        on_its_way_[static_cast<size_t>(first.expert)] = 0;
        sent_.pop_front();
    }
}

void Residency::decide(const Choices & choices, int32_t n_needed) {
    for (int64_t t = 0; t < choices.n_tokens; t++) {
        for (int64_t p = 0; p < choices.n_places; p++) {
            if (choices.at(t, p) < 0 || choices.at(t, p) >= group_.n_experts) {
                return;  // who divides them says so
            }
        }
    }
    int64_t expert_bytes = 0;
    for (const Matrix * matrix : group_.matrices) {
        expert_bytes += static_cast<int64_t>(matrix->tensor->nb[2]);
    }
    scores_->step(choices, expert_bytes, group_.slot_of);
    if (!coming_.empty()) {
        leaving_ = readers_;  // a step without memory left them
    }
    Admission admission{};
    while (!holders_ && group_.n_slots - static_cast<int32_t>(sent_.size() + coming_.size()) > n_needed &&
           scores_->next(group_.slot_of, group_.expert_in, on_its_way_, admission)) {
        if (coming_.empty()) {
            leaving_ = readers_;
        }
        admit(admission);
    }
}

// The slot is free for its new expert from now on. The list comes first: what throws changes nothing.
void Residency::admit(const Admission & admission) {
    const auto slot = static_cast<size_t>(admission.slot);
    coming_.push_back(Coming{admission.expert, admission.slot});
    group_.slot_of[static_cast<size_t>(group_.expert_in[slot])] = -1;
    group_.expert_in[slot] = -1;
    on_its_way_[static_cast<size_t>(admission.expert)] = 1;
    admitted++;
}

// Written when nobody reads it any more who might before.
void Residency::send(const Coming & coming) {
    Delivery delivery;
    int64_t sum = 0;
    delivery.arrived = std::make_shared<std::atomic<bool>>(false);
    for (Matrix * matrix : group_.matrices) {
        const size_t each = matrix->tensor->nb[2];
        const char * data = static_cast<const char *>(matrix->tensor->data) + static_cast<size_t>(coming.expert) * each;
        delivery.pieces.push_back(Piece{matrix->slots, data, static_cast<size_t>(coming.slot) * each, each});
        sum += static_cast<int64_t>(each);
    }
    delivery.readers = leaving_;
    sent_.push_back(Sent{coming.expert, coming.slot, delivery.arrived});
    try {
        courier_.send(std::move(delivery));
    } catch (...) {
        sent_.pop_back();  // nobody would ever see it arrive
        throw;
    }
    bytes += sum;
}

bool Residency::hold() {
    // Who has it in lockstep may wait for the work of the caller.
    std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
    if (!lock.owns_lock()) {
        return false;
    }
    receive(false);
    readers_.reserve(readers_.size() + static_cast<size_t>(holders_) + 1);
    const bool free = sent_.empty() && coming_.empty() && (!wrote_.progress || wrote_.done());
    holders_ += free ? 1 : 0;
    return free;
}

void Residency::note(const Choices & choices) {
    std::lock_guard<std::mutex> lock(mutex_);
    decide(choices, group_.n_slots);  // scores alone: all slots are needed
}

// All reads of the slots have been queued.
void Residency::release(const std::shared_ptr<Progress> & progress) {
    std::lock_guard<std::mutex> lock(mutex_);
    holders_--;
    reads(progress);
    progress->queued = progress->issued;
}

// The context is one of the readers, of all that has an expert now. Those who hold the tables have room in the list:
// who lets go cannot be refused.
void Residency::reads(const std::shared_ptr<Progress> & progress) {
    readers_.reserve(readers_.size() + static_cast<size_t>(holders_) + 1);
    const uint64_t number = ++progress->issued;
    const auto mine = std::find_if(readers_.begin(), readers_.end(), [&](const Reader & reader) { return reader.progress == progress; });
    if (mine != readers_.end()) {
        mine->number = number;
    } else {
        readers_.erase(std::remove_if(readers_.begin(), readers_.end(), [](const Reader & reader) { return reader.done(); }),
                       readers_.end());
        readers_.push_back(Reader{progress, number});
    }
}

void Residency::finish() {
    std::lock_guard<std::mutex> lock(mutex_);
    receive(true);
    for (const Coming & one : coming_) {  // a step without memory left them: others come to these slots
        on_its_way_[static_cast<size_t>(one.expert)] = 0;
    }
    coming_.clear();
}

void Residency::sow(const std::vector<int32_t> & seed) {
    auto made = std::make_unique<Scores>(how_, group_.block, group_.n_experts, seed);
    std::lock_guard<std::mutex> lock(mutex_);
    scores_ = std::move(made);
}

// ---- a step

Residency::Turn::Turn(Residency * residency, const Choices & choices, bool counts, int32_t n_needed,
                      const std::shared_ptr<Progress> & progress)
    : residency_(residency), progress_(progress) {
    if (!residency) {
        return;
    }
    lock_ = std::unique_lock<std::mutex>(residency->mutex_);
    // A context that came later reads what has arrived. Who wrote is done at its next block, or idle.
    if (residency->wrote_.progress && residency->wrote_.progress != progress && !residency->wrote_.done()) {
        residency->courier_.await({residency->wrote_});
    }
    residency->receive(residency->how_.lockstep);
    if (counts) {
        residency->decide(choices, n_needed);
    }
    residency->leaving_.reserve(residency->leaving_.size() + 1);  // of this step, should it end early
    for (const Sent & each : residency->sent_) {
        before_.push_back(each.arrived);
    }
    residency->reads(progress);
}

bool Residency::Turn::on_demand() const { return residency_ && residency_->how_.least_misses; }

int32_t Residency::Turn::n_empty() const { return residency_ ? static_cast<int32_t>(residency_->sent_.size() + residency_->coming_.size()) : 0; }

const std::vector<Coming> * Residency::Turn::coming() const {
    if (!residency_ || residency_->coming_.empty() || !residency_->courier_.alone()) {
        return nullptr;
    }
    // A context that is gone may have left something behind.
    for (const Reader & reader : residency_->leaving_) {
        if (reader.progress != progress_ && !reader.done()) {
            return nullptr;
        }
    }
    return &residency_->coming_;
}

bool Residency::Turn::keep(const std::vector<Upload> & uploads) {
    if (!lock_.owns_lock()) {
        return false;  // what comes now is another's
    }
    std::vector<Coming> & coming = residency_->coming_;
    before_.reserve(before_.size() + coming.size());
    for (size_t i = 0; i < coming.size();) {
        const Coming one = coming[i];
        const bool here = std::any_of(uploads.begin(), uploads.end(), [&](const Upload & upload) {
            return upload.expert == one.expert && upload.position == one.slot;
        });
        if (here) {
            i++;
            continue;
        }
        residency_->send(one);  // what cannot be sent stays, and what was sent is nowhere else
        before_.push_back(residency_->sent_.back().arrived);
        coming.erase(coming.begin() + static_cast<ptrdiff_t>(i));
    }
    return !coming.empty();
}

void Residency::Turn::brought() {
    Group & group = residency_->group_;
    for (const Coming & one : residency_->coming_) {
        group.slot_of[static_cast<size_t>(one.expert)] = one.slot;
        group.expert_in[static_cast<size_t>(one.slot)] = one.expert;
        residency_->on_its_way_[static_cast<size_t>(one.expert)] = 0;
    }
    residency_->coming_.clear();
    residency_->wrote_ = Reader{progress_, progress_->issued};
}

void Residency::Turn::divided() {
    if (lock_.owns_lock()) {
        lock_.unlock();
    }
}

// Who has the tables may wait for this step to end: then its next step makes up for it.
void Residency::Turn::rest() {
    if (!residency_) {
        return;
    }
    std::unique_lock<std::mutex> lock(residency_->mutex_, std::defer_lock);
    if (lock_.owns_lock() || lock.try_lock()) {
        residency_->scores_->rest();
    }
}

void Residency::Turn::again() {
    if (residency_) {
        lock_.lock();
    }
}

void Residency::Turn::settle() {
    for (const Arrived & each : before_) {
        residency_->courier_.wait(each);
    }
}

// All of the step's work has been queued.
Residency::Turn::~Turn() {
    if (residency_) {
        if (lock_.owns_lock()) {  // an error came first: by the other way, after what this step may have queued
            residency_->leaving_.push_back(Reader{progress_, progress_->issued});
            try {
                keep({});
            } catch (...) {
                // What was not sent is left to the next step.
            }
        }
        progress_->queued = progress_->issued;
    }
}

}  // namespace hybrid
