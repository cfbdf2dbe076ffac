#include "suffix_source.h"

#include <algorithm>
#include <utility>

namespace treeserve {

namespace {

constexpr double kMinPathProbability = 0.1;

}  // namespace

void SuffixTrie::extend(std::vector<Node>& suffixes, Token token) {
    Node shorter = kRoot;
    for (Node& suffix : suffixes) {
        const Node longer = add_child(suffix, token);
        ++nodes_[longer].count;
        suffix = std::exchange(shorter, longer);
    }
    if (suffixes.size() < kDepth) suffixes.push_back(shorter);
}

void SuffixTrie::add(const std::vector<Token>& tokens) {
    std::vector<Node> suffixes = {kRoot};
    for (const Token token : tokens) extend(suffixes, token);
}

void SuffixTrie::remove(const std::vector<Token>& tokens) {
    for (size_t start = 0; start < tokens.size(); ++start) {
        Node node = kRoot;
        const size_t end = std::min(start + kDepth, tokens.size());
        for (size_t position = start; position < end; ++position) {
            const Node below = child(node, tokens[position]);
            if (--nodes_[below].count == 0) {  // this occurrence was the only one: what hangs below is its own chain
                drop_child(node, below);
                size_ -= static_cast<int64_t>(end - position);
                break;
            }
            node = below;
        }
    }
}

SuffixTrie::Node SuffixTrie::child(Node node, Token token) const {
    const auto found = children_.find(key(node, token));
    return found == children_.end() ? kNone : found->second;
}

SuffixTrie::Node SuffixTrie::add_child(Node node, Token token) {
    const auto [place, is_new] = children_.try_emplace(key(node, token), free_);
    if (!is_new) return place->second;
    if (free_ == kNone) {
        place->second = static_cast<Node>(nodes_.size());
        nodes_.emplace_back();
    } else {
        free_ = nodes_[free_].next_sibling;
    }
    const Node child = place->second;
    Place& parent = nodes_[node];
    nodes_[child] = Place{.token = token, .previous_sibling = parent.last_child};
    (parent.last_child == kNone ? parent.first_child : nodes_[parent.last_child].next_sibling) = child;
    parent.last_child = child;
    ++size_;
    return child;
}

void SuffixTrie::drop_child(Node node, Node child) {
    const Place& gone = nodes_[child];
    (gone.previous_sibling == kNone ? nodes_[node].first_child : nodes_[gone.previous_sibling].next_sibling) =
        gone.next_sibling;
    (gone.next_sibling == kNone ? nodes_[node].last_child : nodes_[gone.next_sibling].previous_sibling) =
        gone.previous_sibling;
    children_.erase(key(node, gone.token));
    free_chain(child);
}

void SuffixTrie::free_chain(Node node) {
    while (node != kNone) {
        const Node below = nodes_[node].first_child;
        if (below != kNone) children_.erase(key(node, nodes_[below].token));
        nodes_[node] = Place{.next_sibling = free_};
        free_ = node;
        node = below;
    }
}

void Responses::add(std::vector<Token> response) {
    trie_.add(response);
    num_tokens_ += static_cast<int64_t>(response.size());
    responses_.push_back(std::move(response));
}

void Responses::forget_oldest() {
    trie_.remove(responses_.front());
    num_tokens_ -= static_cast<int64_t>(responses_.front().size());
    responses_.pop_front();
}

void SuffixSource::open(Sequence& sequence, const std::vector<Token>& tokens) {
    const auto counted = std::min(kMaxCountedTokens, static_cast<int32_t>(tokens.size()));
    commit(sequence, tokens.data() + tokens.size() - counted, counted);
}

void SuffixSource::commit(Sequence& sequence, const Token* tokens, int32_t count) {
    for (int32_t i = 0; i < count; ++i) sequence.trie.extend(sequence.suffixes, tokens[i]);
}

bool SuffixSource::propose(const Sequence& sequence, const std::vector<Token>& tokens, const std::string& tenant,
                           int32_t budget, TokenTree& tree) {
    const auto num_tokens = static_cast<int32_t>(tokens.size());
    const Responses* finished = finished_.find(tenant);
    double best = -1.0;
    const auto try_context = [&](const SuffixTrie& trie, SuffixTrie::Node node, int32_t length) {
        if (node == SuffixTrie::kNone || trie.first_child(node) == SuffixTrie::kNone) return;
        const double score = grow(trie, node, length, tokens.back(), budget, grown_);
        if (score < best) return;
        best = score;
        std::swap(tree, grown_);
    };
    for (int32_t length = 1; length <= std::min(kMaxContext, num_tokens); ++length) {
        if (length < static_cast<int32_t>(sequence.suffixes.size()))
            try_context(sequence.trie, sequence.suffixes[length], length);
        if (finished == nullptr) continue;
        SuffixTrie::Node node = SuffixTrie::kRoot;
        for (int32_t i = num_tokens - length; i < num_tokens && node != SuffixTrie::kNone; ++i)
            node = finished->trie().child(node, tokens[i]);
        try_context(finished->trie(), node, length);
    }
    return best >= 0.0 && tree.size() > 1;
}

void SuffixSource::close(const std::vector<Token>& tokens, int32_t prompt_len, const std::string& tenant) {
    const auto num_tokens = static_cast<int32_t>(tokens.size());
    const int32_t start = std::max(prompt_len, num_tokens - kMaxCountedTokens);
    if (start < num_tokens) finished_.add(tenant, std::vector<Token>(tokens.begin() + start, tokens.end()));
}

double SuffixSource::grow(const SuffixTrie& trie, SuffixTrie::Node context, int32_t context_len, Token root,
                          int32_t budget, TokenTree& tree) {
    tree.plant(root);
    heap_.clear();
    order_ = 0;
    double score = 0.0;
    push_followers(trie, context, context_len, 1.0, 0);
    while (!heap_.empty() && tree.size() <= budget) {
        std::pop_heap(heap_.begin(), heap_.end());
        const Candidate next = heap_.back();
        heap_.pop_back();
        score += next.path;
        const int32_t at = tree.add(next.parent, trie.token(next.node), std::log(next.probability));
        push_followers(trie, next.node, next.context_len, next.path, at);
    }
    return score;
}

void SuffixSource::push_followers(const SuffixTrie& trie, SuffixTrie::Node node, int32_t context_len, double path,
                                  int32_t parent) {
    // Witten and Bell's estimate: something new may follow, the less likely the longer the context is.
    const SuffixTrie::Node first = trie.first_child(node);
    int64_t count = 0, distinct = 0;
    for (SuffixTrie::Node child = first; child != SuffixTrie::kNone; child = trie.next_sibling(child)) {
        count += trie.count(child);
        ++distinct;
    }
    const double total = static_cast<double>(count) + static_cast<double>(distinct) / context_len;
    const double least = kMinPathProbability / path * total;
    for (SuffixTrie::Node child = first; child != SuffixTrie::kNone; child = trie.next_sibling(child)) {
        const auto followed = static_cast<double>(trie.count(child));
        if (followed < least) continue;
        const double probability = followed / total;
        heap_.push_back({path * probability, ++order_, parent, child, probability, context_len + 1});
        std::push_heap(heap_.begin(), heap_.end());
    }
}

}  // namespace treeserve
