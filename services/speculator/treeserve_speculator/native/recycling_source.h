// Token recycling: after a token, what the target held most probable when it last saw it (sources/recycling.py).
#pragma once

#include <array>
#include <list>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tenant_memories.h"
#include "token_tree.h"

namespace treeserve {

struct NextTokens {
    static constexpr int kMost = 8;
    std::array<Token, kMost> tokens;  // the most probable first
    int count = 0;
};

// For each token what was seen last, the oldest rows first.
class RecyclingTable {
  public:
    int64_t size() const { return static_cast<int64_t>(rows_.size()); }
    void add(const std::pair<Token, NextTokens>& row);
    void forget_oldest();
    const NextTokens* row(Token token) const;  // null for none

  private:
    std::list<std::pair<Token, NextTokens>> rows_;
    std::unordered_map<Token, decltype(rows_)::iterator> places_;
};

class RecyclingSource {
  public:
    RecyclingSource(Token vocab_size, int64_t max_shared_rows) : vocab_size_(vocab_size), shared_(max_shared_rows) {}

    // Remembers `count` top tokens under the token before; in the sequence's own table if it has no tenant.
    void remember(Token token, const Token* top, int32_t count, const std::string& tenant, RecyclingTable& own);
    bool propose(const std::vector<Token>& tokens, const std::string& tenant, const RecyclingTable& own,
                 int32_t budget, TokenTree& tree);

  private:
    static constexpr int kMaxDepth = 6;

    struct Candidate {
        double cost;  // -path log-probability
        int32_t parent, rank, depth;
        bool operator<(const Candidate& other) const;
    };
    void push(const NextTokens* row, double cost, int32_t parent, int32_t rank, int32_t depth);

    Token vocab_size_;
    TenantMemories<RecyclingTable> shared_;
    std::vector<Candidate> heap_;
    std::vector<const NextTokens*> rows_;  // of each node
};

}  // namespace treeserve
