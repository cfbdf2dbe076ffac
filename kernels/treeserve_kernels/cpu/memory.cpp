#include "memory.h"

#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstring>
#include <new>

namespace treeserve {

#if defined(__SANITIZE_ADDRESS__)

// From the sanitizer's own heap, where it sees what lies beyond the ends.
ZeroedMemory::ZeroedMemory(size_t bytes)
    : data_(static_cast<char*>(std::memset(::operator new(bytes, std::align_val_t{64}), 0, bytes))), bytes_(bytes) {}

ZeroedMemory::~ZeroedMemory() { ::operator delete(data_, std::align_val_t{64}); }

#else

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

#endif

namespace {

constexpr size_t kPageBytes = 4096;
constexpr size_t kWorthAThread = 8 << 20;

}  // namespace

PageToucher::PageToucher(const ZeroedMemory& memory) {
    if (memory.bytes() < kWorthAThread) return;
    thread_ = std::thread([this, first = memory.data(), bytes = memory.bytes()] {
        // Only what nobody else wants of the processor: it is no use to be early at the cost of those who compute.
        setpriority(PRIO_PROCESS, static_cast<id_t>(syscall(SYS_gettid)), 19);
        for (size_t at = 0; at < bytes && !stopping_.load(std::memory_order_relaxed); at += kPageBytes) {
            __atomic_fetch_or(first + at, 0, __ATOMIC_RELAXED);
        }
    });
}

PageToucher::~PageToucher() {
    stopping_.store(true, std::memory_order_relaxed);
    if (thread_.joinable()) thread_.join();
}

}  // namespace treeserve
