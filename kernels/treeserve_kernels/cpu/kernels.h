// The arithmetic of a forward pass, as a table of functions that each instruction set fills in.
//
// The kernels are written once (linear.h, attention.h, elementwise.h, sampling.h) over a vector of 16 numbers, and
// compiled once per instruction set. Every operation on that vector is exact, correctly rounded or in a fixed order, so
// that all tables compute the same bits. The kernels know plain pointers only: no inline function of the standard
// library can end up compiled for an instruction set that the CPU lacks.
#pragma once

#include <cstdint>

#include "api.h"

namespace treeserve {

constexpr int kLanes = 16;         // numbers in a vector, and slots in a slot group
constexpr int kPanelOutputs = 32;  // outputs in a panel of weights
constexpr int kGroupInputs = 64;   // inputs that share an activation scale
constexpr int64_t kMaxHeadDim = 512;
constexpr int kTaskRows = 24;  // most rows of one attention task

constexpr int64_t rounded_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// Rows quantised for a linear layer. The rows of a group lie side by side, 64 bytes each, so that a kernel finds its
// rows at constant distances whatever the width of the layer.
struct Activations {
    int8_t* values;    // [groups][rows][64]
    float* scales;     // [groups][rows]
    int32_t* offsets;  // [groups][rows]: -128 * the sum of the group, which undoes the 128 added to each weight
    int64_t rows;
    int64_t groups;
};

// A linear layer applied to quantised rows.
struct LinearCall {
    const TsLinear* linear;
    Activations input;
    float* output;  // [rows][stride]
    int64_t stride;
};

// silu(gate) * up of an interleaved layer, quantised for the next layer.
struct SwigluCall {
    const TsLinear* linear;
    Activations input;
    Activations output;
    int64_t num_outputs;  // of the product, padded to 16
};

// Where a layer's keys and values lie. A cell holds one KV head's keys and values of one slot group, 16 slots:
// keys [head_dim][16], values [16][padded head_dim], and with int8 the scales of the 16 keys and of the 16 values.
struct KvLayout {
    TsKvType type;
    int64_t head_dim;
    int64_t padded_head_dim;
    int64_t cell_bytes;
    int64_t group_bytes;  // from a slot group to the next: cells of all layers and KV heads
    int64_t values_offset;
    int64_t scales_offset;
};

// What rotates one head: out[i] = x[i] cos - x[i + D/2] sin, out[i + D/2] = x[i + D/2] cos + x[i] sin.
struct Rotation {
    const float* cosines;  // [max_positions][head_dim / 2]
    const float* sines;
    int64_t head_dim;
    float epsilon;
};

struct KeyValueWrite {
    const KvLayout* layout;
    const Rotation* rotation;
    const float* key;  // before normalisation and rotation
    const float* value;
    const float* k_norm;  // or null
    int64_t position;
    char* cell;
    int lane;  // the slot's place in its group
};

// One row of the batch as attention sees it. Its visible positions are those of the sequence's prefix, which all rows
// see, and after them those in `slots`.
struct AttentionRow {
    int64_t query;   // row of the projected queries
    int64_t output;  // row to write
    int64_t position;
    int32_t sequence;
    const uint16_t* masks;  // visible lanes of each slot group after the prefix
    const int32_t* slots;   // visible slots after the prefix, in the order of KV positions
    int32_t num_slots;
    int32_t run;  // leading entries of `slots` that follow each other without a gap in KV positions
};

struct AttentionSequence {
    const int32_t* groups;           // slot group of each group of KV positions
    const int32_t* first_positions;  // KV position of each one's first lane
    const int32_t* slots;            // [prefix_positions]
    int32_t num_groups;
    int32_t prefix_groups;  // those that hold nothing but context
    int32_t prefix_positions;
};

struct AttentionCall {
    const KvLayout* layout;
    const Rotation* rotation;
    const float* queries;  // [rows][query_stride]
    const float* q_norm;   // or null
    float* output;         // [rows][output_stride]
    int64_t query_stride;
    int64_t output_stride;
    int heads_per_kv;
    float scale;
};

// Some rows of one sequence, attending with the query heads that share one KV head.
struct AttentionTask {
    const AttentionSequence* sequence;
    const AttentionRow* rows;
    int num_rows;
    int kv_head;
    const char* cells;  // of the KV head in slot group 0 of the layer
};

struct AttentionScratch {
    float* queries;   // [score rows][kQueryStride]
    float* scores;    // [score rows][score_stride]
    float* sums;      // [score rows][padded head_dim]
    float* inverses;  // [score rows]
    int64_t score_stride;
};

// A token that may win, as far as a scan can tell, or one of the largest values.
struct Candidate {
    int32_t index;
    float score;  // the value; of a scan infinite where it cannot tell
};

// Part of the logits, to be looked through for tokens that may win the argmax of value / T + noise.
//
// With noise g = -log(-log U), 1 - U <= -log U <= (1 - U) exp(3.604) for every U there is. So (value - best) / T + g is
// never above the logarithm of r = exp((value - best) / T) / (1 - U), at most 3.604 below it, and a token whose r is
// exp(3.604) = 2^5.200 times smaller than another's cannot win. Scores are log2 r, at most 0.0015 too low and at most
// 0.0862 too high.
struct RivalScan {
    const float* values;  // [count]
    const int64_t* ids;   // [count], or null: first_id, first_id + 1, ...
    int64_t count;
    int64_t first_id;
    uint64_t key;  // of the noise
    float best;    // largest value of all parts
    float scale;   // log2(e) / T
    float leader;  // largest score so far; 0 at first, which the best reaches whatever its noise
};

// Candidates score this far behind the leader at most: 5.200 + 0.0015 + 0.0862, rivals.cpp's margin, and some room.
constexpr float kRivalRange = 5.3f;
constexpr float kMostNoise = 53.0f;  // of log2 1 / (1 - U)

// Not a multiple of what the first-level cache's sets repeat at.
constexpr int64_t kQueryStride = kMaxHeadDim + kLanes;

struct Kernels {
    const char* name;
    // y = x / rms(x) * weight; x and weight are zero from width to padded_width, a multiple of 16.
    void (*normalise)(const float* x, const float* weight, int64_t width, int64_t padded_width, float epsilon,
                      float* y);
    void (*quantise)(const float* x, const Activations& out, int64_t row);
    void (*linear_store)(const LinearCall& call, int64_t panel);
    void (*linear_add)(const LinearCall& call, int64_t panel);
    // One group of 64 products; `products` is scratch, [rows][64].
    void (*linear_swiglu)(const SwigluCall& call, int64_t group, float* products);
    void (*write_key_value)(const KeyValueWrite& write);
    void (*attend)(const AttentionCall& call, const AttentionTask& task, const AttentionScratch& scratch);
    // NaN if a value is NaN or +inf.
    float (*largest_value)(const float* values, int64_t count);
    // The `num` largest of at least as many values, the largest first, of equal ones the first. False if some are not
    // finite: what is written says nothing then.
    bool (*find_largest)(const float* values, int64_t count, int num, Candidate* out);
    // Raises the scan's leader and returns how many candidates it wrote, in order; `out` has room for `count`.
    int64_t (*find_candidates)(RivalScan& scan, Candidate* out);
};

extern const Kernels kPortableKernels;
#if defined(__x86_64__)
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
#endif

}  // namespace treeserve
