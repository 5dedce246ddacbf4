// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include <kvire/base/ints.hpp>
#include <kvire/exec/backend.hpp>
#include <kvire/exec/host/thread.hpp>

KVIRE_NAMESPACE_BEGIN

namespace detail {

/// Lets other threads run until the condition holds, for 100 us at most: a thread that expects work that soon does better to stay awake. Being
/// woken takes tens of microseconds, and the system may put the woken thread on its waker's core, where the two take turns for milliseconds.
template <class Condition>
void yield_until(const Condition& condition) {
  using Clock = std::chrono::steady_clock;
  const auto end = Clock::now() + std::chrono::microseconds(100);
  while (!condition() && Clock::now() < end) std::this_thread::yield();
}

}  // namespace detail

/// Threads that share the chunks of `parallel_for`. Work is cut by the caller's grain alone, never by the count of threads: each chunk is
/// computed whole by one thread, so results do not depend on how many there are or which one took it. A thread that finds no work stays awake
/// for 100 us, for callers that come one after the other, and then sleeps.
template <HostTag Backend>
class BasicThreadPool {
 public:
  /// A pool in which `threads` threads compute, the caller included; so `threads - 1` are started. 0 or less: one per core.
  explicit BasicThreadPool(int threads = 0) {
    if (threads <= 0) threads = static_cast<int>(max_of(1u, std::thread::hardware_concurrency()));
    for (int t = 1; t < threads; ++t) {
      auto worker = detail::start_thread("thread pool", [this] { serve(); });
      if (!worker.ok()) break;  // the callers compute too: fewer threads make it slower, not wrong
      workers_.push_back(std::move(worker).value());
    }
  }
  BasicThreadPool(const BasicThreadPool&) = delete;
  BasicThreadPool& operator=(const BasicThreadPool&) = delete;
  ~BasicThreadPool() {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
      changed_.notify_all();
    }
    for (auto& worker : workers_) worker.join();
  }

  int threads() const { return static_cast<int>(workers_.size()) + 1; }

  /// Calls f(begin, end) for the chunks [0, grain), [grain, 2 * grain), ... of [0, n), in any order and on any thread; returns when all are
  /// done. Several callers may be inside at once, also from within f: the caller computes too, so nothing waits for a free thread.
  template <class F>
  void run(std::int64_t n, std::int64_t grain, F&& f) {
    if (n <= 0) return;
    if (grain < 1) grain = 1;
    const std::int64_t chunks = ceil_div(n, grain);
    const auto chunk = [&](std::int64_t c) { f(c * grain, min_of(n, (c + 1) * grain)); };
    if (chunks == 1 || workers_.empty()) {
      for (std::int64_t c = 0; c < chunks; ++c) chunk(c);
      return;
    }
    Job job;
    job.chunks = chunks;
    job.context = &chunk;
    job.call = [](const void* context, std::int64_t c) { (*static_cast<const decltype(chunk)*>(context))(c); };
    {
      std::lock_guard lock(mutex_);
      jobs_.push_back(&job);
      posted_.fetch_add(1, std::memory_order_relaxed);
    }
    changed_.notify_all();
    job.work();
    const auto alone = [&] { return job.helpers.load(std::memory_order_relaxed) == 0; };
    detail::yield_until(alone);
    std::unique_lock lock(mutex_);
    // All chunks are taken: no other thread may join any more, those inside finish.
    std::erase(jobs_, &job);
    job.left.wait(lock, alone);
  }

 private:
  struct Job {
    void work() {
      for (std::int64_t c; (c = next.fetch_add(1, std::memory_order_relaxed)) < chunks;) call(context, c);
    }
    std::atomic<std::int64_t> next{0};
    std::int64_t chunks = 0;
    const void* context = nullptr;
    void (*call)(const void*, std::int64_t) = nullptr;
    std::atomic<int> helpers{0};  // written under the pool's mutex
    std::condition_variable left;
  };

  void serve() {
    std::unique_lock lock(mutex_);
    while (!stopping_) {
      if (Job* const job = open_job()) {
        ++job->helpers;
        lock.unlock();
        job->work();
        lock.lock();
        if (--job->helpers == 0) job->left.notify_all();
        continue;
      }
      const auto called = [&, seen = posted_.load(std::memory_order_relaxed)] { return posted_.load(std::memory_order_relaxed) != seen; };
      lock.unlock();
      detail::yield_until(called);
      lock.lock();
      changed_.wait(lock, [&] { return stopping_ || called(); });
    }
  }

  // One with chunks that nobody has taken, or null. Under the mutex.
  Job* open_job() const {
    for (Job* job : jobs_) {
      if (job->next.load(std::memory_order_relaxed) < job->chunks) return job;
    }
    return nullptr;
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Job*> jobs_;
  std::atomic<std::uint64_t> posted_{0};  // jobs there ever were; written under the mutex
  bool stopping_ = false;
  std::vector<std::thread> workers_;
};
using ThreadPool = BasicThreadPool<Host>;

/// The process-wide pool, one thread per core, started by the first call. It is never destroyed: streams in static storage may still use it
/// while the process ends.
template <HostTag Backend = Host>
BasicThreadPool<Backend>& process_threads() {
  static auto* pool = new BasicThreadPool<Backend>();
  return *pool;
}

/// `ThreadPool::run` on the process-wide pool; small work (one chunk) runs in the caller without touching it.
template <class F, HostTag Backend = Host>
void parallel_for(std::int64_t n, std::int64_t grain, F&& f) {
  if (n <= max_of<std::int64_t>(grain, 1)) {
    if (n > 0) f(std::int64_t{0}, n);
    return;
  }
  process_threads<Backend>().run(n, grain, f);
}

KVIRE_NAMESPACE_END
