#include "stage.h"

#include <algorithm>

namespace hybrid {

Stage::~Stage() {
    for (auto & [key, place] : places_) {
        store_.host.ggml_backend_buffer_free(place.memory);
        store_.host.ggml_free(place.context);
    }
    for (const Bank & bank : banks) {
        for (Event * event : {bank.read, bank.arrived}) {
            if (event) {
                store_.inner->iface.event_free(store_.inner, event);
            }
        }
    }
}

int32_t Stage::room(const Region & region) {
    const bool parts = std::any_of(region.products.begin(), region.products.end(),
                                   [](const Product & product) { return product.part.nb[0] != 0; });
    if (failed_[0].load() || parts) {
        return 0;
    }
    const int limit = store_.config.stage;
    return limit < 0 ? region.group->n_experts : std::min(limit, region.group->n_experts);
}

std::vector<Tensor *> Stage::tensors(const Region & region, int bank) {
    std::vector<Tensor *> found;
    if (failed_[bank].load()) {
        return found;
    }
    std::map<Key, int> seen;
    for (const Product & product : region.products) {
        const Weights & w = product.weights;
        Key key{w.type, w.n_in, w.n_out, room(region), 0, bank};
        std::get<4>(key) = seen[key]++;
        Tensor * tensor = place(key);
        if (!tensor) {
            failed_[bank] = true;
            store_.voice.note(std::string("no device memory to bring the experts of a layer ") + (bank ? "ahead" : "together") +
                              ": prompts will be slower");
            return {};
        }
        found.push_back(tensor);
    }
    return found;
}

Tensor * Stage::place(const Key & key) {
    const auto found = places_.find(key);
    if (found != places_.end()) {
        return found->second.tensor;
    }
    const Host & host = store_.host;
    std::map<Key, Place> entry;
    entry[key];  // what is made below has its owner
    const int64_t shape[3] = {std::get<1>(key), std::get<2>(key), std::get<3>(key)};
    Place made;
    made.context = host.ggml_init(InitParams{host.ggml_tensor_overhead() * 2, nullptr, true});
    if (!made.context) {
        return nullptr;
    }
    made.tensor = host.ggml_new_tensor(made.context, std::get<0>(key), 3, shape);
    made.memory = host.ggml_backend_alloc_ctx_tensors_from_buft(made.context, store_.inner_type);
    if (!made.memory) {
        host.ggml_free(made.context);
        return nullptr;
    }
    host.ggml_backend_buffer_set_usage(made.memory, kUsageWeights);
    bytes_ += host.ggml_backend_buffer_get_size(made.memory);
    entry.begin()->second = made;
    places_.merge(entry);
    return made.tensor;
}

void Stage::forget(Stream * stream) {
    std::lock_guard<std::mutex> lock(mutex);
    for (Bank & bank : banks) {
        if (bank.owner == stream) {
            bank.owner = nullptr;  // it has finished all its work before it ends
        }
    }
}

}  // namespace hybrid
