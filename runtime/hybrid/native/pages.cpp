#include "pages.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <string>

#include "platform.h"

namespace hybrid {

namespace {

constexpr size_t kAtOnce = size_t{64} << 20;  // taken by a thread before it looks whether to end
constexpr unsigned kMostThreads = 8;

// ---- by the engine: it locks only where its users ask for that

void unlock_by_engine(const Locker & how, void * address) { how.engine_unlock(address); }

// ---- by CUDA's driver, which the engine has loaded

#if defined(_WIN32)
constexpr const char * kDriver = "nvcuda.dll";
#else
constexpr const char * kDriver = "libcuda.so.1";
#endif
constexpr unsigned kPortable = 1;  // CU_MEMHOSTREGISTER_PORTABLE: locked for every context

template <typename Function>
bool driver(const char * name, Function *& function) {
    void * library = loaded_library(kDriver);
    function = library ? reinterpret_cast<Function *>(function_in(library, name)) : nullptr;
    return function != nullptr;
}

// The device's context, which the engine uses too, is this thread's in the block.
class Current {
  public:
    explicit Current(int number) {
        int (*get)(int *, int) = nullptr;
        int (*retain)(void **, int) = nullptr;
        int (*push)(void *) = nullptr;
        if (driver("cuDeviceGet", get) && driver("cuDevicePrimaryCtxRetain", retain) && driver("cuCtxPushCurrent_v2", push) &&
            driver("cuDevicePrimaryCtxRelease_v2", release_) && driver("cuCtxPopCurrent_v2", pop_) && get(&device_, number) == 0 &&
            retain(&context_, device_) == 0) {
            held_ = push(context_) == 0;
            if (!held_) {
                release_(device_);
            }
        }
    }
    ~Current() {
        if (held_) {
            pop_(&context_);
            release_(device_);
        }
    }
    Current(const Current &) = delete;
    Current & operator=(const Current &) = delete;

    bool held() const { return held_; }

  private:
    int (*release_)(int) = nullptr;
    int (*pop_)(void **) = nullptr;
    int device_ = 0;
    void * context_ = nullptr;
    bool held_ = false;
};

bool lock_by_cuda(const Locker & how, void * address, size_t size) {
    int (*call)(void *, size_t, unsigned) = nullptr;
    const Current current(how.number);
    return current.held() && driver("cuMemHostRegister_v2", call) && call(address, size, kPortable) == 0;
}

void unlock_by_cuda(const Locker & how, void * address) {
    int (*call)(void *) = nullptr;
    const Current current(how.number);
    if (current.held() && driver("cuMemHostUnregister", call)) {
        call(address);
    }
}

// "CUDA7" is the driver's seventh of those that the program sees.
bool cuda_number(const char * name, int & number) {
    if (std::strncmp(name, "CUDA", 4) != 0 || name[4] < '0' || name[4] > '9') {
        return false;
    }
    char * end = nullptr;
    number = static_cast<int>(std::strtol(name + 4, &end, 10));
    return *end == '\0';
}

}  // namespace

Locker::Unlock Locker::lock(void * address, size_t size) const {
    if (engine_lock && engine_lock(address, size)) {
        return unlock_by_engine;
    }
    return number >= 0 && lock_by_cuda(*this, address, size) ? unlock_by_cuda : nullptr;
}

Locker locker_of(Device * device) {
    Locker found;
    if (std::getenv("GGML_CUDA_NO_PINNED")) {  // the engine's own switch, whatever its value
        return found;
    }
    const auto function = device->registry->iface.get_proc_address;
    const auto named = [&](const char * name) { return function ? function(device->registry, name) : nullptr; };
    if (!environment("GGML_CUDA_REGISTER_HOST").empty()) {  // the engine's own switch
        found.engine_lock = reinterpret_cast<bool (*)(void *, size_t)>(named("ggml_backend_register_host_buffer"));
        found.engine_unlock = reinterpret_cast<void (*)(void *)>(named("ggml_backend_unregister_host_buffer"));
    }
    if (!found.engine_unlock) {
        found.engine_lock = nullptr;
    }
    int number = 0;
    if (cuda_number(device->iface.get_name(device), number) && loaded_library(kDriver) &&
        function_in(loaded_library(kDriver), "cuMemHostRegister_v2")) {
        found.number = number;
    }
    return found;
}

LockedPages::LockedPages(const Locker & how, size_t size) : how_(how), size_(size), base_(static_cast<char *>(allocate_pages(size))) {
    if (base_) {
        keep_from_children(base_, size_);
        begin();
    }
}

void LockedPages::begin() {
    const unsigned n = std::min(std::max(std::thread::hardware_concurrency() / 4, 1u), kMostThreads);
    try {
        for (unsigned i = 1; i < n; i++) {
            others_.emplace_back([this] { take(); });
        }
        first_ = std::thread([this] { take_and_lock(); });
    } catch (const std::exception &) {
        // No more threads to be had: fewer do the work, or this one.
        if (!first_.joinable()) {
            unlock_ = how_.lock(base_, size_);
        }
    }
}

LockedPages::~LockedPages() {
    ended_ = true;
    if (ready()) {
        unlock_(how_, base_);
    }
    if (base_) {
        free_pages(base_, size_);
    }
}

bool LockedPages::ready() {
    std::lock_guard<std::mutex> lock(mutex_);
    for (std::thread & thread : others_) {
        thread.join();
    }
    others_.clear();
    if (first_.joinable()) {
        first_.join();
    }
    return unlock_ != nullptr;
}

void LockedPages::take() {
    for (size_t at; !ended_ && (at = next_.fetch_add(kAtOnce)) < size_;) {
        if (!take_pages(base_ + at, std::min(kAtOnce, size_ - at))) {
            return;  // who reads the file or locks takes them one by one
        }
    }
}

// In one piece: copies across the border of two would be refused.
void LockedPages::take_and_lock() {
    take();
    unlock_ = ended_ ? nullptr : how_.lock(base_, size_);
}

}  // namespace hybrid
