// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstring>

#include <kvire/exec/cuda/stream.hpp>
#include <kvire/exec/host/parallel.hpp>
#include <kvire/memory/cuda/device.hpp>
#include <kvire/memory/cuda/pinned.hpp>
#include <kvire/pool/pool.hpp>

KVIRE_NAMESPACE_BEGIN

/// Device pools of the CUDA backend: memory of the device that is current when the pool is made.
template <>
struct BackendMemory<Cuda, DeviceSide> {
  /// Only kernels and copies reach the pages.
  static constexpr bool addressable = false;
  static AnyResource resource(std::int64_t) { return DeviceMemory{}; }

  /// Returns when the bytes are written: the pages may be handed to any stream afterwards. Pools fill when they are made, and with
  /// PoolOptions::fill_on_free, a means of debugging, at each free.
  static Status fill(std::byte* p, unsigned char value, std::int64_t bytes) {
    cudaPointerAttributes attributes{};
    if (const cudaError_t e = cudaPointerGetAttributes(&attributes, p); e != cudaSuccess) return detail::cuda_error(e, "filling device memory");
    auto stream = Stream<Cuda>::make({.name = "fill", .device = attributes.device});
    if (!stream.ok()) return stream.error();
    detail::DeviceScope scope(attributes.device);
    const cudaError_t e = cudaMemsetAsync(p, value, static_cast<std::size_t>(bytes), stream.value().native());
    if (e != cudaSuccess) return detail::cuda_error(e, "filling " + std::to_string(bytes) + " bytes of device memory");
    return stream.value().synchronize();
  }
};

/// Host pools of the CUDA backend: pinned.
template <>
struct BackendMemory<Cuda, HostSide> {
  static constexpr bool addressable = true;
  static AnyResource resource(std::int64_t page_stride) { return PinnedMemory({.page_stride = page_stride, .faults = {}}); }
  static Status fill(std::byte* p, unsigned char value, std::int64_t bytes) {
    constexpr std::int64_t grain = std::int64_t{1} << 22;
    parallel_for(bytes, grain, [&](std::int64_t begin, std::int64_t end) { std::memset(p + begin, value, static_cast<std::size_t>(end - begin)); });
    return {};
  }
};

KVIRE_NAMESPACE_END
