// One line for people: on stderr, and kept for who asks what went wrong.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>

#include "abi.h"

namespace hybrid {

class Voice {
  public:
    // Something that stops work; told every time it is new.
    void fault(const std::string & text);
    // Something to know; told once.
    void note(const std::string & text);
    // The host is out of memory: told without needing more. `of` stays.
    void shortage(const char * of) noexcept;
    // The same for something that is done without.
    void lacks(const char * of) noexcept;
    // In a handler: what was thrown while `of` was made. Memory that is out is a shortage, anything else a fault.
    Status caught(const char * of) noexcept;
    std::string last_fault();
    // Faults and shortages so far, each time one came: who asks before and after knows whose the last is.
    int64_t n_faults();
    // Without notes; what stops work is told all the same.
    void set_quiet(bool quiet) { quiet_ = quiet; }

  private:
    void tell(const std::string & text);

    std::mutex mutex_;
    std::string fault_, noted_;
    const char * short_of_ = nullptr;  // came after `fault_`
    const char * lacked_ = nullptr;
    int64_t n_faults_ = 0;
    bool quiet_ = false;
};

// A text as JSON has it.
std::string quoted(const std::string & text);

// Bytes in words, rounded up.
std::string mebibytes(size_t bytes);

}  // namespace hybrid
