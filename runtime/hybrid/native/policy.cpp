#include "policy.h"

#include <algorithm>
#include <cmath>

namespace hybrid {

namespace {

constexpr int64_t kOne = 1 << 16;            // a use, at the beginning of a half-life
constexpr int64_t kNever = -(int64_t{1} << 62);
constexpr int64_t kPlaces = 1 << 10;         // of a token, at most
constexpr int64_t kPrompt = 16;              // tokens: longer steps are prompts, after which slots are refilled

}  // namespace

Scores::Scores(const Adaptation & how, int block, int32_t n_experts, const std::vector<int32_t> & seed)
    : how_(how), block_(block) {
    const auto n = static_cast<size_t>(n_experts), count = seed.size();
    scores_.assign(n, how.policy == Policy::kLfu ? 0 : kNever);
    fixed_.assign(n, 0);
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
        scores_[expert] = how.policy == Policy::kLfu
                              ? kOne * how.half_life / 8 * static_cast<int64_t>(count - rank) / static_cast<int64_t>(count)
                              : -1 - static_cast<int64_t>(rank);
    }
}

void Scores::step(const Choices & choices, int64_t expert_bytes) {
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
    const int64_t most = std::max(how_.upload_bytes, expert_bytes);
    credit_ = std::max(credit_, std::min(credit_ + how_.upload_bytes, most));
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
    if (!open_ || spent()) {
        return false;
    }
    int64_t best = kNever, least = -kNever;
    for (size_t e = 0; e < scores_.size(); e++) {
        if (slot_of[e] < 0 && !sent[e] && scores_[e] > best) {
            best = scores_[e];
            found.expert = static_cast<int32_t>(e);
        }
        // What this step chose stays, and is not read elsewhere before its next.
        if (slot_of[e] >= 0 && !fixed_[e] && chosen_at_[e] != step_ - 1 && scores_[e] < least) {
            least = scores_[e];
            found.slot = slot_of[e];
        }
    }
    if (best == kNever || least == -kNever || best <= least) {
        return false;
    }
    credit_ -= expert_bytes_;
    return true;
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
