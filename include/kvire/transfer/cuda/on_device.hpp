// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include <kvire/memory/cuda/address.hpp>
#include <kvire/transfer/cuda/engine.hpp>

KVIRE_NAMESPACE_BEGIN

namespace detail {

/// Addresses of the device for both sides, and a refusal of memory that belongs elsewhere. Pages of the device's side may lie in pinned memory (those that a hot
/// set fetches from) if kernels find them at the pool's own address, by which leases name them.
inline Status on_device(PageList& list, const CopyInfo& info, int device, const std::string& transfer) {
  const auto check = [&](const std::byte* p, bool host) -> Result<std::byte*> {
    const std::string what = "transfer '" + transfer + "', entry '" + info.entry + "', layer " + std::to_string(info.layer);
    if (host) {
      auto address = device_address(HostAddress{const_cast<std::byte*>(p)}, what);
      if (!address.ok()) return address.error();
      return address.value().value;
    }
    cudaPointerAttributes attributes{};
    if (const cudaError_t e = cudaPointerGetAttributes(&attributes, p); e != cudaSuccess) return cuda_error(e, what);
    const bool pinned = attributes.type == cudaMemoryTypeHost && attributes.devicePointer == p;
    if (!pinned && (attributes.type != cudaMemoryTypeDevice || attributes.device != device)) {
      return Error{ErrorCode::mismatch, what + ": the stream belongs to device " + std::to_string(device) + ", the pool's memory to " +
                                            (attributes.type == cudaMemoryTypeDevice ? "device " + std::to_string(attributes.device) : std::string("no device"))};
    }
    return const_cast<std::byte*>(p);
  };
  auto from = check(list.from, info.direction == CopyDirection::host_to_device || info.direction == CopyDirection::host_to_host);
  if (!from.ok()) return from.error();
  auto to = check(list.to, info.direction == CopyDirection::device_to_host || info.direction == CopyDirection::host_to_host);
  if (!to.ok()) return to.error();
  list.from = from.value();
  list.to = to.value();
  return {};
}

}  // namespace detail

KVIRE_NAMESPACE_END
