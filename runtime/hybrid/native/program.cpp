#include "program.h"

#include <algorithm>
#include <cmath>

namespace hybrid {

namespace {

constexpr float kSqrtTwoOverPi = 0.79788456080286535588f;
constexpr float kSqrtHalf = 0.70710678118654752440f;

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }
float silu(float x) { return x / (1.0f + std::exp(-x)); }
float gelu(float x) { return 0.5f * x * (1.0f + std::tanh(kSqrtTwoOverPi * x * (1.0f + 0.044715f * x * x))); }
float gelu_erf(float x) { return 0.5f * x * (1.0f + std::erf(x * kSqrtHalf)); }
float gelu_quick(float x) { return x / (1.0f + std::exp(-1.702f * x)); }
float relu(float x) { return x > 0.0f ? x : 0.0f; }

template <typename F>
void each(float * to, const float * a, const float * b, int64_t n, F f) {
    for (int64_t i = 0; i < n; i++) {
        to[i] = f(a[i], b[i]);
    }
}

template <typename F>
void each(float * to, const float * a, int64_t n, F f) {
    for (int64_t i = 0; i < n; i++) {
        to[i] = f(a[i]);
    }
}

void compute(const Instruction & step, float * to, const float * a, const float * b, const float * bias, int64_t n) {
    const float first = step.first, second = step.second;
    switch (step.act) {
        case Act::kReglu: return each(to, a, b, n, [](float g, float u) { return relu(g) * u; });
        case Act::kGeglu: return each(to, a, b, n, [](float g, float u) { return gelu(g) * u; });
        case Act::kSwiglu: return each(to, a, b, n, [](float g, float u) { return silu(g) * u; });
        case Act::kGegluErf: return each(to, a, b, n, [](float g, float u) { return gelu_erf(g) * u; });
        case Act::kGegluQuick: return each(to, a, b, n, [](float g, float u) { return gelu_quick(g) * u; });
        case Act::kSwigluOai:
            return each(to, a, b, n, [=](float g, float u) {
                g = std::min(g, second);
                u = std::max(std::min(u, second), -second);
                return g / (1.0f + std::exp(-first * g)) * (u + 1.0f);
            });
        case Act::kSwigluClamp:
            return each(to, a, b, n, [=](float g, float u) {
                return silu(std::min(g, second)) * std::max(std::min(u, second), -second);
            });
        case Act::kSilu: return each(to, a, n, silu);
        case Act::kGelu: return each(to, a, n, gelu);
        case Act::kRelu: return each(to, a, n, relu);
        case Act::kTanh: return each(to, a, n, [](float x) { return std::tanh(x); });
        case Act::kSigmoid: return each(to, a, n, sigmoid);
        case Act::kSquare: return each(to, a, n, [](float x) { return x * x; });
        case Act::kScale: return each(to, a, n, [=](float x) { return x * first + second; });
        case Act::kClamp: return each(to, a, n, [=](float x) { return std::min(std::max(x, first), second); });
        case Act::kAdd: return each(to, a, b, n, [](float x, float y) { return x + y; });
        case Act::kMul: return each(to, a, b, n, [](float x, float y) { return x * y; });
        case Act::kBias: return each(to, a, bias, n, [](float x, float y) { return x + y; });
        case Act::kUnknown: return;
    }
}

}  // namespace

int Program::add_row(int64_t width) {
    rows.push_back(Row{width, n_values});
    n_values += (width + 15) / 16 * 16;
    return static_cast<int>(rows.size()) - 1;
}

int Program::add_part(int of, int64_t from, int64_t width) {
    rows.push_back(Row{width, rows[static_cast<size_t>(of)].at + from});
    return static_cast<int>(rows.size()) - 1;
}

void Program::run(float * values, int expert, int64_t from, int64_t to) const {
    for (const Instruction & step : steps) {
        const Row & target = rows[static_cast<size_t>(step.to)];
        const float * a = values + rows[static_cast<size_t>(step.a)].at;
        const float * b = step.b >= 0 ? values + rows[static_cast<size_t>(step.b)].at : nullptr;
        const float * bias = step.bias ? step.bias + expert * target.width : nullptr;
        for (int64_t half = 0; half < target.width; half += n_hidden) {
            const int64_t at = half + from;
            compute(step, values + target.at + at, a + at, b ? b + at : nullptr, bias ? bias + at : nullptr, to - from);
        }
    }
}

}  // namespace hybrid
