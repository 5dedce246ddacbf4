// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include <kvire/kernel/sm90_logits_plan.cuh>

KVIRE_NAMESPACE_BEGIN

/// Tensor maps: descriptions of pages and queries by which the tensor memory accelerator brings them to shared memory in swizzled rows.
namespace sm90 {

/// A tensor map, as the driver makes it: of the pages of a layer; of the queries, bytes and heads of a query token.
struct alignas(128) TensorMap {
  unsigned char bytes[128];
};

namespace detail {

/// Asks the driver for a tensor map of bytes: `extent` of them, then of Rank - 1 dimensions with their `stride` in bytes; `box`: what a copy brings. Swizzled
/// as wide as box[0], 64 or 128. `fetched`: what L2 reads from DRAM together. Host only; touches no memory of the device.
template <int Rank>
cudaError_t make_tensor_map(TensorMap& map, const void* data, const cuuint64_t (&extent)[Rank], const cuuint64_t (&stride)[Rank - 1], const cuuint32_t (&box)[Rank],
                            CUtensorMapL2promotion fetched) {
  static const auto encode = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found{};
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found);
    return error == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(entry) : nullptr;
  }();
  if (encode == nullptr) return cudaErrorNotSupported;
  static_assert(require_tuning<TensorMap, (sizeof(TensorMap) == sizeof(CUtensorMap) && alignof(TensorMap) >= alignof(CUtensorMap))>());
  const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
  const CUresult result = encode(reinterpret_cast<CUtensorMap*>(&map), CU_TENSOR_MAP_DATA_TYPE_UINT8, Rank, const_cast<void*>(data), extent, stride, box, steps,
                                 CU_TENSOR_MAP_INTERLEAVE_NONE, box[0] == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
                                 fetched, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

/// Pages: bytes of a plane's row, 8 tokens, planes, groups of 8 tokens, pages. A copy asks for whole pages as it is: where L2 fetches 256 bytes at a time, those of bf16 keys
/// take 8 % longer, in whatever order a box has them.
template <class Plan>
cudaError_t make_key_map(TensorMap& map, const LogitsArguments& a) {
  constexpr cuuint64_t row = Plan::key_row, groups = Plan::tokens / 8;
  constexpr int together = Plan::tokens < tile_tokens ? Plan::tokens : tile_tokens;
  return make_tensor_map<5>(map, a.pages, {Plan::width, 8, Plan::planes, groups, static_cast<cuuint64_t>(a.page_count > 0 ? a.page_count : 1)},
                            {row, Plan::width, 8 * row, static_cast<cuuint64_t>(a.page_stride)}, {Plan::width, 8, Plan::planes, together / 8, 1}, CU_TENSOR_MAP_L2_PROMOTION_NONE);
}
/// Queries: bytes of a head, then heads in the order of load_row (column 8 n + 2 c + e: head Heads / 4 c + 2 n + e), then query tokens.
template <class Plan, int Heads>
cudaError_t make_query_map(TensorMap& map, const LogitsArguments& a) {
  constexpr cuuint64_t row = Plan::query_row;
  return make_tensor_map<5>(map, a.queries, {row, 2, 4, Heads / 8, static_cast<cuuint64_t>(a.batch) * Plan::next_n}, {row, Heads / 4 * row, 2 * row, Heads * row},
                            {Plan::query_width, 2, 4, Heads / 8, 1}, CU_TENSOR_MAP_L2_PROMOTION_L2_256B);
}

}  // namespace detail
}  // namespace sm90

KVIRE_NAMESPACE_END
