// SPDX-License-Identifier: Apache-2.0
// A scheduler's .cpp that holds CUDA objects: a plain C++ file, the toolkit's headers and runtime come with kvire::cuda.
#include <cuda_runtime_api.h>

#include <kvire/layout.hpp>

#include <cstdio>

int main() {
  int version = 0;
  const cudaError_t error = cudaRuntimeGetVersion(&version);
  std::printf("CUDA runtime %d\n", version);
  return error == cudaSuccess && version >= 12080 ? 0 : 1;
}
