// A vector of 16 numbers as two AVX2 registers. vector_portable.h says what the operations mean.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "noise.h"
#include "number_types.h"

namespace treeserve::TREESERVE_ISA {

struct Floats {
    __m256 low, high;
};
struct Ints {
    __m256i low, high;
};
using FourLongs = uint64_t __attribute__((vector_size(32)));
struct Longs {
    FourLongs part[4];
};
struct WeightBytes {
    __m256i low, high;                      // signed
    __m256i low_magnitude, high_magnitude;  // unsigned
};
struct InputBytes {
    __m256i bytes;  // the same 4 inputs 8 times
};

// What 16 registers hold: 2 rows x 4 registers of a panel, 4 rows x 2 registers of attention.
constexpr int kLinearRows = 2;
constexpr int kAttentionRows = 4;
constexpr int kAttentionColumns = 1;

inline Floats broadcast(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Ints broadcast_int(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline Floats load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline __m256 load_eight(const Bfloat16* p) {
    const __m256i bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
}
inline Floats load(const Bfloat16* p) { return {load_eight(p), load_eight(p + 8)}; }
inline __m256 load_eight(const int8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
inline Floats load(const int8_t* p) { return {load_eight(p), load_eight(p + 8)}; }
inline Floats load_first(const float* p, int64_t count) {
    alignas(32) float lanes[16] = {};
    std::memcpy(lanes, p, static_cast<size_t>(count < 16 ? count : 16) * sizeof(float));
    return load(lanes);
}
inline void store(float* p, Floats x) {
    _mm256_storeu_ps(p, x.low);
    _mm256_storeu_ps(p + 8, x.high);
}
inline void store_first(float* p, Floats x, int64_t count) {
    alignas(32) float lanes[16];
    store(lanes, x);
    std::memcpy(p, lanes, static_cast<size_t>(count < 16 ? count : 16) * sizeof(float));
}
inline void store_bytes(int8_t* p, Ints x) {
    alignas(32) int32_t lanes[16];
    _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), x.low);
    _mm256_store_si256(reinterpret_cast<__m256i*>(lanes + 8), x.high);
    for (int i = 0; i < 16; ++i) p[i] = static_cast<int8_t>(lanes[i]);
}
inline void store_compressed(float* p, Floats x, uint32_t mask) {
    alignas(32) float lanes[16];
    store(lanes, x);
    for (; mask; mask &= mask - 1) *p++ = lanes[__builtin_ctz(mask)];
}

inline Floats add(Floats a, Floats b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
inline Floats subtract(Floats a, Floats b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
inline Floats multiply(Floats a, Floats b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
inline Floats divide(Floats a, Floats b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }
inline Floats multiply_add(Floats a, Floats b, Floats c) {
    return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
inline Floats maximum(Floats a, Floats b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
inline Floats minimum(Floats a, Floats b) { return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)}; }
inline Floats magnitude(Floats a) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, a.low), _mm256_andnot_ps(sign, a.high)};
}

inline uint32_t at_least(Floats a, Floats b) {
    const int low = _mm256_movemask_ps(_mm256_cmp_ps(a.low, b.low, _CMP_GE_OQ));
    const int high = _mm256_movemask_ps(_mm256_cmp_ps(a.high, b.high, _CMP_GE_OQ));
    return static_cast<uint32_t>(low | high << 8);
}

inline float sum(Floats a) {
    const __m256 eight = _mm256_add_ps(a.low, a.high);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
inline float largest(Floats a) {
    const __m256 eight = _mm256_max_ps(a.low, a.high);
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}
inline int32_t sum(Ints a) {
    const __m256i eight = _mm256_add_epi32(a.low, a.high);
    const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    const __m128i two = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
}

inline Floats to_float(Ints a) { return {_mm256_cvtepi32_ps(a.low), _mm256_cvtepi32_ps(a.high)}; }
inline Ints round_to_int(Floats a) { return {_mm256_cvtps_epi32(a.low), _mm256_cvtps_epi32(a.high)}; }
inline __m256 scale_eight(__m256 a, __m256i n) {
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a), _mm256_slli_epi32(n, 23)));
}
inline Floats scale_by_power(Floats a, Ints n) { return {scale_eight(a.low, n.low), scale_eight(a.high, n.high)}; }

inline Ints float_bits(Floats a) { return {_mm256_castps_si256(a.low), _mm256_castps_si256(a.high)}; }

inline FourLongs load_four(const int64_t* p) {
    return reinterpret_cast<FourLongs>(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline Longs load(const int64_t* p) { return {{load_four(p), load_four(p + 4), load_four(p + 8), load_four(p + 12)}}; }
inline Longs add(const Longs& a, uint64_t b) { return {{a.part[0] + b, a.part[1] + b, a.part[2] + b, a.part[3] + b}}; }
inline __m256i noise_complement_eight(FourLongs a, FourLongs b, uint64_t key) {
    const __m256 first = reinterpret_cast<__m256>(~noise_bits(a, key));
    const __m256 second = reinterpret_cast<__m256>(~noise_bits(b, key));
    // The upper halves, in the order a0 a1 b0 b1 a2 a3 b2 b3: a shuffle works within 128 bits.
    const __m256i odd = _mm256_castps_si256(_mm256_shuffle_ps(first, second, 0xdd));
    return _mm256_srli_epi32(_mm256_permute4x64_epi64(odd, 0xd8), 1);
}
inline Ints noise_complement(const Longs& ids, uint64_t key) {
    return {noise_complement_eight(ids.part[0], ids.part[1], key),
            noise_complement_eight(ids.part[2], ids.part[3], key)};
}

// maddubs multiplies unsigned by signed bytes and saturates pairs of products at 16 bits. Magnitudes of weights times
// inputs that take over their signs stay below: 2 * 127 * 127 < 2^15. So the weights are used without the 128 here.
inline Ints first_sum(int32_t) { return broadcast_int(0); }
inline WeightBytes load_weights(const uint8_t* p) {
    const __m256i offset = _mm256_set1_epi8(-128);
    const __m256i low = _mm256_xor_si256(_mm256_load_si256(reinterpret_cast<const __m256i*>(p)), offset);
    const __m256i high = _mm256_xor_si256(_mm256_load_si256(reinterpret_cast<const __m256i*>(p + 32)), offset);
    return {low, high, _mm256_abs_epi8(low), _mm256_abs_epi8(high)};
}
inline InputBytes load_inputs(const int8_t* p) {
    int32_t four;
    std::memcpy(&four, p, 4);
    return {_mm256_set1_epi32(four)};
}
inline __m256i add_eight(__m256i sums, __m256i weights, __m256i magnitudes, __m256i inputs) {
    const __m256i pairs = _mm256_maddubs_epi16(magnitudes, _mm256_sign_epi8(inputs, weights));
    return _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
inline Ints add_products(Ints sums, const WeightBytes& w, InputBytes x) {
    return {add_eight(sums.low, w.low, w.low_magnitude, x.bytes),
            add_eight(sums.high, w.high, w.high_magnitude, x.bytes)};
}

}  // namespace treeserve::TREESERVE_ISA
