// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/base/ints.hpp>
#include <kvire/kernel/group.hpp>
#include <kvire/layout/require.hpp>

KVIRE_NAMESPACE_BEGIN

/// What became of the pages of a gather.
struct GatherCounts {
  kstd::int64_t pages = 0;      ///< gathered, whole or up to the length
  kstd::int64_t skipped = 0;    ///< -1 entries within a length: the output rows stay as they are
  kstd::int64_t bad_pages = 0;  ///< entries beyond the pool within a length: likewise

  KVIRE_HD constexpr GatherCounts& operator+=(const GatherCounts& other) {
    pages += other.pages;
    skipped += other.skipped;
    bad_pages += other.bad_pages;
    return *this;
  }
};

namespace body {

/// Everything that a gather reads and writes. Plain values, to be passed by value to a kernel. Plane i of the policy (say the values, or the
/// scales) becomes a contiguous array of rows, row_bytes<i>() each, token after token.
template <LayoutPolicy P>
struct GatherArgs {
  const kstd::byte* pages = nullptr;  ///< page 0 of one layer
  kstd::int64_t page_stride = 0;  ///< bytes
  kstd::int32_t page_count = 0;

  const kstd::int32_t* page_table = nullptr;  ///< [batch][max_pages]
  kstd::int64_t max_pages = 0;
  const kstd::int32_t* lengths = nullptr;  ///< [batch] cached tokens, at most max_pages * tokens_per_page are gathered
  const kstd::int64_t* starts = nullptr;   ///< [batch] output row of a request's first token; null: request b starts at b * max_pages * tokens_per_page
  kstd::int32_t batch = 0;

  kstd::byte* planes[P::plane_count] = {};  ///< outputs; null: the plane is not gathered

  KVIRE_HD kstd::int64_t start(kstd::int64_t b) const { return starts != nullptr ? starts[b] : b * max_pages * P::tokens_per_page; }
};

namespace detail {

// Moves `bytes` with all lanes by the widest vectors that both ends and the size allow; `Largest` bounds them from what is known of the source.
template <int Largest, LaneGroup G>
KVIRE_HD void copy_run(G g, kstd::byte* to, const kstd::byte* from, kstd::int64_t bytes) {
  struct alignas(Largest) Vector {
    unsigned char bytes[Largest];
  };
  if (((reinterpret_cast<kstd::uintptr_t>(to) | reinterpret_cast<kstd::uintptr_t>(from) | static_cast<kstd::uintptr_t>(bytes)) & (Largest - 1)) == 0) {
    g.each([&](int lane) {
      for (kstd::int64_t i = lane; i < bytes / Largest; i += G::size) {
        Vector v;
        __builtin_memcpy(&v, __builtin_assume_aligned(from + i * Largest, Largest), Largest);
        __builtin_memcpy(__builtin_assume_aligned(to + i * Largest, Largest), &v, Largest);
      }
    });
  } else if constexpr (Largest > 1) {
    copy_run<Largest / 4 == 0 ? 1 : Largest / 4>(g, to, from, bytes);
  }
}

}  // namespace detail

/// The gather body: work item `item` is one entry of the page table; its rows up to the request's length go, plane by plane, to the
/// request's rows of the outputs. Nothing else is written, no row beyond a length is read.
template <LayoutPolicy P, LaneGroup G>
KVIRE_HD GatherCounts gather(G g, kstd::int64_t item, const GatherArgs<P>& args) {
  GatherCounts counts;
  const kstd::int64_t b = item / args.max_pages;
  const kstd::int64_t first = item % args.max_pages * P::tokens_per_page;
  const kstd::int64_t length = args.lengths[b];
  if (first >= length) return counts;
  const kstd::int32_t id = args.page_table[item];
  if (id < 0 || id >= args.page_count) {
    (id < 0 ? counts.skipped : counts.bad_pages) = 1;
    return counts;
  }
  counts.pages = 1;
  const kstd::int64_t rows = length - first < P::tokens_per_page ? length - first : P::tokens_per_page;
  const kstd::byte* page = args.pages + args.page_stride * id;
  const kstd::int64_t at = args.start(b) + first;
  [&]<int... I>(kstd::integer_sequence<int, I...>) {
    ((args.planes[I] != nullptr
          ? detail::copy_run<16>(g, args.planes[I] + at * P::template row_bytes<I>(), page + P::template plane_offset<I>(), rows * P::template row_bytes<I>())
          : void()),
     ...);
  }(kstd::make_integer_sequence<int, P::plane_count>{});
  return counts;
}

}  // namespace body
KVIRE_NAMESPACE_END
