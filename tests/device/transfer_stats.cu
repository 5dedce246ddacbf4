// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <kvire/layout/policies.hpp>
#include <kvire/transfer/transfer.cuh>
#include <tests/support/cuda_pages.hpp>

using namespace kvire;
using namespace std::chrono_literals;

TEST_CASE("cuda transfer: totals count what has arrived, though nobody asked the ticket") {
  auto stream = Stream<Cuda>::make().value();
  auto device = DevicePool<Fp8WithScale<64, 128>, Cuda>::make({.layers = 3, .pages = 20}).value();
  auto host = mirror_of(device, 20).value();
  auto pages = device.allocate(5).value();
  auto targets = host.allocate(5).value();
  auto totals = std::make_shared<TransferStats>();
  for (int round = 1; round <= 4; ++round) {
    CHECK(backup(device, host, plan(targets, pages), stream, {.stats = totals}).ok());  // the ticket goes at once
    CHECK(stream.synchronize().ok());
    CHECK(totals->bytes() == round * 3 * 5 * Fp8WithScale<64, 128>::page_bytes);
  }
  // What fails does not count.
  auto broken = Stream<Cuda>::make({.faults = FaultHooks::make([](const CopyInfo& info) { return info.layer == 2 ? Fault::fail("cut") : Fault::none(); })}).value();
  CHECK_FALSE(load(host, device, plan(targets, pages), broken, {.stats = totals}).value().wait(deadline_in(20s)).ok());
  CHECK(totals->bytes() == (4 * 3 + 2) * 5 * Fp8WithScale<64, 128>::page_bytes);
}
