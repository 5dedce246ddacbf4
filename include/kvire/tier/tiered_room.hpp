// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <span>
#include <string>
#include <thread>

#include <kvire/tier/tiered_files.hpp>

KVIRE_NAMESPACE_BEGIN

namespace detail {

/// Where a tiered cache finds room: device and host pages, given up by others if need be. A page goes alone, a tail with all its spaces.
template <class Bundle, class Backend, EvictionPolicy Policy, class Files>
class TierRoom : public FileTraffic<Bundle, Backend, Policy, Files> {
  using Base = FileTraffic<Bundle, Backend, Policy, Files>;

 public:
  using Base::spaces;

 protected:
  using Base::Base;

  // When a call that begins now gives up waiting for room.
  Deadline room_deadline() const { return deadline_in(this->options_.room_limit); }

  // A device page; empty if none can go, or none has gone until the deadline.
  PageRef<DevicePage> device_page(int space, Deadline deadline) {
    auto& ledger = ledger_of(*this->pools_.device, space);
    for (bool more = true;;) {
      if (auto page = ledger.allocate(); page.ok()) return std::move(page).value();
      this->poll();
      if (auto page = ledger.allocate(); page.ok()) return std::move(page).value();
      if (!more) break;
      const int failures = this->failed_in_a_row_[space];
      more = evict(space, this->options_.batch_pages, false) || wait_for_room(space, deadline) || failures != this->failed_in_a_row_[space];
    }
    ++this->of(CacheTier::device, space).refused_pages;
    return {};
  }
  // Device pages that are free, or will be without anything being given up for it.
  std::int64_t coming(int space) const {
    const auto& ledger = ledger_of(*this->pools_.device, space);
    return std::int64_t{ledger.free_pages()} + ledger.draining_pages() + this->leaving(space);
  }
  // Why there is none.
  Error no_page(const char* name, int space) const {
    const auto& ledger = ledger_of(*this->pools_.device, space);
    return {ErrorCode::exhausted, this->options_.name + ": no page of space " + name + " can be had within " + std::to_string(this->options_.room_limit.count()) + " ms: of " +
                                      std::to_string(ledger.capacity()) + ", " + std::to_string(this->leaving(space)) + " are leaving for the host, " +
                                      std::to_string(ledger.draining_pages()) + " draining, the others in use" +
                                      (this->last_store_.ok() ? "" : "; the last copy to the host failed: " + this->last_store_.error().message)};
  }

  // Gives up device pages of a space, `count` at most: at once where a slower tier has them or nobody can take them, otherwise when their copy has arrived. What nobody
  // can take stays while copies that are under way may make room for it. Where one page is wanted now, not several ahead of need, one that has gone is enough; while
  // others leave or drain, only what is free at once goes; and once two copies in a row have failed, one page goes without. True if one has gone at once.
  bool evict(int space, std::int64_t count, bool ahead) {
    auto& ledger = ledger_of(*this->pools_.device, space);
    const int failures = this->failed_in_a_row_[space];
    const bool copies = ahead || failures < 2;
    const bool leave = !ahead && this->leaving(space) > 0;
    const bool drain = !ahead && ledger.draining_pages() > 0;
    TierPages leaving;
    bool gone = false;
    for (; count > 0 && (ahead || !gone); --count) {
      const std::int32_t node = this->cache_.victim(space, CacheTier::device);
      if (node < 0) break;
      const bool free = ledger.holds(this->cache_.device(node, space).id()) == 0;  // once it is given up
      const bool safe = elsewhere(node, space, CacheTier::device);
      if (leave ? !free || !safe : drain && !free) break;
      const std::size_t first = leaving.size();
      if (copies && !this->cache_.has(node, space, CacheTier::host) && host_pages(node, space, leaving)) {
        for (std::size_t i = first; i < leaving.size(); ++i) this->cache_.leave(node, leaving[i].space);
      } else if (!safe && (!leaving.empty() || this->storing(space) > 0 || (copies && this->files_under_way()))) {
        break;
      } else {
        give_up(node, space, CacheTier::device);
        gone = true;
        if (!copies) this->failed_in_a_row_[space] = 1;  // the next one may be copied again
      }
    }
    const TierPages asked = leaving;
    if (this->store(std::move(leaving)).ok()) return gone;
    // What could not be copied is counted, and stays, but for pages that work has failed to write: those have nothing that anybody could read.
    for (const auto& [node, s] : asked) {
      if (!this->cache_.has(node, s, CacheTier::device) || ledger_of(*this->pools_.device, s).readable(this->cache_.device(node, s).id()).ok()) continue;
      give_up(node, s, CacheTier::device);
      gone = true;
      this->failed_in_a_row_[space] = failures;  // it was not for the copy
    }
    return gone;
  }

  // Whether another of the first tiers has the page, too.
  bool elsewhere(std::int32_t node, int space, CacheTier tier, int tiers = cache_tiers) const {
    bool found = false;
    for (int t = 0; t < tiers; ++t) found = found || (t != static_cast<int>(tier) && this->cache_.has(node, space, static_cast<CacheTier>(t)));
    return found;
  }
  void give_up(std::int32_t node, int space, CacheTier tier) {
    const bool gone = tier != CacheTier::file && this->forgotten(node);
    const bool kept = elsewhere(node, space, tier, gone ? cache_tiers - 1 : cache_tiers);
    const Hash128 name = this->cache_.name(node);
    this->cache_.together(node, space, [&](int s) {
      ++this->of(tier, s).evicted_pages;
      this->of(tier, s).lost_pages += kept ? 0 : 1;
      this->note_page(CacheWork::evict, tier, node, s, this->request_, kept ? "" : "lost");
    });
    this->cache_.drop(node, space, tier);
    if (gone && this->cache_.live(node) && this->cache_.name(node) == name) this->forget(node);
  }

  // Whether work has failed to write a page that the device has: leases that name it are refused.
  bool unwritten(std::int32_t node, int space) {
    return this->cache_.has(node, space, CacheTier::device) && !ledger_of(*this->pools_.device, space).readable(this->cache_.device(node, space).id()).ok();
  }
  // Place of the first page of a path of which that is so, in a space that needs it, which is the reason then; the length of the path: there is none.
  std::size_t first_unwritten(std::span<const std::int32_t> path, CacheMiss& reason) {
    std::size_t first = path.size();
    for (int s = 0; s < spaces; ++s) {
      if (!ledger_of(*this->pools_.device, s).any_failed_writes()) continue;
      for (std::size_t i = 0; i < first; ++i) {
        if (this->cache_.needed(s, static_cast<std::int64_t>(path.size() - 1 - i)) && unwritten(path[i], s)) first = i;
      }
    }
    if (first < path.size()) reason = CacheMiss::not_written;
    return first;
  }
  // Gives up such pages of a node, so that who computes them anew finds room for them here. False if none may go: somebody holds them.
  bool give_up_unwritten(std::int32_t node) {
    bool gone = false;
    for (int s = 0; s < spaces; ++s) {
      if (this->cache_.pins(node, s) > 0 || this->cache_.in_flight(node, s) || !unwritten(node, s)) continue;
      give_up(node, s, CacheTier::device);
      gone = true;
    }
    return gone;
  }

  // Puts what a request has computed into the place of such pages, whoever holds them. True if one was.
  bool replace_unwritten(std::int32_t node, typename Base::Cache::Pages& pages) {
    bool replaced = false;
    for (int s = 0; s < spaces; ++s) {
      auto& page = pages[static_cast<std::size_t>(s)];
      if (!page || this->cache_.in_flight(node, s) || !unwritten(node, s)) continue;
      if (this->cache_.has_page(s, page.id()) || !ledger_of(*this->pools_.device, s).readable(page.id()).ok()) continue;
      this->cache_.replace(node, s, page);
      replaced = true;
    }
    return replaced;
  }

  // Asks for host copies of a node's device pages. Returns `pages` with them.
  TierPages&& to_host(std::int32_t node, TierPages& pages) {
    for (int s = 0; s < spaces; ++s) {
      if (this->cache_.has(node, s, CacheTier::device) && !this->cache_.host(node, s)) (void)host_pages(node, s, pages);
    }
    return std::move(pages);
  }

  // Starts reading what only a file has of a node; false if there is no room for it.
  bool read(std::int32_t node) {
    TierPages pages;
    for (int s = 0; s < spaces; ++s) {
      if (this->cache_.state(node, s) == PageState::file && !host_pages(node, s, pages)) break;
    }
    if (!pages.empty()) this->load_file(node, pages);
    return this->cache_.state(node, this->first_every_) != PageState::file;
  }

 private:
  // For a copy to the host to end, work that a page drains for, a load that nobody needs any more, or, where a page stays for want of room on the host, one of its
  // copies to or from a file; false if there is none, or the deadline has passed.
  bool wait_for_room(int space, Deadline deadline) {
    const std::int64_t begin = steady_ns();
    const bool ended = this->wait_for(CacheTier::host, deadline) || wait_for_work(space, deadline) || this->wait_for_load(space, deadline) ||
                       (this->files_under_way() && this->cache_.victim(space, CacheTier::device) >= 0 && this->wait_for_file(deadline));
    const std::int64_t end = steady_ns();
    this->count_time(CacheWork::wait, begin, end);
    if (this->traced()) this->note({.work = CacheWork::wait, .request = this->request_, .space = space, .begin_ns = begin, .end_ns = end});
    return ended;
  }

  // For a page without owners to be free. Whatever holds it may be a lease, which ends with the last copy of it: there is nothing to wait on but the ledger.
  bool wait_for_work(int space, Deadline deadline) {
    auto& ledger = ledger_of(*this->pools_.device, space);
    for (const auto draining = ledger.draining_pages(); draining > 0 && Clock::now() < deadline; ledger.drain()) {
      if (ledger.free_pages() > 0 || ledger.draining_pages() < draining) return true;
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
    return false;
  }

  // Makes the cache await a host copy of a page, or of all pages of a tail, and adds them to `pages`; false, and nothing changes, if there is no room.
  bool host_pages(std::int32_t node, int space, TierPages& pages) {
    std::vector<PageRef<HostPage>> found;
    bool all = true;
    this->cache_.together(node, space, [&](int s) {
      if (all) all = static_cast<bool>(found.emplace_back(host_page(s)));
    });
    if (!all) return false;
    auto next = found.begin();
    this->cache_.together(node, space, [&](int s) {
      this->cache_.arrive(node, s, std::move(*next++));
      pages.push_back({node, s});
    });
    return true;
  }

  // A host page, given up by another if need be; empty if none may go.
  PageRef<HostPage> host_page(int space) {
    if (this->pools_.host == nullptr) return {};
    auto& ledger = ledger_of(*this->pools_.host, space);
    for (;;) {
      if (auto page = ledger.allocate(); page.ok()) return std::move(page).value();
      const std::int32_t node = this->cache_.victim(space, CacheTier::host);
      if (node < 0) break;
      give_up(node, space, CacheTier::host);
    }
    ++this->of(CacheTier::host, space).refused_pages;
    return {};
  }
};

}  // namespace detail

KVIRE_NAMESPACE_END
