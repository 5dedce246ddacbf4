// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/mman.h>

#include <string>

#include <kvire/memory/resource.hpp>

namespace kvire_test {

/// Address space without memory: pages appear when touched. Larger than the machine may have, for the 64-bit cases.
struct SparseMemory {
  static constexpr bool zeroed = true;
  std::string name() const { return "sparse memory"; }
  kvire::Result<std::byte*> allocate(std::int64_t bytes, std::int64_t) {
    void* p = ::mmap(nullptr, static_cast<std::size_t>(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) return kvire::Error{kvire::ErrorCode::exhausted, "sparse memory: " + std::to_string(bytes) + " bytes wanted"};
    return static_cast<std::byte*>(p);
  }
  void deallocate(std::byte* p, std::int64_t bytes, std::int64_t) { ::munmap(p, static_cast<std::size_t>(bytes)); }
};
static_assert(kvire::ByteResource<SparseMemory>);

}  // namespace kvire_test
