#include "kv_cache.h"

#include <algorithm>

#include "checks.h"
#include "number_types.h"

using namespace treeserve;

namespace {

int64_t number_bytes(TsKvType type) { return type == TS_KV_FLOAT32 ? 4 : type == TS_KV_BFLOAT16 ? 2 : 1; }

}  // namespace

TsKvCache::TsKvCache(const TsShape& shape, int64_t num_blocks, int64_t block_size, TsKvType type)
    : num_blocks_(num_blocks),
      block_size_(block_size),
      num_layers_(shape.num_layers),
      num_kv_heads_(shape.num_kv_heads) {
    check_shape(shape);
    require(num_blocks >= 1 && num_blocks <= INT32_MAX, "number of blocks ", num_blocks);
    require(block_size >= 1 && block_size <= INT32_MAX, "block size ", block_size);
    require(type >= TS_KV_FLOAT32 && type <= TS_KV_INT8, "KV type ", type);
    groups_per_block_ = (block_size + kLanes - 1) / kLanes;
    const int64_t bytes = number_bytes(type);
    layout_.type = type;
    layout_.head_dim = shape.head_dim;
    layout_.padded_head_dim = rounded_up(shape.head_dim, kLanes);
    layout_.values_offset = rounded_up(shape.head_dim * kLanes * bytes, 64);
    layout_.scales_offset = layout_.values_offset + kLanes * layout_.padded_head_dim * bytes;
    layout_.cell_bytes = layout_.scales_offset + (type == TS_KV_INT8 ? 2 * kLanes * int64_t{4} : 0);
    layer_bytes_ = layout_.cell_bytes * num_kv_heads_;
    int64_t groups, total;
    // Places are counted in 32 bits.
    require(!__builtin_mul_overflow(num_blocks, groups_per_block_, &groups) && groups <= INT32_MAX / kLanes, num_blocks,
            " blocks of ", block_size, " slots are too many");
    require(!__builtin_mul_overflow(layer_bytes_, num_layers_, &layout_.group_bytes) &&
                !__builtin_mul_overflow(groups, layout_.group_bytes, &total),
            num_blocks, " blocks of ", block_size, " slots are too large");
    memory_ = ZeroedMemory(static_cast<size_t>(total));
    toucher_.emplace(memory_);
}

void TsKvCache::move(int64_t count, const int64_t* src, const int64_t* dst) {
    require(count >= 0, "number of slots to move ", count);
    for (int64_t i = 0; i < count; ++i) {
        require_index("slot to move from", i, src[i], num_slots());
        require_index("slot to move to", i, dst[i], num_slots());
    }
    switch (layout_.type) {
        case TS_KV_FLOAT32: return copy_slots<float>(count, src, dst);
        case TS_KV_BFLOAT16: return copy_slots<Bfloat16>(count, src, dst);
        case TS_KV_INT8: return copy_slots<int8_t>(count, src, dst);
    }
}

void TsKvCache::save(int64_t block, char* data) const {
    require(block >= 0 && block < num_blocks_, "block to save is ", block, ", outside [0, ", num_blocks_, ")");
    std::copy_n(block_at(block), block_nbytes(), data);
}

void TsKvCache::load(int64_t block, const char* data) {
    require(block >= 0 && block < num_blocks_, "block to load is ", block, ", outside [0, ", num_blocks_, ")");
    std::copy_n(data, block_nbytes(), block_at(block));
}

template <class Number>
void TsKvCache::copy_slots(int64_t count, const int64_t* src, const int64_t* dst) const {
    for (int64_t layer = 0; layer < num_layers_; ++layer) {
        for (int64_t i = 0; i < count; ++i) {
            const int64_t from = place(src[i]), to = place(dst[i]);
            if (from == to) continue;
            const char* source = cells(layer, from / kLanes);
            char* target = cells(layer, to / kLanes);
            // The next layer's. A key lies in as many cache lines as half a cell has, and none of them is in a cache.
            fetch(source + layer_bytes_);
            if (target != source) fetch(target + layer_bytes_);
            for (int64_t head = 0; head < num_kv_heads_; ++head) {
                const int64_t at = head * layout_.cell_bytes;
                copy_slot<Number>(source + at, from % kLanes, target + at, to % kLanes);
            }
        }
    }
}

void TsKvCache::fetch(const char* layer) const {
    for (int64_t at = 0; at < layer_bytes_; at += 64) __builtin_prefetch(layer + at);
}

template <class Number>
void TsKvCache::copy_slot(const char* from, int64_t from_lane, char* to, int64_t to_lane) const {
    const auto* from_keys = reinterpret_cast<const Number*>(from) + from_lane;
    auto* to_keys = reinterpret_cast<Number*>(to) + to_lane;
    for (int64_t d = 0; d < layout_.head_dim; ++d) to_keys[d * kLanes] = from_keys[d * kLanes];
    const auto* from_values = reinterpret_cast<const Number*>(from + layout_.values_offset);
    auto* to_values = reinterpret_cast<Number*>(to + layout_.values_offset);
    std::copy_n(from_values + from_lane * layout_.padded_head_dim, layout_.padded_head_dim,
                to_values + to_lane * layout_.padded_head_dim);
    if constexpr (sizeof(Number) > 1) return;
    const auto* from_scales = reinterpret_cast<const float*>(from + layout_.scales_offset);
    auto* to_scales = reinterpret_cast<float*>(to + layout_.scales_offset);
    to_scales[to_lane] = from_scales[from_lane];                    // of the key
    to_scales[kLanes + to_lane] = from_scales[kLanes + from_lane];  // of the value
}
