#include "pool.h"

#include <algorithm>
#include <exception>

#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#endif

namespace hybrid {

namespace {

constexpr int kTurnsInPlace = 200;  // a few microseconds

void pause() {
#if defined(__x86_64__) || defined(_M_X64)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("isb" ::: "memory");
#endif
}

}  // namespace

void Patience::wait() {
    if (++turns_ < kTurnsInPlace) {
        pause();
    } else {
        std::this_thread::yield();
    }
}

Pool::~Pool() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        ended_.store(true);
        for (auto & worker : workers_) {
            worker->wake.notify_one();
        }
    }
    for (auto & worker : workers_) {
        worker->thread.join();
    }
}

void Pool::grow(int n_workers) {
    if (workers_.empty()) {
        workers_.reserve(kMaxThreads);  // others read while it grows
    }
    while (static_cast<int>(workers_.size()) < n_workers) {
        const int index = static_cast<int>(workers_.size());
        workers_.push_back(std::make_unique<Worker>());
        try {
            workers_.back()->thread = std::thread([this, index] { work(index); });
        } catch (const std::exception &) {
            workers_.pop_back();  // no more threads to be had: fewer do the work
            return;
        }
        n_workers_.store(index + 1, std::memory_order_release);
    }
}

void Pool::rouse(int n_threads) {
    const int wanted = n_threads > kMaxThreads ? kMaxThreads - 1 : n_threads - 1;
    std::lock_guard<std::mutex> lock(mutex_);
    grow(wanted);
    steps_++;
    const uint64_t call = call_.load(std::memory_order_relaxed);
    if (wanted > static_cast<int>(call & kNumbers)) {
        call_.store((call | kNumbers) + 1 + static_cast<uint64_t>(wanted), std::memory_order_release);
        if (!workers_.empty()) {
            workers_[0]->wake.notify_one();
        }
    }
}

void Pool::rest() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (--steps_ == 0) {
        call_.store((call_.load(std::memory_order_relaxed) | kNumbers) + 1, std::memory_order_release);
    }
}

// Each wakes two: all are awake after a few steps, none of which the caller waits for.
void Pool::wake_next(int index, int n_awake) {
    for (int next = 2 * index + 1; next <= 2 * index + 2 && next < std::min(n_awake, n_workers_.load(std::memory_order_acquire)); next++) {
        workers_[static_cast<size_t>(next)]->wake.notify_one();
    }
}

void Pool::start(Job & job, int n_threads) {
    job.next_.store(0, std::memory_order_relaxed);
    job.helpers_ = -1;
    if (running_.try_lock()) {
        hand_out(job, n_threads);
    }
}

void Pool::hand_out(Job & job, int n_threads) {
    job.helpers_ = std::max(std::min(n_threads - 1, n_workers()), 0);
    if (job.helpers_) {
        job_.store(&job, std::memory_order_relaxed);
        turn_.store((turn_.load(std::memory_order_relaxed) | kNumbers) + 1 + static_cast<uint64_t>(job.helpers_));
    }
}

void Pool::finish(Job & job, int n_threads) {
    if (job.helpers_ < 0) {
        running_.lock();
        hand_out(job, n_threads);
    }
    std::lock_guard<std::mutex> alone(running_, std::adopt_lock);
    take_part(job, 0);
    if (!job.helpers_) {
        return;
    }
    // Nobody begins any more; who has begun said so before it looked whether the turn is over.
    turn_.store((turn_.load(std::memory_order_relaxed) | kNumbers) + 1);
    for (int i = 0; i < job.helpers_; i++) {
        Patience patience;
        while (workers_[static_cast<size_t>(i)]->busy.load()) {
            patience.wait();
        }
    }
}

void Pool::take_part(Job & job, int thread) {
    for (int64_t index; (index = job.next_.fetch_add(1, std::memory_order_relaxed)) < job.n_chunks;) {
        job.chunk(index, thread);
    }
}

void Pool::work(int index) {
    uint64_t turn = 0, call = 0;
    while (wait_for_work(index, turn, call)) {
        Worker & me = *workers_[static_cast<size_t>(index)];
        me.busy.store(true);
        if (turn_.load() == turn) {
            take_part(*job_.load(std::memory_order_relaxed), index + 1);
        }
        me.busy.store(false, std::memory_order_release);
    }
}

bool Pool::wait_for_work(int index, uint64_t & turn, uint64_t & call) {
    Worker & me = *workers_[static_cast<size_t>(index)];
    Patience patience;
    while (!ended_.load(std::memory_order_relaxed)) {
        const uint64_t now = turn_.load(std::memory_order_acquire);
        if (now != turn) {
            turn = now;
            if (index < static_cast<int>(now & kNumbers)) {
                return true;
            }
        }
        uint64_t last = call_.load(std::memory_order_acquire);
        if (index >= static_cast<int>(last & kNumbers)) {
            std::unique_lock<std::mutex> lock(mutex_);
            me.wake.wait(lock, [&] {
                last = call_.load(std::memory_order_relaxed);
                return ended_.load() || index < static_cast<int>(last & kNumbers);
            });
            patience = Patience();
        }
        if (last != call) {
            call = last;
            wake_next(index, static_cast<int>(last & kNumbers));
        }
        patience.wait();
    }
    return false;
}

}  // namespace hybrid
