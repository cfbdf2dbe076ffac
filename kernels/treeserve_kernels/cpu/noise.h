// The counter-based noise of the sampler in integers: the same bits as treeserve_core.noise.
#pragma once

#include <cstdint>

namespace treeserve {

constexpr uint64_t kGolden = 0x9E3779B97F4A7C15;
constexpr uint64_t kMix1 = 0xBF58476D1CE4E5B9;
constexpr uint64_t kMix2 = 0x94D049BB133111EB;

// SplitMix64's finaliser, of an unsigned 64-bit integer or a vector of them.
template <class Word>
static inline Word mix(Word x) {
    x = (x ^ x >> 30) * kMix1;
    x = (x ^ x >> 27) * kMix2;
    return x ^ x >> 31;
}

// Key of one output position.
static inline uint64_t noise_key(uint64_t seed, int64_t position) {
    return mix(mix(seed + kGolden) + (static_cast<uint64_t>(position) + 1) * kGolden);
}

// 64 bits of the noise of each token id. U = (2 * (bits >> 12) + 1) / 2^53.
template <class Word>
static inline Word noise_bits(Word ids, uint64_t key) {
    return mix(mix((ids + uint64_t{1}) * kGolden ^ key));
}

}  // namespace treeserve
