// A backend of the wrapper: forwards to one of the wrapped device, except where a graph multiplies by experts.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "plan.h"
#include "pool.h"
#include "prefetch.h"
#include "stage.h"
#include "transfer.h"

namespace hybrid {

inline int64_t nanoseconds() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

class Stream {
  public:
    Stream(Store & store, Pool & pool, Stage & stage, Backend * inner);
    ~Stream();
    Stream(const Stream &) = delete;
    Stream & operator=(const Stream &) = delete;

    Status compute(Graph * graph);
    void synchronize();
    void set_async(Tensor * tensor, const void * data, size_t offset, size_t size);
    void get_async(const Tensor * tensor, void * data, size_t offset, size_t size);

    Backend * inner() const { return inner_; }
    // Before another queue reads slots.
    void finish_slots() {
        if (slots_written_) {
            synchronize();
        }
    }
    const std::shared_ptr<Progress> & progress() const { return progress_; }
    // One call at a time reaches the inner backend: another thread may wait for it to be idle.
    std::recursive_mutex & api() { return api_; }

    void set_threads(int n) { n_threads_ = n; }
    void set_abort(bool (*callback)(void *), void * data) {
        abort_ = callback;
        abort_data_ = data;
    }
    size_t device_bytes() const { return positions_bytes_; }
    size_t host_bytes() const;

  private:
    Plan * plan_of(Graph * graph, std::string & fault);
    void drop(std::vector<std::unique_ptr<Plan>>::iterator plan);
    Status compute_region(Graph * graph, Region & region, std::string & fault);
    void remember_cold(Region & region, const Table & table);
    Status run_device(Graph * graph, Region & region, const std::vector<Tensor *> & banks, uint64_t uid);
    Status run_others(Graph * graph, Region & region);
    Status run_nodes(Graph * graph, int begin, int end, uint64_t uid);
    Status run_before(Graph * graph, const Region & region, int begin);
    bool read_choices(Region & region, Choices & choices, bool with_input);
    bool queue_choices(Region & region, Choices & choices, bool with_input);
    bool read_input(Region & region, bool wait);
    Status on_slots(Graph * graph, Region & region);
    Status on_stage(Graph * graph, Region & region, const std::vector<Tensor *> & banks);
    bool make_positions(size_t size);
    bool upload_positions();
    void plan_ahead(Graph * graph, Plan & plan);
    bool reads_input(const Region & region) const;
    Tensor * renamed_for(const Region & region);
    Status compute_ahead(Graph * graph, Region & region, std::string & fault);
    void renumber();
    Status on_prefetched(Graph * graph, Region & region, std::string & fault, bool & taken);
    void bring_guest(const Region & region, const Upload & upload);
    void bring(const Matrix & matrix, Tensor * bank, const Upload & first, size_t n);
    bool start_lane(Region & region);
    void finish_lane(Region & region, int64_t started);
    void write_rows(Region & region);
    Status compute_in_step(Graph * graph, std::string & fault);
    void give_up();
    Status compute_plan(Graph * graph, Plan & plan, std::string & fault);
    static void count_resident(const Plan & plan);
    void wait_for(Event * event, Stream * owner);
    void record(Event *& event);
    Costs costs(const Region & region) const;
    void measure(Region & region, int32_t n_guests);
    void measure_cpu(Region & region);
    void measure_bus(Region & region, int32_t n_guests);
    void measure_bus_by_stage(Region & region, bool events);
    void time_bus(Region & region, const std::function<void(int32_t expert, int32_t i)> & bring_one);
    void measure_device(const Region & region);
    void count(Region & region, const Choices & choices);
    int threads() const;

    Store & store_;
    const Host & host_;
    Pool & pool_;
    Stage & stage_;
    Backend * const inner_;
    std::recursive_mutex api_;
    const std::shared_ptr<Progress> progress_ = std::make_shared<Progress>();
    bool slots_written_ = false;     // by what this queue has not finished
    std::vector<int32_t> in_slots_;  // of the block in hand, while others may change its table
    std::vector<std::unique_ptr<Plan>> plans_;
    uint64_t clock_ = 0;
    Prefetch prefetch_;
    Kept kept_;  // of this queue
    Router router_;
    Routing routing_;
    Lane lane_;
    Region * at_work_ = nullptr;  // whose pairs the lane has in hand
    bool awake_ = false;          // the pool is
    Transfer ids_, input_, renamed_, rows_;
    std::vector<const float *> inputs_;
    int64_t decided_ = 0;  // when choices were read
    Event * read_ = nullptr;  // when choices and input are on the host
    std::vector<int32_t> order_;  // pairs by token and place
    // Renamed choices on the device: one tensor serves every region, in the order of the queue.
    Context * positions_context_ = nullptr;
    Tensor * positions_ = nullptr;
    std::vector<std::unique_ptr<Tensor>> positions_by_shape_;
    Buffer * positions_memory_ = nullptr;
    size_t positions_bytes_ = 0;
    int n_threads_ = 0;
    bool (*abort_)(void *) = nullptr;
    void * abort_data_ = nullptr;
};

Table table_of(const Group & group);

}  // namespace hybrid
