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

}  // namespace hybrid

#else
#include <dlfcn.h>
#include <sys/mman.h>

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
