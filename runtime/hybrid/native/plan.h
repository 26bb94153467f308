// Where a graph multiplies by our experts: each product alone, or with its neighbours up to the last product.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "program.h"
#include "store.h"

namespace hybrid {

// One MUL_MAT_ID over experts of ours.
struct Product {
    Tensor * node = nullptr;
    Tensor * source = nullptr;  // of the node, as the engine built it
    Matrix * matrix = nullptr;
    Weights weights;         // on the host
    Tensor * slots = nullptr;  // of the matrix, or `part` where the node reads a part of each expert
    Tensor part{};
};

// Matrices of one shape whose experts lie at equal distances on the host, and at equal ones on the device: an expert of
// theirs comes in one strided copy.
struct Strip {
    Matrix * first = nullptr;
    size_t n = 1, host_step = 0, device_step = 0;
};

// The device renames the choices by itself, so that what is resident waits for no host: the nodes before a region and one
// more, which looks up the slot of each choice.
struct Ahead {
    Context * context = nullptr;
    Tensor * renamed = nullptr;
    std::vector<Tensor *> nodes;
    const Host * host = nullptr;

    Ahead() = default;
    ~Ahead() {
        if (context) {
            host->ggml_free(context);
        }
    }
    Ahead(const Ahead &) = delete;
    Ahead & operator=(const Ahead &) = delete;
};

// Nodes begin..end of a graph that are computed together: one product, or all of a block's experts.
struct Region {
    int begin = 0, end = 0;
    Group * group = nullptr;
    std::vector<Product> products;   // in the graph's order; the last is the result
    bool has_program = false;
    Program program;
    std::vector<int> first_rows;
    int result = -1;
    Tensor * ids = nullptr;
    Tensor * input = nullptr;
    Tensor * output = nullptr;
    std::vector<std::pair<int, int>> others;  // runs of nodes in between that have nothing to do with it
    uint64_t before_uid = 0, slots_uid = 0;
    uint64_t stage_uids[2] = {0, 0};  // by bank
    bool quantised = true;           // all products: their kernels may meet an expert twice in a token
    bool cpu = true;                 // all products can be computed by the CPU lane
    int64_t expert_bytes = 0;        // of all products
    std::vector<Strip> strips;       // of all products' experts, for uploads
    bool from_sort = false;          // choices are numbers of the graph's own making: none is out of range
    std::unique_ptr<Ahead> ahead;    // nullptr: choices are renamed by the host
    LaneWork work;                   // what is the same in every step, and the pairs of this one

    int64_t n_places() const { return ids->ne[0]; }
    int64_t n_tokens() const { return ids->ne[1]; }
};

// Whether the experts of a region lie, some of them, in pages that the device does not read by itself.
bool is_paged(const Region & region);

struct Plan {
    uint64_t uid = 0;
    int64_t version = 0;  // of the store, when it was made
    int n_nodes = 0;
    uint64_t used = 0;    // when it was used last
    std::vector<std::unique_ptr<Region>> regions;
    // Where every expert has the slot of its own number: nothing is to be decided, and the graph is not cut there.
    std::vector<std::unique_ptr<Region>> resident;
    uint64_t after_uid = 0;
};

// Find the regions of a graph, which keeps its nodes. `fault` says what cannot be computed here, or stays empty.
std::unique_ptr<Plan> make_plan(Store & store, Graph * graph, std::string & fault);

}  // namespace hybrid
