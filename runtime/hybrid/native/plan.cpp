#include "plan.h"

#include <algorithm>
#include <map>

namespace hybrid {

namespace {

constexpr int kLongest = 64;  // nodes of a region
constexpr ptrdiff_t kWidestStep = INT32_MAX;  // bytes between rows of a strided copy, as CUDA has it

class Builder {
  public:
    Builder(Store & store, Graph * graph) : store_(store), host_(store.host), graph_(graph) {}

    std::unique_ptr<Plan> build(std::string & fault) {
        auto plan = std::make_unique<Plan>();
        plan->uid = graph_->uid;
        plan->version = store_.version();
        plan->n_nodes = graph_->n_nodes;
        for (int i = 0; i < graph_->n_nodes; i++) {
            if (!is_ours(graph_->nodes[i])) {
                continue;
            }
            auto region = std::make_unique<Region>();
            if (!store_.config.regions || !whole(i, *region)) {
                region = std::make_unique<Region>();
                if (!alone(i, *region, fault)) {
                    return nullptr;
                }
            }
            finish(*region);
            i = region->end - 1;
            (region->group->whole() ? plan->resident : plan->regions).push_back(std::move(region));
        }
        plan->after_uid = uid();
        return plan;
    }

  private:
    bool is_ours(const Tensor * node) const {
        return node->op == host_.op_mul_mat_id && store_.owns(node->src[0]) && host_.ggml_nbytes(node) > 0;
    }

    // Slices of a graph that has no number have none either.
    uint64_t uid() const { return graph_->uid ? host_.next_uid() : 0; }

    void finish(Region & region) const {
        region.before_uid = uid();
        region.slots_uid = uid();
        for (uint64_t & each : region.stage_uids) {
            each = uid();
        }
        region.output = region.products.back().node;
        for (Product & product : region.products) {
            if (!product.slots && product.part.nb[0]) {
                product.slots = &product.part;
            }
            region.quantised = region.quantised && host_.ggml_is_quantized(product.weights.type);
            region.cpu = region.cpu && lane_supports(host_, product.weights.type);
            region.expert_bytes += static_cast<int64_t>(product.weights.expert_bytes);
        }
        describe_work(region);
        find_strips(region);
        const Tensor * sorted = region.ids->op == host_.op_view ? region.ids->src[0] : region.ids;
        const std::string made_by = sorted ? host_.ggml_op_name(sorted->op) : "";
        region.from_sort = made_by == "ARGSORT" || made_by == "TOP_K";
    }

    static void describe_work(Region & region) {
        const size_t n_first = region.has_program ? region.products.size() - 1 : 1;
        for (size_t i = 0; i < n_first; i++) {
            region.work.first.push_back(region.products[i].weights);
        }
        region.work.program = region.has_program ? &region.program : nullptr;
        region.work.first_rows = region.first_rows;
        region.work.result = region.result;
        region.work.last = region.products.back().weights;
    }

    void find_strips(Region & region) const {
        std::vector<Matrix *> matrices;
        for (Product & product : region.products) {
            if (product.matrix->slots) {
                matrices.push_back(product.matrix);
            }
        }
        std::sort(matrices.begin(), matrices.end(), [](const Matrix * a, const Matrix * b) { return a->host() < b->host(); });
        matrices.erase(std::unique(matrices.begin(), matrices.end()), matrices.end());  // parts of one
        for (size_t i = 0; i < matrices.size(); i++) {
            if (i && extends(region.strips.back(), *matrices[i - 1], *matrices[i])) {
                Strip & strip = region.strips.back();
                strip.host_step = static_cast<size_t>(matrices[i]->host() - matrices[i - 1]->host());
                strip.device_step = static_cast<size_t>(matrices[i]->device() - matrices[i - 1]->device());
                strip.n++;
            } else {
                region.strips.push_back(Strip{matrices[i], 1, 0, 0});
            }
        }
    }

    // Page-locked memory in one piece, or a copy over both would be two.
    bool extends(const Strip & strip, const Matrix & last, const Matrix & next) const {
        const auto host = next.host() - last.host(), device = next.device() - last.device();
        return store_.config.merge && store_.copies_strips() && last.home == next.home && next.home->real &&
               last.slots->buffer == next.slots->buffer && last.tensor->nb[2] == next.tensor->nb[2] && device > 0 &&
               std::max(host, device) < kWidestStep && (strip.n == 1 || (static_cast<size_t>(host) == strip.host_step && static_cast<size_t>(device) == strip.device_step));
    }

    bool read_product(Tensor * node, Product & product, std::string & fault) const {
        const Tensor * weights = node->src[0];
        const std::string named = std::string(node->name) + " over " + weights->name;
        product.node = node;
        product.source = node->src[0];
        product.matrix = store_.find(weights);
        if (!product.matrix) {
            fault = named + ": these experts were not loaded";
            return false;
        }
        const Tensor * root = product.matrix->tensor;
        product.weights = product.matrix->weights();
        product.slots = product.matrix->slots;
        if (node->src[1]->type != kF32 || node->type != kF32 || node->src[2]->type != kI32 || node->src[1]->nb[0] != sizeof(float)) {
            fault = named + ": only products of float rows are known here";
            return false;
        }
        if (weights->view_src) {
            return read_part(weights, root, product, fault);
        }
        return true;
    }

    // The same rows of every expert: a view that differs in its number of rows and its offset.
    bool read_part(const Tensor * weights, const Tensor * root, Product & product, std::string & fault) const {
        const size_t end = weights->view_offs + static_cast<size_t>(weights->ne[1]) * root->nb[1];
        if (weights->ne[0] != root->ne[0] || weights->ne[2] != root->ne[2] || weights->nb[1] != root->nb[1] ||
            weights->nb[2] != root->nb[2] || end > root->nb[2] || weights->type != root->type) {
            fault = std::string(weights->name) + " is a view of experts that is not known here";
            return false;
        }
        product.weights.data += weights->view_offs;
        product.weights.n_out = weights->ne[1];
        if (product.matrix->slots) {
            product.part = *product.matrix->slots;
            product.part.ne[1] = weights->ne[1];
            product.part.data = static_cast<char *>(product.part.data) + weights->view_offs;
            product.part.view_src = product.matrix->slots;
            product.part.view_offs = weights->view_offs;
            product.slots = nullptr;  // set when the product stays where it is
        }
        return true;
    }

    bool alone(int i, Region & region, std::string & fault) const {
        Product product;
        if (!read_product(graph_->nodes[i], product, fault)) {
            return false;
        }
        region.begin = i;
        region.end = i + 1;
        region.group = product.matrix->group;
        region.ids = product.node->src[2];
        region.input = product.node->src[1];
        region.products.push_back(product);
        return true;
    }

    // ---- a whole region

    bool whole(int i, Region & region) {
        rows_.clear();
        region.begin = i;
        for (int j = i; j < std::min(graph_->n_nodes, i + kLongest); j++) {
            Tensor * node = graph_->nodes[j];
            if (is_ours(node)) {
                bool last = false;
                if (!take_product(node, region, last)) {
                    return false;
                }
                if (last) {
                    region.end = j + 1;
                    return only_used_inside(region);
                }
            } else if (touches_rows(node)) {
                if (!translate(node, region)) {
                    return false;
                }
            } else {
                add_other(region, j);
            }
        }
        return false;
    }

    static void add_other(Region & region, int j) {
        auto & runs = region.others;
        if (!runs.empty() && runs.back().second == j) {
            runs.back().second = j + 1;
        } else {
            runs.emplace_back(j, j + 1);
        }
    }

    bool take_product(Tensor * node, Region & region, bool & last) {
        Product product;
        std::string unused;
        if (!read_product(node, product, unused) || node->view_src || (node->flags & host_.flag_output && product.matrix->role != Role::kDown)) {
            return false;
        }
        const Matrix & matrix = *product.matrix;
        if (region.products.empty()) {
            if (matrix.role == Role::kDown) {
                return false;
            }
            region.group = matrix.group;
            region.ids = node->src[2];
            region.input = node->src[1];
            region.has_program = true;
            region.program.n_hidden = matrix.role == Role::kGateUp ? node->ne[0] / 2 : node->ne[0];
        }
        if (matrix.group != region.group || node->src[2] != region.ids) {
            return false;
        }
        const int64_t n_hidden = region.program.n_hidden;
        if (matrix.role == Role::kDown) {
            const auto row = rows_.find(node->src[1]);
            if (row == rows_.end() || width(region, row->second) != n_hidden || product.weights.n_in != n_hidden) {
                return false;
            }
            region.result = row->second;
            last = true;
        } else {
            if (node->src[1] != region.input || (node->ne[0] != n_hidden && node->ne[0] != 2 * n_hidden)) {
                return false;
            }
            region.first_rows.push_back(region.program.add_row(node->ne[0]));
            rows_[node] = region.first_rows.back();
        }
        region.products.push_back(product);
        return true;
    }

    static int64_t width(const Region & region, int row) { return region.program.rows[static_cast<size_t>(row)].width; }

    bool touches_rows(const Tensor * node) const {
        for (const Tensor * source : node->src) {
            if (source && rows_.count(source)) {
                return true;
            }
        }
        return node->view_src && rows_.count(node->view_src);
    }

    int row_of(const Tensor * tensor) const {
        const auto found = tensor ? rows_.find(tensor) : rows_.end();
        return found == rows_.end() ? -1 : found->second;
    }

    // One node between the products as a step of the program; false when it is none.
    bool translate(const Tensor * node, Region & region) {
        if (node->type != kF32 || node->flags & host_.flag_output || node->ne[1] != region.n_places() ||
            node->ne[2] != region.n_tokens() || node->ne[3] != 1) {
            return false;
        }
        const int a = row_of(node->src[0]), b = row_of(node->src[1]);
        if (a < 0) {
            return false;
        }
        if (node->op == host_.op_view || node->op == host_.op_reshape) {
            return part(node, a, region);
        }
        if (node->view_src) {
            return false;  // in place: what it overwrites may be wanted
        }
        Program & program = region.program;
        Instruction step;
        step.a = a;
        step.b = b;
        const int64_t wide = width(region, a);
        if (node->op == host_.op_glu) {
            return gate(node, step, region);
        }
        if (node->op == host_.op_unary) {
            step.act = host_.act_of(node);
        } else if (node->op == host_.op_sqr) {
            step.act = Act::kSquare;
        } else if (node->op == host_.op_scale || node->op == host_.op_clamp) {
            step.act = node->op == host_.op_scale ? Act::kScale : Act::kClamp;
            step.first = float_param(node, 0);
            step.second = float_param(node, 1);
        } else if ((node->op == host_.op_add || node->op == host_.op_mul) && b >= 0 && width(region, b) == wide) {
            step.act = node->op == host_.op_add ? Act::kAdd : Act::kMul;
        } else if (node->op == host_.op_add_id && is_bias(node, wide, region)) {
            step.act = Act::kBias;
            step.bias = store_.bias(*region.group, node->src[1])->data();
        }
        if (step.act == Act::kUnknown || node->ne[0] != wide || (b >= 0) != (step.act == Act::kAdd || step.act == Act::kMul)) {
            return false;
        }
        step.to = rows_[node] = program.add_row(wide);
        program.steps.push_back(step);
        return true;
    }

    bool is_bias(const Tensor * node, int64_t wide, const Region & region) const {
        const Tensor * bias = node->src[1];
        return node->src[2] == region.ids && bias && bias->type == kF32 && bias->ne[0] == wide &&
               bias->ne[1] == region.group->n_experts && bias->nb[1] == static_cast<size_t>(wide) * sizeof(float) &&
               bias->buffer && bias->buffer->usage == kUsageWeights && !store_.owns(bias);
    }

    bool part(const Tensor * node, int a, Region & region) {
        const Tensor * of = node->src[0];
        const size_t base = of->view_src ? of->view_offs : 0;
        if (node->nb[1] != of->nb[1] || node->nb[2] != of->nb[2] || node->nb[0] != sizeof(float) || node->view_offs < base) {
            return false;
        }
        const auto from = static_cast<int64_t>((node->view_offs - base) / sizeof(float));
        if ((node->view_offs - base) % sizeof(float) || from + node->ne[0] > width(region, a)) {
            return false;
        }
        const int64_t n = region.program.n_hidden;
        if (from % n || (node->ne[0] != n && node->ne[0] != width(region, a))) {
            return false;  // values of one place in the row must stay together
        }
        rows_[node] = region.program.add_part(a, from, node->ne[0]);
        return true;
    }

    bool gate(const Tensor * node, Instruction & step, Region & region) {
        Program & program = region.program;
        const int64_t n = program.n_hidden;
        step.act = host_.act_of(node);
        if (step.act == Act::kUnknown || node->ne[0] != n) {
            return false;
        }
        if (step.act == Act::kSwigluOai) {
            if (host_.oai_alpha < 0 || host_.oai_limit < 0) {
                return false;
            }
            step.first = float_param(node, host_.oai_alpha);
            step.second = float_param(node, host_.oai_limit);
        } else if (step.act == Act::kSwigluClamp) {
            if (host_.clamp_limit < 0) {
                return false;
            }
            step.second = float_param(node, host_.clamp_limit);
        }
        if (!node->src[1]) {
            if (width(region, step.a) != 2 * n) {
                return false;
            }
            const int halves[2] = {program.add_part(step.a, 0, n), program.add_part(step.a, n, n)};
            const int swapped = node->op_params[1] ? 1 : 0;
            step.a = halves[swapped];
            step.b = halves[1 - swapped];
        } else if (step.b < 0 || width(region, step.a) != n || width(region, step.b) != n) {
            return false;
        }
        step.to = rows_[node] = program.add_row(n);
        program.steps.push_back(step);
        return true;
    }

    // The rows of choices that the CPU computes are not right on the device: nothing else may read them.
    bool only_used_inside(const Region & region) const {
        std::map<const Tensor *, int> used;
        for (int j = region.begin; j < region.end; j++) {
            for (const Tensor * source : graph_->nodes[j]->src) {
                if (source) {
                    used[source]++;
                }
            }
        }
        return std::all_of(rows_.begin(), rows_.end(), [&](const auto & row) {
            return host_.uses(graph_, row.first) == used[row.first];
        });
    }

    Store & store_;
    const Host & host_;
    Graph * graph_;
    std::map<const Tensor *, int> rows_;  // tensors of the region's hidden values -> rows of its program
};

}  // namespace

bool is_paged(const Region & region) {
    return std::any_of(region.products.begin(), region.products.end(), [](const Product & product) { return !product.matrix->home->locked(); });
}

std::unique_ptr<Plan> make_plan(Store & store, Graph * graph, std::string & fault) {
    return Builder(store, graph).build(fault);
}

}  // namespace hybrid
