// SPDX-License-Identifier: Apache-2.0
#define LIBCUDACXX_ENABLE_EXPERIMENTAL_MEMORY_RESOURCE  // before anything of CCCL; versions up to 3.0 ask for it
#include <doctest/doctest.h>

#include <cuda/memory_resource>
#include <new>

#include <kvire/layout/policies.hpp>
#include <kvire/memory/cuda/device.hpp>
#include <kvire/memory/cuda/mr.hpp>
#include <kvire/memory/cuda/pinned.hpp>
#include <kvire/transfer/transfer.cuh>
#include <tests/support/cuda_pages.hpp>

using namespace kvire;
using namespace std::chrono_literals;
using kvire_test::contains;

namespace {

// A resource as a program has its own: counts, and refuses by exception.
struct Counted {
  struct Counts {
    std::size_t bytes = 0;
    std::size_t limit = std::size_t(1) << 30;
  };
  Counts* counts;

  void* allocate(std::size_t bytes, std::size_t) {
    if (counts->bytes + bytes > counts->limit) throw std::bad_alloc();
    void* p = nullptr;
    if (cudaMalloc(&p, bytes) != cudaSuccess) throw std::bad_alloc();
    counts->bytes += bytes;
    return p;
  }
  void deallocate(void* p, std::size_t bytes, std::size_t) {
    (void)cudaFree(p);
    counts->bytes -= bytes;
  }
  friend bool operator==(const Counted& a, const Counted& b) { return a.counts == b.counts; }
  [[maybe_unused]] friend void get_property(const Counted&, cuda::mr::device_accessible) noexcept {}
};

using Ref = cuda::mr::resource_ref<cuda::mr::device_accessible>;
using OnDevice = ToMr<DeviceMemory, cuda::mr::device_accessible>;
using Pinned = ToMr<PinnedMemory, cuda::mr::host_accessible, cuda::mr::device_accessible>;

static_assert(ByteResource<FromMr<Ref>> && ByteResource<FromMr<Counted>> && ByteResource<FromMr<OnDevice>>);
static_assert(cuda::mr::resource_with<OnDevice, cuda::mr::device_accessible>);
static_assert(!cuda::mr::resource_with<OnDevice, cuda::mr::host_accessible>);
static_assert(cuda::mr::resource_with<Pinned, cuda::mr::host_accessible, cuda::mr::device_accessible>);

}  // namespace

TEST_CASE("cuda memory: a pool on the memory of a cuda::mr resource, which gets every byte back") {
  using P = Fp8WithScale<64, 128>;
  Counted::Counts counts;
  Counted resource{&counts};
  {
    auto device = DevicePool<P, Cuda>::make({.layers = 2, .pages = 20, .memory = FromMr(Ref(resource))}).value();
    CHECK(counts.bytes >= static_cast<std::size_t>(2 * 20 * P::page_bytes));
    auto host = mirror_of(device, 20).value();
    auto stream = Stream<Cuda>::make().value();
    auto pages = device.allocate(3).value();
    auto targets = host.allocate(3).value();
    for (std::size_t i = 0; i < pages.size(); ++i) kvire_test::fill_page(device, pages[i].id(), static_cast<unsigned>(i));
    REQUIRE(backup(device, host, plan(targets, pages), stream).value().wait(deadline_in(20s)).ok());
    for (std::size_t i = 0; i < pages.size(); ++i) CHECK(kvire_test::has_page(host, targets[i].id(), static_cast<unsigned>(i)));
  }
  CHECK(counts.bytes == 0);
  counts.limit = 1000;
  const auto refused = DevicePool<P, Cuda>::make({.layers = 1, .pages = 4, .memory = FromMr(Ref(resource), "their memory")});
  REQUIRE_FALSE(refused.ok());
  CHECK(refused.error().code == ErrorCode::exhausted);
  CHECK(contains(refused.error().message, "their memory"));
  CHECK(contains(refused.error().message, "bad_alloc"));
  CHECK(FromMr(resource).allocate(0, 16).error().code == ErrorCode::invalid_argument);
}

TEST_CASE("cuda memory: kvire's resources behind cuda::mr") {
  Pinned pinned;
  cuda::mr::resource_ref<cuda::mr::host_accessible, cuda::mr::device_accessible> ref(pinned);
  void* p = ref.allocate(100000, 256);
  cudaPointerAttributes attributes{};
  REQUIRE(cudaPointerGetAttributes(&attributes, p) == cudaSuccess);
  CHECK(attributes.type == cudaMemoryTypeHost);
  ref.deallocate(p, 100000, 256);
  CHECK(pinned == Pinned(pinned));
  CHECK_FALSE(pinned == Pinned());
  OnDevice device(DeviceMemory(), [](const Error& error) { throw std::runtime_error(error.message); });
  CHECK_THROWS_WITH_AS(device.allocate(std::size_t(1) << 50), doctest::Contains("bytes wanted"), std::runtime_error);
  CHECK(cudaPeekAtLastError() == cudaSuccess);
}
