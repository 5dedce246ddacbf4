// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdio>
#include <cstring>
#include <mutex>
#include <vector>

#include <kvire/memory/resource.hpp>

KVIRE_NAMESPACE_BEGIN

/// Byte values that Guarded writes; distinct, and none of them a plausible small number.
struct GuardPatterns {
  static constexpr unsigned char fence = 0xFD;  ///< before and behind each allocation
  static constexpr unsigned char fresh = 0xCD;  ///< allocated, never written
  static constexpr unsigned char freed = 0xDD;  ///< given back
};

/// Finds writes outside an allocation: fences on both sides, checked by `check` and when memory comes back, and fill patterns in fresh and
/// freed memory, so that neither is mistaken for data. For memory that the host can address.
/// A damaged fence, a double free or a foreign pointer at `deallocate` is a programming error: it is printed with the first bad byte and the
/// process ends, unless the resource was told to keep the error for `last_error` (tests).
template <ByteResource Upstream>
class Guarded {
 public:
  static constexpr bool zeroed = false;
  enum class OnViolation : unsigned char { abort, keep };

  explicit Guarded(Upstream upstream = Upstream(), OnViolation on_violation = OnViolation::abort)
      : upstream_(std::move(upstream)), shared_(std::make_shared<Shared>()) {
    shared_->on_violation = on_violation;
  }

  std::string name() const { return "guarded " + upstream_.name(); }

  Result<std::byte*> allocate(std::int64_t bytes, std::int64_t alignment) {
    if (auto ok = detail::check_request(name(), bytes, alignment); !ok.ok()) return ok.error();
    const std::int64_t fence = fence_bytes(alignment);
    const std::int64_t fenced = checked_add(bytes, checked_mul(fence, 2));
    if (fenced < 0) return Error{ErrorCode::exhausted, name() + ": " + std::to_string(bytes) + " bytes and two fences do not fit 63 bits"};
    auto memory = upstream_.allocate(fenced, alignment);
    if (!memory.ok()) return memory;
    std::byte* const user = memory.value() + fence;
    fill(user - fence, GuardPatterns::fence, fence);
    fill(user, GuardPatterns::fresh, bytes);
    fill(user + bytes, GuardPatterns::fence, fence);
    std::lock_guard lock(shared_->mutex);
    shared_->live.push_back({user, bytes, alignment});
    return user;
  }

  void deallocate(std::byte* p, std::int64_t bytes, std::int64_t alignment) {
    {
      std::lock_guard lock(shared_->mutex);
      auto it = shared_->live.begin();
      while (it != shared_->live.end() && it->start != p) ++it;
      if (it == shared_->live.end()) {
        return violation({ErrorCode::invalid_argument, name() + ": freed memory that is not allocated (a double or foreign free)"});
      }
      if (it->bytes != bytes || it->alignment != alignment) {
        violation({ErrorCode::mismatch, name() + ": freed as " + std::to_string(bytes) + " bytes what was allocated as " +
                                            std::to_string(it->bytes)});
        bytes = it->bytes;
        alignment = it->alignment;
      }
      if (auto ok = check_fences(*it); !ok.ok()) violation(ok.error());
      shared_->live.erase(it);
    }
    const std::int64_t fence = fence_bytes(alignment);
    fill(p - fence, GuardPatterns::freed, bytes + 2 * fence);
    upstream_.deallocate(p - fence, bytes + 2 * fence, alignment);
  }

  /// Checks the fences of everything allocated. The error names the offset of the first bad byte: negative before the allocation, otherwise
  /// from its start.
  Status check() const {
    std::lock_guard lock(shared_->mutex);
    for (const Live& live : shared_->live) {
      if (auto ok = check_fences(live); !ok.ok()) return ok;
    }
    return {};
  }

  /// The last violation kept; success if none.
  Status last_error() const {
    std::lock_guard lock(shared_->mutex);
    return shared_->last;
  }

 private:
  struct Live {
    std::byte* start;
    std::int64_t bytes;
    std::int64_t alignment;
  };
  struct Shared {
    std::mutex mutex;
    std::vector<Live> live;
    OnViolation on_violation = OnViolation::abort;
    Status last;
  };

  static std::int64_t fence_bytes(std::int64_t alignment) { return alignment > 64 ? alignment : 64; }
  static void fill(std::byte* p, unsigned char value, std::int64_t bytes) { std::memset(p, value, static_cast<std::size_t>(bytes)); }

  Status check_fences(const Live& live) const {
    const std::int64_t fence = fence_bytes(live.alignment);
    for (std::int64_t i = -fence; i < live.bytes + fence; i = i == -1 ? live.bytes : i + 1) {
      if (live.start[i] == static_cast<std::byte>(GuardPatterns::fence)) continue;
      char hex[8];
      std::snprintf(hex, sizeof hex, "0x%02X", static_cast<unsigned>(live.start[i]));
      return Error{ErrorCode::out_of_range, name() + ": byte " + std::to_string(i) + " of an allocation of " + std::to_string(live.bytes) +
                                                " bytes was overwritten with " + hex};
    }
    return {};
  }

  // Under the mutex.
  void violation(Error error) {
    if (shared_->on_violation == OnViolation::abort) detail::die(error);
    shared_->last = std::move(error);
  }

  Upstream upstream_;
  std::shared_ptr<Shared> shared_;
};

KVIRE_NAMESPACE_END
