// The wrapper as the engine sees it: a registry with a device that stands for the wrapped one, and a second one
// that computes nothing and lends the experts' buffer type its name for -ot.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "pool.h"
#include "stage.h"
#include "store.h"

namespace hybrid {

class Wrapper {
  public:
    Wrapper(const Host & host, Device * inner, Device * cpu, const Config & config, const std::string & name, int version);
    ~Wrapper();
    Wrapper(const Wrapper &) = delete;
    Wrapper & operator=(const Wrapper &) = delete;

    std::string report();

    const Host host;
    const std::string name, lender_name, type_name;
    Store store;
    Pool pool;
    Stage stage;
    Device device{}, lender{};
    Registry registry{};
    Registry * shown;  // the registry that lists both devices

    std::mutex streams_mutex;
    std::vector<Stream *> streams;

  private:
    void make_type(int version);
    void make_device(Device * cpu);
    void make_lender();

    BufferTypeV2 type_v2_{};
    BufferTypeV3 type_v3_{};
};

// A registry over several wrappers' devices, or one's own.
void fill_registry(Registry & registry, std::vector<Wrapper *> * wrappers, int version);

}  // namespace hybrid
