// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <thread>

#include <kvire/layout/policies.hpp>
#include <kvire/memory/cuda/l2.hpp>
#include <kvire/pool/cuda/verify.hpp>
#include <kvire/preset/deepseek_v4.hpp>
#include <tests/support/cuda_pages.hpp>

using namespace kvire;
using kvire_test::clean;
using kvire_test::contains;

namespace {
using Keys = Fp8WithScale<64, 128>;
}  // namespace

TEST_CASE("pinned memory: registered in chunks that no page crosses, on the device at one address") {
  constexpr std::int64_t stride = Keys::page_bytes;
  PinnedMemory memory({.page_stride = stride, .chunk_bytes = 1000000});
  CHECK(memory.chunk_size() % stride == 0);
  CHECK(memory.chunk_size() % 4096 == 0);
  CHECK(memory.chunk_size() <= 1000000);
  const std::int64_t bytes = 500 * stride;
  auto p = memory.allocate(bytes, 256);
  REQUIRE(p.ok());
  CHECK(p.value()[bytes - 1] == std::byte{0});
  for (std::int64_t page = 0; page < 500; ++page) {
    auto first = device_address(HostAddress{p.value() + page * stride}, "test");
    auto last = device_address(HostAddress{p.value() + (page + 1) * stride - 1}, "test");
    REQUIRE(first.ok());
    REQUIRE(last.ok());
    CHECK(last.value().value - first.value().value == stride - 1);
  }
  CHECK(memory_node(p.value()) >= -1);
  memory.deallocate(p.value(), bytes, 256);
  const auto after = device_address(HostAddress{p.value()}, "test");
  REQUIRE_FALSE(after.ok());
  CHECK(after.error().code == ErrorCode::invalid_argument);
  CHECK(clean());
}

TEST_CASE("pinned memory: a chunk that cannot be registered takes the earlier ones back") {
  auto faults = std::make_shared<PinFaults>();
  PinnedMemory memory({.page_stride = 4096, .chunk_bytes = 1 << 20, .faults = faults});
  faults->fail_chunk = 3;
  const auto failed = memory.allocate(4 << 20, 256);
  REQUIRE_FALSE(failed.ok());
  CHECK(failed.error().code == ErrorCode::exhausted);
  CHECK(contains(failed.error().message, "4194304 bytes wanted"));
  CHECK(contains(failed.error().message, "available"));
  CHECK(contains(failed.error().message, "chunk 3"));
  CHECK(clean());
  faults->fail_chunk = -1;
  // Nothing is left registered: the same memory can be had again, many times.
  for (int i = 0; i < 20; ++i) {
    auto again = memory.allocate(4 << 20, 256);
    REQUIRE(again.ok());
    memory.deallocate(again.value(), 4 << 20, 256);
  }
  const auto huge = memory.allocate(std::int64_t{1} << 50, 256);
  REQUIRE_FALSE(huge.ok());
  CHECK(huge.error().code == ErrorCode::exhausted);
  CHECK(contains(huge.error().message, "1125899906842624 bytes wanted"));
  CHECK(contains(huge.error().message, "available"));
  CHECK(clean());
}

TEST_CASE("cuda pools: memory is had and given back while another thread captures") {
  auto captured = Stream<Cuda>::make({.name = "captured"}).value();
  REQUIRE(cudaStreamBeginCapture(captured.native(), cudaStreamCaptureModeGlobal) == cudaSuccess);
  std::byte* on_device = nullptr;
  std::byte* pinned = nullptr;
  std::thread([&] {
    DeviceMemory device_memory;
    PinnedMemory pinned_memory;
    const auto had = device_memory.allocate(1 << 20, 256);
    const auto had_pinned = pinned_memory.allocate(1 << 20, 256);
    CHECK(had.ok());
    CHECK(had_pinned.ok());
    if (had.ok()) device_memory.deallocate(on_device = had.value(), 1 << 20, 256);
    if (had_pinned.ok()) pinned_memory.deallocate(pinned = had_pinned.value(), 1 << 20, 256);
    auto stream = Stream<Cuda>::make();
    CHECK(stream.ok());
    if (stream.ok()) CHECK(stream.value().idle());
    auto pool = DevicePool<Keys, Cuda>::make({.pages = 4, .fill_on_free = 0xDD});
    CHECK(pool.ok());
    if (!pool.ok()) return;
    CHECK(mirror_of(pool.value(), 4).ok());
    const auto page = pool.value().allocate().value();
    CHECK(verify_padding(pool.value(), page.id()).ok());
  }).join();
  CHECK(captured.capturing());
  cudaGraph_t graph = nullptr;
  CHECK(cudaStreamEndCapture(captured.native(), &graph) == cudaSuccess);
  CHECK(cudaGraphDestroy(graph) == cudaSuccess);
  // Given back in truth.
  cudaPointerAttributes attributes{};
  CHECK(cudaPointerGetAttributes(&attributes, on_device) == cudaSuccess);
  CHECK(attributes.type == cudaMemoryTypeUnregistered);
  CHECK_FALSE(device_address(HostAddress{pinned}, "test").ok());
  CHECK(clean());
}

TEST_CASE("cuda pools: zeroed, mirrored, filled on free, refused beyond the device") {
  auto device = DevicePool<Keys, Cuda>::make({.layers = 3, .pages = 9, .fill_on_free = 0xDD}).value();
  auto host = mirror_of(device, 20).value();
  CHECK(host.layers() == 3);
  CHECK(host.pages() == 20);
  const std::vector<std::byte> zero(static_cast<std::size_t>(Keys::page_bytes));
  for (int layer = 0; layer < 3; ++layer) {
    CHECK(kvire_test::page_bytes(device, DevicePage(8), layer) == zero);
    CHECK(kvire_test::page_bytes(host, HostPage(19), layer) == zero);
  }
  DevicePage freed;
  {
    auto page = device.allocate().value();
    freed = page.id();
    kvire_test::fill_page(device, freed, 7);
    CHECK(kvire_test::has_page(device, freed, 7));
  }
  CHECK(kvire_test::page_bytes(device, freed, 1) == std::vector<std::byte>(zero.size(), std::byte{0xDD}));
  CHECK(device.fill_page(DevicePage(0), 0x5A).ok());
  CHECK(kvire_test::page_bytes(device, DevicePage(0), 2) == std::vector<std::byte>(zero.size(), std::byte{0x5A}));
  CHECK(host.verify_padding(HostPage(1)).ok());
  CHECK(verify_free(device, 0xDD).ok());
  kvire_test::fill_page(device, freed, 7);  // a write after the free
  CHECK(contains(verify_free(device, 0xDD).error().message, "page " + std::to_string(freed.value)));
  using Padded = preset::deepseek_v4::Latent<2>;
  auto padded = DevicePool<Padded, Cuda>::make({.pages = 3, .name = "latent"}).value();
  CHECK(verify_padding(padded, DevicePage(1)).ok());
  kvire_test::fill_page(padded, DevicePage(1), 7);
  CHECK(contains(verify_padding(padded, DevicePage(1)).error().message, "latent: page 1, layer 0: byte"));

  const auto too_much = DevicePool<Keys, Cuda>::make({.layers = 61, .pages = 1 << 30});
  REQUIRE_FALSE(too_much.ok());
  CHECK(too_much.error().code == ErrorCode::exhausted);
  CHECK(contains(too_much.error().message, "bytes wanted"));
  CHECK(clean());
}

TEST_CASE("cuda L2: what is set aside is what the driver says; what the device has not is refused") {
  std::size_t before = 0;
  REQUIRE(cudaDeviceGetLimit(&before, cudaLimitPersistingL2CacheSize) == cudaSuccess);
  int most = 0;
  REQUIRE(cudaDeviceGetAttribute(&most, cudaDevAttrMaxPersistingL2CacheSize, 0) == cudaSuccess);
  for (const std::int64_t bytes : {std::int64_t(0), std::int64_t(most) / 3, std::int64_t(most)}) {
    const auto set = set_aside_l2(bytes, 0);
    REQUIRE(set.ok());
    CHECK(set.value() >= bytes);
    std::size_t now = 0;
    CHECK(cudaDeviceGetLimit(&now, cudaLimitPersistingL2CacheSize) == cudaSuccess);
    CHECK(static_cast<std::int64_t>(now) == set.value());
  }
  const auto more = set_aside_l2(std::int64_t(most) + 1);
  REQUIRE_FALSE(more.ok());
  CHECK(more.error().code == ErrorCode::out_of_range);
  CHECK(contains(more.error().message, std::to_string(most + 1LL) + " bytes are wanted of the L2 of device 0, which can set " + std::to_string(most) + " aside"));
  CHECK(set_aside_l2(-1).error().code == ErrorCode::invalid_argument);
  CHECK(set_aside_l2(-1).error().message == "set_aside_l2: -1 bytes are wanted, less than 0");
  CHECK(contains(set_aside_l2(1, 99).error().message, "cudaErrorInvalidDevice"));
  CHECK(set_aside_l2(static_cast<std::int64_t>(before)).ok());
  CHECK(clean());
}
