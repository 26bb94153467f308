#include "say.h"

#include <cstdio>

namespace hybrid {

void Voice::tell(const std::string & text) { std::fprintf(stderr, "hybrid experts: %s\n", text.c_str()); }

void Voice::fault(const std::string & text) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (text != fault_ || short_of_) {
        tell(text);
    }
    fault_ = text;
    short_of_ = nullptr;
}

void Voice::note(const std::string & text) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (noted_.find("\n" + text + "\n") == std::string::npos) {
        noted_ += "\n" + text + "\n";
        if (!quiet_) {
            tell("note: " + text);
        }
    }
}

void Voice::shortage(const char * of) noexcept {
    std::lock_guard<std::mutex> lock(mutex_);
    if (short_of_ != of) {
        std::fprintf(stderr, "hybrid experts: no host memory for %s\n", of);
    }
    short_of_ = of;
}

std::string mebibytes(size_t bytes) { return std::to_string((bytes + (1 << 20) - 1) >> 20) + " MiB"; }

std::string Voice::last_fault() {
    std::lock_guard<std::mutex> lock(mutex_);
    return short_of_ ? std::string("no host memory for ") + short_of_ : fault_;
}

}  // namespace hybrid
