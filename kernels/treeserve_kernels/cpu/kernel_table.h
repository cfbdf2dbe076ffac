// The kernels of one instruction set, gathered: included by kernels_*.cpp after the vector they are written over.
#pragma once

#include "attention.h"
#include "linear.h"
#include "sampling.h"

namespace treeserve::TREESERVE_ISA {

constexpr Kernels kernel_table(const char* name) {
    return {
        .name = name,
        .normalise = normalise,
        .quantise = quantise,
        .linear_store = linear_store,
        .linear_add = linear_add,
        .linear_swiglu = linear_swiglu,
        .write_key_value = write_key_value,
        .attend = attend,
        .largest_value = largest_value,
        .find_largest = find_largest,
        .find_candidates = find_candidates,
    };
}

}  // namespace treeserve::TREESERVE_ISA
