// Threads of the CPU lane. They sleep between steps, look out for work within one, and take it in chunks,
// so that a slow or interrupted core holds up no more than the chunk in its hands.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace hybrid {

// Work in chunks that any thread may take, in the order of their numbers.
class Job {
  public:
    virtual ~Job() = default;
    virtual void chunk(int64_t index, int thread) = 0;

    int64_t n_chunks = 0;

  private:
    friend class Pool;
    alignas(64) std::atomic<int64_t> next_{0};  // all threads write it: alone in its line
    alignas(64) int helpers_ = -1;              // workers that were given it; -1: none yet
};

class Pool {
  public:
    Pool() = default;
    ~Pool();
    Pool(const Pool &) = delete;
    Pool & operator=(const Pool &) = delete;

    // A step begins: `n_threads` (with the caller) are wanted soon. Every rouse() needs its rest(). The caller wakes one
    // worker, who wakes others: it has a device to keep busy meanwhile.
    void rouse(int n_threads);
    void rest();

    // Give a job to up to `n_threads` - 1 workers and return, unless they have another caller's in hand. Every
    // start() needs its finish(), by the same thread: it takes part, and returns when the last chunk is done.
    void start(Job & job, int n_threads);
    void finish(Job & job, int n_threads);

    // Both, for callers with nothing to do in between.
    void run(Job & job, int n_threads) {
        start(job, n_threads);
        finish(job, n_threads);
    }

    int n_workers() const { return n_workers_.load(std::memory_order_relaxed); }

    static constexpr int kMaxThreads = 512;

  private:
    struct alignas(64) Worker {
        std::thread thread;
        std::condition_variable wake;
        std::atomic<bool> busy{false};
    };

    void grow(int n_workers);
    void work(int index);
    bool wait_for_work(int index, uint64_t & turn, uint64_t & call);
    void hand_out(Job & job, int n_threads);
    void wake_next(int index, int n_awake);
    static void take_part(Job & job, int thread);

    // Both count up, and hold in their lowest bits how many workers are meant.
    static constexpr uint64_t kNumbers = 1023;

    std::vector<std::unique_ptr<Worker>> workers_;
    std::atomic<int> n_workers_{0};
    alignas(64) std::atomic<uint64_t> turn_{0};  // changes when a job is handed out and when it ends
    std::atomic<Job *> job_{nullptr};            // of this turn
    std::atomic<uint64_t> call_{0};              // to look out for work
    std::atomic<bool> ended_{false};
    alignas(64) std::mutex mutex_;  // of what follows and of growing
    int steps_ = 0;
    std::mutex running_;  // one job at a time
};

// Wait politely: at first in place, soon by giving the core to others.
class Patience {
  public:
    void wait();

  private:
    int turns_ = 0;
};

}  // namespace hybrid
