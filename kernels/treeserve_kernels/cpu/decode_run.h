// Steps in a row without anybody who plans them: for models whose passes are short beside an interpreter's work.
#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>
#include <vector>

#include "api.h"
#include "decoder.h"
#include "kv_cache.h"
#include "node_choice.h"

namespace treeserve {

// One run, from its first step to its last. What is emitted is what the same steps would emit if the verifier planned
// each of them: tests compare the two.
class DecodeRun {
public:
    // Throws std::invalid_argument for what api.h does not allow.
    DecodeRun(TsDecoder& decoder, TsKvCache& kv, TsRun& run);

    // Throws what a forward pass throws. What was emitted before counts.
    void go();

private:
    using Clock = std::chrono::steady_clock;

    // A sequence's tree in the present step. A drafted node is one of the drafter's, a row one that is verified.
    struct Tree {
        TsDraftTree drafted;                // nothing but a root where nothing was drafted
        std::vector<int32_t> depths;        // of the drafted nodes
        std::vector<double> paths;          // their log-probabilities, each with all above it
        std::vector<int32_t> ranked;        // drafted nodes that may be verified, the best first
        std::vector<double> accepted;       // of the ranked ones: what is expected
        std::vector<int32_t> ranked_depths;
        std::vector<int32_t> nodes;         // of the rows, ascending, the root first
        double expected = 0.0;              // tokens beyond one that they should bring
        std::vector<int32_t> parents;       // rows' parents, as rows of the sequence
        int64_t first_row, first_logits;    // in the batch; of the rows with logits
        int32_t unread;                     // tokens that this step computes of a sequence that reads
        std::vector<int32_t> walk;          // rows whose logits chose tokens: their KV stays
        std::vector<int32_t> top;           // [walk, top_tokens]
    };

    TsRunSequence& sequence(size_t s) const { return run_.sequences[s]; }
    size_t size() const { return trees_.size(); }
    bool may_go_on() const;
    bool has_room() const;
    bool reads(size_t s) const { return sequence(s).num_unread > 0; }
    int64_t computed(size_t s) const;
    int64_t kv_room(size_t s) const;
    int64_t slot(const TsRunSequence& each, int64_t position) const;
    bool draft();
    bool draft_tree(size_t s);
    void rank(size_t s);
    void choose_nodes();
    void choose_unread();
    void lay_out();
    void fill_rows(size_t s);
    void fill_unread(size_t s);
    int64_t add_row(size_t s, int32_t token, int64_t position, int64_t row, int64_t parent);
    void forward(TsRunStep& step);
    void accept(size_t s, TsRunRecord& record);
    int32_t choose_token(size_t s, int64_t row, int32_t emitted, int32_t* top);
    void learn_acceptance(size_t s, const TsRunRecord& record, double expected);
    bool tell_drafter(size_t s, const TsRunRecord& record);
    void keep(size_t s);
    bool step();

    TsDecoder& decoder_;
    TsKvCache& kv_;
    TsRun& run_;
    std::lock_guard<std::mutex> alone_;
    Clock::time_point began_ = Clock::now();
    int64_t num_outputs_;
    std::vector<Tree> trees_;
    std::vector<size_t> decoding_;  // sequences that do, in order
    int64_t room_ = 0;              // most draft nodes of a step
    std::vector<TsOffer> offers_;
    NodeChoice choice_;

    // The batch.
    std::vector<int64_t> input_ids_, positions_, slots_, logits_indices_;
    std::vector<int32_t> block_tables_, contexts_, query_offsets_, node_offsets_;
    std::vector<uint64_t> words_;
    int64_t blocks_per_sequence_ = 0, words_per_row_ = 0;
    Scratch<float>& logits_;

    std::vector<int64_t> moved_from_, moved_to_, rivals_;
};

}  // namespace treeserve
