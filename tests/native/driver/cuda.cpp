// In the place of CUDA's driver: the few calls that lock memory, counted, and refused when they come in a wrong order.
#include <atomic>
#include <cstddef>

namespace {

constexpr int kDevice = 107;  // what the seventh is called here
constexpr int kWrong = 1;
std::atomic<int> locked{0}, held{0}, calls{0};
std::atomic<bool> refuses{false};
thread_local int current = 0;
int context;

}  // namespace

extern "C" {

int cuDeviceGet(int * device, int number) {
    *device = 100 + number;
    return 0;
}

int cuDevicePrimaryCtxRetain(void ** made, int device) {
    *made = &context;
    held += device == kDevice ? 1 : 0;
    return device == kDevice ? 0 : kWrong;
}

int cuDevicePrimaryCtxRelease_v2(int device) {
    held--;
    return device == kDevice ? 0 : kWrong;
}

int cuCtxPushCurrent_v2(void * made) {
    current += made == &context ? 1 : 0;
    return made == &context ? 0 : kWrong;
}

int cuCtxPopCurrent_v2(void ** made) {
    *made = &context;
    current--;
    return 0;
}

int cuMemHostRegister_v2(void * address, size_t size, unsigned flags) {
    calls++;
    if (refuses || current != 1 || flags != 1 || !address || !size) {
        return kWrong;
    }
    locked++;
    return 0;
}

int cuMemHostUnregister(void *) {
    locked -= current == 1 ? 1 : 0;
    return current == 1 ? 0 : kWrong;
}

// Ranges that are locked now, contexts that are held, calls to lock so far; from now on it refuses, or not.
int trial_locked() { return locked; }
int trial_held() { return held; }
int trial_calls() { return calls; }
void trial_refuses(bool now) { refuses = now; }
}
