// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include <kvire/tier/cache_event.hpp>
#include <kvire/tier/time_histogram.hpp>

KVIRE_NAMESPACE_BEGIN

/// Why a page of a prompt had to be computed.
enum class CacheMiss : unsigned char {
  unknown,        ///< nobody has computed it, or its name has gone with its bytes
  forgotten,      ///< known by name; its bytes were given up or could not be read
  no_tail,        ///< there, but without the window that a restart needs
  not_there_yet,  ///< in a file, or on its way from one
  no_room,        ///< there, but the device had no page for it, or its load could not be issued
  not_written,    ///< there, but work that was to write it has failed
};
inline constexpr int cache_miss_count = 6;

constexpr const char* name_of(CacheMiss miss) {
  switch (miss) {
    case CacheMiss::unknown: return "unknown";
    case CacheMiss::forgotten: return "forgotten";
    case CacheMiss::no_tail: return "no_tail";
    case CacheMiss::not_there_yet: return "not_there_yet";
    case CacheMiss::no_room: return "no_room";
    case CacheMiss::not_written: return "not_written";
  }
  return "?";
}

/// Of one tier and page-id space.
struct TierCounters {
  std::int64_t arrived_pages = 0;   ///< copied here
  std::int64_t arrived_bytes = 0;
  std::int64_t evicted_pages = 0;   ///< given up here, with or without a copy on a slower tier
  std::int64_t lost_pages = 0;      ///< of those, without any
  std::int64_t failed_pages = 0;    ///< that did not arrive
  std::int64_t spoiled_pages = 0;   ///< given up because their bytes were not those that had been stored
  std::int64_t refused_pages = 0;   ///< wanted here, and no page was to be had
};

/// What a counter is of; empty where it is of the whole cache.
struct CounterLabel {
  const char* tier = nullptr;
  int space = -1;  ///< number of the page-id space
  const char* reason = nullptr;
};

/// What a tiered cache has done since it was made.
template <int Spaces>
struct CacheCounters {
  std::int64_t lookups = 0;
  std::int64_t looked_up_pages = 0;  ///< whole pages of prompts
  std::int64_t hit_pages = 0;
  std::int64_t hit_tokens = 0;
  std::int64_t hit_pages_on[cache_tiers] = {};  ///< of hit_pages, by the slowest tier that a page had to come from
  std::int64_t missed_pages[cache_miss_count] = {};
  std::int64_t published_pages = 0;
  std::int64_t shared_pages = 0;  ///< computed by two requests at once; the second one's were not needed
  std::int64_t parked_tails = 0;
  std::int64_t shared_tails = 0;  ///< parked where an equal one was
  std::int64_t resumed_tails = 0;
  std::int64_t resumed_tokens = 0;
  std::int64_t resumed_tails_on[cache_tiers] = {};  ///< of resumed_tails, by the tier that they came from
  std::int64_t missed_tails = 0;  ///< known, but without usable bytes, or without room
  TierCounters tiers[cache_tiers][Spaces] = {};
  TimeHistogram times[timed_cache_work] = {};  ///< by CacheWork

  /// Calls v(name, label, value) for each number, for exports.
  template <class V>
  void visit(V&& v) const {
    v("lookups", CounterLabel{}, lookups);
    v("looked_up_pages", CounterLabel{}, looked_up_pages);
    v("hit_pages", CounterLabel{}, hit_pages);
    v("hit_tokens", CounterLabel{}, hit_tokens);
    v("published_pages", CounterLabel{}, published_pages);
    v("shared_pages", CounterLabel{}, shared_pages);
    v("parked_tails", CounterLabel{}, parked_tails);
    v("shared_tails", CounterLabel{}, shared_tails);
    v("resumed_tails", CounterLabel{}, resumed_tails);
    v("resumed_tokens", CounterLabel{}, resumed_tokens);
    v("missed_tails", CounterLabel{}, missed_tails);
    for (int m = 0; m < cache_miss_count; ++m) v("missed_pages", CounterLabel{.reason = name_of(static_cast<CacheMiss>(m))}, missed_pages[m]);
    for (int t = 0; t < cache_tiers; ++t) {
      v("tier_hit_pages", CounterLabel{.tier = name_of(static_cast<CacheTier>(t))}, hit_pages_on[t]);
      v("tier_resumed_tails", CounterLabel{.tier = name_of(static_cast<CacheTier>(t))}, resumed_tails_on[t]);
      for (int s = 0; s < Spaces; ++s) {
        const TierCounters& c = tiers[t][s];
        const CounterLabel label{.tier = name_of(static_cast<CacheTier>(t)), .space = s};
        v("tier_arrived_pages", label, c.arrived_pages);
        v("tier_arrived_bytes", label, c.arrived_bytes);
        v("tier_evicted_pages", label, c.evicted_pages);
        v("tier_lost_pages", label, c.lost_pages);
        v("tier_failed_pages", label, c.failed_pages);
        v("tier_spoiled_pages", label, c.spoiled_pages);
        v("tier_refused_pages", label, c.refused_pages);
      }
    }
  }
  /// Calls v(name, histogram) for each kind of work that takes time.
  template <class V>
  void visit_times(V&& v) const {
    for (int w = 0; w < timed_cache_work; ++w) v(name_of(static_cast<CacheWork>(w)), times[w]);
  }
};

KVIRE_NAMESPACE_END
