// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/kernel/logits_tile_scheduler.cuh>
#include <kvire/kernel/ptx/barrier.cuh>
#include <kvire/kernel/sm90_logits_plan.cuh>

KVIRE_NAMESPACE_BEGIN

/// What the prefill logits kernel is given, how its shared memory is laid out, and which part of the work is a CTA's.
namespace sm90 {

/// What the kernel reads and writes: device memory. Positions are keys of one flat space that all rows share.
struct PrefillArguments {
  const kstd::byte* keys = nullptr;           ///< paged: page 0 of the layer; contiguous: the plane of values (interleaved: of whole rows), token after token
  const kstd::byte* scales = nullptr;         ///< contiguous only: the plane of scales, if the layout has one
  const kstd::int32_t* page_table = nullptr;  ///< position s lies on page page_table[s / tokens]; negative: no page, scores -inf. Null: keys are contiguous
  kstd::int64_t page_stride = 0;              ///< bytes, a multiple of 16
  kstd::int32_t page_count = 0;               ///< ids at or above are skipped and counted
  kstd::int32_t key_count = 0;                ///< positions that there are; ranges are cut there
  const void* queries = nullptr;              ///< [rows][heads][dim], 16-byte aligned
  const float* weights = nullptr;             ///< [rows][heads]
  const kstd::int32_t* starts = nullptr;      ///< [rows]
  const kstd::int32_t* ends = nullptr;        ///< [rows]
  kstd::int32_t rows = 0;
  void* logits = nullptr;                     ///< [rows][logits_stride], f32 or bf16; position s at index s
  kstd::int64_t logits_stride = 0;            ///< elements; ranges are cut there
  unsigned long long* bad_pages = nullptr;    ///< counts page ids at or above page_count, one a row and entry; may be null
  unsigned long long* nan_logits = nullptr;   ///< counts logits that were NaN, written as -inf; may be null
};

/// How a CTA, one an SM, is built: warpgroups, rows of a group, tiles in flight for each warpgroup.
template <int Warpgroups, int Rows, int Depth>
struct PrefillShape {
  static constexpr int warpgroups = Warpgroups;
  static constexpr int rows = Rows;
  static constexpr int depth = Depth;
  static constexpr int columns = 128;  // of a product; a quarter of them are heads of one row
  static constexpr int threads = Warpgroups * group_threads;
  static_assert(require_tuning<PrefillShape, Rows % 4 == 0 && Rows <= 32>());
};

template <class P, Element Query, int Heads, class Shape>
struct PrefillPlan : LogitsPlan<P, Query, Heads, Shape::rows, LogitsShape<1, 1>> {
  using Base = LogitsPlan<P, Query, Heads, Shape::rows, LogitsShape<1, 1>>;
  static constexpr int rows = Shape::rows;
  static constexpr int stages = Shape::depth * Shape::warpgroups;
  static constexpr int heads_together = Shape::columns / 4;      // of a row in a product
  static constexpr int products = Heads / heads_together;        // for four rows
  static constexpr int product_bytes = Shape::columns * Base::query_row;
  static_assert(require_tuning<PrefillPlan, !Base::fp4 && products >= 1>());

  static constexpr int queries_at = 0;
  static constexpr int stages_at = queries_at + rows * Base::query_bytes;
  static constexpr int weights_at = stages_at + stages * Base::stage_bytes;
  static constexpr int weight_row = Heads * 4 + 16;  // 16 bytes more for the banks
  static constexpr int ranges_at = weights_at + rows * weight_row;  // [rows][2]
  static constexpr int meta_at = (ranges_at + rows * 8 + 15) / 16 * 16;
  static constexpr int full_at = meta_at + stages * 16;
  static constexpr int empty_at = full_at + stages * 8;
  static constexpr int share_at = empty_at + stages * 8;
  static constexpr int feeds_at = share_at + 16;  // a Feed for each warpgroup
  static constexpr int scan_at = feeds_at + Shape::warpgroups * 32;
  static constexpr int shared_bytes = scan_at + Shape::threads / 32 * 4;
  static_assert(require_tuning<PrefillPlan, (shared_bytes <= 227 * 1024)>());
};

namespace detail {

/// [start, end) of a row, empty as {0, 0}; cut to what exists.
struct Range {
  int start = 0, end = 0;
};
KVIRE_DEVICE KVIRE_INLINE Range row_range(const PrefillArguments& a, int row) {
  Range range;
  if (row >= a.rows) return range;
  const int most = a.logits_stride < a.key_count ? static_cast<int>(a.logits_stride) : a.key_count;
  const int start = a.starts[row], end = a.ends[row];
  range.start = start < 0 ? 0 : start;
  range.end = end > most ? most : end;
  return range.start < range.end ? range : Range{};
}

/// Tiles [first, last) that some row of a group sees.
template <class Plan>
KVIRE_DEVICE KVIRE_INLINE Range group_tiles(const PrefillArguments& a, int group) {
  Range tiles{0x7FFFFFFF, 0};
#pragma unroll
  for (int r = 0; r < Plan::rows; ++r) {
    const Range range = row_range(a, group * Plan::rows + r);
    const int first = range.start / tile_tokens, last = tiles_of(range.end);
    tiles.start = range.end != 0 && first < tiles.start ? first : tiles.start;
    tiles.end = last > tiles.end ? last : tiles.end;
  }
  return tiles.end == 0 ? Range{} : tiles;
}
template <class Shape>
KVIRE_DEVICE KVIRE_INLINE int steps_of(Range tiles) {
  return (tiles.end - tiles.start + Shape::warpgroups - 1) / Shape::warpgroups;
}

/// The contiguous share of this CTA, in steps; called by the whole CTA, the answer in shared memory: first group, first step in it, steps.
template <class Plan, class Shape>
KVIRE_DEVICE KVIRE_INLINE void share_steps(const PrefillArguments& a, kstd::uint32_t shared, int thread) {
  const int groups = (a.rows + Plan::rows - 1) / Plan::rows;
  const int run = (groups + Shape::threads - 1) / Shape::threads;
  const int lane = thread % 32;
  int sum = 0;
  for (int g = thread * run; g < (thread + 1) * run && g < groups; ++g) sum += steps_of<Shape>(group_tiles<Plan>(a, g));
  const int through = inclusive_scan(sum, lane);
  if (lane == 31) ptx::store_shared(shared + Plan::scan_at + thread / 32 * 4, static_cast<kstd::uint32_t>(through));
  __syncthreads();
  int before = through - sum, total = 0;
  for (int w = 0; w < Shape::threads / 32; ++w) {
    const int s = static_cast<int>(ptx::load_shared(shared + Plan::scan_at + w * 4));
    if (w < thread / 32) before += s;
    total += s;
  }
  int begin, size;
  split(static_cast<unsigned>(total), blockIdx.x, gridDim.x, begin, size);
  if (size == 0 && thread == 0) ptx::store_shared4(shared + Plan::share_at, {0, 0, 0, 0});
  if (size > 0 && before <= begin && begin < before + sum) {
    for (int g = thread * run;; ++g) {
      const int steps = steps_of<Shape>(group_tiles<Plan>(a, g));
      if (begin < before + steps) {
        ptx::store_shared4(shared + Plan::share_at, {static_cast<kstd::uint32_t>(g), static_cast<kstd::uint32_t>(begin - before), static_cast<kstd::uint32_t>(size), 0});
        break;
      }
      before += steps;
    }
  }
  __syncthreads();
}

}  // namespace detail
}  // namespace sm90

KVIRE_NAMESPACE_END
