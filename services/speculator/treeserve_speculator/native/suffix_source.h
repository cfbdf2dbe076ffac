// Suffix decoding: what most often came after the present context, here and in finished responses (sources/suffix.py).
#pragma once

#include <algorithm>
#include <deque>
#include <string>
#include <unordered_map>
#include <vector>

#include "keyed_hash.h"
#include "tenant_memories.h"
#include "token_tree.h"

namespace treeserve {

// Counts of all substrings of at most `kDepth` tokens of the sequences added to it (sources/suffix_trie.py).
class SuffixTrie {
  public:
    static constexpr int kDepth = 14;
    using Node = uint32_t;
    static constexpr Node kRoot = 0, kNone = UINT32_MAX;

    int64_t size() const { return size_; }

    // Appends a token. `suffixes` are the nodes of the sequence's suffixes of length 0, 1, ...: {kRoot} at first.
    void extend(std::vector<Node>& suffixes, Token token);

    void add(const std::vector<Token>& tokens);
    void remove(const std::vector<Token>& tokens);  // undoes one `add` of the same tokens

    Node child(Node node, Token token) const;
    Node first_child(Node node) const { return nodes_[node].first_child; }
    Node next_sibling(Node node) const { return nodes_[node].next_sibling; }
    Token token(Node node) const { return nodes_[node].token; }
    int32_t count(Node node) const { return nodes_[node].count; }

  private:
    // Children in the order in which they came. Freed nodes are chained by `next_sibling`.
    struct Place {
        Token token = -1;
        int32_t count = 0;
        Node first_child = kNone, last_child = kNone, next_sibling = kNone, previous_sibling = kNone;
    };
    struct Hash {
        size_t operator()(uint64_t key) const { return keyed_hash(key); }
    };
    static uint64_t key(Node node, Token token) { return uint64_t{node} << 32 | static_cast<uint32_t>(token); }

    Node add_child(Node node, Token token);
    void drop_child(Node node, Node child);
    void free_chain(Node node);

    std::vector<Place> nodes_ = std::vector<Place>(1);
    std::unordered_map<uint64_t, Node, Hash> children_;
    Node free_ = kNone;
    int64_t size_ = 0;
};

// One tenant's finished responses: counted, and kept to be forgotten.
class Responses {
  public:
    const SuffixTrie& trie() const { return trie_; }
    int64_t size() const { return std::max(trie_.size(), num_tokens_); }
    void add(std::vector<Token> response);
    void forget_oldest();

  private:
    SuffixTrie trie_;
    std::deque<std::vector<Token>> responses_;
    int64_t num_tokens_ = 0;
};

class SuffixSource {
  public:
    struct Sequence {
        SuffixTrie trie;
        std::vector<SuffixTrie::Node> suffixes = {SuffixTrie::kRoot};
    };

    explicit SuffixSource(int64_t max_shared_nodes) : finished_(max_shared_nodes) {}

    void open(Sequence& sequence, const std::vector<Token>& tokens);
    void commit(Sequence& sequence, const Token* tokens, int32_t count);
    bool propose(const Sequence& sequence, const std::vector<Token>& tokens, const std::string& tenant,
                 int32_t budget, TokenTree& tree);
    // The sequence has ended: its response is its tenant's from now on.
    void close(const std::vector<Token>& tokens, int32_t prompt_len, const std::string& tenant);

  private:
    static constexpr int kMaxContext = 8;
    static constexpr int32_t kMaxCountedTokens = 2048;

    struct Candidate {
        double path;  // probability
        int32_t order, parent;
        SuffixTrie::Node node;
        double probability;
        int32_t context_len;
        bool operator<(const Candidate& other) const {  // the best, then the first, is on top of a heap
            return path != other.path ? path < other.path : order > other.order;
        }
    };

    // Grows a tree below a context; its score: the sum of its nodes' path probabilities.
    double grow(const SuffixTrie& trie, SuffixTrie::Node context, int32_t context_len, Token root, int32_t budget,
                TokenTree& tree);
    void push_followers(const SuffixTrie& trie, SuffixTrie::Node node, int32_t context_len, double path,
                        int32_t parent);

    TenantMemories<Responses> finished_;
    std::vector<Candidate> heap_;
    int32_t order_ = 0;
    TokenTree grown_;
};

}  // namespace treeserve
