// The paged KV cache: where keys and values lie, and moving them.
#pragma once

#include <cstdint>
#include <optional>

#include "kernels.h"
#include "memory.h"

struct TsKvCache {
public:
    // Throws std::invalid_argument or std::bad_alloc.
    TsKvCache(const TsShape& shape, int64_t num_blocks, int64_t block_size, TsKvType type);

    const treeserve::KvLayout& layout() const { return layout_; }
    int64_t num_blocks() const { return num_blocks_; }
    int64_t block_size() const { return block_size_; }
    int64_t num_slots() const { return num_blocks_ * block_size_; }
    int64_t groups_per_block() const { return groups_per_block_; }
    int64_t num_layers() const { return num_layers_; }
    int64_t num_kv_heads() const { return num_kv_heads_; }
    int64_t nbytes() const { return num_blocks_ * block_nbytes(); }
    int64_t block_nbytes() const { return groups_per_block_ * layout_.group_bytes; }

    // A block of any size takes whole slot groups; the last one may be partly unused. Returns group * 16 + lane.
    int64_t place(int64_t slot) const {
        const int64_t within = slot % block_size_;
        return (slot / block_size_ * groups_per_block_ + within / treeserve::kLanes) * treeserve::kLanes +
               within % treeserve::kLanes;
    }

    // The first KV head's cell; those of the other heads follow. All layers of a slot group lie together, so that memory
    // is taken little by little as a sequence grows, and a block is one piece.
    char* cells(int64_t layer, int64_t group) const {
        return memory_.data() + group * layout_.group_bytes + layer * layer_bytes_;
    }

    // Copies slot src[i] to slot dst[i] in every layer, in the order of i. Throws std::invalid_argument.
    void move(int64_t count, const int64_t* src, const int64_t* dst);

    // Copies a block's keys and values of every layer out, or back into any block: block_nbytes() as they lie here.
    // Throws std::invalid_argument.
    void save(int64_t block, char* data) const;
    void load(int64_t block, const char* data);

private:
    char* block_at(int64_t block) const { return cells(0, block * groups_per_block_); }
    template <class Number>
    void copy_slots(int64_t count, const int64_t* src, const int64_t* dst) const;
    void fetch(const char* layer) const;
    template <class Number>
    void copy_slot(const char* from, int64_t from_lane, char* to, int64_t to_lane) const;

    int64_t num_blocks_, block_size_, groups_per_block_, num_layers_, num_kv_heads_, layer_bytes_;  // of a layer in a slot group
    treeserve::KvLayout layout_;
    treeserve::ZeroedMemory memory_;
    std::optional<treeserve::PageToucher> toucher_;  // stopped before the memory goes
};
