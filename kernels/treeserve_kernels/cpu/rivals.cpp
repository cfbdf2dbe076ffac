#include "rivals.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "checks.h"
#include "noise.h"

namespace treeserve {

namespace {

constexpr int64_t kMostTokens = int64_t{1} << 24;
constexpr int64_t kScanTokens = 1024;
constexpr int64_t kMostLargest = 64;
// How far rivals may be behind the best. Scores that matter are below 64, and both here and in numpy the sum of three
// roundings and two logarithms puts them less than 2^-40 off: this is ample for any library's logarithm.
constexpr double kMargin = 0x1p-10;

// Tokens that may win, in order, and few others.
std::vector<Candidate> find_candidates(const Kernels& kernels, const Draw& draw, uint64_t key, float best) {
    std::vector<Candidate> all;
    Candidate found[kScanTokens];
    RivalScan scan{};
    scan.key = key;
    scan.best = best;
    scan.scale = static_cast<float>(1.4426950408889634 / draw.temperature);
    for (int64_t first = 0; first < draw.count; first += kScanTokens) {
        scan.values = draw.values + first;
        scan.ids = draw.ids ? draw.ids + first : nullptr;
        scan.count = std::min(kScanTokens, draw.count - first);
        scan.first_id = first;
        const int64_t num_found = kernels.find_candidates(scan, found);
        for (int64_t i = 0; i < num_found; ++i) {
            all.push_back({static_cast<int32_t>(first) + found[i].index, found[i].score});
        }
    }
    const float cut = scan.leader - kRivalRange;
    all.erase(std::remove_if(all.begin(), all.end(), [&](const Candidate& c) { return c.score < cut; }), all.end());
    return all;
}

// -log(-log U).
double noise(uint64_t bits) {
    const uint64_t below_one = (~bits >> 12 << 1) + 1;  // (1 - U) * 2^53
    return -std::log(-std::log1p(-0x1p-53 * static_cast<double>(below_one)));
}

}  // namespace

int64_t find_rivals(const Kernels& kernels, const Draw& draw, int64_t* rivals) {
    require(draw.count >= 1 && draw.count <= kMostTokens, draw.count, " values, outside [1, ", kMostTokens, "]");
    require(can_draw_at(draw.temperature), "temperature is ", draw.temperature);
    const float best = kernels.largest_value(draw.values, draw.count);
    require(std::isfinite(best), "a value is NaN or +inf, or all are -inf");
    const uint64_t key = noise_key(draw.seed, draw.position);
    const std::vector<Candidate> candidates = find_candidates(kernels, draw, key, best);
    std::vector<double> scores(candidates.size());
    for (size_t i = 0; i < candidates.size(); ++i) {
        const int64_t index = candidates[i].index;
        const double scaled = (static_cast<double>(draw.values[index]) - best) / draw.temperature;
        scores[i] = scaled + noise(noise_bits(static_cast<uint64_t>(draw.ids ? draw.ids[index] : index), key));
    }
    const double cut = *std::max_element(scores.begin(), scores.end()) - kMargin;
    int64_t count = 0;
    for (size_t i = 0; i < candidates.size(); ++i) {
        if (scores[i] >= cut) rivals[count++] = candidates[i].index;
    }
    return count;
}

bool find_largest(const Kernels& kernels, int64_t count, const float* values, int64_t num, int64_t* largest) {
    require(count >= 1 && count <= kMostTokens, count, " values, outside [1, ", kMostTokens, "]");
    require(num >= 1 && num <= std::min(count, kMostLargest), num, " of the largest of ", count, " values");
    Candidate found[kMostLargest];
    if (!kernels.find_largest(values, count, static_cast<int>(num), found)) return false;
    for (int64_t i = 0; i < num; ++i) largest[i] = found[i].index;
    return true;
}

}  // namespace treeserve
