// The kernels for any CPU.
#define TREESERVE_ISA portable
#include "vector_portable.h"
// The vector comes first: the kernels are written over it.
#include "kernel_table.h"

const treeserve::Kernels treeserve::kPortableKernels = treeserve::portable::kernel_table("portable");
