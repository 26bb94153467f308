// What is resident begins before the host knows the choices: the device looks up their slots by itself, and the host
// meanwhile gives the CPU what has none.
#include <algorithm>

#include "stream.h"

namespace hybrid {

namespace {

constexpr int64_t kMostPlaces = 4096;  // no memory is made anew for as many

}  // namespace

// Single tokens, where a slot may be named twice: those without one name the first, and are overwritten. Guests depend on
// the choices, so that none are used here.
void Stream::plan_ahead(Graph * graph, Plan & plan) {
    const DeviceInterface & device = store_.inner->iface;
    if (!store_.config.ahead || !inner_->iface.event_record || !device.event_new || !device.event_synchronize || !inner_->iface.get_tensor_async) {
        return;
    }
    if (!graph->uid || !ids_.locked(sizeof(int32_t)) || !input_.locked(sizeof(float))) {
        return;  // a part of a graph; or what is read arrives only when all work is waited for
    }
    if (!read_ && !(read_ = device.event_new(store_.inner))) {
        return;
    }
    int at = 0;
    for (auto & each : plan.regions) {
        Region & region = *each;
        const int begin = at;
        at = region.end;
        const bool able = region.group->table && region.from_sort && region.quantised && region.cpu && region.n_tokens() == 1 &&
                          region.ids->ne[2] == 1 && reads_input(region) && region.n_places() <= kMostPlaces;
        if (!able || !make_positions(kMostPlaces * sizeof(int32_t))) {
            continue;
        }
        auto made = std::make_unique<Ahead>();
        made->host = &host_;
        made->context = host_.ggml_init(InitParams{host_.ggml_tensor_overhead() * 4, nullptr, true});
        if (!made->context) {
            return;
        }
        made->renamed = host_.ggml_get_rows(made->context, region.group->table, region.ids);
        // Engines that mark the nodes to be computed do so when they build a graph.
        made->renamed->flags |= region.output->flags & ~host_.flag_output;
        made->renamed->buffer = positions_->buffer;
        made->renamed->data = positions_->data;
        if (made->renamed->type != kI32 || !device.supports_op(store_.inner, made->renamed)) {
            return;
        }
        made->nodes.assign(graph->nodes + begin, graph->nodes + region.begin);
        made->nodes.push_back(made->renamed);
        region.ahead = std::move(made);
    }
}

// The nodes before were queued, with the look-up behind them.
Status Stream::compute_ahead(Graph * graph, Region & region, std::string & fault) {
    Group & group = *region.group;
    Choices choices;
    if (!queue_choices(region, choices, true)) {
        fault = "no host memory for the choices of the router";
        return kAllocFailed;
    }
    record(read_);
    const int64_t queues = nanoseconds();
    const Status status = run_device(graph, region, {}, region.slots_uid);
    const int64_t waits = nanoseconds();
    group.counters.launch_ns += waits - queues;
    if (status != kSuccess) {
        return status;
    }
    store_.inner->iface.event_synchronize(store_.inner, read_);
    decided_ = nanoseconds();
    group.counters.wait_ns += decided_ - waits;
    measure(region, 0);
    Table table = table_of(group);
    table.cpu = table.may_repeat = true;
    fault = router_.route(choices, table, costs(region), routing_);
    if (!fault.empty()) {
        return kFailed;
    }
    const bool with_cpu = !routing_.pairs.empty();
    if (with_cpu && !start_lane(region)) {
        fault = "no host memory for the rows that the CPU computes";
        return kAllocFailed;
    }
    const int64_t started = nanoseconds();
    group.counters.decide_ns += started - decided_;
    count(region, choices);
    if (with_cpu) {
        finish_lane(region, started);
        const int64_t begin = nanoseconds();
        write_rows(region);
        group.counters.rows_ns += nanoseconds() - begin;
    }
    return kSuccess;
}

}  // namespace hybrid
