// The few things that differ between systems: functions of loaded libraries, and where one lies.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#if defined(_WIN32)
#define HYBRID_EXPORT extern "C" __declspec(dllexport)
#else
#define HYBRID_EXPORT extern "C" __attribute__((visibility("default")))
#endif

namespace hybrid {

// The loaded library that an address lies in, kept loaded; nullptr where that cannot be told.
void * library_of(const void * address);

// A function of that library or, on Linux, of those it needs; nullptr: of the program and what it was started with.
void * function_in(void * library, const char * name);

// A library that the program has loaded, by its name alone; nullptr when it has not.
void * loaded_library(const char * name);

// Memory of whole pages for `size` bytes that are not touched yet; nullptr when there is none.
void * allocate_pages(size_t size);
void free_pages(void * address, size_t size);

// Put memory behind these pages, whose values stay as they are, whoever writes them meanwhile; false where the system
// cannot do that for all of them at once.
bool take_pages(void * address, size_t size);

// A process that is forked has no part in these pages: locked ones would be copied at once. Who only starts another
// program there never reads them.
void keep_from_children(void * address, size_t size);

// The words that this program was started with; none where the system does not tell.
std::vector<std::string> program_words();

std::string environment(const char * name);  // "" when it is not set

// Which file lay at a path, and when it was written.
struct Stamp {
    uint64_t device = 0, file = 0, size = 0;
    int64_t seconds = 0, nanoseconds = 0;

    bool operator==(const Stamp & other) const {
        return device == other.device && file == other.file && size == other.size && seconds == other.seconds &&
               nanoseconds == other.nanoseconds;
    }
};

// The text of a file that nobody but this user may write to, if it is another than `seen` says, which then says this one.
// false: the same, none, or one that is not read, and `fault` says why not.
bool read_private(const std::string & path, size_t most, Stamp & seen, std::string & text, std::string & fault);

}  // namespace hybrid
