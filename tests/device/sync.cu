// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <thread>

#include <kvire/layout/policies.hpp>
#include <kvire/sync/cuda/lease.hpp>
#include <kvire/sync/gate.hpp>
#include <kvire/transfer/transfer.cuh>
#include <tests/support/cuda_pages.hpp>
#include <tests/support/held.hpp>

using namespace kvire;
using namespace std::chrono_literals;
using kvire_test::clean;
using kvire_test::contains;
using kvire_test::fill_page;
using kvire_test::has_page;
using kvire_test::hold_stream;
using kvire_test::holding_stream;
using kvire_test::MirroredPages;

namespace {

using Keys = Fp8WithScale<64, 128>;

__global__ void read_page(ConstPageView<Keys, Cuda> view, int page, unsigned char* out) {
  for (int i = static_cast<int>(threadIdx.x); i < Keys::page_bytes; i += static_cast<int>(blockDim.x)) out[i] = static_cast<unsigned char>(view.page(page)[i]);
}
__global__ void write_page(PageView<Keys, Cuda> view, int page, unsigned char value) {
  for (int i = static_cast<int>(threadIdx.x); i < Keys::page_bytes; i += static_cast<int>(blockDim.x)) view.page(page)[i] = static_cast<std::byte>(value);
}

}  // namespace

TEST_CASE("cuda gate: a kernel runs behind its layer's load, however late that is" * doctest::test_suite("held")) {
  auto hold = CopyHold::make();
  auto copies = holding_stream("copies", hold, [](const CopyInfo& info) { return info.layer == 2; });
  auto compute = Stream<Cuda>::make({.name = "compute"}).value();
  MirroredPages<Keys> pools(4, 4, 1);
  auto& [device, host, source, target] = pools;
  fill_page(host, source[0].id(), 3);
  fill_page(device, target[0].id(), 99);
  unsigned char* out = nullptr;
  REQUIRE(cudaMalloc(&out, 4 * Keys::page_bytes) == cudaSuccess);
  Gate<Cuda> gate;
  auto prepared = prepare_load(host, device, plan(source, target), {.name = "load"}).value();
  CHECK(gate.begin({prepared}, compute, deadline_in(10ms)).error().code == ErrorCode::timeout);
  auto ticket = prepared.issue(copies).value();
  auto step = gate.begin({ticket}, compute).value();
  for (int layer = 0; layer < 4; ++layer) {
    auto lease = step.read(device, EntrySlot(layer)).value();
    CHECK(launch(compute, [&](cudaStream_t s, auto view) { read_page<<<1, 256, 0, s>>>(view, target[0].id().value, out + layer * Keys::page_bytes); }, lease).ok());
  }
  std::this_thread::sleep_for(30ms);
  CHECK_FALSE(compute.idle());
  hold->release();
  CHECK(compute.synchronize(deadline_in(10s)).ok());
  CHECK(step.status().ok());
  for (int layer = 0; layer < 4; ++layer) {
    std::vector<std::byte> got(static_cast<std::size_t>(Keys::page_bytes));
    REQUIRE(cudaMemcpy(got.data(), out + layer * Keys::page_bytes, got.size(), cudaMemcpyDefault) == cudaSuccess);
    CHECK(got == kvire_test::page_pattern<Keys>(3, layer));
  }
  REQUIRE(cudaFree(out) == cudaSuccess);
  CHECK(clean());
}

TEST_CASE("cuda gate: a failed load fails its readers") {
  auto copies = Stream<Cuda>::make({.name = "copies", .faults = FaultHooks::make([](const CopyInfo& info) { return info.layer == 2 ? Fault::fail("lost") : Fault::none(); })}).value();
  auto compute = Stream<Cuda>::make({.name = "compute"}).value();
  MirroredPages<Keys> pools(4, 4, 1);
  auto& [device, host, source, target] = pools;
  Gate<Cuda> gate;
  auto ticket = load(host, device, plan(source, target), copies).value();
  auto step = gate.begin({ticket}, compute).value();
  CHECK(step.read(device, EntrySlot(0)).ok());
  CHECK(step.read(device, EntrySlot(1)).ok());
  CHECK(contains(step.read(device, EntrySlot(2)).error().message, "lost"));
  CHECK_FALSE(step.read(device, EntrySlot(3)).ok());
  CHECK_FALSE(step.read(device, EntrySlot(2), std::vector{target[0].id()}).ok());
  CHECK(compute.synchronize(deadline_in(10s)).ok());
  CHECK(clean());
}

TEST_CASE("cuda leases: a write waits for a backup of its page, a backup for a write, and shared pages are refused" * doctest::test_suite("held")) {
  auto hold = CopyHold::make();
  auto copies = holding_stream("copies", hold);
  auto compute = Stream<Cuda>::make({.name = "compute"}).value();
  auto device = DevicePool<Keys, Cuda>::make({.pages = 4}).value();
  auto host = mirror_of(device, 4).value();
  auto saved = host.allocate(2).value();
  auto page = device.allocate(1).value();
  const std::vector<DevicePage> pages{page[0].id()};
  fill_page(device, pages[0], 8);
  Gate<Cuda> gate;
  auto step = gate.begin({}, compute).value();
  auto first = backup(device, host, plan(std::vector{saved[0]}, page), copies).value();
  {
    auto lease = step.write(device, EntrySlot(0), pages).value();
    CHECK(launch(compute, [&](cudaStream_t s, auto view) { write_page<<<1, 256, 0, s>>>(view, pages[0].value, 0x44); }, lease).ok());
    // The lease is alive: nobody knows where its last kernel will be.
    CHECK(backup(device, host, plan(std::vector{saved[1]}, page), copies).error().code == ErrorCode::busy);
  }
  auto second = backup(device, host, plan(std::vector{saved[1]}, page), copies).value();
  std::this_thread::sleep_for(20ms);
  CHECK_FALSE(compute.idle());
  hold->release();
  CHECK(first.wait(deadline_in(10s)).ok());
  CHECK(second.wait(deadline_in(10s)).ok());
  CHECK(has_page(host, saved[0].id(), 8));
  CHECK(kvire_test::page_bytes(host, saved[1].id(), 0) == std::vector<std::byte>(static_cast<std::size_t>(Keys::page_bytes), std::byte{0x44}));
  const auto shared = page[0];
  CHECK(step.write(device, EntrySlot(0), pages).error().code == ErrorCode::busy);
  CHECK(compute.synchronize(deadline_in(10s)).ok());
  CHECK(clean());
}

namespace {

/// A page of zeros, and two streams whose kernels share it.
struct Shared {
  Shared() {
    REQUIRE(cudaMalloc(&out, Keys::page_bytes) == cudaSuccess);
    REQUIRE(device.fill_page(page, 0).ok());
    REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
  }
  ~Shared() { CHECK(cudaFree(out) == cudaSuccess); }
  Step<Cuda> step(Stream<Cuda>& stream) { return Gate<Cuda>().begin({}, stream).value(); }
  auto write_lease(const Step<Cuda>& step, int slot = 0) { return step.write(device, EntrySlot(slot), std::vector{page}); }
  auto read_lease(const Step<Cuda>& step, int slot = 0) { return step.read(device, EntrySlot(slot), std::vector{page}); }
  Status write(const WriteLease<Keys, Cuda>& lease, Stream<Cuda>& stream, unsigned char value) {
    return launch(stream, [&](cudaStream_t s, auto view) { write_page<<<1, 256, 0, s>>>(view, page.value, value); }, lease);
  }
  Status read(const ReadLease<Keys, Cuda>& lease, Stream<Cuda>& stream) {
    return launch(stream, [&](cudaStream_t s, auto view) { read_page<<<1, 256, 0, s>>>(view, page.value, out); }, lease);
  }
  /// What the last `read` saw, everywhere in the page; -1 if not everywhere the same.
  int seen() {
    std::vector<unsigned char> got(static_cast<std::size_t>(Keys::page_bytes));
    REQUIRE(cudaMemcpy(got.data(), out, got.size(), cudaMemcpyDefault) == cudaSuccess);
    for (const unsigned char byte : got) {
      if (byte != got[0]) return -1;
    }
    return got[0];
  }

  DevicePool<Keys, Cuda> device = DevicePool<Keys, Cuda>::make({.layers = 2, .pages = 4, .name = "gpu"}).value();
  PageRef<DevicePage> owned = device.allocate().value();
  DevicePage page = owned.id();
  Stream<Cuda> a = Stream<Cuda>::make({.name = "a"}).value();
  Stream<Cuda> b = Stream<Cuda>::make({.name = "b"}).value();
  unsigned char* out = nullptr;
};

}  // namespace

TEST_CASE("cuda leases: kernels of two streams that share a page run in the order of their leases" * doctest::test_suite("held")) {
  Shared s;
  const auto prefill = s.step(s.a);
  const auto decode = s.step(s.b);
  auto hold = CopyHold::make();
  REQUIRE(hold_stream(s.a, hold).ok());
  {
    const auto lease = s.write_lease(prefill).value();
    CHECK(s.write(lease, s.a, 0x44).ok());
    // Alive, nobody knows where its last kernel will be; on its own stream that does not matter.
    const auto refused = s.read_lease(decode);
    REQUIRE_FALSE(refused.ok());
    CHECK(refused.error().code == ErrorCode::busy);
    CHECK(contains(refused.error().message, "pool gpu: store of device page 1 (lease) has not ended, and is of another stream"));
    CHECK(s.write_lease(decode).error().code == ErrorCode::busy);
    CHECK(s.read_lease(prefill).ok());
    CHECK(s.read(s.read_lease(decode, 1).value(), s.b).ok());
  }
  CHECK(s.b.synchronize(deadline_in(10s)).ok());
  CHECK(s.seen() == 0);  // of the other slot
  CHECK(s.read(s.read_lease(decode).value(), s.b).ok());
  std::this_thread::sleep_for(20ms);
  CHECK_FALSE(s.b.idle());
  hold->release();
  CHECK(s.b.synchronize(deadline_in(10s)).ok());
  CHECK(s.seen() == 0x44);

  // The next writer behind a reader.
  hold = CopyHold::make();
  REQUIRE(hold_stream(s.b, hold).ok());
  CHECK(s.read(s.read_lease(decode).value(), s.b).ok());
  CHECK(s.write(s.write_lease(prefill).value(), s.a, 0x55).ok());
  std::this_thread::sleep_for(20ms);
  CHECK_FALSE(s.a.idle());
  hold->release();
  CHECK(s.a.synchronize(deadline_in(10s)).ok());
  CHECK(s.seen() == 0x44);

  // A reader that is taken to another stream, behind the writer that it follows on its own.
  hold = CopyHold::make();
  REQUIRE(hold_stream(s.a, hold).ok());
  CHECK(s.write(s.write_lease(prefill).value(), s.a, 0x66).ok());
  CHECK(s.read(s.read_lease(prefill).value(), s.b).ok());
  std::this_thread::sleep_for(20ms);
  CHECK_FALSE(s.b.idle());
  hold->release();
  CHECK(s.b.synchronize(deadline_in(10s)).ok());
  CHECK(s.seen() == 0x66);
  CHECK(prefill.status().ok());
  CHECK(decode.status().ok());
  CHECK(clean());
}

TEST_CASE("cuda leases: a capture cannot come behind a kernel of another stream that has not run" * doctest::test_suite("held")) {
  Shared s;
  auto hold = CopyHold::make();
  REQUIRE(hold_stream(s.a, hold).ok());
  CHECK(s.write(s.write_lease(s.step(s.a)).value(), s.a, 0x44).ok());
  for (const bool pending : {true, false}) {
    CAPTURE(pending);
    if (!pending) {
      hold->release();
      CHECK(s.a.synchronize(deadline_in(10s)).ok());
    }
    const auto step = s.step(s.b);
    REQUIRE(cudaStreamBeginCapture(s.b.native(), cudaStreamCaptureModeThreadLocal) == cudaSuccess);
    CHECK(s.read(s.read_lease(step).value(), s.b).ok());
    cudaGraph_t graph = nullptr;
    CHECK(cudaStreamEndCapture(s.b.native(), &graph) == cudaSuccess);
    CHECK(cudaGraphDestroy(graph) == cudaSuccess);
    CHECK(step.status().ok() == !pending);
    if (pending) CHECK(contains(step.status().error().message, "pool gpu: store of device page 1: stream 'b' is capturing"));
  }
  CHECK(clean());
}

TEST_CASE("cuda leases: who reads a page under a kernel that was not queued fails, though the streams go on" * doctest::test_suite("held")) {
  Shared s;
  auto host = mirror_of(s.device, 4).value();
  auto saved = host.allocate(1).value();
  auto hold = CopyHold::make();
  REQUIRE(hold_stream(s.a, hold).ok());
  {
    const auto lease = s.write_lease(s.step(s.a)).value();
    kernel_access::fail(lease, Error{ErrorCode::failed, "unusable"});
    CHECK(s.write(lease, s.a, 0x44).ok());
  }
  const auto reading = s.step(s.b);
  CHECK(s.read(s.read_lease(reading).value(), s.b).ok());
  auto ticket = backup(s.device, host, plan(saved, std::vector{s.owned}), s.b).value();
  const auto writing = s.step(s.b);
  CHECK(s.write(s.write_lease(writing).value(), s.b, 0x55).ok());
  hold->release();
  CHECK(s.b.synchronize(deadline_in(10s)).ok());
  CHECK(contains(reading.status().error().message, "pool gpu: store of device page 1: unusable"));
  CHECK(contains(ticket.wait(deadline_in(10s)).error().message, "unusable"));
  CHECK(writing.status().ok());
  CHECK(s.a.synchronize(deadline_in(10s)).ok());
  CHECK(clean());
}

TEST_CASE("cuda leases: one of two streams captures, and the pages are held for the other" * doctest::test_suite("held")) {
  auto a = Stream<Cuda>::make({.name = "a"}).value();
  auto b = Stream<Cuda>::make({.name = "b"}).value();
  auto device = DevicePool<Keys, Cuda>::make({.pages = 4}).value();
  auto host = mirror_of(device, 4).value();
  auto saved = host.allocate(1).value();
  Gate<Cuda> gate;
  for (const bool capturing_first : {false, true}) {
    auto page = device.allocate(1).value();
    const std::vector<DevicePage> pages{page[0].id()};
    auto hold = CopyHold::make();
    CHECK(hold_stream(a, hold).ok());
    {
      auto lease = gate.begin({}, a).value().write(device, EntrySlot(0), pages).value();
      const auto write = [&](Stream<Cuda>& stream) {
        CHECK(launch(stream, [&](cudaStream_t s, auto view) { write_page<<<1, 256, 0, s>>>(view, pages[0].value, 0x44); }, lease).ok());
      };
      if (!capturing_first) write(a);
      REQUIRE(cudaStreamBeginCapture(b.native(), cudaStreamCaptureModeThreadLocal) == cudaSuccess);
      write(b);
      if (capturing_first) write(a);
    }
    cudaGraph_t graph = nullptr;
    CHECK(cudaStreamEndCapture(b.native(), &graph) == cudaSuccess);
    CHECK(cudaGraphDestroy(graph) == cudaSuccess);
    auto ticket = backup(device, host, plan(saved, page), b, {.name = "save"});
    page.clear();
    CHECK(device.draining_pages() == 1);
    hold->release();
    REQUIRE(ticket.ok());
    CHECK(ticket.value().wait(deadline_in(10s)).ok());
    CHECK(kvire_test::page_bytes(host, saved[0].id(), 0) == std::vector<std::byte>(static_cast<std::size_t>(Keys::page_bytes), std::byte{0x44}));
    { const auto gone = std::move(ticket).value(); }
    CHECK(a.synchronize(deadline_in(10s)).ok());
    CHECK(device.draining_pages() == 0);
  }
  CHECK(clean());
}
