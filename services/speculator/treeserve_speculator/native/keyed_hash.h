// Hashes of what clients send: keyed, so that nobody can choose tokens that all fall into one bucket.
#pragma once

#include <cstdint>
#include <random>

#include "noise.h"

namespace treeserve {

// Another one in every process.
inline uint64_t hash_key() {
    static const uint64_t key = [] {
        std::random_device device;
        return uint64_t{device()} << 32 | device();
    }();
    return key;
}

inline uint64_t keyed_hash(uint64_t word, uint64_t seed = hash_key()) { return mix(word ^ seed); }

}  // namespace treeserve
