// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/mman.h>

#include <kvire/memory/host.hpp>
#include <kvire/memory/numa.hpp>

KVIRE_NAMESPACE_BEGIN

/// Anonymous mappings with a request for huge pages (a hint: small pages serve where the system has none). Fresh memory is zero and is not
/// touched here, so its place on a machine with several memory nodes is decided by who writes it first, or by `numa_node`.
/// Errors as HostMemory; additionally alignments above the huge page are refused, and out_of_range, exhausted or unsupported names a node that cannot be had.
struct HugePageMemory {
  int numa_node = -1;  ///< the memory node that all of it is to be on; -1: of whoever writes it first

  static constexpr bool zeroed = true;
  static constexpr std::int64_t huge_page = std::int64_t{1} << 21;

  std::string name() const { return "huge-page memory"; }

  Result<std::byte*> allocate(std::int64_t bytes, std::int64_t alignment) {
    if (auto ok = detail::check_request(name(), bytes, alignment); !ok.ok()) return ok.error();
    if (alignment > huge_page) {
      return Error{ErrorCode::invalid_argument, name() + ": alignment " + std::to_string(alignment) + " is above the huge page of " +
                                                    std::to_string(huge_page) + " bytes"};
    }
    if (checked_add(bytes, 2 * huge_page) < 0) {
      return Error{ErrorCode::exhausted, name() + ": " + std::to_string(bytes) + " bytes and two huge pages do not fit 63 bits"};
    }
    if (auto ok = detail::check_available(name(), bytes); !ok.ok()) return ok.error();
    const std::int64_t size = mapped(bytes);
    // One huge page more than needed, so that an aligned start can be cut out.
    void* raw = ::mmap(nullptr, static_cast<std::size_t>(size + huge_page), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (raw == MAP_FAILED) return Error{ErrorCode::exhausted, name() + ": " + std::to_string(bytes) + " bytes wanted, and the system refused"};
    auto* const first = static_cast<std::byte*>(raw);
    const auto address = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(raw));
    const std::int64_t before = align_up(address, huge_page) - address;
    if (before > 0) ::munmap(first, static_cast<std::size_t>(before));
    if (before < huge_page) ::munmap(first + before + size, static_cast<std::size_t>(huge_page - before));
    (void)::madvise(first + before, static_cast<std::size_t>(size), MADV_HUGEPAGE);  // only a hint
    if (auto ok = detail::place_on_node(name(), first + before, size, numa_node); !ok.ok()) {
      ::munmap(first + before, static_cast<std::size_t>(size));
      return ok.error();
    }
    return first + before;
  }

  void deallocate(std::byte* p, std::int64_t bytes, std::int64_t) { ::munmap(p, static_cast<std::size_t>(mapped(bytes))); }

 private:
  static std::int64_t mapped(std::int64_t bytes) { return align_up(bytes, huge_page); }
};

KVIRE_NAMESPACE_END
