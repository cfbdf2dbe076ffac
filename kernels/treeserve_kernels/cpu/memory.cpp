#include "memory.h"

#include <sys/mman.h>

#include <new>

namespace treeserve {

ZeroedMemory::ZeroedMemory(size_t bytes) {
    void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (data == MAP_FAILED) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
    madvise(data, bytes, MADV_HUGEPAGE);  // a wish: without huge pages it only gets slower
#endif
    data_ = static_cast<char*>(data);
    bytes_ = bytes;
}

ZeroedMemory::~ZeroedMemory() {
    if (data_) munmap(data_, bytes_);
}

}  // namespace treeserve
