#include "lane.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>

namespace hybrid {

namespace {

// Bytes of weights in a chunk: below the least, taking it costs as much as the work; above the most, a slow
// core keeps the others waiting at the end.
constexpr int64_t kLeastChunk = 8 << 10, kMostChunk = 64 << 10;
constexpr int64_t kChunksEach = 6;  // for every thread, where the work suffices
constexpr int64_t kRowStep = 4;
// Values that are converted at once: whole blocks of every form that kernels take.
constexpr int64_t kInputPiece = 256, kHiddenPiece = 256;
constexpr int64_t kManyInputs = 8;      // then rows are converted whole
// Bytes of weights that are asked for before a kernel comes to them, and while something else is waited for.
constexpr size_t kAhead = 4 << 10, kMeanwhile = 16 << 10;
constexpr size_t kLine = 64;  // bytes of a cache line

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

// What lies there is wanted soon.
void expect(const char * data) {
#if defined(__GNUC__) || defined(__clang__)
    __builtin_prefetch(data);
#else
    (void)data;
#endif
}

// The weights of a chunk in the order in which they are read. Kernels by themselves keep too few reads under way to fill
// the time that memory takes (docs/findings-hybrid.md): so lines are asked for some KiB before.
class Lines {
  public:
    void add(const char * data, size_t size) {
        if (n_parts_ < kParts) {
            parts_[n_parts_++] = Part{data, size};
        }
    }

    // So many bytes were read, or are about to be.
    void advance(size_t bytes) {
        read_ += bytes;
        ask(read_ + kAhead);
    }

    // All up to this many bytes after the first.
    void ask(size_t until) {
        for (; asked_ < until && part_ < n_parts_; asked_ += kLine) {
            if (at_ >= parts_[part_].size) {
                at_ = 0;
                if (++part_ == n_parts_) {
                    return;
                }
            }
            expect(parts_[part_].data + at_);
            at_ += kLine;
        }
    }

  private:
    static constexpr size_t kParts = 2;  // gate and up
    struct Part {
        const char * data;
        size_t size;
    };

    Part parts_[kParts] = {};
    size_t n_parts_ = 0, part_ = 0, at_ = 0;  // at_: within a part
    size_t read_ = 0, asked_ = 0;
};

// Pairs of one expert.
struct Bundle {
    size_t begin, end;
    std::atomic<int64_t> left{0};  // pieces of hidden values
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
    // The next work, cut into chunks for so many threads: input rows are converted first, then first products, then last.
    void prepare(const Host & host, const LaneWork & work, size_t n_inputs, int n_threads, std::vector<char> & quantised,
                 std::vector<float> & values, std::vector<char> & hidden) {
        host_ = &host;
        work_ = &work;
        place_inputs(n_inputs, quantised);
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
        if (index < n_convert_) {
            convert_input(index);
            return;
        }
        index -= n_convert_;
        if (index < n_first_) {
            first(static_cast<size_t>(index / first_chunks_), index % first_chunks_);
        } else {
            index -= n_first_;
            last(bundles_[static_cast<size_t>(index / last_chunks_)], index % last_chunks_);
        }
    }

  private:
    // Products whose kernels take the same form share it.
    void place_inputs(size_t n, std::vector<char> & memory) {
        const size_t n_first = work_->first.size();
        inputs_.assign(n_first, nullptr);
        input_bytes_.assign(n_first, 0);
        size_t total = 0;
        int64_t n_forms = 0;
        for (size_t m = 0; m < n_first; m++) {
            input_bytes_[m] = converted_bytes(*host_, work_->first[m].type, work_->first[m].n_in);
            if (!shares_input(m)) {
                total += input_bytes_[m] * n;
                n_forms++;
            }
        }
        char * to = aligned(memory, total);
        for (size_t m = 0; m < n_first; m++) {
            inputs_[m] = shares_input(m) ? inputs_[0] : to;
            to += shares_input(m) ? 0 : input_bytes_[m] * n;
        }
        n_inputs_ = static_cast<int64_t>(n);
        const int64_t n_in = work_->first[0].n_in;
        input_piece_ = n_inputs_ < kManyInputs ? kInputPiece : n_in;
        input_pieces_ = (n_in + input_piece_ - 1) / input_piece_;
        n_convert_ = n_forms * n_inputs_ * input_pieces_;
        unconverted_.store(n_convert_, std::memory_order_relaxed);
    }

    void convert_input(int64_t index) {
        const int64_t piece = index % input_pieces_, row = index / input_pieces_ % n_inputs_;
        int64_t form = index / input_pieces_ / n_inputs_;
        size_t m = 0;
        while (shares_input(m) || form-- > 0) {
            m++;
        }
        const Weights & weights = work_->first[m];
        const int64_t from = piece * input_piece_;
        char * to = inputs_[m] + static_cast<size_t>(row) * input_bytes_[m];
        convert(*host_, weights.type, work_->inputs[row] + from, to + bytes_before(weights.type, from), std::min(input_piece_, weights.n_in - from));
        unconverted_.fetch_sub(1, std::memory_order_acq_rel);
    }

    // Of the first values of a row in the form that the kernel of `type` takes.
    size_t bytes_before(int32_t type, int64_t n) const {
        return n ? host_->ggml_row_size(host_->ggml_get_type_traits_cpu(type)->vec_dot_type, n) : 0;
    }

    bool shares_input(size_t m) const { return m > 0 && work_->first[m].type == work_->first[0].type; }

    void split() {
        const auto & pairs = work_->pairs;
        if (n_room_ < pairs.size()) {
            bundles_ = std::make_unique<Bundle[]>(2 * pairs.size());
            n_room_ = 2 * pairs.size();
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
        // Hidden values are converted piece by piece as they are complete: no chunk is of two.
        n_pieces_ = work_->program && n_hidden_ % kHiddenPiece == 0 ? n_hidden_ / kHiddenPiece : 1;
        piece_ = n_hidden_ / n_pieces_;
        first_rows_ = std::min(rows_of(bytes, n_hidden_, n, n_threads), piece_);
        piece_chunks_ = (piece_ + first_rows_ - 1) / first_rows_;
        first_chunks_ = n_pieces_ * piece_chunks_;
        n_first_ = n * first_chunks_;
        for (size_t i = 0; i < n_bundles_; i++) {
            bundles_[i].left.store(n_pieces_, std::memory_order_relaxed);
        }
        if (work_->program) {
            reset_pieces();
        }
        n_chunks = n_convert_ + n_first_;
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

    void reset_pieces() {
        const size_t n = n_bundles_ * static_cast<size_t>(n_pieces_);
        if (pieces_room_ < n) {
            pieces_ = std::make_unique<std::atomic<int64_t>[]>(2 * n);
            pieces_room_ = 2 * n;
        }
        for (size_t i = 0; i < n; i++) {
            pieces_[i].store(piece_chunks_, std::memory_order_relaxed);
        }
    }

    // Some thread is at work on what `ready` says: its chunks were all taken before the caller's.
    template <typename Ready>
    static void wait_until(Ready ready) {
        Patience patience;
        while (!ready()) {
            patience.wait();
        }
    }

    void first(size_t b, int64_t chunk) {
        Bundle & bundle = bundles_[b];
        const int64_t piece = chunk / piece_chunks_, end = (piece + 1) * piece_;
        const int64_t from = piece * piece_ + chunk % piece_chunks_ * first_rows_, to = std::min(from + first_rows_, end);
        const auto converted = [&] { return unconverted_.load(std::memory_order_acquire) == 0; };
        Lines lines;
        for (const Weights & weights : work_->first) {
            for (int64_t half = 0; half < weights.n_out; half += n_hidden_) {
                add_rows(lines, weights, bundle, half + from, half + to);
            }
        }
        if (!converted()) {
            lines.ask(kMeanwhile);
            wait_until(converted);
        }
        for (size_t m = 0; m < work_->first.size(); m++) {
            for (int64_t half = 0; half < work_->first[m].n_out; half += n_hidden_) {
                products(m, bundle, half + from, half + to, lines);
            }
        }
        if (!work_->program) {
            return;
        }
        for (size_t p = bundle.begin; p < bundle.end; p++) {
            work_->program->run(values_of(p), work_->pairs[p].expert, from, to);
        }
        if (pieces_[b * static_cast<size_t>(n_pieces_) + static_cast<size_t>(piece)].fetch_sub(1, std::memory_order_acq_rel) == 1) {
            finish(bundle, piece);
        }
    }

    void add_rows(Lines & lines, const Weights & weights, const Bundle & bundle, int64_t from, int64_t to) const {
        lines.add(weights.row(work_->pairs[bundle.begin].expert, from), static_cast<size_t>(to - from) * weights.row_bytes);
    }

    // Rows from..to of one first product for every pair of the bundle; a row of weights serves them all.
    void products(size_t m, const Bundle & bundle, int64_t from, int64_t to, Lines & lines) {
        const Weights & weights = work_->first[m];
        const auto dot = host_->ggml_get_type_traits_cpu(weights.type)->vec_dot;
        const int expert = work_->pairs[bundle.begin].expert;
        for (int64_t r = from; r < to; r++) {
            const char * row = weights.row(expert, r);
            lines.advance(weights.row_bytes);
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

    // The last chunk of a piece is done: its values in the form that the last product takes.
    void finish(Bundle & bundle, int64_t piece) {
        const Row & row = work_->program->rows[static_cast<size_t>(work_->result)];
        const int64_t from = piece * piece_, n = n_pieces_ == 1 ? row.width : piece_;
        const size_t before = bytes_before(work_->last.type, from);
        for (size_t p = bundle.begin; p < bundle.end; p++) {
            convert(*host_, work_->last.type, values_of(p) + row.at + from, hidden_ + p * hidden_bytes_ + before, n);
        }
        bundle.left.fetch_sub(1, std::memory_order_acq_rel);
    }

    void last(Bundle & bundle, int64_t chunk) {
        const auto ready = [&] { return bundle.left.load(std::memory_order_acquire) == 0; };
        const int64_t from = chunk * last_rows_, to = std::min(from + last_rows_, work_->last.n_out);
        const Weights & weights = work_->last;
        Lines lines;
        add_rows(lines, weights, bundle, from, to);
        if (!ready()) {
            lines.ask(kMeanwhile);
            wait_until(ready);
        }
        const auto dot = host_->ggml_get_type_traits_cpu(weights.type)->vec_dot;
        const int expert = work_->pairs[bundle.begin].expert;
        for (int64_t r = from; r < to; r++) {
            const char * row = weights.row(expert, r);
            lines.advance(weights.row_bytes);
            for (size_t p = bundle.begin; p < bundle.end; p++) {
                float * out = work_->outputs + work_->pairs[p].row * weights.n_out + r;
                dot(static_cast<int>(weights.n_in), out, 0, row, 0, hidden_ + p * hidden_bytes_, 0, 1);
            }
        }
    }

    const Host * host_ = nullptr;
    const LaneWork * work_ = nullptr;
    std::vector<char *> inputs_;        // converted rows of each first product
    std::vector<size_t> input_bytes_;   // and the distance between them
    int64_t n_inputs_ = 0, input_piece_ = 1, input_pieces_ = 1, n_convert_ = 0;
    std::atomic<int64_t> unconverted_{0};  // pieces of them
    float * values_ = nullptr;
    char * hidden_ = nullptr;
    size_t hidden_bytes_ = 0;
    std::unique_ptr<Bundle[]> bundles_;
    size_t n_bundles_ = 0, n_room_ = 0;
    std::unique_ptr<std::atomic<int64_t>[]> pieces_;  // chunks left, by bundle and piece
    size_t pieces_room_ = 0;
    int64_t n_pieces_ = 1, piece_ = 0, piece_chunks_ = 1;
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
