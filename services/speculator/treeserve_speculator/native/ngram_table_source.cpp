#include "ngram_table_source.h"

#include <algorithm>
#include <tuple>

#include "noise.h"

namespace treeserve {

namespace {

constexpr double kMinProbability = 0.01;
constexpr double kLeastRemainder = 1e-4;
constexpr double kMaxTemperature = 8.0;  // hotter requests are drafted for as if they were this hot
constexpr int kSteps = 256, kStepsPerNat = 16;
const double kEvenChance = std::log(0.5);

uint64_t longer_context(uint64_t hash, Token token) {
    const uint64_t mixed = (hash + static_cast<uint64_t>(token) + 1) * kGolden;
    return mixed ^ mixed >> 29;
}

double gumbel(Token token, uint64_t key) {
    const uint64_t bits = noise_bits(static_cast<uint64_t>(token), key);
    return -std::log(-std::log(static_cast<double>(bits >> 12 << 1 | 1) * 0x1p-53));
}

}  // namespace

bool NgramTableSource::Candidate::operator<(const Candidate& other) const {  // the cheapest is on top of a heap
    return std::tie(cost, parent, rank) > std::tie(other.cost, other.parent, other.rank);
}

NgramTableSource::NgramTableSource(const TsNgramTable& table, int32_t max_depth, const std::unordered_set<Token>& eos)
    : table_(table), max_depth_(max_depth), eos_(eos) {
    for (int step = 0; step < kSteps; ++step) {
        const double log_prob = -static_cast<double>(step) / kStepsPerNat;
        probabilities_.push_back(std::exp(log_prob));
        powers_.push_back(std::exp(table.exponent * log_prob));
    }
}

bool NgramTableSource::propose(const std::vector<Token>& tokens, const std::vector<bool>& seen,
                               const Sampling& sampling, double least_probability, int32_t budget, TokenTree& tree) {
    const double least = std::log(std::max(kMinProbability, least_probability));
    tree.plant(tokens.back());
    nodes_.assign(1, {.depth = 0, .path = 0.0});
    children_.clear();
    heap_.clear();
    // A node enters unexpanded, as if its best child had an even chance: most of the last need never be looked up.
    push(0.0, 0, kUnexpanded);
    while (!heap_.empty() && tree.size() <= budget) {
        std::pop_heap(heap_.begin(), heap_.end());
        const auto [cost, parent, rank] = heap_.back();
        heap_.pop_back();
        const double path = nodes_[parent].path;
        if (rank == kUnexpanded) {
            expand(parent, tree, tokens, seen, sampling, least - path);
        } else {
            const Child child = children_[nodes_[parent].first_child + rank];
            const int32_t depth = nodes_[parent].depth + 1;
            const int32_t node = tree.add(parent, child.token, child.log_prob);
            nodes_.push_back({.depth = depth, .path = path + child.log_prob});
            const double bound = path + child.log_prob + kEvenChance;
            if (bound >= least && depth < max_depth_ && !eos_.contains(child.token)) push(-bound, node, kUnexpanded);
        }
        if (rank + 1 < nodes_[parent].num_children)
            push(-path - children_[nodes_[parent].first_child + rank + 1].log_prob, parent, rank + 1);
    }
    return tree.size() > 1;
}

void NgramTableSource::push(double cost, int32_t parent, int32_t rank) {
    heap_.push_back({cost, parent, rank});
    std::push_heap(heap_.begin(), heap_.end());
}

bool NgramTableSource::find(uint64_t context_hash, Entries& entries) const {
    const uint64_t bucket = (context_hash >> 32) * static_cast<uint64_t>(table_.num_buckets) >> 32;
    const auto fingerprint = static_cast<uint16_t>(context_hash);
    int64_t begin = table_.first_token[bucket];
    for (uint32_t context = table_.first_context[bucket]; context < table_.first_context[bucket + 1]; ++context) {
        if (table_.fingerprints[context] == fingerprint) {
            entries = {begin, table_.lengths[context]};
            return true;
        }
        begin += table_.lengths[context];
    }
    return false;
}

void NgramTableSource::expand(int32_t node, const TokenTree& tree, const std::vector<Token>& tokens,
                              const std::vector<bool>& seen, const Sampling& sampling, double least) {
    nodes_[node].first_child = static_cast<int32_t>(children_.size());
    nodes_[node].num_children = 0;
    // The longest known context that ends at the node; hashes grow from its latest token backwards.
    hashes_.assign(1, 0);
    auto before = static_cast<int64_t>(tokens.size()) - 2;  // the committed token before the root
    for (int32_t at = node; static_cast<int64_t>(hashes_.size()) <= table_.max_order && (at >= 0 || before >= 0);) {
        const Token token = at >= 0 ? tree.tokens[at] : tokens[before--];
        hashes_.push_back(longer_context(hashes_.back(), token));
        if (at >= 0) at = tree.parents[at];
    }
    Entries entries{0, 0};
    while (!hashes_.empty() && !find(hashes_.back(), entries)) hashes_.pop_back();
    if (hashes_.empty()) return;

    double remainder = 0.0;
    weights_.clear();
    for (int64_t i = entries.begin; i < entries.begin + entries.count; ++i) {
        const uint8_t step = table_.log_probs[i];
        remainder += probabilities_[step];
        weights_.push_back(seen[token_id(i)] ? powers_[step] * table_.again : powers_[step]);
    }
    double rest = table_.rest * std::pow(std::max(kLeastRemainder, 1.0 - remainder), table_.exponent);
    if (sampling.temperature > 0.0) {
        const double temperature = std::min(sampling.temperature, kMaxTemperature);
        const double power = table_.noise * temperature;
        const uint64_t key = noise_key(sampling.seed, static_cast<int64_t>(tokens.size()) + nodes_[node].depth);
        for (int64_t i = 0; i < entries.count; ++i)
            weights_[i] *= std::exp(power * gumbel(token_id(entries.begin + i), key));
        rest *= std::exp(table_.rest_noise * temperature);
    }
    double sum = 0.0;
    for (const double weight : weights_) sum += weight;
    const double total = rest + sum, enough = total * std::exp(least);
    for (int64_t i = 0; i < entries.count; ++i)  // weights for now
        if (weights_[i] >= enough) children_.push_back({weights_[i], token_id(entries.begin + i)});
    const auto first = children_.begin() + nodes_[node].first_child;
    std::sort(first, children_.end(), [](const Child& a, const Child& b) {
        return a.log_prob != b.log_prob ? a.log_prob > b.log_prob : a.token < b.token;
    });
    for (auto child = first; child != children_.end(); ++child) child->log_prob = std::log(child->log_prob / total);
    nodes_[node].num_children = static_cast<int32_t>(children_.end() - first);
}

}  // namespace treeserve
