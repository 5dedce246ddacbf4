// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include <kvire/exec/cuda/error.hpp>

KVIRE_NAMESPACE_BEGIN

/// Sets `bytes` of the L2 cache of `device` (-1: the current one) aside for lines that are evicted last, which the rest of what passes through L2 then leaves
/// alone (CUDA's cudaLimitPersistingL2CacheSize). Memory accesses of all other kinds have that part too while no such lines fill it.
///
/// The kernels of decode store scores that way: memory that each layer writes again stays in L2 if its bytes and some tenth more are set aside, and goes to DRAM, against the keys that are
/// read, if not. More than that gains nothing, and leaves the keys less (docs/performance.md).
///
/// Holds for the device's whole context, for kernels that start later, until it is set again; no stream is involved, nothing is waited for.
/// Returns the bytes that the driver made of it (it rounds up). Errors: invalid_argument for bytes below 0; out_of_range with what the device can set aside; the runtime's own.
inline Result<std::int64_t> set_aside_l2(std::int64_t bytes, int device = -1) {
  const std::string what = "set_aside_l2: " + std::to_string(bytes) + " bytes";
  if (bytes < 0) return Error{ErrorCode::invalid_argument, what + " are wanted, less than 0"};
  const auto wanted = device >= 0 ? Result<int>(device) : current_device();
  if (!wanted.ok()) return wanted.error();
  int most = 0;
  if (const cudaError_t e = cudaDeviceGetAttribute(&most, cudaDevAttrMaxPersistingL2CacheSize, wanted.value()); e != cudaSuccess) return detail::cuda_error(e, what);
  if (bytes > most) return Error{ErrorCode::out_of_range, what + " are wanted of the L2 of device " + std::to_string(wanted.value()) + ", which can set " + std::to_string(most) + " aside"};
  detail::DeviceScope scope(wanted.value());
  detail::RelaxedCapture relaxed;
  std::size_t set = 0;
  if (const cudaError_t e = cudaDeviceSetLimit(cudaLimitPersistingL2CacheSize, static_cast<std::size_t>(bytes)); e != cudaSuccess) return detail::cuda_error(e, what);
  if (const cudaError_t e = cudaDeviceGetLimit(&set, cudaLimitPersistingL2CacheSize); e != cudaSuccess) return detail::cuda_error(e, what);
  return static_cast<std::int64_t>(set);
}

KVIRE_NAMESPACE_END
