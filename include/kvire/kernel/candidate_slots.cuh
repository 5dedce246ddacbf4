// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/base/ints.hpp>

KVIRE_NAMESPACE_BEGIN

namespace sm90 {

/// What the logits kernel leaves of its scores for a selection of k: of every part of a row that a CTA scores the k best at least, in a slot of its
/// own, so that memory does not grow with the rows. CTA c of row b and query token q has slot (c + b) * next_n + q: no two parts share one, for from a part
/// to the next either the CTA or the row is another.
///
/// A slot holds scores in order of position, in groups of 16 of which the last is filled up with NaN; `best` is order_key of the best of a group, 0
/// where there is none. Where shares are as small as a slot, all scores are kept and nothing says where they stand; otherwise `positions` does, and all
/// groups of a slot have a best.
struct CandidateSlots {
  float* scores = nullptr;             ///< [slots][capacity], 16-byte aligned
  kstd::int32_t* positions = nullptr;  ///< [slots][capacity]
  kstd::uint32_t* best = nullptr;      ///< [slots][capacity / 16]
  kstd::int32_t k = 0;
  kstd::int32_t capacity = 0;

  static constexpr int group = 16;
  static constexpr int most_k = 1024;
  static constexpr int most_ctas = 4;  ///< of a multiprocessor
  static constexpr int slack = 256;  ///< more than k, so that a prune need not tell apart what is nearly equal

  KVIRE_HD static constexpr int capacity_for(int k) { return ceil_div(k + slack, 64) * 64; }
  KVIRE_HD static constexpr kstd::int64_t slots(kstd::int64_t batch, int next_n, kstd::int64_t ctas) { return (batch + ctas) * next_n; }
  /// Bytes of `n` slots for k.
  KVIRE_HD static constexpr kstd::int64_t bytes(kstd::int64_t n, int k) { return n * (capacity_for(k) * 8 + capacity_for(k) / group * 4); }
  KVIRE_HD static CandidateSlots at(void* memory, kstd::int64_t n, int k) {
    CandidateSlots s;
    s.k = k;
    s.capacity = capacity_for(k);
    s.scores = static_cast<float*>(memory);
    s.positions = reinterpret_cast<kstd::int32_t*>(s.scores + n * s.capacity);
    s.best = reinterpret_cast<kstd::uint32_t*>(s.positions + n * s.capacity);
    return s;
  }
  /// Whether shares of `tiles` or tiles + 1 tiles keep all scores.
  KVIRE_HD constexpr bool whole(int tiles) const { return (tiles + 1) * 64 <= capacity; }
};

}  // namespace sm90

KVIRE_NAMESPACE_END
