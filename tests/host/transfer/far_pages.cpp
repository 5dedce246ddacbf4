// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <utility>
#include <vector>

#include <kvire/base/config.hpp>
#include <kvire/layout/policies.hpp>
#include <kvire/transfer/transfer.hpp>
#include <tests/support/pages.hpp>
#include <tests/support/sparse_memory.hpp>

using namespace kvire;
using namespace std::chrono_literals;
using kvire_test::fill;
using kvire_test::holds;
using kvire_test::SparseMemory;

namespace {

using Bf16 = Bf16Contiguous<64, 128>;

// The last page of a pool, and nothing else of it.
template <class Pool>
auto last_page(Pool& pool) {
  auto all = pool.allocate(pool.pages() - 1).value();
  auto last = std::move(all.back());
  REQUIRE(last.id().value == pool.pages() - 1);
  return last;
}

}  // namespace

TEST_CASE("transfer: pages and tokens beyond 2^31 and 2^32 bytes arrive there, and nowhere else") {
  if (KVIRE_THREAD_SANITIZER) {
    MESSAGE("skipped: ThreadSanitizer touches four shadow bytes for each byte that is mapped");
    return;
  }
  // Two layers inside the page on the device: page 65,536 of layer 0 starts at 2^31. Page 262,144 on the host starts at 2^32.
  auto device = DevicePool<Bf16, Host>::make({.layers = 2, .pages = 65'537, .arrangement = Arrangement::page_first, .memory = AnyResource(SparseMemory{})}).value();
  auto host = mirror_of(device, 262'145, {.arrangement = Arrangement::layer_first, .memory = AnyResource(SparseMemory{})}).value();
  auto page = last_page(device);
  auto kept = last_page(host);
  auto low = std::pair(device.allocate().value(), host.allocate().value());
  const auto page_of = [&](auto& pool, auto id) { return pool_access::view(pool, EntrySlot(0)).page(id.value); };
  CHECK(page_of(device, page.id()) - page_of(device, DevicePage(0)) == INT64_C(1) << 31);
  CHECK(page_of(host, kept.id()) - page_of(host, HostPage(0)) == INT64_C(1) << 32);
  auto stream = Stream<Host>::make().value();

  fill(host, kept.id(), 1);
  CHECK(load(host, device, plan(std::vector{kept}, std::vector{page}), stream, {.digest = true}).value().wait(deadline_in(60s)).ok());
  CHECK(holds(device, page.id(), 1));
  CHECK(page_of(device, DevicePage(0))[0] == std::byte{0});  // where a page start that wraps would lie

  fill(device, page.id(), 2);
  CHECK(backup(device, host, plan(std::vector{kept, low.second}, std::vector{page, low.first}), stream).value().wait(deadline_in(60s)).ok());
  CHECK(holds(host, kept.id(), 2));
  CHECK(page_of(host, HostPage(0))[0] == std::byte{0});

  // Slots of tokens exceed 2^24 here, and their bytes 2^32.
  const auto tokens = plan_tokens(std::vector{slot_of<Bf16>(kept.id(), 63)}, std::vector{slot_of<Bf16>(low.first.id(), 5)});
  CHECK(load(host, device, tokens, stream).value().wait(deadline_in(60s)).ok());
  CHECK(std::memcmp(page_of(device, low.first.id()) + Bf16::offset<role::Value>(5), page_of(host, kept.id()) + Bf16::offset<role::Value>(63), 256) == 0);
}
