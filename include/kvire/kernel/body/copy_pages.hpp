// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/codec/element.hpp>
#include <kvire/kernel/group.hpp>
#include <kvire/layout/require.hpp>

KVIRE_NAMESPACE_BEGIN

/// What became of the pages or tokens of a copy.
struct CopyCounts {
  kstd::int64_t copied = 0;
  kstd::int64_t skipped = 0;    ///< negative ids on either side
  kstd::int64_t null_page = 0;  ///< from or to the null page: dropped
  kstd::int64_t bad_ids = 0;    ///< beyond the pool on either side, or not covered by the lease: dropped

  KVIRE_HD constexpr CopyCounts& operator+=(const CopyCounts& other) {
    copied += other.copied;
    skipped += other.skipped;
    null_page += other.null_page;
    bad_ids += other.bad_ids;
    return *this;
  }
};

namespace body {

/// Moves `count` vectors of `Bytes` bytes (a power of two; both ends aligned to it) with all lanes, neighbours side by side.
template <int Bytes, LaneGroup G>
KVIRE_HD void copy_vectors(G g, kstd::byte* to, const kstd::byte* from, kstd::int64_t count) {
  struct alignas(Bytes) Vector {
    unsigned char bytes[Bytes];
  };
  g.each([&](int lane) {
    for (kstd::int64_t i = lane; i < count; i += G::size) {
      Vector v;
      ::memcpy(&v, __builtin_assume_aligned(from + i * Bytes, Bytes), Bytes);
      ::memcpy(__builtin_assume_aligned(to + i * Bytes, Bytes), &v, Bytes);
    }
  });
}

/// Everything that a page copy reads and writes: pages of one layer each, in the same layout.
struct CopyPagesArgs {
  const kstd::byte* from = nullptr;  ///< page 0
  kstd::int64_t from_stride = 0;  ///< bytes from page to page
  kstd::int32_t from_pages = 0;
  kstd::byte* to = nullptr;  ///< page 0
  kstd::int64_t to_stride = 0;  ///< likewise
  kstd::int32_t to_pages = 0;
  const kstd::int32_t* from_ids = nullptr;  ///< [n]
  const kstd::int32_t* to_ids = nullptr;    ///< [n]
  kstd::int32_t first_page = 1;             ///< ids below are dropped: 1 where page 0 is the null page
};

/// Sorts a pair of ids: counted as copied only if the bytes may move.
KVIRE_HD constexpr CopyCounts classify(kstd::int64_t from, kstd::int64_t from_pages, kstd::int64_t to, kstd::int64_t to_pages, kstd::int64_t first_page) {
  CopyCounts counts;
  if (from < 0 || to < 0) {
    counts.skipped = 1;
  } else if (from >= from_pages || to >= to_pages) {
    counts.bad_ids = 1;
  } else if (from < first_page || to < first_page) {
    counts.null_page = 1;
  } else {
    counts.copied = 1;
  }
  return counts;
}

/// The page-copy body: work item `item` is one whole page, its padding with it, moved by the widest vectors that the policy's pages allow.
/// Pages written must be distinct and not be read in the same launch.
template <LayoutPolicy P, LaneGroup G>
KVIRE_HD CopyCounts copy_pages(G g, kstd::int64_t item, const CopyPagesArgs& args) {
  const kstd::int64_t from = args.from_ids[item];
  const kstd::int64_t to = args.to_ids[item];
  const CopyCounts counts = classify(from, args.from_pages, to, args.to_pages, args.first_page);
  if (counts.copied != 0) {
    constexpr int vector = P::page_vector_bytes;
    copy_vectors<vector>(g, args.to + args.to_stride * to, args.from + args.from_stride * from, P::page_bytes / vector);
  }
  return counts;
}

}  // namespace body
KVIRE_NAMESPACE_END
