// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/kernel/ptx/barrier.cuh>
#include <kvire/kernel/sm90_logits_plan.cuh>

KVIRE_NAMESPACE_BEGIN

/// The pipeline between the warps of a unit, a producer warp and a consumer warpgroup: a ring of stages in shared memory, each with one mbarrier that says that it is
/// full and one that says that it is empty, and the named barriers by which a unit meets, or its warpgroup alone.
namespace sm90::detail {

/// Units that a CTA can have.
template <class Shape>
inline constexpr int most_units = Shape::joined_from > 0 ? Shape::ctas_per_sm : 1;

#if KVIRE_SM90A

/// Keeps a lane's number in its register: the assembler would compute it again at every use.
template <class T>
KVIRE_DEVICE KVIRE_INLINE T keep(T x, int lane) {
  return __shfl_sync(~0U, x, lane);
}

/// Barrier `first` + 2 * unit, waited for or only arrived at. The numbers are constants: with one in a register a CTA claims all sixteen barriers, and an SM
/// has no more than four times as many.
template <int Units>
KVIRE_DEVICE KVIRE_INLINE void unit_barrier(int unit, int first, int threads, bool wait = true) {
  if constexpr (Units > 1) {
    if (unit != Units - 1) return unit_barrier<Units - 1>(unit, first, threads, wait);
  }
  if (wait) {
    ptx::named_barrier(first + 2 * (Units - 1), threads);
  } else {
    ptx::named_barrier_arrive(first + 2 * (Units - 1), threads);
  }
}

/// A ring of stages, seen by one side; `parity`: what it waits for next.
template <int Stages>
struct Ring {
  kstd::uint32_t parity;
  int stage = 0;

  KVIRE_DEVICE KVIRE_INLINE void advance() {
    if (Stages == 1 || ++stage == Stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

/// Sets up the barriers of both rings; the producer warp, before the unit meets.
template <class Plan, class Shape>
KVIRE_DEVICE KVIRE_INLINE void init_pipeline(kstd::uint32_t shared, int lane) {
  if constexpr (Plan::swizzled) {
    if (lane < Plan::query_stages) {
      ptx::mbarrier_init(shared + Plan::query_full_at + lane * 8, 32);
      ptx::mbarrier_init(shared + Plan::query_empty_at + lane * 8, group_threads);
      ptx::fence_mbarrier_init();
    }
  }
  if (lane < Shape::stages) {
    ptx::mbarrier_init(shared + Plan::full_at + lane * 8, 1);
    ptx::mbarrier_init(shared + Plan::empty_at + lane * 8, group_threads);
    ptx::fence_mbarrier_init();
  }
  __syncwarp();
}

#endif  // KVIRE_SM90A
}  // namespace sm90::detail

KVIRE_NAMESPACE_END
