// Makes one tree of what several sources drafted, by how likely each node is to come true given all that they say.
// The models and what they learn are those of mixture.py, which says why.
#pragma once

#include <array>
#include <unordered_set>
#include <vector>

#include "token_tree.h"

namespace treeserve {

constexpr int kMaxSources = 4;

struct MixedTree : TokenTree {
    std::vector<uint32_t> masks;  // of the sources that proposed each node
};

// One source's tree for one root, with what mixing needs of it.
struct Opinion {
    int source = 0;  // its bit
    TokenTree tree;
    Children children;
    std::vector<double> odds;  // log-odds that it claims for each node

    void weigh();  // its tree is there: fills in the rest
};

// Where each opinion's tree is at one node of the mixed tree; -1 for nowhere.
using Places = std::array<int32_t, kMaxSources>;

// All that was said of one root, in the order of the sources, and where committed tokens have led in it.
struct Opinions {
    std::array<Opinion, kMaxSources> all;
    int count = 0;
    Places places{};
    int32_t depth = 0;  // of these places

    const Opinion& operator[](int i) const { return all[i]; }
    void begin();  // all opinions are there: their places are the root
};

// What a mixture keeps of one sequence.
struct MixedSequence {
    bool is_greedy = true;  // whether the target takes its most probable token
    // For each source how much more often its first children were right here than it said.
    std::array<double, kMaxSources> trust{};
};

class Mixture {
  public:
    struct Bounds {
        int32_t max_nodes;  // the root not counted
        int32_t max_depth;
        double least;  // path probability
    };

    explicit Mixture(const std::unordered_set<Token>& eos) : eos_(eos) {}

    // The most likely nodes of all trees.
    void mix(const MixedSequence& sequence, const Opinions& opinions, Token root, const Bounds& bounds,
             MixedTree& tree);

    // Follows trees along committed tokens from where the last ones have led, and learns on the way.
    void learn(MixedSequence& sequence, Opinions& opinions, const std::vector<Token>& tokens);

  private:
    static constexpr int kRankClasses = 3;  // first, second, and all other children of a node
    // Weights: of a node, then of each source that expands it.
    static constexpr int kBias = 0, kFirstLevel = 1, kDeep = 2, kCommon = 3;
    static constexpr int kOdds = 0, kRank = 1, kTrust = kRank + kRankClasses, kSilent = kTrust + 1,
                         kSilentTrust = kSilent + 1, kPerSource = kSilentTrust + 1;
    static constexpr int kMaxWeights = kCommon + kMaxSources * kPerSource;
    static constexpr int kDeepFrom = 4;

    struct Model {
        bool is_made = false;
        std::array<double, kMaxWeights> weights{}, precisions{};
    };

    // A token that is proposed below a node, and what proposes it.
    struct Proposal {
        Token token;
        Places places;                           // of the child; -1 where a source does not propose it
        std::array<int32_t, kMaxSources> ranks;  // among its siblings there
        double odds;
    };

    struct Candidate {
        double path;  // probability
        int32_t depth, order, parent;
        Token token;
        double probability;
        Places places;
        bool operator<(const Candidate& other) const {  // the best, shallowest, first is on top of a heap
            if (path != other.path) return path < other.path;
            return depth != other.depth ? depth > other.depth : order > other.order;
        }
    };

    // What models say at one root, summed up as far as it is the same for many nodes.
    struct Terms {
        bool is_summed = false;
        std::array<double, kDeepFrom + 1> silence{};  // by depth
        std::array<double, kMaxSources> slope{};  // of each opinion
        std::array<std::array<double, kRankClasses>, kMaxSources> instead{};  // a claim of this rank, not silence
    };

    Model& model(bool is_greedy, uint32_t mask);
    // Which sources expand the node where they are, and in proposals_ what they propose.
    uint32_t gather(const Opinions& opinions, const Places& places);
    void push_children(const MixedSequence& sequence, const Opinions& opinions, const Places& places, int32_t parent,
                       int32_t depth, double path, double least);
    const Terms& terms(const MixedSequence& sequence, const Opinions& opinions, uint32_t mask);
    void learn_node(MixedSequence& sequence, const Opinions& opinions, const Places& places, uint32_t mask,
                    int32_t depth, Token token);

    const std::unordered_set<Token>& eos_;
    std::array<std::array<Model, 1 << kMaxSources>, 2> models_;
    std::array<Terms, 1 << kMaxSources> terms_;
    std::vector<Proposal> proposals_;
    std::vector<Candidate> heap_;
    int32_t order_ = 0;
};

}  // namespace treeserve
