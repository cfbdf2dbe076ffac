// Drafts with all cheap sources for one sequence after another: sources and mixture of drafter.py, without its choice.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "drafting.h"
#include "mixture.h"
#include "ngram_source.h"
#include "ngram_table_source.h"
#include "recycling_source.h"
#include "suffix_source.h"

struct TsDrafter {
  public:
    explicit TsDrafter(const TsDraftingConfig& config);

    void assign(int64_t handle, const TsDraftSequence& sequence);
    void commit(int64_t handle, int32_t base_len, const int32_t* token_ids, int32_t count);
    void release(int64_t handle);
    void remember(int64_t handle, int32_t position, const int32_t* top, int32_t rows, int32_t width);
    TsDraftTree draft(int64_t handle, int32_t budget, double node_price);
    void learn();
    const std::vector<TsSourceCounts>& counts() const { return counts_; }

    std::mutex busy;  // held by whoever calls any of these

  private:
    // What was drafted for one root.
    struct Drafted {
        treeserve::Opinions opinions;
        treeserve::MixedTree tree;
        bool is_followed = false;  // tokens were committed after the root
    };

    struct Sequence {
        std::vector<treeserve::Token> tokens;
        int32_t prompt_len;
        treeserve::Sampling sampling;
        bool asks_table;
        std::string tenant;
        treeserve::NgramIndex ngrams;
        treeserve::SuffixSource::Sequence suffixes;
        treeserve::RecyclingTable recycled;
        std::vector<bool> seen;  // token ids
        treeserve::MixedSequence mixed;
        std::shared_ptr<Drafted> drafted;  // for the latest root that it was drafted for
    };

    // Committed tokens, to be learnt from when nobody waits: its sequence may have ended by then.
    struct Lesson {
        std::shared_ptr<Sequence> sequence;
        std::shared_ptr<Drafted> drafted;
        bool is_first;  // of those after the root
        std::vector<treeserve::Token> tokens;
    };

    const std::shared_ptr<Sequence>& find(int64_t handle) const;
    void check_tokens(const int32_t* token_ids, int32_t count) const;
    bool propose(TsSource source, Sequence& sequence, int32_t budget, double node_price, treeserve::TokenTree& tree);
    std::shared_ptr<Drafted> blank();
    void count_visits(const treeserve::MixedTree& tree, const std::vector<treeserve::Token>& tokens);

    std::vector<TsSource> sources_;
    std::vector<TsSourceCounts> counts_;
    std::unordered_set<treeserve::Token> eos_;
    treeserve::Token vocab_size_;
    int32_t max_nodes_, max_depth_;
    treeserve::SuffixSource suffix_;
    treeserve::RecyclingSource recycling_;
    std::optional<treeserve::NgramTableSource> table_;
    treeserve::Mixture mixture_;
    std::unordered_map<int64_t, std::shared_ptr<Sequence>> sequences_;
    std::vector<Lesson> lessons_;
    std::vector<std::shared_ptr<Drafted>> spare_;  // learnt from: their memory serves the next trees
};
