// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/kernel/migrate.cuh>
#include <kvire/transfer/bulk_copy.cuh>

KVIRE_NAMESPACE_BEGIN

namespace detail {

/// How pages are rewritten on their way through shared memory: one warp of a block brings them, the others rewrite their rows.
template <class From, class To>
struct BulkMigrate {
  static constexpr int warps = 22;  // 64 rows in three rounds
  static constexpr int threads = 32 * (warps + 1);
  static constexpr int stages = From::page_bytes <= 20 * 1024 ? 3 : 2;  // pages that wait to be rewritten, or are
  static constexpr int to_at = stages * static_cast<int>(align_up(From::page_bytes, kstd::int64_t(128)));
  static constexpr int to_slot = static_cast<int>(align_up(To::page_bytes, kstd::int64_t(128)));
  static constexpr int shared_bytes = to_at + 2 * to_slot;

  static constexpr bool padded() {
    bool padded = To::page_bytes != To::used_bytes;
    for (const Section& section : To::table.sections) padded = padded || section.padding;
    return padded;
  }
  /// Whole pages are written, so there must be no padding that would have to stay as it is.
  static constexpr bool serves = From::page_bytes % 16 == 0 && To::page_bytes % 16 == 0 && !padded() && shared_bytes <= 220 * 1024;
};

/// Pages of one layout by bulk copies into shared memory, their rows rewritten there, and out again as pages of another: over the link go whole
/// pages, whatever the rows look like. Ids as the plain kernel takes them. Grid: any number of blocks.
template <class From, class To>
__global__ void __launch_bounds__(BulkMigrate<From, To>::threads, 1) bulk_migrate_kernel(const __grid_constant__ body::MigrateArgs args, kstd::int64_t n) {
#if KVIRE_DEVICE_ARCH >= 900
  using Shape = BulkMigrate<From, To>;
  constexpr int stages = Shape::stages;
  constexpr int from_slot = Shape::to_at / stages;
  constexpr auto from_bytes = static_cast<kstd::uint32_t>(From::page_bytes);
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ kstd::uint64_t barriers[2 * stages];  // a page is there; it has been rewritten
  __shared__ kstd::int32_t target[stages];         // where the page of a slot goes; -1: nowhere
  const int lane = WarpGroup::lane();
  const int warp = WarpGroup::warp();
  const kstd::uint32_t full = ptx::shared_address(barriers);
  const kstd::uint32_t empty = full + 8 * stages;
  const kstd::int64_t pages = n > blockIdx.x ? (n - blockIdx.x - 1) / gridDim.x + 1 : 0;
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2 * stages; ++i) ptx::mbarrier_init(full + 8 * i, 1);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();

  if (warp == Shape::warps) {
    for (kstd::int64_t block = 0; block < pages; block += 32) {
      kstd::int32_t from = -1;
      kstd::int32_t to = -1;
      if (block + lane < pages) {
        const kstd::int64_t pair = blockIdx.x + (block + lane) * gridDim.x;
        from = args.pages.from_ids[pair];
        to = args.pages.to_ids[pair];
        if (body::classify(from, args.pages.from_pages, to, args.pages.to_pages, args.pages.first_page).copied == 0) to = -1;
      }
      for (int j = 0; j < 32 && block + j < pages; ++j) {
        const int source = __shfl_sync(~0U, from, j);
        const int page = __shfl_sync(~0U, to, j);
        if (lane == 0) {
          const auto round = static_cast<kstd::uint32_t>((block + j) / stages);
          const auto slot = static_cast<kstd::uint32_t>((block + j) % stages);
          ptx::mbarrier_wait(empty + 8 * slot, (round & 1) ^ 1);
          target[slot] = page;
          if (page < 0) {
            ptx::mbarrier_arrive(full + 8 * slot);
          } else {
            ptx::mbarrier_arrive_expect(full + 8 * slot, from_bytes);
            ptx::bulk_load(ptx::shared_address(shared) + slot * from_slot, args.pages.from + args.pages.from_stride * source, from_bytes, full + 8 * slot);
          }
        }
        __syncwarp();
      }
    }
    return;
  }

  for (kstd::int64_t k = 0; k < pages; ++k) {
    const auto round = static_cast<kstd::uint32_t>(k / stages);
    const auto slot = static_cast<kstd::uint32_t>(k % stages);
    const int out = Shape::to_at + static_cast<int>(k & 1) * Shape::to_slot;
    // The page before the last one has left its place.
    if (threadIdx.x == 0) ptx::bulk_wait_read<1>();
    ptx::named_barrier(1, 32 * Shape::warps);
    ptx::mbarrier_wait(full + 8 * slot, round & 1);
    const kstd::int32_t page = target[slot];
    if (page >= 0) {
      for (int token = warp; token < From::tokens_per_page; token += Shape::warps) {
        body::migrate_row<From, To>(WarpGroup{}, reinterpret_cast<const kstd::byte*>(shared + slot * from_slot), reinterpret_cast<kstd::byte*>(shared + out), token,
                                    args.row);
      }
    }
    ptx::fence_async_shared();
    ptx::named_barrier(1, 32 * Shape::warps);
    if (threadIdx.x == 0) {
      if (page >= 0) {
        ptx::bulk_store(args.pages.to + args.pages.to_stride * page, ptx::shared_address(shared) + static_cast<kstd::uint32_t>(out),
                        static_cast<kstd::uint32_t>(To::page_bytes));
      }
      ptx::bulk_commit();
      ptx::mbarrier_arrive(empty + 8 * slot);
    }
  }
  if (threadIdx.x == 0) ptx::bulk_wait<0>();
#else
  (void)args, (void)n;
  __trap();
#endif
}

}  // namespace detail

KVIRE_NAMESPACE_END
