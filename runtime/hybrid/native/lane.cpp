#include "lane.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>

namespace hybrid {

namespace {

// Bytes of weights in a chunk: below the least, taking it costs as much as the work; above the most, a slow
// core keeps the others waiting at the end.
constexpr int64_t kLeastChunk = 16 << 10, kMostChunk = 64 << 10;
constexpr int64_t kChunksEach = 6;  // for every thread, where the work suffices
constexpr int64_t kRowStep = 4;

size_t padded(size_t bytes) { return (bytes + 63) / 64 * 64; }

// A row of floats in the form that the kernel of `type` multiplies with.
void convert(const Host & host, int32_t type, const float * from, void * to, int64_t n) {
    const int32_t form = host.ggml_get_type_traits_cpu(type)->vec_dot_type;
    if (form == kF32) {
        std::memcpy(to, from, static_cast<size_t>(n) * sizeof(float));
    } else {
        host.ggml_get_type_traits_cpu(form)->from_float(from, to, n);
    }
}

size_t converted_bytes(const Host & host, int32_t type, int64_t n) {
    return padded(host.ggml_row_size(host.ggml_get_type_traits_cpu(type)->vec_dot_type, n));
}

// Pairs of one expert.
struct Bundle {
    size_t begin, end;
    std::atomic<int64_t> left{0};  // chunks of first products
    std::atomic<bool> ready{false};
};

char * aligned(std::vector<char> & memory, size_t bytes) {
    if (memory.size() < bytes + 64) {
        memory.resize(bytes + 64);
    }
    const auto address = reinterpret_cast<uintptr_t>(memory.data());
    return memory.data() + ((address + 63) / 64 * 64 - address);
}

}  // namespace

class LaneJob : public Job {
  public:
    // The next work: its input rows converted, its chunks cut for so many threads.
    void prepare(const Host & host, const LaneWork & work, size_t n_inputs, int n_threads, std::vector<char> & quantised,
                 std::vector<float> & values, std::vector<char> & hidden) {
        host_ = &host;
        work_ = &work;
        convert_inputs(n_inputs, quantised);
        if (work.program) {
            hidden_bytes_ = converted_bytes(host, work.last.type, work.program->n_hidden);
            hidden_ = aligned(hidden, hidden_bytes_ * work.pairs.size());
            const size_t n_values = work.pairs.size() * static_cast<size_t>(work.program->n_values);
            if (values.size() < n_values) {
                values.resize(n_values);
            }
            values_ = values.data();
        }
        split();
        size_chunks(n_threads);
    }

    void chunk(int64_t index, int) override {
        if (index < n_first_) {
            first(bundles_[static_cast<size_t>(index / first_chunks_)], index % first_chunks_);
        } else {
            index -= n_first_;
            last(bundles_[static_cast<size_t>(index / last_chunks_)], index % last_chunks_);
        }
    }

  private:
    // Products whose kernels take the same form share it.
    void convert_inputs(size_t n, std::vector<char> & memory) {
        const size_t n_first = work_->first.size();
        inputs_.assign(n_first, nullptr);
        input_bytes_.assign(n_first, 0);
        size_t total = 0;
        for (size_t m = 0; m < n_first; m++) {
            input_bytes_[m] = converted_bytes(*host_, work_->first[m].type, work_->first[m].n_in);
            total += shares_input(m) ? 0 : input_bytes_[m] * n;
        }
        char * to = aligned(memory, total);
        for (size_t m = 0; m < n_first; m++) {
            if (shares_input(m)) {
                inputs_[m] = inputs_[0];
                continue;
            }
            inputs_[m] = to;
            for (size_t i = 0; i < n; i++, to += input_bytes_[m]) {
                convert(*host_, work_->first[m].type, work_->inputs[i], to, work_->first[m].n_in);
            }
        }
    }

    bool shares_input(size_t m) const { return m > 0 && work_->first[m].type == work_->first[0].type; }

    void split() {
        const auto & pairs = work_->pairs;
        if (n_room_ < pairs.size()) {
            n_room_ = 2 * pairs.size();
            bundles_ = std::make_unique<Bundle[]>(n_room_);
        }
        n_bundles_ = 0;
        for (size_t begin = 0; begin < pairs.size(); n_bundles_++) {
            size_t end = begin + 1;
            while (end < pairs.size() && pairs[end].expert == pairs[begin].expert) {
                end++;
            }
            bundles_[n_bundles_].begin = begin;
            bundles_[n_bundles_].end = end;
            begin = end;
        }
    }

    void size_chunks(int n_threads) {
        const auto n = static_cast<int64_t>(n_bundles_);
        n_hidden_ = work_->program ? work_->program->n_hidden : work_->first[0].n_out;
        int64_t bytes = 0;  // read for one hidden value
        for (const Weights & weights : work_->first) {
            bytes += static_cast<int64_t>(weights.row_bytes) * (weights.n_out / n_hidden_);
        }
        first_rows_ = rows_of(bytes, n_hidden_, n, n_threads);
        first_chunks_ = (n_hidden_ + first_rows_ - 1) / first_rows_;
        n_first_ = n * first_chunks_;
        for (size_t i = 0; i < n_bundles_; i++) {
            bundles_[i].left.store(first_chunks_, std::memory_order_relaxed);
            bundles_[i].ready.store(false, std::memory_order_relaxed);
        }
        n_chunks = n_first_;
        if (work_->program) {
            last_rows_ = rows_of(static_cast<int64_t>(work_->last.row_bytes), work_->last.n_out, n, n_threads);
            last_chunks_ = (work_->last.n_out + last_rows_ - 1) / last_rows_;
            n_chunks += n * last_chunks_;
        }
    }

    // Rows of a chunk, of `n` values a bundle.
    static int64_t rows_of(int64_t row_bytes, int64_t n, int64_t n_bundles, int n_threads) {
        const int64_t even = row_bytes * n * n_bundles / (kChunksEach * std::max(n_threads, 1));
        const int64_t bytes = std::min(std::max(even, kLeastChunk), kMostChunk);
        const int64_t rows = bytes / std::max<int64_t>(row_bytes, 1) / kRowStep * kRowStep;
        return std::min(std::max(rows, kRowStep), n);
    }

    void first(Bundle & bundle, int64_t chunk) {
        const int64_t from = chunk * first_rows_, to = std::min(from + first_rows_, n_hidden_);
        for (size_t m = 0; m < work_->first.size(); m++) {
            const Weights & weights = work_->first[m];
            for (int64_t half = 0; half < weights.n_out; half += n_hidden_) {
                products(m, bundle, half + from, half + to);
            }
        }
        if (!work_->program) {
            return;
        }
        for (size_t p = bundle.begin; p < bundle.end; p++) {
            work_->program->run(values_of(p), work_->pairs[p].expert, from, to);
        }
        if (bundle.left.fetch_sub(1, std::memory_order_acq_rel) == 1) {
            finish(bundle);
        }
    }

    // Rows from..to of one first product for every pair of the bundle; a row of weights serves them all.
    void products(size_t m, const Bundle & bundle, int64_t from, int64_t to) {
        const Weights & weights = work_->first[m];
        const auto dot = host_->ggml_get_type_traits_cpu(weights.type)->vec_dot;
        const int expert = work_->pairs[bundle.begin].expert;
        for (int64_t r = from; r < to; r++) {
            const char * row = weights.row(expert, r);
            for (size_t p = bundle.begin; p < bundle.end; p++) {
                const char * input = inputs_[m] + static_cast<size_t>(work_->pairs[p].input) * input_bytes_[m];
                dot(static_cast<int>(weights.n_in), target(m, p) + r, 0, row, 0, input, 0, 1);
            }
        }
    }

    float * target(size_t m, size_t pair) {
        if (!work_->program) {
            return work_->outputs + work_->pairs[pair].row * work_->first[0].n_out;
        }
        if (work_->exchanged && work_->first.size() == 2) {
            m = 1 - m;
        }
        return values_of(pair) + work_->program->rows[static_cast<size_t>(work_->first_rows[m])].at;
    }

    float * values_of(size_t pair) { return values_ + static_cast<int64_t>(pair) * work_->program->n_values; }

    // The last of the first chunks is done: hidden values in the form that the last product takes.
    void finish(Bundle & bundle) {
        const Row & row = work_->program->rows[static_cast<size_t>(work_->result)];
        for (size_t p = bundle.begin; p < bundle.end; p++) {
            convert(*host_, work_->last.type, values_of(p) + row.at, hidden_ + p * hidden_bytes_, row.width);
        }
        bundle.ready.store(true, std::memory_order_release);
    }

    void last(Bundle & bundle, int64_t chunk) {
        // Its first chunks were all taken before this one: whoever has one is at work.
        Patience patience;
        while (!bundle.ready.load(std::memory_order_acquire)) {
            patience.wait();
        }
        const Weights & weights = work_->last;
        const auto dot = host_->ggml_get_type_traits_cpu(weights.type)->vec_dot;
        const int expert = work_->pairs[bundle.begin].expert;
        const int64_t from = chunk * last_rows_, to = std::min(from + last_rows_, weights.n_out);
        for (int64_t r = from; r < to; r++) {
            const char * row = weights.row(expert, r);
            for (size_t p = bundle.begin; p < bundle.end; p++) {
                float * out = work_->outputs + work_->pairs[p].row * weights.n_out + r;
                dot(static_cast<int>(weights.n_in), out, 0, row, 0, hidden_ + p * hidden_bytes_, 0, 1);
            }
        }
    }

    const Host * host_ = nullptr;
    const LaneWork * work_ = nullptr;
    std::vector<const char *> inputs_;  // converted rows of each first product
    std::vector<size_t> input_bytes_;   // and the distance between them
    float * values_ = nullptr;
    char * hidden_ = nullptr;
    size_t hidden_bytes_ = 0;
    std::unique_ptr<Bundle[]> bundles_;
    size_t n_bundles_ = 0, n_room_ = 0;
    int64_t n_hidden_ = 0, first_rows_ = 0, first_chunks_ = 1, n_first_ = 0, last_rows_ = 0, last_chunks_ = 1;
};

bool lane_supports(const Host & host, int32_t type) {
    if (!host.ggml_get_type_traits_cpu) {
        return false;
    }
    const TypeTraits * traits = host.ggml_get_type_traits_cpu(type);
    if (!traits || !traits->vec_dot) {
        return false;
    }
    return traits->vec_dot_type == kF32 || host.ggml_get_type_traits_cpu(traits->vec_dot_type)->from_float;
}

Lane::Lane() : job_(std::make_unique<LaneJob>()) {}
Lane::~Lane() = default;

void Lane::start(const Host & host, Pool & pool, const LaneWork & work, size_t n_inputs, int n_threads) {
    job_->prepare(host, work, n_inputs, n_threads, quantised_, values_, hidden_);
    pool.start(*job_, n_threads);
}

void Lane::finish(Pool & pool, const LaneWork & work, int n_threads) {
    pool.finish(*job_, n_threads);
#if defined(ATSPLAN_HYBRID_FAULTS)
    if (work.stale_row && !work.pairs.empty()) {
        const auto n = static_cast<size_t>(work.n_out());
        std::fill_n(work.outputs, n, 0.0f);  // as if the row had not been written
    }
#else
    (void)work;
#endif
}

}  // namespace hybrid
