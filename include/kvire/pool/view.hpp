// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/base/ids.hpp>
#include <kvire/pool/require.hpp>

KVIRE_NAMESPACE_BEGIN

/// Bytes from page 0 of a layer to page `page`. The product is formed in 64 bits: page 131,072 of 16 KiB starts at 2^31.
KVIRE_HD constexpr kstd::int64_t page_start(kstd::int64_t page_stride, kstd::int32_t page) {
  return page_stride * static_cast<kstd::int64_t>(page);
}

/// The pages of one layer of a pool, as kernels take them: three numbers, passed by value. What the bytes mean is in the type: the policy, and
/// the backend whose memory it is. A view owns nothing and waits for nothing; kernels get theirs from a lease.
template <class P, class Backend = Host>
struct PageView {
  static_assert(require_pool_policy<P>());
  using policy = P;
  using backend = Backend;

  kstd::byte* base = nullptr;       ///< page 0
  kstd::int64_t page_stride = 0;    ///< bytes from a page to the next, at least P::page_bytes
  kstd::int32_t pages = 0;          ///< ids are below this

  /// First byte of a page. Requires 0 <= id < pages.
  KVIRE_HD constexpr kstd::byte* page(kstd::int32_t id) const { return base + page_start(page_stride, id); }
  /// True for ids that kernels may write: not padding (-1), not the null page, not beyond the pool.
  KVIRE_HD constexpr bool writable(kstd::int32_t id) const { return id > null_page && id < pages; }
};

/// The same for readers.
template <class P, class Backend = Host>
struct ConstPageView {
  static_assert(require_pool_policy<P>());
  using policy = P;
  using backend = Backend;

  const kstd::byte* base = nullptr;
  kstd::int64_t page_stride = 0;
  kstd::int32_t pages = 0;

  constexpr ConstPageView() = default;
  KVIRE_HD constexpr ConstPageView(const kstd::byte* b, kstd::int64_t stride, kstd::int32_t n) : base(b), page_stride(stride), pages(n) {}
  KVIRE_HD constexpr ConstPageView(PageView<P, Backend> view) : base(view.base), page_stride(view.page_stride), pages(view.pages) {}

  KVIRE_HD constexpr const kstd::byte* page(kstd::int32_t id) const { return base + page_start(page_stride, id); }
};

KVIRE_NAMESPACE_END
