// SPDX-License-Identifier: Apache-2.0
// Hands the layout vocabulary, the codecs and kernel bodies to NVRTC, as an engine that compiles its kernels at run time does. Needs no GPU.
// Functions without a side are taken as device functions, as such engines do; no flag of an experimental kind.
// Arguments: the include folders, kvire's first.
#include <nvrtc.h>

#include <cstdio>
#include <string>
#include <vector>

namespace {

constexpr const char* source = R"(
#include <kvire/kernel/body/move_tokens.hpp>
#include <kvire/kernel/body/store.hpp>
#include <kvire/kernel/cuda/warp_group.cuh>
#include <kvire/layout.hpp>

using Policy = kvire::Fp8WithScale<64, 128>;
static_assert(kvire::LayoutPolicy<Policy>);

extern "C" __global__ void offsets(long long* out) {
  out[threadIdx.x] = Policy::offset<kvire::role::Value>(static_cast<int>(threadIdx.x));
}

extern "C" __global__ void store(kvire::body::StoreArgs<Policy> args) { kvire::body::store(kvire::WarpGroup{}, blockIdx.x, args); }

extern "C" __global__ void move(kvire::body::MoveTokensArgs args) { kvire::body::move_tokens<Policy>(kvire::WarpGroup{}, blockIdx.x, args); }
)";

int report(nvrtcResult result, const char* call) {
  if (result == NVRTC_SUCCESS) return 0;
  std::printf("%s: %s\n", call, nvrtcGetErrorString(result));
  return 1;
}

}  // namespace

int main(int argc, char** argv) {
  nvrtcProgram program = nullptr;
  if (report(nvrtcCreateProgram(&program, source, "offsets.cu", 0, nullptr, nullptr), "nvrtcCreateProgram") != 0) return 1;
  std::vector<std::string> texts{"--std=c++20", "--gpu-architecture=compute_90", "--device-as-default-execution-space"};
  for (int i = 1; i < argc; ++i) texts.push_back("--include-path=" + std::string(argv[i]));
  std::vector<const char*> options;
  for (const std::string& text : texts) options.push_back(text.c_str());

  const nvrtcResult compiled = nvrtcCompileProgram(program, static_cast<int>(options.size()), options.data());
  std::size_t size = 0;
  if (nvrtcGetProgramLogSize(program, &size) == NVRTC_SUCCESS && size > 1) {
    std::string log(size, '\0');
    nvrtcGetProgramLog(program, log.data());
    std::printf("%s\n", log.c_str());
  }
  const int status = report(compiled, "nvrtcCompileProgram");
  nvrtcDestroyProgram(&program);
  return status;
}
