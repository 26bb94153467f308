#include "transfer.h"

#include <exception>

namespace hybrid {

char * Transfer::room(size_t size) {
    if (size <= size_) {
        return data_;
    }
    release();
    const size_t rounded = (size + 65535) / 65536 * 65536;
    const auto host_type = store_.inner->iface.get_host_buffer_type;
    if (host_type && host_type(store_.inner)) {
        buffer_ = store_.host.ggml_backend_buft_alloc_buffer(host_type(store_.inner), rounded);
        data_ = buffer_ ? static_cast<char *>(store_.host.ggml_backend_buffer_get_base(buffer_)) : nullptr;
    }
    if (!data_) {
        try {
            plain_.resize(rounded);
        } catch (const std::exception &) {
            return nullptr;
        }
        data_ = plain_.data();
    }
    size_ = rounded;
    return data_;
}

void Transfer::release() {
    if (buffer_) {
        store_.host.ggml_backend_buffer_free(buffer_);
    }
    buffer_ = nullptr;
    data_ = nullptr;
    size_ = 0;
}

size_t span(const Tensor * t, size_t value) {
    return static_cast<size_t>(t->ne[2] - 1) * t->nb[2] + static_cast<size_t>(t->ne[1] - 1) * t->nb[1] +
           static_cast<size_t>(t->ne[0] - 1) * t->nb[0] + value;
}

}  // namespace hybrid
