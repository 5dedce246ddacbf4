// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <kvire/sync/gate.hpp>
#include <kvire/tier/prefix_cache.hpp>
#include <kvire/tier/tiered_moves.hpp>
#include <kvire/tier/tiered_notes.hpp>
#include <kvire/tier/tiered_options.hpp>
#include <kvire/transfer/seal.hpp>

KVIRE_NAMESPACE_BEGIN

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
class TierTraffic : public TierNotes<Bundle::space_count> {
  using Notes = TierNotes<Bundle::space_count>;

 public:
  static constexpr int spaces = Bundle::space_count;
  using Cache = PrefixCache<spaces, Policy>;

  const Cache& cache() const { return cache_; }
  /// What has moved, by entry and engine.
  const TransferStats& loaded() const { return *loaded_; }
  const TransferStats& stored() const { return *stored_; }
  void watch(TierWatch<Bundle, Backend> watch) { watch_ = std::move(watch); }

 protected:
  // `seals`: of the host's pages; none: what they hold is not checked.
  TierTraffic(Cache cache, const TieredPools<Bundle, Backend>& pools, const TieredOptions& options, std::shared_ptr<PageSeals> seals)
      : cache_(std::move(cache)), pools_(pools), options_(options), seals_(std::move(seals)) {
    while (cache_.shape().spaces[first_every_].need != PrefixNeed::every) ++first_every_;
    for_each_space<Bundle>([&]<class Space>(int s) {
      page_bytes_[s] = Bundle::template page_bytes<Space>(pools_.device->layers()).count;
      cache_.expect_pool(s, pools_.device->template ledger<Space>());
    });
  }

  using Notes::of;

  struct Flight {
    CacheTier to;
    TierPages pages;
    Ticket<Backend> ticket;
    typename Cache::Ref tail = {};  // of a load for a request's own pages: where from, so that a load that fails can be tried again
    DevicePage own = {};            // the first of those pages
    std::int64_t begin_ns = 0;
    std::int64_t request = -1;
  };

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
               kvire::backup(*pools_.device, *pools_.host, plan, *pools_.stores, {.name = options_.name + ": store", .seals = seals_, .stats = stored_}));
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
      note_end(flight, ok);
      if (flight.to == CacheTier::host) note_store(flight.pages, flight.ticket.event().status());
      for (const auto& [node, space] : flight.pages) {
        count_arrival(flight.to, space, ok);
        if (node < 0) continue;
        if (ok && cache_.state(node, space) == PageState::draining) {
          ++of(CacheTier::device, space).evicted_pages;
          note_page(CacheWork::evict, CacheTier::device, node, space, flight.request);
        }
        cache_.arrived(node, space, flight.to, ok);
      }
      if (!ok) spoil(flight);
      if (flight.to != CacheTier::host) continue;
      for (const auto& [node, space] : flight.pages) on_host(node);
    }
  }
  void count_arrival(CacheTier to, int space, bool ok) {
    TierCounters& counters = of(to, space);
    ++(ok ? counters.arrived_pages : counters.failed_pages);
    counters.arrived_bytes += ok ? page_bytes_[space] : 0;
  }

  // What the host has of a page is not what was stored there: it is given up, so that nobody tries it again.
  void spoil(std::int32_t node, int space) {
    if (!cache_.has(node, space, CacheTier::host) || cache_.in_flight(node, space)) return;
    cache_.together(node, space, [&](int s) { ++of(CacheTier::host, s).spoiled_pages; });
    note_page(CacheWork::evict, CacheTier::host, node, space, this->request_, "spoiled");
    cache_.drop(node, space, CacheTier::host);
  }

  // Tells who follows the cache of what happened to a page just now.
  void note_page(CacheWork work, CacheTier tier, std::int32_t node, int space, std::int64_t request, const char* detail = "") {
    if (this->traced()) note_page(work, tier, node, space, request, detail, steady_ns(), -1);
  }
  // The same of a copy. `begin_ns` to `end_ns`; an end of -1: no time.
  void note_page(CacheWork work, CacheTier tier, std::int32_t node, int space, std::int64_t request, const char* detail, std::int64_t begin_ns, std::int64_t end_ns) {
    if (!this->traced()) return;
    const std::int64_t tail = cache_.tail_tokens(node);
    const bool arrived = end_ns >= 0 && *detail == '\0';
    this->note({work, request, tier, space, cache_.name(node), begin_ns, max_of(begin_ns, end_ns), 1, tail > 0 ? tail : cache_.shape().page_tokens,
                arrived ? page_bytes_[space] : 0, detail});
  }

  void count_lookup(std::int64_t asked, const PrefixMatch& first, const PrefixMatch& match, CacheMiss reason, const std::vector<std::int32_t>& path,
                    std::int64_t begin_ns) {
    Notes::count_lookup(asked, first, match, reason, cache_.shape().page_tokens, cache_.name(match.node), begin_ns);
    for (std::size_t i = 0; i < path.size() && this->traced(); ++i) note_page(CacheWork::hit, sources_[i], path[i], -1, this->request_);
  }
  // Where the pages of a prefix are now, for events.
  void note_sources(const std::vector<std::int32_t>& path) {
    if (!this->traced()) return;
    sources_.assign(path.size(), CacheTier::device);
    for (std::size_t i = 0; i < path.size(); ++i) {
      for (int s = 0; s < spaces; ++s) {
        if (cache_.needed(s, static_cast<std::int64_t>(path.size() - 1 - i)) && cache_.state(path[i], s) == PageState::host) sources_[i] = CacheTier::host;
      }
    }
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
  // Pages of a space that are being copied to the host; `going`: only those that are to leave the device when their copies have arrived.
  std::int64_t storing(int space, bool going = false) const {
    std::int64_t n = 0;
    for (const Flight& flight : flights_) {
      if (flight.to != CacheTier::host) continue;
      for (const auto& page : flight.pages) n += page.space == space && (!going || cache_.state(page.node, space) == PageState::draining) ? 1 : 0;
    }
    return n;
  }
  std::int64_t leaving(int space) const { return storing(space, true); }
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
  std::shared_ptr<PageSeals> seals_;
  std::int64_t page_bytes_[spaces] = {};
  int failed_in_a_row_[spaces] = {};  // copies to the host of pages that were to leave
  Status last_store_;                 // how the copy to the host ended that did so last

 private:
  // How a copy to the host has ended, before the cache is told.
  void note_store(const TierPages& pages, const Status& status) {
    last_store_ = status;
    int left[spaces] = {};
    for (const auto& [node, space] : pages) left[space] |= cache_.state(node, space) == PageState::draining ? 1 : 0;
    for (int s = 0; s < spaces; ++s) failed_in_a_row_[s] = status.ok() && left[s] > 0 ? 0 : failed_in_a_row_[s] + left[s];
  }
  void note_end(const Flight& flight, bool ok) {
    const CacheWork work = flight.to == CacheTier::device ? CacheWork::load : CacheWork::store;
    const std::int64_t end = steady_ns();
    this->count_time(work, flight.begin_ns, end);
    for (const auto& [node, space] : flight.pages) {
      const std::int32_t from = node < 0 && flight.tail ? flight.tail.node() : node;
      if (from >= 0) note_page(work, flight.to, from, space, flight.request, ok ? "" : "failed", flight.begin_ns, end);
    }
  }
  // What was loaded is not what had been stored: nobody knows of which page.
  void spoil(const Flight& flight) {
    if (flight.to != CacheTier::device || flight.ticket.event().status().error().code != ErrorCode::mismatch) return;
    for (const auto& [node, space] : flight.pages) {
      if (node >= 0) spoil(node, space);
      if (flight.tail) spoil(flight.tail.node(), space);
    }
  }
  TierPairs<Bundle> pairs_of(const TierPages& pages) const {
    TierPairs<Bundle> pairs;
    for (const auto& [node, space] : pages) pairs.add(space, cache_.host(node, space).id(), cache_.device(node, space).id());
    return pairs;
  }
  Status load(const BundlePlan<Bundle>& plan, TierPages pages) {
    if (watch_.before) watch_.before(CacheTier::device, plan);
    return fly(CacheTier::device, plan, std::move(pages),
               kvire::load(*pools_.host, *pools_.device, plan, *pools_.loads, {.name = options_.name + ": load", .seals = seals_, .stats = loaded_}));
  }
  Status fly(CacheTier to, const BundlePlan<Bundle>& plan, TierPages pages, Result<Ticket<Backend>> ticket) {
    if (ticket.ok()) {
      if (watch_.issued) watch_.issued(to, plan, ticket.value());
      flights_.push_back({.to = to, .pages = std::move(pages), .ticket = std::move(ticket).value(), .begin_ns = steady_ns(), .request = this->request_});
      return {};
    }
    if (to == CacheTier::host) note_store(pages, ticket.error());
    for (const auto& [node, space] : pages) {
      count_arrival(to, space, false);
      if (node >= 0) cache_.arrived(node, space, to, false);
    }
    return ticket.error();
  }

  std::vector<Flight> flights_;  // oldest first
  std::vector<CacheTier> sources_;
  TierWatch<Bundle, Backend> watch_;
  std::shared_ptr<TransferStats> loaded_ = std::make_shared<TransferStats>();
  std::shared_ptr<TransferStats> stored_ = std::make_shared<TransferStats>();
};

}  // namespace detail

KVIRE_NAMESPACE_END
