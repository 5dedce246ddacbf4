// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>

#include <cuda_runtime.h>

#include <kvire/exec/cuda/error.hpp>

KVIRE_NAMESPACE_BEGIN
namespace detail {

#if KVIRE_CUDA_COMPILER

/// Uses much shared memory where it is compiled for sm_90a and none elsewhere: its attributes tell which of the two a device has got.
template <int Bytes>
__global__ void sm90a_probe_kernel(int* out) {
#if KVIRE_SM90A
  __shared__ int marker[Bytes / sizeof(int)];
  marker[threadIdx.x] = out[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = marker[out[threadIdx.x]];
#else
  (void)out;
#endif
}

/// What a device runs of the code that this program has.
struct DeviceCode {
  bool hopper = false;    // code for sm_90a
  bool portable = false;  // code for sm_80 or newer
  bool overlap = false;   // by programmatic dependent launch: code that waits for earlier kernels, on a device that may start it before they have ended
};

inline DeviceCode ask_device_code(int device) {
  constexpr int bytes = 4096;
  int major = 0;
  int minor = 0;
  cudaFuncAttributes attributes{};
  RelaxedCapture relaxed;
  const bool known = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
                     cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) == cudaSuccess &&
                     cudaFuncGetAttributes(&attributes, sm90a_probe_kernel<bytes>) == cudaSuccess;
  (void)cudaGetLastError();
  return {known && major == 9 && minor == 0 && attributes.sharedSizeBytes >= bytes, known && major >= 8 && attributes.ptxVersion >= 80,
          known && major >= 9 && attributes.ptxVersion >= 90};
}
/// The answer is asked for once a device, of the first 64.
inline DeviceCode device_code(int device) {
  static std::atomic<int> known[64];  // 0: not asked yet
  if (device < 0 || device >= 64) return ask_device_code(device);
  std::atomic<int>& cached = known[device];
  int answer = cached.load(std::memory_order_relaxed);
  if (answer == 0) {
    const DeviceCode code = ask_device_code(device);
    answer = 1 | (code.hopper ? 2 : 0) | (code.portable ? 4 : 0) | (code.overlap ? 8 : 0);
    cached.store(answer, std::memory_order_relaxed);
  }
  return {(answer & 2) != 0, (answer & 4) != 0, (answer & 8) != 0};
}

#endif  // KVIRE_CUDA_COMPILER

}  // namespace detail
KVIRE_NAMESPACE_END
