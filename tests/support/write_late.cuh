// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include <kvire/kernel/ptx/barrier.cuh>

namespace kvire_test {

/// Writes `to` long after the stream's next kernel may start, if that is launched to overlap.
static __global__ void write_late(const std::uint32_t* from, std::uint32_t* to, std::int64_t n) {
  kvire::ptx::launch_dependents();
  for (const auto start = clock64(); clock64() - start < 1 << 20;) {
  }
  for (std::int64_t i = threadIdx.x; i < n; i += blockDim.x) to[i] = from[i];
}

}  // namespace kvire_test
