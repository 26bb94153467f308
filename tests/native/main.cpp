// Tests of the native library on an engine's CPU backend: one name an argument, run under sanitizers by
// tests/test_hybrid_native.py. Usage: PROGRAM ENGINE_FOLDER [NAME...]; without arguments it prints the names.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <iterator>

#include "bench.h"

using namespace trial;

namespace {

// Of a device that only some machines have, or meant to fail: never run without being named.
constexpr const char * kAsked[] = {"any_layer_on_a_device", "the_device_by_itself", "a_chunk_is_refilled_early"};

bool wanted(const char * name, int n, char ** words) {
    for (int i = 2; i < n; i++) {
        if (std::strcmp(words[i], name) == 0) {
            return true;
        }
    }
    return n == 2 && std::none_of(std::begin(kAsked), std::end(kAsked), [&](const char * asked) { return std::strcmp(name, asked) == 0; });
}

}  // namespace

int main(int n, char ** words) {
    if (n >= 2) {
        engine(words[1]);
    }
    for (const Tests * tests : {&kParts, &kLayers, &kContexts, &kPrompts, &kMemory, &kOrders}) {
        for (const auto & [name, test] : *tests) {
            if (n < 2) {
                std::puts(name);
            } else if (wanted(name, n, words)) {
                test();
                std::printf("%s %s\n", name, failures ? "failed" : "ok");
                std::fflush(stdout);
            }
        }
    }
    return failures ? 1 : 0;
}
