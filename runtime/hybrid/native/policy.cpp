#include "policy.h"

#include <algorithm>
#include <cmath>

namespace hybrid {

namespace {

constexpr int64_t kOne = 1 << 16;            // a use, at the beginning of a half-life
constexpr int64_t kNever = -(int64_t{1} << 62);
constexpr int64_t kPlaces = 1 << 10;         // of a token, at most
constexpr int64_t kPrompt = 16;              // tokens: longer steps are prompts, after which slots are refilled
constexpr int kSpan = 8;                     // 2^8 tokens are what seed and ghost are compared over
constexpr int kLead = 7;                     // a choice in 2^7 more by the seed: the slots go back to it
constexpr int64_t kUses = 2;                 // ahead of who goes, where a step misses few

}  // namespace

Scores::Scores(const Adaptation & how, int block, int32_t n_experts, const std::vector<int32_t> & seed)
    : how_(how), block_(block) {
    const auto n = static_cast<size_t>(n_experts), count = seed.size();
    scores_.assign(n, how.policy == Policy::kLfu ? 0 : kNever);
    fixed_.assign(n, 0);
    seeded_.assign(n, 0);
    chosen_at_.assign(n, -1);
    chosen_.reserve(n);
    for (int t = 0; t < how.half_life; t++) {
        gains_.push_back(std::llround(static_cast<double>(kOne) * std::exp2(static_cast<double>(t) / how.half_life)));
    }
    for (size_t rank = 0; rank < count; rank++) {
        if (seed[rank] < 0) {
            continue;
        }
        const auto expert = static_cast<size_t>(seed[rank]);
        fixed_[expert] = rank < static_cast<size_t>(how.protect);
        seeded_[expert] = 1;
        scores_[expert] = how.policy == Policy::kLfu
                              ? kOne * how.half_life / 8 * static_cast<int64_t>(count - rank) / static_cast<int64_t>(count)
                              : -1 - static_cast<int64_t>(rank);
    }
    if (how.least_misses) {
        ghost_.slot_of.assign(n, -1);
        ghost_.sent.assign(n, 0);
        ghost_.expert_in = seed;
        for (size_t slot = 0; slot < count; slot++) {
            if (seed[slot] >= 0) {
                ghost_.slot_of[static_cast<size_t>(seed[slot])] = static_cast<int32_t>(slot);
            }
        }
    }
}

void Scores::step(const Choices & choices, int64_t expert_bytes, const std::vector<int32_t> & slot_of) {
    rest();
    expert_bytes_ = expert_bytes;
    chosen_.clear();
    open_ = choices.n_tokens <= kPrompt;
    for (int64_t t = 0; t < choices.n_tokens; t++) {
        touch(choices, t, open_ ? tick_ : tick_ + t);
    }
    tick_ += choices.n_tokens;
    step_++;
    if (!open_) {
        credit_ = std::max(credit_, how_.refill_bytes);
        return;
    }
    earn(credit_);
    if (how_.least_misses) {
        duel(choices);
        n_missed_ = missed(slot_of);
    }
}

void Scores::earn(int64_t & credit) const {
    const int64_t most = std::max(how_.upload_bytes, expert_bytes_);
    credit = std::max(credit, std::min(credit + how_.upload_bytes, most));
}

// Of what the step chose, the experts that have no slot.
int64_t Scores::missed(const std::vector<int32_t> & slot_of) const {
    return std::count_if(chosen_.begin(), chosen_.end(), [&](int32_t expert) { return slot_of[static_cast<size_t>(expert)] < 0; });
}

// What the step says of seed and ghost.
void Scores::duel(const Choices & choices) {
    for (int64_t t = 0; t < choices.n_tokens; t++) {
        int64_t ahead = 0;
        for (int64_t p = 0; p < choices.n_places; p++) {
            const auto expert = static_cast<size_t>(choices.at(t, p));
            ahead += seeded_[expert] - (ghost_.slot_of[expert] >= 0);
        }
        lead_ += ahead * kOne - (lead_ >> kSpan);
    }
    back_ = lead_ > (back_ ? 0 : choices.n_places * (kOne << (kSpan - kLead)));
    rests_ = false;
}

void Scores::rest() {
    if (rests_) {
        return;
    }
    rests_ = true;
    earn(ghost_.credit);
    const int64_t n_missed = missed(ghost_.slot_of);
    Admission found{};
    while (ghost_.credit >= expert_bytes_ && best(ghost_.slot_of, ghost_.expert_in, ghost_.sent, n_missed, false, found)) {
        int32_t & there = ghost_.expert_in[static_cast<size_t>(found.slot)];
        ghost_.slot_of[static_cast<size_t>(there)] = -1;
        ghost_.slot_of[static_cast<size_t>(found.expert)] = found.slot;
        there = found.expert;
        ghost_.credit -= expert_bytes_;
    }
}

// Tokens that are decoded together are of one moment, or the sequence that comes last in every step would crowd out the
// others: what it chose would be the most recent, and count most.
void Scores::touch(const Choices & choices, int64_t token, int64_t moment) {
    const int64_t t = moment % how_.half_life;
    for (; how_.policy == Policy::kLfu && n_halved_ < moment / how_.half_life; n_halved_++) {
        for (int64_t & score : scores_) {
            score >>= 1;
        }
    }
    for (int64_t p = 0; p < choices.n_places; p++) {
        const auto expert = static_cast<size_t>(choices.at(token, p));
        if (chosen_at_[expert] != step_) {
            chosen_at_[expert] = step_;
            chosen_.push_back(static_cast<int32_t>(expert));
        }
        if (how_.policy == Policy::kLru) {
            scores_[expert] = moment * kPlaces + kPlaces - 1 - p;
        } else if (how_.policy == Policy::kLfu) {
            scores_[expert] += gains_[static_cast<size_t>(t)];
        }
    }
    last_gain_ = gains_[static_cast<size_t>(t)];
}

bool Scores::spent() const { return credit_ < expert_bytes_; }

bool Scores::next(const std::vector<int32_t> & slot_of, const std::vector<int32_t> & expert_in, const std::vector<char> & sent,
                  Admission & found) {
    if (how_.policy == Policy::kSchedule) {
        return scheduled(slot_of, expert_in, sent, found);
    }
    if (!open_ || spent() || !best(slot_of, expert_in, sent, n_missed_, back_, found)) {
        return false;
    }
    credit_ -= expert_bytes_;
    return true;
}

int64_t Scores::least_lead() const {
    return how_.policy == Policy::kLfu ? kUses * last_gain_ : -kNever;
}

// This stands between the choices and the device's work: on demand only the step's few choices may come, and most
// steps miss none. Of equal scores the lowest number is taken, in whatever order they are met.
bool Scores::best(const std::vector<int32_t> & slot_of, const std::vector<int32_t> & expert_in, const std::vector<char> & sent,
                  int64_t n_missed, bool back, Admission & found) const {
    int64_t best = kNever, least = -kNever;
    const auto comes = [&](size_t e) {
        const auto expert = static_cast<int32_t>(e);
        if (slot_of[e] < 0 && !sent[e] && !(back && !seeded_[e]) &&
            (scores_[e] > best || (scores_[e] == best && best != kNever && expert < found.expert))) {
            best = scores_[e];
            found.expert = expert;
        }
    };
    if (how_.least_misses) {
        std::for_each(chosen_.begin(), chosen_.end(), [&](int32_t expert) { comes(static_cast<size_t>(expert)); });
    } else {
        for (size_t e = 0; e < scores_.size(); e++) {
            comes(e);
        }
    }
    if (best == kNever) {
        return false;
    }
    // What this step chose stays, and is not read elsewhere before its next.
    int32_t goes = 0;
    for (const int32_t expert : expert_in) {
        const auto e = static_cast<size_t>(expert);
        if (expert >= 0 && (scores_[e] < least || (scores_[e] == least && expert < goes)) && !fixed_[e] && !chosen(e) &&
            !(back && seeded_[e])) {
            least = scores_[e];
            goes = expert;
        }
    }
    if (least == -kNever) {
        return false;
    }
    found.slot = slot_of[static_cast<size_t>(goes)];
    const bool many = n_missed >= how_.least_misses;
    return (back && many) || best - least > (many ? 0 : least_lead());
}

// Moves of the steps so far, in their order; what cannot be made is left out.
bool Scores::scheduled(const std::vector<int32_t> & slot_of, const std::vector<int32_t> & expert_in, const std::vector<char> & sent,
                       Admission & found) {
    for (; move_ < how_.moves.size() && how_.moves[move_].step < step_; move_++) {
        const Move & move = how_.moves[move_];
        if (move.block != block_) {
            continue;
        }
        const auto expert = static_cast<size_t>(move.expert), slot = static_cast<size_t>(move.slot);
        if (expert < slot_of.size() && slot < expert_in.size() && slot_of[expert] < 0 && !sent[expert] && expert_in[slot] >= 0 &&
            move.step == step_ - 1) {
            found = Admission{move.expert, move.slot};
            move_++;
            return true;
        }
    }
    return false;
}

}  // namespace hybrid
