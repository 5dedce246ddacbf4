// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/codec/arith.hpp>

/// A kernel body is a host-device template over a *group* and one work item, written in phases:
///
///     template <LaneGroup G>
///     KVIRE_HD void body(G g, std::int64_t item, ...) {
///       typename G::template Lanes<float> x;                     // one value a lane, kept from phase to phase
///       g.each([&](int lane) { x[lane] = ...; });                // a phase: this lane on the device, every lane in turn on the host
///       reduce(g, x, [](float a, float b) { return add_rn(a, b); });
///       g.sync();                                                // memory written before is seen by the group after
///       g.each([&](int lane) { ... });
///     }
///
/// Inside a phase a lane touches only its own values; lanes meet in `shuffle_xor`, `reduce` and through memory around `sync`. What is
/// outside the phases is uniform: every lane of a device group computes it too, the host once; a value that all lanes hold, as after a
/// reduction over the group, is x[0] there. The host group runs the same phases over arrays of lanes, so both sides reduce in the same order
/// and give the same bits.

KVIRE_NAMESPACE_BEGIN

namespace detail {
struct EmptyPhase {
  KVIRE_HD constexpr void operator()(int) const {}
};
}  // namespace detail

/// `size` lanes (a power of two), per-lane values, phases, a barrier and an exchange with the lane whose number differs in `mask`.
template <class G>
concept LaneGroup = (G::size > 0) && ((G::size & (G::size - 1)) == 0) && requires(G g, typename G::template Lanes<float> x) {
  g.each(detail::EmptyPhase{});
  g.sync();
  x = g.shuffle_xor(x, 1);
};

/// A group on the host: one thread plays all lanes.
template <int Size>
struct HostGroup {
  static constexpr int size = Size;

  template <class T>
  struct Lanes {
    T values[Size];
    KVIRE_HD constexpr T& operator[](int lane) { return values[lane]; }
    KVIRE_HD constexpr const T& operator[](int lane) const { return values[lane]; }
  };

  template <class F>
  KVIRE_HD constexpr void each(F&& f) const {
    for (int lane = 0; lane < Size; ++lane) f(lane);
  }

  KVIRE_HD constexpr void sync() const {}

  template <class T>
  KVIRE_HD constexpr Lanes<T> shuffle_xor(const Lanes<T>& x, int mask) const {
    Lanes<T> y{};
    for (int lane = 0; lane < Size; ++lane) y[lane] = x[lane ^ mask];
    return y;
  }
};

/// Combines the values of each run of `Width` neighbouring lanes (a power of two, by default the whole group) in a fixed tree, lane
/// distance 1 first; every lane of a run gets the result. `op(a, b)` must be commutative to the bit, as add_rn, max_rn and integer
/// operations are.
template <int Width, LaneGroup G, class T, class Op>
  requires(Width > 0 && (Width & (Width - 1)) == 0 && Width <= G::size)
KVIRE_HD constexpr void reduce_runs(G g, T& x, Op op) {
  for (int distance = 1; distance < Width; distance *= 2) {
    const T other = g.shuffle_xor(x, distance);
    g.each([&](int lane) { x[lane] = op(x[lane], other[lane]); });
  }
}
template <LaneGroup G, class T, class Op>
KVIRE_HD constexpr void reduce(G g, T& x, Op op) {
  reduce_runs<G::size>(g, x, op);
}

/// x becomes, in each lane, the sum over lower lanes; returns the sum over all lanes. Integers.
template <LaneGroup G, class T>
KVIRE_HD constexpr auto scan_sum(G g, T& x) {
  T total = x;
  g.each([&](int lane) { x[lane] = 0; });
  for (int distance = 1; distance < G::size; distance *= 2) {
    const T other = g.shuffle_xor(total, distance);
    g.each([&](int lane) {
      if ((lane & distance) != 0) x[lane] += other[lane];
      total[lane] += other[lane];
    });
  }
  auto all = total[0];
  g.each([&](int lane) { all = total[lane]; });
  return all;
}

/// A barrier, as g.sync(), that also says whether the value of any lane is not 0.
template <LaneGroup G, class T>
KVIRE_HD constexpr bool sync_any(G g, T x) {
  reduce(g, x, [](auto a, auto b) { return a | b; });
  g.sync();
  bool any = false;
  g.each([&](int lane) { any = x[lane] != 0; });
  return any;
}

/// The sum of all lanes, in every lane; rounded in a fixed tree.
template <LaneGroup G, class T>
KVIRE_HD constexpr void reduce_sum(G g, T& x) {
  reduce(g, x, [](float a, float b) { return add_rn(a, b); });
}

KVIRE_NAMESPACE_END
