// Refusing what a caller got wrong, with a message that names it.
#pragma once

#include <cstdint>
#include <sstream>
#include <stdexcept>

#include "api.h"
#include "kernels.h"

namespace treeserve {

template <class... Parts>
[[noreturn, gnu::noinline]] void refuse(const Parts&... parts) {
    std::ostringstream message;
    (message << ... << parts);
    throw std::invalid_argument(message.str());
}

template <class... Parts>
inline void require(bool holds, const Parts&... parts) {
    if (!holds) [[unlikely]]
        refuse(parts...);
}

inline void require_index(const char* what, int64_t place, int64_t index, int64_t size) {
    require(index >= 0 && index < size, what, " ", place, " is ", index, ", outside [0, ", size, ")");
}

inline void check_shape(const TsShape& shape) {
    constexpr int64_t kMost = int64_t{1} << 24;  // products of two sizes stay far from overflow
    const auto check_size = [&](const char* name, int64_t size) {
        require(size >= 1 && size <= kMost, name, " is ", size, ", outside [1, ", kMost, "]");
    };
    check_size("vocab_size", shape.vocab_size);
    check_size("hidden_size", shape.hidden_size);
    check_size("intermediate_size", shape.intermediate_size);
    check_size("num_layers", shape.num_layers);
    check_size("num_heads", shape.num_heads);
    check_size("num_kv_heads", shape.num_kv_heads);
    check_size("max_positions", shape.max_positions);
    require(shape.num_heads % shape.num_kv_heads == 0, shape.num_heads, " heads cannot share ", shape.num_kv_heads,
            " key-value heads evenly");
    require(shape.head_dim >= 2 && shape.head_dim <= kMaxHeadDim && shape.head_dim % 2 == 0, "head_dim is ",
            shape.head_dim, "; it must be even, from 2 to ", kMaxHeadDim);
    require(shape.rms_norm_eps >= 0 && shape.rms_norm_eps < 1, "rms_norm_eps is ", shape.rms_norm_eps);
}

}  // namespace treeserve
