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

/// A copy of a vector in device memory.
template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(const std::vector<T>& from) : size_(from.size()) {
    void* memory = nullptr;
    cuda_ok(cudaMalloc(&memory, std::max<std::size_t>(size_ * sizeof(T), 1)));
    data_ = static_cast<T*>(memory);
    if (size_ > 0) cuda_ok(cudaMemcpy(data_, from.data(), size_ * sizeof(T), cudaMemcpyHostToDevice));
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
