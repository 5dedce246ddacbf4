// SPDX-License-Identifier: Apache-2.0
#include <cstdint>

#include <doctest/doctest.h>

#include <kvire/kernel/cuda/launch.cuh>
#include <tests/support/gpu.hpp>

using namespace kvire;
using namespace kvire_test;
using kvire::detail::launch_kernel;

namespace {

struct Seen {
  int sum, blocks, threads, cluster, shared_bytes;
};

__global__ void note(std::int64_t x, Seen* seen) {
  if (threadIdx.x != 0) return;
  atomicAdd(&seen->sum, int(x >> 32));
  if (blockIdx.x != 0) return;
  seen->blocks = int(gridDim.x);
  seen->threads = int(blockDim.x);
  seen->cluster = 1;
  asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(seen->shared_bytes));
#if KVIRE_DEVICE_ARCH >= 900
  asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(seen->cluster));
#endif
}

}  // namespace

TEST_CASE("cuda launch: the shape and the arguments that the kernel sees, one after the other and in clusters") {
  const bool newer = gpu_attribute(cudaDevAttrComputeCapabilityMajor) >= 9;
  for (const int cluster : {1, 2}) {
    if (cluster > 1 && !newer) continue;
    const DeviceCounts<Seen> seen;
    for (int i = 0; i < 3; ++i) cuda_ok(launch_kernel(note, {4, 96, 1024, newer, cluster}, nullptr, std::int64_t(5) << 32, seen.data()));
    const Seen got = seen.value();
    CHECK(got.sum == 3 * 4 * 5);
    CHECK(got.blocks == 4);
    CHECK(got.threads == 96);
    CHECK(got.cluster == cluster);
    CHECK(got.shared_bytes == 1024);
  }
}

TEST_CASE("cuda launch: no blocks, and more than a grid has, are errors and leave none behind") {
  const DeviceCounts<Seen> seen;
  for (const std::int64_t blocks : {std::int64_t(0), std::int64_t(-1), (std::int64_t(1) << 32) + 1}) {
    CHECK(launch_kernel(note, {blocks, 32}, nullptr, 1, seen.data()) == cudaErrorInvalidConfiguration);
  }
  CHECK(seen.value().threads == 0);
  CHECK(cudaGetLastError() == cudaSuccess);
}
