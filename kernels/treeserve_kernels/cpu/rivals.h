// Finding the most probable tokens, and those that can win a draw.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace treeserve {

constexpr bool can_draw_at(double temperature) { return temperature >= 0x1p-100 && temperature <= 0x1p100; }

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

// False if a value is not finite. Throws likewise.
bool find_largest(const Kernels& kernels, int64_t count, const float* values, int64_t num, int64_t* largest);

}  // namespace treeserve
