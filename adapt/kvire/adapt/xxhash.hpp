// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <xxhash.h>

#include <kvire/tier/checksum.hpp>

KVIRE_NAMESPACE_BEGIN

namespace adapt {

/// XXH3, 64 bits, by the xxHash library (0.8 or newer): about as fast as memory. Link kvire::xxhash.
struct Xxh3 {
  static constexpr std::uint32_t id = 2;
  static constexpr const char* name = "XXH3-64";
  static std::uint64_t of(const std::byte* bytes, std::int64_t count) { return XXH3_64bits(bytes, static_cast<std::size_t>(count)); }
};

}  // namespace adapt

KVIRE_NAMESPACE_END
