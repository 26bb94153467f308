#include "orders.h"

#include <climits>
#include <sstream>

#include "say.h"
#include "store.h"

namespace hybrid {

namespace {

constexpr size_t kMost = 16 << 20;  // bytes: 512 layers of 4096 experts take less

}  // namespace

bool parse_order(const std::string & text, Order & order, std::string & error) {
    order = Order();
    std::stringstream lines(text);
    std::string line;
    bool ended = false;
    for (int number = 1; std::getline(lines, line); number++) {
        std::stringstream parts(line);
        std::vector<std::string> words;
        for (std::string word; parts >> word;) {
            words.push_back(word);
        }
        const bool first = number == 1 && words.size() == 2 && words[0] == "order" && parse_whole(words[1], 1, LLONG_MAX, order.number);
        const bool last = !ended && order.number && words.size() == 1 && words[0] == "end";
        // Guests stay as many as there are: their memory is part of the slots'.
        const bool residents = !ended && order.number && words.size() == 4;
        if (!first && !last && !(residents && parse_resident(words, order.residents))) {
            error = "line " + std::to_string(number) + " is not understood";  // not shown: it may be anything
            return false;
        }
        ended = ended || last;
    }
    error = ended ? "" : "it has no end";
    return ended;
}

bool Orders::look(Order & order) {
    std::string text, fault;
    if (!read_private(path_, kMost, seen_, text, fault)) {
        if (!fault.empty()) {
            done(0, fault);
        }
        return false;
    }
    if (!parse_order(text, order, fault)) {
        done(0, fault);
        return false;
    }
    return true;
}

void Orders::done(int64_t number, const std::string & fault) {
    std::lock_guard<std::mutex> lock(mutex_);
    number_ = number ? number : number_;
    fault_ = fault;
}

std::string Orders::report() {
    std::lock_guard<std::mutex> lock(mutex_);
    return "\"order\":" + std::to_string(number_) + ",\"order_fault\":" + quoted(fault_);
}

// ---- of the store

void Store::follow_orders() noexcept {
    try {
        Order order;
        if (!config.orders.empty() && orders_.look(order)) {
            orders_.done(order.number, obey(order.residents));
        }
    } catch (const std::exception &) {
        voice.lacks("an order");
    }
}

// Blocks one after the other: a step waits for one block's experts at most, and is right with any of them in slots.
std::string Store::obey(const std::vector<Resident> & residents) {
    for (const Resident & line : residents) {
        const Resident * now = resident_of(config.residents, line.block, line.n_experts);
        if (!now || now->experts.size() != line.experts.size()) {
            const std::string there = std::to_string(now ? now->experts.size() : 0) + " slots";
            return "block " + std::to_string(line.block) + ": " + std::to_string(line.experts.size()) + " experts for " + there;
        }
    }
    struct Named {
        int model, block;
        std::string kind;
        const std::vector<int32_t> * experts;
    };
    std::vector<Named> changed;
    {
        Change change(gate);
        ordered_ = residents;  // of models that are loaded later too
        for (const auto & model : models_) {
            for (const auto & group : model->groups) {
                if (const Resident * line = resident_of(ordered_, group->block, group->n_experts)) {
                    changed.push_back(Named{model->number, group->block, group->kind, &line->experts});
                }
            }
        }
    }
    // A model that goes meanwhile has no blocks any more: nothing is left to do for it.
    for (const Named & each : changed) {
        (void)set_residents(each.model, each.block, each.kind, *each.experts);
    }
    return "";
}

}  // namespace hybrid
