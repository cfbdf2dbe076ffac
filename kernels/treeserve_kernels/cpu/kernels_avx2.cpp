// The kernels for Avx2.
#define TREESERVE_ISA avx2
#include "vector_avx2.h"
// The vector comes first: what follows is written over it.
#include "attention.h"
#include "linear.h"

namespace treeserve {

using namespace TREESERVE_ISA;

const Kernels kAvx2Kernels = {
    .name = "avx2",
    .normalise = normalise,
    .quantise = quantise,
    .linear_store = linear_store,
    .linear_add = linear_add,
    .linear_swiglu = linear_swiglu,
    .write_key_value = write_key_value,
    .attend = attend,
};

}  // namespace treeserve
