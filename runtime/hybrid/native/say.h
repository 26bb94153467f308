// One line for people: on stderr, and kept for who asks what went wrong.
#pragma once

#include <mutex>
#include <string>

namespace hybrid {

class Voice {
  public:
    // Something that stops work; told every time it is new.
    void fault(const std::string & text);
    // Something to know; told once.
    void note(const std::string & text);
    // The host is out of memory: told without needing more. `of` stays.
    void shortage(const char * of) noexcept;
    std::string last_fault();
    // Without notes; what stops work is told all the same.
    void set_quiet(bool quiet) { quiet_ = quiet; }

  private:
    void tell(const std::string & text);

    std::mutex mutex_;
    std::string fault_, noted_;
    const char * short_of_ = nullptr;  // came after `fault_`
    bool quiet_ = false;
};

// Bytes in words, rounded up.
std::string mebibytes(size_t bytes);

}  // namespace hybrid
