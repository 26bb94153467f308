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
    expert_bytes_ = expert_bytes;
    for (int64_t t = 0; t < choices.n_tokens; t++) {
        touch(choices, t);
    }
    step_++;
    open_ = choices.n_tokens <= kPrompt;
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
    int64_t found = 0;
    for (size_t e = 0; e < slot_of.size(); e++) {
        found += chosen_at_[e] == step_ - 1 && slot_of[e] < 0;
    }
    return found;
}

// What the step says of seed and ghost; then the ghost's own exchanges.
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
    earn(ghost_.credit);
    const int64_t n_missed = missed(ghost_.slot_of);
    Admission found{};
    while (ghost_.credit >= expert_bytes_ && best(ghost_.slot_of, ghost_.sent, n_missed, false, found)) {
        int32_t & there = ghost_.expert_in[static_cast<size_t>(found.slot)];
        ghost_.slot_of[static_cast<size_t>(there)] = -1;
        ghost_.slot_of[static_cast<size_t>(found.expert)] = found.slot;
        there = found.expert;
        ghost_.credit -= expert_bytes_;
    }
}

void Scores::touch(const Choices & choices, int64_t token) {
    const int64_t t = tick_ % how_.half_life;
    if (how_.policy == Policy::kLfu && t == 0 && tick_) {
        for (int64_t & score : scores_) {
            score >>= 1;
        }
    }
    for (int64_t p = 0; p < choices.n_places; p++) {
        const auto expert = static_cast<size_t>(choices.at(token, p));
        chosen_at_[expert] = step_;
        if (how_.policy == Policy::kLru) {
            scores_[expert] = tick_ * kPlaces + kPlaces - 1 - p;
        } else if (how_.policy == Policy::kLfu) {
            scores_[expert] += gains_[static_cast<size_t>(t)];
        }
    }
    tick_++;
}

bool Scores::spent() const { return credit_ < expert_bytes_; }

bool Scores::next(const std::vector<int32_t> & slot_of, const std::vector<int32_t> & expert_in, const std::vector<char> & sent,
                  Admission & found) {
    if (how_.policy == Policy::kSchedule) {
        return scheduled(slot_of, expert_in, sent, found);
    }
    if (!open_ || spent() || !best(slot_of, sent, n_missed_, back_, found)) {
        return false;
    }
    credit_ -= expert_bytes_;
    return true;
}

int64_t Scores::least_lead(int64_t n_missed, bool & many) const {
    many = n_missed >= how_.least_misses;
    if (many) {
        return 0;
    }
    return how_.policy == Policy::kLfu ? kUses * gains_[static_cast<size_t>((tick_ - 1) % how_.half_life)] : -kNever;
}

bool Scores::best(const std::vector<int32_t> & slot_of, const std::vector<char> & sent, int64_t n_missed, bool back, Admission & found) const {
    int64_t best = kNever, least = -kNever;
    for (size_t e = 0; e < scores_.size(); e++) {
        const bool chosen = chosen_at_[e] == step_ - 1;
        const bool comes = (!how_.least_misses || chosen) && (!back || seeded_[e]);
        if (slot_of[e] < 0 && !sent[e] && comes && scores_[e] > best) {
            best = scores_[e];
            found.expert = static_cast<int32_t>(e);
        }
        // What this step chose stays, and is not read elsewhere before its next.
        if (slot_of[e] >= 0 && !fixed_[e] && !chosen && !(back && seeded_[e]) && scores_[e] < least) {
            least = scores_[e];
            found.slot = slot_of[e];
        }
    }
    if (best == kNever || least == -kNever) {
        return false;
    }
    bool many = false;
    const int64_t lead = least_lead(n_missed, many);
    return (back && many) || best - least > lead;
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
