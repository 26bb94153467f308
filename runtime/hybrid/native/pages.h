// Page-locked host memory for experts. Pages are taken and locked by threads of their own while a file is read into
// them: who reserves gigabytes locked at once waits for every page first.
#pragma once

#include <atomic>
#include <cstddef>
#include <mutex>
#include <thread>
#include <vector>

#include "abi.h"

namespace hybrid {

// How memory that is there already is locked for a device: by the engine's functions, where it offers them, else by a
// driver's own.
struct Locker {
    using Unlock = void (*)(const Locker & how, void * address);

    bool (*engine_lock)(void *, size_t) = nullptr;
    void (*engine_unlock)(void *) = nullptr;
    int number = -1;  // of the device, for its driver; -1: there is none

    // How to undo it; nullptr: refused.
    Unlock lock(void * address, size_t size) const;
    explicit operator bool() const { return engine_lock || number >= 0; }
};

// The way of a device; an empty one where memory can only be reserved locked.
Locker locker_of(Device * device);

class LockedPages {
  public:
    // Memory of `size` bytes, not touched yet; base() is nullptr when there is none.
    LockedPages(const Locker & how, size_t size);
    ~LockedPages();
    LockedPages(const LockedPages &) = delete;
    LockedPages & operator=(const LockedPages &) = delete;

    char * base() const { return base_; }
    // Wait until all is locked, or refused; whether it is locked.
    bool ready();

  private:
    void take();
    void take_and_lock();
    void begin();

    const Locker how_;
    const size_t size_;
    char * const base_;
    std::atomic<size_t> next_{0};
    std::atomic<bool> ended_{false};
    Locker::Unlock unlock_ = nullptr;  // when it is locked: by the first thread, read when it has ended
    std::mutex mutex_;     // of waiting for it
    std::thread first_;
    std::vector<std::thread> others_;
};

}  // namespace hybrid
