// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <algorithm>

#include <kvire/preset/deepseek_v4.hpp>
#include <kvire/transfer/transfer.hpp>
#include <tests/support/pages.hpp>

using namespace kvire;
using kvire_test::contains;
using kvire_test::fill;

namespace {
using P = preset::deepseek_v4::Latent<64>;  // has padding in its rows and behind them

struct Pair {
  explicit Pair(Arrangement a, Arrangement b, std::int64_t skip)
      : device(DevicePool<P, Host>::make({.layers = 2, .pages = 9, .arrangement = a}).value()),
        host(mirror_of(device, 9, {.arrangement = b}).value()),
        skipped(device.allocate(skip).value()),
        pages(device.allocate(3).value()),
        targets(host.allocate(3).value()) {
    for (std::uint32_t i = 0; i < 3; ++i) fill(device, pages[i].id(), i);
  }
  std::byte* byte(int layer, std::size_t page, std::int64_t at) {
    return pool_access::view(device, EntrySlot(layer)).page(pages[page].id().value) + at;
  }
  Digest digest() {
    auto ticket = backup(device, host, plan(targets, pages), stream, {.digest = true}).value();
    CHECK(ticket.wait().ok());
    CHECK(ticket.source_digest() == ticket.destination_digest());
    return ticket.source_digest();
  }
  DevicePool<P, Host> device;
  HostPool<P, Host> host;
  std::vector<PageRef<DevicePage>> skipped;
  std::vector<PageRef<DevicePage>> pages;
  std::vector<PageRef<HostPage>> targets;
  Stream<Host> stream = Stream<Host>::make().value();
};
}  // namespace

TEST_CASE("digest: depends on the content, not on arrangement, page ids or padding") {
  Pair a(Arrangement::layer_first, Arrangement::page_first, 0);
  Pair b(Arrangement::page_first, Arrangement::layer_first, 4);
  const Digest digest = a.digest();
  CHECK(digest == b.digest());
  CHECK(digest != Digest{});
  *a.byte(0, 1, P::page_bytes - 1) = std::byte{1};                                        // page padding
  *a.byte(1, 2, P::offset<role::Scale>(5) + P::count_of<role::Scale>) ^= std::byte{0xFF};  // row padding
  CHECK(a.digest() == digest);
}

TEST_CASE("digest: any field of any token counts, and its place does") {
  Pair a(Arrangement::layer_first, Arrangement::layer_first, 0);
  const Digest digest = a.digest();
  for (const std::int64_t at : {P::offset<role::Nope>(0), P::offset<role::Rope>(63) + 127, P::offset<role::Scale>(63) + 6}) {
    *a.byte(1, 2, at) ^= std::byte{1};
    CHECK(a.digest() != digest);
    *a.byte(1, 2, at) ^= std::byte{1};
  }
  CHECK(a.digest() == digest);
  // Two tokens, two pages, two layers change places.
  const auto swap = [&](std::byte* x, std::byte* y, std::int64_t n) { std::swap_ranges(x, x + n, y); };
  const std::int64_t row = P::row_bytes<0>();
  swap(a.byte(0, 0, P::offset<role::Nope>(3)), a.byte(0, 0, P::offset<role::Nope>(4)), row);
  CHECK(a.digest() != digest);
  swap(a.byte(0, 0, P::offset<role::Nope>(3)), a.byte(0, 0, P::offset<role::Nope>(4)), row);
  swap(a.byte(0, 0, 0), a.byte(0, 1, 0), P::page_bytes);
  CHECK(a.digest() != digest);
  swap(a.byte(0, 0, 0), a.byte(0, 1, 0), P::page_bytes);
  swap(a.byte(0, 0, 0), a.byte(1, 0, 0), P::page_bytes);
  CHECK(a.digest() != digest);
}

TEST_CASE("digest: a copy that moved nothing and reported success is found, at its layer") {
  auto stream = Stream<Host>::make({.name = "liar", .faults = FaultHooks::make([](const CopyInfo& info) {
                                      return info.layer == 1 ? Fault::skip() : Fault::none();
                                    })})
                    .value();
  Pair a(Arrangement::layer_first, Arrangement::layer_first, 0);
  auto blind = backup(a.device, a.host, plan(a.targets, a.pages), stream).value();
  CHECK(blind.wait().ok());  // nobody can tell without
  Pair b(Arrangement::layer_first, Arrangement::layer_first, 0);
  auto checked = backup(b.device, b.host, plan(b.targets, b.pages), stream, {.digest = true}).value();
  const auto status = checked.wait();
  REQUIRE_FALSE(status.ok());
  CHECK(status.error().code == ErrorCode::mismatch);
  CHECK(contains(status.error().message, "layer 1"));
  CHECK(checked.progress()->wait(0).ok());
  CHECK_FALSE(checked.progress()->wait(1).ok());
}

TEST_CASE("digest: a page by pages and by tokens has one digest") {
  Pair a(Arrangement::layer_first, Arrangement::page_first, 0);
  const Digest digest = a.digest();
  std::vector<HostSlot> to;
  std::vector<DeviceSlot> from;
  for (std::size_t i = 0; i < 3; ++i) {
    for (int t = 0; t < P::tokens_per_page; ++t) {
      to.push_back(slot_of<P>(a.targets[i].id(), t));
      from.push_back(slot_of<P>(a.pages[i].id(), t));
    }
  }
  auto ticket = backup(a.device, a.host, plan_tokens(to, from), a.stream, {.digest = true}).value();
  CHECK(ticket.wait().ok());
  CHECK(ticket.destination_digest() == digest);
}
