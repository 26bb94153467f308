#include "route.h"

#include <algorithm>

namespace hybrid {

void Routing::clear() {
    bank = Bank::kSlots;
    device = guests = false;
    positions.clear();
    uploads.clear();
    pairs.clear();
    n_hits = n_uploaded = n_cpu = 0;
    row_hits.fill(0);
}

std::string Router::route(const Choices & choices, const Table & table, const Costs & costs, Routing & result) {
    result.clear();
    std::string fault = count(choices, table);
    if (!fault.empty()) {
        return fault;
    }
    choose(choices, table, costs, result);
    place(choices, table, result);
    return result.n_cpu && !table.cpu ? "neither slots nor the CPU can compute a chosen expert" : "";
}

// How many choices name each expert; the experts without a slot, the most wanted first.
std::string Router::count(const Choices & choices, const Table & table) {
    const auto n = static_cast<size_t>(table.n_experts);
    n_pairs_.assign(n, 0);
    last_token_.assign(n, -1);
    for (int64_t t = 0; t < choices.n_tokens; t++) {
        for (int64_t p = 0; p < choices.n_places; p++) {
            const int32_t expert = choices.at(t, p);
            if (expert < 0 || expert >= table.n_experts) {
                return "expert " + std::to_string(expert) + " was chosen of " + std::to_string(table.n_experts);
            }
            n_pairs_[static_cast<size_t>(expert)]++;
        }
    }
    cold_.clear();
    for (int32_t expert = 0; expert < table.n_experts; expert++) {
        const auto e = static_cast<size_t>(expert);
        if (n_pairs_[e] && (*table.slot_of)[e] < 0) {
            cold_.push_back(Cold{expert, n_pairs_[e], slot_for(table, expert)});
        }
    }
    // Who gets a slot comes first: what the bus brings there need not be brought again.
    std::sort(cold_.begin(), cold_.end(), [](const Cold & a, const Cold & b) {
        if ((a.slot < 0) != (b.slot < 0)) {
            return b.slot < 0;
        }
        return a.n_pairs != b.n_pairs ? a.n_pairs > b.n_pairs : a.expert < b.expert;
    });
    return "";
}

int32_t Router::slot_for(const Table & table, int32_t expert) {
    for (size_t i = 0; table.coming && i < table.coming->size(); i++) {
        if ((*table.coming)[i].expert == expert) {
            return (*table.coming)[i].slot;
        }
    }
    return -1;
}

std::string Router::rename(const Choices & choices, const Table & table, Routing & result, bool & repeated) {
    result.clear();
    const std::string fault = count(choices, table);
    if (!fault.empty()) {
        return fault;
    }
    position_ = *table.slot_of;
    int32_t next = table.n_slots;
    for (int32_t & position : position_) {
        position = position < 0 ? next++ : position;
    }
    result.bank = Bank::kStage;
    result.device = true;
    result.positions.resize(static_cast<size_t>(choices.n_places * choices.n_tokens));
    for (int64_t t = 0, i = 0; t < choices.n_tokens; t++) {
        for (int64_t p = 0; p < choices.n_places; p++, i++) {
            const auto e = static_cast<size_t>(choices.at(t, p));
            repeated = repeated || last_token_[e] == t;
            last_token_[e] = t;
            result.positions[static_cast<size_t>(i)] = position_[e];
            position_[e] < table.n_slots ? result.hit(t) : void(result.n_uploaded++);
        }
    }
    return "";
}

int Router::cold_used(const Table & table) const {
    const int64_t n_cold = table.n_experts - table.n_slots;
    return n_cold ? static_cast<int>(static_cast<int64_t>(cold_.size()) * 1000 / n_cold) : 1000;
}

// Where the device finds each expert: slots, guests beside them, or the stage when that ends sooner.
void Router::choose(const Choices & choices, const Table & table, const Costs & costs, Routing & result) {
    int64_t rest = 0;  // choices left to the CPU
    for (const Cold & cold : cold_) {
        rest += cold.n_pairs;
    }
    const auto n_cold = static_cast<int64_t>(cold_.size());
    const auto n_bank = static_cast<int64_t>(table.n_slots) - table.n_empty + table.n_guests;
    const bool slots_work = table.may_repeat ? n_bank > 0 : n_bank >= choices.n_places;
    const int64_t never = INT64_MAX;
    int64_t best = never, n_brought = 0;
    int64_t left = rest;
    const auto n_coming = std::count_if(cold_.begin(), cold_.end(), [](const Cold & cold) { return cold.slot >= 0; });
    const int64_t least = table.brings_coming && slots_work ? n_coming : 0;
    for (int64_t n = 0; n <= std::min<int64_t>(n_cold, slots_work ? table.n_guests + n_coming : 0); n++) {
        const int64_t cpu = left ? costs.cpu_start + left * costs.cpu_pair : 0;
        const int64_t bus = n ? costs.bus_start + n * costs.bus_expert : 0;
        const int64_t ends = std::max(cpu, bus + costs.device);
        if (n >= least && (table.cpu || left == 0) && ends < best) {
            best = ends;
            n_brought = n;
        }
        left -= n < n_cold ? cold_[static_cast<size_t>(n)].n_pairs : 0;
    }
    if (!slots_work && table.cpu) {
        best = choices.n_places * choices.n_tokens * costs.cpu_pair;
    } else if (!slots_work) {
        best = never;
    }
    const int64_t n_staged = table.n_slots + n_cold;
    const bool stage_works = n_staged <= table.n_stage && (table.may_repeat || table.n_stage - table.n_empty >= choices.n_places);
    if (stage_works && n_cold * costs.bus_expert + costs.stage < best) {
        result.bank = Bank::kStage;
        n_brought = n_cold;
        // Neighbours in the file are neighbours there, and come in one copy.
        std::sort(cold_.begin(), cold_.end(), [](const Cold & a, const Cold & b) { return a.expert < b.expert; });
    }
    result.device = slots_work || result.bank == Bank::kStage;
    position_.assign(static_cast<size_t>(table.n_experts), -1);
    if (!result.device) {
        return;
    }
    for (int32_t expert = 0; expert < table.n_experts; expert++) {
        position_[static_cast<size_t>(expert)] = (*table.slot_of)[static_cast<size_t>(expert)];
    }
    int32_t next = table.n_slots;
    for (int64_t n = 0; n < n_brought; n++) {
        const Cold & cold = cold_[static_cast<size_t>(n)];
        const int32_t position = cold.slot >= 0 && result.bank == Bank::kSlots ? cold.slot : next++;
        result.uploads.push_back(Upload{cold.expert, position});
        position_[static_cast<size_t>(cold.expert)] = position;
    }
}

// Every choice a position of its own within its token; what has none is the CPU's, and computed to be overwritten.
void Router::place(const Choices & choices, const Table & table, Routing & result) {
    const int32_t bank_size = result.bank == Bank::kStage ? table.n_stage : table.n_slots + table.n_guests;
    result.positions.assign(static_cast<size_t>(choices.n_places * choices.n_tokens), -1);
    taken_.assign(static_cast<size_t>(std::max(bank_size, 1)), -1);
    bool any = false;
    for (int64_t t = 0; t < choices.n_tokens; t++) {
        int32_t * positions = result.positions.data() + t * choices.n_places;
        for (int64_t p = 0; p < choices.n_places; p++) {
            const int32_t expert = choices.at(t, p);
            const auto e = static_cast<size_t>(expert);
            const int32_t position = position_[e];
            const bool again = !table.may_repeat && last_token_[e] == t;
            last_token_[e] = t;
            if (position < 0 || again) {
                result.pairs.push_back(Pair{expert, static_cast<int32_t>(t), static_cast<int32_t>(p), 0, 0});
                continue;
            }
            positions[p] = position;
            taken_[static_cast<size_t>(position)] = t;
            favourite_ = position;
            any = true;
            (*table.slot_of)[e] >= 0 ? result.hit(t) : void(result.n_uploaded++);
        }
        cursor_ = 0;
        for (int64_t p = 0; result.device && p < choices.n_places; p++) {
            if (positions[p] < 0) {
                positions[p] = spare(table, t);
            }
        }
        favourite_ = -1;
    }
    result.device = result.device && any;
    // Also for a choice that only keeps a place: its row is overwritten, but it is read.
    result.guests = result.device && result.bank == Bank::kSlots &&
                    std::any_of(result.positions.begin(), result.positions.end(), [&](int32_t p) { return p >= table.n_slots; });
    result.n_cpu = static_cast<int64_t>(result.pairs.size());
    std::sort(result.pairs.begin(), result.pairs.end(), [](const Pair & a, const Pair & b) {
        return a.expert != b.expert ? a.expert < b.expert : a.token != b.token ? a.token < b.token : a.place < b.place;
    });
}

// A position for a choice whose row will be overwritten: one that the token reads anyway, or one of its own.
int32_t Router::spare(const Table & table, int64_t token) {
    if (table.may_repeat && favourite_ >= 0) {
        return favourite_;
    }
    const auto empty = [&](int32_t position) {
        return table.expert_in && position < table.n_slots && (*table.expert_in)[static_cast<size_t>(position)] < 0;
    };
    const auto n_bank = static_cast<int32_t>(taken_.size());
    while (cursor_ < n_bank && (taken_[static_cast<size_t>(cursor_)] == token || empty(cursor_))) {
        cursor_++;
    }
    if (table.may_repeat) {
        return cursor_;
    }
    taken_[static_cast<size_t>(cursor_)] = token;
    return cursor_;
}

}  // namespace hybrid
