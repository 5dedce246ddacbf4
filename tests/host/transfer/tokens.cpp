// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <kvire/preset/all.hpp>
#include <kvire/transfer/transfer.hpp>
#include <tests/support/pages.hpp>

using namespace kvire;
using kvire_test::contains;
using kvire_test::fill;
using kvire_test::pattern;
using kvire_test::snapshot;

namespace {

/// True if row `token` of the page, in every plane, is row `from_token` of a page filled with `seed`.
template <class P>
bool row_is(const std::byte* page, int token, std::uint32_t seed, int from_token, int layer) {
  for (int plane = 0; plane < P::plane_count; ++plane) {
    const std::int64_t bytes = P::table.row_bytes[plane];
    for (std::int64_t i = 0; i < bytes; ++i) {
      if (page[P::table.plane_offset[plane] + bytes * token + i] != pattern(seed, layer, P::table.plane_offset[plane] + bytes * from_token + i)) return false;
    }
  }
  return true;
}

}  // namespace

TEST_CASE_TEMPLATE("tokens: rows of every plane move, and nothing beside them", P, Fp8WithScale<64, 128>, Fp8WithScaleInterleaved<64, 128>,
                   Bf16Contiguous<64, 128>, Fp4WithScale<64, 128>, preset::deepseek_v4::Latent<64>, preset::deepseek_v4::Latent<2>,
                   preset::deepseek_v3_2::Latent<64>, KvPages<16, 2, 64>) {
  constexpr int tokens = P::tokens_per_page;
  auto stream = Stream<Host>::make().value();
  auto device = DevicePool<P, Host>::make({.layers = 2, .pages = 5, .arrangement = Arrangement::page_first}).value();
  auto host = mirror_of(device, 5, {.arrangement = Arrangement::layer_first}).value();
  auto pages = device.allocate(4).value();
  auto sources = host.allocate(4).value();
  for (auto& p : pages) fill(device, p.id(), 100 + static_cast<std::uint32_t>(p.id().value));
  for (auto& p : sources) fill(host, p.id(), 200 + static_cast<std::uint32_t>(p.id().value));
  // One row alone, a run across a page border, a run with different phases on both sides.
  std::vector<std::pair<int, int>> rows;
  const auto add = [&rows](int h, int d) {
    for (const auto& row : rows) {
      if (row.second == d) return;
    }
    rows.push_back({h, d});
  };
  add(1 * tokens + tokens - 1, 2 * tokens);
  for (int i = 0; i < tokens; ++i) add(2 * tokens + tokens / 2 + i, 3 * tokens + tokens / 2 + i);
  for (int i = 0; i < tokens / 2; ++i) add(1 * tokens + i, 1 * tokens + tokens / 2 + i);
  add(3 * tokens + 1, 4 * tokens + tokens - 1);
  add(4 * tokens, 3 * tokens);
  std::vector<HostSlot> from;
  std::vector<DeviceSlot> to;
  for (const auto& [h, d] : rows) {
    from.push_back({h});
    to.push_back({d});
  }
  // Slots of the host side may repeat.
  auto ticket = load(host, device, plan_tokens(from, to), stream, {.digest = true}).value();
  REQUIRE(ticket.wait().ok());
  for (int layer = 0; layer < 2; ++layer) {
    const auto view = pool_access::const_view(device, EntrySlot(layer));
    for (int slot = tokens; slot < 5 * tokens; ++slot) {
      auto expected_seed = 100u + static_cast<std::uint32_t>(slot / tokens);
      int expected_token = slot % tokens;
      for (const auto& [h, d] : rows) {
        if (d == slot) expected_seed = 200u + static_cast<std::uint32_t>(h / tokens), expected_token = h % tokens;
      }
      CAPTURE(slot);
      CHECK(row_is<P>(view.page(slot / tokens), slot % tokens, expected_seed, expected_token, layer));
    }
    // Page padding belongs to no token.
    for (auto& p : pages) {
      for (std::int64_t i = P::used_bytes; i < P::page_bytes; ++i) CHECK(view.page(p.id().value)[i] == pattern(100 + static_cast<std::uint32_t>(p.id().value), layer, i));
    }
  }
  const auto moved = ticket.moved()[0];
  CHECK(moved.granularity == Granularity::token);
  CHECK(moved.pages == 0);
  CHECK(moved.tokens == 2 * static_cast<std::int64_t>(rows.size()));
  CHECK(moved.bytes == moved.tokens * (P::used_bytes / tokens));
}

TEST_CASE("tokens: a full page of tokens is still a token transfer, from 64 different pages if need be") {
  // Choosing by the count of ids once copied one whole page for 64 single tokens.
  using P = Bf16Contiguous<4, 16>;
  auto device = DevicePool<P, Host>::make({.layers = 1, .pages = 6}).value();
  auto host = mirror_of(device, 6).value();
  auto pages = device.allocate(5).value();
  auto targets = host.allocate(5).value();
  for (auto& p : pages) fill(device, p.id(), static_cast<std::uint32_t>(p.id().value));
  for (auto& p : targets) fill(host, p.id(), 77);
  auto stream = Stream<Host>::make().value();
  std::vector<DeviceSlot> from;
  std::vector<HostSlot> to;
  for (int i = 1; i <= 4; ++i) {  // as many tokens as a page has
    from.push_back(slot_of<P>(DevicePage(i), i - 1));
    to.push_back(slot_of<P>(HostPage(5), i - 1));
  }
  CHECK(backup(device, host, plan_tokens(to, from), stream).value().wait().ok());
  for (int i = 1; i <= 4; ++i) CHECK(row_is<P>(pool_access::const_view(host, EntrySlot(0)).page(5), i - 1, static_cast<std::uint32_t>(i), i - 1, 0));
  for (int i = 1; i <= 4; ++i) CHECK(kvire_test::holds(host, HostPage(i), 77));
}

TEST_CASE("tokens: bad slots move no byte") {
  using P = Fp8WithScale<16, 64>;
  auto device = DevicePool<P, Host>::make({.layers = 1, .pages = 4, .name = "latent"}).value();
  auto host = mirror_of(device, 4).value();
  auto pages = device.allocate(2).value();
  auto sources = host.allocate(2).value();
  auto stream = Stream<Host>::make().value();
  const auto before = snapshot(device);
  const auto refuse = [&](std::vector<HostSlot> from, std::vector<DeviceSlot> to, ErrorCode code, const char* word) {
    const auto got = load(host, device, plan_tokens(from, to), stream);
    REQUIRE_FALSE(got.ok());
    CAPTURE(got.error().message);
    CHECK(got.error().code == code);
    CHECK(contains(got.error().message, word));
    CHECK(contains(got.error().message, "latent"));
  };
  const HostSlot h{20};
  refuse({h}, {{-1}}, ErrorCode::out_of_range, "token slot -1 is negative");
  refuse({h}, {{64}}, ErrorCode::out_of_range, "token slot 64 is not below 64");
  refuse({h}, {{std::int64_t(1) << 40}}, ErrorCode::out_of_range, "1099511627776");
  refuse({h}, {{5}}, ErrorCode::invalid_argument, "null page");
  refuse({h}, {{50}}, ErrorCode::invalid_argument, "device page 3");
  refuse({{-3}}, {{20}}, ErrorCode::out_of_range, "token slot -3");
  refuse({h, {21}}, {{20}, {20}}, ErrorCode::duplicate, "token slot 20");
  refuse({h, {21}}, {{20}}, ErrorCode::mismatch, "2 host page tokens with 1");
  // Slots of pages of another size, on either side.
  refuse({h}, {slot_of<Fp8WithScale<8, 64>>(DevicePage(2), 4)}, ErrorCode::mismatch, "token slot 20 counts pages of 8 tokens, those of the pool have 16");
  refuse({slot_of<Fp8WithScale<32, 64>>(HostPage(1), 0)}, {{20}}, ErrorCode::mismatch, "token slot 32 counts pages of 32 tokens");
  CHECK(stream.synchronize().ok());
  CHECK(snapshot(device) == before);
  CHECK(device.ledger().holds(pages[0].id()) == 0);
  CHECK(load(host, device, plan_tokens(std::vector{h, h}, std::vector<DeviceSlot>{{20}, slot_of<P>(DevicePage(2), 1)}), stream).value().wait().ok());
}
