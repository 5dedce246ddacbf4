// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/tier/tiered_room.hpp>

KVIRE_NAMESPACE_BEGIN

/// A prefix cache whose pages live on the device, on the host and, with `Files`, in records below: the pages that requests do not need are
/// evicted to the next slower tier, and come back as the load that a step depends on. All entries of the bundle move together or not at all.
/// Whole pages are shared by all who hold them. A request's unfinished last page, its tail, can be parked behind them, and is evicted like they are;
/// who resumes it gets pages of its own, with the states that the bundle keeps at exactly that length.
///
/// Pages that a request holds, or that a transfer touches, are not evicted. A copy that fails leaves what it was made from in place. Not for several
/// threads at once; the pools may be used by others meanwhile. Pools, streams and files must outlive it, and it must outlive what it has handed out.
template <class Bundle, class Backend, EvictionPolicy Policy = Lru, class Files = NoFiles>
class TieredCache : public detail::TierRoom<Bundle, Backend, Policy, Files> {
  using Base = detail::TierRoom<Bundle, Backend, Policy, Files>;

 public:
  using Base::spaces;
  using Cache = typename Base::Cache;
  using Pages = typename Cache::Pages;
  using Pools = TieredPools<Bundle, Backend>;

  /// A prefix that a request may use as long as it keeps this.
  struct Held {
    typename Cache::Ref prefix;
    std::vector<Dependency<Backend>> loads = {};  ///< what a step that reads the prefix must name to its gate
    std::int64_t tokens = 0;                      ///< raw tokens that need not be computed
  };

  /// Without `files` there is no tier below the host, even if the type could have one. Errors: invalid_argument for a bad option, missing pools or streams,
  /// pools or files of different layers, and as PrefixCache::make.
  static Result<TieredCache> make(const Pools& pools, const TieredOptions& options = {}, Files* files = nullptr, const Policy& policy = Policy()) {
    const auto bad = [&](const std::string& what) { return Error{ErrorCode::invalid_argument, options.name + ": " + what}; };
    if (Status ok = check_options(options); !ok.ok()) return ok.error();
    if (pools.device == nullptr) return bad("no device pool");
    if (pools.host != nullptr && (pools.loads == nullptr || pools.stores == nullptr)) return bad("a host pool, but no streams for loads and stores");
    if (pools.host != nullptr && pools.host->layers() != pools.device->layers()) return bad("device and host pools of different layers");
    if constexpr (Base::has_files) {
      if (files != nullptr && pools.host == nullptr) return bad("a file tier needs a host pool to go through");
      const auto layers = [](const auto* of) { return std::to_string(of->layers()); };
      if (files != nullptr && layers(files) != layers(pools.device)) return bad("files of " + layers(files) + " layers, pools of " + layers(pools.device));
    }
    auto shape = prefix_shape<Bundle>(options.window_tokens);
    shape.keep_tokens = options.keep_tokens;
    auto cache = Cache::make(shape, policy);
    if (!cache.ok()) return cache.error();
    std::shared_ptr<PageSeals> seals;
    if (options.seal && pools.host != nullptr) {
      auto made = PageSeals::make(*pools.host);
      if (!made.ok()) return Error{made.error().code, options.name + ": " + made.error().message};
      seals = std::move(made).value();
    }
    return Result<TieredCache>(TieredCache(std::move(cache).value(), pools, options, std::move(seals), files));
  }

  /// The root of a namespace; its layout is set to the bundle's. -1 as PrefixCache::root, under which nothing is found or published.
  std::int32_t root(PrefixNamespace names) {
    names.layout = bundle_fingerprint128<Bundle>;
    return this->cache_.root(names);
  }

  /// The longest usable prefix of `tokens`, held, and on the device or on its way there: pages of slower tiers are loaded in one transfer. Shorter
  /// where the device has no room (after evicting, and waiting, up to `room_limit` in all, for pages that are leaving), or has a page that work has failed
  /// to write, which it gives up unless somebody holds it. A request that must compute its last token passes all but that one. Empty, and refused by
  /// whatever it is passed to, for a number that is no root of this cache.
  Held acquire(std::int32_t root, std::span<const TokenId> tokens) {
    if (!this->cache_.is_root(root)) return {};
    const std::int64_t begin = detail::steady_ns();
    const Deadline deadline = this->room_deadline();
    this->poll();
    const std::int64_t page = this->cache_.shape().page_tokens;
    auto wanted = tokens;
    PrefixMatch first;
    CacheMiss reason = CacheMiss::no_room;
    for (bool again = false;; again = true) {
      const PrefixMatch match = this->cache_.find(root, wanted);
      if (!again) first = match;
      Held held{this->cache_.acquire(match)};
      path_.resize(static_cast<std::size_t>(match.pages));
      this->cache_.path(match.node, path_);
      this->note_sources(path_);
      if (const std::int64_t usable = bring(reason, deadline); usable < match.pages) {
        held = {};
        const bool gone = reason == CacheMiss::not_written && this->give_up_unwritten(path_[static_cast<std::size_t>(usable)]);
        if (!gone) wanted = wanted.first(static_cast<std::size_t>(usable * page));  // otherwise a slower tier may have it
        continue;
      }
      this->count_lookup(static_cast<std::int64_t>(tokens.size()) / page, first, match, reason, path_, begin);
      held.tokens = match.pages * page;
      this->depend(held.loads, [&](std::int32_t node) {
        const auto depth = static_cast<std::size_t>(this->cache_.depth(node));
        return depth <= path_.size() && path_[depth - 1] == node;
      });
      return held;
    }
  }

  /// Success while a held prefix is good. Error: of a load that it depends on. The prefix is void then, its pages may get others' bytes: let go of it and
  /// acquire anew. To be asked before each step.
  static Status check(const Held& held) {
    for (const auto& load : held.loads) {
      if (load.progress() == nullptr) continue;
      if (Status status = load.progress()->done().status(); !status.ok()) return status;
    }
    return {};
  }

  /// Adds complete pages behind a held prefix, which then ends behind them: `pages[i]` has the device pages of the i-th page of `tokens`. Where
  /// another request was faster, references stay in `pages` (see PrefixCache::extend), and the prefix goes on with the cache's page, unless work has failed to
  /// write that: then it gives way, also to who holds it. Kernels that write the pages must be queued already; written through, the copies to the host follow them (a copy that cannot be made counts as failed: the page
  /// stays on the device). Errors, which change nothing: as PrefixCache::extend, of all pages.
  Status publish(Held& held, std::span<const TokenId> tokens, std::span<Pages> pages) {
    detail::TierPages through;
    Status status = this->cache_.extend(held.prefix, tokens, pages, [&, given = pages.begin()](typename Cache::Published how) mutable {
      const bool known = !this->replace_unwritten(held.prefix.node(), *given++) && how == Cache::Published::known;
      ++(known ? this->counters_.shared_pages : this->counters_.published_pages);
      if (!known) this->note_page(CacheWork::publish, CacheTier::device, held.prefix.node(), -1, this->request_);
      // The prefix goes on with the cache's page, which may be on its way here for somebody else.
      if (how != Cache::Published::added) this->depend(held.loads, [&](std::int32_t node) { return node == held.prefix.node(); });
      if (this->options_.write_through) (void)this->to_host(held.prefix.node(), through);
    });
    if (!status.ok()) return Error{status.error().code, this->options_.name + ": " + status.error().message};
    held.tokens = held.prefix.pages() * this->cache_.shape().page_tokens;
    (void)this->store(std::move(through));
    return {};
  }

  /// Parks the tail of a request behind its whole pages: `tokens` are those of the last page, fewer than a page; `pages` has its device page of every
  /// space, request rows included, as all layers left them at exactly that length. If an equal tail is there already, references stay in `pages`. Nobody
  /// holds a tail: it may be evicted at once, all spaces together. Kernels that write the pages must be queued already. Errors, which change nothing: of a load
  /// that the request depends on: the pages may hold anything then; as PrefixCache::park.
  Status park(const Held& held, std::span<const TokenId> tokens, Pages& pages) {
    this->poll();
    if (Status good = check(held); !good.ok()) return good;
    if (this->cache_.is_mine(held.prefix)) (void)this->give_up_unwritten(this->cache_.known(held.prefix.node(), tokens));
    const DevicePage first = pages[0].id();
    auto how = this->cache_.park(held.prefix, tokens, pages);
    if (!how.ok()) return Error{how.error().code, this->options_.name + ": " + how.error().message};
    const auto [published, tail] = how.value();
    const bool known = published == Cache::Published::known;
    ++(known ? this->counters_.shared_tails : this->counters_.parked_tails);
    if (!known) this->hand_over(tail, first);
    if (detail::TierPages through; this->options_.write_through) (void)this->store(this->to_host(tail, through));
    return {};
  }

  /// Goes on from the longest tail behind a held prefix that `tokens`, the request's tokens behind it, continue through. Its pages are put into `pages` and
  /// are the request's alone, to be written: those that the device has, or copies that are loaded from the host (`held.loads` has one load more then; if it
  /// fails, the tail stays where it was). Returns its raw tokens, also added to `held.tokens`; 0, and nothing changes, if no tail is known, or what is
  /// known is not on the device or the host, or finds no room (as in `acquire`). A copy on a slower tier stays for others who come this way, as the first to go there.
  /// O(tokens of a page).
  std::int64_t resume(Held& held, std::span<const TokenId> tokens, Pages& pages) {
    const Deadline deadline = this->room_deadline();
    this->poll();
    const std::int32_t at = held.prefix.node();
    bool missed = false;
    if (!this->cache_.is_mine(held.prefix) || this->cache_.tails(at) == 0) return 0;
    this->cache_.names_below(at, tokens, tail_names_);
    for (auto size = tail_names_.size(); size > 0; --size) {
      const std::int32_t tail = this->cache_.known(at, tail_names_[size - 1], tokens.first(size));
      if (tail < 0) continue;
      missed = true;
      (void)this->give_up_unwritten(tail);
      const bool here = this->cache_.has(tail, 0, CacheTier::device);
      if (!here && !this->cache_.has(tail, 0, CacheTier::host)) continue;
      if (here ? !this->cache_.resume(tail, pages) : !load_tail(tail, held, pages, deadline)) break;
      ++this->counters_.resumed_tails;
      ++this->counters_.resumed_tails_on[here ? 0 : 1];
      this->counters_.resumed_tokens += static_cast<std::int64_t>(size);
      held.tokens += static_cast<std::int64_t>(size);
      return static_cast<std::int64_t>(size);
    }
    this->counters_.missed_tails += missed ? 1 : 0;
    return 0;
  }

  /// A device page for a running request, evicting another unless one is on its way. Error exhausted, with the numbers, if none is there or comes until `room_limit`.
  template <class Space>
  Result<PageRef<DevicePage>> allocate() {
    constexpr int space = Bundle::template space_index<Space>();
    auto page = this->device_page(space, this->room_deadline());
    return page ? Result<PageRef<DevicePage>>(std::move(page)) : this->no_page(Space::name, space);
  }

  /// Evicts ahead of need, so that the copies run beside compute: afterwards `pages` pages of each space are free, draining or leaving, if so many may go.
  /// What the host has no room for stays while it may yet get some, from copies under way. Does not block.
  void make_room(std::int64_t pages) {
    this->poll();
    for (int s = 0; s < spaces; ++s) {
      if (const std::int64_t lacking = pages - this->coming(s); lacking > 0) (void)this->evict(s, lacking, true);
    }
  }

  /// Reads pages of the prefix that only files have, and the longest tail behind them, to the host, asynchronously: an `acquire` and `resume` that follow
  /// have what has arrived by then. Returns the whole pages of the prefix that are on the host or the device, or on their way. A tail is asked for by its
  /// length: where the prefix ends, one question for each that is possible.
  std::int64_t prefetch(std::int32_t root, std::span<const TokenId> tokens) requires Base::has_files {
    this->poll();
    const auto page = static_cast<std::size_t>(this->cache_.shape().page_tokens);
    std::int64_t pages = 0;
    if (!this->cache_.is_root(root)) return pages;
    typename Cache::Ref held = this->cache_.acquire(root);
    RecordKey key = this->key_of(root);
    for (; tokens.size() >= page; tokens = tokens.subspan(page), ++pages) {
      const auto whole = tokens.first(page);
      const std::int32_t node = this->find(key, held.node(), this->cache_.name_below(held.node(), whole), whole);
      if (node < 0) break;
      if (!this->read(node)) return pages;
      this->cache_.advance(held, node);
    }
    this->cache_.names_below(held.node(), tokens, tail_names_);
    for (auto size = tail_names_.size(); size > 0; --size) {
      const std::int32_t tail = this->find(key, held.node(), tail_names_[size - 1], tokens.first(size));
      if (tail < 0) continue;
      (void)this->read(tail);
      break;
    }
    return pages;
  }

  /// Forgets every page that no request holds and no copy touches, on device and host, without copies to slower tiers: for new weights. What files have
  /// stays there, under the old namespace.
  void clear() {
    this->poll();
    for (int s = 0; s < spaces; ++s) {
      for (const CacheTier tier : {CacheTier::device, CacheTier::host, CacheTier::file}) {
        for (std::int32_t node = this->cache_.victim(s, tier); node >= 0; node = this->cache_.victim(s, tier)) this->give_up(node, s, tier);
      }
    }
  }

  /// Blocks until nothing is under way, or the deadline has passed; false then.
  bool finish(Deadline deadline = no_deadline) {
    for (this->poll(); this->anything_under_way(); this->poll()) {
      if (!this->wait_for(CacheTier::device, deadline) && !this->wait_for(CacheTier::host, deadline) && !this->wait_for_file(deadline)) return false;
    }
    return true;
  }

 private:
  TieredCache(Cache cache, const Pools& pools, const TieredOptions& options, std::shared_ptr<PageSeals> seals, Files* files)
      : Base(std::move(cache), pools, options, std::move(seals), files) {}

  // Pages of the request's own for a tail that the host has, and the load that fills them; false if one is not to be had, or the load not issued.
  bool load_tail(std::int32_t tail, Held& held, Pages& pages, Deadline deadline) {
    auto kept = this->cache_.acquire(tail);  // finding room must not give up what is to be loaded
    Pages own;
    for (int s = 0; s < spaces; ++s) {
      if (!(own[static_cast<std::size_t>(s)] = this->device_page(s, deadline))) return false;
    }
    if (!Base::load_tail(std::move(kept), own).ok()) return false;
    held.loads.emplace_back(this->last_ticket());
    pages = std::move(own);
    (void)this->cache_.resume(tail, own);  // the device has none: the host's ages
    return true;
  }

  // Starts the load of what `path_` lacks on the device. Returns the pages that are usable: fewer than all, with nothing started, if one has no page to go to.
  std::int64_t bring(CacheMiss& reason, Deadline deadline) {
    detail::TierPages pages;
    if (const std::size_t good = this->first_unwritten(path_, reason); good < path_.size()) return static_cast<std::int64_t>(good);
    // Finding room takes note of copies that have ended, and one of them may have been the load of a page that was passed as on its way: once more,
    // until nothing is missing.
    for (std::size_t before = 0;; before = pages.size()) {
      for (std::size_t i = 0; i < path_.size(); ++i) {
        if (ask_for(i, pages, reason, deadline)) continue;
        for (const auto& [node, space] : pages) this->cache_.arrived(node, space, CacheTier::device, false);
        return static_cast<std::int64_t>(i);
      }
      if (pages.size() == before) break;
    }
    if (pages.empty()) return static_cast<std::int64_t>(path_.size());
    auto whole = static_cast<std::int64_t>(path_.size());
    for (const auto& [node, space] : pages) whole = min_of<std::int64_t>(whole, this->cache_.depth(node) - 1);
    reason = CacheMiss::no_room;
    return this->load(std::move(pages)).ok() ? static_cast<std::int64_t>(path_.size()) : whole;
  }
  // Device pages for what the i-th page of the path lacks there; false if they, or the bytes for them, are not to be had.
  bool ask_for(std::size_t i, detail::TierPages& pages, CacheMiss& reason, Deadline deadline) {
    const std::int32_t node = path_[i];
    for (int s = 0; s < spaces; ++s) {
      if (!this->cache_.needed(s, static_cast<std::int64_t>(path_.size() - 1 - i)) || this->cache_.device(node, s)) continue;
      const bool on_host = this->cache_.has(node, s, CacheTier::host);
      reason = on_host ? CacheMiss::no_room : CacheMiss::not_there_yet;
      auto page = on_host ? this->device_page(s, deadline) : PageRef<DevicePage>();
      if (!page) return false;
      this->cache_.arrive(node, s, std::move(page));
      pages.push_back({node, s});
    }
    return true;
  }

  std::vector<std::int32_t> path_;
  std::vector<Hash128> tail_names_;  // of all lengths, while they are looked up
};

KVIRE_NAMESPACE_END
