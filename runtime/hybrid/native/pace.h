// How fast a lane is, as measured at several moments: any one of them may fall into a stall of the machine, above all the
// first, when a model was just read.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>

namespace hybrid {

class Pace {
  public:
    struct Sample {
        int64_t start_ns = 0;  // what a step costs besides, as soon as the lane is used
        int64_t bytes_us = 0;  // of weights, in a microsecond
    };

    // Counts a layer's step; whether the lane is to be measured in it. Each moment is one caller's.
    bool is_due() {
        const int64_t step = steps_.fetch_add(1, std::memory_order_relaxed);
        return std::find(kMoments.begin(), kMoments.end(), step) != kMoments.end();
    }

    // One measurement more; the one in the middle by speed, of two in the middle the faster, since stalls only slow.
    Sample typical(const Sample & found) {
        std::lock_guard<std::mutex> lock(mutex_);
        if (n_ < samples_.size()) {
            samples_[n_++] = found;
        }
        std::sort(samples_.begin(), samples_.begin() + n_, [](const Sample & a, const Sample & b) { return a.bytes_us < b.bytes_us; });
        return samples_[n_ / 2];
    }

  private:
    // Steps of layers: at once, and after some, some hundred and some thousand tokens.
    static constexpr std::array<int64_t, 5> kMoments{0, 500, 2000, 10000, 50000};

    std::atomic<int64_t> steps_{0};
    std::mutex mutex_;
    std::array<Sample, kMoments.size()> samples_;
    size_t n_ = 0;
};

}  // namespace hybrid
