// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <kvire/tier/policy_queue.hpp>
#include <kvire/tier/prefix_place.hpp>
#include <kvire/tier/prefix_shape.hpp>
#include <kvire/tier/prefix_tree.hpp>

KVIRE_NAMESPACE_BEGIN

/// The half of a prefix cache that whoever moves bytes talks to: where the pages of each node are, what is on its way, and which page is to go next.
/// Per page-id space; node numbers come from a PrefixMatch or a Ref. Of a number that is no node's, and of -1, questions say that nothing is there;
/// what changes something requires a node.
///
/// A page of a space whose pages are all needed leaves a tier only after those of its children, so that what stays can be reached. A page that a
/// request holds, or that is being copied, does not leave the tier it is used from. A tail has pages of every space, and whoever moves one of them
/// moves them all: its spaces are always alike.
template <int Spaces, EvictionPolicy Policy>
class PrefixPlaces {
 public:
  const PrefixShape<Spaces>& shape() const { return shape_; }
  /// Pages known by name.
  std::int64_t pages() const { return tree_.pages(); }
  /// Whether there is such a node.
  bool live(std::int32_t node) const { return tree_.live(node); }
  std::int32_t depth(std::int32_t node) const { return live(node) ? tree_.depth(node) : 0; }
  bool is_root(std::int32_t node) const { return live(node) && tree_.is_root(node); }
  /// Tokens of a node that is a tail; 0 for a whole page.
  std::int32_t tail_tokens(std::int32_t node) const { return live(node) ? tree_.tail(node) : 0; }
  /// Tails known right behind a prefix.
  std::int32_t tails(std::int32_t node) const { return live(node) ? tree_.tails(node) : 0; }
  /// -1 for a root.
  std::int32_t parent(std::int32_t node) const { return live(node) && !tree_.is_root(node) ? tree_.parent(node) : -1; }
  /// Digest of the namespace and of all tokens up to the node's end.
  Hash128 name(std::int32_t node) const { return live(node) ? tree_.name(node) : Hash128(); }
  /// Requires a node.
  const PrefixNamespace& names(std::int32_t node) const { return tree_.names(node); }

  /// Whether a restart needs the space's page that lies `back` pages before the prefix's last one.
  bool needed(int space, std::int64_t back) const {
    const PrefixNeed need = shape_.spaces[space].need;
    return need == PrefixNeed::every || (need == PrefixNeed::tail && back < reach(space));
  }

  PageState state(std::int32_t node, int space) const { return seen(node, space).state(); }
  bool has(std::int32_t node, int space, CacheTier tier) const { return seen(node, space).at(tier) == Copy::whole; }
  bool arriving(std::int32_t node, int space, CacheTier tier) const { return seen(node, space).at(tier) == Copy::arriving; }
  /// Empty if the device has, and awaits, no copy. The same for the host.
  const PageRef<DevicePage>& device(std::int32_t node, int space) const { return seen(node, space).device; }
  const PageRef<HostPage>& host(std::int32_t node, int space) const { return seen(node, space).host; }
  /// Whether a copy of the page is on its way anywhere.
  bool in_flight(std::int32_t node, int space) const { return seen(node, space).in_flight(); }
  /// Whether the cache has the device page whole, under whatever name.
  bool has_page(int space, DevicePage page) const {
    const auto& shares = shares_[static_cast<std::size_t>(space)];
    const auto at = static_cast<std::size_t>(page.value);
    return page.value >= 0 && at < shares.size() && shares[at];
  }
  /// Calls f(space) for each space whose page moves with this one: for a tail all of them.
  template <class F>
  void together(std::int32_t node, int space, F&& f) const {
    const bool tail = tree_.tail(node) > 0;
    for (int s = tail ? 0 : space; s < (tail ? Spaces : space + 1); ++s) f(s);
  }

  /// The nodes from the first page to `node`, into exactly depth(node) places.
  void path(std::int32_t node, std::span<std::int32_t> out) const {
    for (std::size_t i = out.size(); i-- > 0; node = parent(node)) out[i] = node;
  }

  /// A copy of the page is on its way to the device or the host. Requires that it has none there, and a whole one on another tier.
  void arrive(std::int32_t node, int space, PageRef<DevicePage> page) {
    change(node, space, [&](Place& p) {
      p.device = std::move(page);
      p.copy[0] = Copy::arriving;
    });
  }
  void arrive(std::int32_t node, int space, PageRef<HostPage> page) {
    change(node, space, [&](Place& p) {
      p.host = std::move(page);
      p.copy[1] = Copy::arriving;
    });
  }
  void arrive_file(std::int32_t node, int space) {
    change(node, space, [](Place& p) { p.copy[2] = Copy::arriving; });
  }
  /// The device copy is to go when the copy on its way to the host has arrived. A request that acquires the page in between keeps it.
  void leave(std::int32_t node, int space) {
    queue(space, 0).evicted(place(node, space).rank[0]);
    change(node, space, [](Place& p) { p.leaving = p.pins == 0; });
  }
  /// The copy has arrived, or has failed to: then nothing is there, and the copy it was made from stays.
  void arrived(std::int32_t node, int space, CacheTier tier, bool ok) {
    const int t = static_cast<int>(tier);
    if (!ok) {
      change(node, space, [&](Place& p) { clear(p, t); });
    } else {
      change(node, space, [&](Place& p) { p.copy[t] = Copy::whole; });
    }
    const bool gives_up = ok && place(node, space).leaving && tier == CacheTier::host;
    if (place(node, space).leaving) {
      change(node, space, [&](Place& p) {
        p.leaving = false;
        if (gives_up) clear(p, 0);
      });
    }
    reap(node);
  }
  /// A copy that is known to be on a tier whose pages the cache does not own, such as one that survived a restart.
  void found_file(std::int32_t node, int space) {
    change(node, space, [](Place& p) { p.copy[2] = Copy::whole; });
  }

  /// The page to give up next on a tier; -1 if none may go.
  std::int32_t victim(int space, CacheTier tier) {
    const int t = static_cast<int>(tier);
    return queue(space, t).lowest([&](std::int32_t node) { return place(node, space).rank[t]; }, [&](std::int32_t node) { return may_go(node, space, t); });
  }
  /// Gives up the copy on one tier. Requires that it is whole and not being copied; with the last copy of a page its name goes too, unless longer
  /// prefixes are known. Those that only slower tiers have are out of reach from then on, and age there. Of a tail all spaces go.
  void drop(std::int32_t node, int space, CacheTier tier) {
    const int t = static_cast<int>(tier);
    queue(space, t).evicted(place(node, space).rank[t]);
    together(node, space, [&](int s) { change(node, s, [&](Place& p) { clear(p, t); }); });
    if (shape_.spaces[space].need == PrefixNeed::every && !place(node, space).anywhere()) drop_tails(node);
    reap(node);
  }

 protected:
  using Place = detail::PrefixPlace;
  using Copy = Place::Copy;

  PrefixPlaces(const PrefixShape<Spaces>& shape, const Policy& policy)
      : shape_(shape), tree_(shape.page_tokens, shape.keep_tokens), queues_(static_cast<std::size_t>(Spaces * cache_tiers), Queue(policy)) {}

  void new_tick() { ++tick_; }
  void grow() { places_.resize(tree_.slots()); }

  Place& place(std::int32_t node, int space) { return places_[static_cast<std::size_t>(node)].places[space]; }
  const Place& place(std::int32_t node, int space) const { return places_[static_cast<std::size_t>(node)].places[space]; }
  const Place& seen(std::int32_t node, int space) const {
    static const Place nothing;
    return live(node) && space >= 0 && space < Spaces ? place(node, space) : nothing;
  }
  // Pages of a tail space that the next token looks back to.
  std::int64_t reach(int space) const { return max_of<std::int64_t>(1, ceil_div(shape_.spaces[space].tail_tokens - 1, shape_.page_tokens)); }

  void touch(std::int32_t node, int space) {
    Place& p = place(node, space);
    ++p.uses;
    for (int t = 0; t < cache_tiers; ++t) p.rank[t] = queue(space, t).policy().rank(p.uses, tick_);
  }

  // Number of the slowest tier that a space whose pages are all needed would come from; cache_tiers: from nowhere.
  int slowest_every(std::int32_t node) const {
    int tier = 0;
    for (int s = 0; s < Spaces; ++s) {
      if (shape_.spaces[s].need == PrefixNeed::every) tier = max_of(tier, place(node, s).level());
    }
    return tier;
  }
  void touch_every(std::int32_t node) {
    for (int s = 0; s < Spaces; ++s) {
      if (shape_.spaces[s].need == PrefixNeed::every) touch(node, s);
    }
  }
  void touch_all(std::int32_t node) {
    for (int s = 0; s < Spaces; ++s) touch(node, s);
  }

  struct Entry {
    Place places[Spaces];
    std::int32_t users = 0;  // references that end here
  };
  using Queue = detail::PolicyQueue<Policy>;

  Entry& entry(std::int32_t node) { return places_[static_cast<std::size_t>(node)]; }
  Queue& queue(int space, int tier) { return queues_[static_cast<std::size_t>(space * cache_tiers + tier)]; }

  bool may_go(std::int32_t node, int space, int tier) const {
    const Place& p = place(node, space);
    if (p.copy[tier] != Copy::whole || p.in_flight()) return false;
    if (p.level() < tier) return true;
    return p.pins == 0 && (shape_.spaces[space].need == PrefixNeed::tail || p.within[tier] == 0);
  }
  void offer(std::int32_t node, int space) {
    for (int t = 0; t < cache_tiers; ++t) {
      if (may_go(node, space, t) && !queue(space, t).holds(node)) queue(space, t).push(node, place(node, space).rank[t]);
    }
  }

  static void clear(Place& p, int tier) {
    p.copy[tier] = Copy::none;
    if (tier == 0) p.device.reset();
    if (tier == 1) p.host.reset();
  }

  // Every change of a page's copies: keeps the parent's counts and the queues up to date.
  template <class F>
  void change(std::int32_t node, int space, F&& f) {
    Place& p = place(node, space);
    const int before = p.level();
    const DevicePage was = p.copy[0] == Copy::whole ? p.device.id() : DevicePage();
    f(p);
    share(space, was, p);
    const int after = p.level();
    if (before != after && shape_.spaces[space].need == PrefixNeed::every && !tree_.is_root(tree_.parent(node))) {
      const std::int32_t parent = tree_.parent(node);
      for (int t = after; t < before; ++t) ++place(parent, space).within[t];
      for (int t = before; t < after; ++t) --place(parent, space).within[t];
      offer(parent, space);
    }
    offer(node, space);
  }

  // A whole page has two shares of the cache, so that nobody finds it owned alone and writes it: a writer is refused (busy) until the cache gives it up.
  void share(int space, DevicePage was, const Place& p) {
    const DevicePage is = p.copy[0] == Copy::whole ? p.device.id() : DevicePage();
    if (was == is) return;
    auto& shares = shares_[static_cast<std::size_t>(space)];
    if (!was.none()) shares[static_cast<std::size_t>(was.value)].reset();
    if (is.none()) return;
    if (shares.size() <= static_cast<std::size_t>(is.value)) shares.resize(static_cast<std::size_t>(is.value) + 1);
    shares[static_cast<std::size_t>(is.value)] = p.device;
  }

  void drop_tails(std::int32_t node) {
    for (int s = 0; s < Spaces; ++s) {
      for (int t = 0; t < cache_tiers; ++t) {
        if (shape_.spaces[s].need == PrefixNeed::tail && may_go(node, s, t)) change(node, s, [&](Place& p) { clear(p, t); });
      }
    }
  }

  // Forgets names that nobody needs.
  void reap(std::int32_t node) {
    while (!tree_.is_root(node) && tree_.children(node) == 0 && entry(node).users == 0) {
      for (int s = 0; s < Spaces; ++s) {
        if (place(node, s).anywhere()) return;
      }
      for (int s = 0; s < Spaces; ++s) {
        for (int t = 0; t < cache_tiers; ++t) {
          if (queue(s, t).holds(node)) queue(s, t).remove(node);
        }
      }
      const std::int32_t parent = tree_.parent(node);
      entry(node) = {};
      tree_.remove(node);
      node = parent;
    }
  }

  PrefixShape<Spaces> shape_;
  detail::PrefixTree tree_;

 private:
  std::uint64_t tick_ = 0;
  std::vector<Entry> places_;
  std::vector<Queue> queues_;
  std::array<std::vector<PageRef<DevicePage>>, static_cast<std::size_t>(Spaces)> shares_;  // by page id
};

KVIRE_NAMESPACE_END
