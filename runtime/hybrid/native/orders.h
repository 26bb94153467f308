// Other residents for a program that runs: a file that its owner replaces whole, looked at now and then.
//
//     order 3
//     resident 0 16 5,1,15
//     end
//
// The number is the sender's, who knows an answer by it. Only the user whose program this is may be able to write the file. What is in it changes which experts
// have slots and nothing else: not how many, not what is computed.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "config.h"
#include "platform.h"

namespace hybrid {

struct Order {
    int64_t number = 0;
    std::vector<Resident> residents;
};

// On error returns false and says in `error` what is wrong; `order.number` is 0 where the text has none.
bool parse_order(const std::string & text, Order & order, std::string & error);

class Orders {
  public:
    explicit Orders(const std::string & path) : path_(path) {}

    // Whether the file is another than it was at the last look, and holds an order to be followed.
    bool look(Order & order);
    // What became of it; "": done.
    void done(int64_t number, const std::string & fault);

    // Members of a report: the last order with a number, and what is wrong with what was read last; "": nothing.
    std::string report();

  private:
    const std::string path_;
    Stamp seen_;
    std::mutex mutex_;  // of what follows
    int64_t number_ = 0;
    std::string fault_;
};

}  // namespace hybrid
