// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "device_array.hpp"

// What the GPU of the tests is, asked of the driver and not of what is tested.

namespace kvire_test {

inline int gpu_attribute(cudaDeviceAttr what) {
  int value = 0;
  cuda_ok(cudaDeviceGetAttribute(&value, what, 0));
  return value;
}
inline int multiprocessors() { return gpu_attribute(cudaDevAttrMultiProcessorCount); }

/// Whether this is a GPU that the Hopper kernels run on.
inline bool is_hopper() { return gpu_attribute(cudaDevAttrComputeCapabilityMajor) == 9 && gpu_attribute(cudaDevAttrComputeCapabilityMinor) == 0; }
/// The same; where it is none, the test says that it is skipped.
inline bool hopper() {
  if (is_hopper()) return true;
  MESSAGE("skipped: not a Hopper GPU");
  return false;
}

}  // namespace kvire_test
