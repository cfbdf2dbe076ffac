// A checked batch, and what attention needs to know of it.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.h"
#include "kv_cache.h"

namespace treeserve {

// Some rows of one sequence, for one KV head.
struct RowRange {
    int32_t first, count;
};

// Built once per forward pass and used by all its layers.
class BatchPlan {
public:
    // Throws std::invalid_argument for sizes and indices that do not fit; the plan is then unusable.
    void build(const TsBatch& batch, const TsShape& shape, const TsKvCache& kv);

    const TsBatch& batch() const { return *batch_; }
    const AttentionSequence& sequence(int32_t s) const { return sequences_[static_cast<size_t>(s)]; }

    // All rows, and the rows whose logits are wanted, in the order of the logits.
    const std::vector<AttentionRow>& rows() const { return rows_; }
    const std::vector<AttentionRow>& wanted_rows() const { return wanted_rows_; }

    // Group * 16 + lane where the row's K and V go.
    int64_t place(int64_t row) const { return places_[static_cast<size_t>(row)]; }
    int64_t most_visible() const { return most_visible_; }

private:
    // Where the next of each is written.
    struct Storage {
        int32_t *groups, *first_positions, *prefix_slots, *node_slots;
        uint16_t* masks;
    };

    void check_sizes() const;
    void check_rows();
    void check_inputs() const;
    void check_features() const;
    void check_sequences() const;
    void check_ancestors(int64_t s) const;
    void check_distinct_slots();
    Storage reserve_storage();
    void map_sequence(int64_t s, Storage& storage);
    void map_row(int64_t row, int64_t s, Storage& storage);
    int64_t num_nodes(int64_t s) const;

    const TsBatch* batch_ = nullptr;
    const TsShape* shape_ = nullptr;
    const TsKvCache* kv_ = nullptr;
    int64_t most_visible_ = 0;
    std::vector<AttentionSequence> sequences_;
    std::vector<AttentionRow> rows_, wanted_rows_;
    std::vector<int64_t> places_;
    std::vector<uint64_t> written_;  // one bit per slot, zero between calls
    // Storage of what sequences and rows point to.
    Scratch<int32_t> groups_, first_positions_, prefix_slots_, node_slots_;
    Scratch<uint16_t> masks_;
};

// Cuts rows into tasks of about the same size: rows of one sequence that follow each other, at most `most`.
void cut_rows(const std::vector<AttentionRow>& rows, int64_t most, std::vector<RowRange>& ranges);

}  // namespace treeserve
