// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/transfer/bulk_migrate.cuh>
#include <kvire/transfer/migrate.hpp>
#include <kvire/transfer/transfer.cuh>

KVIRE_NAMESPACE_BEGIN

namespace detail {

template <class From, class To>
Status launch_migrate_pages(Stream<Cuda>& stream, const PageList& list, UploadedPages ids, std::int64_t pages, const RowOptions& row, int blocks) {
  body::MigrateArgs args;
  args.pages.from = list.from;
  args.pages.from_stride = list.from_stride;
  args.pages.from_pages = list.from_pages;
  args.pages.to = list.to;
  args.pages.to_stride = list.to_stride;
  args.pages.to_pages = list.to_pages;
  args.pages.from_ids = ids.from;
  args.pages.to_ids = ids.to;
  args.row = row;
  if (pages == 0) return {};
  const auto grid = static_cast<unsigned>(blocks);
  bool bulk = false;
  if constexpr (BulkMigrate<From, To>::serves) {
    bulk = aligned(list) && CopyKernels::of(stream.device()).bulk;
    if (bulk) {
      constexpr int shared = BulkMigrate<From, To>::shared_bytes;
      if (const cudaError_t e = cudaFuncSetAttribute(bulk_migrate_kernel<From, To>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared); e != cudaSuccess) {
        return stream.error(e, "preparing a migration");
      }
      bulk_migrate_kernel<From, To><<<grid, BulkMigrate<From, To>::threads, shared, stream.native()>>>(args, pages);
    }
  }
  if (!bulk) {
    plain_kernel<MigrateItem<From, To>><<<grid, plain_warps * 32, 0, stream.native()>>>(MigrateItem<From, To>{args}, pages * From::tokens_per_page, nullptr);
  }
  if (const cudaError_t e = cudaGetLastError(); e != cudaSuccess) return stream.error(e, "launching a migration");
  return {};
}

}  // namespace detail

/// `migrate` of the CUDA backend: decoded and encoded by a kernel while the pages cross the link, to the bytes of the host's. From a host to a device
/// pool or back; between two device pools as well. Otherwise as the host's.
template <class P, class Q, class OtherBackend, class Side, class OtherSide, class Plan>
Result<PreparedTransfer<Cuda>> prepare_migrate(const PagePool<P, Cuda, Side>& from, PagePool<Q, OtherBackend, OtherSide>& to, const Plan& plan,
                                               const TransferOptions<Cuda>& options = {}, const RowOptions& row = {}) {
  using From = PagePool<P, Cuda, Side>;
  using To = PagePool<Q, OtherBackend, OtherSide>;
  detail::require_migrate_pools<From, To, Plan>();
  if constexpr (detail::migrates<From, To, Plan>) {
    if (options.digest || options.seals) return Error{ErrorCode::unsupported, "migrate '" + options.name + "': the checksums of two layouts cannot agree"};
    constexpr auto direction = detail::direction_between<From, To>();
    return detail::prepare_pools(from, to, plan, direction, options, [&](auto& piece, EntrySlot slot, auto ids, std::uint64_t) -> Status {
      const auto n = static_cast<std::int64_t>(ids->to.size());
      piece.count.engine = Engine::sm_kernel;
      piece.count.pages = n;
      piece.count.tokens = n * Q::tokens_per_page;
      piece.count.bytes = n * Q::used_bytes;
      const auto source = pool_access::const_view(from, slot);
      const auto target = pool_access::view(to, slot);
      piece.list = {target.base, source.base, target.page_stride, source.page_stride, target.pages, source.pages, Q::page_bytes};
      piece.pages = std::move(ids);
      piece.launch_migrate = &detail::launch_migrate_pages<P, Q>;
      piece.row = row;
      return {};
    });
  } else {
    return Error();
  }
}
template <class P, class Q, class OtherBackend, class Side, class OtherSide, class Plan>
Result<Ticket<Cuda>> migrate(const PagePool<P, Cuda, Side>& from, PagePool<Q, OtherBackend, OtherSide>& to, const Plan& plan, Stream<Cuda>& stream,
                             const TransferOptions<Cuda>& options = {}, const RowOptions& row = {}) {
  return detail::issue(prepare_migrate(from, to, plan, options, row), stream);
}

KVIRE_NAMESPACE_END
