// Which draft nodes a step of a run verifies: the twin of the verifier's selection.py, which explains it.
#pragma once

#include <cstdint>
#include <vector>

#include "api.h"

namespace treeserve {

// Expected duration of a step with so many rows.
double step_ms(const TsCosts& costs, int64_t rows);

class NodeChoice {
public:
    // Chooses `room` nodes at most; of each offer the first counts()[i]. What is given must outlive the choice.
    void choose(const TsCosts& costs, const std::vector<TsOffer>& offers, int64_t room);

    const std::vector<int32_t>& counts() const { return counts_; }
    // Tokens that the step should emit beyond one, by sequence.
    const std::vector<double>& expected() const { return expected_; }

private:
    struct Rated {
        double accepted;
        int32_t depth, index, order;
        bool operator<(const Rated& other) const;
    };
    struct Behind {
        double need;
        int32_t index;
    };

    int64_t meet_targets(int64_t room);
    void fill(int64_t room);
    double need(int32_t index, double step) const;
    int32_t count_for(int32_t index, int64_t room) const;
    bool is_lost(int32_t index, double token_ms) const;
    double limit_ms(int32_t without) const;
    double now_ms() const { return step_ms(*costs_, rows_); }
    void take(int32_t index, int32_t count);

    const TsCosts* costs_ = nullptr;
    const std::vector<TsOffer>* offers_ = nullptr;
    int64_t rows_ = 0;
    std::vector<int32_t> counts_;
    std::vector<double> expected_;
    std::vector<Behind> behind_;       // the most behind first
    std::vector<int32_t> all_behind_;  // in the order of the offers, in which Python adds them up
    std::vector<Rated> rest_;
};

}  // namespace treeserve
