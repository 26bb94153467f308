// Which experts should have slots: scores by what the router chose, and exchanges while bytes are left to upload.
// Whole numbers and no clock: planner/routing/residency.py replays the same.
#pragma once

#include <cstdint>
#include <vector>

#include "route.h"

namespace hybrid {

enum class Policy {
    kStatic,    // the seed stays
    kLru,       // used last
    kLfu,       // used most, counts fading
    kSchedule,  // as told, for tests
};

// At a step of a block, an expert takes the place of what is in a slot.
struct Move {
    int64_t step;
    int block;
    int32_t expert, slot;
};

struct Adaptation {
    Policy policy = Policy::kStatic;
    int half_life = 64;        // tokens, in which a count fades to a half
    int protect = 0;           // first experts of the seed, which never leave
    int64_t upload_bytes = 0;  // a block and step; saved up until they are an expert's
    int64_t refill_bytes = 0;  // a block, once after a prompt
    int least_misses = 0;      // > 0: on demand, in steps that miss so many experts
    bool lockstep = false;     // a step waits for what was sent in the one before, so that counts can be told
    std::vector<Move> moves;   // of the schedule
};

struct Admission {
    int32_t expert, slot;
};

// One block's scores.
//
// On demand (`least_misses`) an expert comes only in a step that misses it, and where the step misses so many that the bus
// would bring some in any case, a guest that stays; where fewer are missed, two uses ahead of who goes. And the seed has a
// rival: a ghost, tables without bytes, follows at every time. While the seed serves more than the ghost, the slots go back
// to the seed, also on demand.
class Scores {
  public:
    // `seed`: experts in the order of their slots, the hottest first.
    Scores(const Adaptation & how, int block, int32_t n_experts, const std::vector<int32_t> & seed);

    // What a step chose, of the experts in `slot_of`. Afterwards next() tells who comes and who goes, one after the other.
    void step(const Choices & choices, int64_t expert_bytes, const std::vector<int32_t> & slot_of);
    // What the step leaves for when nobody waits: the ghost's exchanges, which nothing that next() says hangs on. The next
    // step makes up for it where nobody did.
    void rest();

    // `slot_of` by expert, `expert_in` by slot; negative: none. `sent` by expert: on its way into a slot.
    bool next(const std::vector<int32_t> & slot_of, const std::vector<int32_t> & expert_in, const std::vector<char> & sent,
              Admission & found);

    bool spent() const;  // whether next() finds nothing for want of bytes

  private:
    struct Ghost {
        std::vector<int32_t> slot_of, expert_in;
        std::vector<char> sent;  // nobody
        int64_t credit = 0;
    };

    void touch(const Choices & choices, int64_t token, int64_t moment);
    void earn(int64_t & credit) const;
    int64_t missed(const std::vector<int32_t> & slot_of) const;
    bool chosen(size_t expert) const { return chosen_at_[expert] == step_ - 1; }
    int64_t least_lead() const;  // by how much a score must be above another, where a step misses few
    void duel(const Choices & choices);
    // `back`: to the seed, and if many are missed whatever the scores say.
    bool best(const std::vector<int32_t> & slot_of, const std::vector<int32_t> & expert_in, const std::vector<char> & sent, int64_t n_missed,
              bool back, Admission & found) const;
    bool scheduled(const std::vector<int32_t> & slot_of, const std::vector<int32_t> & expert_in, const std::vector<char> & sent,
                   Admission & found);

    const Adaptation & how_;
    const int block_;
    std::vector<int64_t> scores_, gains_;
    std::vector<char> fixed_, seeded_;  // by expert: of the seed, and protected; of the seed
    std::vector<int64_t> chosen_at_;  // by expert: step that chose it last
    std::vector<int32_t> chosen_;     // by the step in hand, each once
    int64_t n_halved_ = 0, last_gain_ = 0;  // of the scores; of the token that came last
    int64_t tick_ = 0, step_ = 0, credit_ = 0, expert_bytes_ = 0;
    size_t move_ = 0;
    bool open_ = false;  // whether this step may exchange
    int64_t n_missed_ = 0;  // experts that it chose and that had no slot
    Ghost ghost_;
    int64_t lead_ = 0;   // choices that the seed served and the ghost did not, fading
    bool back_ = false;  // whether the slots go back to the seed
    bool rests_ = true;  // whether the ghost has made its exchanges
};

}  // namespace hybrid
