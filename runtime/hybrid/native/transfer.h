// Host memory for what is read back and uploaded in a step.
#pragma once

#include <vector>

#include "store.h"

namespace hybrid {

// Page-locked host memory where the device has it, for what is read back and uploaded in a step.
class Transfer {
  public:
    explicit Transfer(Store & store) : store_(store) {}
    ~Transfer() { release(); }
    Transfer(const Transfer &) = delete;
    Transfer & operator=(const Transfer &) = delete;

    // Room for `size` bytes; what was there is lost when it grows. nullptr: no memory.
    char * room(size_t size);
    // Whether the device reads and writes it by itself.
    bool locked(size_t size) { return room(size) && buffer_; }
    size_t bytes() const { return size_; }

  private:
    void release();

    Store & store_;
    Buffer * buffer_ = nullptr;
    std::vector<char> plain_;
    char * data_ = nullptr;
    size_t size_ = 0;
};

// Bytes from the first to the last value of a tensor of rows.
size_t span(const Tensor * t, size_t value);

}  // namespace hybrid
