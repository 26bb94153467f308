#include "config.h"

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdlib>
#include <sstream>

namespace hybrid {

bool parse_whole(const std::string & word, int64_t least, int64_t most, int64_t & value) {
    if (word.empty()) {
        return false;
    }
    char * end = nullptr;
    errno = 0;
    const long long read = std::strtoll(word.c_str(), &end, 10);
    value = read;
    return errno == 0 && *end == '\0' && read >= least && read <= most;
}

namespace {

bool small(const std::string & word, int least, int & value) {
    int64_t read = 0;
    if (!parse_whole(word, least, 1 << 20, read)) {
        return false;
    }
    value = static_cast<int>(read);
    return true;
}

// "3,5,9" or "-" for none; every expert once and below n.
bool experts(const std::string & word, int n, std::vector<int32_t> & found) {
    if (word == "-") {
        return true;
    }
    std::vector<bool> seen(static_cast<size_t>(n));
    std::stringstream parts(word);
    std::string part;
    while (std::getline(parts, part, ',')) {
        int64_t expert = 0;
        if (!parse_whole(part, 0, n - 1, expert) || seen[static_cast<size_t>(expert)]) {
            return false;
        }
        seen[static_cast<size_t>(expert)] = true;
        found.push_back(static_cast<int32_t>(expert));
    }
    return !found.empty() && word.back() != ',';
}

bool memory(const std::string & word, Memory & value) {
    value = word == "plain" ? Memory::kPlain : word == "mapped" ? Memory::kMapped : Memory::kPinned;
    return word == "plain" || word == "mapped" || word == "pinned";
}

bool yes_or_no(const std::string & word, bool & value) {
    value = word == "1";
    return word == "0" || word == "1";
}

bool fault(const std::string & word, Fault & value) {
#if defined(ATSPLAN_HYBRID_FAULTS)
    value = word == "wrong-slot"  ? Fault::kWrongSlot
            : word == "stale-row" ? Fault::kStaleRow
            : word == "exchanged" ? Fault::kExchanged
            : word == "bias"      ? Fault::kWrongBias
            : word == "refill"    ? Fault::kEarlyRefill
                                  : Fault::kNone;
    return value != Fault::kNone || word == "none";
#else
    (void)word;
    (void)value;
    return false;
#endif
}

bool policy(const std::string & word, Policy & value) {
    value = word == "lru" ? Policy::kLru : word == "lfu" ? Policy::kLfu : word == "schedule" ? Policy::kSchedule : Policy::kStatic;
    return value != Policy::kStatic || word == "static";
}

// "move STEP BLOCK EXPERT SLOT": steps never decrease.
bool move(const std::vector<std::string> & words, Adaptation & how) {
    Move made{};
    int expert = 0, slot = 0;
    if (words.size() != 5 || !parse_whole(words[1], 0, LLONG_MAX, made.step) || !small(words[2], 0, made.block) ||
        !small(words[3], 0, expert) || !small(words[4], 0, slot) || (!how.moves.empty() && how.moves.back().step > made.step)) {
        return false;
    }
    made.expert = expert;
    made.slot = slot;
    how.moves.push_back(made);
    return true;
}

// One line of words; false when it is not understood.
bool setting(const std::vector<std::string> & words, Config & config) {
    const std::string & key = words[0];
    if (key == "resident") {
        return parse_resident(words, config.residents);
    }
    Adaptation & how = config.adaptation;
    if (key == "move") {
        return move(words, how);
    }
    if (words.size() != 2) {
        return false;
    }
    const std::string & value = words[1];
    if (key == "name") {
        config.name = value;
        return true;
    }
    return key == "memory"         ? memory(value, config.memory)
           : key == "report_ms"    ? small(value, 0, config.report_ms)
           : key == "threads"      ? small(value, 0, config.threads) && config.threads <= 512
           : key == "slots"        ? small(value, 0, config.slots)
           : key == "guests"       ? small(value, 0, config.guests)
           : key == "stage"        ? small(value, -1, config.stage)
           : key == "banks"        ? small(value, 1, config.banks) && config.banks <= 2
           : key == "ring"         ? small(value, 0, config.ring) && config.ring <= 1
           : key == "ring_chunk"   ? small(value, 1, config.ring_chunk)
           : key == "cpu_tokens"   ? small(value, 0, config.cpu_tokens)
           : key == "cpu_bytes_us" ? parse_whole(value, 0, LLONG_MAX, config.cpu_bytes_us)
           : key == "bus_bytes_us" ? parse_whole(value, 0, LLONG_MAX, config.bus_bytes_us)
           : key == "quiet"        ? yes_or_no(value, config.quiet)
           : key == "regions"      ? yes_or_no(value, config.regions)
           : key == "ahead"        ? yes_or_no(value, config.ahead)
           : key == "merge"        ? yes_or_no(value, config.merge)
           : key == "policy"       ? policy(value, how.policy)
           : key == "half_life"    ? small(value, 1, how.half_life)
           : key == "protect"      ? small(value, 0, how.protect)
           : key == "upload_bytes" ? parse_whole(value, 0, LLONG_MAX / 4, how.upload_bytes)
           : key == "refill_bytes" ? parse_whole(value, 0, LLONG_MAX / 4, how.refill_bytes)
           : key == "least_misses" ? small(value, 0, how.least_misses)
           : key == "lockstep"     ? yes_or_no(value, how.lockstep)
           : key == "fault"        ? fault(value, config.fault)
                                   : false;
}

}  // namespace

bool parse_resident(const std::vector<std::string> & words, std::vector<Resident> & residents) {
    Resident made;
    int n = 0;
    if (words.size() < 4 || words.size() > 5 || words[0] != "resident" || !small(words[1], 0, made.block) || !small(words[2], 1, n) ||
        !experts(words[3], n, made.experts) || resident_of(residents, made.block, n)) {
        return false;
    }
    if (words.size() == 5 && !small(words[4], 0, made.guests)) {
        return false;
    }
    made.n_experts = n;
    residents.push_back(made);
    return true;
}

const Resident * resident_of(const std::vector<Resident> & residents, int block, int n_experts) {
    for (const Resident & line : residents) {
        if (line.block == block && line.n_experts == n_experts) {
            return &line;
        }
    }
    return nullptr;
}

bool parse_config(const std::string & text, std::vector<Config> & configs, std::string & error) {
    configs.assign(1, Config());
    bool named = false;  // whether a device line was read
    std::stringstream lines(text);
    std::string line;
    for (int number = 1; std::getline(lines, line); number++) {
        std::stringstream parts(line);
        std::vector<std::string> words;
        for (std::string word; parts >> word;) {
            words.push_back(word);
        }
        if (words.empty() || words[0][0] == '#') {
            continue;
        }
        if (words[0] == "device" && words.size() == 2) {
            if (named) {
                configs.emplace_back();
            }
            named = true;
            configs.back().device = words[1];
        } else if ((words[0] == "report" || words[0] == "orders") && words.size() >= 2) {
            std::string & path = words[0] == "report" ? configs.back().report : configs.back().orders;
            path = line.substr(line.find(words[1], line.find(words[0]) + words[0].size()));
        } else if (!setting(words, configs.back())) {
            error = "line " + std::to_string(number) + " is not understood: " + line;
            return false;
        }
    }
    return true;
}

// Modes that divide each tensor over devices. A program obeys its words before its environment.
std::string divided_tensors(std::vector<std::string> words, const std::string & environment) {
    const auto named = [](const std::string & word) { return word == "-sm" || word == "--split-mode"; };
    if (std::none_of(words.begin(), words.end(), named)) {
        words.insert(words.end(), {"--split-mode", environment});
    }
    for (size_t i = 0; i + 1 < words.size(); i++) {
        for (const char * mode : {"row", "tensor"}) {
            if (named(words[i]) && words[i + 1].find(mode) != std::string::npos) {
                return std::string("--split-mode ") + mode + " divides tensors over devices, which experts in slots do not allow: leave it out";
            }
        }
    }
    return "";
}

}  // namespace hybrid
