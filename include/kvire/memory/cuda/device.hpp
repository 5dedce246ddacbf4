// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/exec/cuda/error.hpp>
#include <kvire/memory/resource.hpp>

KVIRE_NAMESPACE_BEGIN

/// Memory of one device, from cudaMalloc: large and rarely allocated, so nothing is kept back. Alignments up to 256.
/// Errors: invalid_argument; exhausted with the bytes wanted and free.
class DeviceMemory {
 public:
  static constexpr bool zeroed = false;

  /// -1: the device that is current at each allocation.
  explicit DeviceMemory(int device = -1) : device_(device) {}

  std::string name() const { return "memory of device " + (device_ < 0 ? std::string("(current)") : std::to_string(device_)); }

  Result<std::byte*> allocate(std::int64_t bytes, std::int64_t alignment) {
    if (auto ok = detail::check_request(name(), bytes, alignment); !ok.ok()) return ok.error();
    if (alignment > pool_alignment) {
      return Error{ErrorCode::invalid_argument, name() + ": alignment " + std::to_string(alignment) + " is above " + std::to_string(pool_alignment)};
    }
    auto device = device_ >= 0 ? Result<int>(device_) : current_device();
    if (!device.ok()) return device.error();
    detail::DeviceScope scope(device.value());
    detail::RelaxedCapture relaxed;
    void* p = nullptr;
    if (const cudaError_t e = cudaMalloc(&p, static_cast<std::size_t>(bytes)); e != cudaSuccess) {
      const Error error = detail::cuda_error(e, name());
      std::size_t free = 0;
      std::size_t total = 0;
      if (cudaMemGetInfo(&free, &total) != cudaSuccess) (void)cudaGetLastError();
      return Error{error.code, name() + ": " + std::to_string(bytes) + " bytes wanted, " + std::to_string(free) + " of " + std::to_string(total) +
                                   " free: " + cudaGetErrorName(e)};
    }
    return static_cast<std::byte*>(p);
  }

  void deallocate(std::byte* p, std::int64_t, std::int64_t) {
    detail::RelaxedCapture relaxed;
    if (const cudaError_t e = cudaFree(p); e != cudaSuccess) (void)detail::cuda_error(e, name());
  }

 private:
  int device_;
};

KVIRE_NAMESPACE_END
