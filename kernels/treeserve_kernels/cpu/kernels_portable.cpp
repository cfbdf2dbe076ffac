// The kernels for any CPU.
#define TREESERVE_ISA portable
#include "vector_portable.h"
// The vector comes first: what follows is written over it.
#include "attention.h"
#include "linear.h"

namespace treeserve {

using namespace TREESERVE_ISA;

const Kernels kPortableKernels = {
    .name = "portable",
    .normalise = normalise,
    .quantise = quantise,
    .linear_store = linear_store,
    .linear_add = linear_add,
    .linear_swiglu = linear_swiglu,
    .write_key_value = write_key_value,
    .attend = attend,
};

}  // namespace treeserve
