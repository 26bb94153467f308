// Which lane computes each choice of the router: resident slots, uploads, or the CPU.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "lane.h"

namespace hybrid {

// What the router chose, as it lies in memory.
struct Choices {
    const char * data = nullptr;
    size_t place_stride = 0, token_stride = 0;  // bytes
    int64_t n_places = 0, n_tokens = 0;         // experts of a token, tokens

    int32_t at(int64_t token, int64_t place) const {
        return *reinterpret_cast<const int32_t *>(data + static_cast<size_t>(token) * token_stride +
                                                  static_cast<size_t>(place) * place_stride);
    }
};

// An expert that gets a slot, which holds nothing any more.
struct Coming {
    int32_t expert, slot;
};

// Nanoseconds.
struct Costs {
    int64_t cpu_pair = 1;    // one choice by the CPU
    int64_t bus_expert = 1;  // one expert brought to the device
    int64_t stage = 0;       // bringing anything to the stage: what is resident is copied there
    int64_t cpu_start = 0, bus_start = 0;  // as soon as the lane is used
    int64_t device = 0;      // the device's products, which wait for uploads
};

struct Table {
    const std::vector<int32_t> * slot_of = nullptr;  // by expert; -1: none
    int32_t n_experts = 0, n_slots = 0, n_guests = 0;
    int32_t n_stage = 0;    // experts the stage can take; 0: there is none
    bool cpu = true;        // whether the CPU lane may be used
    bool may_repeat = false;  // whether two places of a token may name one slot
    const std::vector<int32_t> * expert_in = nullptr;  // by slot; -1: not to be read. nullptr: all may be
    int32_t n_empty = 0;      // how many may not
    const std::vector<Coming> * coming = nullptr;  // who gets which empty slot, if the bus may bring it there
    bool brings_coming = false;                    // and does, also where the CPU would be done sooner
};

struct Upload {
    int32_t expert;
    int32_t position;  // in the slots or in the stage
};

enum class Bank { kSlots, kStage };

// Tokens of a step, at most, that are counted one by one: sequences that decode together have one each, in the order of the
// program's slots.
constexpr int64_t kRows = 16;

struct Routing {
    Bank bank = Bank::kSlots;
    bool device = false;               // whether the device computes anything
    bool guests = false;               // whether it reads slots that are written in a step
    std::vector<int32_t> positions;    // by token and place: the choices, renamed
    std::vector<Upload> uploads;       // to be made before the device computes
    std::vector<Pair> pairs;           // for the CPU, those of an expert together; `input` is not set
    int64_t n_hits = 0, n_uploaded = 0, n_cpu = 0;  // choices by resident slots, by uploads, by the CPU

    std::array<int64_t, kRows> row_hits{};               // of n_hits, by token

    void clear();  // keeps the memory
    void hit(int64_t token) {
        n_hits++;
        if (token < kRows) {
            row_hits[static_cast<size_t>(token)]++;
        }
    }
};

class Router {
  public:
    // Divide the choices so that the later of CPU and bus ends first. Returns what is wrong, or "".
    std::string route(const Choices & choices, const Table & table, const Costs & costs, Routing & result);

    // Every expert is on the device, those with slots first, the others behind them by number. `repeated`: a token
    // names one twice. Returns what is wrong, or "".
    std::string rename(const Choices & choices, const Table & table, Routing & result, bool & repeated);

    // Of a thousand experts without a slot, how many were chosen.
    int cold_used(const Table & table) const;

  private:
    struct Cold {
        int32_t expert;
        int64_t n_pairs;
        int32_t slot;  // that it gets in this step; -1: none
    };

    std::string count(const Choices & choices, const Table & table);
    static int32_t slot_for(const Table & table, int32_t expert);
    void choose(const Choices & choices, const Table & table, const Costs & costs, Routing & result);
    void place(const Choices & choices, const Table & table, Routing & result);
    int32_t spare(const Table & table, int64_t token);

    std::vector<int64_t> n_pairs_;    // by expert
    std::vector<int32_t> position_;   // by expert: where the device finds it; -1: nowhere
    std::vector<int64_t> last_token_;  // by expert: that named it last
    std::vector<int64_t> taken_;      // by position: token that names it
    std::vector<Cold> cold_;
    int32_t cursor_ = 0, favourite_ = -1;
};

}  // namespace hybrid
