// A team of threads that work through the phases of a job together.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

namespace treeserve {

// `size` threads, the calling one included. One thread at a time may call run().
//
// A phase is over when all its items are done, not when all threads have come by: a thread that the system does not run
// for a while holds up the others only if it stopped in the middle of an item. One that comes late passes through the
// phases that are over, and one that comes after the end does not join.
class ThreadPool {
public:
    // A thread's way through a job.
    struct Member {
        int thread = 0;
        int64_t phase = 0;
    };
    using Job = std::function<void(Member&)>;

    explicit ThreadPool(int size);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int size() const { return size_; }

    // Calls job(member) on every thread that comes in time, and returns when the job is over. Every thread calls
    // for_each with the same counts in the same order, at most `phases` times.
    void run(int64_t phases, const Job& job);

    // Within a job: spreads function(item) for [0, count) over the threads; then one of them calls finally(). Returns
    // when both are done. Each thread takes its own share front to back, which keeps memory accesses in sequence, and
    // then helps the others.
    template <class Function, class Finally>
    void for_each(Member& member, int64_t count, Function function, Finally finally) {
        if (size_ == 1) {
            for (int64_t item = 0; item < count; ++item) function(item);
            if (count) finally();
            return;
        }
        Counter* taken = &counters_[static_cast<size_t>(member.phase++ * (size_ + 1))];
        std::atomic<int64_t>& done = taken[size_].value;
        int64_t own = 0;
        for (int i = 0; i < size_; ++i) {
            const int owner = (member.thread + i) % size_;
            const int64_t first = count * owner / size_;
            const int64_t size = count * (owner + 1) / size_ - first;
            std::atomic<int64_t>& next = taken[owner].value;
            while (next.load(std::memory_order_relaxed) < size) {
                const int64_t item = next.fetch_add(1, std::memory_order_relaxed);
                if (item >= size) break;
                function(first + item);
                ++own;
            }
        }
        if (own && done.fetch_add(own, std::memory_order_acq_rel) + own == count) {
            finally();
            done.store(count + 1, std::memory_order_release);
            done.notify_all();
        } else if (count) {
            wait_until(done, [=](int64_t value) { return value > count; });
        }
    }

    template <class Function>
    void for_each(Member& member, int64_t count, Function function) {
        for_each(member, count, function, [] {});
    }

private:
    struct alignas(64) Counter {
        std::atomic<int64_t> value{0};
    };

    // Waits at full speed for a while, then gives way to other threads, then sleeps.
    template <class Number, class Condition>
    static void wait_until(const std::atomic<Number>& value, Condition condition) {
        for (int tries = 0;; ++tries) {
            const Number now = value.load(std::memory_order_acquire);
            if (condition(now)) return;
            if (tries < kSpins) {
                pause();
            } else if (tries < kSpins + kYields) {
                std::this_thread::yield();
            } else {
                value.wait(now, std::memory_order_acquire);
            }
        }
    }

    static void pause() {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        asm volatile("yield");
#endif
    }

    void work(int thread);

    // A forward pass has hundreds of phases of 1 to 100 us.
    static constexpr int kSpins = 2000;
    static constexpr int kYields = 200;

    const int size_;
    std::vector<Counter> counters_;  // for each phase: items taken of each thread's share, then items done
    const Job* job_ = nullptr;
    std::atomic<int64_t> jobs_{0};    // odd while a job is open
    std::atomic<int64_t> inside_{0};  // threads that joined it, the caller not included
    std::atomic<bool> stopping_{false};
    std::vector<std::thread> threads_;
};

}  // namespace treeserve
