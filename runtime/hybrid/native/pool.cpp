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
        wake_.notify_all();
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
    if (wanted > awake_.load(std::memory_order_relaxed)) {
        awake_.store(wanted, std::memory_order_release);
        wake_.notify_all();
    }
}

void Pool::rest() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (--steps_ == 0) {
        awake_.store(0, std::memory_order_release);
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
    for (int i = 0; i < job.helpers_; i++) {
        workers_[static_cast<size_t>(i)]->box.store(&job, std::memory_order_release);
    }
}

void Pool::finish(Job & job, int n_threads) {
    if (job.helpers_ < 0) {
        running_.lock();
        hand_out(job, n_threads);
    }
    std::lock_guard<std::mutex> alone(running_, std::adopt_lock);
    take_part(job, 0);
    for (int i = 0; i < job.helpers_; i++) {
        Worker & worker = *workers_[static_cast<size_t>(i)];
        Job * waiting = &job;
        if (worker.box.compare_exchange_strong(waiting, nullptr, std::memory_order_acq_rel)) {
            continue;  // it had not begun, and will not
        }
        Patience patience;
        while (worker.busy.load(std::memory_order_acquire)) {
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
    while (wait_for_work(index)) {
        Worker & me = *workers_[static_cast<size_t>(index)];
        // Busy before the box is emptied: whoever finds it empty must see that it is in work.
        me.busy.store(true, std::memory_order_relaxed);
        if (Job * job = me.box.exchange(nullptr, std::memory_order_acq_rel)) {
            take_part(*job, index + 1);
        }
        me.busy.store(false, std::memory_order_release);
    }
}

bool Pool::wait_for_work(int index) {
    Worker & me = *workers_[static_cast<size_t>(index)];
    Patience patience;
    while (!ended_.load(std::memory_order_relaxed)) {
        if (me.box.load(std::memory_order_relaxed)) {
            return true;
        }
        if (index < awake_.load(std::memory_order_acquire)) {
            patience.wait();
            continue;
        }
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [&] { return ended_.load() || index < awake_.load(); });
        patience = Patience();
    }
    return false;
}

}  // namespace hybrid
