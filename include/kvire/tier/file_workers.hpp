// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <condition_variable>
#include <deque>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <kvire/exec/backend.hpp>
#include <kvire/exec/function.hpp>
#include <kvire/exec/host/thread.hpp>

KVIRE_NAMESPACE_BEGIN

/// A few threads that run what may block on a disk. Loads go first: a request waits for them, and for stores nobody does.
template <HostTag Backend>
class BasicFileWorkers {
 public:
  /// A job is given the number of its thread, for memory that threads keep.
  using Job = MoveOnlyFunction<void(int worker)>;

  BasicFileWorkers() = default;
  BasicFileWorkers(const BasicFileWorkers&) = delete;
  BasicFileWorkers& operator=(const BasicFileWorkers&) = delete;
  /// Runs what is queued, then joins.
  ~BasicFileWorkers() {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    for (auto& thread : threads_) thread.join();
  }

  /// Starts the threads, once; `who` names them in the error. Error exhausted if the system has none to give; with fewer than asked for, jobs
  /// only take longer.
  Status start(const std::string& who, int threads) {
    for (int i = 0; i < threads; ++i) {
      auto thread = detail::start_thread(who, [this, i] { serve(i); });
      if (!thread.ok()) return threads_.empty() ? thread.error() : Status();
      threads_.push_back(std::move(thread).value());
    }
    return {};
  }

  void load(Job job) { post(loads_, std::move(job)); }
  void store(Job job) { post(stores_, std::move(job)); }

 private:
  void post(std::deque<Job>& queue, Job job) {
    {
      std::lock_guard lock(mutex_);
      queue.push_back(std::move(job));
    }
    changed_.notify_one();
  }

  void serve(int worker) {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return !loads_.empty() || !stores_.empty() || stopping_; });
      auto& queue = loads_.empty() ? stores_ : loads_;
      if (queue.empty()) return;
      {
        Job job = std::move(queue.front());
        queue.pop_front();
        lock.unlock();
        job(worker);
        // What the job captured goes outside the lock.
      }
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Job> loads_, stores_;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};
using FileWorkers = BasicFileWorkers<Host>;

KVIRE_NAMESPACE_END
