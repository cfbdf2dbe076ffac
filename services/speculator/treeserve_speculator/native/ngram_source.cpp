#include "ngram_source.h"

#include <algorithm>

#include "keyed_hash.h"

namespace treeserve {

namespace {

// How likely a match of so many tokens is to go on; see the Python source.
const std::array<double, 6> kMatchLogProbs = {std::log(0.2), std::log(0.4), std::log(0.55),
                                              std::log(0.7), std::log(0.8), std::log(0.85)};

}  // namespace

size_t NgramIndex::Hash::operator()(const Ngram& ngram) const {
    uint64_t hash = hash_key();
    for (const Token token : ngram.tokens) hash = keyed_hash(static_cast<uint32_t>(token), hash);
    return hash;
}

NgramIndex::Ngram NgramIndex::ending_at(const std::vector<Token>& tokens, int32_t end, int size) {
    Ngram ngram;
    ngram.tokens.fill(-1);
    std::copy_n(tokens.begin() + (end - size), size, ngram.tokens.end() - size);
    return ngram;
}

void NgramIndex::update(const std::vector<Token>& tokens) {
    const auto length = static_cast<int32_t>(tokens.size());
    for (int32_t end = std::max(indexed_, 1); end < length; ++end)
        for (int size = 1; size <= std::min(kMaxMatch, end); ++size)
            next_position_[ending_at(tokens, end, size)] = end;
    indexed_ = length;
}

bool NgramIndex::propose(const std::vector<Token>& tokens, int32_t budget, TokenTree& tree) const {
    const auto length = static_cast<int32_t>(tokens.size());
    for (int size = std::min(kMaxMatch, length); size >= 1; --size) {
        const auto found = next_position_.find(ending_at(tokens, length, size));
        if (found == next_position_.end()) continue;
        const int32_t position = found->second, period = length - position;
        const int last = static_cast<int>(kMatchLogProbs.size()) - 1;
        tree.plant(tokens.back());
        for (int i = 0; i < std::min(budget, kMaxLength); ++i)  // what reaches the end repeats itself
            tree.add(i, tokens[position + i % period], kMatchLogProbs[std::min(size + i - 1, last)]);
        return true;
    }
    return false;
}

}  // namespace treeserve
