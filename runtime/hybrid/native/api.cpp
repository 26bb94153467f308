// What programs call: ggml's loader by its one function, atsplan by its own.
#include <cstdio>
#include <cstring>
#include <exception>
#include <fstream>
#include <sstream>

#include "device.h"
#include "platform.h"

#if defined(_MSC_VER)
#include <intrin.h>
#define HYBRID_CALLER _ReturnAddress()
#else
#define HYBRID_CALLER __builtin_return_address(0)
#endif

namespace hybrid {

namespace {

struct Opened {
    std::vector<std::unique_ptr<Wrapper>> owned;
    std::vector<Wrapper *> listed;
    Registry registry{};
};

void say_error(char * error, size_t size, const char * text) {
    if (error && size) {
        std::snprintf(error, size, "%s", text);
    }
}

// No exception reaches a caller in another language: what is thrown is, as good as always, that memory is out.
template <typename Result, typename Work>
Result guarded(Result otherwise, char * error, size_t size, Work work) noexcept {
    try {
        return work();
    } catch (const std::exception & problem) {
        say_error(error, size, problem.what());
        return otherwise;
    } catch (...) {
        say_error(error, size, "a fault of the inner device");
        return otherwise;
    }
}

const void * address(Device * device) {
    return device ? reinterpret_cast<const void *>(device->iface.get_name) : nullptr;
}

// Wrap one device after proving everything that is assumed of it.
std::unique_ptr<Wrapper> wrap(Host & host, Device * inner, const Config & config, int number, std::string & fault) {
    fault = host.probe_device(inner);
    if (!fault.empty()) {
        return nullptr;
    }
    const std::string name = config.name.empty() ? "HYBRID" + std::to_string(number) : config.name;
    const int version = inner->registry->api_version;
    return std::make_unique<Wrapper>(host, inner, nullptr, config, name, version);
}

Device * device_named(const Host & host, const std::string & name) {
    for (size_t i = 0; i < host.ggml_backend_dev_count(); i++) {
        Device * device = host.ggml_backend_dev_get(i);
        const DeviceKind kind = device->iface.get_type(device);
        if (name.empty() ? kind == kGpu || kind == kIntegratedGpu : name == device->iface.get_name(device)) {
            return device;
        }
    }
    return nullptr;
}

Device * cpu_device(const Host & host) {
    for (size_t i = 0; i < host.ggml_backend_dev_count(); i++) {
        Device * device = host.ggml_backend_dev_get(i);
        if (device->iface.get_type(device) == kCpu) {
            return device;
        }
    }
    return nullptr;
}

bool read_configs(std::vector<Config> & configs, std::string & fault) {
    const std::string path = environment("ATSPLAN_HYBRID");
    if (path.empty()) {
        fault = "ATSPLAN_HYBRID does not name a file that says which experts live on the device";
        return false;
    }
    std::ifstream file(path);
    std::stringstream text;
    text << file.rdbuf();
    if (!file) {
        fault = path + ": cannot be read";
        return false;
    }
    if (!parse_config(text.str(), configs, fault)) {
        fault = path + ": " + fault;
        return false;
    }
    return true;
}

// For stock tools: everything comes from the program and from the environment. Never destroyed: the engine
// keeps what it registered until the process ends.
Registry * open_from_environment(const void * caller, std::string & fault) {
    std::vector<Config> configs;
    Host host;
    if (!read_configs(configs, fault) || !(fault = divided_tensors(program_words(), environment("LLAMA_ARG_SPLIT_MODE"))).empty()) {
        return nullptr;
    }
    fault = host.find(nullptr, 0, {caller});
    if (fault.empty() && (!host.ggml_backend_dev_count || !host.ggml_backend_dev_get)) {
        fault = "this program does not show its devices";
    }
    if (fault.empty()) {
        // Kernels of the CPU may lie in a library of their own, chosen for this processor.
        fault = host.find(nullptr, 0, {caller, address(cpu_device(host))});
    }
    if (fault.empty()) {
        fault = host.probe();
    }
    if (!fault.empty()) {
        return nullptr;
    }
    auto opened = std::make_unique<Opened>();
    for (const Config & config : configs) {
        Device * inner = device_named(host, config.device);
        if (!inner) {
            fault = config.device.empty() ? "no GPU to wrap" : "no device " + config.device;
            return nullptr;
        }
        auto made = wrap(host, inner, config, static_cast<int>(opened->owned.size()), fault);
        if (!made) {
            return nullptr;
        }
        opened->listed.push_back(made.get());
        opened->owned.push_back(std::move(made));
    }
    fill_registry(opened->registry, &opened->listed, opened->listed[0]->registry.api_version);
    return &opened.release()->registry;
}

}  // namespace

}  // namespace hybrid

using namespace hybrid;

// Of ggml's loader (GGML_BACKEND_PATH).
HYBRID_EXPORT Registry * ggml_backend_init() {
    static Registry * made = nullptr;
    const void * caller = HYBRID_CALLER;
    char error[512] = "";
    made = made ? made : guarded<Registry *>(nullptr, error, sizeof error, [&] {
        std::string fault;
        Registry * opened = open_from_environment(caller, fault);
        say_error(error, sizeof error, fault.c_str());
        return opened;
    });
    if (!made) {
        std::fprintf(stderr, "hybrid experts: %s\n", error);
    }
    return made;
}

HYBRID_EXPORT int atsplan_hybrid_version() { return 1; }

namespace {

Opened * open(Device * inner, Device * cpu, const char * text, const Named * table, size_t n_table, std::string & fault) {
    std::vector<Config> configs;
    if (!parse_config(text ? text : "", configs, fault)) {
        return nullptr;
    }
    auto opened = std::make_unique<Opened>();
    Host host;
    fault = host.find(table, n_table, {address(inner), address(cpu)});
    if (fault.empty()) {
        fault = host.probe();
    }
    auto made = fault.empty() ? wrap(host, inner, configs[0], 0, fault) : nullptr;
    if (!made) {
        return nullptr;
    }
    opened->listed.push_back(made.get());
    opened->owned.push_back(std::move(made));
    fill_registry(opened->registry, &opened->listed, opened->listed[0]->registry.api_version);
    return opened.release();
}

}  // namespace

// Wrap `inner`; `cpu` is the engine's CPU device. Functions not in `table` come from the libraries of these two.
// nullptr and one line in `error` when that cannot be.
HYBRID_EXPORT void * atsplan_hybrid_open(Device * inner, Device * cpu, const char * text, const Named * table,
                                         size_t n_table, char * error, size_t error_size) {
    return guarded<void *>(nullptr, error, error_size, [&]() -> void * {
        std::string fault;
        Opened * made = open(inner, cpu, text, table, n_table, fault);
        say_error(error, error_size, fault.c_str());
        return made;
    });
}

HYBRID_EXPORT Registry * atsplan_hybrid_registry(void * opened) { return &static_cast<Opened *>(opened)->registry; }
HYBRID_EXPORT Device * atsplan_hybrid_device(void * opened) { return &static_cast<Opened *>(opened)->listed[0]->device; }
HYBRID_EXPORT BufferType * atsplan_hybrid_buffer_type(void * opened) { return static_cast<Opened *>(opened)->listed[0]->store.type; }

// Statistics as JSON: the bytes needed with their end, of which at most `size` are written; 0: no memory for them.
HYBRID_EXPORT size_t atsplan_hybrid_report(void * opened, char * text, size_t size) {
    return guarded<size_t>(0, nullptr, 0, [&] {
        const std::string made = static_cast<Opened *>(opened)->listed[0]->report();
        if (text && size) {
            const size_t n = std::min(size - 1, made.size());
            std::memcpy(text, made.data(), n);
            text[n] = '\0';
        }
        return made.size() + 1;
    });
}

// Other experts in the slots of a block. 0, or 1 and one line in `error`.
HYBRID_EXPORT int atsplan_hybrid_set_residents(void * opened, int model, int block, const char * kind, const int32_t * experts,
                                               size_t n, char * error, size_t error_size) {
    Store & store = static_cast<Opened *>(opened)->listed[0]->store;
    return guarded(1, error, error_size, [&] {
        const std::string fault = store.set_residents(model, block, kind, std::vector<int32_t>(experts, experts + n));
        say_error(error, error_size, fault.c_str());
        return fault.empty() ? 0 : 1;
    });
}

// What stopped work last; "" when nothing did.
HYBRID_EXPORT void atsplan_hybrid_fault(void * opened, char * text, size_t size) {
    guarded(0, text, size, [&] {
        say_error(text, size, static_cast<Opened *>(opened)->listed[0]->store.voice.last_fault().c_str());
        return 0;
    });
}

// How many times work was stopped so far.
HYBRID_EXPORT int64_t atsplan_hybrid_faults(void * opened) { return static_cast<Opened *>(opened)->listed[0]->store.voice.n_faults(); }

// Only when no model, context or registration of it is left.
HYBRID_EXPORT void atsplan_hybrid_close(void * opened) { delete static_cast<Opened *>(opened); }
