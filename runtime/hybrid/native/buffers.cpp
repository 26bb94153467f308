#include "buffers.h"

#include <cstring>

namespace hybrid {

namespace {

ExpertBuffer & expert(Buffer * buffer) { return *static_cast<ExpertBuffer *>(buffer->context); }

void free_buffer(Buffer * buffer) {
    if (buffer->context) {
        ExpertBuffer & mine = expert(buffer);
        mine.store->release(&mine);
    }
}

void * get_base(Buffer * buffer) { return expert(buffer).base; }

Status init_tensor(Buffer * buffer, Tensor * tensor) {
    ExpertBuffer & mine = expert(buffer);
    try {
        return mine.store->add(mine, tensor);
    } catch (...) {
        return mine.store->voice.caught("the table of experts");
    }
}

void memset_tensor(Buffer * buffer, Tensor * tensor, uint8_t value, size_t offset, size_t size) {
    std::memset(static_cast<char *>(tensor->data) + offset, value, size);
    expert(buffer).store->written(expert(buffer), tensor);
}

void set_tensor(Buffer * buffer, Tensor * tensor, const void * data, size_t offset, size_t size) {
    std::memcpy(static_cast<char *>(tensor->data) + offset, data, size);
    expert(buffer).store->written(expert(buffer), tensor);
}

void get_tensor(Buffer *, const Tensor * tensor, void * data, size_t offset, size_t size) {
    std::memcpy(data, static_cast<const char *>(tensor->data) + offset, size);
}

void clear(Buffer * buffer, uint8_t value) {
    if (!expert(buffer).mapped) {
        std::memset(expert(buffer).base, value, buffer->size);
    }
}

Buffer * wrap(Store & store, ExpertBuffer * made) {
    if (!made) {
        return nullptr;
    }
    BufferInterface functions{};
    functions.free_buffer = free_buffer;
    functions.get_base = get_base;
    functions.init_tensor = init_tensor;
    functions.memset_tensor = memset_tensor;
    functions.set_tensor = set_tensor;
    functions.get_tensor = get_tensor;
    functions.clear = clear;
    try {
        return store.host.ggml_backend_buffer_init(store.type, functions, made, made->size);
    } catch (...) {
        store.release(made);
        throw;
    }
}

template <typename Type>
Store & store_in(BufferType * type) {
    return *static_cast<Store *>(reinterpret_cast<Type *>(type)->context);
}

template <typename Type>
Buffer * alloc_buffer(BufferType * type, size_t size) {
    Store & store = store_in<Type>(type);
    try {
        return wrap(store, store.allocate(size));
    } catch (...) {
        store.voice.caught("experts");
        return nullptr;
    }
}

size_t get_alignment(BufferType *) { return 64; }

// True: all experts lie there in ggml's own form. Loaders read files straight into them.
bool is_host(BufferType *) { return true; }

template <typename Type>
void fill(Type & type, const char * (*get_name)(BufferType *)) {
    type.get_name = get_name;
    type.alloc_buffer = alloc_buffer<Type>;
    type.get_alignment = get_alignment;
    type.is_host = is_host;
}

}  // namespace

void fill_type(BufferTypeV2 & type, const char * (*get_name)(BufferType *)) { fill(type, get_name); }
void fill_type(BufferTypeV3 & type, const char * (*get_name)(BufferType *)) { fill(type, get_name); }

Buffer * map_experts(Store & store, void * address, size_t size) {
    try {
        return wrap(store, store.map(address, size));
    } catch (...) {
        store.voice.caught("experts");
        return nullptr;
    }
}

Store & store_of(BufferType * type, int version) {
    return version == 2 ? store_in<BufferTypeV2>(type) : store_in<BufferTypeV3>(type);
}

}  // namespace hybrid
