#include "ring.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <numeric>
#include <thread>

namespace hybrid {

namespace {

constexpr size_t kPiece = size_t{256} << 10;  // bytes that a thread copies before it looks for more
constexpr size_t kSample = size_t{64} << 20;   // bytes that are measured, at most: 8 ms at 8 GB/s
constexpr size_t kLeastChunks = 2;             // that what is measured fills, at least
constexpr int kTimed = 3;
constexpr int64_t kPercent = 90;  // of the driver's time that the ring may take at most: less is told from noise
constexpr int kMostFillers = 4;

int fillers() { return std::clamp(static_cast<int>(std::thread::hardware_concurrency() / 4), 1, kMostFillers); }

// A chunk's bytes, in pieces for threads.
class Filling : public Job {
  public:
    Filling(const std::vector<Parcel> & load, char * chunk) : load_(load), chunk_(chunk) {
        for (const Parcel & parcel : load) {
            n_chunks += static_cast<int64_t>((parcel.size + kPiece - 1) / kPiece);
        }
    }

    void chunk(int64_t index, int) override {
        size_t at = 0;
        for (const Parcel & parcel : load_) {
            const auto n = static_cast<int64_t>((parcel.size + kPiece - 1) / kPiece);
            if (index < n) {
                const size_t begin = static_cast<size_t>(index) * kPiece;
                std::memcpy(chunk_ + at + begin, parcel.from + begin, std::min(kPiece, parcel.size - begin));
                return;
            }
            index -= n;
            at += parcel.size;
        }
    }

  private:
    const std::vector<Parcel> & load_;
    char * const chunk_;
};

// The threads look out for chunks until all are filled.
class Awake {
  public:
    Awake(Pool & pool, int n) : pool_(pool) { pool.rouse(n); }
    ~Awake() { pool_.rest(); }
    Awake(const Awake &) = delete;
    Awake & operator=(const Awake &) = delete;

  private:
    Pool & pool_;
};

int64_t clock_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// The first of some parcels, as many bytes as are measured.
std::vector<Parcel> sample_of(const std::vector<Parcel> & parcels, size_t & bytes) {
    std::vector<Parcel> found;
    bytes = 0;
    for (size_t i = 0; i < parcels.size() && bytes < kSample; i++) {
        found.push_back(parcels[i]);
        found.back().size = std::min(parcels[i].size, kSample - bytes);
        bytes += found.back().size;
    }
    return found;
}

}  // namespace

const char * name_of(Ring::State state) {
    switch (state) {
        case Ring::State::kRefused: return "refused";
        case Ring::State::kSlower: return "slower";
        case Ring::State::kTaken: return "taken";
        default: return "unused";
    }
}

Ring::~Ring() { free(); }

void Ring::free() {
    for (Chunk & chunk : chunks_) {
        if (chunk.read) {
            inner_->iface.event_free(inner_, chunk.read);
        }
        chunk = Chunk();
    }
    if (memory_) {
        host_.ggml_backend_buffer_free(memory_);
        memory_ = nullptr;
    }
    bytes_ = 0;
}

// Whether there is memory that the device reads by itself, and events that tell when it has.
bool Ring::is_able(Backend * queue) const {
    const DeviceInterface & device = inner_->iface;
    const bool events = device.event_new && device.event_synchronize && queue->iface.event_record && queue->iface.synchronize;
    return events && queue->iface.set_tensor_async && device.get_host_buffer_type && device.get_host_buffer_type(inner_);
}

bool Ring::make() {
    const DeviceInterface & device = inner_->iface;
    memory_ = host_.ggml_backend_buft_alloc_buffer(device.get_host_buffer_type(inner_), chunk_ * kChunks);
    auto * base = memory_ ? static_cast<char *>(host_.ggml_backend_buffer_get_base(memory_)) : nullptr;
    bool made = base != nullptr;
    for (int i = 0; made && i < kChunks; i++) {
        chunks_[i].data = base + static_cast<size_t>(i) * chunk_;
        chunks_[i].read = device.event_new(inner_);
        made = chunks_[i].read != nullptr;
    }
    if (!made) {
        free();
        return false;
    }
    bytes_ = chunk_ * kChunks;
    return true;
}

bool Ring::upload(Backend * queue, const std::vector<Parcel> & parcels) {
    if (state() == State::kUnused && !parcels.empty()) {
        decide(queue, parcels);
    }
    if (taken()) {
        through(queue, parcels);
    } else if (queue->iface.set_tensor_async) {
        directly(queue, parcels);
    } else {
        return false;
    }
    return true;
}

// A few experts say little of a layer's: what a chunk costs besides its bytes would decide.
void Ring::decide(Backend * queue, const std::vector<Parcel> & parcels) {
    const auto add = [](size_t sum, const Parcel & parcel) { return sum + parcel.size; };
    const bool few = std::accumulate(parcels.begin(), parcels.end(), size_t{0}, add) < kLeastChunks * chunk_;
    const bool able = config_.ring != 0 && is_able(queue);
    if (able && few && config_.ring < 0) {
        return;
    }
    if (!able || !make()) {
        state_ = State::kRefused;
        return;
    }
    if (config_.ring == 1 || is_faster(queue, parcels)) {
        state_ = State::kTaken;
        return;
    }
    free();
    state_ = State::kSlower;
}

// Both ways bring the same bytes to where they belong anyway. They take turns, so that a stall of the machine does not
// meet one alone, and the best of each counts: stalls only slow. The first time pages may come from the disk.
bool Ring::is_faster(Backend * queue, const std::vector<Parcel> & parcels) {
    size_t bytes = 0;
    const std::vector<Parcel> sample = sample_of(parcels, bytes);
    int64_t direct_ns = INT64_MAX, ring_ns = INT64_MAX;
    directly(queue, sample);
    queue->iface.synchronize(queue);
    for (int turn = 0; turn < kTimed; turn++) {
        const int64_t begin = clock_ns();
        directly(queue, sample);
        queue->iface.synchronize(queue);
        const int64_t between = clock_ns();
        through(queue, sample);
        queue->iface.synchronize(queue);
        direct_ns = std::min(direct_ns, std::max<int64_t>(between - begin, 1));
        ring_ns = std::min(ring_ns, std::max<int64_t>(clock_ns() - between, 1));
    }
    paged_bytes_us_ = static_cast<int64_t>(bytes) * 1000 / direct_ns;
    ring_bytes_us_ = static_cast<int64_t>(bytes) * 1000 / ring_ns;
    return ring_ns * 100 < direct_ns * kPercent;
}

void Ring::directly(Backend * queue, const std::vector<Parcel> & parcels) {
    for (const Parcel & parcel : parcels) {
        queue->iface.set_tensor_async(queue, parcel.to, parcel.from, parcel.offset, parcel.size);
    }
}

// Parcels one behind the other in the chunks, divided where a chunk ends.
void Ring::through(Backend * queue, const std::vector<Parcel> & parcels) {
    const Awake awake(pool_, fillers());
    size_t room = chunk_;
    load_.clear();
    for (Parcel rest : parcels) {
        while (rest.size) {
            Parcel part = rest;
            part.size = std::min(rest.size, room);
            load_.push_back(part);
            rest.offset += part.size;
            rest.from += part.size;
            rest.size -= part.size;
            room -= part.size;
            if (room == 0) {
                send(queue, load_);
                load_.clear();
                room = chunk_;
            }
        }
    }
    if (!load_.empty()) {
        send(queue, load_);
    }
}

// One chunk: filled once the device has what was in it, then queued. A device may copy when it comes to it, not at once.
void Ring::send(Backend * queue, const std::vector<Parcel> & load) {
    Chunk & chunk = chunks_[next_++ % kChunks];
    if (chunk.filled && config_.fault != Fault::kEarlyRefill) {
        inner_->iface.event_synchronize(inner_, chunk.read);
    }
    Filling filling(load, chunk.data);
    pool_.run(filling, fillers());
    size_t at = 0;
    for (const Parcel & parcel : load) {
        queue->iface.set_tensor_async(queue, parcel.to, chunk.data + at, parcel.offset, parcel.size);
        at += parcel.size;
    }
    queue->iface.event_record(queue, chunk.read);
    chunk.filled = true;
}

}  // namespace hybrid
