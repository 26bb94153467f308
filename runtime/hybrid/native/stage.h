// Device memory that takes the experts of one layer while a prompt passes it: shared by all layers of a wrapper.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <tuple>
#include <vector>

#include "plan.h"

namespace hybrid {

class Stage {
  public:
    explicit Stage(Store & store) : store_(store) {}
    ~Stage();
    Stage(const Stage &) = delete;
    Stage & operator=(const Stage &) = delete;

    // Experts that it can take for a region; 0 when it cannot be used.
    int32_t room(const Region & region);

    // Tensors for the products of a region, in their order; empty when the device has no memory for them.
    std::vector<Tensor *> tensors(const Region & region);

    // Hold while uploads and products that use the stage are queued.
    std::mutex mutex;
    Stream * owner = nullptr;    // that queued them last
    Event * read = nullptr;      // when its reads end

    size_t bytes() const { return bytes_.load(); }
    void forget(Stream * stream);

  private:
    // Matrices of one type and shape, and which of a region's it is among equals.
    using Key = std::tuple<int32_t, int64_t, int64_t, int64_t, int>;
    struct Place {
        Context * context = nullptr;
        Tensor * tensor = nullptr;
        Buffer * memory = nullptr;
    };

    Tensor * place(const Key & key);

    Store & store_;
    std::map<Key, Place> places_;
    std::atomic<size_t> bytes_{0};
    std::atomic<bool> failed_{false};
};

}  // namespace hybrid
