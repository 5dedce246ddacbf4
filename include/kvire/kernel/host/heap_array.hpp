// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>

#include <kvire/base/config.hpp>

KVIRE_NAMESPACE_BEGIN
namespace simd {

/// Working memory of a kernel: `size` elements, not initialised. False if there was no memory for them; nothing is thrown.
template <class T>
class HeapArray {
 public:
  HeapArray() = default;
  explicit HeapArray(std::int64_t size) { allocate(size); }
  HeapArray(const HeapArray&) = delete;
  HeapArray& operator=(const HeapArray&) = delete;
  ~HeapArray() { delete[] data_; }

  bool allocate(std::int64_t size) {
    delete[] data_;
    data_ = new (std::nothrow) T[static_cast<std::size_t>(size)];
    return data_ != nullptr;
  }
  explicit operator bool() const { return data_ != nullptr; }
  T* get() const { return data_; }
  T& operator[](std::int64_t i) const { return data_[i]; }

 private:
  T* data_ = nullptr;
};

}  // namespace simd
KVIRE_NAMESPACE_END
