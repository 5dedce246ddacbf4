// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include <cuda_runtime.h>

#include <kvire/base/config.hpp>

KVIRE_NAMESPACE_BEGIN
namespace detail {

#if KVIRE_CUDA_COMPILER

/// What a launch takes beside the stream and the kernel's arguments. Grid and block have one dimension.
struct LaunchShape {
  std::int64_t blocks = 1;       ///< of the grid; a multiple of `cluster`
  int threads = 1;               ///< of a block
  std::size_t shared_bytes = 0;  ///< dynamic shared memory of a block; above 48 KiB with the static part, the kernel's limit has been raised before
  bool overlap = false;          ///< programmatic dependent launch, from sm_90 on
  int cluster = 1;               ///< blocks of a cluster, above 1 from sm_90 on
};

/// Queues `kernel` on `stream`; captures; allocates nothing, waits for nothing. With `overlap` its blocks may start as soon as those of the stream's earlier
/// kernel have ended or called ptx::launch_dependents; what that one writes is there only behind ptx::wait_for_earlier_grids. The error is the launch's own
/// (cudaErrorInvalidConfiguration: a shape that the device cannot have), not one of earlier work.
template <class... Parameters, class... Arguments>
cudaError_t launch_kernel(void (*kernel)(Parameters...), const LaunchShape& shape, cudaStream_t stream, const Arguments&... arguments) {
  if (shape.blocks <= 0 || shape.blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  cudaLaunchAttribute attributes[2] = {};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(shape.blocks));
  config.blockDim = dim3(static_cast<unsigned>(shape.threads));
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  if (shape.overlap) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  if (shape.cluster > 1) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {static_cast<unsigned>(shape.cluster), 1, 1};
  }
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

#endif  // KVIRE_CUDA_COMPILER

}  // namespace detail
KVIRE_NAMESPACE_END
