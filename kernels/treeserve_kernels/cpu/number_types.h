// The number types of the KV cache, and their conversions.
#pragma once

#include <cstdint>
#include <cstring>

namespace treeserve {

// The upper half of a float.
struct Bfloat16 {
    uint16_t bits;
};

static inline float to_float(Bfloat16 x) {
    const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
    float result;
    std::memcpy(&result, &bits, 4);
    return result;
}

// To the nearest, ties to even. Not for NaN.
static inline Bfloat16 to_bfloat16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

}  // namespace treeserve
