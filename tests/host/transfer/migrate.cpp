// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>

#include <kvire/preset/deepseek_v4.hpp>
#include <kvire/transfer/migrate.hpp>
#include <tests/support/pages.hpp>

using namespace kvire;
using kvire_test::contains;

namespace {

template <class P>
void fill_rows(DevicePool<P, Host>& pool, DevicePage page) {
  for (int layer = 0; layer < pool.layers(); ++layer) {
    std::byte* const bytes = pool_access::view(pool, EntrySlot(layer)).page(page.value);
    for (int t = 0; t < P::tokens_per_page; ++t) {
      float x[P::dim];
      for (int i = 0; i < P::dim; ++i) x[i] = std::sin(static_cast<float>(i * 7 + t * 31 + layer * 101 + page.value)) * static_cast<float>(1 + t % 5);
      encode_row<P>(x, bytes, t);
    }
  }
}

template <class P>
std::vector<float> row(const DevicePool<P, Host>& pool, DevicePage page, int layer, int token) {
  std::vector<float> x(static_cast<std::size_t>(P::dim));
  decode_row<P>(pool_access::const_view(pool, EntrySlot(layer)).page(page.value), token, x.data());
  return x;
}

}  // namespace

TEST_CASE_TEMPLATE("migrate: every element arrives within the bound of the new codec", Q, Fp8WithScale<16, 128>, Fp8WithScaleInterleaved<16, 128>,
                   Fp4WithScale<16, 128>, Bf16Contiguous<16, 128>) {
  using P = Bf16Contiguous<16, 128>;
  auto from = DevicePool<P, Host>::make({.layers = 2, .pages = 4}).value();
  auto to = DevicePool<Q, Host>::make({.layers = 2, .pages = 6, .arrangement = Arrangement::page_first}).value();
  auto a = from.allocate(2).value();
  auto b = to.allocate(4).value();
  for (auto& p : a) fill_rows(from, p.id());
  auto stream = Stream<Host>::make().value();
  const std::vector<DevicePage> source{a[0].id(), a[1].id()};
  const std::vector<DevicePage> target{b[3].id(), b[1].id()};
  auto ticket = migrate(from, to, plan(source, target), stream).value();
  REQUIRE(ticket.wait().ok());
  constexpr ErrorBound bound = error_bound<Q, role::Value>();
  for (std::size_t i = 0; i < 2; ++i) {
    for (int layer = 0; layer < 2; ++layer) {
      for (int t = 0; t < 16; ++t) {
        const auto x = row(from, source[i], layer, t);
        const auto y = row(to, target[i], layer, t);
        float amax = 0;
        for (const float v : x) amax = std::max(amax, std::abs(v));
        // No block's scale is above twice the row's largest over the largest code.
        const float scale = 2 * amax / 6;
        bool within = true;
        for (std::size_t e = 0; e < x.size(); ++e) {
          const float allowed = std::max(bound.relative * std::abs(x[e]), std::max(bound.in_scales * scale, bound.absolute));
          within = within && std::abs(y[e] - x[e]) <= allowed;
        }
        CHECK(within);
        CHECK(std::abs(*std::max_element(y.begin(), y.end())) > 0);
      }
    }
  }
  const auto moved = ticket.moved()[0];
  CHECK(moved.engine == Engine::host_codec);
  CHECK(moved.pages == 4);
  CHECK(moved.tokens == 64);
}

TEST_CASE("migrate: planar to interleaved and back is exact, since the codec is the same") {
  using A = Fp8WithScale<64, 128>;
  using B = Fp8WithScaleInterleaved<64, 128>;
  auto from = DevicePool<A, Host>::make({.layers = 1, .pages = 3}).value();
  auto to = DevicePool<B, Host>::make({.layers = 1, .pages = 3}).value();
  auto back = DevicePool<A, Host>::make({.layers = 1, .pages = 3}).value();
  auto a = from.allocate().value();
  auto b = to.allocate().value();
  auto c = back.allocate().value();
  fill_rows(from, a.id());
  auto stream = Stream<Host>::make().value();
  auto first = migrate(from, to, plan(std::vector{a}, std::vector{b}), stream).value();
  auto second = migrate(to, back, plan(std::vector{b}, std::vector{c}), stream).value();
  CHECK(second.wait().ok());
  const auto* const x = pool_access::const_view(from, EntrySlot(0)).page(a.id().value);
  const auto* const y = pool_access::const_view(to, EntrySlot(0)).page(b.id().value);
  const auto* const z = pool_access::const_view(back, EntrySlot(0)).page(c.id().value);
  for (int t = 0; t < 64; ++t) {
    CHECK(std::memcmp(x + A::offset<role::Value>(t), y + B::offset<role::Value>(t), 128) == 0);
    CHECK(std::memcmp(x + A::offset<role::Scale>(t), y + B::offset<role::Scale>(t), 4) == 0);
  }
  CHECK(std::memcmp(x, z, static_cast<std::size_t>(A::page_bytes)) == 0);
}

TEST_CASE("migrate: checks as a transfer does, between any sides") {
  using P = Bf16Contiguous<16, 128>;
  using Q = Fp8WithScale<16, 128>;
  auto from = DevicePool<P, Host>::make({.layers = 1, .pages = 4, .name = "old"}).value();
  auto to = HostPool<Q, Host>::make({.layers = 1, .pages = 4, .name = "new"}).value();
  auto a = from.allocate(2).value();
  auto b = to.allocate(2).value();
  fill_rows(from, a[0].id());
  fill_rows(from, a[1].id());
  auto stream = Stream<Host>::make().value();
  const auto bad = migrate(from, to, plan(std::vector{DevicePage(1), DevicePage(9)}, std::vector{HostPage(1), HostPage(2)}), stream);
  REQUIRE_FALSE(bad.ok());
  CHECK(contains(bad.error().message, "pool old: device page 9 is not below 4"));
  CHECK_FALSE(migrate(from, to, plan(std::vector{DevicePage(1)}, std::vector{HostPage(1), HostPage(2)}), stream).ok());
  CHECK(migrate(from, to, plan(a, b), stream, {.digest = true}).error().code == ErrorCode::unsupported);
  CHECK(migrate(from, to, plan(a, b), stream).value().wait().ok());
}

TEST_CASE("migrate: a page of one pool is not both source and destination; in another pool its id is another page's") {
  using P = Bf16Contiguous<16, 128>;
  auto pool = DevicePool<P, Host>::make({.layers = 1, .pages = 4, .name = "one"}).value();
  auto other = DevicePool<P, Host>::make({.layers = 1, .pages = 4}).value();
  auto pages = pool.allocate(3).value();
  auto others = other.allocate(3).value();
  fill_rows(pool, pages[0].id());
  fill_rows(pool, pages[1].id());
  const auto first = row(pool, pages[0].id(), 0, 3);
  auto stream = Stream<Host>::make().value();
  const auto swapped = migrate(pool, pool, plan(std::vector{pages[0], pages[1]}, std::vector{pages[1], pages[0]}), stream);
  REQUIRE_FALSE(swapped.ok());
  CHECK(swapped.error().code == ErrorCode::duplicate);
  CHECK(contains(swapped.error().message, "pool one: device page 2 is source and destination"));
  CHECK(row(pool, pages[0].id(), 0, 3) == first);
  CHECK(migrate(pool, pool, plan(std::vector{pages[0]}, std::vector{pages[2]}), stream).value().wait().ok());
  CHECK(row(pool, pages[2].id(), 0, 3) == first);
  CHECK(migrate(pool, other, plan(std::vector{pages[0], pages[1]}, std::vector{others[1], others[0]}), stream).value().wait().ok());
  CHECK(row(other, others[1].id(), 0, 3) == first);
}
