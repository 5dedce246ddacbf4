// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/kernel/body/copy_pages.hpp>
#include <kvire/kernel/body/store.hpp>

KVIRE_NAMESPACE_BEGIN
namespace body {

/// Everything that a migration reads and writes: pages of one layer each, in two layouts of the same dim and tokens.
struct MigrateArgs {
  CopyPagesArgs pages;  ///< from pages of the one layout to pages of the other
  RowOptions row;       ///< how the rows are encoded
};

namespace detail {
// The elements of lane `lane` of row `token`, decoded.
template <LayoutPolicy From, class Split, class F>
KVIRE_HD void decode_piece(float* x, int lane, const kstd::byte* page, int token) {
  for (int i = 0; i < Split::elements; ++i) {
    const int index = lane * Split::elements + i - F::first;
    if (index < 0 || index >= F::count) continue;
    const kstd::uint32_t code = load_code<F::element>(page + F::offset(token), index);
    if constexpr (F::scaled) {
      using Codec = ScaleCodec<From>;
      using S = RowField<From, From::template section_of<role::Scale>>;
      x[i] = Codec::decode(code, load_code<S::element>(page + S::offset(token), index / Codec::block));
    } else {
      x[i] = decode_element<F::element>(code);
    }
  }
}
}  // namespace detail

/// Decodes row `token` of a page in the layout `From` and encodes it as `To`: the bytes of decode_row and encode_row.
template <LayoutPolicy From, LayoutPolicy To, LaneGroup G>
KVIRE_HD void migrate_row(G g, const kstd::byte* from, kstd::byte* to, int token, const RowOptions& row) {
  using Split = RowSplit<To, G::size>;
  typename G::template Lanes<RowPiece<Split::elements>> pieces;
  g.each([&](int lane) {
    if (lane >= Split::lanes) return;
    for_each_field<From>([&](auto field) {
      using F = decltype(field);
      if constexpr (F::logical) detail::decode_piece<From, Split, F>(pieces[lane].x, lane, from, token);
    });
  });
  store_pieces<To>(g, pieces, to, token, row);
}

/// The migrate body: work item `pair * tokens_per_page + token` is one row. Padding of pages stays as it is. A pair of ids counts once, with its
/// first token.
template <LayoutPolicy From, LayoutPolicy To, LaneGroup G>
KVIRE_HD CopyCounts migrate(G g, kstd::int64_t item, const MigrateArgs& args) {
  const kstd::int64_t pair = item / From::tokens_per_page;
  const auto token = static_cast<int>(item % From::tokens_per_page);
  const kstd::int64_t from = args.pages.from_ids[pair];
  const kstd::int64_t to = args.pages.to_ids[pair];
  const CopyCounts counts = classify(from, args.pages.from_pages, to, args.pages.to_pages, args.pages.first_page);
  if (counts.copied != 0) {
    migrate_row<From, To>(g, args.pages.from + args.pages.from_stride * from, args.pages.to + args.pages.to_stride * to, token, args.row);
  }
  return token == 0 ? counts : CopyCounts{};
}

}  // namespace body
KVIRE_NAMESPACE_END
