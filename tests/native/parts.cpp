// Parts by themselves: settings, names, the division of choices, the pool, scores.
#include <algorithm>
#include <cmath>
#include <set>
#include <thread>

#include "bench.h"

namespace trial {

namespace {

void reads_settings() {
    std::vector<Config> found;
    std::string error;
    CHECK(parse_config("# a comment\nslots 3\nguests 2\nmemory mapped\nresident 4 8 7,0,3\nresident 5 8 -\n", found, error));
    CHECK(found.size() == 1 && found[0].slots == 3 && found[0].guests == 2 && found[0].memory == hybrid::Memory::kMapped);
    CHECK(resident_of(found[0].residents, 4, 8)->experts == (std::vector<int32_t>{7, 0, 3}));
    CHECK(resident_of(found[0].residents, 5, 8)->experts.empty() && !resident_of(found[0].residents, 4, 9));
    CHECK(resident_of(found[0].residents, 4, 8)->guests == -1);
    CHECK(parse_config("resident 4 8 7,0,3 0\nresident 5 8 - 3\n", found, error) && found[0].residents[0].guests == 0);
    CHECK(found[0].residents[1].guests == 3);
    CHECK(parse_config("device A\nslots 1\ndevice B\nreport /a folder/r.json\n", found, error));
    CHECK(found.size() == 2 && found[1].device == "B" && found[1].report == "/a folder/r.json" && found[1].slots == 0);
    CHECK(found[0].ring == -1 && parse_config("ring 1\nring_chunk 4096", found, error) && found[0].ring == 1 && found[0].ring_chunk == 4096);
    for (const char * wrong : {"ring 2", "ring", "ring_chunk 0", "slots", "slots x", "slots -1", "slots 3 4", "resident 1 8 8", "resident 1 8 1,1",
                               "resident 1 8 1,", "resident 1 8", "resident 1 8 1 -1", "resident 1 8 1 x", "resident 1 8 1 1 1", "least_misses -1",
                               "memory disk", "quiet yes", "unknown 1", "resident 1 8 1\nresident 1 8 2"}) {
        CHECK(!parse_config(wrong, found, error) && error.find("line ") == 0);
    }
}

void knows_names() {
    int block;
    std::string kind;
    Role role;
    CHECK(expert_name("blk.12.ffn_gate_up_exps.weight", block, kind, role) && block == 12 && kind == "exps" && role == Role::kGateUp);
    CHECK(expert_name("blk.0.ffn_down_chexps.weight", block, kind, role) && kind == "chexps" && role == Role::kDown);
    for (const char * other : {"blk.0.ffn_gate_exps.bias", "blk.0.ffn_gate_exps.scale", "blk.0.ffn_norm_exps.weight", "blk.0.ffn_gate.weight",
                               "blk.0.ffn_gate_exps.weight.lora_a", "output.weight", "blk.x.ffn_up_exps.weight", "blk.0.ffn_up_shexp.weight", ""}) {
        CHECK(!expert_name(other, block, kind, role));
    }
}

// Every choice goes to exactly one lane, and the device can do what it is given.
void divides_choices() {
    std::mt19937 dice(1);
    Router router;
    Routing made;
    for (int turn = 0; turn < 3000; turn++) {
        const auto n = static_cast<int32_t>(1 + dice() % 16);
        std::vector<int32_t> slot_of(static_cast<size_t>(n), -1);
        int32_t n_slots = 0;
        for (int32_t e = 0; e < n; e++) {
            slot_of[static_cast<size_t>(e)] = dice() % 2 ? n_slots++ : -1;
        }
        const int64_t tokens = 1 + dice() % 5, places = 1 + dice() % n;
        auto chosen = random_choices(dice, tokens, places, n, dice() % 2);
        Choices choices{reinterpret_cast<const char *>(chosen.data()), 4, static_cast<size_t>(places) * 4, places, tokens};
        Table table{&slot_of, n, n_slots, static_cast<int32_t>(dice() % 4), static_cast<int32_t>(dice() % 2 ? n : 0), true, tokens == 1 && dice() % 2};
        const Costs costs{static_cast<int64_t>(1 + dice() % 100), static_cast<int64_t>(1 + dice() % 100), static_cast<int64_t>(dice() % 50)};
        CHECK(router.route(choices, table, costs, made).empty());
        CHECK(made.n_hits + made.n_uploaded + made.n_cpu == tokens * places);
        CHECK(made.n_cpu == static_cast<int64_t>(made.pairs.size()));
        const int32_t bank = made.bank == Bank::kStage ? table.n_stage : table.n_slots + table.n_guests;
        std::vector<int32_t> where = slot_of;
        std::set<int32_t> used;
        for (const Upload & upload : made.uploads) {
            CHECK(upload.position >= table.n_slots && upload.position < bank && used.insert(upload.position).second);
            where[static_cast<size_t>(upload.expert)] = upload.position;
        }
        std::set<std::pair<int32_t, int32_t>> by_cpu;
        for (const Pair & pair : made.pairs) {
            CHECK(pair.expert == choices.at(pair.token, pair.place) && by_cpu.insert({pair.token, pair.place}).second);
        }
        for (int32_t t = 0; made.device && t < tokens; t++) {
            std::set<int32_t> taken;
            for (int32_t p = 0; p < places; p++) {
                const int32_t position = made.positions[static_cast<size_t>(t * places + p)];
                CHECK(position >= 0 && position < bank);
                CHECK(taken.insert(position).second || table.may_repeat);
                CHECK(by_cpu.count({t, p}) || position == where[static_cast<size_t>(choices.at(t, p))]);
            }
        }
        CHECK(made.device || made.n_cpu == tokens * places);
    }
    std::vector<int32_t> slot_of(4, -1), outside{0, 4};
    Choices choices{reinterpret_cast<const char *>(outside.data()), 4, 8, 2, 1};
    CHECK(router.route(choices, Table{&slot_of, 4, 0, 0, 0, true, false}, Costs{}, made) == "expert 4 was chosen of 4");
    outside[1] = 1;
    CHECK(!router.route(choices, Table{&slot_of, 4, 0, 0, 0, false, false}, Costs{}, made).empty());
    // An expert that gets a slot on demand is brought there, however slow the bus is.
    const std::vector<Coming> coming{{1, 1}};
    slot_of = {-1, -1, 0, 2};
    Table table{&slot_of, 4, 3, 1, 0, true, true};
    table.coming = &coming;
    for (const bool brings : {false, true}) {
        table.brings_coming = brings;
        CHECK(router.route(choices, table, Costs{1, 1000, 0}, made).empty() && made.uploads.size() == size_t{brings});
        CHECK(!brings || (made.uploads[0].expert == 1 && made.uploads[0].position == 1));
    }
}

class Counting : public Job {
  public:
    explicit Counting(int64_t n) : seen(static_cast<size_t>(n)) { n_chunks = n; }
    void chunk(int64_t index, int) override { seen[static_cast<size_t>(index)]++; }
    std::vector<std::atomic<int>> seen;
};

void shares_work() {
    Pool pool;
    std::vector<std::thread> callers;
    for (int caller = 0; caller < 3; caller++) {
        callers.emplace_back([&] {
            for (int turn = 0; turn < 60; turn++) {
                pool.rouse(9);  // more than there are cores
                for (int n : {0, 1, 7, 200}) {
                    Counting job(n);
                    pool.run(job, 9);
                    for (auto & each : job.seen) {
                        CHECK(each == 1);
                    }
                }
                pool.rest();
            }
        });
    }
    for (auto & caller : callers) {
        caller.join();
    }
}

// With bytes enough, the slots hold the experts that were used last; with a half-life that never ends, those used most.
void scores_are_kept() {
    std::mt19937 dice(3);
    for (const Policy policy : {Policy::kLru, Policy::kLfu}) {
        Adaptation how;
        how.policy = policy;
        how.half_life = 1 << 14;
        how.upload_bytes = 1 << 20;
        std::vector<int32_t> slot_of(16, -1), expert_in{3, 1, 2, 0, 9};
        for (size_t slot = 0; slot < expert_in.size(); slot++) {
            slot_of[static_cast<size_t>(expert_in[slot])] = static_cast<int32_t>(slot);
        }
        const std::vector<char> sent(16, 0);
        Scores scores(how, 0, 16, expert_in);
        std::vector<double> known(16, -1000.0);
        for (size_t rank = 0; rank < expert_in.size(); rank++) {
            const double start = policy == Policy::kLru ? -1.0 - static_cast<double>(rank) : (1 << 11) * (1.0 - static_cast<double>(rank) / 5);
            known[static_cast<size_t>(expert_in[rank])] = start;
        }
        for (int step = 0; step < 200; step++) {
            const auto ids = random_choices(dice, 1, 3, 16, true);
            scores.step(Choices{reinterpret_cast<const char *>(ids.data()), 4, 12, 3, 1}, 100, slot_of);
            for (size_t p = 0; p < 3; p++) {
                double & score = known[static_cast<size_t>(ids[p])];
                score = policy == Policy::kLru ? step * 10.0 + 9.0 - static_cast<double>(p) : std::max(score, 0.0) + std::exp2(step / 16384.0);
            }
            Admission found{};
            while (scores.next(slot_of, expert_in, sent, found)) {
                const auto slot = static_cast<size_t>(found.slot);
                CHECK(std::find(ids.begin(), ids.end(), expert_in[slot]) == ids.end());
                slot_of[static_cast<size_t>(expert_in[slot])] = -1;
                slot_of[static_cast<size_t>(found.expert)] = found.slot;
                expert_in[slot] = found.expert;
            }
            double least = 1e9, best = -1e9;
            for (size_t e = 0; e < 16; e++) {
                const bool chosen = std::find(ids.begin(), ids.end(), static_cast<int32_t>(e)) != ids.end();
                least = slot_of[e] >= 0 && !chosen ? std::min(least, known[e]) : least;
                best = slot_of[e] < 0 ? std::max(best, known[e]) : best;
            }
            CHECK(best <= least + 0.02);
        }
    }
}

// Four slots of sixteen experts, a hundred bytes each; one may come in a step.
class OnDemand {
  public:
    explicit OnDemand(int least_misses) : scores_(how(least_misses), 0, 16, expert_in) {
        for (int32_t slot = 0; slot < 4; slot++) {
            slot_of[static_cast<size_t>(slot)] = slot;
        }
    }

    int step(const std::vector<int32_t> & ids) {
        const auto n = static_cast<int64_t>(ids.size());
        scores_.step(Choices{reinterpret_cast<const char *>(ids.data()), 4, ids.size() * 4, n, 1}, 100, slot_of);
        Admission found{};
        int came = 0;
        for (; scores_.next(slot_of, expert_in, sent_, found); came++) {
            CHECK(std::find(ids.begin(), ids.end(), found.expert) != ids.end());
            CHECK(std::find(ids.begin(), ids.end(), expert_in[static_cast<size_t>(found.slot)]) == ids.end());
            slot_of[static_cast<size_t>(expert_in[static_cast<size_t>(found.slot)])] = -1;
            slot_of[static_cast<size_t>(found.expert)] = found.slot;
            expert_in[static_cast<size_t>(found.slot)] = found.expert;
        }
        return came;
    }

    std::vector<int32_t> slot_of = std::vector<int32_t>(16, -1), expert_in{0, 1, 2, 3};

  private:
    const Adaptation & how(int least_misses) {
        how_.policy = Policy::kLfu;
        how_.half_life = 8;
        how_.upload_bytes = 100;
        how_.least_misses = least_misses;
        return how_;
    }

    Adaptation how_;
    Scores scores_;
    const std::vector<char> sent_ = std::vector<char>(16, 0);
};

// An expert comes in a step that misses it and as many as asked for; the seed comes back where it serves more.
void experts_come_on_demand() {
    OnDemand slots(2);
    int steps = 1;
    for (; slots.step({0, 1, 9}) == 0 && steps < 20; steps++) {
    }
    CHECK(steps > 2 && steps < 20 && slots.slot_of[9] >= 0);  // missed alone: two uses ahead
    CHECK(slots.step({8, 9, 10}) == 1 && slots.slot_of[9] >= 0);  // two are missed: at once
    // Never the same again: what follows serves nothing, and the seed two of three.
    for (int step = 0; step < 400; step++) {
        const int32_t other = 4 + step * 5 % 12;
        slots.step(step % 3 ? std::vector<int32_t>{2, other, 4 + (other + 3) % 12} : std::vector<int32_t>{0, 1, 3});
    }
    int back = 0;
    for (size_t expert = 0; expert < 4; expert++) {
        back += slots.slot_of[expert] >= 0;
    }
    CHECK(back >= 3);  // the last of them may be missed alone
    // Another habit: the ghost is ahead at once, and the slots follow.
    for (int step = 0; step < 200; step++) {
        slots.step({8, 9, 10});
    }
    CHECK((slots.slot_of[8] >= 0) + (slots.slot_of[9] >= 0) + (slots.slot_of[10] >= 0) >= 2);
}

// A program's own words come before its environment.
void divided_tensors_are_refused() {
    const auto refused = [](std::vector<std::string> words, const char * environment) {
        return !divided_tensors(std::move(words), environment).empty();
    };
    CHECK(refused({"p", "-sm", "row"}, "") && refused({"p", "--split-mode", "tensor", "x"}, "layer") && refused({"p"}, "row"));
    CHECK(!refused({"p"}, "") && !refused({"p", "-sm", "layer"}, "row") && !refused({"p", "--split-mode", "none"}, "tensor"));
    CHECK(!refused({"p", "row"}, "layer"));
}

// A lane is measured at few moments, each once, and a stall in one of them is forgotten.
void paces_are_typical() {
    Pace pace;
    int due = 0;
    for (int step = 0; step < 60000; step++) {
        due += pace.is_due() ? 1 : 0;
        CHECK(step || due == 1);
    }
    CHECK(due == 5);
    CHECK(pace.typical({900, 40}).bytes_us == 40);  // all that is known
    CHECK(pace.typical({20, 108}).bytes_us == 108);
    CHECK(pace.typical({25, 78}).bytes_us == 78 && pace.typical({21, 103}).start_ns == 21);
    CHECK(pace.typical({700, 30}).bytes_us == 78);
    Pace shared;
    std::atomic<int> asked{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; i++) {
        threads.emplace_back([&] {
            for (int step = 0; step < 1000; step++) {
                asked += shared.is_due() ? 1 : 0;
            }
        });
    }
    for (auto & thread : threads) {
        thread.join();
    }
    CHECK(asked == 3);
}

}  // namespace

const Tests kParts = {
    {"paces_are_typical", paces_are_typical},
    {"divided_tensors_are_refused", divided_tensors_are_refused},
    {"reads_settings", reads_settings},
    {"knows_names", knows_names},
    {"divides_choices", divides_choices},
    {"shares_work", shares_work},
    {"scores_are_kept", scores_are_kept},
    {"experts_come_on_demand", experts_come_on_demand},
};

}  // namespace trial
