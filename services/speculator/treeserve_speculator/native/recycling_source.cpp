#include "recycling_source.h"

#include <algorithm>
#include <tuple>

namespace treeserve {

namespace {

// Estimated probability of each rank; see the Python source.
const std::array<double, NextTokens::kMost> kRankLogProbs = {
    std::log(0.45), std::log(0.15), std::log(0.08), std::log(0.05),
    std::log(0.035), std::log(0.025), std::log(0.02), std::log(0.015)};

}  // namespace

void RecyclingTable::add(const std::pair<Token, NextTokens>& row) {
    const auto [place, is_new] = places_.try_emplace(row.first, rows_.end());
    if (!is_new) rows_.erase(place->second);
    place->second = rows_.insert(rows_.end(), row);
}

void RecyclingTable::forget_oldest() {
    places_.erase(rows_.front().first);
    rows_.pop_front();
}

const NextTokens* RecyclingTable::row(Token token) const {
    const auto found = places_.find(token);
    return found == places_.end() ? nullptr : &found->second->second;
}

bool RecyclingSource::Candidate::operator<(const Candidate& other) const {  // the cheapest is on top of a heap
    return std::tie(cost, parent, rank, depth) > std::tie(other.cost, other.parent, other.rank, other.depth);
}

void RecyclingSource::remember(Token token, const Token* top, int32_t count, const std::string& tenant,
                               RecyclingTable& own) {
    NextTokens next;
    for (int32_t i = 0; i < count && next.count < NextTokens::kMost; ++i) {
        const auto known = next.tokens.begin() + next.count;
        if (top[i] < vocab_size_ && std::find(next.tokens.begin(), known, top[i]) == known)
            next.tokens[next.count++] = top[i];
    }
    if (tenant.empty())
        own.add({token, next});
    else
        shared_.add(tenant, std::pair{token, next});
}

bool RecyclingSource::propose(const std::vector<Token>& tokens, const std::string& tenant, const RecyclingTable& own,
                              int32_t budget, TokenTree& tree) {
    const RecyclingTable* table = tenant.empty() ? &own : shared_.find(tenant);
    if (table == nullptr) return false;
    tree.plant(tokens.back());
    heap_.clear();
    rows_.assign(1, table->row(tokens.back()));
    push(rows_[0], 0.0, 0, 0, 1);
    while (!heap_.empty() && tree.size() <= budget) {  // rank r + 1 enters when rank r leaves, so the heap stays small
        std::pop_heap(heap_.begin(), heap_.end());
        const Candidate best = heap_.back();
        heap_.pop_back();
        const NextTokens* row = rows_[best.parent];
        const Token token = row->tokens[best.rank];
        const int32_t node = tree.add(best.parent, token, kRankLogProbs[best.rank]);
        push(row, best.cost + kRankLogProbs[best.rank], best.parent, best.rank + 1, best.depth);
        rows_.push_back(best.depth < kMaxDepth ? table->row(token) : nullptr);
        push(rows_[node], best.cost, node, 0, best.depth + 1);
    }
    return tree.size() > 1;
}

void RecyclingSource::push(const NextTokens* row, double cost, int32_t parent, int32_t rank, int32_t depth) {
    if (row == nullptr || rank >= row->count) return;
    heap_.push_back({cost - kRankLogProbs[rank], parent, rank, depth});
    std::push_heap(heap_.begin(), heap_.end());
}

}  // namespace treeserve
