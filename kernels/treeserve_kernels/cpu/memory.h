// Large blocks of zeroed memory, in huge pages where the system has them.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <utility>

namespace treeserve {

// Address space whose pages are zero and take memory only once they are touched.
class ZeroedMemory {
public:
    ZeroedMemory() = default;
    explicit ZeroedMemory(size_t bytes);  // throws std::bad_alloc
    ZeroedMemory(ZeroedMemory&& other) noexcept
        : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
    ZeroedMemory& operator=(ZeroedMemory&& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(bytes_, other.bytes_);
        return *this;
    }
    ~ZeroedMemory();

    char* data() const { return data_; }
    size_t bytes() const { return bytes_; }

private:
    char* data_ = nullptr;
    size_t bytes_ = 0;
};

// Touches every page of some memory, from its beginning on, in a thread of its own: whoever writes there later need not
// wait for the system to find and clear one. Changes nothing; others may use the memory meanwhile.
class PageToucher {
public:
    explicit PageToucher(const ZeroedMemory& memory);
    ~PageToucher();  // stops early; the memory has to exist until then
    PageToucher(const PageToucher&) = delete;
    PageToucher& operator=(const PageToucher&) = delete;

private:
    std::atomic<bool> stopping_{false};
    std::thread thread_;
};

// A growing array of numbers, aligned to 64 bytes. Growing drops the content; new content is zero.
template <class Number>
class Scratch {
public:
    Number* data() const { return reinterpret_cast<Number*>(memory_.data()); }

    void reserve(int64_t count) {
        if (count <= count_) return;
        count = std::max(count, count_ + count_ / 2);  // contexts grow token by token
        memory_ = ZeroedMemory(static_cast<size_t>(count) * sizeof(Number));
        count_ = count;
    }

private:
    ZeroedMemory memory_;
    int64_t count_ = 0;
};

}  // namespace treeserve
