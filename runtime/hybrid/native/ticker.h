// A thread that does one thing again and again, for as long as its owner lives.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

namespace hybrid {

class Ticker {
  public:
    // 0 ms: never.
    void start(int ms, std::function<void()> work) {
        if (ms <= 0 || thread_.joinable()) {
            return;
        }
        thread_ = std::thread([this, ms, work = std::move(work)] {
            std::unique_lock<std::mutex> lock(mutex_);
            while (!ended_.wait_for(lock, std::chrono::milliseconds(ms), [this] { return over_; })) {
                lock.unlock();
                work();
                lock.lock();
            }
        });
    }

    ~Ticker() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            over_ = true;
        }
        ended_.notify_all();
        if (thread_.joinable()) {
            thread_.join();
        }
    }

  private:
    std::mutex mutex_;
    std::condition_variable ended_;
    std::thread thread_;
    bool over_ = false;
};

}  // namespace hybrid
