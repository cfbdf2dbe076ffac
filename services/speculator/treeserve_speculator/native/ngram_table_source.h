// Tables of how the target itself goes on after a few tokens: a best-first tree (sources/ngram_table.py).
#pragma once

#include <unordered_set>
#include <vector>

#include "drafting.h"
#include "token_tree.h"

namespace treeserve {

// How a request samples, as far as it matters to what its next tokens are likely to be.
struct Sampling {
    double temperature;  // 0 for the most probable token
    uint64_t seed;
};

class NgramTableSource {
  public:
    NgramTableSource(const TsNgramTable& table, int32_t max_depth, const std::unordered_set<Token>& eos);

    // The nodes that are most probable, down to the path probability `least`.
    // seen: for each token id whether the sequence has shown it.
    bool propose(const std::vector<Token>& tokens, const std::vector<bool>& seen, const Sampling& sampling,
                 double least, int32_t budget, TokenTree& tree);

    static Token token_id(const TsNgramTable& table, int64_t entry) {
        if (table.token_bytes == 1) return static_cast<const uint8_t*>(table.token_ids)[entry];
        if (table.token_bytes == 2) return static_cast<const uint16_t*>(table.token_ids)[entry];
        return static_cast<Token>(static_cast<const uint32_t*>(table.token_ids)[entry]);
    }

  private:
    static constexpr int32_t kUnexpanded = -1;

    struct Child {
        double log_prob;
        Token token;
    };
    struct Candidate {
        double cost;  // -path log-probability
        int32_t parent, rank;
        bool operator<(const Candidate& other) const;
    };
    struct Node {
        int32_t depth;
        double path;                              // log-probability
        int32_t first_child = 0, num_children = 0;  // in children_, the best first
    };
    struct Entries {
        int64_t begin, count;  // in the table's tokens
    };

    bool find(uint64_t context_hash, Entries& entries) const;
    // What may follow a node with a log-probability of at least `least`.
    void expand(int32_t node, const TokenTree& tree, const std::vector<Token>& tokens,
                const std::vector<bool>& seen, const Sampling& sampling, double least);
    void push(double cost, int32_t parent, int32_t rank);
    Token token_id(int64_t entry) const { return token_id(table_, entry); }

    TsNgramTable table_;
    int32_t max_depth_;
    const std::unordered_set<Token>& eos_;
    std::vector<double> powers_, probabilities_;  // of each quantised log-probability
    std::vector<Candidate> heap_;
    std::vector<Node> nodes_;
    std::vector<Child> children_;
    std::vector<uint64_t> hashes_;  // of longer and longer contexts
    std::vector<double> weights_;
};

}  // namespace treeserve
