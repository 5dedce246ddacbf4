// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/kernel/candidate_slots.cuh>
#include <kvire/kernel/row_groups.cuh>

KVIRE_NAMESPACE_BEGIN

namespace detail::topk {

/// In the slots that the logits kernel has left (candidate_slots.cuh).
struct SlotGroups {
  sm90::CandidateSlots slots;
  int ctas = 0;  // of that kernel

  static constexpr int listed = 8192;  // parts that a few CTAs have pruned are fewer groups than k: all of them are read

  static constexpr bool ragged = true;

#if KVIRE_CUDA_COMPILER
  struct View {
    sm90::CandidateSlots slots;
    int next_n, batch_row, query;
    int each, more;         // tiles of a CTA; CTAs that have one more
    int first_tile, tiles;  // of the row, among those of all rows
    int length;
    bool whole;

    __device__ View(const SlotGroups& g, const Params& p, u32 row, int l) : slots(g.slots), next_n(p.args.next_n), length(l) {
      const int lane = int(threadIdx.x & 31U);
      batch_row = next_n == 1 ? int(row) : int(row / u32(next_n));
      query = int(row) - batch_row * next_n;
      int before = 0, own = 0, all = 0;
      for (int b = lane; b < p.args.batch; b += 32) {
        int tokens = 0;
        if (p.args.lengths == nullptr) {
          tokens = p.most;
        } else if (!p.args.lengths_per_query) {
          tokens = p.args.lengths[b];
        } else {
          for (int q = 0; q < next_n; ++q) tokens = max(tokens, p.args.lengths[b * next_n + q]);
        }
        const int n = (min(max(tokens, 0), p.most) + 63) / 64;
        all += n;
        before += b < batch_row ? n : 0;
        own += b == batch_row ? n : 0;
      }
      first_tile = __reduce_add_sync(~0U, before);
      tiles = __reduce_add_sync(~0U, own);
      all = __reduce_add_sync(~0U, all);
      each = all / g.ctas;
      more = all - each * g.ctas;
      whole = slots.whole(each);
    }
    __device__ int cta_of(int tile) const { return tile < more * (each + 1) ? tile / (each + 1) : more + (tile - more * (each + 1)) / max(each, 1); }
    __device__ int begin_of(int cta) const { return each * cta + min(cta, more); }
    __device__ int slot_groups() const { return slots.capacity / group_size; }
    __device__ u32 slot_place(int cta) const { return u32((cta + batch_row) * next_n + query) * u32(slot_groups()); }
    __device__ int groups() const {
      if (tiles == 0) return 0;
      return whole ? (length + group_size - 1) / group_size : (cta_of(first_tile + tiles - 1) - cta_of(first_tile) + 1) * slot_groups();
    }
    __device__ u32 place(int group) const {
      if (whole) {
        const int tile = first_tile + group / 4;
        const int cta = cta_of(tile);
        return slot_place(cta) + u32((tile - max(begin_of(cta), first_tile)) * 4 + group % 4);
      }
      const int part = group / slot_groups();
      return slot_place(cta_of(first_tile) + part) + u32(group - part * slot_groups());
    }
    __device__ u32 best_of(u32 place) const { return slots.best[place]; }
    __device__ const float* scores_of(u32 place) const { return slots.scores + std::int64_t(place) * group_size; }
    __device__ int filled(int) const { return group_size; }
    __device__ int position(int group, u32 place, int i) const { return whole ? group * group_size + i : slots.positions[std::int64_t(place) * group_size + i]; }
  };
#endif
};

}  // namespace detail::topk

KVIRE_NAMESPACE_END
