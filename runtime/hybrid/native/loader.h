// A thread that does what takes its time while its owner goes on: tasks in their order, and which of them are done.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

namespace hybrid {

// Of one owner, who alone calls it.
class Loader {
  public:
    Loader() = default;
    ~Loader() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            ended_ = true;
        }
        changed_.notify_all();
        if (thread_.joinable()) {
            thread_.join();
        }
    }
    Loader(const Loader &) = delete;
    Loader & operator=(const Loader &) = delete;

    // A task for the thread; where there is none to be had the caller does it. Its number, from 1.
    uint64_t put(std::function<void()> task) {
        begin();
        std::unique_lock<std::mutex> lock(mutex_);
        if (!thread_.joinable()) {
            lock.unlock();
            task();
            done_++;
            return ++given_;
        }
        tasks_.push_back(std::move(task));
        changed_.notify_all();
        return ++given_;
    }

    // Until all up to this one are done. What one of them threw is thrown here, once.
    void wait(uint64_t number) {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [&] { return done_ >= number; });
        if (thrown_) {
            std::rethrow_exception(std::exchange(thrown_, nullptr));
        }
    }

    // Until nothing is left to do, whatever was thrown.
    void drain() noexcept {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [&] { return done_ == given_; });
        thrown_ = nullptr;
    }

  private:
    void begin() {
        try {
            if (!thread_.joinable()) {
                thread_ = std::thread([this] { work(); });
            }
        } catch (const std::system_error &) {
            // No more threads to be had.
        }
    }

    void work() {
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            changed_.wait(lock, [&] { return ended_ || !tasks_.empty(); });
            if (tasks_.empty()) {
                return;
            }
            const std::function<void()> task = std::move(tasks_.front());
            tasks_.pop_front();
            lock.unlock();
            std::exception_ptr thrown;
            try {
                task();
            } catch (...) {
                thrown = std::current_exception();
            }
            lock.lock();
            thrown_ = thrown_ ? thrown_ : thrown;
            done_++;
            changed_.notify_all();
        }
    }

    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<std::function<void()>> tasks_;
    uint64_t given_ = 0, done_ = 0;
    std::exception_ptr thrown_;
    bool ended_ = false;
    std::thread thread_;  // the last member: all else is there when it begins
};

}  // namespace hybrid
