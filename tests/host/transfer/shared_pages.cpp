// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <kvire/preset/all.hpp>
#include <kvire/transfer/transfer.hpp>
#include <tests/support/pages.hpp>

using namespace kvire;
using kvire_test::contains;
using kvire_test::fill;
using kvire_test::holds;

// Transfers into pages that somebody else owns too: refused where the caller asks for it.

TEST_CASE("transfer alone: a destination with further owners is refused and not a byte of it changes; a shared source is not") {
  using Keys = Fp8WithScale<16, 64>;
  auto device = DevicePool<Keys, Host>::make({.layers = 2, .pages = 8, .name = "gpu"}).value();
  auto host = mirror_of(device, 8).value();
  auto stream = Stream<Host>::make().value();
  auto pages = device.allocate(2).value();
  auto saved = host.allocate(2).value();
  for (const auto& page : pages) fill(device, page.id(), 1);
  for (const auto& page : saved) fill(host, page.id(), 2);
  const auto moves = plan(saved, pages);
  const TransferOptions<Host> alone{.alone = true};

  auto sharer = pages[1];
  const auto refused = load(host, device, moves, stream, alone);
  REQUIRE_FALSE(refused.ok());
  CHECK(refused.error().code == ErrorCode::busy);
  CHECK(contains(refused.error().message, "pool gpu: device page 2 has 2 owners"));
  CHECK(stream.synchronize().ok());
  for (const auto& page : pages) CHECK(holds(device, page.id(), 1));
  CHECK(device.ledger().holds(pages[0].id()) == 0);
  CHECK(backup(device, host, moves, stream, alone).value().wait().ok());  // the shared page is read

  auto reader = saved[0];
  CHECK(contains(backup(device, host, moves, stream, alone).error().message, "host page 1 has 2 owners"));
  const auto rows = plan_tokens(std::vector{slot_of<Keys>(saved[0].id(), 3)}, std::vector{slot_of<Keys>(pages[1].id(), 3)});
  CHECK(load(host, device, rows, stream, alone).error().code == ErrorCode::busy);

  sharer.reset();
  reader.reset();
  CHECK(load(host, device, moves, stream, alone).value().wait().ok());
  CHECK(load(host, device, rows, stream, alone).value().wait().ok());
}
