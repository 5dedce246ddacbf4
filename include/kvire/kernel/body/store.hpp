// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/kernel/body/prologue.hpp>

KVIRE_NAMESPACE_BEGIN

/// What became of the rows of a store.
struct StoreCounts {
  kstd::int64_t stored = 0;
  kstd::int64_t skipped = 0;        ///< negative slots: padding rows
  kstd::int64_t null_page = 0;      ///< slots of the null page, where padding rows of other engines point: dropped
  kstd::int64_t bad_slots = 0;      ///< slots beyond the pool, or of a page that the lease does not cover: dropped
  kstd::int64_t bad_positions = 0;  ///< positions that the RoPE tables do not have: dropped

  KVIRE_HD constexpr StoreCounts& operator+=(const StoreCounts& other) {
    stored += other.stored;
    skipped += other.skipped;
    null_page += other.null_page;
    bad_slots += other.bad_slots;
    bad_positions += other.bad_positions;
    return *this;
  }
};

namespace body {

/// Everything that a store reads and writes. Plain values, to be passed by value to a kernel.
template <LayoutPolicy P>
struct StoreArgs {
  const void* rows = nullptr;  ///< [n][row_stride], P::dim elements used of each
  Element row_element = Element::f32;  ///< f32 or bf16
  kstd::int64_t row_stride = P::dim;   ///< elements from a row to the next
  const kstd::int64_t* slots = nullptr;  ///< [n]: page * tokens_per_page + token; negative: the row is skipped

  kstd::byte* pages = nullptr;  ///< page 0 of one layer
  kstd::int64_t page_stride = 0;  ///< bytes
  kstd::int32_t page_count = 0;
  kstd::int32_t first_page = 1;  ///< pages below are dropped: 1 where page 0 is the null page, 0 where the caller owns it

  RowOptions options;
  Prologue prologue;

  KVIRE_HD float element(kstd::int64_t index) const {
    if (row_element == Element::bf16) return f32_from_bf16(static_cast<const kstd::uint16_t*>(rows)[index]);
    return static_cast<const float*>(rows)[index];
  }
};

namespace detail {

// Scale blocks that one lane touches, and lanes that share one block.
template <LayoutPolicy P, class Split>
inline constexpr int lane_blocks = Split::elements > P::Scaling::block ? Split::elements / P::Scaling::block : 1;
template <LayoutPolicy P, class Split>
inline constexpr int block_lanes = P::Scaling::block > Split::elements ? P::Scaling::block / Split::elements : 1;

template <int N>
struct Keys {
  kstd::uint32_t key[N];
};

// Each lane's amax keys become those of the whole block.
template <LayoutPolicy P, class Split, class F, LaneGroup G, class LaneKeys>
KVIRE_HD void share_keys(G g, LaneKeys& keys) {
  constexpr int width = block_lanes<P, Split>;
  constexpr int first_lane = F::first / Split::elements;
  const auto max = [](kstd::uint32_t a, kstd::uint32_t b) { return a > b ? a : b; };
  if constexpr (width == 1) {
    return;
  } else if constexpr (is_power_of_two(width) && first_lane % width == 0 && width <= G::size) {
    typename G::template Lanes<kstd::uint32_t> key;
    g.each([&](int lane) { key[lane] = keys[lane].key[0]; });
    reduce_runs<width>(g, key, max);
    g.each([&](int lane) { keys[lane].key[0] = key[lane]; });
  } else {
    for (int b = 0; b < F::count / P::Scaling::block; ++b) {
      typename G::template Lanes<kstd::uint32_t> key;
      const auto inside = [&](int lane) { return lane >= first_lane + b * width && lane < first_lane + (b + 1) * width; };
      g.each([&](int lane) { key[lane] = inside(lane) ? keys[lane].key[0] : 0; });
      reduce(g, key, max);
      g.each([&](int lane) {
        if (inside(lane)) keys[lane].key[0] = key[lane];
      });
    }
  }
}

template <class F, class Split>
KVIRE_HD constexpr bool owns(int lane) {
  const int first = lane * Split::elements;
  return first >= F::first && first < F::first + F::count;
}

template <LayoutPolicy P, class Split, class F, LaneGroup G, class Pieces>
KVIRE_HD void store_scaled(G g, const Pieces& pieces, kstd::byte* page, int token, const RowOptions& options) {
  using Codec = ScaleCodec<P>;
  using S = RowField<P, P::template section_of<role::Scale>>;
  constexpr int blocks = lane_blocks<P, Split>;
  constexpr int run = Split::elements / blocks;  // elements of one block in one lane
  constexpr int run_alignment = static_cast<int>(power_of_two_divisor(kstd::int64_t(F::byte_alignment | (run * bits(F::element) / 8)), kstd::int64_t(16)));

  typename G::template Lanes<Keys<blocks>> keys;
  g.each([&](int lane) {
    for (int b = 0; b < blocks; ++b) {
      kstd::uint32_t key = 0;
      for (int i = 0; i < run && owns<F, Split>(lane); ++i) {
        const kstd::uint32_t k = Codec::amax_key(prepare_bits(bits_of(pieces[lane].x[b * run + i]), options));
        key = k > key ? k : key;
      }
      keys[lane].key[b] = key;
    }
  });
  share_keys<P, Split, F>(g, keys);
  g.each([&](int lane) {
    if (!owns<F, Split>(lane)) return;
    for (int b = 0; b < blocks; ++b) {
      const BlockScale scale = Codec::make(keys[lane].key[b]);
      const int index = lane * Split::elements - F::first + b * run;
      if (index % Codec::block == 0) store_codes<S::element>(page + S::offset(token), index / Codec::block, {scale.code});
      kstd::uint32_t codes[run];
      for (int i = 0; i < run; ++i) codes[i] = Codec::encode(prepare_bits(bits_of(pieces[lane].x[b * run + i]), options), scale, options.ties);
      store_codes<F::element, run, run_alignment>(page + F::offset(token), index, codes);
    }
  });
}

template <LayoutPolicy P, class Split, class F, LaneGroup G, class Pieces>
KVIRE_HD void store_plain(G g, const Pieces& pieces, kstd::byte* page, int token, const RowOptions& options) {
  (void)sizeof(rule::NumberFields<P, F::element>);
  constexpr int run = Split::elements;
  constexpr int run_alignment = static_cast<int>(power_of_two_divisor(kstd::int64_t(F::byte_alignment | (run * bits(F::element) / 8)), kstd::int64_t(16)));
  g.each([&](int lane) {
    if (!owns<F, Split>(lane)) return;
    if constexpr (NumberElement<F::element>) {
      kstd::uint32_t codes[run];
      for (int i = 0; i < run; ++i) codes[i] = encode_element<F::element>(prepare_bits(bits_of(pieces[lane].x[i]), options), options.ties);
      store_codes<F::element, run, run_alignment>(page + F::offset(token), lane * run - F::first, codes);
    }
  });
}

}  // namespace detail

/// Encodes the row that the lanes hold into row `token` of a page: the bytes of encode_row, written by the whole group.
template <LayoutPolicy P, LaneGroup G, class Pieces>
KVIRE_HD void store_pieces(G g, const Pieces& pieces, kstd::byte* page, int token, const RowOptions& options) {
  using Split = RowSplit<P, G::size>;
  if constexpr (Split::lanes == 1) {
    g.each([&](int lane) {
      if (lane == 0) encode_row<P>(pieces[lane].x, page, token, options);
    });
  } else {
    for_each_field<P>([&](auto field) {
      using F = decltype(field);
      if constexpr (F::scaled) {
        detail::store_scaled<P, Split, F>(g, pieces, page, token, options);
      } else if constexpr (F::logical) {
        detail::store_plain<P, Split, F>(g, pieces, page, token, options);
      } else if constexpr (F::padding) {
        g.each([&](int lane) {
          if (lane == 0) kvire::detail::zero_padding<F>(page, token);
        });
      }
    });
  }
}

/// The store body: work item `item` is one row, taken through the prologue, encoded and written where its slot says. Rows with the same slot
/// race; every other byte of the pool stays as it is. Returns what became of the row.
template <LayoutPolicy P, LaneGroup G>
KVIRE_HD StoreCounts store(G g, kstd::int64_t item, const StoreArgs<P>& args) {
  StoreCounts counts;
  const kstd::int64_t slot = args.slots[item];
  const kstd::int64_t id = slot / P::tokens_per_page;
  if (slot < 0) {
    counts.skipped = 1;
  } else if (id >= args.page_count) {
    counts.bad_slots = 1;
  } else if (id < args.first_page) {
    counts.null_page = 1;
  } else if (args.prologue.rope_dims > 0 && (args.prologue.position(item) < 0 || args.prologue.position(item) >= args.prologue.table_rows)) {
    counts.bad_positions = 1;
  } else {
    counts.stored = 1;
    using Split = RowSplit<P, G::size>;
    typename G::template Lanes<RowPiece<Split::elements>> pieces;
    g.each([&](int lane) {
      const kstd::int64_t first = item * args.row_stride + kstd::int64_t(lane) * Split::elements;
      for (int i = 0; i < Split::elements; ++i) pieces[lane].x[i] = lane < Split::lanes ? args.element(first + i) : 0.0F;
    });
    if (args.prologue.any()) apply_prologue<Split>(g, pieces, args.prologue, item);
    store_pieces<P>(g, pieces, args.pages + args.page_stride * id, static_cast<int>(slot % P::tokens_per_page), args.options);
  }
  return counts;
}

}  // namespace body
KVIRE_NAMESPACE_END
