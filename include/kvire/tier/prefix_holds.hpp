// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <kvire/base/sort.hpp>
#include <kvire/tier/prefix_places.hpp>

KVIRE_NAMESPACE_BEGIN

/// The part of a prefix cache that says what running requests hold, and that passes device pages from their hands to the cache's and back.
template <int Spaces, EvictionPolicy Policy>
class PrefixHolds : public PrefixPlaces<Spaces, Policy> {
  using Places = PrefixPlaces<Spaces, Policy>;
  using typename Places::Copy;
  using typename Places::Place;

 public:
  /// Device pages of one page of tokens, one a space. Empty where a request has none.
  using Pages = std::array<PageRef<DevicePage>, static_cast<std::size_t>(Spaces)>;

  /// Running requests that hold the page.
  std::int32_t pins(std::int32_t node, int space) const { return this->seen(node, space).pins; }
  /// From now on only pages of this ledger are taken into the space. Without it the first page decides, until the cache knows no page any more.
  template <class Ledger>
  void expect_pool(int space, const Ledger& ledger) {
    pools_[static_cast<std::size_t>(space)] = {ledger.identity(), true};
  }
  /// A tail was parked while a copy still fills its device pages: `arrived` says how that ends.
  void await_device(std::int32_t tail) {
    for (int s = 0; s < Spaces; ++s) this->change(tail, s, [](Place& p) { p.copy[0] = Copy::arriving; });
  }
  /// Another device page, from a request's hands, for a whole one that is not being copied, which goes: for who holds the prefix as well.
  void replace(std::int32_t node, int space, PageRef<DevicePage>& page) {
    this->change(node, space, [&](Place& p) { p.device = std::move(page); });
  }
  /// Pages of a space that running requests hold.
  std::int64_t held_pages(int space) const { return held_[static_cast<std::size_t>(space)]; }

 protected:
  using Places::Places;

  void pin(std::int32_t node) {
    ++this->entry(node).users;
    each_pinned(node, [&](std::int32_t n, int s) { hold(n, s); });
  }
  void unpin(std::int32_t node) {
    --this->entry(node).users;
    each_pinned(node, [&](std::int32_t n, int s) { let_go(n, s); });
    this->reap(node);
  }
  // The same as pinning `child` and then unpinning its parent `node`, in less time.
  void pin_next(std::int32_t node, std::int32_t child) {
    ++this->entry(child).users;
    --this->entry(node).users;
    for (int s = 0; s < Spaces; ++s) {
      if (this->shape_.spaces[s].need == PrefixNeed::never) continue;
      hold(child, s);
      if (this->shape_.spaces[s].need == PrefixNeed::every) continue;
      std::int32_t last = child;
      for (std::int64_t i = 0; i < this->reach(s) && !this->tree_.is_root(last); ++i) last = this->tree_.parent(last);
      if (!this->tree_.is_root(last)) let_go(last, s);
    }
  }

  // Tokens of the i-th of several pages.
  std::span<const TokenId> part_of(std::span<const TokenId> tokens, std::size_t i) const {
    const auto page = static_cast<std::size_t>(this->shape_.page_tokens);
    return tokens.subspan(i * page, page);
  }

  // Whether all of these pages of tokens can be added behind a node. O(pages), but for sorting their ids.
  Status check_pages(std::int32_t node, std::span<const TokenId> tokens, std::span<const Pages> pages) const {
    const auto page = static_cast<std::size_t>(this->shape_.page_tokens);
    if (tokens.size() % page != 0 || tokens.size() / page != pages.size()) {
      return Error{ErrorCode::invalid_argument, "prefix cache: " + std::to_string(tokens.size()) + " tokens are not " +
                                                    (pages.size() == 1 ? std::string("one page") : std::to_string(pages.size()) + " pages") + " of " +
                                                    std::to_string(page) + "; a tail is parked"};
    }
    std::array<std::vector<std::int32_t>, static_cast<std::size_t>(Spaces)> taken;
    std::array<const void*, static_cast<std::size_t>(Spaces)> pools = {};
    Hash128 name = this->tree_.name(node);
    for (std::size_t i = 0; i < pages.size(); ++i) {
      name = prefix_hash(name, part_of(tokens, i).data(), this->shape_.page_tokens);
      if (node >= 0) node = this->tree_.child(node, name, part_of(tokens, i));
      for (std::size_t s = 0; s < pools.size(); ++s) {
        const auto& ref = pages[i][s];
        const PrefixNeed need = this->shape_.spaces[s].need;
        if (need == PrefixNeed::every && !ref) return without_part("page", s);
        if (!ref || need == PrefixNeed::never) continue;
        if (Status ok = check_page(node, s, ref); !ok.ok()) return ok;
        if (pools[s] != nullptr && pools[s] != ref.ledger()) return another_pool(s, ref);
        pools[s] = ref.ledger();
        if (pages.size() > 1 && takes_device(node, static_cast<int>(s))) taken[s].push_back(ref.id().value);
      }
    }
    for (std::size_t s = 0; s < taken.size(); ++s) {
      detail::sort(taken[s]);
      for (std::size_t i = 1; i < taken[s].size(); ++i) {
        if (taken[s][i] == taken[s][i - 1]) return taken_already(s, taken[s][i]);
      }
    }
    return {};
  }
  // The same for a tail, by its node; -1 if nobody knows it.
  Status check_tail_pages(std::int32_t node, const Pages& pages) const {
    for (std::size_t s = 0; s < pages.size(); ++s) {
      if (!pages[s]) return without_part("tail", s);
      if (Status ok = check_page(node, s, pages[s]); !ok.ok()) return ok;
    }
    return {};
  }

  // A device copy from a request's hands, where there is none; false if there is one, or one is on its way.
  bool take_device(std::int32_t node, int space, PageRef<DevicePage>& page) {
    if (!takes_device(node, space)) return false;
    pools_[static_cast<std::size_t>(space)].first = page.ledger();
    this->change(node, space, [&](Place& p) {
      p.device = std::move(page);
      p.copy[0] = Copy::whole;
    });
    return true;
  }
  // The device copies of a tail into a request's hands, which may write them. Requires whole ones.
  void give_device(std::int32_t tail, Pages& pages) {
    for (int s = 0; s < Spaces; ++s) {
      this->change(tail, s, [&](Place& p) {
        pages[static_cast<std::size_t>(s)] = std::move(p.device);
        p.copy[0] = Copy::none;
        p.leaving = false;
      });
    }
  }
  // Makes the copies of a tail the first to go on their tiers.
  void age(std::int32_t tail) {
    for (int s = 0; s < Spaces; ++s) {
      for (int t = 0; t < cache_tiers; ++t) {
        this->place(tail, s).rank[t] = 0;
        if (this->queue(s, t).holds(tail)) this->queue(s, t).remove(tail);
      }
      this->offer(tail, s);
    }
  }

 private:
  // Whether a device copy would be taken for a node; -1: one that is not known yet.
  bool takes_device(std::int32_t node, int space) const { return this->seen(node, space).copy[0] == Copy::none; }
  Status check_page(std::int32_t node, std::size_t space, const PageRef<DevicePage>& page) const {
    const auto& [pool, named] = pools_[space];
    if (pool != nullptr && page.ledger() != pool && (named || this->pages() > 0)) return another_pool(space, page);
    const int s = static_cast<int>(space);
    return takes_device(node, s) && this->has_page(s, page.id()) ? Status(taken_already(space, page.id().value)) : Status();
  }
  static Error without_part(const char* what, std::size_t space) {
    return {ErrorCode::invalid_argument, std::string("prefix cache: a ") + what + " without its part in space " + std::to_string(space)};
  }
  static Error another_pool(std::size_t space, const PageRef<DevicePage>& page) {
    return {ErrorCode::mismatch, "prefix cache: device page " + std::to_string(page.id().value) + " for space " + std::to_string(space) +
                                     " is of another pool or space than the cache's pages there; pass one that the cache's pool allocated for this space"};
  }
  static Error taken_already(std::size_t space, std::int32_t page) {
    return {ErrorCode::duplicate, "prefix cache: device page " + std::to_string(page) + " of space " + std::to_string(space) +
                                      " would stand for two pages of tokens; give each a device page of its own"};
  }

  void hold(std::int32_t node, int space) {
    Place& p = this->place(node, space);
    if (p.pins++ == 0) ++held_[static_cast<std::size_t>(space)];
    if (p.leaving) this->change(node, space, [](Place& q) { q.leaving = false; });
  }
  void let_go(std::int32_t node, int space) {
    if (--this->place(node, space).pins > 0) return;
    --held_[static_cast<std::size_t>(space)];
    this->offer(node, space);
  }

  // All that a restart behind the node needs; of a tail every space.
  template <class F>
  void each_pinned(std::int32_t node, F&& f) {
    const bool tail = this->tree_.tail(node) > 0;
    for (std::int64_t back = 0; !this->tree_.is_root(node); node = this->tree_.parent(node), ++back) {
      for (int s = 0; s < Spaces; ++s) {
        if ((tail && back == 0) || this->needed(s, back)) f(node, s);
      }
    }
  }

  std::array<std::int64_t, static_cast<std::size_t>(Spaces)> held_ = {};
  std::array<std::pair<const void*, bool>, static_cast<std::size_t>(Spaces)> pools_ = {};  // of the pages; whether it was named
};

KVIRE_NAMESPACE_END
