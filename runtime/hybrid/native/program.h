// What happens to the hidden values of one chosen expert between the first products and the last one:
// biases, gates, limits. Recognised in the graph once, then run by the CPU lane on ranges of a row.
#pragma once

#include <cstdint>
#include <vector>

#include "host.h"

namespace hybrid {

// A row of values of one choice. A row twice as wide as the hidden size holds a fused gate and up.
struct Row {
    int64_t width = 0;
    int64_t at = 0;  // of its first value among the values of a choice
};

struct Instruction {
    Act act = Act::kUnknown;
    int to = -1, a = -1, b = -1;  // rows
    float first = 0, second = 0;  // limits, scale and offset, alpha
    const float * bias = nullptr;  // of all experts, rows as wide as `a`
};

struct Program {
    int64_t n_hidden = 0;
    int64_t n_values = 0;  // floats of one choice
    std::vector<Row> rows;
    std::vector<Instruction> steps;

    int add_row(int64_t width);                        // with values of its own
    int add_part(int of, int64_t from, int64_t width);  // a part of another row

    // Run on the hidden values from..to of one choice of an expert; `values` are those of the choice.
    void run(float * values, int expert, int64_t from, int64_t to) const;
};

}  // namespace hybrid
