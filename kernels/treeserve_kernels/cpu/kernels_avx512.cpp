// The kernels for AVX-512 with VNNI.
#define TREESERVE_ISA avx512
#include "vector_avx512.h"
// The vector comes first: the kernels are written over it.
#include "kernel_table.h"

const treeserve::Kernels treeserve::kAvx512Kernels = treeserve::avx512::kernel_table("avx512vnni");
