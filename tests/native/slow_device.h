// A device for tests that is as asynchronous as a GPU may be: work goes into a queue that a thread of its own
// takes up late, memory is its own, and copies that are not queued wait for nobody. The arithmetic is the CPU's.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "host.h"

namespace trial {

using namespace hybrid;

// Calls that reached the device.
struct Calls {
    std::atomic<int64_t> graphs{0}, nodes{0}, uploads{0}, reads{0}, bytes{0}, waits{0}, events{0};
};

// Memory that was there already and is locked: how the engine's own functions say it, for all devices.
struct Locks {
    std::atomic<bool> offered{false}, refused{false};
    std::atomic<bool> may_end{true};  // until then a lock stays in progress
    std::atomic<int> n_locked{0}, n_asked{0};

    std::mutex mutex;
    std::map<void *, size_t> ranges;  // that are locked
    std::vector<const void *> read;   // where copies to a device began
    int n_early = 0;                  // of those, in a range that was not locked yet
    int n_unknown = 0;                // ranges that are unlocked and were not locked
};
extern Locks locks;

class SlowDevice {
  public:
    SlowDevice(const Host & host, Device * cpu, bool with_events);

    // From now on nothing is computed and copies are made at once: what is left is the host's own work, and what the
    // calls cost it, which may be nothing.
    std::atomic<bool> idle{false};
    int64_t copy_ns = 4000, graph_ns = 8000;
    Calls calls;

    const char * name = "SLOW0";
    Device device{};
    const Host & host;
    Device * const cpu;

    // Graphs so far, and after how many every other fails; -1: none does.
    std::atomic<int> n_graphs{0}, n_fail_after{-1};
    std::function<void()> throws;  // by the next graph, in its place

    // Buffers that are there, and how many more the device has memory for; -1: any number.
    std::atomic<int> n_buffers{0}, n_left{-1};

    // Whether its page-locked memory is all taken.
    std::atomic<bool> refuses_host{false};
    BufferType * refusing();

  private:
    BufferTypeV2 type_v2_{}, refusing_v2_{};
    BufferTypeV3 type_v3_{}, refusing_v3_{};
    Registry registry_{};
};

}  // namespace trial
