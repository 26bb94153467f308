#include "say.h"

#include <cstdio>
#include <new>
#include <stdexcept>

namespace hybrid {

void Voice::tell(const std::string & text) { std::fprintf(stderr, "hybrid experts: %s\n", text.c_str()); }

void Voice::fault(const std::string & text) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (text != fault_ || short_of_) {
        tell(text);
    }
    fault_ = text;
    short_of_ = nullptr;
    n_faults_++;
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
    n_faults_++;
}

void Voice::lacks(const char * of) noexcept {
    std::lock_guard<std::mutex> lock(mutex_);
    if (lacked_ != of && !quiet_) {
        std::fprintf(stderr, "hybrid experts: note: no host memory for %s\n", of);
    }
    lacked_ = of;
}

// Exceptions of an engine with a C++ library of its own may be of no type that is known here.
Status Voice::caught(const char * of) noexcept {
    try {
        try {
            throw;
        } catch (const std::bad_alloc &) {
        } catch (const std::length_error &) {
        } catch (const std::exception & problem) {
            std::string text = problem.what();
            for (char & letter : text) {
                letter = static_cast<unsigned char>(letter) < 32 ? ' ' : letter;
            }
            fault(std::string(of) + ": " + text);
            return kFailed;
        } catch (...) {
            fault(std::string(of) + ": a fault of the inner device");
            return kFailed;
        }
    } catch (...) {
        // There is no memory for the words.
    }
    shortage(of);
    return kAllocFailed;
}

std::string quoted(const std::string & text) {
    std::string made = "\"";
    for (const char letter : text) {
        if (letter == '"' || letter == '\\') {
            made += '\\';
        }
        made += static_cast<unsigned char>(letter) < 32 ? ' ' : letter;
    }
    return made + "\"";
}

std::string mebibytes(size_t bytes) { return std::to_string((bytes + (1 << 20) - 1) >> 20) + " MiB"; }

std::string Voice::last_fault() {
    std::lock_guard<std::mutex> lock(mutex_);
    return short_of_ ? std::string("no host memory for ") + short_of_ : fault_;
}

int64_t Voice::n_faults() {
    std::lock_guard<std::mutex> lock(mutex_);
    return n_faults_;
}

}  // namespace hybrid
