// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/pool/adopted_memory.hpp>
#include <kvire/pool/pool.hpp>

KVIRE_NAMESPACE_BEGIN

/// Another engine's cache, as its owner describes it.
struct AdoptOptions {
  std::vector<std::byte*> bases = {};     ///< page 0 of each layer, in the order of the layers that have one
  std::int64_t page_stride = 0;           ///< bytes from a page to the next of one layer; may exceed the page (padding, layers inside the page)
  std::int64_t pages = 0;                 ///< pages of a layer, the null page (0) included
  std::int64_t bytes_per_layer = 0;       ///< bytes from each base to the end of its buffer: stated apart, so that it can disagree
  std::string name = {};
  std::shared_ptr<void> owner = {};       ///< kept alive with the pool; none: the caller guarantees it
};

namespace detail {

// The pages of one layer of an adopted cache.
template <class P>
PageRuns runs_of(const AdoptOptions& o, std::size_t layer) {
  return {reinterpret_cast<std::uintptr_t>(o.bases[layer]), o.page_stride, o.pages, P::page_bytes};
}

template <class P>
Status check_adopted(const AdoptOptions& o) {
  const std::string who = "adopting " + o.name + " as " + P::name + ": ";
  const auto number = [](std::int64_t n) { return std::to_string(n); };
  if (o.bases.empty()) return Error{ErrorCode::invalid_argument, who + "no layer"};
  if (o.pages < 2 || o.pages > INT64_C(0x7FFFFFFF)) {
    return Error{ErrorCode::invalid_argument, who + number(o.pages) + " pages; ids are 32 bits and page 0 is the null page"};
  }
  if (o.page_stride < P::page_bytes) {
    return Error{ErrorCode::mismatch, who + "page stride " + number(o.page_stride) + " is below the page's " + number(P::page_bytes) + " bytes"};
  }
  constexpr std::int64_t vector = P::page_vector_bytes;
  if (o.page_stride % vector != 0) {
    return Error{ErrorCode::mismatch, who + "page stride " + number(o.page_stride) + " is not a multiple of " + number(vector) +
                                          " bytes, by which pages are moved"};
  }
  const std::int64_t most = checked_mul(o.page_stride, o.pages);
  if (most < 0) {
    return Error{ErrorCode::mismatch, who + number(o.pages) + " pages " + number(o.page_stride) + " bytes apart do not fit 63 bits"};
  }
  const std::int64_t least = most - o.page_stride + P::page_bytes;
  if (o.bytes_per_layer < least || o.bytes_per_layer > most) {
    return Error{ErrorCode::mismatch, who + number(o.bytes_per_layer) + " bytes a layer, but " + number(o.pages) + " pages " +
                                          number(o.page_stride) + " bytes apart are " + (least == most ? "" : number(least) + " to ") + number(most) +
                                          (o.bytes_per_layer < least ? "" : ": leave what lies behind the last page out of bytes_per_layer, or say how many pages there are")};
  }
  for (std::size_t i = 0; i < o.bases.size(); ++i) {
    const auto address = reinterpret_cast<std::uintptr_t>(o.bases[i]);
    if (o.bases[i] == nullptr) return Error{ErrorCode::invalid_argument, who + "the base of layer " + std::to_string(i) + " is null"};
    if (address % static_cast<std::uintptr_t>(vector) != 0) {
      return Error{ErrorCode::mismatch, who + "the base of layer " + std::to_string(i) + " is " +
                                            std::to_string(address % static_cast<std::uintptr_t>(vector)) + " bytes beyond a multiple of " +
                                            number(vector) + " bytes, by which pages are moved"};
    }
    if (address > UINTPTR_MAX - static_cast<std::uintptr_t>(o.bytes_per_layer)) {
      return Error{ErrorCode::out_of_range, who + number(o.bytes_per_layer) + " bytes from the base of layer " + std::to_string(i) +
                                                " on reach beyond the address space"};
    }
    for (std::size_t j = 0; j < i; ++j) {
      if (pages_meet(runs_of<P>(o, j), runs_of<P>(o, i))) {
        return Error{ErrorCode::duplicate, who + "layers " + std::to_string(j) + " and " + std::to_string(i) + " overlap: their bases are " +
                                                  number(o.bases[i] < o.bases[j] ? o.bases[j] - o.bases[i] : o.bases[i] - o.bases[j]) +
                                                  " bytes apart, pages of " + number(P::page_bytes) + " bytes every " + number(o.page_stride)};
      }
    }
  }
  return {};
}

template <class P, class Backend, class Side>
Result<PagePool<P, Backend, Side>> adopt_with(AdoptOptions options, Result<PageLedger<typename Side::page_id, Backend>> ledger) {
  if (!ledger.ok()) return ledger.error();
  std::vector<PageRuns> layers;
  for (std::size_t layer = 0; layer < options.bases.size(); ++layer) layers.push_back(runs_of<P>(options, layer));
  auto claim = AdoptedMemory::claim(options.name, std::move(layers), std::move(options.owner));
  if (!claim.ok()) return claim.error();
  auto slab = Slab<Backend>::adopt(std::move(options.bases), options.page_stride, static_cast<std::int32_t>(options.pages), P::page_bytes,
                                   std::move(claim).value(), &BackendMemory<Backend, Side>::fill);
  return pool_access::adopt<P, Backend, Side>(std::move(ledger).value(), std::move(slab), options.name);
}

template <class P>
void name_adopted(AdoptOptions& options) {
  if (options.name.empty()) options.name = std::string("adopted.") + P::name;
}

}  // namespace detail

/// A pool over memory that somebody else allocated, of the layout that the caller names: nothing is derived from shapes or sizes, they are
/// only checked. Pages are allocated by the pool, so nobody else may. The memory is neither zeroed nor freed.
/// Errors: mismatch, with both numbers, for a stride, an alignment or a byte count that the policy contradicts; duplicate for overlapping
/// layers; busy for pages that a pool has adopted which is still there, or what holds its pages; invalid_argument for counts; out_of_range for a buffer
/// beyond the address space.
template <class P = void, class Backend = Host, class Side = DeviceSide>
auto adopt(AdoptOptions options) {
  (void)sizeof(rule::AdoptPolicy<P>);
  if constexpr (!std::is_void_v<P>) {
    static_assert(require_pool_policy<P>());
    detail::name_adopted<P>(options);
    using Ledger = PageLedger<typename Side::page_id, Backend>;
    if (auto ok = detail::check_adopted<P>(options); !ok.ok()) return Result<PagePool<P, Backend, Side>>(ok.error());
    const auto name = options.name;
    const auto pages = options.pages;
    return detail::adopt_with<P, Backend, Side>(std::move(options), Ledger::make(name, pages));
  }
}

/// The same where another allocator owns the pages (see OutsidePages): `allocate` is refused, transfers retain and release through it.
/// Additional errors: mismatch if the allocator's count of pages is not that of the memory; busy if its page 0 has owners, which is the null page here.
template <class P = void, class Backend = Host, class Side = DeviceSide, OutsidePages Allocator>
auto adopt(AdoptOptions options, Allocator allocator) {
  (void)sizeof(rule::AdoptPolicy<P>);
  if constexpr (!std::is_void_v<P>) {
    static_assert(require_pool_policy<P>());
    detail::name_adopted<P>(options);
    using Pool = PagePool<P, Backend, Side>;
    using Ledger = PageLedger<typename Side::page_id, Backend>;
    if (auto ok = detail::check_adopted<P>(options); !ok.ok()) return Result<Pool>(ok.error());
    const std::int64_t ids = allocator.pages();
    if (ids != options.pages) {
      return Result<Pool>(Error{ErrorCode::mismatch, "adopting " + options.name + ": its allocator has " + std::to_string(ids) + " pages, its memory " +
                                                         std::to_string(options.pages)});
    }
    if (const std::int64_t owners = allocator.owners(null_page); owners > 0) {
      return Result<Pool>(Error{ErrorCode::busy, "adopting " + options.name + ": its allocator has given page 0 to " + std::to_string(owners) +
                                                     " owners, but page 0 is the null page: transfers refuse it and kernels drop what is stored there. Take it out of "
                                                     "use and let owners(0) be 0, or adopt memory with one page more in front and ids from 1"});
    }
    const auto name = options.name;
    return detail::adopt_with<P, Backend, Side>(std::move(options), Ledger::over(name, std::move(allocator)));
  }
}

KVIRE_NAMESPACE_END
