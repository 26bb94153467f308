// The CPU lane: rows of chosen experts by the engine's own kernels, in chunks of weights.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "host.h"
#include "pool.h"
#include "program.h"

namespace hybrid {

// One expert matrix in host memory.
struct Weights {
    const char * data = nullptr;
    int32_t type = 0;
    int64_t n_in = 0, n_out = 0;            // values of an input row, of an output row
    size_t row_bytes = 0, expert_bytes = 0;  // strides

    const char * row(int expert, int64_t index) const {
        return data + static_cast<size_t>(expert) * expert_bytes + static_cast<size_t>(index) * row_bytes;
    }
};

// A choice that the CPU computes.
struct Pair {
    int32_t expert;
    int32_t token, place;  // where its output row goes
    int32_t input;         // index among the input rows
    int32_t row;           // index among the output rows
};

// What is to be computed: `first` products of the input, the program on them, `last` product of its result.
// Without `last`, the only first product is the result.
struct LaneWork {
    std::vector<Weights> first;
    std::vector<int> first_rows;      // of the program, one each
    const Program * program = nullptr;
    int result = -1;                  // row of the program that `last` multiplies
    Weights last;
    std::vector<Pair> pairs;          // those of one expert stand together
    const float * const * inputs = nullptr;
    float * outputs = nullptr;        // n_out values a row
    bool stale_row = false, exchanged = false;  // seeded faults

    int64_t n_out() const { return program ? last.n_out : first[0].n_out; }
};

// Whether every matrix can be multiplied here.
bool lane_supports(const Host & host, int32_t type);

class LaneJob;

// Computes on the pool's threads; memory is kept between calls.
class Lane {
  public:
    Lane();
    ~Lane();

    // Begin on all pairs. `work` stays as it is until finish(), after which its outputs are ready.
    void start(const Host & host, Pool & pool, const LaneWork & work, size_t n_inputs, int n_threads);
    void finish(Pool & pool, const LaneWork & work, int n_threads);

    size_t bytes() const { return quantised_.capacity() + values_.capacity() * sizeof(float) + hidden_.capacity(); }

  private:
    std::unique_ptr<LaneJob> job_;
    std::vector<char> quantised_;  // input rows in the form the kernels take
    std::vector<float> values_;    // of the program, one block a pair
    std::vector<char> hidden_;     // its results in the form the last kernel takes
};

}  // namespace hybrid
