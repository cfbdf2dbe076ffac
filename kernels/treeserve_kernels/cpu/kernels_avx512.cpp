// The kernels for Avx512.
#define TREESERVE_ISA avx512
#include "vector_avx512.h"
// The vector comes first: what follows is written over it.
#include "attention.h"
#include "linear.h"

namespace treeserve {

using namespace TREESERVE_ISA;

const Kernels kAvx512Kernels = {
    .name = "avx512vnni",
    .normalise = normalise,
    .quantise = quantise,
    .linear_store = linear_store,
    .linear_add = linear_add,
    .linear_swiglu = linear_swiglu,
    .write_key_value = write_key_value,
    .attend = attend,
};

}  // namespace treeserve
