// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/base/ids.hpp>
#include <kvire/kernel/ptx/barrier.cuh>
#include <kvire/transfer/cuda/copy_list.hpp>

KVIRE_NAMESPACE_BEGIN

namespace ptx {

/// Copies `bytes` (a multiple of 16; both addresses 16-byte aligned) from shared to global memory, as part of the thread's open bulk group.
KVIRE_DEVICE KVIRE_INLINE void bulk_store(void* to, kstd::uint32_t from, kstd::uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes) : "memory");
}
/// Nanoseconds, modulo 2^32.
KVIRE_DEVICE KVIRE_INLINE kstd::uint32_t nanoseconds() {
  kstd::uint32_t t;
  asm volatile("mov.u32 %0, %globaltimer_lo;" : "=r"(t)::"memory");
  return t;
}
KVIRE_DEVICE KVIRE_INLINE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
/// Waits until all but the last `N` groups have read their shared memory.
template <int N>
KVIRE_DEVICE KVIRE_INLINE void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}
/// Waits until all but the last `N` groups have finished their writes.
template <int N>
KVIRE_DEVICE KVIRE_INLINE void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory");
}
KVIRE_DEVICE KVIRE_INLINE kstd::uint64_t load_shared8(kstd::uint32_t at) {
  kstd::uint64_t v;
  asm volatile("ld.shared.b64 %0, [%1];" : "=l"(v) : "r"(at) : "memory");
  return v;
}
KVIRE_DEVICE KVIRE_INLINE void store_shared8(kstd::uint32_t at, kstd::uint64_t v) {
  asm volatile("st.shared.b64 [%0], %1;" ::"r"(at), "l"(v) : "memory");
}

}  // namespace ptx

namespace detail {

/// The shared memory of one warp: a table of 64 prepared copies (where from, where to, how many bytes), a barrier a slot, the slots.
struct BulkRing {
  static constexpr int table_entries = 64;
  static constexpr int entry_bytes = 24;
  static constexpr int max_slots = 31;  // fewer than a batch may have
  KVIRE_HD static constexpr int head_bytes() { return table_entries * entry_bytes + 32 * 8; }
  KVIRE_HD static constexpr int bytes(int slots, int slot_bytes) { return head_bytes() + slots * slot_bytes; }
};

// Which part of which page a warp's item is. Items of all pieces are numbered through, so one launch moves all layers and entries.
template <int Capacity>
struct BulkCursor {
  int piece = 0;
  int first = 0;  // item of the piece's first chunk

  KVIRE_DEVICE bool seek(const CopyList<Capacity>& list, int item) {
    while (piece < list.pieces && item >= list.piece[piece].end) first = list.piece[piece++].end;
    return piece < list.pieces;
  }
};

/// Pages through shared memory by bulk copies: one thread a warp keeps `slots` chunks in flight, the other lanes only prepare addresses. `Lag`
/// stores of a warp are under way at most; with `Finish` each counts until its last byte has arrived (writes to the host: more than the
/// link drains would block unrelated traffic), otherwise until its shared memory has been read.
/// With `Ids`, the first ids of the only piece come with the launch: a trip over the link less before the first page is on its way.
template <int Capacity, int Lag, bool Finish, int Ids = 0>
__global__ void __launch_bounds__(256, 8) bulk_copy_kernel(const __grid_constant__ CopyList<Capacity> list, const __grid_constant__ InlineIds<Ids> ids) {
#if KVIRE_DEVICE_ARCH >= 900
  extern __shared__ __align__(128) unsigned char shared[];
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(blockIdx.x) * (static_cast<int>(blockDim.x) / 32) + static_cast<int>(threadIdx.x) / 32;
  const int warps = static_cast<int>(gridDim.x) * (static_cast<int>(blockDim.x) / 32);
  // Heads first, then all slots, so that every slot starts on a multiple of 128.
  const kstd::uint32_t base = ptx::shared_address(shared);
  const kstd::uint32_t head = base + (threadIdx.x / 32) * BulkRing::head_bytes();
  const kstd::uint32_t barriers = head + BulkRing::table_entries * BulkRing::entry_bytes;
  const kstd::uint32_t ring = base + (blockDim.x / 32) * BulkRing::head_bytes() + (threadIdx.x / 32) * list.slots * list.slot_bytes;
  const int total = list.piece[list.pieces - 1].end;
  const int n = total > warp ? (total - warp - 1) / warps + 1 : 0;
  const int ahead = list.slots - Lag;

  if (lane < list.slots) ptx::mbarrier_init(barriers + lane * 8, 1);
  ptx::fence_mbarrier_init();
  __syncwarp();

  BulkCursor<Capacity> fetched;
  BulkCursor<Capacity> placed;
  kstd::int32_t from_id = -1;
  kstd::int32_t to_id = -1;
  int bad = 0;

  // Ids of the items of a batch, one a lane.
  const auto fetch = [&](int batch) {
    from_id = to_id = -1;
    const int i = batch * list.batch + lane;
    if (lane >= list.batch || i >= n || !fetched.seek(list, warp + i * warps)) return;
    const CopyPiece& p = list.piece[fetched.piece];
    const int pair = (warp + i * warps - fetched.first) / p.chunks;
    const kstd::int32_t* from_ids = p.from_ids;
    const kstd::int32_t* to_ids = p.to_ids;
    if constexpr (Ids > 0) {
      // By address: as constants, the ids of 32 lanes would be fetched one after the other.
      if (pair < Ids) {
        from_ids = ids.from;
        to_ids = ids.to;
      }
    }
    from_id = from_ids[pair];
    to_id = to_ids[pair];
  };
  // The size in the table carries the skew (in 16 bytes) in its low four bits.
  const auto start = [&](int slot, kstd::uint32_t entry) {
    const kstd::uint32_t word = ptx::load_shared(entry + 16);
    const kstd::uint32_t barrier = barriers + slot * 8;
    if (word == 0) {
      ptx::mbarrier_arrive(barrier);
    } else {
      const auto* from = reinterpret_cast<const void*>(ptx::load_shared8(entry));
      const kstd::uint32_t bytes = word & ~15u;
      ptx::mbarrier_arrive_expect(barrier, bytes);
      ptx::bulk_load(ring + slot * list.slot_bytes + (word & 15u) * 16, from, bytes, barrier);
    }
  };
  const auto place = [&](int batch) {
    if (lane >= list.batch) return;
    const int i = batch * list.batch + lane;
    const kstd::uint32_t entry = head + (i & (BulkRing::table_entries - 1)) * BulkRing::entry_bytes;
    kstd::uint32_t bytes = 0;
    if (i < n && placed.seek(list, warp + i * warps)) {
      const CopyPiece& p = list.piece[placed.piece];
      const int chunk = (warp + i * warps - placed.first) % p.chunks;
      if (from_id >= p.from_pages || to_id >= p.to_pages || from_id == null_page) {
        bad += chunk == 0 && to_id > null_page && from_id >= 0;
      } else if (from_id >= 0 && to_id > null_page) {
        const unsigned char* from = p.from + p.from_stride * from_id;
        unsigned char* to = p.to + p.to_stride * to_id;
        // Chunks end at multiples of 128 bytes of the host's address, whose requests are the dear ones.
        const int skew = static_cast<int>((list.to_host ? reinterpret_cast<kstd::uintptr_t>(to) : reinterpret_cast<kstd::uintptr_t>(from)) & 127);
        const int begin = chunk == 0 ? 0 : chunk * p.chunk_bytes - skew;
        int end = (chunk + 1) * p.chunk_bytes - skew;
        if (end > p.page_bytes) end = p.page_bytes;
        if (end > begin) {
          bytes = static_cast<kstd::uint32_t>(end - begin) | (chunk == 0 ? static_cast<kstd::uint32_t>(skew) >> 4 : 0);
          ptx::store_shared8(entry, reinterpret_cast<kstd::uint64_t>(from + begin));
          ptx::store_shared8(entry + 8, reinterpret_cast<kstd::uint64_t>(to + begin));
        }
      }
    }
    ptx::store_shared(entry + 16, bytes);
  };

  fetch(0);
  place(0);
  if (lane < ahead && lane < n) start(lane, head + lane * BulkRing::entry_bytes);
  fetch(1);
  int slot = 0;
  kstd::uint32_t parity = 0;
  kstd::uint32_t next = ptx::nanoseconds();
  for (int batch = 1, first = 0; first < n; ++batch) {
    // As far as copies are prepared; the ids of the next batch, a trip over the link behind pages that were asked for before, have come by then.
    const int stop = n < batch * list.batch - ahead ? n : batch * list.batch - ahead;
    __syncwarp();
    if (lane == 0) {
      for (int i = first; i < stop; ++i) {
        const kstd::uint32_t entry = head + (i & (BulkRing::table_entries - 1)) * BulkRing::entry_bytes;
        const kstd::uint32_t word = ptx::load_shared(entry + 16);
        ptx::mbarrier_wait(barriers + slot * 8, parity);
        if (list.pace != 0) {
          kstd::uint32_t now = ptx::nanoseconds();
          while (static_cast<int>(now - next) < 0) now = ptx::nanoseconds();
          // A warp that fell behind may catch up by one chunk, no more.
          if (static_cast<int>(now - next) > list.pace) next = now - list.pace;
          next += list.pace;
        }
        if (word != 0) {
          auto* to = reinterpret_cast<void*>(ptx::load_shared8(entry + 8));
          const kstd::uint32_t from = ring + slot * list.slot_bytes + (word & 15u) * 16;
          ptx::bulk_store(to, from, word & ~15u);
        }
        ptx::bulk_commit();
        if constexpr (Finish) {
          ptx::bulk_wait<Lag>();
        } else {
          ptx::bulk_wait_read<Lag>();
        }
        // The slot that item i + slots - Lag belongs in.
        if (i + ahead < n) start(slot >= Lag ? slot - Lag : slot - Lag + list.slots, head + ((i + ahead) & (BulkRing::table_entries - 1)) * BulkRing::entry_bytes);
        if (++slot == list.slots) {
          slot = 0;
          parity ^= 1;
        }
      }
    }
    first = stop;
    __syncwarp();
    place(batch);
    fetch(batch + 1);
  }
  if (lane == 0) ptx::bulk_wait<0>();
  if (bad != 0 && list.bad != nullptr) atomicAdd(list.bad, bad);
#else
  (void)list, (void)ids;
  __trap();
#endif
}

}  // namespace detail

KVIRE_NAMESPACE_END
