// Whole layers of experts brought to the stage ahead of the prompt that needs them, on a queue of their own.
#pragma once

#include <mutex>
#include <vector>

#include "loader.h"
#include "stage.h"

namespace hybrid {

// Graphs of our own that a queue was given. Devices look at the nodes of graphs before until they are synchronized (ggml's
// Vulkan: at which memory they read and wrote).
class Kept {
  public:
    explicit Kept(const Host & host) : host_(host) {}
    ~Kept() { let_go(); }
    Kept(const Kept &) = delete;
    Kept & operator=(const Kept &) = delete;

    void reserve() { contexts_.reserve(contexts_.size() + 1); }
    void keep(Context * context) { contexts_.push_back(context); }
    bool empty() const { return contexts_.empty(); }
    // The queue was synchronized.
    void let_go() {
        for (Context * context : contexts_) {
            host_.ggml_free(context);
        }
        contexts_.clear();
    }

  private:
    const Host & host_;
    std::vector<Context *> contexts_;
};

// Of one stream. While a large batch passes, two banks of the stage take turns: one is read, the other filled.
class Prefetch {
  public:
    Prefetch(Store & store, Stage & stage, Stream & stream) : store_(store), stage_(stage), stream_(stream), kept_(store.host) {}
    ~Prefetch();
    Prefetch(const Prefetch &) = delete;
    Prefetch & operator=(const Prefetch &) = delete;

    // Whether a batch is so large that nearly all experts are chosen, as far as its size tells.
    static bool large(const Region & region);
    // Before a graph is computed: decide whether it pays, take the stage and queue the first uploads.
    void begin(const Plan & plan);
    // Whether this region's experts are on their way; regions are asked in the order of the plan.
    bool holds(const Region & region) const { return at_ < regions_.size() && regions_[at_] == &region; }
    bool active() const { return !regions_.empty(); }
    // Queue the uploads of the region after the present one, once its bank's last reads are queued.
    void pump();
    // Where the experts of the present region are: its bank, by product; residents first, then the others by number.
    const std::vector<Tensor *> & banks() const { return banks_[at_ % Stage::kBanks]; }
    int bank() const { return static_cast<int>(at_ % Stage::kBanks); }
    // What the stream queues next waits until the present region's experts have arrived. Throws what bringing them threw.
    void await(Backend * inner);
    // The present region's reads are queued; `read` was recorded behind them.
    void done();
    // After the graph: the stage is free again, nothing that was queued is left unwaited for.
    void end();

    Event *& read_event() { return stage_.banks[bank()].read; }

  private:
    bool able();
    bool pays(const Region & region) const;
    void queue(const Region & region, int bank);
    void send(const Region & region, int bank);
    void let_go();

    Store & store_;
    Stage & stage_;
    Stream & stream_;
    Backend * uploads_ = nullptr;
    bool refused_ = false;
    std::vector<const Region *> regions_;  // of the present graph
    std::vector<Residency *> held_;        // whose tables stay meanwhile
    size_t at_ = 0, next_ = 0;             // the present one, and the first whose uploads are not queued
    std::vector<Tensor *> banks_[Stage::kBanks];
    uint64_t sent_[Stage::kBanks] = {};    // by bank: the loader's task that fills it
    std::unique_lock<std::mutex> lock_;
    Kept kept_;  // of the uploads' queue
    Loader loader_;  // the last member: its tasks use the others
};

// Copy a region's residents to a bank of the stage, by the queue of `by`, whose graphs `kept` has; whether the device can do
// that.
bool copy_residents(const Store & store, Backend * by, const Region & region, const std::vector<Tensor *> & bank, Kept & kept,
                    Status & status);

}  // namespace hybrid
