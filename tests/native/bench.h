// What the tests share: a device of ours around the engine's CPU, and the same layer without it to compare with.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <atomic>
#include <cstdio>

#include "config.h"
#include "device.h"
#include "engine.h"
#include "slow_device.h"

namespace trial {

// Checks that did not hold, of all tests so far.
extern std::atomic<int> failures;

#define CHECK(what) \
    do { \
        if (!(what)) { \
            std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #what); \
            failures++; \
        } \
    } while (0)

constexpr double kClose = 1e-5;
constexpr double kQuantised = 0.03;  // activations of eight bits here, of more there
constexpr int kQ8 = 8;

// Tests by name; each file has its own.
using Tests = std::vector<std::pair<const char *, void (*)()>>;
extern const Tests kParts, kLayers, kContexts, kPrompts, kMemory, kOrders;

// The CPU, or a slow device before it, or `other`, wrapped with these settings.
struct Bench {
    Bench(const std::string & settings, bool slow, bool events = true, Device * other = nullptr, Fault fault = Fault::kNone);

    static const Host & host() { return engine().host; }
    // One thread of the engine's own: its pool spins, and is not instrumented. The lane has its number in the settings.
    Backend * backend();
    int64_t counted(const std::string & what);  // the sum of a number over a report

    SlowDevice slow_device;
    std::unique_ptr<Wrapper> wrapper;
    std::vector<Wrapper *> shown;
    Registry registry{};
    BufferType * inner_type;
};

// A layer on the engine's CPU.
struct Reference {
    explicit Reference(const Shape & shape, int seed);
    ~Reference();
    Reference(const Reference &) = delete;
    Reference & operator=(const Reference &) = delete;

    std::vector<float> compute(int64_t tokens, int64_t places, const std::vector<float> & x, const std::vector<int32_t> & ids, bool shared);

    BufferType * type;
    Layer layer;
    Backend * backend;
};

// Steps of one token, every so often one of many; tokens of a step are computed by so many experts each.
struct Steps {
    int count, every;
    int64_t places, many, places_of_many;
};

// A context of its own: every result is that of the layer without slots, whatever others do meanwhile.
void one_and_many(Bench & bench, const Shape & shape, Layer & layer, unsigned number, const Steps & steps,
                  const std::function<void()> & stepped = [] {});

// Several layers of one buffer type, each block its own values.
struct Layers {
    Layers(const Shape & shape, int n, BufferType * weights_type, BufferType * bias_type);
    std::vector<std::unique_ptr<Layer>> made;
    std::vector<Layer *> all;
};

}  // namespace trial
