// Page-locked host memory in a few chunks, through which experts go to the device where it does not read their pages by
// itself: mapped files, memory that is not locked. A driver copies such pages through a buffer of its own, with one
// thread; here several fill a chunk while the device takes the one before.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "config.h"
#include "host.h"
#include "pool.h"

namespace hybrid {

// Bytes for a tensor on the device.
struct Parcel {
    Tensor * to;
    size_t offset;
    const char * from;
    size_t size;
};

// One caller at a time: who holds the stage, in a step; who fills slots, while nobody is in one.
class Ring {
  public:
    enum class State {
        kUnused,   // nothing was brought from such pages yet, or too little to tell
        kRefused,  // the device has no page-locked memory, events or queued copies; or it is told not to be used
        kSlower,   // than the driver by itself, as measured
        kTaken,
    };

    Ring(const Host & host, Device * inner, const Config & config) : host_(host), inner_(inner), config_(config), chunk_(config.ring_chunk) {}
    ~Ring();
    Ring(const Ring &) = delete;
    Ring & operator=(const Ring &) = delete;

    // Queue copies of pages that are not locked, the faster way: with the first that are enough both are timed.
    // Afterwards nothing waits for them, but what `queue` is given next comes after them. false: it takes no copies.
    bool upload(Backend * queue, const std::vector<Parcel> & parcels);
    // Whether the next upload() goes through the chunks, and keeps its thread busy meanwhile.
    bool taken() const { return state() == State::kTaken; }

    // The device's own way.
    static void directly(Backend * queue, const std::vector<Parcel> & parcels);

    // ---- for reports, at any time
    State state() const { return state_.load(std::memory_order_acquire); }
    size_t bytes() const { return bytes_.load(std::memory_order_relaxed); }
    // What each way was measured to carry in a microsecond; 0: not measured.
    int64_t ring_bytes_us() const { return ring_bytes_us_.load(std::memory_order_relaxed); }
    int64_t paged_bytes_us() const { return paged_bytes_us_.load(std::memory_order_relaxed); }

  private:
    static constexpr int kChunks = 4;

    struct Chunk {
        char * data = nullptr;
        Event * read = nullptr;  // when the device has what was in it
        bool filled = false;     // whether `read` was ever recorded
    };

    void decide(Backend * queue, const std::vector<Parcel> & parcels);
    bool is_able(Backend * queue) const;
    bool make();
    void free();
    bool is_faster(Backend * queue, const std::vector<Parcel> & parcels);
    void through(Backend * queue, const std::vector<Parcel> & parcels);
    void send(Backend * queue, const std::vector<Parcel> & parcels);

    const Host & host_;
    Device * const inner_;
    const Config & config_;
    const size_t chunk_;  // bytes
    Buffer * memory_ = nullptr;
    Chunk chunks_[kChunks];
    size_t next_ = 0;
    std::vector<Parcel> load_;  // of the chunk in hand
    Pool pool_;                 // of its own: the lane's threads may be at work for another context
    std::atomic<State> state_{State::kUnused};
    std::atomic<size_t> bytes_{0};
    std::atomic<int64_t> ring_bytes_us_{0}, paged_bytes_us_{0};
};

// The words of a report.
const char * name_of(Ring::State state);

}  // namespace hybrid
