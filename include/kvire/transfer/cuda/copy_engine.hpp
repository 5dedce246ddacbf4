// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include <kvire/transfer/cuda/engine.hpp>

KVIRE_NAMESPACE_BEGIN

namespace detail {

/// True if pair `i` of a list lies right behind the pair before it on both sides.
inline bool continues_run(const PageList& list, const CheckedIds<std::int32_t>& ids, std::size_t i) {
  return list.to_stride == list.page_bytes && list.from_stride == list.page_bytes && ids.from[i] == ids.from[i - 1] + 1 && ids.to[i] == ids.to[i - 1] + 1;
}

/// Bytes of a run of neighbouring pages, on average.
inline std::int64_t mean_run_bytes(const PageList& list, const CheckedIds<std::int32_t>& ids) {
  const std::size_t n = ids.to.size();
  if (n == 0) return 0;
  std::int64_t runs = 1;
  for (std::size_t i = 1; i < n; ++i) runs += !continues_run(list, ids, i);
  return static_cast<std::int64_t>(n) * list.page_bytes / runs;
}

/// Neighbouring pages as one copy each, by the copy engine. Error unsupported on a capturing stream, where CUDA may leave the copies out without a word.
inline Status copy_by_engine(Stream<Cuda>& stream, const PageList& list, const CheckedIds<std::int32_t>& ids) {
  if (stream.capturing()) return Error{ErrorCode::unsupported, "the copy engine cannot be used on a capturing stream: a batch of copies is not captured"};
  std::vector<void*> to;
  std::vector<const void*> from;
  std::vector<std::size_t> bytes;
  for (std::size_t i = 0; i < ids.to.size(); ++i) {
    if (i > 0 && continues_run(list, ids, i)) {
      bytes.back() += static_cast<std::size_t>(list.page_bytes);
      continue;
    }
    to.push_back(list.to + page_start(list.to_stride, ids.to[i]));
    from.push_back(list.from + page_start(list.from_stride, ids.from[i]));
    bytes.push_back(static_cast<std::size_t>(list.page_bytes));
  }
  if (to.empty()) return {};
  DeviceScope scope(stream.device());
  cudaMemcpyAttributes attributes{};
  attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
  std::size_t first = 0;
#if CUDART_VERSION >= 13000
  const cudaError_t e = cudaMemcpyBatchAsync(to.data(), from.data(), bytes.data(), to.size(), &attributes, &first, 1, stream.native());
#else
  std::size_t failed = 0;
  const cudaError_t e = cudaMemcpyBatchAsync(to.data(), const_cast<void**>(from.data()), bytes.data(), to.size(), &attributes, &first, 1, &failed, stream.native());
#endif
  if (e != cudaSuccess) return stream.error(e, "queueing a batch of copies");
  return {};
}

}  // namespace detail

KVIRE_NAMESPACE_END
