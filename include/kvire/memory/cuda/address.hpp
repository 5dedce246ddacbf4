// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <string>

#include <kvire/exec/cuda/error.hpp>

KVIRE_NAMESPACE_BEGIN

/// Where the host finds a byte.
struct HostAddress {
  std::byte* value = nullptr;
};
/// Where a device finds a byte. Pinned memory may have another address there than on the host; nothing converts but `device_address`.
struct DeviceAddress {
  std::byte* value = nullptr;
};

/// The device's address of pinned memory. Error invalid_argument: the memory is not pinned, or not mapped for this device.
inline Result<DeviceAddress> device_address(HostAddress host, const std::string& what) {
  void* mapped = nullptr;
  if (const cudaError_t e = cudaHostGetDevicePointer(&mapped, host.value, 0); e != cudaSuccess) {
    return Error{ErrorCode::invalid_argument, detail::cuda_error(e, what + ": its memory is not pinned for the device").message};
  }
  return DeviceAddress{static_cast<std::byte*>(mapped)};
}

KVIRE_NAMESPACE_END
