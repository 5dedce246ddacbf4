// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include <kvire/base/ints.hpp>
#include <kvire/exec/function.hpp>
#include <kvire/transfer/plan.hpp>

KVIRE_NAMESPACE_BEGIN

/// What moves the bytes.
enum class Engine : unsigned char {
  host_copy,    ///< memcpy on the host's cores
  host_codec,   ///< decoded and encoded again on the host (migrate)
  copy_engine,  ///< the GPU's copy engine
  sm_kernel     ///< a kernel on the GPU
};

constexpr const char* name_of(Engine engine) {
  switch (engine) {
    case Engine::host_copy: return "host_copy";
    case Engine::host_codec: return "host_codec";
    case Engine::copy_engine: return "copy_engine";
    case Engine::sm_kernel: return "sm_kernel";
  }
  return "unknown";
}

/// What has arrived, of one entry by one engine at one granularity. Each layer counts: a page of 21 layers is 21 pages.
struct MovedCount {
  std::string entry;
  Granularity granularity = Granularity::page;
  Engine engine = Engine::host_copy;
  std::int64_t copies = 0;  ///< one a layer: batches, not pages
  std::int64_t pages = 0;   ///< whole pages; 0 for token plans
  std::int64_t tokens = 0;  ///< rows, those of whole pages included
  int sms = 0;              ///< multiprocessors that a kernel used; 0: none
  std::int64_t bytes = 0;   ///< written at the destination, padding of whole pages included
};

/// Sums of what transfers moved; pass one in TransferOptions to sum over many. Thread-safe. What has arrived is counted whether or not anybody
/// asks the transfers, or still has their tickets: where the host is not told of arrivals, sums ask for themselves.
template <class Count>
class BasicTransferStats {
 public:
  /// Appends what has arrived since it was last called; true once there is nothing left to arrive.
  using Arrivals = MoveOnlyFunction<bool(std::vector<Count>& arrived)>;

  void add(const Count& moved) {
    std::lock_guard lock(mutex_);
    add_locked(moved);
  }

  /// Counts, from now on, what `arrivals` reports.
  void follow(Arrivals arrivals) {
    std::lock_guard lock(mutex_);
    // Oldest first, so that sums that are never read do not keep what has arrived long ago.
    while (!followed_.empty() && ask(followed_.front())) followed_.pop_front();
    followed_.push_back(std::move(arrivals));
  }

  std::vector<Count> counts() const {
    std::lock_guard lock(mutex_);
    update();
    return counts_;
  }
  std::int64_t bytes() const {
    std::lock_guard lock(mutex_);
    update();
    std::int64_t n = 0;
    for (const Count& count : counts_) n += count.bytes;
    return n;
  }

 private:
  void add_locked(const Count& moved) const {
    for (Count& count : counts_) {
      if (count.entry != moved.entry || count.granularity != moved.granularity || count.engine != moved.engine) continue;
      count.sms = max_of(count.sms, moved.sms);
      count.copies += moved.copies;
      count.pages += moved.pages;
      count.tokens += moved.tokens;
      count.bytes += moved.bytes;
      return;
    }
    counts_.push_back(moved);
  }
  bool ask(Arrivals& arrivals) const {
    std::vector<Count> arrived;
    const bool finished = arrivals(arrived);
    for (const Count& count : arrived) add_locked(count);
    return finished;
  }
  void update() const {
    std::erase_if(followed_, [this](Arrivals& arrivals) { return ask(arrivals); });
  }

  mutable std::mutex mutex_;
  mutable std::vector<Count> counts_;
  mutable std::deque<Arrivals> followed_;
};
using TransferStats = BasicTransferStats<MovedCount>;

KVIRE_NAMESPACE_END
