// SPDX-License-Identifier: Apache-2.0
// doctest's main for tests that need a GPU: without one they are skipped, and say so.
#define DOCTEST_CONFIG_IMPLEMENT
#include <cuda_runtime_api.h>
#include <doctest/doctest.h>

#include <cstdio>
#include <cstdlib>

int main(int argc, char** argv) {
  // CUDA may wait for the whole device when it loads a kernel at its first launch: for ever, if a test holds a stream meanwhile.
  setenv("CUDA_MODULE_LOADING", "EAGER", 0);
  int devices = 0;
  const cudaError_t error = cudaGetDeviceCount(&devices);
  if (error != cudaSuccess || devices == 0) {
    std::printf("skipped: no CUDA device (%s)\n", error == cudaSuccess ? "none present" : cudaGetErrorString(error));
    return 0;
  }
  return doctest::Context(argc, argv).run();
}
