// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <cmath>

#include <kvire/exec/host/stream.hpp>
#include <kvire/layout/policies.hpp>
#include <kvire/transfer/migrate.cuh>
#include <tests/support/cuda_pages.hpp>

using namespace kvire;
using namespace std::chrono_literals;

namespace {

// Host to device in one step, against the host backend's migrate of the same pages; then back again.
template <class From, class To>
void check_migrate(RowOptions row = {}) {
  CAPTURE(From::name);
  CAPTURE(To::name);
  constexpr int layers = 2;
  constexpr int pages = 9;
  auto host_stream = Stream<Host>::make().value();
  auto stream = Stream<Cuda>::make().value();
  auto source = HostPool<From, Cuda>::make({.layers = layers, .pages = pages + 1, .arrangement = Arrangement::page_first}).value();
  auto target = DevicePool<To, Cuda>::make({.layers = layers, .pages = pages + 3}).value();
  auto twin_source = HostPool<From, Host>::make({.layers = layers, .pages = pages + 1}).value();
  auto twin_target = DevicePool<To, Host>::make({.layers = layers, .pages = pages + 3}).value();
  auto from = source.allocate(pages).value();
  auto to = target.allocate(pages).value();
  auto twin_from = twin_source.allocate(pages).value();
  auto twin_to = twin_target.allocate(pages).value();
  for (int layer = 0; layer < layers; ++layer) {
    for (int p = 0; p < pages; ++p) {
      std::byte* const page = pool_access::view(source, EntrySlot(layer)).page(from[static_cast<std::size_t>(p)].id().value);
      for (int token = 0; token < From::tokens_per_page; ++token) {
        float x[From::dim];
        for (int i = 0; i < From::dim; ++i) {
          const std::uint32_t r = kvire_test::word(static_cast<std::uint32_t>(p), layer, token * From::dim + i);
          x[i] = std::ldexp(static_cast<float>(static_cast<int>(r >> 8) - (1 << 23)), static_cast<int>(r % 12) - 26);
        }
        encode_row<From>(x, page, token, row);
      }
      std::memcpy(pool_access::view(twin_source, EntrySlot(layer)).page(twin_from[static_cast<std::size_t>(p)].id().value), page, static_cast<std::size_t>(From::page_bytes));
    }
  }
  std::vector<HostPage> from_ids;
  std::vector<DevicePage> to_ids;
  for (int p = 0; p < pages; ++p) {
    from_ids.push_back(from[static_cast<std::size_t>(p)].id());
    to_ids.push_back(to[static_cast<std::size_t>(pages - 1 - p)].id());
  }
  auto twin = migrate(twin_source, twin_target, plan(from_ids, to_ids), host_stream, {}, row).value();
  REQUIRE(twin.wait(deadline_in(20s)).ok());
  auto ticket = migrate(source, target, plan(from_ids, to_ids), stream, {}, row).value();
  REQUIRE(ticket.wait(deadline_in(20s)).ok());
  CHECK(ticket.bytes() == twin.bytes());
  CHECK(ticket.moved()[0].engine == Engine::sm_kernel);
  int wrong = 0;
  for (int layer = 0; layer < layers; ++layer) {
    for (int page = 0; page < pages + 3; ++page) {
      const auto got = kvire_test::page_bytes(target, DevicePage(page), layer);
      wrong += std::memcmp(got.data(), pool_access::const_view(twin_target, EntrySlot(layer)).page(page), got.size()) != 0;
    }
  }
  CHECK(wrong == 0);
  // And back to the host, in the first layout.
  auto back = HostPool<From, Cuda>::make({.layers = layers, .pages = pages + 1}).value();
  auto twin_back = HostPool<From, Host>::make({.layers = layers, .pages = pages + 1}).value();
  auto back_refs = back.allocate(pages).value();
  auto twin_refs = twin_back.allocate(pages).value();
  REQUIRE(migrate(target, back, plan(to_ids, from_ids), stream, {}, row).value().wait(deadline_in(20s)).ok());
  REQUIRE(migrate(twin_target, twin_back, plan(to_ids, from_ids), host_stream, {}, row).value().wait(deadline_in(20s)).ok());
  for (int layer = 0; layer < layers; ++layer) {
    for (int page = 0; page < pages + 1; ++page) {
      const auto got = kvire_test::page_bytes(back, HostPage(page), layer);
      wrong += std::memcmp(got.data(), pool_access::const_view(twin_back, EntrySlot(layer)).page(page), got.size()) != 0;
    }
  }
  CHECK(wrong == 0);
  CHECK(cudaPeekAtLastError() == cudaSuccess);
}

}  // namespace

TEST_CASE("cuda migrate: the host's bytes, between every pair of key layouts") {
  check_migrate<Bf16Contiguous<64, 128>, Fp8WithScale<64, 128>>();
  check_migrate<Fp8WithScale<64, 128>, Bf16Contiguous<64, 128>>();
  check_migrate<Fp8WithScale<64, 128>, Fp8WithScaleInterleaved<64, 128>>();
  check_migrate<Bf16Contiguous<64, 128>, Fp4WithScale<64, 128>>(RowOptions{.ties = Ties::to_even});
  check_migrate<Fp4WithScale<64, 128>, Fp8WithScaleInterleaved<64, 128>>();
}
