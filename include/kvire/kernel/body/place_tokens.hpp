// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/kernel/body/hot_record.hpp>
#include <kvire/kernel/body/place_scratch.hpp>
#include <kvire/kernel/group.hpp>

KVIRE_NAMESPACE_BEGIN

namespace body {

namespace detail {

// The tokens that have no slot yet, each by the first place that lists it. Lists those that the host has, in the order of the list, and returns how
// many; in the upper half how many it does not have.
template <class G, class Slot>
KVIRE_HD kstd::uint32_t list_misses(G g, kstd::int64_t b, const PlaceTokensArgs<Slot>& args, const PlaceScratch& scratch) {
  const kstd::int64_t n = args.n;
  const kstd::int32_t* const list = args.positions + b * n;
  g.each([&](int lane) {
    for (kstd::int64_t i = lane; i < n; i += G::size) {
      if (scratch.order[i] >= 0) raise_to(scratch.values + scratch.order[i], static_cast<kstd::int32_t>(-1 - i));  // slots are above
    }
  });
  g.sync();
  kstd::uint32_t misses = 0;
  for (kstd::int64_t first = 0; first < n; first += G::size) {
    typename G::template Lanes<kstd::int64_t> host;
    typename G::template Lanes<kstd::uint32_t> rank;
    g.each([&](int lane) {
      const kstd::int64_t i = first + lane;
      const kstd::int32_t entry = i < n ? scratch.order[i] : -1;  // places in the list have come to this one at most
      const bool missed = entry >= 0 && scratch.values[entry] == -1 - i;
      host[lane] = missed ? args.on_host(b, list[i]) : -1;
      rank[lane] = !missed ? 0U : host[lane] >= 0 ? 1U : 1U << 16;
    });
    const kstd::uint32_t here = scan_sum(g, rank);
    g.each([&](int lane) {
      if (host[lane] < 0) return;
      const kstd::int64_t at = ((misses + rank[lane]) & 0xFFFF);
      scratch.order[at] = static_cast<kstd::int32_t>(first + lane);
      if (args.misses != nullptr) args.misses[b * n + at].host = host[lane];
    });
    misses += here;
  }
  g.sync();
  return misses;
}

struct OldestSlots {
  kstd::uint32_t threshold = 0;  // the last use of the wanted-th oldest slot
  kstd::int64_t older = 0;       // slots used before
};

// Of the slots that were not used now, of which there are `wanted` or more. Exact: bit by bit from the highest in which their uses differ.
template <class G>
KVIRE_HD OldestSlots oldest_slots(G g, const kstd::uint32_t* used, kstd::int64_t slots, kstd::uint32_t now, kstd::int64_t wanted) {
  const auto larger = [](kstd::uint64_t x, kstd::uint64_t y) {  // of both halves
    const kstd::uint64_t high = max_of(x >> 32, y >> 32);
    return high << 32 | max_of(static_cast<kstd::uint32_t>(x), static_cast<kstd::uint32_t>(y));
  };
  typename G::template Lanes<kstd::uint64_t> range;  // the latest use, and the complement of the earliest
  g.each([&](int lane) {
    range[lane] = 0;
    for (kstd::int64_t s = lane; s < slots; s += G::size) {
      if (used[s] != now) range[lane] = larger(range[lane], kstd::uint64_t(used[s]) << 32 | static_cast<kstd::uint32_t>(~used[s]));
    }
  });
  reduce(g, range, larger);
  const auto earliest = ~static_cast<kstd::uint32_t>(range[0]);
  const kstd::uint32_t differ = earliest ^ static_cast<kstd::uint32_t>(range[0] >> 32);
  int bit = 0;
  while (bit < 32 && differ >> bit != 0) ++bit;
  OldestSlots found{.threshold = bit < 32 ? earliest >> bit << bit : 0, .older = 0};
  while (--bit >= 0) {
    // Slots used now count only beyond the latest other use, where the answer is known: too many.
    const kstd::uint32_t trial = found.threshold | kstd::uint32_t(1) << bit;
    typename G::template Lanes<kstd::int32_t> before;
    g.each([&](int lane) {
      before[lane] = 0;
      for (kstd::int64_t s = lane; s < slots; s += G::size) before[lane] += used[s] < trial ? 1 : 0;
    });
    reduce(g, before, [](kstd::int32_t x, kstd::int32_t y) { return x + y; });
    if (before[0] < wanted) found = {trial, before[0]};
  }
  return found;
}

// Gives the listed misses the slots that have been unused for longest, both in order.
template <class G, class Slot>
KVIRE_HD void give_slots(G g, kstd::int64_t b, kstd::int64_t row, const PlaceTokensArgs<Slot>& args, const PlaceScratch& scratch, const HotRecord& record,
                         kstd::uint32_t now, kstd::int64_t misses) {
  const OldestSlots oldest = oldest_slots(g, record.used, args.slots, now, misses);
  const kstd::int64_t ties = misses - oldest.older;
  kstd::int64_t older_done = 0;
  kstd::int64_t ties_done = 0;
  for (kstd::int64_t first = 0; older_done + min_of(ties_done, ties) < misses; first += G::size) {
    typename G::template Lanes<kstd::uint32_t> kind;    // 1: older; 1 << 16: of the threshold
    typename G::template Lanes<kstd::uint32_t> before;  // sums of them
    g.each([&](int lane) {
      const kstd::uint32_t used = first + lane < args.slots ? record.used[first + lane] : now;
      kind[lane] = used == now || used > oldest.threshold ? 0U : used < oldest.threshold ? 1U : 1U << 16;
      before[lane] = kind[lane];
    });
    const kstd::uint32_t here = scan_sum(g, before);
    g.each([&](int lane) {
      const kstd::int64_t tie = ties_done + (before[lane] >> 16);
      if (kind[lane] == 0 || (kind[lane] > 1 && tie >= ties)) return;
      const kstd::int64_t rank = older_done + (before[lane] & 0xFFFF) + min_of(tie, ties);
      const kstd::int64_t slot = first + lane;
      const kstd::int32_t position = args.positions[b * args.n + scratch.order[rank]];
      scratch.values[scratch.find(position)] = static_cast<kstd::int32_t>(slot);
      record.held[slot] = static_cast<kstd::uint32_t>(position) + 1;
      record.used[slot] = now;
      if (args.misses != nullptr) args.misses[b * args.n + rank].device = args.first_slot(row) + slot;
    });
    older_done += here & 0xFFFF;
    ties_done += here >> 16;
  }
  g.sync();
}

}  // namespace detail

/// The part of place_tokens that needs nothing of what the row depends on, which other work may still be writing: empties the table, and tells a device what it is
/// about to read.
template <class G, class Slot>
KVIRE_HD void prepare_places(G g, kstd::int64_t b, const PlaceTokensArgs<Slot>& args, const PlaceScratch& scratch) {
  detail::announce(g, args.positions + b * args.n, args.n);
  const kstd::int64_t row = args.row_ids == nullptr ? b : detail::peek(args.row_ids + b);
  if (row >= 0 && row < args.rows) detail::announce(g, args.records + row * HotRecord::words(args.slots), HotRecord::words(args.slots));
  g.each([&](int lane) {
    for (kstd::int64_t e = lane; e < scratch.entries(); e += G::size) scratch.keys[e] = -1;
  });
  g.sync();
}

/// Gives each token that batch row `b` lists a slot of its row: the one that it has, or the slot that has been unused for longest (the lowest of
/// several); never one of a token that the same call lists, since slots >= n. Misses are given theirs in the order of the list. So the slots
/// depend on the history of the row alone: the same on any group. Negative positions, and those that cannot be had, get -1.
/// G: a group with reduce, scan_sum and sync_any. Requires n < 2^15, and prepare_places before.
template <class G, class Slot>
KVIRE_HD HotCounts place_prepared(G g, kstd::int64_t b, const PlaceTokensArgs<Slot>& args, const PlaceScratch& scratch) {
  constexpr int tile = 4;  // values that a lane loads before it works on them
  const kstd::int64_t n = args.n;
  const kstd::int32_t* const list = args.positions + b * n;
  Slot* const out = args.out + b * n;
  HotCounts counts;

  const kstd::int64_t row = args.row_ids == nullptr ? b : args.row_ids[b];
  bool twice = false;
  if (args.row_ids != nullptr) {
    typename G::template Lanes<kstd::int32_t> before;
    g.each([&](int lane) {
      before[lane] = 0;
      for (kstd::int64_t j = lane; j < b; j += G::size) before[lane] |= args.row_ids[j] == row ? 1 : 0;
    });
    twice = sync_any(g, before);
  }
  if (twice || row < 0 || row >= args.rows) {
    g.each([&](int lane) {
      for (kstd::int64_t i = lane; i < n; i += G::size) out[i] = -1;
      if (lane == 0 && args.misses != nullptr) args.miss_counts[b] = 0;
    });
    (row < 0 ? counts.skipped : counts.bad_rows) = row < 0 ? n : 1;
    return counts;
  }
  const HotRecord record(args.records + row * HotRecord::words(args.slots), args.slots);
  const kstd::uint32_t now = *record.clock + 1;

  // What is listed, each token once; what slots hold is on its way meanwhile.
  struct Tile {
    kstd::uint32_t held[tile];
  };
  typename G::template Lanes<Tile> ahead;
  const auto load = [&](kstd::int64_t first) {
    Tile next;
    for (int j = 0; j < tile; ++j) next.held[j] = first + j * G::size < args.slots ? record.held[first + j * G::size] : 0;
    return next;
  };
  typename G::template Lanes<kstd::uint64_t> tally;  // 16 bits each: skipped, bad, unplaced and hit ones
  g.each([&](int lane) {
    tally[lane] = 0;
    ahead[lane] = load(lane);
    for (kstd::int64_t first = lane; first < n; first += tile * G::size) {
      kstd::int32_t position[tile];
      for (int j = 0; j < tile; ++j) position[j] = first + j * G::size < n ? list[first + j * G::size] : -1;
      for (int j = 0; j < tile && first + j * G::size < n; ++j) {
        const bool known = args.known(position[j]);
        scratch.order[first + j * G::size] = known ? scratch.insert(position[j]) : -1;
        if (!known) tally[lane] += position[j] < 0 ? 1 : kstd::uint64_t(1) << 16;
      }
    }
  });
  g.sync();
  // Which slots hold it.
  g.each([&](int lane) {
    for (kstd::int64_t first = lane; first < args.slots; first += tile * G::size) {
      const Tile now_held = ahead[lane];
      ahead[lane] = load(first + tile * G::size);
      for (int j = 0; j < tile; ++j) {
        const kstd::int32_t e = now_held.held[j] != 0 ? scratch.find(static_cast<kstd::int32_t>(now_held.held[j] - 1)) : -1;
        if (e < 0) continue;
        const kstd::int64_t slot = first + j * G::size;
        scratch.values[e] = static_cast<kstd::int32_t>(slot);
        record.used[slot] = now;
        tally[lane] += kstd::uint64_t(1) << 48;
      }
    }
  });
  g.sync();
  // Of a token's entry, if it has one. False: it has no slot yet.
  const auto answer = [&](kstd::int64_t i, kstd::int32_t entry) {
    const kstd::int32_t slot = entry >= 0 ? scratch.values[entry] : 0;
    out[i] = static_cast<Slot>(entry >= 0 && slot >= 0 ? args.first_slot(row) + slot : -1);
    return slot >= 0;
  };
  g.each([&](int lane) {
    for (kstd::int64_t i = lane; i < n; i += G::size) tally[lane] += answer(i, scratch.order[i]) ? 0 : kstd::uint64_t(1) << 32;
  });
  reduce(g, tally, [](kstd::uint64_t x, kstd::uint64_t y) { return x + y; });
  const kstd::uint64_t all = tally[0];
  counts.skipped = static_cast<kstd::int64_t>(all & 0xFFFF);
  counts.bad_positions = static_cast<kstd::int64_t>(all >> 16 & 0xFFFF);
  counts.hits = static_cast<kstd::int64_t>(all >> 48);
  if ((all >> 32 & 0xFFFF) != 0) {
    g.sync();
    const kstd::uint32_t missed = detail::list_misses(g, b, args, scratch);
    counts.misses = missed & 0xFFFF;
    counts.bad_pages = missed >> 16;
    if (counts.misses > 0) detail::give_slots(g, b, row, args, scratch, record, now, counts.misses);
    g.each([&](int lane) {
      for (kstd::int64_t i = lane; i < n; i += G::size) (void)answer(i, args.known(list[i]) ? scratch.find(list[i]) : -1);
    });
  }
  counts.repeated = n - counts.skipped - counts.bad_positions - counts.hits - counts.misses - counts.bad_pages;
  g.each([&](int lane) {
    if (lane != 0) return;
    *record.clock = now;
    if (args.misses != nullptr) args.miss_counts[b] = static_cast<kstd::int32_t>(counts.misses);
  });
  return counts;
}
/// Both parts.
template <class G, class Slot>
KVIRE_HD HotCounts place_tokens(G g, kstd::int64_t b, const PlaceTokensArgs<Slot>& args, const PlaceScratch& scratch) {
  prepare_places(g, b, args, scratch);
  return place_prepared(g, b, args, scratch);
}

}  // namespace body
KVIRE_NAMESPACE_END
