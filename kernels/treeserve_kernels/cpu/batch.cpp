#include "batch.h"

#include <algorithm>
#include <cmath>

#include "checks.h"

namespace treeserve {

void BatchPlan::build(const TsBatch& batch, const TsShape& shape, const TsKvCache& kv) {
    batch_ = &batch;
    shape_ = &shape;
    kv_ = &kv;
    check_sizes();
    check_rows();
    check_inputs();
    check_features();
    check_sequences();
    check_distinct_slots();
    rows_.clear();
    wanted_rows_.clear();
    sequences_.clear();
    most_visible_ = 0;
    Storage storage = reserve_storage();
    for (int64_t s = 0; s < batch.num_sequences; ++s) map_sequence(s, storage);
    for (int64_t i = 0; i < batch.num_logits; ++i) {
        AttentionRow row = rows_[static_cast<size_t>(batch.logits_indices[i])];
        row.output = i;
        wanted_rows_.push_back(row);
    }
}

void BatchPlan::check_sizes() const {
    const TsBatch& b = *batch_;
    constexpr int64_t kMost = int64_t{1} << 24;
    require(b.num_rows >= 0 && b.num_rows <= kMost, "number of rows ", b.num_rows);
    require(b.num_sequences >= 0 && b.num_sequences <= kMost, "number of sequences ", b.num_sequences);
    require(b.num_logits >= 0 && b.num_logits <= kMost, "number of logits ", b.num_logits);
    require(b.num_features >= 0 && b.num_features <= kMost, "number of feature rows ", b.num_features);
    require(b.num_feature_layers >= 0, "number of feature layers ", b.num_feature_layers);
    require(b.block_size == kv_->block_size(), "block size ", b.block_size, ", but the KV cache has ",
            kv_->block_size());
}

void BatchPlan::check_rows() {
    const TsBatch& b = *batch_;
    places_.resize(static_cast<size_t>(b.num_rows));
    for (int64_t i = 0; i < b.num_rows; ++i) {
        require_index("positions", i, b.positions[i], shape_->max_positions);
        require_index("slot_mapping", i, b.slot_mapping[i], kv_->num_slots());
        places_[static_cast<size_t>(i)] = kv_->place(b.slot_mapping[i]);
    }
    for (int64_t i = 0; i < b.num_logits; ++i) require_index("logits_indices", i, b.logits_indices[i], b.num_rows);
}

// Quantising a number that is not finite is undefined.
void BatchPlan::check_inputs() const {
    const TsBatch& b = *batch_;
    if (!b.inputs) {
        for (int64_t i = 0; i < b.num_rows; ++i) require_index("input_ids", i, b.input_ids[i], shape_->vocab_size);
        return;
    }
    for (int64_t row = 0; row < b.num_rows; ++row) {
        const float* input = b.inputs + row * shape_->hidden_size;
        const auto finite = [](float x) { return std::isfinite(x); };
        require(std::all_of(input, input + shape_->hidden_size, finite), "inputs of row ", row, " are not finite");
    }
}

void BatchPlan::check_features() const {
    const TsBatch& b = *batch_;
    for (int64_t i = 0; i < b.num_features; ++i) require_index("feature_rows", i, b.feature_rows[i], b.num_rows);
    for (int64_t i = 0, least = 1; i < b.num_feature_layers; least = b.feature_layers[i++] + 1) {
        const int64_t layer = b.feature_layers[i];
        require(layer >= least && layer < shape_->num_layers, "feature_layers ", i, " is ", layer, ", outside [", least,
                ", ", shape_->num_layers, ")");
    }
}

int64_t BatchPlan::num_nodes(int64_t s) const {
    const TsBatch& b = *batch_;
    return int64_t{b.node_offsets[s]} + b.query_offsets[s + 1] - b.query_offsets[s];
}

void BatchPlan::check_sequences() const {
    const TsBatch& b = *batch_;
    require(b.query_offsets[0] == 0, "query_offsets begin with ", b.query_offsets[0], " instead of 0");
    require(b.query_offsets[b.num_sequences] == b.num_rows, "query_offsets end with ", b.query_offsets[b.num_sequences],
            " instead of the number of rows, ", b.num_rows);
    // All offsets first: they say which rows and words may be read.
    for (int64_t s = 0; s < b.num_sequences; ++s) {
        require(b.query_offsets[s] <= b.query_offsets[s + 1], "query_offsets fall after sequence ", s);
    }
    for (int64_t s = 0; s < b.num_sequences; ++s) {
        require(b.context_lens[s] >= 0, "context_lens ", s, " is ", b.context_lens[s]);
        require(b.node_offsets[s] >= 0, "node_offsets ", s, " is ", b.node_offsets[s]);
        if (b.query_offsets[s] == b.query_offsets[s + 1]) continue;
        const int64_t positions = b.context_lens[s] + num_nodes(s);
        const int64_t blocks = (positions + b.block_size - 1) / b.block_size;
        require(positions <= INT32_MAX / 2, "sequence ", s, " has ", positions, " KV positions");
        require(blocks <= b.blocks_per_sequence, "sequence ", s, " has ", positions, " KV positions and ",
                b.blocks_per_sequence, " blocks of ", b.block_size);
        for (int64_t i = 0; i < blocks; ++i) {
            const int64_t block = b.block_tables[s * b.blocks_per_sequence + i];
            require(block >= 0 && block < kv_->num_blocks(), "block ", i, " of sequence ", s, " is ", block,
                    ", outside [0, ", kv_->num_blocks(), ")");
        }
        check_ancestors(s);
    }
}

void BatchPlan::check_ancestors(int64_t s) const {
    const TsBatch& b = *batch_;
    const int64_t nodes = num_nodes(s);
    for (int64_t row = b.query_offsets[s]; row < b.query_offsets[s + 1]; ++row) {
        const uint64_t* words = b.ancestor_words + row * b.words_per_row;
        const int64_t own = b.node_offsets[s] + row - b.query_offsets[s];
        require(own / 64 < b.words_per_row && (words[own / 64] >> own % 64 & 1), "row ", row,
                " does not see its own node, ", own);
        for (int64_t w = nodes / 64; w < b.words_per_row; ++w) {
            const uint64_t beyond = w == nodes / 64 ? ~uint64_t{0} << nodes % 64 : ~uint64_t{0};
            require(!(words[w] & beyond), "row ", row, " sees a node that does not exist: its sequence has ", nodes);
        }
    }
}

// Two rows with one slot would race for it.
void BatchPlan::check_distinct_slots() {
    const TsBatch& b = *batch_;
    written_.resize(std::max(written_.size(), static_cast<size_t>(kv_->num_slots() / 64 + 1)));
    int64_t twice = -1, marked = 0;
    for (; marked < b.num_rows && twice < 0; ++marked) {
        const int64_t slot = b.slot_mapping[marked];
        uint64_t& word = written_[static_cast<size_t>(slot / 64)];
        const uint64_t bit = uint64_t{1} << slot % 64;
        if (word & bit) twice = slot;
        word |= bit;
    }
    for (int64_t row = 0; row < marked; ++row) written_[static_cast<size_t>(b.slot_mapping[row] / 64)] = 0;
    require(twice < 0, "slot_mapping holds slot ", twice, " twice");
}

BatchPlan::Storage BatchPlan::reserve_storage() {
    const TsBatch& b = *batch_;
    int64_t groups = 0, prefix_slots = 0, masks = 0, node_slots = 0;
    for (int64_t s = 0; s < b.num_sequences; ++s) {
        const int64_t rows = b.query_offsets[s + 1] - b.query_offsets[s];
        if (rows == 0) continue;
        const int64_t positions = b.context_lens[s] + num_nodes(s);
        groups += (positions + b.block_size - 1) / b.block_size * kv_->groups_per_block();
        prefix_slots += b.context_lens[s];
        // Beyond the prefix lie the nodes and less than one group of context; each group holds at least one position.
        masks += rows * (num_nodes(s) + 1);
        node_slots += rows * (num_nodes(s) + kLanes);
    }
    groups_.reserve(groups);
    first_positions_.reserve(groups);
    prefix_slots_.reserve(prefix_slots);
    masks_.reserve(masks);
    node_slots_.reserve(node_slots);
    return {groups_.data(), first_positions_.data(), prefix_slots_.data(), node_slots_.data(), masks_.data()};
}

void BatchPlan::map_sequence(int64_t s, Storage& storage) {
    const TsBatch& b = *batch_;
    AttentionSequence sequence{storage.groups, storage.first_positions, storage.prefix_slots, 0, 0, 0};
    const int64_t context = b.context_lens[s];
    const int64_t first_row = b.query_offsets[s], last_row = b.query_offsets[s + 1];
    const int64_t positions = first_row == last_row ? 0 : context + num_nodes(s);
    for (int64_t position = 0; position < positions;) {
        const int64_t within = position % b.block_size;
        const int64_t block = b.block_tables[s * b.blocks_per_sequence + position / b.block_size];
        const int64_t group = block * kv_->groups_per_block() + within / kLanes;
        const int64_t lanes = std::min<int64_t>(kLanes, b.block_size - within);
        *storage.groups++ = static_cast<int32_t>(group);
        *storage.first_positions++ = static_cast<int32_t>(position);
        ++sequence.num_groups;
        if (position + lanes <= context) {
            ++sequence.prefix_groups;
            sequence.prefix_positions += static_cast<int32_t>(lanes);
            for (int64_t lane = 0; lane < lanes; ++lane) {
                *storage.prefix_slots++ = static_cast<int32_t>(group * kLanes + lane);
            }
        }
        position += lanes;
    }
    sequences_.push_back(sequence);
    for (int64_t row = first_row; row < last_row; ++row) map_row(row, s, storage);
}

namespace {

// Which of the `lanes` KV positions from context + `node` on a row sees; negative nodes are context.
uint32_t visible_lanes(const uint64_t* words, int64_t num_words, int64_t node, int64_t lanes) {
    const uint32_t exist = (uint32_t{1} << lanes) - 1;
    const int64_t context_lanes = std::clamp<int64_t>(-node, 0, kLanes);
    const int64_t first = std::max<int64_t>(node, 0);
    uint64_t bits = first / 64 < num_words ? words[first / 64] >> first % 64 : 0;
    if (first % 64 && first / 64 + 1 < num_words) bits |= words[first / 64 + 1] << (64 - first % 64);
    const uint64_t visible = bits << context_lanes | ((uint64_t{1} << context_lanes) - 1);
    return static_cast<uint32_t>(visible) & exist;
}

}  // namespace

void BatchPlan::map_row(int64_t row, int64_t s, Storage& storage) {
    const TsBatch& b = *batch_;
    const AttentionSequence& sequence = sequences_.back();
    AttentionRow mapped{row, row, b.positions[row], static_cast<int32_t>(s), storage.masks, storage.node_slots, 0, 0};
    const int32_t last_position = static_cast<int32_t>(b.context_lens[s] + num_nodes(s));
    for (int32_t i = sequence.prefix_groups; i < sequence.num_groups; ++i) {
        const int32_t first = sequence.first_positions[i];
        const int32_t end = i + 1 < sequence.num_groups ? sequence.first_positions[i + 1] : last_position;
        const uint32_t mask = visible_lanes(b.ancestor_words + row * b.words_per_row, b.words_per_row,
                                            first - b.context_lens[s], end - first);
        *storage.masks++ = static_cast<uint16_t>(mask);
        for (uint32_t left = mask; left; left &= left - 1) {
            const int32_t lane = __builtin_ctz(left);
            *storage.node_slots++ = sequence.groups[i] * kLanes + lane;
            if (first + lane == sequence.prefix_positions + mapped.run) ++mapped.run;
            ++mapped.num_slots;
        }
    }
    most_visible_ = std::max<int64_t>(most_visible_, sequence.prefix_positions + mapped.num_slots);
    rows_.push_back(mapped);
}

void cut_rows(const std::vector<AttentionRow>& rows, int64_t most, std::vector<RowRange>& ranges) {
    ranges.clear();
    const auto size = static_cast<int64_t>(rows.size());
    const auto sequence = [&](int64_t row) { return rows[static_cast<size_t>(row)].sequence; };
    for (int64_t first = 0, last; first < size; first = last) {
        for (last = first + 1; last < size && sequence(last) == sequence(first);) ++last;
        const int64_t count = last - first, pieces = (count + most - 1) / most;
        for (int64_t piece = 0; piece < pieces; ++piece) {
            const int64_t begin = first + count * piece / pieces, end = first + count * (piece + 1) / pieces;
            ranges.push_back({static_cast<int32_t>(begin), static_cast<int32_t>(end - begin)});
        }
    }
}

}  // namespace treeserve
