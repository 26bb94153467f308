#include "say.h"

#include <cstdio>

namespace hybrid {

void Voice::tell(const std::string & text) {
    if (!quiet_) {
        std::fprintf(stderr, "hybrid experts: %s\n", text.c_str());
    }
}

void Voice::fault(const std::string & text) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (text != fault_) {
        tell(text);
    }
    fault_ = text;
}

void Voice::note(const std::string & text) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (noted_.find("\n" + text + "\n") == std::string::npos) {
        noted_ += "\n" + text + "\n";
        tell(text);
    }
}

std::string Voice::last_fault() {
    std::lock_guard<std::mutex> lock(mutex_);
    return fault_;
}

}  // namespace hybrid
