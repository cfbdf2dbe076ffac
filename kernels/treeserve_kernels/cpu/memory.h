// Large blocks of zeroed memory, in huge pages where the system has them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
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

private:
    char* data_ = nullptr;
    size_t bytes_ = 0;
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
