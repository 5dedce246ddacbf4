// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <utility>

#include <kvire/tier/counters.hpp>
#include <kvire/tier/prefix_cache.hpp>

KVIRE_NAMESPACE_BEGIN

namespace detail {

/// What a tiered cache has done, and for whom.
template <int Spaces>
class TierNotes {
 public:
  const CacheCounters<Spaces>& counters() const { return counters_; }
  /// For whom the calls that follow are: a number that their events carry, those of copies that end later included; -1: nobody.
  void serve(std::int64_t request) { request_ = request; }
  /// Is called with every event from now on; an empty function, as at first: nobody is. Counters and times are kept either way.
  void trace(CacheTrace sink) { trace_ = std::move(sink); }

 protected:
  TierCounters& of(CacheTier tier, int space) { return counters_.tiers[static_cast<int>(tier)][space]; }
  void count_time(CacheWork work, std::int64_t begin_ns, std::int64_t end_ns) { counters_.times[static_cast<int>(work)].add(end_ns - begin_ns); }
  // `first`: what was there; `match`: what could be used of it, up to `end`, the rest not for `reason`.
  void count_lookup(std::int64_t asked, const PrefixMatch& first, const PrefixMatch& match, CacheMiss reason, std::int64_t page_tokens, const Hash128& end,
                    std::int64_t begin_ns) {
    auto& c = counters_;
    ++c.lookups;
    c.looked_up_pages += asked;
    c.hit_pages += match.pages;
    c.hit_tokens += match.pages * page_tokens;
    for (int t = 0; t < cache_tiers; ++t) c.hit_pages_on[t] += match.on[t];
    std::int64_t missed[cache_miss_count] = {};
    missed[static_cast<int>(reason)] += first.pages - match.pages;
    missed[static_cast<int>(CacheMiss::no_tail)] += first.cut;
    missed[static_cast<int>(first.forgotten ? CacheMiss::forgotten : CacheMiss::unknown)] += asked - first.pages - first.cut;
    for (int m = 0; m < cache_miss_count; ++m) c.missed_pages[m] += missed[m];
    const std::int64_t end_ns = steady_ns();
    count_time(CacheWork::lookup, begin_ns, end_ns);
    if (!traced()) return;
    CacheEvent event{.work = CacheWork::lookup, .request = request_, .page = end, .begin_ns = begin_ns, .end_ns = end_ns, .pages = match.pages, .tokens = match.pages * page_tokens};
    note(event);
    event.work = CacheWork::miss;
    event.begin_ns = end_ns;
    for (int m = 0; m < cache_miss_count; ++m) {
      event.pages = missed[m];
      event.tokens = missed[m] * page_tokens;
      event.detail = name_of(static_cast<CacheMiss>(m));
      if (missed[m] > 0) note(event);
    }
  }
  bool traced() const { return static_cast<bool>(trace_); }
  void note(const CacheEvent& event) { trace_(event); }

  CacheCounters<Spaces> counters_;
  std::int64_t request_ = -1;

 private:
  CacheTrace trace_;
};

}  // namespace detail

KVIRE_NAMESPACE_END
