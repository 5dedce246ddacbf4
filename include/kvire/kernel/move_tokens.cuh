// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/kernel/cuda/page_limit.cuh>
#include <kvire/kernel/move_tokens.hpp>

KVIRE_NAMESPACE_BEGIN

namespace detail {
/// body::move_tokens, one token a work item.
template <LayoutPolicy P>
struct MoveTokensItem {
  using counts = CopyCounts;
  body::MoveTokensArgs args;
  template <LaneGroup G>
  KVIRE_HD CopyCounts operator()(G g, kstd::int64_t item) const {
    return body::move_tokens<P>(g, item, args);
  }
};
}  // namespace detail

#if KVIRE_CUDA_COMPILER

/// Queues the move of `n` tokens; pointers in memory that the device can reach, `counts` (or null) is added to. Captures; allocates nothing,
/// waits for nothing.
template <LayoutPolicy P>
cudaError_t launch_move_tokens(const body::MoveTokensArgs& args, std::int64_t n, CopyCounts* counts, cudaStream_t stream) {
  static_assert(require_layout<P>());
  return detail::launch_plain(detail::MoveTokensItem<P>{args}, n, counts, stream);
}

/// move_tokens of the host on the CUDA backend: lists and `counts` in device memory.
/// Errors: invalid_argument for a list without memory; those of the runtime.
template <LayoutPolicy P, class From, class To>
Status move_tokens(const std::int64_t* from_slots, const From& from, const std::int64_t* to_slots, const To& to, std::int64_t n, Stream<Cuda>& stream,
                   CopyCounts* counts = nullptr) {
  require_source<P, From>();
  require_target<P, To>();
  if constexpr (reads_pages<P, From> && writes_pages<P, To>) {
    if (Status status = detail::check_list("move_tokens", n, from_slots, to_slots); !status.ok()) return status;
    return launch(
        stream,
        [&](cudaStream_t native, const auto& source, const auto& target) {
          const cudaError_t error = detail::with_limit(to_slots, n, P::tokens_per_page, to, target.pages, native, [&](const std::int64_t* slots) {
            return launch_move_tokens<P>({source.base, source.page_stride, source.pages, target.base, target.page_stride, target.pages, from_slots, slots}, n,
                                         counts, native);
          });
          return detail::cuda_status(error, "move_tokens");
        },
        from, to);
  }
  return {};
}

#endif  // KVIRE_CUDA_COMPILER

KVIRE_NAMESPACE_END
