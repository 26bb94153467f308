// What a region's lanes need of the host: the CPU's part and its rows, costs, counts.
#include <algorithm>

#include "stream.h"

namespace hybrid {

namespace {

constexpr int64_t kDeviceBytesUs = 200000;  // copies within a device, a guess that no choice hangs on
constexpr int64_t kStageStart = 50000;      // ns
constexpr int64_t kDeviceGuess = 20000;    // ns of a layer's resident experts, before it is measured
constexpr int kTurns = 5;                   // of a measurement

// From the times of one expert, and of each more.
Pace::Sample pace_of(const Region & region, int64_t one_ns, int64_t each_ns) {
    Pace::Sample found;
    found.start_ns = std::max<int64_t>(one_ns - each_ns, 0);
    found.bytes_us = std::max<int64_t>(region.expert_bytes * 1000 / std::max<int64_t>(each_ns, 1), 1);
    return found;
}

}  // namespace

bool Stream::start_lane(Region & region) {
    LaneWork & work = region.work;
    work.pairs.assign(routing_.pairs.begin(), routing_.pairs.end());
    work.stale_row = store_.config.fault == Fault::kStaleRow;
    work.exchanged = store_.config.fault == Fault::kExchanged;
    const auto n_inputs = static_cast<int32_t>(region.input->ne[1]);
    order_.resize(work.pairs.size());
    for (size_t p = 0; p < work.pairs.size(); p++) {
        Pair & pair = work.pairs[p];
        pair.input = pair.token * n_inputs + pair.place % n_inputs;
        order_[p] = static_cast<int32_t>(p);
    }
    // Rows that lie together in the output stand together here, whoever computes them.
    std::sort(order_.begin(), order_.end(), [&](int32_t a, int32_t b) {
        const Pair &x = work.pairs[static_cast<size_t>(a)], &y = work.pairs[static_cast<size_t>(b)];
        return x.token != y.token ? x.token < y.token : x.place < y.place;
    });
    for (size_t row = 0; row < order_.size(); row++) {
        work.pairs[static_cast<size_t>(order_[row])].row = static_cast<int32_t>(row);
    }
    const size_t bytes = work.pairs.size() * static_cast<size_t>(work.n_out()) * sizeof(float);
    work.outputs = reinterpret_cast<float *>(rows_.room(bytes));
    if (!work.outputs) {
        return false;
    }
    work.inputs = inputs_.data();
    lane_.start(host_, pool_, work, inputs_.size(), threads());
    at_work_ = &region;
    return true;
}

void Stream::finish_lane(Region & region, int64_t started) {
    const int64_t begin = nanoseconds();
    lane_.finish(pool_, region.work, threads());
    at_work_ = nullptr;
    const int64_t end = nanoseconds();
    region.group->counters.lane_ns += end - begin;
    region.group->counters.cpu_ns += end - started;
}

// Over what the device computed for these choices; the queue keeps the order. Rows at equal distances go in one
// copy where the device can do that: two always do.
void Stream::write_rows(Region & region) {
    const Tensor * out = region.output;
    const auto width = static_cast<size_t>(out->ne[0]) * sizeof(float);
    const auto offset = [&](size_t row) {
        const Pair & pair = region.work.pairs[static_cast<size_t>(order_[row])];
        return static_cast<size_t>(pair.token) * out->nb[2] + static_cast<size_t>(pair.place) * out->nb[1];
    };
    const auto in_steps = out->buffer->type == store_.inner_type ? inner_->iface.set_tensor_2d_async : nullptr;
    for (size_t row = 0, n; row < order_.size(); row += n) {
        const size_t at = offset(row);
        const size_t step = row + 1 < order_.size() ? offset(row + 1) - at : 0;
        for (n = 1; (step == width || in_steps) && row + n < order_.size() && offset(row + n) == at + n * step; n++) {
        }
        const float * data = region.work.outputs + row * static_cast<size_t>(out->ne[0]);
        if (n == 1 || step == width) {
            set_async(region.output, data, at, n * width);
        } else {
            in_steps(inner_, region.output, data, at, width, n, step, width);
        }
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
    found.cpu_start = store_.cpu_start_ns.load();
    found.bus_start = store_.bus_start_ns.load();
    const int64_t device = store_.device_ns.load();
    found.device = device || store_.config.bus_bytes_us ? device : kDeviceGuess;
    found.stage = kStageStart + time(region.expert_bytes * region.group->n_slots, kDeviceBytesUs, kDeviceBytesUs);
    return found;
}

// After loading and a few times later, by the region in hand: how fast the lane reads experts, and the bus.
void Stream::measure(Region & region, int32_t n_guests) {
    if (region.cpu && !store_.config.cpu_bytes_us && store_.cpu_pace.is_due()) {
        measure_cpu(region);
    }
    if (n_guests && region.products[0].matrix->slots && !store_.config.bus_bytes_us && store_.bus_pace.is_due()) {
        measure_bus(region, n_guests);
    }
}

// A start and a time for every expert, from one expert and from several; never the same twice in a row, so that
// what is read is read from memory.
void Stream::measure_cpu(Region & region) {
    LaneWork & work = region.work;
    const int32_t n_experts = region.group->n_experts, n = std::min<int32_t>(4, n_experts);
    const std::vector<float> zeros(static_cast<size_t>(work.first[0].n_in), 0.0f);
    const float * input = zeros.data();
    std::vector<float> rows(static_cast<size_t>(n) * static_cast<size_t>(work.n_out()));
    work.inputs = &input;
    work.outputs = rows.data();
    int32_t expert = 0;
    const auto best = [&](int32_t n_pairs) {
        int64_t found = INT64_MAX;
        for (int turn = 0; turn < kTurns; turn++) {
            work.pairs.clear();
            for (int32_t i = 0; i < n_pairs; i++, expert = (expert + 1) % n_experts) {
                work.pairs.push_back(Pair{expert, 0, i, 0, i});
            }
            const int64_t begin = nanoseconds();
            lane_.start(host_, pool_, work, 1, threads());
            lane_.finish(pool_, work, threads());
            found = std::min(found, nanoseconds() - begin);
        }
        return std::max<int64_t>(found, 1);
    };
    const int64_t one = best(1), several = best(n);
    const int64_t each = n > 1 && several > one ? (several - one) / (n - 1) : several / n;
    const Pace::Sample typical = store_.cpu_pace.typical(pace_of(region, one, each));
    store_.cpu_start_ns = typical.start_ns;
    store_.cpu_bytes_us = typical.bytes_us;
}

// The same for uploads, into guests that no queued work reads: choices were just waited for, and the lock is held.
void Stream::measure_bus(Region & region, int32_t n_guests) {
    Group & group = *region.group;
    wait_for(group.guests_read, group.guest_owner);
    const int64_t counted = group.counters.upload_bytes;
    time_bus(region, [&](int32_t expert, int32_t i) { bring_guest(region, Upload{expert, group.n_slots + i % n_guests}); });
    group.counters.upload_bytes = counted;  // the lock is held: nobody else counts
}

// Without guests the bus brings experts of batches only, into the stage.
void Stream::measure_bus_by_stage(Region & region, bool events) {
    std::unique_lock<std::mutex> lock(stage_.mutex, std::try_to_lock);
    const Stage::Bank & taken = stage_.banks[0];
    if (!lock.owns_lock() || (!events && taken.owner && taken.owner != this)) {
        return;
    }
    const std::vector<Tensor *> bank = stage_.tensors(region);
    if (bank.empty()) {
        return;
    }
    wait_for(taken.read, taken.owner);
    const int32_t room = stage_.room(region);
    time_bus(region, [&](int32_t expert, int32_t i) {
        for (size_t n = 0; n < bank.size(); n++) {
            const Matrix & matrix = *region.products[n].matrix;
            const size_t each = matrix.tensor->nb[2];
            set_async(bank[n], matrix.host() + static_cast<size_t>(expert) * each, static_cast<size_t>(i % room) * each, each);
        }
    });
}

void Stream::time_bus(Region & region, const std::function<void(int32_t expert, int32_t i)> & bring_one) {
    int32_t expert = 0;
    const auto best = [&](int32_t n) {
        int64_t found = INT64_MAX;
        for (int turn = 0; turn < kTurns; turn++) {
            const int64_t begin = nanoseconds();
            for (int32_t i = 0; i < n; i++, expert = (expert + 1) % region.group->n_experts) {
                bring_one(expert, i);
            }
            synchronize();
            found = std::min(found, nanoseconds() - begin);
        }
        return std::max<int64_t>(found, 1);
    };
    const int64_t one = best(1), several = best(3);
    const int64_t each = several > one ? (several - one) / 2 : several / 3;
    const Pace::Sample typical = store_.bus_pace.typical(pace_of(region, one, each));
    store_.bus_start_ns = typical.start_ns;
    store_.bus_bytes_us = typical.bytes_us;
}

// How long the device takes for what is resident: what is brought waits for the uploads, and takes as long. The first
// steps after loading are timed; the shortest tells, since a device prepares graphs that it meets for the first time.
void Stream::measure_device(const Region & region) {
    if (region.n_tokens() != 1 || !region.group->n_guests || store_.config.bus_bytes_us || store_.device_samples.load(std::memory_order_relaxed) <= 0) {
        return;
    }
    const int64_t begin = nanoseconds();
    synchronize();
    const int64_t took = nanoseconds() - begin;
    const int64_t known = store_.device_ns.load();
    if (!known || took < known) {
        store_.device_ns = took;
    }
    store_.device_samples--;
}

void Stream::count(Region & region, const Choices & choices) {
    Counters & counters = region.group->counters;
    counters.steps++;
    if (choices.n_places == region.group->n_experts) {
        counters.all_at_once += choices.n_places * choices.n_tokens;  // warm-up: no choice of a router
        return;
    }
    counters.hits += routing_.n_hits;
    progress_->asked += choices.n_places * choices.n_tokens;
    progress_->hits += routing_.n_hits;
    counters.count_rows(choices.n_tokens, choices.n_places, [&](size_t row) { return routing_.row_hits[row]; });
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
