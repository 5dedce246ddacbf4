// SPDX-License-Identifier: Apache-2.0
#pragma once

// A stand-in for an engine that knows nothing of kvire: one buffer a layer, page ids and counts of its own, a stream of its own.

#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace other {

/// Pages with reference counts. Page 0 is where padding points.
class Allocator {
 public:
  explicit Allocator(int pages) : counts_(static_cast<std::size_t>(pages), 0) {}

  int take() {
    std::lock_guard lock(mutex_);
    for (std::size_t page = 1; page < counts_.size(); ++page) {
      if (counts_[page] == 0) return counts_[page] = 1, static_cast<int>(page);
    }
    return -1;
  }
  void add(int page, int n) {
    std::lock_guard lock(mutex_);
    counts_[static_cast<std::size_t>(page)] += n;
  }
  int count(int page) const {
    std::lock_guard lock(mutex_);
    return counts_[static_cast<std::size_t>(page)];
  }
  int pages() const { return static_cast<int>(counts_.size()); }

 private:
  mutable std::mutex mutex_;
  std::vector<int> counts_;
};

/// An in-order work queue with a thread.
class Stream {
 public:
  Stream() : thread_([this] { work(); }) {}
  ~Stream() {
    enqueue(nullptr);
    thread_.join();
  }
  void enqueue(std::function<void()> f) {
    std::lock_guard lock(mutex_);
    queue_.push_back(std::move(f));
    changed_.notify_one();
  }

 private:
  void work() {
    for (;;) {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return !queue_.empty(); });
      const auto f = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      if (!f) return;
      f();
    }
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  std::thread thread_;
};

/// The engine's index-key cache: fp8 pages of 64 tokens, values first and then one float scale a token, with a gap behind every page.
struct Engine {
  static constexpr int layers = 3;
  static constexpr int pages = 16;
  static constexpr int tokens = 64;
  static constexpr int page_bytes = tokens * 128 + tokens * 4;
  static constexpr int stride = page_bytes + 256;

  Allocator allocator{pages};
  std::vector<std::vector<std::byte>> index_k = std::vector<std::vector<std::byte>>(layers, std::vector<std::byte>(pages * stride));
  Stream stream;

  /// Queues the engine's own kernel that writes a page's keys.
  void write_keys(int layer, int page, unsigned seed) {
    stream.enqueue([this, layer, page, seed] {
      std::byte* at = index_k[static_cast<std::size_t>(layer)].data() + page * stride;
      unsigned x = seed * 2654435761u + static_cast<unsigned>(layer);
      for (int i = 0; i < tokens * 128; ++i) {
        x = x * 1664525u + 1013904223u;
        at[i] = static_cast<std::byte>((x >> 24 & 0x80u) | 0x28u | (x >> 16 & 0x0Fu));  // e4m3 codes of moderate size
      }
      for (int t = 0; t < tokens; ++t) {
        const float scale = 0.25f + 0.01f * static_cast<float>((seed + static_cast<unsigned>(t)) % 50u);
        std::memcpy(at + tokens * 128 + t * 4, &scale, sizeof scale);
      }
    });
  }
};

}  // namespace other
