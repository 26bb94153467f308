// What is resident and what was done, as JSON, for people, tests and plans.
#include <cstdio>
#include <exception>
#include <fstream>
#include <sstream>

#include "device.h"
#include "stream.h"

namespace hybrid {

namespace {

template <typename Values>
std::string list(const Values & values) {
    std::string made = "[";
    for (const auto & value : values) {
        made += (made.size() > 1 ? "," : "") + std::to_string(static_cast<int64_t>(value));
    }
    return made + "]";
}

}  // namespace

std::string Store::describe(const Group & group, int model) const {
    const Counters & c = group.counters;
    const Residency * r = group.residency.get();
    size_t bytes = 0, each = 0;
    for (const Place & place : group.places) {
        bytes += host.ggml_backend_buffer_get_size(place.memory);
    }
    for (const Matrix * matrix : group.matrices) {
        each += matrix->tensor->nb[2];
    }
    std::ostringstream out;
    out << "{\"model\":" << model << ",\"block\":" << group.block << ",\"kind\":" << quoted(group.kind)
        << ",\"experts\":" << group.n_experts << ",\"slots\":" << group.n_slots << ",\"guests\":" << group.n_guests
        << ",\"resident\":" << list(group.expert_in) << ",\"expert_bytes\":" << each << ",\"device_bytes\":" << bytes
        << ",\"steps\":" << c.steps << ",\"hits\":" << c.hits << ",\"uploaded\":" << c.uploaded << ",\"cpu\":" << c.cpu
        << ",\"all_at_once\":" << c.all_at_once << ",\"uploads\":" << c.uploads << ",\"upload_bytes\":" << c.upload_bytes
        << ",\"staged\":" << c.staged << ",\"wait_ns\":" << c.wait_ns << ",\"cpu_ns\":" << c.cpu_ns
        << ",\"launch_ns\":" << c.launch_ns << ",\"lane_ns\":" << c.lane_ns
        << ",\"ahead_ns\":" << c.ahead_ns << ",\"decide_ns\":" << c.decide_ns << ",\"rows_ns\":" << c.rows_ns
        << ",\"admitted\":" << (r ? r->admitted.load() : 0) << ",\"admitted_bytes\":" << (r ? r->bytes.load() : 0)
        << ",\"waited\":" << (r ? r->waited.load() : 0) << ",\"late\":" << (r ? r->late.load() : 0)
        << ",\"row_choices\":" << list(c.row_choices) << ",\"row_hits\":" << list(c.row_hits) << ",\"chosen\":" << list(c.chosen) << "}";
    return out.str();
}

// Blocks of models that are loaded, then of those that were freed.
std::string Store::report() {
    Change change(gate);
    std::ostringstream out;
    out << "\"host_bytes\":" << host_bytes_ << ",\"cpu_bytes_us\":" << cpu_bytes_us << ",\"bus_bytes_us\":" << bus_bytes_us
        << ",\"cpu_start_ns\":" << cpu_start_ns << ",\"bus_start_ns\":" << bus_start_ns << ",\"device_ns\":" << device_ns
        << ",\"ring\":" << quoted(name_of(ring.state())) << ",\"ring_bytes\":" << ring.bytes()
        << ",\"ring_bytes_us\":" << ring.ring_bytes_us() << ",\"paged_bytes_us\":" << ring.paged_bytes_us()
        << "," << orders_.report() << ",\"blocks\":[";
    const char * comma = "";
    for (const auto & model : models_) {
        for (const auto & group : model->groups) {
            out << comma << describe(*group, model->number);
            comma = ",";
        }
    }
    out << "],\"freed\":[";
    comma = "";
    for (const std::string & text : retired_) {
        out << comma << text;
        comma = ",";
    }
    out << "]";
    return out.str();
}

void Store::write_report() noexcept {
    if (config.report.empty()) {
        return;
    }
    try {
        std::lock_guard<std::mutex> lock(report_mutex_);
        // Whole or not at all: a reader never sees half of it.
        const std::string made = config.report + ".part";
        std::ofstream file(made);
        file << "{" << report() << "}\n";
        file.close();
        if (!file || std::rename(made.c_str(), config.report.c_str()) != 0) {
            voice.note("cannot write the report " + config.report);
        }
    } catch (const std::exception &) {
        voice.lacks("a report");
    }
}

std::string Wrapper::report() {
    size_t device_bytes = 0, host_bytes = 0, n_streams = 0;
    std::string contexts;
    {
        std::lock_guard<std::mutex> lock(streams_mutex);
        n_streams = streams.size();
        for (Stream * each : streams) {
            std::lock_guard<std::recursive_mutex> still(each->api());
            device_bytes += each->device_bytes();
            host_bytes += each->host_bytes();
            contexts += (contexts.empty() ? "[" : ",[") + std::to_string(each->progress()->asked) + "," +
                        std::to_string(each->progress()->hits) + "]";
        }
    }
    std::ostringstream out;
    out << "{\"name\":" << quoted(name) << ",\"wraps\":" << quoted(store.inner->iface.get_name(store.inner))
        << ",\"stage_bytes\":" << stage.bytes() << ",\"stream_device_bytes\":" << device_bytes
        << ",\"stream_host_bytes\":" << host_bytes << ",\"streams\":" << n_streams << ",\"contexts\":[" << contexts << "]," << store.report() << "}";
    return out.str();
}

}  // namespace hybrid
