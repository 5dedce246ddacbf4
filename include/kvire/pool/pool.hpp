// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>

#include <kvire/base/units.hpp>
#include <kvire/pool/ledger.hpp>
#include <kvire/pool/slab.hpp>
#include <kvire/pool/view.hpp>

KVIRE_NAMESPACE_BEGIN

struct PoolOptions {
  int layers = 1;
  std::int64_t pages = 0;  ///< rows of memory a layer, the null page included: ids 1 to pages - 1 can be allocated
  Arrangement arrangement = Arrangement::layer_first;
  std::string name = {};                                 ///< for messages; none: side and policy
  std::int64_t page_multiple = 1;                        ///< a page's stride is rounded up to this, for readers that need it; the stride keeps the alignment by which pages are moved
  std::optional<AnyResource> memory = {};                ///< none: the backend's default for the side
  std::optional<unsigned char> fill_on_free = {};        ///< overwrite pages that become free, so that use after free shows
};

struct pool_access;

/// Pages of one layout policy for some layers, with their ownership. Use as DevicePool or HostPool. Move-only; all functions are safe from any
/// thread. Destroying it while pages are referenced or held frees nothing under them (see PageLedger).
/// Its bytes are reached through leases and transfers, not from here.
template <class P, class Backend, class Side>
class PagePool {
  static_assert(require_pool_policy<P>());
  static_assert(sizeof(rule::PoolBackend<Backend, is_backend<Backend>>) > 0);

 public:
  using policy = P;
  using backend = Backend;
  using side = Side;
  using page_id = typename Side::page_id;
  using Ref = PageRef<page_id>;
  using Hold = PageHold<page_id, Backend>;
  using Ledger = PageLedger<page_id, Backend>;

  /// Allocates zeroed memory for layers * pages pages. Errors: invalid_argument for counts; what the memory resource returns, with the bytes
  /// wanted.
  static Result<PagePool> make(PoolOptions options) {
    if (options.name.empty()) options.name = std::string(Side::name) + "." + P::name;
    if (options.layers < 1) {
      return Error{ErrorCode::invalid_argument, "pool " + options.name + ": " + std::to_string(options.layers) + " layers, below 1"};
    }
    if (auto ok = Ledger::check_pages(options.name, options.pages); !ok.ok()) return ok.error();
    return make_in([&] { return Ledger::make(options.name, options.pages); }, options);
  }

  PagePool(PagePool&&) noexcept = default;
  PagePool& operator=(PagePool&&) noexcept = default;

  const std::string& name() const { return name_; }
  int layers() const { return static_cast<int>(slab_->bases.size()); }
  std::int32_t pages() const { return slab_->pages; }
  /// Bytes from a page to the next of the same layer.
  std::int64_t page_stride() const { return slab_->page_stride; }
  /// Memory that the pool itself allocated; 0 if adopted.
  Bytes bytes() const { return Bytes(slab_->bytes()); }
  Arrangement arrangement() const { return arrangement_; }
  bool adopted() const { return adopted_; }

  /// Who owns its pages. Pools of one page-id space of a bundle have one ledger.
  Ledger& ledger() { return ledger_; }
  const Ledger& ledger() const { return ledger_; }

  Result<Ref> allocate() { return ledger_.allocate(); }
  Result<std::vector<Ref>> allocate(std::int64_t n) { return ledger_.allocate(n); }
  Result<Hold> hold(std::span<const page_id> ids, PageUse use, Event<Backend> event) { return ledger_.hold(ids, use, std::move(event)); }
  std::int32_t free_pages() const { return ledger_.free_pages(); }
  std::int32_t draining_pages() const { return ledger_.draining_pages(); }
  std::int32_t used_pages() const { return ledger_.used_pages(); }
  std::uint32_t generation(page_id page) const { return ledger_.generation(page); }

  /// Success for a row of memory, that of the null page included. Error out_of_range.
  Status check_row(page_id page) const {
    if (!page.none() && page.value < pages()) return {};
    return Error{ErrorCode::out_of_range, "pool " + name_ + ": " + page_id::tag::name + " " + std::to_string(page.value) + " is not in 0 to " +
                                              std::to_string(pages() - 1)};
  }
  /// Overwrites a page of all layers (poison for tests: the null page, say). Errors: out_of_range.
  Status fill_page(page_id page, unsigned char value) {
    if (auto ok = check_row(page); !ok.ok()) return ok;
    return slab_->fill_page(page.value, value);
  }

  /// Checks that pages freed before, and free now, still hold the fill pattern: somebody wrote a page after its free otherwise. The error names
  /// page, layer and first byte. For quiet moments; needs `fill_on_free`.
  Status verify_free() const
    requires AddressableMemory<Backend, Side>
  {
    if (!slab_->fill_on_free) return Error{ErrorCode::unsupported, "pool " + name_ + ": was made without fill_on_free"};
    for (std::int32_t id = null_page + 1; id < pages(); ++id) {
      const page_id page(id);
      if (ledger_.generation(page) == 0 || ledger_.owners(page) > 0 || ledger_.holds(page) > 0) continue;
      for (std::size_t layer = 0; layer < slab_->bases.size(); ++layer) {
        const auto bad = detail::first_other_byte(slab_->page(layer, id), 0, P::page_bytes, *slab_->fill_on_free);
        if (!bad.empty()) return damaged("free page", id, layer, bad);
      }
    }
    return {};
  }

  /// Checks the bytes of a page that the policy declares as padding, in all layers: nobody has a reason to write them.
  /// Errors: mismatch, naming layer and byte; out_of_range.
  Status verify_padding(page_id page, unsigned char expected = 0) const
    requires AddressableMemory<Backend, Side>
  {
    if (auto ok = check_row(page); !ok.ok()) return ok;
    for (std::size_t layer = 0; layer < slab_->bases.size(); ++layer) {
      const std::byte* const bytes = slab_->page(layer, page.value);
      auto bad = detail::first_other_byte(bytes, P::used_bytes, P::page_bytes - P::used_bytes, expected);
      for (const Section& s : P::table.sections) {
        for (int token = 0; s.padding && bad.empty() && token < P::tokens_per_page; ++token) {
          const std::int64_t row = P::table.plane_offset[s.plane] + P::table.row_bytes[s.plane] * token;
          bad = detail::first_other_byte(bytes, row + s.row_offset_bits / 8, s.size_bits / 8, expected);
        }
      }
      if (!bad.empty()) return damaged("padding of page", page.value, layer, bad);
    }
    return {};
  }

 private:
  friend struct pool_access;
  PagePool(Ledger ledger, std::shared_ptr<detail::Slab<Backend>> slab, std::string name, Arrangement arrangement, bool adopted)
      : ledger_(std::move(ledger)), slab_(std::move(slab)), name_(std::move(name)), arrangement_(arrangement), adopted_(adopted) {}

  // Options are checked but for the sizes; `layers` may be 0 here (an entry of a bundle that no kept layer owns). The pages come first: what does
  // not fit is refused before `make_ledger` fills tables for it.
  template <class MakeLedger>
  static Result<PagePool> make_in(MakeLedger make_ledger, const PoolOptions& options) {
    auto slab = make_slab(options);
    if (!slab.ok()) return slab.error();
    Result<Ledger> ledger = make_ledger();
    if (!ledger.ok()) return ledger.error();
    return over(std::move(ledger).value(), std::move(slab).value(), options);
  }
  static Result<std::shared_ptr<detail::Slab<Backend>>> make_slab(const PoolOptions& options) {
    if (options.arrangement != Arrangement::layer_first && options.arrangement != Arrangement::page_first) {
      return Error{ErrorCode::invalid_argument, "pool " + options.name + ": arrangement " + std::to_string(static_cast<int>(options.arrangement)) +
                                                    " is neither layer_first nor page_first"};
    }
    constexpr std::int64_t most = P::page_bytes * 4;
    const std::string multiple = "pool " + options.name + ": page multiple " + std::to_string(options.page_multiple);
    if (options.page_multiple < 1 || options.page_multiple > most) {
      return Error{ErrorCode::invalid_argument, multiple + " is not in 1 to " + std::to_string(most)};
    }
    const std::int64_t stride = align_up(P::page_bytes, options.page_multiple);
    if (stride % P::page_vector_bytes != 0) {
      return Error{ErrorCode::mismatch, multiple + " makes a page stride of " + std::to_string(stride) + ", not a multiple of " +
                                            std::to_string(P::page_vector_bytes) + " bytes, by which pages are moved"};
    }
    using Memory = BackendMemory<Backend, Side>;
    return detail::Slab<Backend>::make(options.name, {options.layers, options.pages, P::page_bytes, stride, options.arrangement},
                                       options.memory ? *options.memory : Memory::resource(stride), &Memory::fill);
  }
  static PagePool over(Ledger ledger, std::shared_ptr<detail::Slab<Backend>> slab, const PoolOptions& options) {
    slab->fill_on_free = options.fill_on_free;
    ledger.attach_memory(slab);
    return PagePool(std::move(ledger), std::move(slab), options.name, options.arrangement, false);
  }

  Error damaged(const char* what, std::int32_t id, std::size_t layer, const std::string& bad) const {
    return {ErrorCode::mismatch, "pool " + name_ + ": " + what + " " + std::to_string(id) + ", layer " + std::to_string(layer) + ": " + bad};
  }

  Ledger ledger_;
  std::shared_ptr<detail::Slab<Backend>> slab_;
  std::string name_;
  Arrangement arrangement_;
  bool adopted_;
};

/// The pool that kernels work on.
template <class P, class Backend>
using DevicePool = PagePool<P, Backend, DeviceSide>;
/// The pool behind it; made with mirror_of.
template <class P, class Backend>
using HostPool = PagePool<P, Backend, HostSide>;

template <class T>
inline constexpr bool is_page_pool = false;
template <class P, class B, class S>
inline constexpr bool is_page_pool<PagePool<P, B, S>> = true;

/// The door to a pool's bytes for what orders access to them: gates, transfers, adoption. Not for engines: a view from here waits for nothing.
struct pool_access {
  /// Requires 0 <= slot < layers().
  template <class P, class B, class S>
  static PageView<P, B> view(PagePool<P, B, S>& pool, EntrySlot slot) {
    return {pool.slab_->bases[static_cast<std::size_t>(slot.value)], pool.slab_->page_stride, pool.slab_->pages};
  }
  template <class P, class B, class S>
  static ConstPageView<P, B> const_view(const PagePool<P, B, S>& pool, EntrySlot slot) {
    return {pool.slab_->bases[static_cast<std::size_t>(slot.value)], pool.slab_->page_stride, pool.slab_->pages};
  }
  /// Keeps the bytes alive.
  template <class P, class B, class S>
  static std::shared_ptr<const void> memory(const PagePool<P, B, S>& pool) {
    return pool.slab_;
  }
  template <class P, class B, class S, class MakeLedger>
  static Result<PagePool<P, B, S>> make_in(MakeLedger make_ledger, const PoolOptions& options) {
    return PagePool<P, B, S>::make_in(std::move(make_ledger), options);
  }
  template <class P, class B, class S>
  static PagePool<P, B, S> adopt(PageLedger<typename S::page_id, B> ledger, std::shared_ptr<detail::Slab<B>> slab, std::string name) {
    ledger.attach_memory(slab);
    return PagePool<P, B, S>(std::move(ledger), std::move(slab), std::move(name), Arrangement::layer_first, true);
  }
};

KVIRE_NAMESPACE_END
