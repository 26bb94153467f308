#include "platform.h"

#include <cstdlib>
#include <fstream>

#if defined(_WIN32)
// Compiled, not tested.
#include <windows.h>

namespace hybrid {

void * library_of(const void * address) {
    HMODULE module = nullptr;
    const DWORD how = GET_MODULE_HANDLE_EX_FLAG_FROM_ADDRESS;
    return GetModuleHandleExA(how, static_cast<LPCSTR>(address), &module) ? module : nullptr;
}

void * function_in(void * library, const char * name) {
    HMODULE module = library ? static_cast<HMODULE>(library) : GetModuleHandleA(nullptr);
    return reinterpret_cast<void *>(GetProcAddress(module, name));
}

void * allocate_pages(size_t size) {
    return VirtualAlloc(nullptr, size, MEM_RESERVE | MEM_COMMIT, PAGE_READWRITE);
}

void free_pages(void * address, size_t) { VirtualFree(address, 0, MEM_RELEASE); }

void * loaded_library(const char * name) { return reinterpret_cast<void *>(GetModuleHandleA(name)); }

bool take_pages(void *, size_t) { return false; }

void keep_from_children(void *, size_t) {}

// Who may write to a file is not a matter of a mode here: no file is trusted.
bool read_private(const std::string &, size_t, Stamp &, std::string &, std::string &) { return false; }

}  // namespace hybrid

#else
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace hybrid {

void * library_of(const void * address) {
    Dl_info found;
    if (!dladdr(address, &found) || !found.dli_fname) {
        return nullptr;
    }
    // NOLOAD finds it among those that are loaded; the handle is kept for the life of the process.
    return dlopen(found.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
}

void * function_in(void * library, const char * name) { return dlsym(library ? library : RTLD_DEFAULT, name); }

void * allocate_pages(size_t size) {
    void * made = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (made == MAP_FAILED) {
        return nullptr;
    }
#if defined(MADV_HUGEPAGE)
    madvise(made, size, MADV_HUGEPAGE);
#endif
    return made;
}

void free_pages(void * address, size_t size) { munmap(address, size); }

void * loaded_library(const char * name) { return dlopen(name, RTLD_LAZY | RTLD_NOLOAD); }

bool take_pages(void * address, size_t size) {
#if defined(__linux__)
    constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE, of Linux 5.14; older headers lack it
    return madvise(address, size, kPopulateWrite) == 0;
#else
    (void)address;
    (void)size;
    return false;
#endif
}

void keep_from_children(void * address, size_t size) {
#if defined(MADV_DONTFORK)
    madvise(address, size, MADV_DONTFORK);
#else
    (void)address;
    (void)size;
#endif
}

namespace {

class OpenFile {
  public:
    explicit OpenFile(const char * path) : number(::open(path, O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK)) {}
    ~OpenFile() {
        if (number >= 0) {
            ::close(number);
        }
    }
    OpenFile(const OpenFile &) = delete;
    OpenFile & operator=(const OpenFile &) = delete;

    const int number;
};

Stamp stamp_of(const struct stat & found) {
    Stamp made;
    made.device = static_cast<uint64_t>(found.st_dev);
    made.file = static_cast<uint64_t>(found.st_ino);
    made.size = static_cast<uint64_t>(found.st_size);
#if defined(__APPLE__)
    const timespec & when = found.st_mtimespec;
#else
    const timespec & when = found.st_mtim;
#endif
    made.seconds = static_cast<int64_t>(when.tv_sec);
    made.nanoseconds = static_cast<int64_t>(when.tv_nsec);
    return made;
}

}  // namespace

bool read_private(const std::string & path, size_t most, Stamp & seen, std::string & text, std::string & fault) {
    struct stat found {};
    if (lstat(path.c_str(), &found) != 0 || stamp_of(found) == seen) {
        return false;
    }
    seen = stamp_of(found);
    const OpenFile file(path.c_str());
    if (file.number < 0 || fstat(file.number, &found) != 0 || !S_ISREG(found.st_mode)) {
        fault = "it is no file that can be read";
    } else if (found.st_uid != geteuid() || (found.st_mode & (S_IWGRP | S_IWOTH))) {
        fault = "it is not this user's alone";
    } else if (found.st_size < 0 || static_cast<uint64_t>(found.st_size) > most) {
        fault = "it is too large";
    }
    if (!fault.empty()) {
        return false;
    }
    seen = stamp_of(found);
    text.resize(static_cast<size_t>(found.st_size));
    size_t have = 0;
    for (ssize_t n = 1; n > 0 && have < text.size(); have += static_cast<size_t>(n > 0 ? n : 0)) {
        n = ::read(file.number, &text[have], text.size() - have);
    }
    text.resize(have);
    return true;
}

}  // namespace hybrid
#endif

namespace hybrid {

std::vector<std::string> program_words() {
    std::vector<std::string> words;
#if defined(__linux__)
    std::ifstream file("/proc/self/cmdline", std::ios::binary);
    for (std::string word; std::getline(file, word, '\0');) {
        words.push_back(word);
    }
#endif
    return words;
}

std::string environment(const char * name) {
    const char * value = std::getenv(name);
    return value ? value : "";
}

}  // namespace hybrid
