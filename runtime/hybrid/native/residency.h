// Slots of one block that follow the text: the tables while experts are on their way, and who still reads what.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "courier.h"
#include "policy.h"

namespace hybrid {

struct Group;

class Residency {
  public:
    Residency(Courier & courier, const Adaptation & how, Group & group);

    // ---- in a step, from the choices until they are divided: the tables stay as they are
    class Turn;

    // ---- while a prompt brings the block's experts ahead: the tables stay as they are. false: slots are being written
    bool hold();
    void note(const Choices & choices);  // for the scores alone
    void release(const std::shared_ptr<Progress> & progress);

    // ---- between steps
    void finish();                      // what was sent has arrived, and is in the tables
    void sow(const std::vector<int32_t> & seed);  // experts in the order of their slots, and nothing was chosen before

    // Each admission evicts one. Of steps that came before what was sent: some waited, the others went on without.
    std::atomic<int64_t> admitted{0}, bytes{0}, waited{0}, late{0};

  private:
    struct Sent {
        int32_t expert, slot;
        Arrived arrived;
    };

    void receive(bool wait);
    void reads(const std::shared_ptr<Progress> & progress);
    void decide(const Choices & choices, int32_t n_needed);
    void admit(const Admission & admission);
    void send(const Coming & coming);

    Courier & courier_;
    const Adaptation & how_;
    Group & group_;
    std::mutex mutex_;  // of the group's tables and of what follows
    std::unique_ptr<Scores> scores_;
    std::vector<Coming> coming_;      // of the step in hand, and nobody brings their bytes yet
    std::vector<Reader> leaving_;     // who may still read the slots that they get; nothing while nobody gets any
    Reader wrote_{nullptr, 0};        // a step that brought experts to slots by itself
    std::deque<Sent> sent_;  // not yet in the tables
    std::vector<char> on_its_way_;  // by expert
    int holders_ = 0;               // prompts on their way
    std::vector<Reader> readers_;   // the last step of every context that may read the slots
};

// A step's use of a block's slots. Nothing of it without a residency.
class Residency::Turn {
  public:
    // `counts`: the router chose, and nobody told of it yet; `n_needed`: slots that must hold something.
    Turn(Residency * residency, const Choices & choices, bool counts, int32_t n_needed, const std::shared_ptr<Progress> & progress);
    ~Turn();
    Turn(const Turn &) = delete;
    Turn & operator=(const Turn &) = delete;

    int32_t n_empty() const;  // slots that hold nothing now
    bool on_demand() const;   // whether an expert that gets a slot is one that this step has to have brought
    // Experts that get slots in this step, if the step itself may write there: nobody else reads them.
    const std::vector<Coming> * coming() const;
    // Those that the step's uploads bring to their slots stay with the step, the others are sent. Returns whether any
    // stay: then the turn lasts until they are queued.
    bool keep(const std::vector<Upload> & uploads);
    void brought();  // those that stayed are queued, ahead of all that this context reads from now on
    void divided();           // the choices are: others may change the tables
    void rest();              // what was left for when the device is at work
    void again();             // divide them once more
    // Nothing is written into the slots that this step may read. What was sent later waits for this step, so that
    // nobody else may be kept waiting meanwhile.
    void settle();

  private:
    Residency * residency_;
    std::unique_lock<std::mutex> lock_;
    std::shared_ptr<Progress> progress_;
    std::vector<Arrived> before_;  // sent before this step's turn, and not seen to arrive
};

}  // namespace hybrid
