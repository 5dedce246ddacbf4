// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "device_array.hpp"

namespace kvire_test {

/// Device memory of a pool of pages of P that ends beyond 4 GiB, where offsets in 32 bits reach other pages. Its bytes are what they were.
/// There is none, and the test says so, where the device has not that much to spare.
template <class P>
class FarPages {
 public:
  explicit FarPages(std::int32_t pages) : pages_(pages) {
    const auto bytes = static_cast<std::size_t>(pages) * P::page_bytes;
    REQUIRE(bytes > std::size_t(1) << 32);
    std::size_t available = 0, total = 0;
    cuda_ok(cudaMemGetInfo(&available, &total));
    if (available < bytes + (std::size_t(1) << 30)) {
      MESSAGE("skipped: a pool of " << bytes << " bytes, and " << available << " bytes of device memory are free");
      return;
    }
    void* memory = nullptr;
    cuda_ok(cudaMalloc(&memory, bytes));
    data_ = static_cast<std::byte*>(memory);
  }
  FarPages(const FarPages&) = delete;
  FarPages& operator=(const FarPages&) = delete;
  ~FarPages() { cudaFree(data_); }

  explicit operator bool() const { return data_ != nullptr; }
  std::byte* data() const { return data_; }
  std::int32_t pages() const { return pages_; }
  std::byte* page(std::int32_t id) const { return data_ + std::int64_t(id) * P::page_bytes; }

 private:
  std::int32_t pages_;
  std::byte* data_ = nullptr;
};

}  // namespace kvire_test
