// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <limits>
#include <mutex>

#include <kvire/memory/resource.hpp>

KVIRE_NAMESPACE_BEGIN

struct MemoryCounts {
  std::int64_t live_bytes = 0;
  std::int64_t high_water_bytes = 0;
  std::int64_t live_allocations = 0;
  std::int64_t allocations = 0;  ///< successful ones, ever
  std::int64_t failures = 0;     ///< refused by the limit or by the wrapped resource
};

/// Counts what passes through, and refuses what would exceed an optional limit. Copies share the counts, so one handle can be kept aside
/// to read them while pools own the others.
template <ByteResource Upstream>
class Counting {
 public:
  static constexpr bool zeroed = Upstream::zeroed;
  static constexpr std::int64_t no_limit = std::numeric_limits<std::int64_t>::max();

  explicit Counting(Upstream upstream = Upstream(), std::int64_t limit_bytes = no_limit)
      : upstream_(std::move(upstream)), shared_(std::make_shared<Shared>()) {
    shared_->limit = limit_bytes;
  }

  std::string name() const { return "counted " + upstream_.name(); }

  /// Error exhausted beyond the limit, with the bytes wanted and available.
  Result<std::byte*> allocate(std::int64_t bytes, std::int64_t alignment) {
    if (auto ok = detail::check_request(name(), bytes, alignment); !ok.ok()) return fail(ok.error());
    {
      // Reserve first: two callers must not both pass the limit.
      std::lock_guard lock(shared_->mutex);
      const std::int64_t available = shared_->limit - shared_->counts.live_bytes;
      if (bytes > available) {
        ++shared_->counts.failures;
        return Error{ErrorCode::exhausted, name() + ": " + std::to_string(bytes) + " bytes wanted, " + std::to_string(available) +
                                               " available of a limit of " + std::to_string(shared_->limit)};
      }
      shared_->counts.live_bytes += bytes;
    }
    auto memory = upstream_.allocate(bytes, alignment);
    std::lock_guard lock(shared_->mutex);
    auto& counts = shared_->counts;
    if (!memory.ok()) {
      counts.live_bytes -= bytes;
      ++counts.failures;
      return memory;
    }
    ++counts.allocations;
    ++counts.live_allocations;
    if (counts.live_bytes > counts.high_water_bytes) counts.high_water_bytes = counts.live_bytes;
    return memory;
  }

  void deallocate(std::byte* p, std::int64_t bytes, std::int64_t alignment) {
    upstream_.deallocate(p, bytes, alignment);
    std::lock_guard lock(shared_->mutex);
    shared_->counts.live_bytes -= bytes;
    --shared_->counts.live_allocations;
  }

  MemoryCounts counts() const {
    std::lock_guard lock(shared_->mutex);
    return shared_->counts;
  }

 private:
  struct Shared {
    std::mutex mutex;
    MemoryCounts counts;
    std::int64_t limit = no_limit;
  };
  Error fail(const Error& error) {
    std::lock_guard lock(shared_->mutex);
    ++shared_->counts.failures;
    return error;
  }
  Upstream upstream_;
  std::shared_ptr<Shared> shared_;
};

KVIRE_NAMESPACE_END
