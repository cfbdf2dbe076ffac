// The C interface of native drafting: what native_drafter.py calls.
//
// A function that can fail returns a TsDraftStatus; ts_drafting_last_error() then says why, for the calling thread.
// After an invalid argument nothing has changed; after TS_DRAFT_INTERNAL (memory ran out) a drafter may only be
// destroyed. Pointers are borrowed for the call, except a table's, which must outlive the drafter. A drafter serves one
// call at a time: a second one waits.
#pragma once

#include <stdint.h>

#include "drafter_calls.h"

#ifdef __cplusplus
extern "C" {
#endif

#define TS_EXPORT __attribute__((visibility("default")))
#define TS_DRAFTING_ABI_VERSION 1

typedef enum TsDraftStatus { TS_DRAFT_OK = 0, TS_DRAFT_INVALID_ARGUMENT = 1, TS_DRAFT_INTERNAL = 2 } TsDraftStatus;

typedef enum TsSource { TS_NGRAM = 0, TS_SUFFIX = 1, TS_RECYCLING = 2, TS_NGRAM_TABLE = 3 } TsSource;

// The arrays of a table's file, and its calibration: see ngram_table_file.py.
typedef struct TsNgramTable {
    const uint32_t* first_context;  // [num_buckets + 1]
    const uint32_t* first_token;    // [num_buckets + 1]
    const uint16_t* fingerprints;   // [contexts]
    const uint8_t* lengths;         // [contexts]
    const void* token_ids;          // [entries], unsigned, of token_bytes each
    const uint8_t* log_probs;       // [entries]
    int64_t num_buckets, num_contexts, num_entries;
    int32_t token_bytes, max_order;
    double exponent, again, noise, rest, rest_noise;
} TsNgramTable;

typedef struct TsDraftingConfig {
    const int32_t* sources;  // [num_sources] TsSource, each at most once: the order of their bits
    const int32_t* eos;      // [num_eos]
    int32_t num_sources, num_eos;
    int32_t vocab_size;
    int32_t max_nodes, max_depth;  // of a tree, the root not counted
    const TsNgramTable* table;     // null without that source
    int64_t max_shared_nodes;      // bound of all tenants' suffixes together, and of the tokens they came from
    int64_t max_shared_rows;       // bound of all tenants' rows of top tokens together
} TsDraftingConfig;

typedef struct TsDraftSequence {
    const int32_t* token_ids;  // [num_tokens], at least one
    int32_t num_tokens, prompt_len;
    double temperature;  // 0 where the most probable token is the one to guess
    uint64_t seed;
    int32_t asks_table;  // 0 where trees must not depend on the noise with which the target decides
    const char* tenant;  // empty: what the sequence leaves behind is nobody's
} TsDraftSequence;

// What a source did since the drafter was made.
typedef struct TsSourceCounts {
    double seconds;
    int64_t nodes, visits, right;
} TsSourceCounts;

typedef struct TsDrafter TsDrafter;

TS_EXPORT int32_t ts_drafting_abi_version(void);
TS_EXPORT const char* ts_drafting_last_error(void);

TS_EXPORT TsDraftStatus ts_drafter_create(const TsDraftingConfig* config, TsDrafter** drafter);
TS_EXPORT void ts_drafter_destroy(TsDrafter* drafter);

TS_EXPORT TsDraftStatus ts_drafter_assign(TsDrafter* drafter, int64_t handle, const TsDraftSequence* sequence);
// base_len: committed tokens before these.
TS_EXPORT TsDraftStatus ts_drafter_commit(TsDrafter* drafter, int64_t handle, int32_t base_len,
                                          const int32_t* token_ids, int32_t count);
TS_EXPORT TsDraftStatus ts_drafter_release(TsDrafter* drafter, int64_t handle);

// What the target held most probable in place of the tokens from `position` on: int32[rows, width], best first, filled
// up with -1. A row of nothing else says nothing.
TS_EXPORT TsDraftStatus ts_drafter_remember(TsDrafter* drafter, int64_t handle, int32_t position, const int32_t* top,
                                            int32_t rows, int32_t width);

// node_price: cost of verifying a node, in tokens.
TS_EXPORT TsDraftStatus ts_drafter_draft(TsDrafter* drafter, int64_t handle, int32_t budget, double node_price,
                                         TsDraftTree* tree);

// Learns from what was committed since the last time.
TS_EXPORT TsDraftStatus ts_drafter_learn(TsDrafter* drafter);

TS_EXPORT void ts_drafter_counts(TsDrafter* drafter, TsSourceCounts* counts);  // [num_sources]

#ifdef __cplusplus
}
#endif
