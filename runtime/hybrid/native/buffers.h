// The buffer type that experts are allocated in.
#pragma once

#include "store.h"

namespace hybrid {

// Functions of the type by version; its context is the store.
void fill_type(BufferTypeV2 & type, const char * (*get_name)(BufferType *));
void fill_type(BufferTypeV3 & type, const char * (*get_name)(BufferType *));

// A buffer over memory of the caller's, such as a mapped file.
Buffer * map_experts(Store & store, void * address, size_t size);

// The store of a buffer type of ours.
Store & store_of(BufferType * type, int version);

}  // namespace hybrid
