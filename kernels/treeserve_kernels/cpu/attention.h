// Tree attention over paged KV: each row walks its visible slots in the order of their KV positions.
//
// A row's scores are listed over its visible positions alone, so that invisible ones leave no trace, and each sum below
// runs over that list in order: rows in a tree, in a chain and alone get the same bits. Rows and query heads that share
// a KV head ("score rows") are computed in tiles, so that each key and value that is loaded serves the whole tile.
#pragma once

#include "elementwise.h"

namespace treeserve::TREESERVE_ISA {

inline int smaller(int a, int b) { return a < b ? a : b; }

template <class Number>
inline constexpr bool kScaled = sizeof(Number) == 1;

// Calls sink(score row, cell, 16 scores): each score sums over head_dim in order. Where `ahead` is not null, asks for
// as much memory there as the cells' keys take.
template <class Number, int Rows, int Cells, class Sink>
void score_tile(const KvLayout& layout, const char* const* cells, const char* const* ahead, const float* queries,
                Sink sink) {
    Floats sums[Rows][Cells];
    const Number* keys[Cells];
#pragma GCC unroll 4
    for (int c = 0; c < Cells; ++c) keys[c] = reinterpret_cast<const Number*>(cells[c]);
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
        for (int c = 0; c < Cells; ++c) sums[r][c] = broadcast(0.0f);
    }
    for (int64_t d = 0; d < layout.head_dim; ++d) {
        if (ahead) {
#pragma GCC unroll 4
            for (int c = 0; c < Cells; ++c)
                __builtin_prefetch(ahead[c] + d * kLanes * static_cast<int64_t>(sizeof(Number)));
        }
        Floats key[Cells];
#pragma GCC unroll 4
        for (int c = 0; c < Cells; ++c) key[c] = load(keys[c] + d * kLanes);
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r) {
            const Floats query = broadcast(queries[r * kQueryStride + d]);
#pragma GCC unroll 4
            for (int c = 0; c < Cells; ++c) sums[r][c] = multiply_add(query, key[c], sums[r][c]);
        }
    }
#pragma GCC unroll 4
    for (int c = 0; c < Cells; ++c) {
        if constexpr (kScaled<Number>) {
            const Floats scale = load(reinterpret_cast<const float*>(cells[c] + layout.scales_offset));
#pragma GCC unroll 8
            for (int r = 0; r < Rows; ++r) sums[r][c] = multiply(sums[r][c], scale);
        }
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r) sink(r, c, sums[r][c]);
    }
}

template <class Number, int Cells, class Sink, int Rows = kAttentionRows>
void score_rows(int rows, const KvLayout& layout, const char* const* cells, const char* const* ahead,
                const float* queries, Sink sink) {
    if constexpr (Rows > 1) {
        if (rows < Rows) return score_rows<Number, Cells, Sink, Rows - 1>(rows, layout, cells, ahead, queries, sink);
    }
    score_tile<Number, Rows, Cells>(layout, cells, ahead, queries, sink);
}

// Slots whose values are added up, with one weight for each slot and score row.
struct WeightedSlots {
    const char* cells;
    const int32_t* slots;
    int count;
    const float* weights;  // [score rows][weight_stride]
    int64_t weight_stride;
    int fetch;  // for so many of the slots, asks for the values of the slot kSlotsAtOnce further on in the list
};

// Their values stay in the first-level cache while all score rows use them.
constexpr int kSlotsAtOnce = 64;

// sums[score row][vectors at column] += weight * value, slot by slot.
template <class Number, int Rows, int Vectors>
void weigh_tile(const KvLayout& layout, const WeightedSlots& in, int64_t column, float* sums) {
    Floats totals[Rows][Vectors];
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < Vectors; ++v) totals[r][v] = load(sums + r * layout.padded_head_dim + column + v * kLanes);
    }
    const char* first = in.cells + layout.values_offset + column * static_cast<int64_t>(sizeof(Number));
    const int64_t slot_bytes = layout.padded_head_dim * static_cast<int64_t>(sizeof(Number));
    const int64_t group_bytes = layout.group_bytes;
    for (int i = 0; i < in.count; ++i) {
        const auto address = [&](int32_t slot) {
            const auto place = static_cast<uint32_t>(slot);  // unsigned: division by shifting
            return first + place / kLanes * group_bytes + place % kLanes * slot_bytes;
        };
        if (i < in.fetch) {
            const char* ahead = address(in.slots[i + kSlotsAtOnce]);
            for (int64_t line = 0; line < Vectors * kLanes * static_cast<int64_t>(sizeof(Number)); line += 64) {
                __builtin_prefetch(ahead + line);
            }
        }
        const char* at = address(in.slots[i]);
        Floats value[Vectors];
#pragma GCC unroll 4
        for (int v = 0; v < Vectors; ++v) value[v] = load(reinterpret_cast<const Number*>(at) + v * kLanes);
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r) {
            const Floats weight = broadcast(in.weights[r * in.weight_stride + i]);
#pragma GCC unroll 4
            for (int v = 0; v < Vectors; ++v) totals[r][v] = multiply_add(weight, value[v], totals[r][v]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < Vectors; ++v) store(sums + r * layout.padded_head_dim + column + v * kLanes, totals[r][v]);
    }
}

template <class Number, int Vectors, int Rows = kAttentionRows>
void weigh_rows(int rows, const KvLayout& layout, const WeightedSlots& in, int64_t column, float* sums) {
    if constexpr (Rows > 1) {
        if (rows < Rows) return weigh_rows<Number, Vectors, Rows - 1>(rows, layout, in, column, sums);
    }
    weigh_tile<Number, Rows, Vectors>(layout, in, column, sums);
}

// Any number of score rows, over the whole width of the values.
template <class Number>
void weigh(int score_rows, const KvLayout& layout, WeightedSlots in, float* sums) {
    for (int r = 0; r < score_rows; r += kAttentionRows) {
        const int rows = smaller(kAttentionRows, score_rows - r);
        float* own = sums + r * layout.padded_head_dim;
        int64_t column = 0;
        for (; column + kAttentionColumns * kLanes <= layout.padded_head_dim; column += kAttentionColumns * kLanes) {
            weigh_rows<Number, kAttentionColumns>(rows, layout, in, column, own);
        }
        for (; column < layout.padded_head_dim; column += kLanes) {
            weigh_rows<Number, 1>(rows, layout, in, column, own);
        }
        in.weights += kAttentionRows * in.weight_stride;
        in.fetch = 0;
    }
}

// Turns `count` scores into e^(score - largest); returns 1 / their sum.
inline float exponentiate(float* scores, int64_t count) {
    store(scores + count, broadcast(-__builtin_inff()));
    Floats most = broadcast(-__builtin_inff());
    for (int64_t i = 0; i < count; i += kLanes) most = maximum(most, load(scores + i));
    const Floats shift = broadcast(largest(most));
    Floats total = broadcast(0.0f);
    for (int64_t i = 0; i < count; i += kLanes) {
        const Floats weights = exponential(subtract(load(scores + i), shift));
        store(scores + i, weights);
        total = add(total, count - i < kLanes ? load_first(scores + i, count - i) : weights);
    }
    return 1.0f / sum(total);
}

template <class Number>
struct Attention {
    const AttentionCall& call;
    const AttentionTask& task;
    const AttentionScratch& scratch;
    const KvLayout& layout = *call.layout;
    const AttentionSequence& sequence = *task.sequence;
    const int heads = call.heads_per_kv;
    const int score_rows = task.num_rows * heads;

    void run() const {
        rotate_queries();
        score_prefix();
        score_nodes();
        for (int r = 0; r < score_rows; ++r) scratch.inverses[r] = exponentiate(scores(r), num_visible(r / heads));
        if constexpr (kScaled<Number>) scale_weights();
        weigh_values();
        for (int r = 0; r < score_rows; ++r) write_output(r, scratch.inverses[r]);
    }

    float* scores(int score_row) const { return scratch.scores + score_row * scratch.score_stride; }
    float* sums(int score_row) const { return scratch.sums + score_row * layout.padded_head_dim; }
    const char* cell(int32_t group) const { return task.cells + group * layout.group_bytes; }
    int num_visible(int row) const { return sequence.prefix_positions + task.rows[row].num_slots; }

    void rotate_queries() const {
        for (int r = 0; r < score_rows; ++r) {
            const AttentionRow& row = task.rows[r / heads];
            const int64_t head = static_cast<int64_t>(task.kv_head) * heads + r % heads;
            const float* query = call.queries + row.query * call.query_stride + head * layout.head_dim;
            rotate_head(query, call.q_norm, *call.rotation, row.position, call.scale,
                        scratch.queries + r * kQueryStride);
        }
    }

    void score_prefix() const {
        int group = 0;
        for (; group + kAttentionColumns <= sequence.prefix_groups; group += kAttentionColumns) {
            score_prefix_groups<kAttentionColumns>(group);
        }
        for (; group < sequence.prefix_groups; ++group) score_prefix_groups<1>(group);
    }

    // A group's lanes beyond its last position write what the next group overwrites.
    template <int Cells>
    void score_prefix_groups(int group) const {
        const char *cells[Cells], *ahead[Cells];
        for (int c = 0; c < Cells; ++c) {
            cells[c] = cell(sequence.groups[group + c]);
            // The keys of the next cells; in the end, the first values that will be needed.
            const int next = group + c + Cells;
            ahead[c] = next < sequence.prefix_groups ? cell(sequence.groups[next])
                                                     : cell(sequence.groups[c]) + layout.values_offset;
        }
        const int32_t* positions = sequence.first_positions + group;
        for (int first = 0; first < score_rows; first += kAttentionRows) {
            score_tiles<Cells>(first, cells, first == 0 ? ahead : nullptr,
                               [&](int r, int c, const Floats& s) { store(scores(r) + positions[c], s); });
        }
    }

    void score_nodes() const {
        int lengths[kTaskRows];
        for (int row = 0; row < task.num_rows; ++row) lengths[row] = sequence.prefix_positions;
        for (int group = sequence.prefix_groups; group < sequence.num_groups; ++group) {
            const int index = group - sequence.prefix_groups;
            const char* cells[1] = {cell(sequence.groups[group])};
            for (int first = 0; first < score_rows; first += kAttentionRows) {
                if (!anyone_sees(first, index)) continue;
                score_tiles<1>(first, cells, nullptr, [&](int r, int, const Floats& s) {
                    store_compressed(scores(r) + lengths[r / heads], s, task.rows[r / heads].masks[index]);
                });
            }
            for (int row = 0; row < task.num_rows; ++row) {
                lengths[row] += __builtin_popcount(task.rows[row].masks[index]);
            }
        }
    }

    bool anyone_sees(int first, int index) const {
        const int last = smaller(first + kAttentionRows, score_rows) - 1;
        for (int row = first / heads; row <= last / heads; ++row) {
            if (task.rows[row].masks[index]) return true;
        }
        return false;
    }

    template <int Cells, class Sink>
    void score_tiles(int first, const char* const* cells, const char* const* ahead, Sink sink) const {
        treeserve::TREESERVE_ISA::score_rows<Number, Cells>(
            smaller(kAttentionRows, score_rows - first), layout, cells, ahead, scratch.queries + first * kQueryStride,
            [&](int r, int c, const Floats& s) { sink(first + r, c, s); });
    }

    // Int8 values are steps: their scales go into the weights.
    void scale_weights() const {
        const int prefix = sequence.prefix_positions;
        for (int group = 0; group < sequence.prefix_groups; ++group) {
            const int position = sequence.first_positions[group];
            const int64_t lanes = smaller(kLanes, sequence.first_positions[group + 1] - position);
            const Floats scale = load(value_scales(sequence.groups[group]));
            for (int r = 0; r < score_rows; ++r) {
                float* weights = scores(r) + position;
                store_first(weights, multiply(load(weights), scale), lanes);
            }
        }
        for (int row = 0; row < task.num_rows; ++row) {
            for (int i = 0; i < task.rows[row].num_slots; ++i) {
                const int32_t slot = task.rows[row].slots[i];
                const float scale = value_scales(slot / kLanes)[slot % kLanes];
                for (int head = 0; head < heads; ++head) scores(row * heads + head)[prefix + i] *= scale;
            }
        }
    }

    const float* value_scales(int32_t group) const {
        return reinterpret_cast<const float*>(cell(group) + layout.scales_offset) + kLanes;
    }

    // First what all rows of the task see, then the rest row by row.
    void weigh_values() const {
        for (int64_t i = 0; i < score_rows * layout.padded_head_dim; i += kLanes) {
            store(scratch.sums + i, broadcast(0.0f));
        }
        const int prefix = sequence.prefix_positions;
        for (int i = 0; i < prefix; i += kSlotsAtOnce) {
            const int count = smaller(kSlotsAtOnce, prefix - i);
            weigh_slots(0, score_rows, sequence.slots + i, i, count, smaller(count, prefix - i - kSlotsAtOnce));
        }
        int run = task.rows[0].run;
        for (int row = 1; row < task.num_rows; ++row) run = smaller(run, task.rows[row].run);
        weigh_slots(0, score_rows, task.rows[0].slots, prefix, run, 0);
        for (int row = 0; row < task.num_rows; ++row) {
            const AttentionRow& own = task.rows[row];
            weigh_slots(row * heads, heads, own.slots + run, prefix + run, own.num_slots - run, 0);
        }
    }

    void weigh_slots(int score_row, int count, const int32_t* slots, int first, int num_slots, int fetch) const {
        const WeightedSlots in{task.cells, slots, num_slots, scores(score_row) + first, scratch.score_stride, fetch};
        weigh<Number>(count, layout, in, sums(score_row));
    }

    void write_output(int score_row, float inverse) const {
        const int64_t head = static_cast<int64_t>(task.kv_head) * heads + score_row % heads;
        float* out = call.output + task.rows[score_row / heads].output * call.output_stride + head * layout.head_dim;
        for (int64_t d = 0; d < layout.head_dim; d += kLanes) {
            const Floats attended = multiply(load(sums(score_row) + d), broadcast(inverse));
            store_first(out + d, attended, layout.head_dim - d);
        }
    }
};

inline void attend(const AttentionCall& call, const AttentionTask& task, const AttentionScratch& scratch) {
    switch (call.layout->type) {
        case TS_KV_FLOAT32: return Attention<float>{call, task, scratch}.run();
        case TS_KV_BFLOAT16: return Attention<Bfloat16>{call, task, scratch}.run();
        case TS_KV_INT8: return Attention<int8_t>{call, task, scratch}.run();
    }
}

}  // namespace treeserve::TREESERVE_ISA
