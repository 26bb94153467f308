// The expert store: all experts in host memory, some of them in slots on the device, and the tables between.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "config.h"
#include "gate.h"
#include "courier.h"
#include "host.h"
#include "orders.h"
#include "pace.h"
#include "pages.h"
#include "residency.h"
#include "ring.h"
#include "route.h"
#include "say.h"
#include "ticker.h"

namespace hybrid {

class Stream;
struct Group;

enum class Role { kGate, kUp, kGateUp, kDown };

// One expert weight of the engine's: `tensor->data` is host memory, `slots` lie on the device.
struct Matrix {
    Tensor * tensor = nullptr;
    Role role = Role::kUp;
    Group * group = nullptr;
    struct ExpertBuffer * home = nullptr;  // where the tensor lies
    Tensor * slots = nullptr;  // slots, then guests; nullptr: none of either

    Weights weights() const;
    const char * host() const { return static_cast<const char *>(tensor->data); }
    const char * device() const { return static_cast<const char *>(slots->data); }
};

// Memory of slots on the device.
struct Place {
    Context * context = nullptr;
    Buffer * memory = nullptr;
};

// Counts since the model was loaded. Choices of all experts at once (warm-up) are counted apart.
struct Counters {
    std::atomic<int64_t> steps{0}, hits{0}, uploaded{0}, cpu{0}, all_at_once{0};
    std::atomic<int64_t> uploads{0}, upload_bytes{0}, staged{0};
    // Waiting for choices, the CPU lane from start to end, the host queueing work meanwhile, and then at the lane.
    std::atomic<int64_t> wait_ns{0}, cpu_ns{0}, launch_ns{0}, lane_ns{0};
    // The host alone: queueing what leads to the choices, dividing them until the lane begins, queueing the lane's rows.
    std::atomic<int64_t> ahead_ns{0}, decide_ns{0}, rows_ns{0};
    std::vector<std::atomic<int64_t>> chosen;  // by expert
    // Of steps of 2 to kRows tokens, by token: choices, and those whose expert had a slot.
    std::atomic<int64_t> row_choices[kRows] = {}, row_hits[kRows] = {};

    // A step's choices, `n_places` of each token.
    template <typename Hits>
    void count_rows(int64_t n_tokens, int64_t n_places, const Hits & hits) {
        for (int64_t row = 0; n_tokens >= 2 && n_tokens <= kRows && row < n_tokens; row++) {
            row_choices[row].fetch_add(n_places, std::memory_order_relaxed);
            row_hits[row].fetch_add(hits(static_cast<size_t>(row)), std::memory_order_relaxed);
        }
    }
};

// The experts of one block that the router chooses together.
struct Group {
    int block = -1;
    std::string kind;  // "exps", "chexps"
    int32_t n_experts = 0, n_slots = 0, n_guests = 0;
    std::vector<int32_t> slot_of, expert_in;
    std::vector<Matrix *> matrices;
    std::vector<Place> places;  // of the matrices' slots, and of the table
    Tensor * table = nullptr;   // slot_of on the device, the first slot for experts without one; nullptr: not there
    bool filled = false;  // whether the slots hold what the table says
    bool used = false;    // whether they ever did
    // Of a thousand experts without a slot, those that the last large batch chose, and its size.
    std::atomic<int> cold_used{1000};
    std::atomic<int64_t> cold_tokens{0};
    Counters counters;
    std::unique_ptr<Residency> residency;  // nullptr: the residents stay

    // Guests are written and read by one stream at a time; another waits on its own queue for the reads.
    std::mutex guests;
    Stream * guest_owner = nullptr;
    Event * guests_read = nullptr;

    std::mutex biases_mutex;
    std::map<const void *, std::vector<float>> biases;  // of the device's tensors, by their address there

    bool whole() const { return n_slots == n_experts; }  // then slot and expert are the same number
};

// What one file load brought; found by the names of its tensors.
struct Model {
    int number = 0;
    int n_buffers = 0;
    std::vector<std::string> names;
    std::vector<std::unique_ptr<Group>> groups;
};

// A buffer of the engine's in which experts are allocated.
struct ExpertBuffer {
    class Store * store = nullptr;
    Buffer * real = nullptr;  // pinned or plain memory; nullptr: own pages or mapped ones
    std::shared_ptr<LockedPages> pages;  // that are locked while a file is read into them; nullptr: others
    char * base = nullptr;
    size_t size = 0;
    bool mapped = false;
    Model * model = nullptr;
    std::unordered_map<const void *, std::unique_ptr<Matrix>> matrices;  // by data
    std::vector<Buffer *> beside;  // of tensors that are no experts: on the device

    // Whether the device reads it by itself. Locking that is in progress is waited for.
    bool locked() const { return real || (pages && pages->ready()); }
};

class Store {
  public:
    Store(const Host & host, Device * inner, const Config & config);
    ~Store();
    Store(const Store &) = delete;
    Store & operator=(const Store &) = delete;

    // ---- the engine's buffers; nullptr, kAllocFailed: no memory, said once
    ExpertBuffer * allocate(size_t size);
    ExpertBuffer * map(void * address, size_t size);
    Status add(ExpertBuffer & buffer, Tensor * tensor);
    void written(ExpertBuffer & buffer, const Tensor * tensor);
    void release(ExpertBuffer * buffer) noexcept;

    // ---- for steps
    Matrix * find(const Tensor * weights) const;  // of a tensor in one of our buffers, or of a view of it
    bool owns(const Tensor * tensor) const;
    // Whether the device takes rows at equal distances in one copy.
    bool copies_strips() const { return copies_strips_.load(std::memory_order_relaxed); }
    void set_copies_strips() { copies_strips_.store(true, std::memory_order_relaxed); }
    int64_t version() const { return version_.load(std::memory_order_acquire); }
    // Slots of a graph's experts that do not hold what their table says.
    void fill(Stream & stream, const Graph & graph);
    const std::vector<float> * bias(Group & group, const Tensor * tensor);

    // ---- streams with work queued
    void join(Stream * stream);
    void part(Stream * stream);

    // Other experts for a block, between steps. Returns what is wrong, or "".
    std::string set_residents(int model, int block, const std::string & kind, const std::vector<int32_t> & experts);

    // An order that has come since the last look.
    void follow_orders() noexcept;

    std::string report();
    void write_report() noexcept;

    const Host & host;
    Device * const inner;
    BufferType * const inner_type;
    const Config config;
    BufferType * type = nullptr;  // of the engine's expert buffers
    Gate gate;
    Voice voice;
    // Costs of the lanes, given or measured: bytes of weights in a microsecond, what a step's use costs besides (ns),
    // and the time of the device for what is resident.
    std::atomic<int64_t> cpu_bytes_us{0}, bus_bytes_us{0}, cpu_start_ns{0}, bus_start_ns{0}, device_ns{0};
    Courier courier;
    Ring ring;
    Pace cpu_pace, bus_pace;
    std::atomic<int> device_samples{64};

  private:
    Group * group_of(Model & model, int block, const std::string & kind, int32_t n_experts);
    Model * model_of(const ExpertBuffer & buffer, const std::string & name);
    bool make_slots(Matrix & matrix);
    bool place_slots(Group & group, const std::vector<Matrix *> & matrices);
    void free_places(Group & group);
    void write_table(Group & group);
    std::vector<int32_t> table_values(const std::vector<int32_t> & slot_of, int32_t n_slots) const;
    void set_table(Group & group);
    void beside(ExpertBuffer & buffer, Tensor * tensor, Status & status);
    std::vector<Group *> unfilled_in(const Graph & graph) const;
    void await_pages(const Graph & graph);
    void fill_group(Group & group, Stream & stream, int64_t & bytes);
    void retire(const Model & model) noexcept;
    std::string obey(const std::vector<Resident> & residents);
    const Resident * resident(const Group & group) const;
    std::string describe(const Group & group, int model) const;

    std::vector<std::unique_ptr<Model>> models_;
    std::map<std::thread::id, Model *> loading_;  // a file is loaded by one thread, another one by another
    int next_model_ = 0;
    std::atomic<int64_t> version_{1};
    std::atomic<bool> unfilled_{false}, copies_strips_{false};
    std::mutex streams_mutex_;
    std::vector<Stream *> streams_;
    std::vector<std::string> retired_;  // reports of blocks that were freed
    Orders orders_;
    std::vector<Resident> ordered_;  // in the place of those of the settings
    size_t host_bytes_ = 0;
    std::mutex report_mutex_;  // of the file
    Ticker reporter_;          // the last member: it ends before what it reports and changes goes
};

// The block, kind and role that the name of an expert weight tells; false for any other tensor.
bool expert_name(const char * name, int & block, std::string & kind, Role & role);

}  // namespace hybrid
