// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <kvire/tier/prefix_holds.hpp>

KVIRE_NAMESPACE_BEGIN

/// The longest prefix that is there.
struct PrefixMatch {
  std::int32_t node = -1;              ///< its end; the root if nothing matches; -1 for a root that is none
  std::int64_t pages = 0;
  std::int64_t on[cache_tiers] = {};   ///< of `pages`: by the tier of the slowest space that needs the page
  std::int64_t cut = 0;                ///< pages behind it that are there, but without the tail that a restart needs
  bool forgotten = false;              ///< the next page is known by name, but its bytes are gone
};

/// A radix prefix cache: which pages of which token prefixes are where. Keyed by token ids in whole pages below a namespace; holds the page references of
/// what it caches, one for each page-id space. Moves no bytes: who does reports what is on its way (PrefixPlaces).
///
/// A page in the cache is never written: who goes on from a complete one writes the next, and a tail, a page that is not full yet, is only parked here:
/// who goes on from it gets pages of its own. The cache owns each whole page twice, so that a write lease for it is refused (busy), whoever else lets go of it; leases
/// that were taken before the page came here stay good. Lookups cost O(pages) and allocate nothing. Not for several threads at once; match and node
/// numbers hold until the next call that is not const.
template <int Spaces = 1, EvictionPolicy Policy = Lru>
class PrefixCache : public PrefixHolds<Spaces, Policy> {
  using Holds = PrefixHolds<Spaces, Policy>;

 public:
  using Shape = PrefixShape<Spaces>;
  using typename Holds::Pages;

  /// A running request's hold on a prefix: none of its pages is evicted, as long as it is alive. Follows the cache when that is moved, and is empty once it
  /// is gone. Move-only.
  class Ref {
   public:
    Ref() = default;
    Ref(Ref&& other) noexcept : cache_(std::move(other.cache_)), node_(std::exchange(other.node_, -1)) {}
    Ref& operator=(Ref&& other) noexcept {
      std::swap(cache_, other.cache_);
      std::swap(node_, other.node_);
      return *this;
    }
    ~Ref() {
      if (*this) (*cache_)->unpin(node_);
    }
    explicit operator bool() const { return cache_ != nullptr && *cache_ != nullptr; }
    /// The prefix's last page, or the root; -1 for none.
    std::int32_t node() const { return *this ? node_ : -1; }
    std::int64_t pages() const { return *this ? (*cache_)->depth(node_) : 0; }

   private:
    friend class PrefixCache;
    Ref(std::shared_ptr<PrefixCache*> cache, std::int32_t node) : cache_(std::move(cache)), node_(node) {}
    std::shared_ptr<PrefixCache*> cache_;  // where it is now
    std::int32_t node_ = -1;
  };

  PrefixCache(PrefixCache&& other) noexcept : Holds(std::move(other)), self_(std::move(other.self_)) {
    if (self_) *self_ = this;
  }
  PrefixCache& operator=(PrefixCache&& other) noexcept {
    if (this == &other) return *this;
    if (self_) *self_ = nullptr;
    Holds::operator=(std::move(other));
    self_ = std::move(other.self_);
    if (self_) *self_ = this;
    return *this;
  }
  ~PrefixCache() {
    if (self_) *self_ = nullptr;
  }

  /// Errors: invalid_argument for a shape that no bundle has (see check_shape).
  static Result<PrefixCache> make(const Shape& shape, const Policy& policy = Policy()) {
    if (Status ok = check_shape(shape); !ok.ok()) return ok.error();
    return Result<PrefixCache>(PrefixCache(shape, policy));
  }

  /// The root of a namespace: made at first sight, valid as long as the cache. -1, under which nothing is found, for a namespace that check_namespace refuses.
  std::int32_t root(const PrefixNamespace& names) {
    if (!check_namespace(names).ok()) return -1;
    const std::int32_t node = this->tree_.root(names);
    this->grow();
    return node;
  }

  /// The longest prefix of `tokens`, in whole pages, that can be continued: it is there in every space that needs it. A request that must compute its last
  /// token itself passes all tokens but that one. Counts as a use of the pages.
  PrefixMatch find(std::int32_t root, std::span<const TokenId> tokens) {
    PrefixMatch match;
    if (!this->is_root(root)) return match;
    match.node = root;
    this->new_tick();
    const std::int64_t page = this->shape_.page_tokens;
    std::int64_t here[Spaces] = {};  // pages in a row that each space has
    std::int64_t on[cache_tiers] = {};
    std::int64_t known = 0;
    std::int32_t at = root;
    for (std::int64_t first = 0; first + page <= static_cast<std::int64_t>(tokens.size()); first += page) {
      const auto part = tokens.subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(page));
      const std::int32_t child = this->tree_.child(at, this->tree_.name_below(at, part), part);
      if (child < 0) break;
      const int tier = this->slowest_every(child);
      if (tier == cache_tiers) {
        match.forgotten = true;
        break;
      }
      this->touch_every(child);
      ++known;
      ++on[tier];
      at = child;
      if (!tails_there(child, known, here)) continue;
      match.node = child;
      match.pages = known;
      for (int t = 0; t < cache_tiers; ++t) match.on[t] = on[t];
    }
    match.cut = known - match.pages;
    count_tails(match);
    return match;
  }

  /// The page of these tokens behind `parent`, named now if need be, for what is found elsewhere: a name without copies is kept only until the
  /// next change of its page. One page of tokens, or fewer: a tail. `name`: theirs, where it is known. -1 for another number of tokens, or behind what is no
  /// node, or a tail.
  std::int32_t know(std::int32_t parent, std::span<const TokenId> tokens) { return know(parent, name_below(parent, tokens), tokens); }
  std::int32_t know(std::int32_t parent, const Hash128& name, std::span<const TokenId> tokens) {
    const bool fits = !tokens.empty() && static_cast<std::int64_t>(tokens.size()) <= this->shape_.page_tokens;
    if (!fits || !this->live(parent) || this->tree_.tail(parent) > 0) return -1;
    std::int32_t child = this->tree_.child(parent, name, tokens);
    if (child >= 0) return child;
    child = this->tree_.add(parent, name, tokens);
    this->grow();
    return child;
  }
  /// The same without naming anything; -1 if nobody has named it.
  std::int32_t known(std::int32_t parent, std::span<const TokenId> tokens) const { return known(parent, name_below(parent, tokens), tokens); }
  std::int32_t known(std::int32_t parent, const Hash128& name, std::span<const TokenId> tokens) const { return this->tree_.child(parent, name, tokens); }
  Hash128 name_below(std::int32_t parent, std::span<const TokenId> tokens) const {
    return this->live(parent) ? this->tree_.name_below(parent, tokens) : Hash128();
  }
  /// The names of all tails that the tokens begin with, in one pass: out[i] is that of the first i + 1 tokens.
  void names_below(std::int32_t parent, std::span<const TokenId> tokens, std::vector<Hash128>& out) const {
    out.resize(this->live(parent) ? min_of(tokens.size(), static_cast<std::size_t>(this->shape_.page_tokens - 1)) : 0);
    if (!out.empty()) this->tree_.names_below(parent, tokens, out);
  }

  /// Holds a prefix. Pages that are draining stay. An empty hold of what is no node. O(pages).
  Ref acquire(std::int32_t node) {
    if (!this->live(node)) return {};
    this->pin(node);
    return Ref(self_, node);
  }
  Ref acquire(const PrefixMatch& match) { return acquire(match.node); }
  /// Whether it holds a prefix of this cache.
  bool is_mine(const Ref& at) const { return at && at.cache_ == self_; }
  /// Moves a hold on to a page right behind it; false, and nothing changes, if the node is not that.
  bool advance(Ref& at, std::int32_t child) {
    if (!is_mine(at) || this->parent(child) != at.node_ || this->tail_tokens(child) > 0) return false;
    this->pin_next(at.node_, child);
    at.node_ = child;
    return true;
  }

  enum class Published : unsigned char {
    added,   ///< new: the cache owns the pages that were given
    joined,  ///< known by name or on a slower tier: the pages that were missing on the device are the cache's now, others are still the caller's
    known    ///< there already, published by somebody else: the caller still has its pages, and may go on with the cache's instead
  };

  /// Adds the next whole page behind `at`, computed or received, and moves `at` behind it. Takes references from `pages` for what is not on the
  /// device yet. Errors, which change nothing: invalid_argument for a hold that is empty or of another cache, tokens that are not one page, or a space whose
  /// pages are needed and without one; mismatch for a page of another pool than the space's; duplicate for one that the cache has for other tokens.
  Result<Published> extend(Ref& at, std::span<const TokenId> tokens, Pages& pages) {
    Published how = Published::known;
    if (Status ok = extend(at, tokens, std::span(&pages, 1), [&](Published added) { how = added; }); !ok.ok()) return ok.error();
    return how;
  }
  /// The same for several pages, all or none: `pages[i]` are those of the i-th page of `tokens`. Calls added(how) after each.
  template <class Added>
  Status extend(Ref& at, std::span<const TokenId> tokens, std::span<Pages> pages, Added&& added) {
    if (Status ok = check_prefix(at); !ok.ok()) return ok;
    if (Status ok = this->check_pages(at.node_, tokens, pages); !ok.ok()) return ok;
    for (std::size_t i = 0; i < pages.size(); ++i) added(add(at, this->part_of(tokens, i), pages[i]));
    return {};
  }

  struct Parked {
    Published how;
    std::int32_t tail;  ///< its node
  };

  /// Parks the unfinished page of a request behind its whole pages `at`: `tokens` are those of the last page, fewer than a page. Takes the pages of every
  /// space, also of those that whole pages do not keep, if there are none of this tail on the device yet (`known`: the caller still has its own).
  /// Nobody holds a tail. Errors, which change nothing: invalid_argument for tokens that are none or a page; otherwise as extend, of every space.
  Result<Parked> park(const Ref& at, std::span<const TokenId> tokens, Pages& pages) {
    if (Status ok = check_prefix(at); !ok.ok()) return ok.error();
    if (tokens.empty() || static_cast<std::int64_t>(tokens.size()) >= this->shape_.page_tokens) {
      return Error{ErrorCode::invalid_argument, "prefix cache: a tail of " + std::to_string(tokens.size()) + " tokens, of pages of " +
                                                    std::to_string(this->shape_.page_tokens)};
    }
    if (Status ok = this->check_tail_pages(known(at.node_, tokens), pages); !ok.ok()) return ok.error();
    this->new_tick();
    Published how = Published::known;
    const std::int32_t tail = named(at.node_, tokens, how);
    for (int s = 0; s < Spaces; ++s) {
      if (this->take_device(tail, s, pages[static_cast<std::size_t>(s)]) && how == Published::known) how = Published::joined;
    }
    this->touch_all(tail);
    return Parked{how, tail};
  }

  /// Somebody goes on from a tail: its device pages, if it has them there, into `pages`, to be written. What it has on slower tiers stays, and is the
  /// first to go there. True if there were pages.
  bool resume(std::int32_t tail, Pages& pages) {
    if (this->tail_tokens(tail) == 0) return false;
    const bool here = this->has(tail, 0, CacheTier::device);
    if (here) this->give_device(tail, pages);
    this->age(tail);
    this->reap(tail);
    return here;
  }

 private:
  PrefixCache(const Shape& shape, const Policy& policy) : Holds(shape, policy), self_(std::make_shared<PrefixCache*>(this)) {}

  Status check_prefix(const Ref& at) const {
    const auto bad = [](const char* what) { return Error{ErrorCode::invalid_argument, std::string("prefix cache: ") + what}; };
    if (!is_mine(at)) return bad("the hold on a prefix is empty, or of another cache; acquire one below a root of this cache first");
    if (this->tree_.tail(at.node_) > 0) return bad("the prefix ends in a tail, and nothing stands behind one; acquire the whole pages before it");
    return {};
  }

  Published add(Ref& at, std::span<const TokenId> tokens, Pages& pages) {
    this->new_tick();
    Published how = Published::known;
    const std::int32_t child = named(at.node_, tokens, how);
    for (int s = 0; s < Spaces; ++s) {
      auto& ref = pages[static_cast<std::size_t>(s)];
      if (!ref || this->shape_.spaces[s].need == PrefixNeed::never || !this->take_device(child, s, ref)) continue;
      if (how == Published::known) how = Published::joined;
    }
    this->touch_all(child);
    this->pin_next(at.node_, child);
    at.node_ = child;
    return how;
  }

  // The child of these tokens; `how` is `added` if it is new.
  std::int32_t named(std::int32_t parent, std::span<const TokenId> tokens, Published& how) {
    const std::int64_t before = this->pages();
    const std::int32_t child = know(parent, tokens);
    how = this->pages() > before ? Published::added : Published::known;
    return child;
  }

  // Whether every tail that a restart behind the node needs is there; `here` counts pages in a row.
  bool tails_there(std::int32_t node, std::int64_t depth, std::int64_t (&here)[Spaces]) const {
    bool all = true;
    for (int s = 0; s < Spaces; ++s) {
      if (this->shape_.spaces[s].need != PrefixNeed::tail) continue;
      here[s] = this->place(node, s).anywhere() ? here[s] + 1 : 0;
      all = all && here[s] >= min_of(this->reach(s), depth);
    }
    return all;
  }
  // Moves pages whose tail is on a slower tier than their other spaces to that tier's count, and touches the tails.
  void count_tails(PrefixMatch& match) {
    std::int64_t longest = 0;
    for (int s = 0; s < Spaces; ++s) longest = this->shape_.spaces[s].need == PrefixNeed::tail ? max_of(longest, this->reach(s)) : longest;
    std::int32_t node = match.node;
    for (std::int64_t i = 0; i < min_of(longest, match.pages); ++i, node = this->tree_.parent(node)) {
      const int without = this->slowest_every(node);
      int with = without;
      for (int s = 0; s < Spaces; ++s) {
        if (this->shape_.spaces[s].need != PrefixNeed::tail || i >= this->reach(s)) continue;
        with = max_of(with, this->place(node, s).level());
        this->touch(node, s);
      }
      --match.on[without];
      ++match.on[with];
    }
  }

  std::shared_ptr<PrefixCache*> self_;  // what holds find this cache by
};

KVIRE_NAMESPACE_END
