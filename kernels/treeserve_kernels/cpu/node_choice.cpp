#include "node_choice.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace treeserve {

namespace {

constexpr double kInfinite = std::numeric_limits<double>::infinity();
constexpr int32_t kNobody = -1;

}  // namespace

double step_ms(const TsCosts& costs, int64_t rows) {
    const int32_t* end = costs.rows + costs.num_stairs;
    const int32_t* stair = std::lower_bound(costs.rows, end, rows);
    if (stair != end) return costs.ms[stair - costs.rows];
    return end[-1] ? costs.ms[costs.num_stairs - 1] * static_cast<double>(rows) / end[-1] : 0.0;
}

bool NodeChoice::Rated::operator<(const Rated& other) const {
    if (accepted != other.accepted) return accepted > other.accepted;
    if (depth != other.depth) return depth < other.depth;
    return index != other.index ? index < other.index : order < other.order;
}

void NodeChoice::choose(const TsCosts& costs, const std::vector<TsOffer>& offers, int64_t room) {
    costs_ = &costs;
    offers_ = &offers;
    rows_ = static_cast<int64_t>(offers.size());
    counts_.assign(offers.size(), 0);
    expected_.assign(offers.size(), 0.0);
    fill(room - meet_targets(room));
}

int64_t NodeChoice::meet_targets(int64_t room) {
    const double step = now_ms();
    behind_.clear();
    all_behind_.clear();
    for (int32_t i = 0; i < static_cast<int32_t>(offers_->size()); ++i) {
        if (!((*offers_)[i].slack_ms < step)) continue;
        behind_.push_back({need(i, step), i});
        all_behind_.push_back(i);
    }
    std::sort(behind_.begin(), behind_.end(), [](const Behind& a, const Behind& b) {
        return a.need != b.need ? a.need > b.need : a.index > b.index;
    });
    int64_t chosen = 0;
    for (const auto& [needed, i] : behind_) {
        if (!(needed > 1.0 + expected_[i])) continue;
        const int32_t count = count_for(i, room - chosen);
        take(i, count);
        chosen += count;
    }
    return chosen;
}

double NodeChoice::need(int32_t index, double step) const {
    const TsOffer& offer = (*offers_)[index];
    int32_t deepest = 0;
    for (int64_t i = 0; i < offer.num_nodes; ++i) deepest = std::max(deepest, offer.depths[i]);
    return std::min(1.0 + (step - offer.slack_ms) / offer.token_ms, deepest + 1.0);
}

int32_t NodeChoice::count_for(int32_t index, int64_t room) const {
    double before = 0.0;
    for (const int32_t i : all_behind_) before += 1.0 + expected_[i];
    double together = before, emitted = 1.0 + expected_[index];
    const double before_ms = now_ms(), limit = limit_ms(index);
    const TsOffer& offer = (*offers_)[index];
    int32_t best = 0;
    double best_token_ms = before_ms / emitted;
    for (int32_t count = 1; count <= std::min(room, offer.num_nodes); ++count) {
        const double step = step_ms(*costs_, rows_ + count);
        if (step > limit) break;
        emitted += offer.accepted[count - 1];
        together += offer.accepted[count - 1];
        if (together * before_ms < before * step) continue;
        if (emitted >= need(index, step)) return count;
        if (step / emitted < best_token_ms) {
            best = count;
            best_token_ms = step / emitted;
        }
    }
    return is_lost(index, best_token_ms) ? 0 : best;
}

bool NodeChoice::is_lost(int32_t index, double token_ms) const {
    const TsOffer& offer = (*offers_)[index];
    if (offer.token_ms == kInfinite) return false;
    return offer.slack_ms + offer.reserve_ms - offer.token_ms + offer.tokens_left * (offer.token_ms - token_ms) < 0.0;
}

double NodeChoice::limit_ms(int32_t without) const {
    const double step = now_ms();
    double limit = kInfinite;
    for (int32_t i = 0; i < static_cast<int32_t>(offers_->size()); ++i) {
        const TsOffer& offer = (*offers_)[i];
        if (i == without || offer.slack_ms == kInfinite) continue;
        const double end = offer.slack_ms + expected_[i] * offer.token_ms;
        if (end >= step) limit = std::min(limit, end);
    }
    return limit;
}

void NodeChoice::fill(int64_t room) {
    rest_.clear();
    for (int32_t i = 0; i < static_cast<int32_t>(offers_->size()); ++i) {
        const TsOffer& offer = (*offers_)[i];
        for (int32_t order = counts_[i]; order < offer.num_nodes; ++order)
            rest_.push_back({offer.accepted[order], offer.depths[order], i, order});
    }
    std::sort(rest_.begin(), rest_.end());
    if (static_cast<int64_t>(rest_.size()) > room) rest_.resize(std::max<int64_t>(room, 0));
    if (rest_.empty()) return;
    const double limit = limit_ms(kNobody);
    double emitted = static_cast<double>(offers_->size()), expected = 0.0;
    for (const double each : expected_) expected += each;
    emitted += expected;
    size_t best = 0;
    double best_rate = emitted / now_ms();
    for (size_t count = 1; count <= rest_.size(); ++count) {
        emitted += rest_[count - 1].accepted;
        const double step = step_ms(*costs_, rows_ + static_cast<int64_t>(count));
        if (step > limit) break;
        if (emitted / step > best_rate) {
            best = count;
            best_rate = emitted / step;
        }
    }
    for (size_t i = 0; i < best; ++i) take(rest_[i].index, 1);
}

void NodeChoice::take(int32_t index, int32_t count) {
    const TsOffer& offer = (*offers_)[index];
    double gained = 0.0;
    for (int32_t i = counts_[index]; i < counts_[index] + count; ++i) gained += offer.accepted[i];
    expected_[index] += gained;
    counts_[index] += count;
    rows_ += count;
}

}  // namespace treeserve
