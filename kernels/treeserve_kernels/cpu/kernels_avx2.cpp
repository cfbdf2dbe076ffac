// The kernels for AVX2.
#define TREESERVE_ISA avx2
#include "vector_avx2.h"
// The vector comes first: the kernels are written over it.
#include "kernel_table.h"

const treeserve::Kernels treeserve::kAvx2Kernels = treeserve::avx2::kernel_table("avx2");
