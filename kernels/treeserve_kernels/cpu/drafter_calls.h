// How a run of steps calls the drafter that another library brings.
#pragma once

#include <stdint.h>

// A drafted tree, valid until the next call for its sequence. Parents precede their children.
typedef struct TsDraftTree {
    const int32_t* token_ids;  // [num_nodes], the root first
    const int32_t* parents;    // [num_nodes]
    const double* log_probs;   // [num_nodes], of each node given its parent
    const uint32_t* masks;     // [num_nodes], bit k for the k-th source
    int32_t num_nodes;
    int32_t base_len;  // committed tokens, the root the last of them
} TsDraftTree;

// Calls with the meaning of the ts_drafter_ functions of native drafting. Whatever is not 0 is a failure.
typedef struct TsDrafterCalls {
    void* drafter;
    int32_t (*commit)(void* drafter, int64_t handle, int32_t base_len, const int32_t* token_ids, int32_t count);
    int32_t (*remember)(void* drafter, int64_t handle, int32_t position, const int32_t* top, int32_t rows,
                        int32_t width);
    int32_t (*learn)(void* drafter);
    int32_t (*draft)(void* drafter, int64_t handle, int32_t budget, double node_price, TsDraftTree* tree);
} TsDrafterCalls;
