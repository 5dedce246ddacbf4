// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/pool/pool.hpp>

KVIRE_NAMESPACE_BEGIN

/// What may differ between a pool and its mirror: never the layout, which is the pool's own.
struct MirrorOptions {
  std::optional<Arrangement> arrangement = {};     ///< none: as the device pool; another one is a legal reordering
  std::string name = {};                           ///< none: "host." and the device pool's
  std::optional<AnyResource> memory = {};          ///< none: the backend's host memory
  std::optional<unsigned char> fill_on_free = {};
};

/// A host pool for the pages of a device pool: same policy and layers, `pages` pages (the null page included). It has no element type, page
/// size or width of its own to get wrong. Errors as PagePool::make.
template <class P, class Backend>
Result<HostPool<P, Backend>> mirror_of(const DevicePool<P, Backend>& device, std::int64_t pages, MirrorOptions options = {}) {
  return HostPool<P, Backend>::make({.layers = device.layers(),
                                     .pages = pages,
                                     .arrangement = options.arrangement.value_or(device.arrangement()),
                                     .name = options.name.empty() ? "host." + device.name() : options.name,
                                     .memory = std::move(options.memory),
                                     .fill_on_free = options.fill_on_free});
}

KVIRE_NAMESPACE_END
