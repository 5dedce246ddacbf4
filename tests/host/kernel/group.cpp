// SPDX-License-Identifier: Apache-2.0
#include <kvire/kernel/group.hpp>

#include <doctest/doctest.h>

namespace {
using namespace kvire;

template <class G>
float tree_sum(G g) {
  typename G::template Lanes<float> x;
  g.each([&](int lane) { x[lane] = lane == 0 ? 1e8F : lane == 1 ? 1.0F : lane == 2 ? -1e8F : 0.0F; });
  reduce_sum(g, x);
  float first = 0;
  bool equal = true;
  g.each([&](int lane) {
    if (lane == 0) first = x[lane];
    equal = equal && bits_of(x[lane]) == bits_of(x[0]);
  });
  CHECK(equal);
  return first;
}
}  // namespace

TEST_CASE("kernel: a group reduces in a fixed tree, the same value in every lane") {
  static_assert(LaneGroup<HostGroup<32>> && LaneGroup<HostGroup<1>> && !LaneGroup<int>);
  // (1e8 + 1) + (-1e8 + 0): the one is lost, as in the same tree on a warp. Left to right it would be lost too, by pairs at distance 2 not.
  CHECK(bits_of(tree_sum(HostGroup<32>{})) == 0);
  CHECK(bits_of(tree_sum(HostGroup<4>{})) == 0);
}

TEST_CASE("kernel: runs of lanes reduce apart") {
  HostGroup<16> g;
  HostGroup<16>::Lanes<unsigned> x;
  g.each([&](int lane) { x[lane] = static_cast<unsigned>(lane); });
  reduce_runs<4>(g, x, [](unsigned a, unsigned b) { return a > b ? a : b; });
  g.each([&](int lane) { CHECK(x[lane] == static_cast<unsigned>(lane | 3)); });
  reduce_runs<1>(g, x, [](unsigned, unsigned) { return 0U; });
  g.each([&](int lane) { CHECK(x[lane] == static_cast<unsigned>(lane | 3)); });
  const auto y = g.shuffle_xor(x, 4);
  g.each([&](int lane) { CHECK(y[lane] == static_cast<unsigned>((lane ^ 4) | 3)); });
}

TEST_CASE("kernel: a body with a host group is a constant expression") {
  constexpr float sum = [] {
    HostGroup<8> g;
    HostGroup<8>::Lanes<float> x{};
    g.each([&](int lane) { x[lane] = static_cast<float>(lane); });
    reduce_sum(g, x);
    return x[5];
  }();
  static_assert(sum == 28.0F);
}
