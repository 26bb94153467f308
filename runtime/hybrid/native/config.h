// What is to be wrapped and which experts live on the device: a small text file, one setting a line.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "policy.h"

namespace hybrid {

// Where the experts' bytes are kept in host memory.
enum class Memory { kPinned, kPlain, kMapped };

// The experts of one block that have slots, in the order of the slots.
struct Resident {
    int block;
    int n_experts;  // the block must have as many, so that a draft model is not taken for its target
    std::vector<int32_t> experts;
    int guests = -1;  // slots for experts that are uploaded for one step; -1: as many as blocks without a line of their own
};

// Faults that the tests seed; they need a library built with ATSPLAN_HYBRID_FAULTS.
enum class Fault { kNone, kWrongSlot, kStaleRow, kExchanged, kWrongBias, kEarlyRefill };

struct Config {
    std::string device;        // to wrap; "": the first that is a GPU
    std::string name;          // of the wrapper; "": HYBRID0, HYBRID1 …
    std::string report;        // file that statistics are written to when a model is freed
    std::string orders;        // file that is looked at as often as a report is written: other residents, see orders.h
    int report_ms = 0;         // and as often while it is loaded; 0: not then
    Memory memory = Memory::kPinned;
    int threads = 0;           // of the CPU lane; 0: as many as the engine is told to use
    int slots = 0;             // of blocks without a line of their own: their first experts
    int guests = 0;            // slots for experts that are uploaded for one step, where a block's line says no number
    int stage = -1;            // experts of a layer that a prompt may bring at once; -1: all, 0: none
    int banks = 2;             // of the stage; 2: a layer's experts arrive while the layer before computes
    int ring = -1;             // whether pages that are not locked are brought through ring.h's chunks; -1: where that is faster
    int ring_chunk = 4 << 20;  // bytes of one
    int cpu_tokens = 64;       // batches up to this many tokens may use the CPU lane beside the others
    int64_t cpu_bytes_us = 0;  // bytes of weights the CPU lane reads in a microsecond; 0: measured, now and then
    int64_t bus_bytes_us = 0;  // and the bus
    bool quiet = false;        // no notes on stderr
    bool regions = true;       // false: every product by itself
    bool ahead = true;         // the device begins with what is resident before the host knows the choices, without guests
    bool merge = true;         // an expert's matrices come in one strided copy where they lie at equal distances
    Fault fault = Fault::kNone;
    std::vector<Resident> residents;
    Adaptation adaptation;     // of the residents to the text

};

// Words of a line "resident BLOCK N EXPERTS" or "resident BLOCK N EXPERTS GUESTS" into a list that has no line for the block yet; false when they are none.
bool parse_resident(const std::vector<std::string> & words, std::vector<Resident> & residents);

// The line of a block; nullptr when it has none.
const Resident * resident_of(const std::vector<Resident> & residents, int block, int n_experts);

// A number of a text file; false when the word is none, or out of bounds.
bool parse_whole(const std::string & word, int64_t least, int64_t most, int64_t & value);

// Settings of every device to wrap: `device` lines begin the next one.
// On error returns false and says in `error` which line is wrong.
bool parse_config(const std::string & text, std::vector<Config> & configs, std::string & error);

// What is wrong with a program's words, and with LLAMA_ARG_SPLIT_MODE where they name no split mode; "": nothing.
// Experts in slots cannot be divided: the CPU alone would compute them, or the engine stops, and nobody says why.
std::string divided_tensors(std::vector<std::string> words, const std::string & environment);

}  // namespace hybrid
