// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>

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
  std::int32_t pins(std::int32_t node, int space) const { return this->place(node, space).pins; }
  /// A tail was parked while a copy still fills its device pages: `arrived` says how that ends.
  void await_device(std::int32_t tail) {
    for (int s = 0; s < Spaces; ++s) this->change(tail, s, [](Place& p) { p.copy[0] = Copy::arriving; });
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

  // A device copy from a request's hands, where there is none; false if there is one, or one is on its way.
  bool take_device(std::int32_t node, int space, PageRef<DevicePage>& page) {
    if (this->place(node, space).copy[0] != Copy::none) return false;
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
};

KVIRE_NAMESPACE_END
