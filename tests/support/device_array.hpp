// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <vector>

#include <cuda_runtime_api.h>
#include <doctest/doctest.h>

namespace kvire_test {

/// Whether there are to be fewer and smaller cases, for sanitizers.
inline bool small_run() { return std::getenv("KVIRE_TEST_SMALL") != nullptr; }

inline void cuda_ok(cudaError_t error) { REQUIRE_MESSAGE(error == cudaSuccess, cudaGetErrorString(error)); }

/// Waits for what went by the default stream: a copy of little pageable memory may still be on its way when cudaMemcpy returns, and kernels on streams of their
/// own do not wait for it.
inline void arrived() { cuda_ok(cudaStreamSynchronize(cudaStreamLegacy)); }
/// Copies to memory of the device; it is there at the end.
inline void upload(void* to, const void* from, std::size_t bytes) {
  cuda_ok(cudaMemcpy(to, from, bytes, cudaMemcpyDefault));
  arrived();
}

/// A copy of a vector in device memory.
template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(const std::vector<T>& from) : size_(from.size()) {
    void* memory = nullptr;
    cuda_ok(cudaMalloc(&memory, std::max<std::size_t>(size_ * sizeof(T), 1)));
    data_ = static_cast<T*>(memory);
    if (size_ > 0) upload(data_, from.data(), size_ * sizeof(T));
  }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  ~DeviceArray() { cudaFree(data_); }
  T* data() const { return data_; }
  /// What is there now, once everything queued has run.
  std::vector<T> read() const {
    cuda_ok(cudaDeviceSynchronize());
    std::vector<T> copy(size_);
    if (size_ > 0) cuda_ok(cudaMemcpy(copy.data(), data_, size_ * sizeof(T), cudaMemcpyDeviceToHost));
    return copy;
  }

 private:
  T* data_ = nullptr;
  std::size_t size_;
};

/// One T, zeroed, to be added to on the device.
template <class T>
class DeviceCounts : public DeviceArray<T> {
 public:
  DeviceCounts() : DeviceArray<T>(std::vector<T>(1)) {}
  T value() const { return this->read().front(); }
};

}  // namespace kvire_test
