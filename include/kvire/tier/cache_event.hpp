// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>

#include <kvire/base/hash.hpp>
#include <kvire/exec/function.hpp>
#include <kvire/tier/prefix_place.hpp>

KVIRE_NAMESPACE_BEGIN

/// What a tiered cache does. The first `timed_cache_work` take time and are counted by it.
enum class CacheWork : unsigned char {
  lookup,   ///< a prompt was looked up, and its load issued
  load,     ///< host to device, from the issue until the cache took note of the end
  store,    ///< device to host, likewise
  read,     ///< file to host, likewise
  write,    ///< host to file, likewise
  wait,     ///< a request for a device page waited for pages that were leaving
  hit,      ///< a page of a prompt was there
  miss,     ///< pages of a prompt have to be computed
  publish,  ///< a page became the cache's
  evict,    ///< a tier gave up a page
};
inline constexpr int timed_cache_work = 6;

constexpr const char* name_of(CacheWork work) {
  switch (work) {
    case CacheWork::lookup: return "lookup";
    case CacheWork::load: return "load";
    case CacheWork::store: return "store";
    case CacheWork::read: return "read";
    case CacheWork::write: return "write";
    case CacheWork::wait: return "wait";
    case CacheWork::hit: return "hit";
    case CacheWork::miss: return "miss";
    case CacheWork::publish: return "publish";
    case CacheWork::evict: return "evict";
  }
  return "?";
}

/// One thing that a tiered cache did, for whoever follows a request through the tiers. Of a copy there is one for each page.
struct CacheEvent {
  CacheWork work = CacheWork::lookup;
  std::int64_t request = -1;           ///< for whom, as told by `serve`; -1: nobody
  CacheTier tier = CacheTier::device;  ///< where the page goes; hit: where it was; evict: which one gave it up
  int space = -1;                      ///< of the page; -1: all spaces
  Hash128 page = {};                   ///< name of the page's prefix (see prefix_hash); of lookup and miss: where the hit ends
  std::int64_t begin_ns = 0;           ///< of std::chrono::steady_clock
  std::int64_t end_ns = 0;             ///< not before begin_ns; equal for what takes no time
  std::int64_t pages = 0;
  std::int64_t tokens = 0;             ///< raw
  std::int64_t bytes = 0;              ///< that moved
  const char* detail = "";             ///< reason of a miss; "failed" of a copy that did not arrive; "lost" of an eviction without another copy
};

/// Is called with each event, on the thread that uses the cache, which it must not call.
using CacheTrace = MoveOnlyFunction<void(const CacheEvent&)>;

namespace detail {
inline std::int64_t steady_ns() { return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count(); }
}  // namespace detail

KVIRE_NAMESPACE_END
