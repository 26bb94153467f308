// Steps of all contexts enter together; a change of the tables has them all to itself.
#pragma once

#include <condition_variable>
#include <mutex>

namespace hybrid {

class Gate {
  public:
    // A step begins; waits while a change is made or waiting, so that steps of many threads do not starve it.
    void enter() {
        std::unique_lock<std::mutex> lock(mutex_);
        free_.wait(lock, [&] { return !waiting_ && !changing_; });
        inside_++;
    }

    void leave() {
        std::lock_guard<std::mutex> lock(mutex_);
        if (--inside_ == 0) {
            free_.notify_all();
        }
    }

    // Alone from here on, until open().
    void close() {
        std::unique_lock<std::mutex> lock(mutex_);
        waiting_++;
        free_.wait(lock, [&] { return !inside_ && !changing_; });
        waiting_--;
        changing_ = true;
    }

    void open() {
        std::lock_guard<std::mutex> lock(mutex_);
        changing_ = false;
        free_.notify_all();
    }

  private:
    std::mutex mutex_;
    std::condition_variable free_;
    int inside_ = 0, waiting_ = 0;
    bool changing_ = false;
};

class Step {
  public:
    explicit Step(Gate & gate) : gate_(gate) { gate_.enter(); }
    ~Step() { gate_.leave(); }
    Step(const Step &) = delete;
    Step & operator=(const Step &) = delete;

  private:
    Gate & gate_;
};

class Change {
  public:
    explicit Change(Gate & gate) : gate_(gate) { gate_.close(); }
    ~Change() { gate_.open(); }
    Change(const Change &) = delete;
    Change & operator=(const Change &) = delete;

  private:
    Gate & gate_;
};

}  // namespace hybrid
