// Device memory that takes the experts of a layer while a prompt passes it: shared by all layers of a wrapper. Two
// banks of it let a layer's experts arrive while those of the layer before are used.
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
    std::vector<Tensor *> tensors(const Region & region, int bank = 0);

    struct Bank {
        Stream * owner = nullptr;    // that queued reads last
        Event * read = nullptr;      // when its reads end
        Event * arrived = nullptr;   // when what was brought ahead is there
    };

    // Hold while uploads and products that use the stage are queued.
    std::mutex mutex;
    static constexpr int kBanks = 2;
    Bank banks[kBanks];

    size_t bytes() const { return bytes_.load(); }
    void forget(Stream * stream);

  private:
    // Matrices of one type and shape, which of a region's it is among equals, and the bank.
    using Key = std::tuple<int32_t, int64_t, int64_t, int64_t, int, int>;
    struct Place {
        Context * context = nullptr;
        Tensor * tensor = nullptr;
        Buffer * memory = nullptr;
    };

    Tensor * place(const Key & key);

    Store & store_;
    std::map<Key, Place> places_;
    std::atomic<size_t> bytes_{0};
    std::atomic<bool> failed_[kBanks] = {};
};

}  // namespace hybrid
