// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include <kvire/pool/page_ref.hpp>

KVIRE_NAMESPACE_BEGIN

/// Where a page of a prefix can be, fastest first.
enum class CacheTier : unsigned char { device, host, file };
inline constexpr int cache_tiers = 3;

constexpr const char* name_of(CacheTier tier) {
  switch (tier) {
    case CacheTier::device: return "device";
    case CacheTier::host: return "host";
    case CacheTier::file: return "file";
  }
  return "unknown";
}

/// What is to be said of a page as a whole.
enum class PageState : unsigned char {
  absent,    ///< a name without bytes: evicted, while longer prefixes are known
  device,    ///< ready to be used; slower tiers may have copies
  host,      ///< to be loaded first
  file,      ///< to be read and loaded first
  loading,   ///< on its way to a faster tier; steps that read it depend on the load
  storing,   ///< being copied to a slower tier, and staying
  draining,  ///< being copied to a slower tier, to give up the device page at its end
};

constexpr const char* name_of(PageState state) {
  switch (state) {
    case PageState::absent: return "absent";
    case PageState::device: return "device";
    case PageState::host: return "host";
    case PageState::file: return "file";
    case PageState::loading: return "loading";
    case PageState::storing: return "storing";
    case PageState::draining: return "draining";
  }
  return "unknown";
}

namespace detail {

/// One page of one page-id space: its copies, and what eviction asks of it.
struct PrefixPlace {
  enum class Copy : unsigned char { none, arriving, whole };

  PageRef<DevicePage> device;
  PageRef<HostPage> host;
  std::uint64_t rank[cache_tiers] = {};   // by each tier's policy
  std::int32_t pins = 0;                  // running requests that need it on the device
  std::int32_t within[cache_tiers] = {};  // children whose fastest copy is on this tier or a faster one
  std::uint32_t uses = 0;
  Copy copy[cache_tiers] = {};
  bool leaving = false;  // the device copy goes when the host's has arrived

  Copy at(CacheTier tier) const { return copy[static_cast<int>(tier)]; }
  bool anywhere() const { return level() < cache_tiers; }
  bool in_flight() const { return copy[0] == Copy::arriving || copy[1] == Copy::arriving || copy[2] == Copy::arriving; }
  /// Fastest tier that has it or will have it, as a number; cache_tiers: none. A copy that is leaving does not count.
  int level() const {
    int tier = leaving ? 1 : 0;
    while (tier < cache_tiers && copy[tier] == Copy::none) ++tier;
    return tier;
  }
  PageState state() const {
    if (leaving) return PageState::draining;
    const int first = level();
    if (first == cache_tiers) return PageState::absent;
    if (copy[first] == Copy::arriving) return PageState::loading;
    if (in_flight()) return PageState::storing;
    return first == 0 ? PageState::device : first == 1 ? PageState::host : PageState::file;
  }
};

}  // namespace detail

KVIRE_NAMESPACE_END
