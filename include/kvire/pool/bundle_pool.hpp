// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <tuple>

#include <kvire/layout/budget.hpp>
#include <kvire/pool/mirror.hpp>

KVIRE_NAMESPACE_BEGIN

namespace detail {

template <class Schedule, class... Entries>
std::true_type is_bundle(const CacheBundle<Schedule, Entries...>*);
std::false_type is_bundle(const void*);

template <class Backend, class Side, class Schedule, class... Entries>
std::tuple<std::optional<PagePool<typename Entries::policy, Backend, Side>>...> entry_pools(const CacheBundle<Schedule, Entries...>*);

}  // namespace detail

/// True for a CacheBundle and what derives from one.
template <class T>
inline constexpr bool is_bundle = decltype(detail::is_bundle(static_cast<const T*>(nullptr)))::value;

template <class Bundle>
constexpr bool require_bundle() {
  (void)sizeof(rule::PoolBundle<Bundle, is_bundle<Bundle>>);
  if constexpr (is_bundle<Bundle>) Bundle::require();
  return true;
}

template <class Bundle>
struct BundlePoolOptions {
  BundlePages<Bundle> pages = {};  ///< per space, each with its null page; pages_for and pages_in_budget compute them
  int layers = Bundle::layers;     ///< of the model, from its first: fewer for tests
  Arrangement arrangement = Arrangement::layer_first;
  std::string name = {};                        ///< none: the side's
  std::optional<Bytes> budget = {};             ///< refuse to allocate more than this over all entries and spaces
  std::optional<AnyResource> memory = {};       ///< none: the backend's default for the side
  std::optional<AnyResource> entry_memory[Bundle::entry_count] = {};  ///< of single entries, instead of `memory`; by memory_of
  std::optional<unsigned char> fill_on_free = {};

  /// The memory of one entry: for latents that a hot set fetches, say, that of the host's side.
  template <class Entry>
  std::optional<AnyResource>& memory_of() {
    return entry_memory[Bundle::template index_of<Entry>()];
  }
};

/// References to pages of every space of a bundle, allocated together.
template <class Bundle, class PageId>
struct BundleRefs {
  std::vector<PageRef<PageId>> refs[Bundle::space_count];

  template <class Space>
  std::vector<PageRef<PageId>>& of() {
    return refs[Bundle::template index_of_space<Space>()];
  }
  template <class Space>
  const std::vector<PageRef<PageId>>& of() const {
    return refs[Bundle::template index_of_space<Space>()];
  }
};

/// The pools of everything a model keeps: one pool an entry of the bundle, one ledger a page-id space. Entries of a space share page ids, and
/// with them ownership, holds and draining. Move-only.
template <class Bundle, class Backend, class Side>
class BundlePool {
  static_assert(require_bundle<Bundle>());

 public:
  using bundle = Bundle;
  using backend = Backend;
  using side = Side;
  using page_id = typename Side::page_id;
  using Ledger = PageLedger<page_id, Backend>;
  using Refs = BundleRefs<Bundle, page_id>;
  using Options = BundlePoolOptions<Bundle>;

  /// Allocates the pages of all entries. Errors: invalid_argument for a space without pages (nothing may be left out) or a bad layer count;
  /// exhausted beyond the budget, with the bytes wanted; what the memory resource returns. Nothing stays allocated after an error.
  static Result<BundlePool> make(Options options) {
    if (options.name.empty()) options.name = Side::name;
    if (options.layers < 1 || options.layers > Bundle::layers) {
      return Error{ErrorCode::invalid_argument, "bundle pool " + options.name + ": " + std::to_string(options.layers) + " layers; the model has " +
                                                    std::to_string(Bundle::layers)};
    }
    const Bytes bytes = options.pages.bytes(options.layers);
    if (options.budget && bytes > *options.budget) {
      return Error{ErrorCode::exhausted, "bundle pool " + options.name + ": " + std::to_string(bytes.count) + " bytes wanted over all entries, budget " +
                                             std::to_string(options.budget->count)};
    }
    BundlePool pool;
    pool.name_ = options.name;
    pool.layers_ = options.layers;
    pool.arrangement_ = options.arrangement;
    Status status;
    Bundle::for_each([&]<class Entry>() {
      if (status.ok()) status = pool.template make_entry<Entry>(options);
    });
    if (!status.ok()) return status.error();
    return Result<BundlePool>(std::move(pool));
  }

  BundlePool(BundlePool&&) noexcept = default;
  BundlePool& operator=(BundlePool&&) noexcept = default;

  const std::string& name() const { return name_; }
  /// Layers of the model that the pool serves, from its first.
  int layers() const { return layers_; }
  Arrangement arrangement() const { return arrangement_; }

  /// The pool of an entry. Its layers are the entry's slots: Entry::slot(LayerId) finds a model layer's. It has none if no kept layer owns it.
  template <class Entry>
  PagePool<typename Entry::policy, Backend, Side>& entry() {
    return *std::get<Bundle::template index_of<Entry>()>(entries_);
  }
  template <class Entry>
  const PagePool<typename Entry::policy, Backend, Side>& entry() const {
    return *std::get<Bundle::template index_of<Entry>()>(entries_);
  }

  template <class Space>
  Ledger& ledger() {
    return ledgers_[space_index<Space>];
  }
  template <class Space>
  const Ledger& ledger() const {
    return ledgers_[space_index<Space>];
  }

  /// Pages of one space, all or none.
  template <class Space>
  Result<std::vector<PageRef<page_id>>> allocate(std::int64_t n) {
    return ledger<Space>().allocate(n);
  }

  /// Pages of every space, all or none: when one space has too few, what the others gave goes back. Always in the same order of spaces, so
  /// that ranks that run the same requests agree.
  Result<Refs> allocate(const BundlePages<Bundle>& counts) {
    Refs refs;
    for (std::size_t i = 0; i < static_cast<std::size_t>(Bundle::space_count); ++i) {
      auto got = ledgers_[i].allocate(counts.count[i]);
      if (!got.ok()) {
        // Backwards, so that the next allocation finds the free stacks as this one did.
        for (std::size_t j = i; j-- > 0;) {
          while (!refs.refs[j].empty()) refs.refs[j].pop_back();
        }
        return got.error();
      }
      refs.refs[i] = std::move(got).value();
    }
    return refs;
  }

  /// Memory of all entries.
  Bytes bytes() const {
    Bytes sum;
    Bundle::for_each([&]<class Entry>() { sum += entry<Entry>().bytes(); });
    return sum;
  }

  /// Takes back pages of finished transfers in every space.
  void drain() {
    for (auto& ledger : ledgers_) ledger.drain();
  }

 private:
  BundlePool() = default;

  template <class Space>
  static constexpr auto space_index = static_cast<std::size_t>(Bundle::template index_of_space<Space>());

  // Spaces are numbered in the order of their first entries, so ledgers are made in that order.
  template <class Entry>
  Status make_entry(const Options& options) {
    using Space = typename Entry::space;
    constexpr std::size_t index = space_index<Space>;
    const std::string space = options.name + "." + Space::name;
    if (auto ok = Ledger::check_pages(space, options.pages.count[index]); !ok.ok()) return ok;
    const auto ledger = [&]() -> Result<Ledger> {
      if (index == ledgers_.size()) {
        auto made = Ledger::make(space, options.pages.count[index]);
        if (!made.ok()) return made;
        ledgers_.push_back(std::move(made).value());
      }
      return ledgers_[index];
    };
    const std::optional<AnyResource>& own = options.entry_memory[Bundle::template index_of<Entry>()];
    auto pool = pool_access::make_in<typename Entry::policy, Backend, Side>(ledger, {.layers = Entry::slots(options.layers),
                                                                                     .pages = options.pages.count[index],
                                                                                     .arrangement = options.arrangement,
                                                                                     .name = options.name + "." + Entry::name,
                                                                                     .memory = own ? own : options.memory,
                                                                                     .fill_on_free = options.fill_on_free});
    if (!pool.ok()) return pool.error();
    std::get<Bundle::template index_of<Entry>()>(entries_).emplace(std::move(pool).value());
    return {};
  }

  using Entries = decltype(detail::entry_pools<Backend, Side>(static_cast<const Bundle*>(nullptr)));

  std::string name_;
  int layers_ = 0;
  Arrangement arrangement_ = Arrangement::layer_first;
  std::vector<Ledger> ledgers_;
  Entries entries_;
};

template <class Bundle, class Backend>
using DeviceBundlePool = BundlePool<Bundle, Backend, DeviceSide>;
template <class Bundle, class Backend>
using HostBundlePool = BundlePool<Bundle, Backend, HostSide>;

template <class T>
inline constexpr bool is_bundle_pool = false;
template <class Bundle, class B, class S>
inline constexpr bool is_bundle_pool<BundlePool<Bundle, B, S>> = true;

/// The host pools behind a bundle's device pools: all entries, same policies and layers, `pages` pages per space.
template <class Bundle, class Backend>
Result<HostBundlePool<Bundle, Backend>> mirror_of(const DeviceBundlePool<Bundle, Backend>& device, const BundlePages<Bundle>& pages,
                                                  MirrorOptions options = {}) {
  return HostBundlePool<Bundle, Backend>::make({.pages = pages,
                                                .layers = device.layers(),
                                                .arrangement = options.arrangement.value_or(device.arrangement()),
                                                .name = options.name.empty() ? "host." + device.name() : options.name,
                                                .memory = std::move(options.memory),
                                                .fill_on_free = options.fill_on_free});
}

KVIRE_NAMESPACE_END
