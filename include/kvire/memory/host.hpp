// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <new>

#include <kvire/memory/available.hpp>
#include <kvire/memory/resource.hpp>

KVIRE_NAMESPACE_BEGIN

namespace detail {

/// Requests of at least this size are compared with what the machine has left before they are made: memory is handed out long before it is
/// touched, and a process that touches too much is killed instead of told.
inline constexpr std::int64_t worth_asking = std::int64_t{1} << 26;

inline Status check_available(const std::string& resource, std::int64_t bytes) {
  if (bytes < worth_asking) return {};
  const std::int64_t available = available_memory();
  if (bytes <= available) return {};
  return Error{ErrorCode::exhausted,
               resource + ": " + std::to_string(bytes) + " bytes wanted, " + std::to_string(available) + " available"};
}

}  // namespace detail

/// Ordinary aligned memory of the process. Errors: invalid_argument; exhausted with the bytes wanted and, for large requests, available.
struct HostMemory {
  static constexpr bool zeroed = false;

  std::string name() const { return "host memory"; }

  Result<std::byte*> allocate(std::int64_t bytes, std::int64_t alignment) {
    if (auto ok = detail::check_request(name(), bytes, alignment); !ok.ok()) return ok.error();
    if (auto ok = detail::check_available(name(), bytes); !ok.ok()) return ok.error();
    void* p = ::operator new(static_cast<std::size_t>(bytes), std::align_val_t(alignment), std::nothrow);
    if (p == nullptr) return Error{ErrorCode::exhausted, name() + ": " + std::to_string(bytes) + " bytes wanted, and the system refused"};
    return static_cast<std::byte*>(p);
  }

  void deallocate(std::byte* p, std::int64_t, std::int64_t alignment) { ::operator delete(p, std::align_val_t(alignment)); }
};

KVIRE_NAMESPACE_END
