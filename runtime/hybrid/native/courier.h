// A thread that brings experts into slots beside the steps: it alone waits, for readers and for the device.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "host.h"

namespace hybrid {

class Stream;

// How far a context has come. Numbers only grow; all are changed while the stream's calls are locked.
struct Progress {
    uint64_t issued = 0;                 // of the last step of a block that may read slots
    uint64_t queued = 0;                 // all up to here have been given to the device
    std::atomic<uint64_t> finished{0};   // and all up to here are done
    int64_t asked = 0, hits = 0;         // choices of this context, and those whose expert had a slot
};

// A reader that must be done before a slot is written.
struct Reader {
    std::shared_ptr<Progress> progress;
    uint64_t number;

    bool done() const { return progress->finished.load(std::memory_order_acquire) >= number; }
};

// One expert's bytes of one matrix.
struct Piece {
    Tensor * slots;
    const char * data;
    size_t offset, size;
};

// Set when the device holds an expert.
using Arrived = std::shared_ptr<std::atomic<bool>>;

struct Delivery {
    std::vector<Piece> pieces;
    std::vector<Reader> readers;
    Arrived arrived;
};

class Courier {
  public:
    // `bytes_us`: what the bus carries in a microsecond; 0: not known.
    Courier(const Host & host, Device * inner, const std::atomic<int64_t> & bytes_us) : host_(host), inner_(inner), bytes_us_(bytes_us) {}
    ~Courier();
    Courier(const Courier &) = delete;
    Courier & operator=(const Courier &) = delete;

    void send(Delivery delivery);
    void wait(const Arrived & arrived);
    void await(const std::vector<Reader> & readers);

    // Contexts that may be idle without having said that they are done.
    void join(Stream * stream);
    void part(Stream * stream);
    // Whether a single context is there, whose queue has the order of all that reads slots.
    bool alone() const { return n_streams_.load() == 1; }

  private:
    void work();
    void deliver(const Delivery & delivery);

    const Host & host_;
    Device * const inner_;
    const std::atomic<int64_t> & bytes_us_;
    Backend * queue_ = nullptr;  // the device's own queue for this thread; nullptr: it has none
    std::thread thread_;
    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<Delivery> deliveries_;
    bool ended_ = false;
    std::mutex streams_mutex_;  // held while an idle stream is waited for; no step ever takes it
    std::vector<Stream *> streams_;
    std::atomic<int> n_streams_{0};
};

}  // namespace hybrid
