// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/kernel/body/copy_pages.hpp>

KVIRE_NAMESPACE_BEGIN
namespace body {

/// Everything that a token move reads and writes: pages of one layer each, in the same layout.
struct MoveTokensArgs {
  const kstd::byte* from = nullptr;  ///< page 0
  kstd::int64_t from_stride = 0;  ///< bytes from page to page
  kstd::int32_t from_pages = 0;
  kstd::byte* to = nullptr;  ///< page 0
  kstd::int64_t to_stride = 0;  ///< likewise
  kstd::int32_t to_pages = 0;
  const kstd::int64_t* from_slots = nullptr;  ///< [n]: page * tokens_per_page + token
  const kstd::int64_t* to_slots = nullptr;    ///< [n]
  kstd::int32_t first_page = 1;               ///< slots of pages below are dropped: 1 where page 0 is the null page
};

namespace detail {
template <LayoutPolicy P, int Plane, LaneGroup G>
KVIRE_HD void move_row(G g, kstd::byte* to_page, int to_token, const kstd::byte* from_page, int from_token) {
  constexpr int vector = P::template row_vector_bytes<Plane>;
  constexpr kstd::int64_t bytes = P::template row_bytes<Plane>();
  constexpr kstd::int64_t start = P::template plane_offset<Plane>();
  copy_vectors<vector>(g, to_page + start + bytes * to_token, from_page + start + bytes * from_token, bytes / vector);
}
}  // namespace detail

/// Moves one token, its row in every plane, from slot to slot (page * tokens_per_page + token) of pages that start at `from_base` and `to_base`.
/// Each plane by the widest vectors that its rows allow.
template <LayoutPolicy P, LaneGroup G>
KVIRE_HD void move_token(G g, kstd::byte* to_base, kstd::int64_t to_stride, kstd::int64_t to, const kstd::byte* from_base, kstd::int64_t from_stride, kstd::int64_t from) {
  constexpr kstd::int64_t tokens = P::tokens_per_page;
  kstd::byte* to_page = to_base + to_stride * (to / tokens);
  const kstd::byte* from_page = from_base + from_stride * (from / tokens);
  [&]<int... I>(kstd::integer_sequence<int, I...>) {
    (detail::move_row<P, I>(g, to_page, static_cast<int>(to % tokens), from_page, static_cast<int>(from % tokens)), ...);
  }(kstd::make_integer_sequence<int, P::plane_count>{});
}

/// The token-move body: work item `item` is one token, whose row in every plane moves from slot to slot; values, scales and padding inside
/// the rows stay together. Slots written must be distinct and not be read in the same launch.
template <LayoutPolicy P, LaneGroup G>
KVIRE_HD CopyCounts move_tokens(G g, kstd::int64_t item, const MoveTokensArgs& args) {
  constexpr kstd::int64_t tokens = P::tokens_per_page;
  const kstd::int64_t from = args.from_slots[item];
  const kstd::int64_t to = args.to_slots[item];
  const CopyCounts counts =
      classify(from, args.from_pages * tokens, to, args.to_pages * tokens, args.first_page * tokens);
  if (counts.copied != 0) move_token<P>(g, args.to, args.to_stride, to, args.from, args.from_stride, from);
  return counts;
}

}  // namespace body
KVIRE_NAMESPACE_END
