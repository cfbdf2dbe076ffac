// The C interface of the native decoder: what the Python wrappers call.
//
// A function that can fail returns a TsStatus; ts_last_error() then says why, for the calling thread. A call that fails
// has changed nothing. Pointers are borrowed for the call, except the weights, which stay the caller's and must outlive
// the decoder. A decoder serves one call at a time: a second one waits.
#pragma once

#include <stdint.h>

#include "drafter_calls.h"

#ifdef __cplusplus
extern "C" {
#endif

#define TS_EXPORT __attribute__((visibility("default")))
#define TS_ABI_VERSION 7

typedef enum TsStatus { TS_OK = 0, TS_INVALID_ARGUMENT = 1, TS_OUT_OF_MEMORY = 2, TS_INTERNAL = 3 } TsStatus;
typedef enum TsKvType { TS_KV_FLOAT32 = 0, TS_KV_BFLOAT16 = 1, TS_KV_INT8 = 2 } TsKvType;

// An int8 linear layer, packed as packing.py describes: panels of 32 outputs, each aligned to 64 bytes.
typedef struct TsLinear {
    const uint8_t* panels;  // [ceil(N / 32)][ceil(K / 64) * 16][32][4], weight + 128
    const float* scales;    // [ceil(N / 32) * 32], in the order of the panels
    const float* bias;      // like scales, or null
    int64_t num_outputs;    // N; of an interleaved layer, twice its padded half
    int64_t num_inputs;     // K
} TsLinear;

typedef struct TsLayer {
    const float* input_norm;  // [hidden_size]
    TsLinear qkv;             // all query heads, then the key heads, then the value heads
    const float* q_norm;      // [head_dim], or null
    const float* k_norm;
    TsLinear attention_output;
    const float* feed_forward_norm;
    TsLinear gate_up;  // interleaved: each panel holds 16 gates and the 16 ups that belong to them
    TsLinear down;
} TsLayer;

typedef struct TsShape {
    int64_t vocab_size, hidden_size, intermediate_size, num_layers, num_heads, num_kv_heads, head_dim, max_positions;
    double rms_norm_eps;
} TsShape;

typedef struct TsWeights {
    const float* embedding;  // [vocab_size, hidden_size], or null: every batch then brings its inputs
    const TsLayer* layers;   // [num_layers]; copied
    const float* norm;       // [hidden_size]
    TsLinear head;           // its outputs may be fewer than vocab_size: a drafter's own vocabulary
    const float* rope_cos;  // [max_positions, head_dim / 2]
    const float* rope_sin;
} TsWeights;

// One forward pass. KV position p of sequence s is slot block_tables[s, p / block_size] * block_size + p % block_size,
// and tree node j lives at KV position context_lens[s] + j. A row sees KV positions [0, context_lens[s]) and every node
// whose bit is set in its ancestor words, its own included.
typedef struct TsBatch {
    int64_t num_rows, num_sequences, blocks_per_sequence, words_per_row, num_logits, block_size;
    const int64_t* input_ids;        // [num_rows]; not read if there are inputs
    const int64_t* positions;        // [num_rows], rotary positions
    const int64_t* slot_mapping;     // [num_rows], distinct: where each row's K and V go
    const int32_t* block_tables;     // [num_sequences, blocks_per_sequence]
    const int32_t* context_lens;     // [num_sequences]
    const int32_t* query_offsets;    // [num_sequences + 1]
    const int32_t* node_offsets;     // [num_sequences], tree node of the sequence's first row
    const uint64_t* ancestor_words;  // [num_rows, words_per_row]
    const int64_t* logits_indices;   // [num_logits], rows whose logits are wanted
    const float* inputs;             // [num_rows, hidden_size], finite: what enters the first layer; null for tokens
    int64_t num_features, num_feature_layers;
    const int64_t* feature_rows;    // [num_features], rows whose hidden states are wanted
    const int64_t* feature_layers;  // [num_feature_layers], after how many layers: ascending, in [1, num_layers)
} TsBatch;

// Where a forward pass writes. What is null is not wanted.
typedef struct TsOutputs {
    float* logits;       // [num_logits, outputs of the head]; never null
    float* last_hidden;  // [num_logits, hidden_size], after the last layer, before the norm
    float* features;     // [num_features, num_feature_layers, hidden_size]; null only if there are none
} TsOutputs;

// What a step takes: the milliseconds of the first stair with as many rows, beyond the last one in proportion.
typedef struct TsCosts {
    int64_t num_stairs;
    const int32_t* rows;  // [num_stairs], ascending
    const double* ms;     // [num_stairs], above 0, never falling
} TsCosts;

// A decoding sequence and the draft nodes there are for it, as selection.py has them.
typedef struct TsOffer {
    int64_t num_nodes;
    const double* accepted;  // [num_nodes], expected acceptance of each, never rising
    const int32_t* depths;   // [num_nodes]
    double slack_ms, token_ms, reserve_ms;
    int32_t tokens_left;
} TsOffer;

// Chooses a token of a run where logits and noise do not do alone, or tie.
//
// sequence: its place in the run. token_ids: [count], what it emitted in the run so far. logits: of the next token.
// Returns the token, and sets has_ended if it ends the sequence; negative if there is none: the sequence has failed.
typedef int32_t (*TsChooseToken)(int64_t sequence, const int32_t* token_ids, int32_t count, const float* logits,
                                 int32_t* has_ended);

// A sequence of a run. One that decodes has nothing but its root to compute, another its prompt or what is left of it.
typedef struct TsRunSequence {
    const int32_t* block_table;  // [num_blocks], those reserved included
    const int32_t* end_ids;      // [num_end_ids], tokens that end it
    const int32_t* unread;       // [num_unread], committed tokens without KV, the root the last of them
    int32_t num_blocks, num_end_ids;
    int32_t num_unread;   // 0 for one that decodes
    int32_t num_tokens;   // committed, the root the last of them; KV of all but the unread or the root is computed
    int32_t root;
    int32_t tokens_left;  // that it may emit, at least 1
    int32_t most_nodes;   // of a tree
    int32_t asks;         // not 0: `choose` chooses all its tokens and says when it ends
    double temperature;   // 0 for the most probable token
    uint64_t seed;
    int64_t handle;       // at the drafter; negative: nothing is drafted for it
    double slack_ms, token_ms, reserve_ms;  // as in TsOffer; these change with what it emits:
    double calibration, verified;           // accepted over expected nodes, and nodes verified; smoothed

    // Written by the run.
    int32_t* token_ids;  // [tokens_left or slots of the blocks, whatever is less]
    int32_t num_emitted;
    int32_t num_read;  // of the unread
    int32_t has_ended;
    int32_t has_failed;  // its next token could not be chosen
} TsRunSequence;

typedef struct TsRunStep {
    double forward_ms, step_ms;
    double attended;  // KV positions that a row without logits attends to, summed over all of them
    int32_t rows;
    int32_t prefill_rows;  // those of them without logits
} TsRunStep;

// What a step did to a sequence.
typedef struct TsRunRecord {
    int32_t offered, verified, accepted;  // draft nodes
    int32_t emitted;                      // tokens
} TsRunRecord;

// Steps in a row over the same sequences: trees, forward pass, acceptance by replay, KV together, and again. It ends
// after a step in which a sequence ended, failed, or came to the end of its unread tokens and emitted the first one;
// before one for which there is no room; and as told.
typedef struct TsRun {
    int64_t num_sequences;
    TsRunSequence* sequences;  // [num_sequences], the most urgent first
    TsCosts costs;
    int64_t vocab_size;   // token ids that exist; logits beyond are padding
    int64_t step_rows;    // most rows of a step
    int64_t unread_rows;  // most unread tokens that a step computes, in the order of the sequences; draft nodes take the
                          // place of half of them at most
    double node_price;    // that drafters are told
    TsChooseToken choose;
    const TsDrafterCalls* drafter;  // null for none
    int32_t top_tokens;             // so many of each row's most probable tokens are told to the drafter; at most 64
    int32_t max_steps;
    double max_seconds;
    const int32_t* stop;  // not 0: no further step; another thread may set it
    double prior;         // calibration that fresh sequences begin with; changes

    // Written by the run.
    TsRunStep* steps;      // [max_steps]
    TsRunRecord* records;  // [max_steps, num_sequences]
    int64_t* accepted_by_source;  // [32], nodes by bit of their masks
    int32_t num_steps;
    int32_t num_trees, num_empty_trees;
    int32_t drafter_failed;
    double draft_seconds;
} TsRun;

typedef struct TsDecoder TsDecoder;
typedef struct TsKvCache TsKvCache;

TS_EXPORT int32_t ts_abi_version(void);
TS_EXPORT const char* ts_last_error(void);

// Names of the instruction sets this CPU can run, best first, separated by spaces.
TS_EXPORT const char* ts_isas(void);

TS_EXPORT TsStatus ts_decoder_create(const TsShape* shape, const TsWeights* weights, int32_t threads, const char* isa,
                                     TsDecoder** decoder);
TS_EXPORT void ts_decoder_destroy(TsDecoder* decoder);

TS_EXPORT TsStatus ts_decoder_forward(TsDecoder* decoder, TsKvCache* kv, const TsBatch* batch,
                                      const TsOutputs* outputs);

TS_EXPORT TsStatus ts_decode_run(TsDecoder* decoder, TsKvCache* kv, TsRun* run);

// Chooses draft nodes as a run does: counts[i] of the first of each offer's nodes.
TS_EXPORT TsStatus ts_choose_nodes(const TsCosts* costs, int64_t num_offers, const TsOffer* offers, int64_t room,
                                   int32_t* counts, double* expected);

TS_EXPORT TsStatus ts_kv_create(const TsShape* shape, int64_t num_blocks, int64_t block_size, TsKvType type,
                                TsKvCache** kv);
TS_EXPORT void ts_kv_destroy(TsKvCache* kv);
TS_EXPORT int64_t ts_kv_nbytes(const TsKvCache* kv);
TS_EXPORT int64_t ts_kv_block_nbytes(const TsKvCache* kv);

// Copies slot src[i] to slot dst[i] in every layer, in the order of i.
TS_EXPORT TsStatus ts_kv_move(TsKvCache* kv, int64_t count, const int64_t* src, const int64_t* dst);

// Copies a block out of every layer, or such a copy into any block: ts_kv_block_nbytes() bytes.
TS_EXPORT TsStatus ts_kv_save(const TsKvCache* kv, int64_t block, char* data);
TS_EXPORT TsStatus ts_kv_load(TsKvCache* kv, int64_t block, const char* data);

// One linear layer alone, as the decoder computes it: x float32[rows, num_inputs] to y float32[rows, num_outputs].
TS_EXPORT TsStatus ts_linear_apply(const TsLinear* linear, const char* isa, int64_t rows, const float* x, float* y);

// Indices, ascending, of the tokens that can win the argmax of value / T + Gumbel(seed, position, id), whatever the
// last bits of the scores: all within 2^-10 of the best, so nearly always one. Values may be -inf, not all of them.
TS_EXPORT TsStatus ts_find_rivals(const char* isa, int64_t count, const float* values,
                                  const int64_t* ids,  // [count], or null: 0, 1, ...
                                  double temperature,  // [2^-100, 2^100]
                                  uint64_t seed, int64_t position,
                                  int64_t* rivals,  // [count]
                                  int64_t* num_rivals);

// Indices of the `num` largest values, the largest first, of equal ones the first. num: [1, 64], at most count.
TS_EXPORT TsStatus ts_find_largest(const char* isa, int64_t count, const float* values, int64_t num,
                                   int64_t* largest,     // [num], left alone if some value is not finite
                                   int32_t* all_finite);

#ifdef __cplusplus
}
#endif
