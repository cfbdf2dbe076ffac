// Finding the tokens that can win a draw.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace treeserve {

// The arguments of ts_find_rivals.
struct Draw {
    int64_t count;
    const float* values;
    const int64_t* ids;
    double temperature;
    uint64_t seed;
    int64_t position;
};

// Throws std::invalid_argument for what api.h does not allow.
int64_t find_rivals(const Kernels& kernels, const Draw& draw, int64_t* rivals);

}  // namespace treeserve
