// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/kernel/cuda/device_code.cuh>
#include <kvire/kernel/cuda/page_limit.cuh>
#include <kvire/kernel/store.cuh>
#include <kvire/kernel/store.hpp>

KVIRE_NAMESPACE_BEGIN

#if KVIRE_CUDA_COMPILER

/// store of the host on the CUDA backend: rows, slots, the prologue's tables and `counts` in device memory. Every policy is served.
/// Errors: invalid_argument as check_store says; those of the runtime.
template <LayoutPolicy P, class Lease>
Status store(Rows rows, const std::int64_t* slots, const Lease& lease, Stream<Cuda>& stream, const StoreOptions& options = {}) {
  require_target<P, Lease>();
  if constexpr (writes_pages<P, Lease>) {
    if (Status status = check_store<P>(rows, slots, options.prologue); !status.ok()) return status;
    return launch(
        stream,
        [&](cudaStream_t native, const auto& view) {
          body::StoreArgs<P> args;
          args.rows = rows.data;
          args.row_element = rows.element;
          args.row_stride = rows.stride == 0 ? P::dim : rows.stride;
          args.pages = view.base;
          args.page_stride = view.page_stride;
          args.page_count = view.pages;
          args.options = options.row;
          args.prologue = options.prologue;
          const cudaError_t error = detail::with_limit(slots, rows.count, P::tokens_per_page, lease, view.pages, native, [&](const std::int64_t* covered) {
            args.slots = covered;
            return launch_store<P>(args, rows.count, options.counts, native, options.overlap && detail::device_code(stream.device()).overlap);
          });
          return detail::cuda_status(error, "store");
        },
        lease);
  }
  return {};
}

#endif  // KVIRE_CUDA_COMPILER

KVIRE_NAMESPACE_END
