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
    std::string last_fault();
    void set_quiet(bool quiet) { quiet_ = quiet; }

  private:
    void tell(const std::string & text);

    std::mutex mutex_;
    std::string fault_, noted_;
    bool quiet_ = false;
};

}  // namespace hybrid
