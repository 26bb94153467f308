#include "lane.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>

namespace hybrid {

namespace {

constexpr int64_t kChunkBytes = 48 << 10;  // of weights: a few microseconds
constexpr int64_t kRowStep = 16;           // values of a cache line

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

class LaneJob : public Job {
  public:
    LaneJob(const Host & host, const LaneWork & work, float * values, char * hidden, size_t hidden_bytes)
        : host_(host), work_(work), values_(values), hidden_(hidden), hidden_bytes_(hidden_bytes) {
        split();
        size_chunks();
    }

    // Converted input rows of each first product, and the distance between them.
    std::vector<const char *> inputs;
    std::vector<size_t> input_bytes;

    void chunk(int64_t index, int) override {
        if (index < n_first_) {
            first(*bundles_[static_cast<size_t>(index / first_chunks_)], index % first_chunks_);
        } else {
            index -= n_first_;
            last(*bundles_[static_cast<size_t>(index / last_chunks_)], index % last_chunks_);
        }
    }

  private:
    void split() {
        const auto & pairs = work_.pairs;
        for (size_t begin = 0; begin < pairs.size();) {
            size_t end = begin + 1;
            while (end < pairs.size() && pairs[end].expert == pairs[begin].expert) {
                end++;
            }
            bundles_.push_back(std::make_unique<Bundle>());
            bundles_.back()->begin = begin;
            bundles_.back()->end = end;
            begin = end;
        }
    }

    void size_chunks() {
        const auto n = static_cast<int64_t>(bundles_.size());
        n_hidden_ = work_.program ? work_.program->n_hidden : work_.first[0].n_out;
        int64_t bytes = 0;  // read for one hidden value
        for (const Weights & weights : work_.first) {
            bytes += static_cast<int64_t>(weights.row_bytes) * (weights.n_out / n_hidden_);
        }
        first_rows_ = rows_of(bytes, n_hidden_);
        first_chunks_ = (n_hidden_ + first_rows_ - 1) / first_rows_;
        n_first_ = n * first_chunks_;
        for (auto & bundle : bundles_) {
            bundle->left.store(first_chunks_, std::memory_order_relaxed);
        }
        n_chunks = n_first_;
        if (work_.program) {
            last_rows_ = rows_of(static_cast<int64_t>(work_.last.row_bytes), work_.last.n_out);
            last_chunks_ = (work_.last.n_out + last_rows_ - 1) / last_rows_;
            n_chunks += n * last_chunks_;
        }
    }

    static int64_t rows_of(int64_t row_bytes, int64_t n) {
        const int64_t rows = kChunkBytes / std::max<int64_t>(row_bytes, 1) / kRowStep * kRowStep;
        return std::min(std::max(rows, kRowStep), n);
    }

    void first(Bundle & bundle, int64_t chunk) {
        const int64_t from = chunk * first_rows_, to = std::min(from + first_rows_, n_hidden_);
        for (size_t m = 0; m < work_.first.size(); m++) {
            const Weights & weights = work_.first[m];
            for (int64_t half = 0; half < weights.n_out; half += n_hidden_) {
                products(m, bundle, half + from, half + to);
            }
        }
        if (!work_.program) {
            return;
        }
        for (size_t p = bundle.begin; p < bundle.end; p++) {
            work_.program->run(values_of(p), work_.pairs[p].expert, from, to);
        }
        if (bundle.left.fetch_sub(1, std::memory_order_acq_rel) == 1) {
            finish(bundle);
        }
    }

    // Rows from..to of one first product for every pair of the bundle; a row of weights serves them all.
    void products(size_t m, const Bundle & bundle, int64_t from, int64_t to) {
        const Weights & weights = work_.first[m];
        const auto dot = host_.ggml_get_type_traits_cpu(weights.type)->vec_dot;
        const int expert = work_.pairs[bundle.begin].expert;
        for (int64_t r = from; r < to; r++) {
            const char * row = weights.row(expert, r);
            for (size_t p = bundle.begin; p < bundle.end; p++) {
                const char * input = inputs[m] + static_cast<size_t>(work_.pairs[p].input) * input_bytes[m];
                dot(static_cast<int>(weights.n_in), target(m, p) + r, 0, row, 0, input, 0, 1);
            }
        }
    }

    float * target(size_t m, size_t pair) {
        if (!work_.program) {
            return work_.outputs + work_.pairs[pair].row * work_.first[0].n_out;
        }
        if (work_.exchanged && work_.first.size() == 2) {
            m = 1 - m;
        }
        return values_of(pair) + work_.program->rows[static_cast<size_t>(work_.first_rows[m])].at;
    }

    float * values_of(size_t pair) { return values_ + static_cast<int64_t>(pair) * work_.program->n_values; }

    // The last of the first chunks is done: hidden values in the form that the last product takes.
    void finish(Bundle & bundle) {
        const Row & row = work_.program->rows[static_cast<size_t>(work_.result)];
        for (size_t p = bundle.begin; p < bundle.end; p++) {
            convert(host_, work_.last.type, values_of(p) + row.at, hidden_ + p * hidden_bytes_, row.width);
        }
        bundle.ready.store(true, std::memory_order_release);
    }

    void last(Bundle & bundle, int64_t chunk) {
        // Its first chunks were all taken before this one: whoever has one is at work.
        Patience patience;
        while (!bundle.ready.load(std::memory_order_acquire)) {
            patience.wait();
        }
        const Weights & weights = work_.last;
        const auto dot = host_.ggml_get_type_traits_cpu(weights.type)->vec_dot;
        const int expert = work_.pairs[bundle.begin].expert;
        const int64_t from = chunk * last_rows_, to = std::min(from + last_rows_, weights.n_out);
        for (int64_t r = from; r < to; r++) {
            const char * row = weights.row(expert, r);
            for (size_t p = bundle.begin; p < bundle.end; p++) {
                float * out = work_.outputs + work_.pairs[p].row * weights.n_out + r;
                dot(static_cast<int>(weights.n_in), out, 0, row, 0, hidden_ + p * hidden_bytes_, 0, 1);
            }
        }
    }

    const Host & host_;
    const LaneWork & work_;
    float * values_;
    char * hidden_;
    size_t hidden_bytes_;
    std::vector<std::unique_ptr<Bundle>> bundles_;
    int64_t n_hidden_ = 0, first_rows_ = 0, first_chunks_ = 1, n_first_ = 0, last_rows_ = 0, last_chunks_ = 1;
};

char * aligned(std::vector<char> & memory, size_t bytes) {
    if (memory.size() < bytes + 64) {
        memory.resize(bytes + 64);
    }
    const auto address = reinterpret_cast<uintptr_t>(memory.data());
    return memory.data() + ((address + 63) / 64 * 64 - address);
}

}  // namespace

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

void Lane::compute(const Host & host, Pool & pool, const LaneWork & work, size_t n_inputs, int n_threads) {
    const size_t n_pairs = work.pairs.size();
    size_t hidden_bytes = 0, total = 0;
    std::vector<size_t> input_bytes, offsets;
    for (size_t m = 0; m < work.first.size(); m++) {
        input_bytes.push_back(converted_bytes(host, work.first[m].type, work.first[m].n_in));
        // Products whose kernels take the same form share it.
        const bool shared = m > 0 && work.first[m].type == work.first[0].type;
        offsets.push_back(shared ? offsets[0] : total);
        total += shared ? 0 : input_bytes[m] * n_inputs;
    }
    char * quantised = aligned(quantised_, total);
    for (size_t m = 0; m < work.first.size(); m++) {
        for (size_t i = 0; i < n_inputs && (m == 0 || offsets[m] != offsets[0]); i++) {
            char * to = quantised + offsets[m] + i * input_bytes[m];
            convert(host, work.first[m].type, work.inputs[i], to, work.first[m].n_in);
        }
    }
    char * hidden = nullptr;
    if (work.program) {
        hidden_bytes = converted_bytes(host, work.last.type, work.program->n_hidden);
        hidden = aligned(hidden_, hidden_bytes * n_pairs);
        const size_t n_values = n_pairs * static_cast<size_t>(work.program->n_values);
        if (values_.size() < n_values) {
            values_.resize(n_values);
        }
    }
    LaneJob job(host, work, values_.data(), hidden, hidden_bytes);
    for (size_t m = 0; m < work.first.size(); m++) {
        job.inputs.push_back(quantised + offsets[m]);
        job.input_bytes.push_back(input_bytes[m]);
    }
    pool.run(job, n_threads);
#if defined(ATSPLAN_HYBRID_FAULTS)
    if (work.stale_row && n_pairs > 0) {
        const auto n = static_cast<size_t>(work.n_out());
        std::fill_n(work.outputs, n, 0.0f);  // as if the row had not been written
    }
#endif
}

}  // namespace hybrid
