#include "thread_pool.h"

namespace treeserve {

ThreadPool::ThreadPool(int size) : size_(size) {
    for (int thread = 1; thread < size; ++thread) threads_.emplace_back([this, thread] { work(thread); });
}

ThreadPool::~ThreadPool() {
    stopping_.store(true);
    jobs_.fetch_add(2);
    jobs_.notify_all();
    for (std::thread& thread : threads_) thread.join();
}

void ThreadPool::run(int64_t phases, const Job& job) {
    const auto needed = static_cast<size_t>(phases * (size_ + 1));
    if (counters_.size() < needed) counters_ = std::vector<Counter>(needed);
    for (Counter& counter : counters_) counter.value.store(0, std::memory_order_relaxed);
    job_ = &job;
    jobs_.fetch_add(1);
    jobs_.notify_all();
    Member caller;
    job(caller);
    // Whoever joins now finds the job closed; those inside find every phase over and leave.
    jobs_.fetch_add(1);
    wait_until(inside_, [](int64_t inside) { return inside == 0; });
}

void ThreadPool::work(int thread) {
    for (int64_t seen = 0;;) {
        wait_until(jobs_, [=](int64_t jobs) { return jobs != seen; });
        if (stopping_.load()) return;
        seen = jobs_.load();
        if (seen % 2 == 0) continue;
        inside_.fetch_add(1);
        if (jobs_.load() == seen) {  // still open, and open it stays until nobody is inside
            Member member{thread, 0};
            (*job_)(member);
        }
        inside_.fetch_sub(1);
        inside_.notify_all();
    }
}

}  // namespace treeserve
