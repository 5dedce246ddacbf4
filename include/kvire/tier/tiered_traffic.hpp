// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <kvire/sync/gate.hpp>
#include <kvire/tier/counters.hpp>
#include <kvire/tier/prefix_cache.hpp>
#include <kvire/tier/tiered_moves.hpp>

KVIRE_NAMESPACE_BEGIN

struct TieredOptions {
  std::int64_t window_tokens = 0;  ///< how far back the model's sliding window reaches, the token itself included
  bool write_through = false;      ///< a page gets its copy on the host when it is published, not when the device gives it up
  bool keep_tokens = true;         ///< see PrefixShape
  int batch_pages = 8;             ///< pages of a space that are sent to the host at once when the device runs short
  std::chrono::milliseconds room_limit{10'000};  ///< how long an allocation waits for pages that are being copied away
  std::string name = "tiered cache";
};

/// The pools and streams of a tiered cache, which must outlive it. Without `host` there is no slower tier than the device.
template <class Bundle, class Backend>
struct TieredPools {
  DeviceBundlePool<Bundle, Backend>* device = nullptr;
  HostBundlePool<Bundle, Backend>* host = nullptr;
  Stream<Backend>* loads = nullptr;
  Stream<Backend>* stores = nullptr;
};

/// Sees the copies between device and host, each as one plan of the bundle: for engines that trace, and for tests that damage.
template <class Bundle, class Backend>
struct TierWatch {
  std::function<void(CacheTier to, const BundlePlan<Bundle>&)> before = {};  ///< no byte has moved
  std::function<void(CacheTier to, const BundlePlan<Bundle>&, const Ticket<Backend>&)> issued = {};
};

namespace detail {

/// The copies between device and host that a prefix cache has under way: issues them as transfers of the whole bundle, and tells the cache how
/// they ended.
template <class Bundle, class Backend, EvictionPolicy Policy>
class TierTraffic {
 public:
  static constexpr int spaces = Bundle::space_count;
  using Cache = PrefixCache<spaces, Policy>;

  const Cache& cache() const { return cache_; }
  const CacheCounters<spaces>& counters() const { return counters_; }
  /// What has moved, by entry and engine.
  const TransferStats& loaded() const { return *loaded_; }
  const TransferStats& stored() const { return *stored_; }
  void watch(TierWatch<Bundle, Backend> watch) { watch_ = std::move(watch); }

 protected:
  TierTraffic(Cache cache, const TieredPools<Bundle, Backend>& pools, const TieredOptions& options)
      : cache_(std::move(cache)), pools_(pools), options_(options) {
    while (cache_.shape().spaces[first_every_].need != PrefixNeed::every) ++first_every_;
    for_each_space<Bundle>([&]<class Space>(int s) { page_bytes_[s] = Bundle::template page_bytes<Space>(pools_.device->layers()).count; });
  }

  struct Flight {
    CacheTier to;
    TierPages pages;
    Ticket<Backend> ticket;
    typename Cache::Ref tail = {};  // of a load for a request's own pages: where from, so that a load that fails can be tried again
    DevicePage own = {};            // the first of those pages
  };

  TierCounters& of(CacheTier tier, int space) { return counters_.tiers[static_cast<int>(tier)][space]; }

  // Issues the copies that the cache awaits on the device, from the host, as one transfer. After an error they have not arrived.
  Status load(TierPages pages) {
    if (pages.empty()) return {};
    auto plan = pairs_of(pages).plan();
    return load(plan, std::move(pages));
  }
  // The same from the host pages of a tail to device pages that stay the caller's. `to`: one a space.
  Status load_tail(typename Cache::Ref tail, const typename Cache::Pages& to) {
    TierPairs<Bundle> pairs;
    TierPages counted;
    for (int s = 0; s < spaces; ++s) {
      pairs.add(s, cache_.host(tail.node(), s).id(), to[static_cast<std::size_t>(s)].id());
      counted.push_back({.space = s});
    }
    if (Status status = load(pairs.plan(), std::move(counted)); !status.ok()) return status;
    flights_.back().tail = std::move(tail);
    flights_.back().own = to[0].id();
    return {};
  }
  // Pages of a request have become a tail's: a load that still fills them is the tail's from now on. `first`: as above.
  void hand_over(std::int32_t tail, DevicePage first) {
    for (Flight& flight : flights_) {
      if (flight.own.none() || flight.own != first) continue;
      for (auto& page : flight.pages) page.node = tail;
      flight.tail = {};
      flight.own = {};
      cache_.await_device(tail);
    }
  }
  // The copies that the cache awaits on the host.
  Status store(TierPages pages) {
    if (pages.empty()) return {};
    const auto plan = pairs_of(pages).plan();
    if (watch_.before) watch_.before(CacheTier::host, plan);
    return fly(CacheTier::host, plan, std::move(pages),
               kvire::backup(*pools_.device, *pools_.host, plan, *pools_.stores, {.name = options_.name + ": store", .stats = stored_}));
  }
  // The load that was issued last.
  const Ticket<Backend>& last_ticket() const { return flights_.back().ticket; }

  // Tells the cache of copies that have ended. `on_host` is called with each node of which copies to the host have.
  template <class OnHost>
  void land(OnHost&& on_host) {
    for (std::size_t i = 0; i < flights_.size();) {
      const EventState state = flights_[i].ticket.state();
      if (!is_final(state)) {
        ++i;
        continue;
      }
      const Flight flight = std::move(flights_[i]);
      flights_.erase(flights_.begin() + static_cast<std::ptrdiff_t>(i));
      const bool ok = state == EventState::complete;
      for (const auto& [node, space] : flight.pages) {
        count_arrival(flight.to, space, ok);
        if (node < 0) continue;
        const bool leaving = cache_.state(node, space) == PageState::draining;
        if (leaving && ok) ++of(CacheTier::device, space).evicted_pages;
        cache_.arrived(node, space, flight.to, ok);
      }
      if (flight.to != CacheTier::host) continue;
      for (const auto& [node, space] : flight.pages) on_host(node);
    }
  }
  void count_arrival(CacheTier to, int space, bool ok) {
    TierCounters& counters = of(to, space);
    ++(ok ? counters.arrived_pages : counters.failed_pages);
    counters.arrived_bytes += ok ? page_bytes_[space] : 0;
  }

  // `first`: what was there; `match`: what could be used of it, the rest not for `reason`.
  void count_lookup(std::int64_t asked, const PrefixMatch& first, const PrefixMatch& match, CacheMiss reason) {
    auto& c = counters_;
    const auto miss = [&](CacheMiss why) -> std::int64_t& { return c.missed_pages[static_cast<int>(why)]; };
    ++c.lookups;
    c.looked_up_pages += asked;
    c.hit_pages += match.pages;
    c.hit_tokens += match.pages * cache_.shape().page_tokens;
    for (int t = 0; t < cache_tiers; ++t) c.hit_pages_on[t] += match.on[t];
    miss(reason) += first.pages - match.pages;
    miss(CacheMiss::no_tail) += first.cut;
    miss(first.forgotten ? CacheMiss::forgotten : CacheMiss::unknown) += asked - first.pages - first.cut;
  }

  // Waits for the oldest copy to the given tier. False if there is none, or the deadline has passed.
  bool wait_for(CacheTier to, Deadline deadline) {
    for (const Flight& flight : flights_) {
      if (flight.to != to) continue;
      (void)flight.ticket.wait(deadline);
      return is_final(flight.ticket.state());
    }
    return false;
  }
  // Waits for the oldest load of device pages of a space that nobody may hold any more: they can go then. False as above.
  bool wait_for_load(int space, Deadline deadline) {
    for (const Flight& flight : flights_) {
      if (flight.to != CacheTier::device) continue;
      for (const auto& page : flight.pages) {
        if (page.space != space || (page.node >= 0 && cache_.pins(page.node, space) > 0)) continue;
        (void)flight.ticket.wait(deadline);
        return is_final(flight.ticket.state());
      }
    }
    return false;
  }
  // Device pages of a space that are to go when their copies have arrived.
  std::int64_t leaving(int space) const {
    std::int64_t n = 0;
    for (const Flight& flight : flights_) {
      if (flight.to != CacheTier::host) continue;
      for (const auto& page : flight.pages) n += page.space == space && cache_.state(page.node, space) == PageState::draining ? 1 : 0;
    }
    return n;
  }
  bool anything_under_way() const { return !flights_.empty(); }

  // Adds the loads under way that bring a page for which `uses(node)`.
  template <class Uses>
  void depend(std::vector<Dependency<Backend>>& loads, Uses&& uses) const {
    for (const Flight& flight : flights_) {
      if (flight.to != CacheTier::device) continue;
      for (const auto& page : flight.pages) {
        if (page.node < 0 || !uses(page.node)) continue;
        loads.emplace_back(flight.ticket);
        break;
      }
    }
  }

  Cache cache_;
  int first_every_ = 0;  // a space whose pages all are needed
  TieredPools<Bundle, Backend> pools_;
  TieredOptions options_;
  CacheCounters<spaces> counters_;
  std::int64_t page_bytes_[spaces] = {};

 private:
  TierPairs<Bundle> pairs_of(const TierPages& pages) const {
    TierPairs<Bundle> pairs;
    for (const auto& [node, space] : pages) pairs.add(space, cache_.host(node, space).id(), cache_.device(node, space).id());
    return pairs;
  }
  Status load(const BundlePlan<Bundle>& plan, TierPages pages) {
    if (watch_.before) watch_.before(CacheTier::device, plan);
    return fly(CacheTier::device, plan, std::move(pages),
               kvire::load(*pools_.host, *pools_.device, plan, *pools_.loads, {.name = options_.name + ": load", .stats = loaded_}));
  }
  Status fly(CacheTier to, const BundlePlan<Bundle>& plan, TierPages pages, Result<Ticket<Backend>> ticket) {
    if (ticket.ok()) {
      if (watch_.issued) watch_.issued(to, plan, ticket.value());
      flights_.push_back({to, std::move(pages), std::move(ticket).value()});
      return {};
    }
    for (const auto& [node, space] : pages) {
      count_arrival(to, space, false);
      if (node >= 0) cache_.arrived(node, space, to, false);
    }
    return ticket.error();
  }

  std::vector<Flight> flights_;  // oldest first
  TierWatch<Bundle, Backend> watch_;
  std::shared_ptr<TransferStats> loaded_ = std::make_shared<TransferStats>();
  std::shared_ptr<TransferStats> stored_ = std::make_shared<TransferStats>();
};

}  // namespace detail

KVIRE_NAMESPACE_END
