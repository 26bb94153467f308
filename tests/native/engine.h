// The engine under test: libraries of a folder, loaded as a stranger would, and small expert layers on it.
#pragma once

#include <memory>
#include <random>
#include <string>
#include <vector>

#include "abi.h"
#include "host.h"

namespace trial {

using namespace hybrid;

struct Engine {
    Host host;
    Device * cpu = nullptr;
    Device * device = nullptr;  // the first of the library that TRIAL_DEVICE_LIBRARY names
};

// Engine of a folder, loaded once; ends the program when it is not understood.
Engine & engine(const char * folder = nullptr);

// Allocations that the library may make in calls of the interface below, of this thread; -1: any number. What is refused
// is thrown, as memory that runs out is.
extern thread_local int64_t allocations_left;
extern thread_local bool in_library;

class InLibrary {
  public:
    InLibrary() { in_library = true; }
    ~InLibrary() { in_library = false; }
    InLibrary(const InLibrary &) = delete;
    InLibrary & operator=(const InLibrary &) = delete;
};

// A device's own work within such a call.
class OutsideLibrary {
  public:
    OutsideLibrary() : before_(in_library) { in_library = false; }
    ~OutsideLibrary() { in_library = before_; }
    OutsideLibrary(const OutsideLibrary &) = delete;
    OutsideLibrary & operator=(const OutsideLibrary &) = delete;

  private:
    const bool before_;
};

// Tensors and one graph with memory of a buffer type.
class Memory {
  public:
    explicit Memory(const Host & host, size_t n_tensors = 64, size_t n_nodes = 64);
    ~Memory();
    Memory(const Memory &) = delete;
    Memory & operator=(const Memory &) = delete;

    Tensor * tensor(int type, std::vector<int64_t> shape, const char * name = "");
    bool allocate(BufferType * type, bool weights = false);

    Context * context;
    Buffer * buffer = nullptr;

  private:
    const Host & host_;
};

// Shapes of one layer of experts, with biases when asked.
struct Shape {
    int type = kF32;
    int64_t n_in = 64, n_hidden = 96, n_experts = 8;
    bool fused = false, biased = false;
};

// The weights of a layer in some buffer type; the same seed gives the same values, a negative one zeros.
struct Layer {
    Layer(const Host & host, const Shape & shape, int block, int seed, BufferType * weights_type, BufferType * bias_type);

    Shape shape;
    Memory weights, biases;
    Tensor *gate = nullptr, *up = nullptr, *down = nullptr, *gate_bias = nullptr;
    bool ok = false;
};

// A step of that layer: input and choices, the products, the output.
struct Pass {
    Pass(const Host & host, Layer & layer, int64_t n_tokens, int64_t n_places, BufferType * type, bool shared_input = true, bool sorts = false)
        : Pass(host, std::vector<Layer *>{&layer}, n_tokens, n_places, type, shared_input, sorts) {}
    // Layers one after the other, for the same choices: a later one takes the rows of the one before.
    // `sorts`: the graph sorts the experts by itself, so that a token names none twice.
    Pass(const Host & host, const std::vector<Layer *> & layers, int64_t n_tokens, int64_t n_places, BufferType * type, bool shared_input = true,
         bool sorts = false);

    void set(Backend * backend, const std::vector<float> & input, const std::vector<int32_t> & choices);
    Status compute(Backend * backend, bool cut = false);
    std::vector<float> output(Backend * backend) const;

    const Host & host;
    Memory memory;
    Tensor *x, *ids, *all_ids, *scores, *out;
    Graph * graph;

  private:
    Tensor * experts(const Layer & layer, Tensor * input);
};

// The numbers of a row's values, the largest first.
Tensor * sorted(const Host & host, Context * context, Tensor * values);

std::vector<float> random_values(std::mt19937 & dice, size_t n);
// Experts of every token: different ones, or any.
std::vector<int32_t> random_choices(std::mt19937 & dice, int64_t n_tokens, int64_t n_places, int64_t n_experts, bool distinct);
// Largest difference relative to the largest value.
double difference(const std::vector<float> & a, const std::vector<float> & b);

}  // namespace trial
