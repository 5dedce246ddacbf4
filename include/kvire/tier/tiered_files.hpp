// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <chrono>
#include <concepts>
#include <deque>
#include <optional>
#include <thread>

#include <kvire/exec/host/event.hpp>
#include <kvire/tier/record.hpp>
#include <kvire/tier/tiered_traffic.hpp>

KVIRE_NAMESPACE_BEGIN

/// What a tiered cache asks of a tier below the host (FileTier is one): records of host pages by key, stored and loaded asynchronously. It keeps
/// to a budget of its own, and may forget a record at any time: a load of it then fails as stale. A store that it has no place for now is final at once, failed
/// as busy: it is asked for again. With seals, a store of pages that are not what they say fails as mismatch, and a load sets them.
template <class F, class Bundle, class Backend>
concept PageFiles = requires(F f, const RecordKey& key, HostBundlePool<Bundle, Backend>& pool, BundleRefs<Bundle, HostPage> pages, std::shared_ptr<PageSeals> seals) {
  { f.store(key, pool, pages, seals) } -> std::same_as<Event<Host>>;
  { f.load(key, pool, pages, seals) } -> std::same_as<Event<Host>>;
  { f.find(key) } -> std::same_as<std::optional<BundlePages<Bundle>>>;
  { f.layers() } -> std::same_as<int>;
};

/// No tier below the host.
struct NoFiles {};

namespace rule {
template <class Files, class Bundle, class Backend, bool Serves>
struct TierFiles {
  static_assert(Serves,
                "kvire [tier.page-files]: the tier below the host stores and loads host pages of the cache's own bundle and backend, by record key. Records of another "
                "bundle would be read as its pages. Fix: name FileTier<Bundle, Backend> with the cache's two, or leave the argument out: NoFiles.");
};
}  // namespace rule

namespace detail {

template <class Files, class Bundle, class Backend>
constexpr bool require_page_files() {
  (void)sizeof(rule::TierFiles<Files, Bundle, Backend, std::is_same_v<Files, NoFiles> || PageFiles<Files, Bundle, Backend>>);
  return true;
}

/// The copies between host and files, beside those between device and host. A page that has arrived on the host is stored at once, or, where the files have no place for so
/// many at a time, as soon as they have: when the host gives it up later, the file is there.
template <class Bundle, class Backend, EvictionPolicy Policy, class Files>
class FileTraffic : public TierTraffic<Bundle, Backend, Policy> {
  using Base = TierTraffic<Bundle, Backend, Policy>;
  using Refs = BundleRefs<Bundle, HostPage>;

 public:
  using Base::spaces;
  static constexpr bool has_files = !std::is_same_v<Files, NoFiles>;
  static_assert(require_page_files<Files, Bundle, Backend>());

  /// Takes note of copies that have finished. Never blocks; the other functions call it.
  void poll() {
    this->land([&](std::int32_t node) {
      if (files_ != nullptr) to_store_.push_back({node, this->cache_.name(node)});
    });
    if constexpr (has_files) {
      if (files_ == nullptr) return;
      land_files();
      store_files();
    }
  }

  /// Blocks until what `prefetch` reads has arrived, or has failed to, or the deadline has passed; false then.
  bool finish_prefetch(Deadline deadline = no_deadline) requires has_files {
    for (poll();; poll()) {
      const FileFlight* reading = nullptr;
      for (const FileFlight& flight : flights_) reading = reading == nullptr && flight.load ? &flight : reading;
      if (reading == nullptr) return true;
      (void)reading->event.wait(deadline);
      if (!is_final(reading->event.query())) return false;
    }
  }

 protected:
  FileTraffic(typename Base::Cache cache, const TieredPools<Bundle, Backend>& pools, const TieredOptions& options, std::shared_ptr<PageSeals> seals, Files* files)
      : Base(std::move(cache), pools, options, std::move(seals)), files_(files) {}

  bool files_under_way() const { return !flights_.empty(); }
  // What is to be stored included.
  bool anything_under_way() const { return Base::anything_under_way() || files_under_way() || !to_store_.empty(); }
  bool wait_for_file(Deadline deadline) {
    if (!flights_.empty()) {
      (void)flights_.front().event.wait(deadline);
      return is_final(flights_.front().event.query());
    }
    // Others' stores have the places, and nobody tells of their end.
    if (!to_store_.empty()) std::this_thread::sleep_for(std::chrono::microseconds(100));
    return !to_store_.empty() && Clock::now() < deadline;
  }

  // The key of records in a node's namespace, to be asked for with `find`.
  RecordKey key_of(std::int32_t node) const { return {.space = this->cache_.names(node).text()}; }
  // The page, or tail, of this name behind `parent`, if it is anywhere, files included; -1 if not.
  std::int32_t find(RecordKey& key, std::int32_t parent, const Hash128& name, std::span<const TokenId> tokens) {
    const std::int32_t node = this->cache_.known(parent, name, tokens);
    if (node >= 0 && this->cache_.state(node, this->first_every_) != PageState::absent) return node;
    return find_file(key, parent, name, tokens);
  }

  // Whether files have forgotten the record that a node has there; they do not tell.
  bool forgotten(std::int32_t node) const {
    if constexpr (has_files) {
      bool any = false;
      for (int s = 0; s < spaces; ++s) any = any || this->cache_.has(node, s, CacheTier::file);
      return files_ != nullptr && any && !files_->find(record_of(node));
    }
    return false;
  }
  // Drops what a node has there, and stores anew what of it the host has. Where a faster tier has given the node up, and not where a store has ended: files with
  // room for few would be written for ever.
  void forget(std::int32_t node) {
    const Hash128 name = this->cache_.name(node);
    for (int s = 0; s < spaces && this->cache_.live(node); ++s) {
      if (this->cache_.has(node, s, CacheTier::file)) this->cache_.drop(node, s, CacheTier::file);
    }
    to_store_.push_back({node, name});
  }

  // Reads a node's record for the host pages that the cache awaits.
  void load_file(std::int32_t node, const TierPages& pages) {
    std::vector<int> of_spaces;
    for (const auto& page : pages) of_spaces.push_back(page.space);
    (void)fly(node, of_spaces, of_spaces, true);
  }

 private:
  struct ToStore {
    std::int32_t node;
    Hash128 name;  // the node may be another page's by then
  };
  struct FileFlight {
    std::int32_t node;
    std::vector<int> spaces;
    bool load;
    Event<Host> event;
    std::int64_t begin_ns;
    std::int64_t request;
  };

  // Makes the cache know what a record has of the page, or tail, behind `parent`; -1 if there is no record, or none with all that is needed.
  std::int32_t find_file(RecordKey& key, std::int32_t parent, const Hash128& name, std::span<const TokenId> tokens) {
    if (files_ == nullptr) return -1;
    const auto size = static_cast<std::int64_t>(tokens.size());
    place(key, name, this->cache_.depth(parent), size);
    const auto found = files_->find(key);
    if (!found) return -1;
    for (int s = 0; s < spaces; ++s) {
      if (found->count[s] < 1 && needed(s, size < this->cache_.shape().page_tokens)) return -1;
    }
    const std::int32_t node = this->cache_.know(parent, name, tokens);
    for (int s = 0; s < spaces; ++s) {
      if (found->count[s] > 0 && this->cache_.state(node, s) == PageState::absent) this->cache_.found_file(node, s);
    }
    return node;
  }

  RecordKey record_of(std::int32_t node) const {
    const std::int64_t tail = this->cache_.tail_tokens(node);
    RecordKey record = key_of(node);
    place(record, this->cache_.name(node), this->cache_.depth(node) - 1, tail > 0 ? tail : this->cache_.shape().page_tokens);
    return record;
  }
  void place(RecordKey& key, const Hash128& name, std::int64_t pages_before, std::int64_t tokens) const {
    key.prefix = name;
    key.first_token = pages_before * this->cache_.shape().page_tokens;
    key.token_count = tokens;
  }
  // Whether a record is of no use without the space.
  bool needed(int space, bool tail) const { return tail || this->cache_.shape().spaces[space].need == PrefixNeed::every; }

  // Stores what is to be stored, in the order it came to the host, as far as the files have places. Asks again when one of its own stores has ended, or none is
  // under way.
  void store_files() {
    if (full_ && std::any_of(flights_.begin(), flights_.end(), [](const FileFlight& flight) { return !flight.load; })) return;
    for (full_ = false; !to_store_.empty(); to_store_.pop_front()) {
      const ToStore next = to_store_.front();
      full_ = this->cache_.live(next.node) && this->cache_.name(next.node) == next.name && !store_file(next.node);
      if (full_) return;
    }
  }

  // All of a node's host pages make one record, once what every prefix needs of them is there; the record is replaced by one that has more. While some are
  // on their way this waits: to be asked again when they have landed. False if the files have no place for it now.
  bool store_file(std::int32_t node) {
    std::vector<int> of_spaces;
    std::vector<int> missing;  // in the record that is there
    for (int s = 0; s < spaces; ++s) {
      if (this->cache_.arriving(node, s, CacheTier::host) || this->cache_.arriving(node, s, CacheTier::file)) return true;
      if (this->cache_.has(node, s, CacheTier::host)) {
        of_spaces.push_back(s);
        if (!this->cache_.has(node, s, CacheTier::file)) missing.push_back(s);
      } else if (needed(s, this->cache_.tail_tokens(node) > 0)) {
        return true;
      }
    }
    return missing.empty() || fly(node, of_spaces, std::move(missing), false);
  }

  // `arriving`: the spaces, of those in the record, whose pages the cache awaits, or does once they are being stored. False, and nothing has happened, if a store is
  // refused for now.
  bool fly(std::int32_t node, const std::vector<int>& of_spaces, std::vector<int> arriving, bool load) {
    Refs refs;
    for (const int s : of_spaces) refs.refs[s].push_back(this->cache_.host(node, s));
    const RecordKey record = record_of(node);
    const std::int64_t begin = steady_ns();
    auto& host = *this->pools_.host;
    auto event = load ? files_->load(record, host, std::move(refs), this->seals_) : files_->store(record, host, std::move(refs), this->seals_);
    if (!load && event.query() == EventState::failed && event.status().error().code == ErrorCode::busy) return false;
    for (const int s : arriving) {
      if (!load) this->cache_.arrive_file(node, s);
    }
    flights_.push_back({node, std::move(arriving), load, std::move(event), begin, this->request_});
    return true;
  }

  void land_files() {
    for (std::size_t i = 0; i < flights_.size();) {
      const EventState state = flights_[i].event.query();
      if (!is_final(state)) {
        ++i;
        continue;
      }
      const FileFlight flight = std::move(flights_[i]);
      flights_.erase(flights_.begin() + static_cast<std::ptrdiff_t>(i));
      const CacheTier to = flight.load ? CacheTier::host : CacheTier::file;
      const bool ok = state == EventState::complete;
      const CacheWork work = flight.load ? CacheWork::read : CacheWork::write;
      const std::int64_t end = steady_ns();
      this->count_time(work, flight.begin_ns, end);
      for (const int s : flight.spaces) {
        this->count_arrival(to, s, ok);
        this->note_page(work, to, flight.node, s, flight.request, ok ? "" : "failed", flight.begin_ns, end);
        this->cache_.arrived(flight.node, s, to, ok);
      }
      if (!flight.load) full_ = false;
      if (ok && !flight.load) to_store_.push_back({flight.node, this->cache_.name(flight.node)});  // what has come to the host meanwhile
      if (ok) continue;
      // A system's error may pass; a record that is gone or wrong will not come back, and neither will what the host's pages should have held.
      const ErrorCode code = flight.event.status().error().code;
      const bool spoiled = !flight.load && code == ErrorCode::mismatch && this->seals_ != nullptr;
      for (int s = 0; s < spaces && spoiled; ++s) this->spoil(flight.node, s);
      if (!flight.load || (code != ErrorCode::stale && code != ErrorCode::mismatch)) continue;
      for (const int s : flight.spaces) {
        if (this->cache_.has(flight.node, s, CacheTier::file)) this->cache_.drop(flight.node, s, CacheTier::file);
      }
    }
  }

  Files* files_;
  std::vector<FileFlight> flights_;  // oldest first
  std::deque<ToStore> to_store_;
  bool full_ = false;  // the files have had no place for the first of them
};

}  // namespace detail

KVIRE_NAMESPACE_END
