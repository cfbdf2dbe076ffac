// A vector of 16 numbers as one AVX-512 register. vector_portable.h says what the operations mean.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "noise.h"
#include "number_types.h"

namespace treeserve::TREESERVE_ISA {

using Floats = __m512;
using Ints = __m512i;
using EightLongs = uint64_t __attribute__((vector_size(64)));
struct Longs {
    EightLongs low, high;
};
struct WeightBytes {
    __m512i bytes;
};
struct InputBytes {
    __m512i bytes;  // the same 4 inputs 16 times
};

// Of 32 registers, 8 rows x 2 halves of a panel take 16 as integer sums and about as many as float sums, and 6 rows x 4
// vectors of attention take 24. Instructions take 4 cycles and 2 start in each, so that 8 sums would suffice.
constexpr int kLinearRows = 8;
constexpr int kAttentionRows = 6;
constexpr int kAttentionColumns = 4;

inline Floats broadcast(float x) { return _mm512_set1_ps(x); }
inline Ints broadcast_int(int32_t x) { return _mm512_set1_epi32(x); }
inline Floats load(const float* p) { return _mm512_loadu_ps(p); }
inline Floats load(const Bfloat16* p) {
    const __m512i bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
}
inline Floats load(const int8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
inline __mmask16 first_lanes(int64_t count) {
    return count >= 16 ? __mmask16{0xffff} : static_cast<__mmask16>((1u << count) - 1);
}
inline Floats load_first(const float* p, int64_t count) { return _mm512_maskz_loadu_ps(first_lanes(count), p); }
inline void store(float* p, Floats x) { _mm512_storeu_ps(p, x); }
inline void store_first(float* p, Floats x, int64_t count) { _mm512_mask_storeu_ps(p, first_lanes(count), x); }
inline void store_bytes(int8_t* p, Ints x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(x)); }
inline void store_compressed(float* p, Floats x, uint32_t mask) {
    _mm512_storeu_ps(p, _mm512_maskz_compress_ps(static_cast<__mmask16>(mask), x));
}

inline Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
inline Floats subtract(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
inline Floats multiply(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats divide(Floats a, Floats b) { return _mm512_div_ps(a, b); }
inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats maximum(Floats a, Floats b) { return _mm512_max_ps(a, b); }
inline Floats minimum(Floats a, Floats b) { return _mm512_min_ps(a, b); }
inline Floats magnitude(Floats a) { return _mm512_abs_ps(a); }

inline uint32_t at_least(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }

inline __m256 lower(Floats a) { return _mm512_castps512_ps256(a); }
inline __m256 upper(Floats a) { return _mm512_extractf32x8_ps(a, 1); }
inline float sum(Floats a) {
    const __m256 eight = _mm256_add_ps(lower(a), upper(a));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
inline float largest(Floats a) {
    const __m256 eight = _mm256_max_ps(lower(a), upper(a));
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}
inline int32_t sum(Ints a) { return _mm512_reduce_add_epi32(a); }

inline Floats to_float(Ints a) { return _mm512_cvtepi32_ps(a); }
inline Ints round_to_int(Floats a) { return _mm512_cvtps_epi32(a); }
inline Floats scale_by_power(Floats a, Ints n) {
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a), _mm512_slli_epi32(n, 23)));
}

inline Ints float_bits(Floats a) { return _mm512_castps_si512(a); }

inline Longs load(const int64_t* p) {
    return {reinterpret_cast<EightLongs>(_mm512_loadu_si512(p)),
            reinterpret_cast<EightLongs>(_mm512_loadu_si512(p + 8))};
}
inline Longs add(Longs a, uint64_t b) { return {a.low + b, a.high + b}; }
inline Ints noise_complement(Longs ids, uint64_t key) {
    const __m512i low = reinterpret_cast<__m512i>(~noise_bits(ids.low, key));
    const __m512i high = reinterpret_cast<__m512i>(~noise_bits(ids.high, key));
    const __m512i odd = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
    return _mm512_srli_epi32(_mm512_permutex2var_epi32(low, odd, high), 1);
}

inline Ints first_sum(int32_t offset) { return _mm512_set1_epi32(offset); }
inline WeightBytes load_weights(const uint8_t* p) { return {_mm512_load_si512(p)}; }
inline InputBytes load_inputs(const int8_t* p) {
    int32_t four;
    std::memcpy(&four, p, 4);
    return {_mm512_set1_epi32(four)};
}
// The intrinsic, _mm512_dpbusd_epi32, means the same, but GCC 12 then copies every accumulator in every step.
inline Ints add_products(Ints sums, WeightBytes w, InputBytes x) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(w.bytes), "v"(x.bytes));
    return sums;
}

}  // namespace treeserve::TREESERVE_ISA
