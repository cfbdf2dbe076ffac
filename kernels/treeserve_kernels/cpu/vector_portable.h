// A vector of 16 numbers as plain arrays: the meaning of the operations that the other vector headers speed up.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "noise.h"
#include "number_types.h"

namespace treeserve::TREESERVE_ISA {

struct Floats {
    float lane[16];
};
struct Ints {
    int32_t lane[16];
};
struct Longs {
    uint64_t lane[16];
};
struct WeightBytes {
    uint8_t byte[64];
};
struct InputBytes {
    int8_t byte[4];
};

// Rows of a linear layer, and columns of attention in vectors, that are computed together.
constexpr int kLinearRows = 4;
constexpr int kAttentionRows = 4;
constexpr int kAttentionColumns = 1;

template <class Function>
inline Floats each(Function function) {
    Floats result;
    for (int i = 0; i < 16; ++i) result.lane[i] = function(i);
    return result;
}

template <class Function>
inline Ints each_int(Function function) {
    Ints result;
    for (int i = 0; i < 16; ++i) result.lane[i] = function(i);
    return result;
}

inline Floats broadcast(float x) {
    return each([&](int) { return x; });
}
inline Ints broadcast_int(int32_t x) {
    return each_int([&](int) { return x; });
}
inline Floats load(const float* p) {
    return each([&](int i) { return p[i]; });
}
inline Floats load(const Bfloat16* p) {
    return each([&](int i) { return to_float(p[i]); });
}
inline Floats load(const int8_t* p) {
    return each([&](int i) { return static_cast<float>(p[i]); });
}
inline Floats load_first(const float* p, int64_t count) {
    return each([&](int64_t i) { return i < count ? p[i] : 0.0f; });
}
inline void store(float* p, const Floats& x) { std::memcpy(p, x.lane, sizeof x.lane); }
inline void store_first(float* p, const Floats& x, int64_t count) {
    for (int64_t i = 0; i < count && i < 16; ++i) p[i] = x.lane[i];
}
inline void store_bytes(int8_t* p, const Ints& x) {
    for (int i = 0; i < 16; ++i) p[i] = static_cast<int8_t>(x.lane[i]);
}
// Writes at least the lanes whose bit is set, side by side, and nothing beyond 16.
inline void store_compressed(float* p, const Floats& x, uint32_t mask) {
    for (int i = 0; i < 16; ++i) {
        if (mask >> i & 1) *p++ = x.lane[i];
    }
}

inline Floats add(const Floats& a, const Floats& b) {
    return each([&](int i) { return a.lane[i] + b.lane[i]; });
}
inline Floats subtract(const Floats& a, const Floats& b) {
    return each([&](int i) { return a.lane[i] - b.lane[i]; });
}
inline Floats multiply(const Floats& a, const Floats& b) {
    return each([&](int i) { return a.lane[i] * b.lane[i]; });
}
inline Floats divide(const Floats& a, const Floats& b) {
    return each([&](int i) { return a.lane[i] / b.lane[i]; });
}
// a * b + c, rounded once.
inline Floats multiply_add(const Floats& a, const Floats& b, const Floats& c) {
    return each([&](int i) { return std::fma(a.lane[i], b.lane[i], c.lane[i]); });
}
// b where the two do not compare.
inline Floats maximum(const Floats& a, const Floats& b) {
    return each([&](int i) { return a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; });
}
inline Floats minimum(const Floats& a, const Floats& b) {
    return each([&](int i) { return a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i]; });
}
inline Floats magnitude(const Floats& a) {
    return each([&](int i) { return std::fabs(a.lane[i]); });
}

// Bit i: whether a[i] >= b[i].
inline uint32_t at_least(const Floats& a, const Floats& b) {
    uint32_t mask = 0;
    for (int i = 0; i < 16; ++i) mask |= static_cast<uint32_t>(a.lane[i] >= b.lane[i]) << i;
    return mask;
}

// Sums and maxima fold the upper half onto the lower one: 16, 8, 4, 2, 1.
inline float sum(Floats a) {
    for (int half = 8; half; half /= 2) {
        for (int i = 0; i < half; ++i) a.lane[i] += a.lane[i + half];
    }
    return a.lane[0];
}
inline float largest(Floats a) {
    for (int half = 8; half; half /= 2) {
        for (int i = 0; i < half; ++i) a.lane[i] = a.lane[i] > a.lane[i + half] ? a.lane[i] : a.lane[i + half];
    }
    return a.lane[0];
}
inline int32_t sum(const Ints& a) {
    int32_t total = 0;
    for (int i = 0; i < 16; ++i) total += a.lane[i];
    return total;
}

inline Floats to_float(const Ints& a) {
    return each([&](int i) { return static_cast<float>(a.lane[i]); });
}
// To the nearest, ties to even; for magnitudes below 2^22.
inline Ints round_to_int(const Floats& a) {
    constexpr float kOnes = 12582912.0f;  // from here on, the last bit is worth 1
    return each_int([&](int i) { return static_cast<int32_t>((a.lane[i] + kOnes) - kOnes); });
}
// a * 2^n for normal results.
inline Floats scale_by_power(const Floats& a, const Ints& n) {
    return each([&](int i) {
        uint32_t bits;
        std::memcpy(&bits, &a.lane[i], 4);
        bits += static_cast<uint32_t>(n.lane[i]) << 23;
        float result;
        std::memcpy(&result, &bits, 4);
        return result;
    });
}

// The bits of each number as an integer.
inline Ints float_bits(const Floats& a) {
    Ints result;
    std::memcpy(result.lane, a.lane, sizeof a.lane);
    return result;
}

inline Longs load(const int64_t* p) {
    Longs result;
    std::memcpy(result.lane, p, sizeof result.lane);
    return result;
}
inline Longs add(const Longs& a, uint64_t b) {
    Longs result;
    for (int i = 0; i < 16; ++i) result.lane[i] = a.lane[i] + b;
    return result;
}
// 2^31 (1 - U) of the tokens with these ids, rounded down.
inline Ints noise_complement(const Longs& ids, uint64_t key) {
    return each_int([&](int i) { return static_cast<int32_t>(~noise_bits(ids.lane[i], key) >> 33); });
}

// Int8 dot products: 64 bytes hold 16 outputs x 4 inputs of a panel; each output adds its 4 products.
inline Ints first_sum(int32_t offset) { return broadcast_int(offset); }
inline WeightBytes load_weights(const uint8_t* p) {
    WeightBytes w;
    std::memcpy(w.byte, p, 64);
    return w;
}
inline InputBytes load_inputs(const int8_t* p) {
    InputBytes x;
    std::memcpy(x.byte, p, 4);
    return x;
}
inline Ints add_products(const Ints& sums, const WeightBytes& w, const InputBytes& x) {
    return each_int([&](int i) {
        return sums.lane[i] + w.byte[4 * i] * x.byte[0] + w.byte[4 * i + 1] * x.byte[1] +
               w.byte[4 * i + 2] * x.byte[2] + w.byte[4 * i + 3] * x.byte[3];
    });
}

}  // namespace treeserve::TREESERVE_ISA
