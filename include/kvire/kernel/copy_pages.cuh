// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/kernel/copy_pages.hpp>
#include <kvire/kernel/cuda/page_limit.cuh>

KVIRE_NAMESPACE_BEGIN

namespace detail {
/// body::copy_pages, one page a work item.
template <LayoutPolicy P>
struct CopyPagesItem {
  using counts = CopyCounts;
  body::CopyPagesArgs args;
  template <LaneGroup G>
  KVIRE_HD CopyCounts operator()(G g, kstd::int64_t item) const {
    return body::copy_pages<P>(g, item, args);
  }
};
}  // namespace detail

#if KVIRE_CUDA_COMPILER

/// Queues the copy of `n` pages; pointers in memory that the device can reach, `counts` (or null) is added to. Captures; allocates nothing,
/// waits for nothing.
template <LayoutPolicy P>
cudaError_t launch_copy_pages(const body::CopyPagesArgs& args, std::int64_t n, CopyCounts* counts, cudaStream_t stream) {
  static_assert(require_layout<P>());
  return detail::launch_plain(detail::CopyPagesItem<P>{args}, n, counts, stream);
}

/// copy_pages of the host on the CUDA backend: lists and `counts` in device memory.
/// Errors: invalid_argument for a list without memory; those of the runtime.
template <LayoutPolicy P, class From, class To>
Status copy_pages(const std::int32_t* from_ids, const From& from, const std::int32_t* to_ids, const To& to, std::int64_t n, Stream<Cuda>& stream,
                  CopyCounts* counts = nullptr) {
  require_source<P, From>();
  require_target<P, To>();
  if constexpr (reads_pages<P, From> && writes_pages<P, To>) {
    if (Status status = detail::check_list("copy_pages", n, from_ids, to_ids); !status.ok()) return status;
    return launch(
        stream,
        [&](cudaStream_t native, const auto& source, const auto& target) {
          const cudaError_t error = detail::with_limit(to_ids, n, 1, to, target.pages, native, [&](const std::int32_t* ids) {
            return launch_copy_pages<P>({source.base, source.page_stride, source.pages, target.base, target.page_stride, target.pages, from_ids, ids}, n, counts,
                                        native);
          });
          return detail::cuda_status(error, "copy_pages");
        },
        from, to);
  }
  return {};
}

#endif  // KVIRE_CUDA_COMPILER

KVIRE_NAMESPACE_END
