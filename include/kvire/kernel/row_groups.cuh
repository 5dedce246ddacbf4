// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/kernel/top_k_row.cuh>

KVIRE_NAMESPACE_BEGIN

namespace detail::topk {

inline constexpr int group_size = 16;

/// Where the groups of a row are: in rows of scores as the caller sees them. `best`: order_key of the best of 16 neighbours that may be selected, 0 where
/// there is none.
struct RowGroups {
  const float* scores = nullptr;  // [rows][stride]
  const u32* best = nullptr;      // [rows][group_stride]
  std::int64_t stride = 0;
  std::int64_t group_stride = 0;  // ceil(stride / 16)

  static constexpr int listed = 4096;
  static constexpr bool ragged = false;  // where a group is depends on the lengths

#if KVIRE_CUDA_COMPILER
  // A row's groups, in order of position. `place`: where a group is, in groups from the first.
  struct View {
    const float* scores;
    const u32* best;
    int length;

    __device__ View(const RowGroups& g, const Params&, u32 row, int l)
        : scores(g.scores + std::int64_t(row) * g.stride), best(g.best + std::int64_t(row) * g.group_stride), length(l) {}
    __device__ int groups() const { return (length + group_size - 1) / group_size; }
    __device__ u32 place(int group) const { return u32(group); }
    __device__ u32 best_of(u32 place) const { return best[place]; }
    // The scores of a group, 16-byte aligned, and how many of them there are; NaN among them may not be selected.
    __device__ const float* scores_of(u32 place) const { return scores + place * group_size; }
    __device__ int filled(int group) const { return min(length - group * group_size, group_size); }
    __device__ int position(int group, u32, int i) const { return group * group_size + i; }
  };
#endif
};

}  // namespace detail::topk

KVIRE_NAMESPACE_END
