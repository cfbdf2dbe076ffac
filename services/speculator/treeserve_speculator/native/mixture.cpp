#include "mixture.h"

#include <algorithm>
#include <bit>

namespace treeserve {

namespace {

constexpr double kLeastClaim = 0.002, kMostClaim = 0.995;
constexpr double kMemory = 200.0, kPriorPrecision = 3.0, kLeastCurvature = 0.005;
constexpr double kPriorBias = -0.2, kPriorOdds = 0.8, kPriorTrust = 1.0, kPriorSilent = -1.0;
constexpr double kTrustGain = 0.25, kTrustDecay = 0.1, kClaimSlope = 0.7;

uint32_t bit(int source) { return uint32_t{1} << source; }

double log_odds(double log_prob) {
    const double p = std::min(std::max(std::exp(log_prob), kLeastClaim), kMostClaim);
    return std::log(p / (1.0 - p));
}

double probability(double log_odds) {
    return log_odds > -30.0 ? 1.0 / (1.0 + std::exp(-log_odds)) : std::exp(log_odds);
}

}  // namespace

void Opinion::weigh() {
    children.of(tree.parents);
    odds.clear();
    for (const double log_prob : tree.log_probs) odds.push_back(log_odds(log_prob));
}

void Opinions::begin() {
    places.fill(-1);
    std::fill_n(places.begin(), count, 0);
    depth = 0;
}

void Mixture::mix(const MixedSequence& sequence, const Opinions& opinions, Token root, const Bounds& bounds,
                  MixedTree& tree) {
    tree.plant(root);
    tree.masks.assign(1, 0);
    heap_.clear();
    order_ = 0;
    for (Terms& terms : terms_) terms.is_summed = false;
    Places places = opinions.places;
    int32_t node = 0, depth = 0;
    double path = 1.0;
    while (true) {
        if (depth < bounds.max_depth && (node == 0 || !eos_.contains(tree.tokens[node])))
            push_children(sequence, opinions, places, node, depth + 1, path, bounds.least / path);
        if (heap_.empty() || tree.size() > bounds.max_nodes) return;
        std::pop_heap(heap_.begin(), heap_.end());
        const Candidate best = heap_.back();
        heap_.pop_back();
        node = tree.add(best.parent, best.token, std::log(best.probability));
        path = best.path;
        depth = best.depth;
        places = best.places;
        uint32_t mask = 0;
        for (int i = 0; i < opinions.count; ++i)
            if (places[i] >= 0) mask |= bit(opinions[i].source);
        tree.masks.push_back(mask);
    }
}

uint32_t Mixture::gather(const Opinions& opinions, const Places& places) {
    proposals_.clear();
    uint32_t mask = 0;
    for (int i = 0; i < opinions.count; ++i) {
        if (places[i] < 0) continue;
        const Opinion& opinion = opinions[i];
        int32_t rank = 0;
        for (int32_t child = opinion.children.first(places[i]); child >= 0; child = opinion.children.next(child)) {
            const Token token = opinion.tree.tokens[child];
            auto found = std::find_if(proposals_.begin(), proposals_.end(),
                                      [token](const Proposal& proposal) { return proposal.token == token; });
            if (found == proposals_.end()) {
                proposals_.push_back({.token = token, .places = {}, .ranks = {}, .odds = 0.0});
                found = proposals_.end() - 1;
                found->places.fill(-1);
            }
            found->places[i] = child;
            found->ranks[i] = rank++;
            mask |= bit(opinion.source);
        }
    }
    return mask;
}

void Mixture::push_children(const MixedSequence& sequence, const Opinions& opinions, const Places& places,
                            int32_t parent, int32_t depth, double path, double least) {
    const uint32_t mask = gather(opinions, places);
    if (mask == 0) return;
    const Terms& said = terms(sequence, opinions, mask);
    double sum = 0.0;
    for (Proposal& proposal : proposals_) {
        double odds = said.silence[std::min(depth, kDeepFrom)];
        for (int i = 0; i < opinions.count; ++i) {
            if (proposal.places[i] < 0) continue;
            const int rank = std::min<int>(proposal.ranks[i], kRankClasses - 1);
            odds += said.slope[i] * opinions[i].odds[proposal.places[i]] + said.instead[i][rank];
        }
        proposal.odds = odds;
        sum += probability(odds);
    }
    const double total = std::max(1.0, sum);
    for (const Proposal& proposal : proposals_) {
        const double p = probability(proposal.odds) / total;
        if (p < least) continue;
        heap_.push_back({path * p, depth, ++order_, parent, proposal.token, p, proposal.places});
        std::push_heap(heap_.begin(), heap_.end());
    }
}

const Mixture::Terms& Mixture::terms(const MixedSequence& sequence, const Opinions& opinions, uint32_t mask) {
    Terms& summed = terms_[mask];
    if (summed.is_summed) return summed;
    summed.is_summed = true;
    const auto& weights = model(sequence.is_greedy, mask).weights;
    double silence = weights[kBias];
    int offset = kCommon;
    for (int i = 0; i < opinions.count; ++i) {
        const int source = opinions[i].source;
        if (!(mask & bit(source))) continue;
        const double* own = &weights[offset];
        offset += kPerSource;
        const double trust = sequence.trust[source], silent = own[kSilent] + own[kSilentTrust] * trust;
        for (int rank = 0; rank < kRankClasses; ++rank) summed.instead[i][rank] = own[kRank + rank] - silent;
        summed.instead[i][0] += own[kTrust] * trust;
        summed.slope[i] = own[kOdds];
        silence += silent;
    }
    summed.silence.fill(silence);
    summed.silence[1] += weights[kFirstLevel];
    summed.silence[kDeepFrom] += weights[kDeep];
    return summed;
}

Mixture::Model& Mixture::model(bool is_greedy, uint32_t mask) {
    Model& model = models_[is_greedy][mask];
    if (model.is_made) return model;
    model.is_made = true;
    model.precisions.fill(kPriorPrecision);
    model.weights[kBias] = kPriorBias;
    const int sources = std::popcount(mask);
    for (int i = 0; i < sources; ++i) {
        double* own = &model.weights[kCommon + i * kPerSource];
        own[kOdds] = kPriorOdds / std::sqrt(static_cast<double>(sources));
        own[kTrust] = kPriorTrust;
        own[kSilent] = kPriorSilent;
    }
    return model;
}

void Mixture::learn(MixedSequence& sequence, Opinions& opinions, const std::vector<Token>& tokens) {
    for (const Token token : tokens) {
        const uint32_t mask = gather(opinions, opinions.places);
        if (mask == 0) return;
        learn_node(sequence, opinions, opinions.places, mask, ++opinions.depth, token);
        const auto right = std::find_if(proposals_.begin(), proposals_.end(),
                                        [token](const Proposal& proposal) { return proposal.token == token; });
        if (right == proposals_.end())
            opinions.places.fill(-1);
        else
            opinions.places = right->places;
    }
}

void Mixture::learn_node(MixedSequence& sequence, const Opinions& opinions, const Places& places, uint32_t mask,
                         int32_t depth, Token token) {
    Model& learner = model(sequence.is_greedy, mask);
    std::array<double, kMaxWeights> gradients{}, curvatures{};
    for (const Proposal& proposal : proposals_) {
        int features[kMaxWeights];
        double values[kMaxWeights];
        int count = 0;
        const auto note = [&](int feature, double value) {
            features[count] = feature;
            values[count++] = value;
        };
        note(kBias, 1.0);
        if (depth == 1) note(kFirstLevel, 1.0);
        if (depth >= kDeepFrom) note(kDeep, 1.0);
        int offset = kCommon;
        for (int i = 0; i < opinions.count; ++i) {
            const Opinion& opinion = opinions[i];
            if (!(mask & bit(opinion.source))) continue;
            const double trust = sequence.trust[opinion.source];
            if (proposal.places[i] >= 0) {
                note(offset + kOdds, opinion.odds[proposal.places[i]]);
                note(offset + kRank + std::min<int>(proposal.ranks[i], kRankClasses - 1), 1.0);
                if (proposal.ranks[i] == 0) note(offset + kTrust, trust);
            } else {
                note(offset + kSilent, 1.0);
                note(offset + kSilentTrust, trust);
            }
            offset += kPerSource;
        }
        double odds = 0.0;
        for (int k = 0; k < count; ++k) odds += learner.weights[features[k]] * values[k];
        const double p = probability(odds), error = (proposal.token == token ? 1.0 : 0.0) - p;
        const double curvature = std::max(p * (1.0 - p), kLeastCurvature);
        for (int k = 0; k < count; ++k) {
            gradients[features[k]] += error * values[k];
            curvatures[features[k]] += curvature * values[k] * values[k];
        }
    }
    for (int k = 0; k < kMaxWeights; ++k) {  // one diagonal Newton step; features that did not occur have no gradient
        if (gradients[k] == 0.0 && curvatures[k] == 0.0) continue;
        learner.precisions[k] = std::min(learner.precisions[k] + curvatures[k], kMemory);
        learner.weights[k] += gradients[k] / learner.precisions[k];
    }
    for (int i = 0; i < opinions.count; ++i) {
        if (places[i] < 0) continue;
        const Opinion& opinion = opinions[i];
        const int32_t first = opinion.children.first(places[i]);
        if (first < 0) continue;
        double& trust = sequence.trust[opinion.source];
        const double right = opinion.tree.tokens[first] == token ? 1.0 : 0.0;
        trust += kTrustGain * (right - probability(kClaimSlope * opinion.odds[first])) - kTrustDecay * trust;
    }
}

}  // namespace treeserve
