#include "host.h"

#include "platform.h"

namespace hybrid {

namespace {

void * look_up(const char * name, const Named * table, size_t n_table, const std::vector<void *> & libraries) {
    for (size_t i = 0; i < n_table; i++) {
        if (std::string(table[i].name) == name) {
            return table[i].function;
        }
    }
    for (void * library : libraries) {
        if (void * found = function_in(library, name)) {
            return found;
        }
    }
    return nullptr;
}

}  // namespace

std::string Host::find(const Named * table, size_t n_table, const std::vector<const void *> & addresses) {
    std::vector<void *> libraries;
    for (const void * address : addresses) {
        if (void * library = address ? library_of(address) : nullptr) {
            libraries.push_back(library);
        }
    }
    libraries.push_back(nullptr);  // a program that is linked statically exports them itself
    std::string missing;
    auto take = [&](auto & function, const char * name, bool needed) {
        void * found = look_up(name, table, n_table, libraries);
        function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(found);
        if (!found && needed) {
            missing += (missing.empty() ? "" : ", ") + std::string(name);
        }
    };
#define HYBRID_TAKE(result, name, arguments) take(name, #name, true);
#define HYBRID_TRY(result, name, arguments) take(name, #name, false);
    HYBRID_HOST_FUNCTIONS(HYBRID_TAKE)
    HYBRID_OPTIONAL_FUNCTIONS(HYBRID_TRY)
#undef HYBRID_TAKE
#undef HYBRID_TRY
    return missing.empty() ? "" : "this build does not export " + missing;
}

}  // namespace hybrid
