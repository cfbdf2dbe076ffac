// A token tree while it is drafted: node 0 is the root, parents precede their children.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

namespace treeserve {

using Token = int32_t;

struct TokenTree {
    std::vector<Token> tokens;
    std::vector<int32_t> parents;
    std::vector<double> log_probs;  // of each node, given its parent

    int32_t size() const { return static_cast<int32_t>(tokens.size()); }

    void plant(Token root) {
        tokens.assign(1, root);
        parents.assign(1, -1);
        log_probs.assign(1, 0.0);
    }

    int32_t add(int32_t parent, Token token, double log_prob) {
        tokens.push_back(token);
        parents.push_back(parent);
        log_probs.push_back(log_prob);
        return size() - 1;
    }
};

// Children of each node, ascending. A tree's nodes are few, so two arrays of them are the fastest index.
class Children {
  public:
    void of(const std::vector<int32_t>& parents) {
        const auto n = static_cast<int32_t>(parents.size());
        first_.assign(n, -1);
        next_.assign(n, -1);
        for (int32_t node = n - 1; node > 0; --node) {
            next_[node] = first_[parents[node]];
            first_[parents[node]] = node;
        }
    }

    int32_t first(int32_t node) const { return first_[node]; }  // -1 for none
    int32_t next(int32_t child) const { return next_[child]; }  // its next sibling, -1 for none

  private:
    std::vector<int32_t> first_, next_;
};

}  // namespace treeserve
