// Prompt lookup: the chain that followed the latest occurrence of the last few tokens (sources/ngram.py).
#pragma once

#include <array>
#include <unordered_map>
#include <vector>

#include "token_tree.h"

namespace treeserve {

// One sequence's index: where each of its n-grams ended last.
class NgramIndex {
  public:
    // Indexes what is new. `tokens` are the same as last time with more at their end.
    void update(const std::vector<Token>& tokens);

    // The chain after the latest place of the longest end of `tokens`; false if there is none.
    bool propose(const std::vector<Token>& tokens, int32_t budget, TokenTree& tree) const;

  private:
    static constexpr int kMaxMatch = 4;
    static constexpr int kMaxLength = 10;

    struct Ngram {
        std::array<Token, kMaxMatch> tokens;  // -1 in front of shorter ones
        bool operator==(const Ngram&) const = default;
    };
    struct Hash {
        size_t operator()(const Ngram& ngram) const;
    };
    static Ngram ending_at(const std::vector<Token>& tokens, int32_t end, int size);

    std::unordered_map<Ngram, int32_t, Hash> next_position_;
    int32_t indexed_ = 0;
};

}  // namespace treeserve
