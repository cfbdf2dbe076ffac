// Looking through logits: what they hold, and which tokens may win the draw.
#pragma once

#include "kernels.h"
#include "noise.h"

namespace treeserve::TREESERVE_ISA {

inline float largest_value(const float* values, int64_t count) {
    constexpr int kChains = 4;  // independent, so that they overlap
    const Floats lowest = broadcast(-__builtin_inff());
    const Floats lowest_finite = broadcast(-__FLT_MAX__);
    Floats most[kChains], zeros[kChains];  // zeros become NaN by what is NaN or +inf
    for (int j = 0; j < kChains; ++j) {
        most[j] = lowest;
        zeros[j] = broadcast(0.0f);
    }
    int64_t i = 0;
    for (; i + kChains * kLanes <= count; i += kChains * kLanes) {
        for (int j = 0; j < kChains; ++j) {
            const Floats v = load(values + i + j * kLanes);
            most[j] = maximum(v, most[j]);
            zeros[j] = add(zeros[j], multiply(maximum(lowest_finite, v), broadcast(0.0f)));
        }
    }
    float best = largest(maximum(maximum(most[0], most[1]), maximum(most[2], most[3])));
    float zero = sum(add(add(zeros[0], zeros[1]), add(zeros[2], zeros[3])));
    for (; i < count; ++i) {
        best = values[i] > best ? values[i] : best;
        zero += (values[i] < -__FLT_MAX__ ? 0.0f : values[i]) * 0.0f;
    }
    return zero == 0.0f ? best : __builtin_nanf("");
}

inline bool find_largest(const float* values, int64_t count, int num, Candidate* out) {
    constexpr int kChains = 4;
    Floats zeros[kChains];  // become NaN by what is not finite
    for (Floats& zero : zeros) zero = broadcast(0.0f);
    float zero = 0.0f;
    int found = 0;
    const auto insert = [&](int64_t index, float value) {
        if (found == num && !(value > out[num - 1].score)) return;
        int place = found < num ? found++ : num - 1;
        for (; place > 0 && value > out[place - 1].score; --place) out[place] = out[place - 1];
        out[place] = {static_cast<int32_t>(index), value};
    };
    int64_t i = 0;
    for (; i < count && (found < num || i % (kChains * kLanes)); ++i) {
        zero += values[i] * 0.0f;
        insert(i, values[i]);
    }
    for (; i + kChains * kLanes <= count; i += kChains * kLanes) {
        Floats v[kChains];
        for (int j = 0; j < kChains; ++j) {
            v[j] = load(values + i + j * kLanes);
            zeros[j] = add(zeros[j], multiply(v[j], broadcast(0.0f)));
        }
        const Floats most = maximum(maximum(v[0], v[1]), maximum(v[2], v[3]));
        if (!at_least(most, broadcast(out[num - 1].score))) [[likely]] continue;
        for (int64_t k = i; k < i + kChains * kLanes; ++k) insert(k, values[k]);
    }
    for (; i < count; ++i) {
        zero += values[i] * 0.0f;
        insert(i, values[i]);
    }
    return zero + sum(add(add(zeros[0], zeros[1]), add(zeros[2], zeros[3]))) == 0.0f;
}

// 16 tokens of a scan.
//
// 1 - U is within [n - 1, n) / 2^31, and log2 n is read off its bits, the mantissa's logarithm taken for linear: at
// most 0.0861 too low. From 1024 on, log2 (n - 1) is at most 0.00142 below log2 n. Scaled values of tokens that matter
// are within 60, so their three roundings come to 1.1e-5 at most, and those of n and its bits to less.
[[gnu::always_inline]] inline int64_t find_among_lanes(RivalScan& scan, Floats values, const Longs& ids, int64_t first,
                                                       Candidate* out) {
    constexpr float kTooCoarse = 1024.0f;
    const Floats scaled = multiply(subtract(values, broadcast(scan.best)), broadcast(scan.scale));
    const float cut = scan.leader - kRivalRange;
    const uint32_t possible = at_least(scaled, broadcast(cut - kMostNoise));
    if (!possible) return 0;
    const Floats n = add(to_float(noise_complement(ids, scan.key)), broadcast(1.0f));
    const Floats log_n = subtract(multiply(to_float(float_bits(n)), broadcast(0x1p-23f)), broadcast(127.0f + 31.0f));
    const Floats score = subtract(scaled, log_n);
    const uint32_t coarse = at_least(broadcast(kTooCoarse), n);
    uint32_t found = (at_least(score, broadcast(cut)) | coarse) & possible;
    if (!found) [[likely]] return 0;
    float scores[kLanes];
    store(scores, score);
    int64_t count = 0;
    for (; found; found &= found - 1) {
        const int lane = __builtin_ctz(found);
        scan.leader = scores[lane] > scan.leader ? scores[lane] : scan.leader;
        const float known = coarse >> lane & 1 ? __builtin_inff() : scores[lane];
        out[count++] = {static_cast<int32_t>(first + lane), known};
    }
    return count;
}

inline int64_t find_candidates(RivalScan& scan, Candidate* out) {
    int64_t ids[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) ids[lane] = scan.first_id + lane;
    Longs consecutive = load(ids);
    int64_t found = 0;
    for (int64_t i = 0; i < scan.count; i += kLanes, consecutive = add(consecutive, kLanes)) {
        const float* values = scan.values + i;
        const int64_t* next = scan.ids ? scan.ids + i : nullptr;
        float last_values[kLanes];
        if (const int64_t left = scan.count - i; left < kLanes) {
            for (int lane = 0; lane < kLanes; ++lane) {
                last_values[lane] = lane < left ? values[lane] : -__builtin_inff();
                ids[lane] = next && lane < left ? next[lane] : 0;
            }
            values = last_values;
            next = next ? ids : nullptr;
        }
        found += find_among_lanes(scan, load(values), next ? load(next) : consecutive, i, out + found);
    }
    return found;
}

}  // namespace treeserve::TREESERVE_ISA
