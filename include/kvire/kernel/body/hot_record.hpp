// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/base/ids.hpp>
#include <kvire/base/ints.hpp>

KVIRE_NAMESPACE_BEGIN

/// What became of the tokens listed for a hot set, added up over rows.
struct HotCounts {
  kstd::int64_t hits = 0;           ///< different tokens that had a slot
  kstd::int64_t misses = 0;         ///< different tokens that were given one
  kstd::int64_t repeated = 0;       ///< listed again
  kstd::int64_t skipped = 0;        ///< negative positions, and all of padded rows
  kstd::int64_t bad_positions = 0;  ///< beyond the row's page table: no slot
  kstd::int64_t bad_pages = 0;      ///< different tokens without a slot and without a page of the host: no slot
  kstd::int64_t bad_rows = 0;       ///< rows beyond the set, or named twice in a batch: nothing of them has a slot

  KVIRE_HD constexpr HotCounts& operator+=(const HotCounts& other) {
    hits += other.hits;
    misses += other.misses;
    repeated += other.repeated;
    skipped += other.skipped;
    bad_positions += other.bad_positions;
    bad_pages += other.bad_pages;
    bad_rows += other.bad_rows;
    return *this;
  }
};

namespace body {

/// The two places of a token, each page * tokens_per_page + token.
struct alignas(16) TokenPlaces {
  kstd::int64_t host = -1;
  kstd::int64_t device = -1;
};

/// A layer's record of which token each slot of a row holds. Zero bytes: nothing is held and no step has been.
struct HotRecord {
  /// 32-bit words of a row: its clock, then for each slot the token's position + 1, then for each slot the clock's value at its last use.
  KVIRE_HD static constexpr kstd::int64_t words(kstd::int64_t slots) { return 4 + 2 * align_up(slots, kstd::int64_t(4)); }

  kstd::uint32_t* clock;
  kstd::uint32_t* held;
  kstd::uint32_t* used;
  KVIRE_HD HotRecord(kstd::uint32_t* row, kstd::int64_t slots) : clock(row), held(row + 4), used(row + 4 + align_up(slots, kstd::int64_t(4))) {}
};

/// Everything that placing tokens reads and writes, but for the group's own scratch.
template <class Slot>
struct PlaceTokensArgs {
  kstd::uint32_t* records = nullptr;  ///< of the layer: [rows] of HotRecord::words(slots)
  kstd::int32_t rows = 0;
  kstd::int32_t slots = 0;             ///< of a row, at least n
  kstd::int64_t row_slots = 0;         ///< from a row's first slot in the pool to the next row's: whole pages
  kstd::int32_t tokens_per_page = 1;
  const kstd::int32_t* row_ids = nullptr;    ///< [batch]; null: 0, 1, ...
  const kstd::int32_t* positions = nullptr;  ///< [batch][n]
  kstd::int32_t batch = 0;
  kstd::int32_t n = 0;
  const kstd::int32_t* host_pages = nullptr;  ///< [batch][max_pages]
  kstd::int64_t max_pages = 0;
  kstd::int32_t host_page_count = 0;  ///< ids are below
  Slot* out = nullptr;                ///< [batch][n]: slots of the pool
  TokenPlaces* misses = nullptr;      ///< [batch][n]: what has to be fetched, the first miss_counts[b] of each row; null: nothing has
  kstd::int32_t* miss_counts = nullptr;  ///< [batch]

  /// The first slot of a row: page 0 of the pool is the null page.
  KVIRE_HD kstd::int64_t first_slot(kstd::int64_t row) const { return tokens_per_page + row * row_slots; }
  /// Whether a position is one of the row's page table.
  KVIRE_HD bool known(kstd::int32_t position) const { return position >= 0 && position < max_pages * tokens_per_page; }
  /// Where the host has a token of batch row b, -1 if nowhere. Requires known(position).
  KVIRE_HD kstd::int64_t on_host(kstd::int64_t b, kstd::int32_t position) const {
    const kstd::int32_t page = host_pages[b * max_pages + position / tokens_per_page];
    return page > null_page && page < host_page_count ? kstd::int64_t(page) * tokens_per_page + position % tokens_per_page : -1;
  }
  /// The same for the i-th position of the batch, whatever it is: one without a page of the table is beyond every pool, so that it is counted.
  KVIRE_HD kstd::int64_t host_slot(kstd::int64_t i) const {
    const kstd::int32_t position = positions[i];
    return position < 0 ? -1 : known(position) ? on_host(i / n, position) : kstd::int64_t(0x7FFFFFFF) * tokens_per_page;
  }
};

}  // namespace body
KVIRE_NAMESPACE_END
