// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/kernel/ptx/barrier.cuh>

KVIRE_NAMESPACE_BEGIN

/// Thin names for what the blocks of a cluster do together (sm_90 and later; elsewhere they do nothing, for code that is compiled but not run there).
/// Explicit addresses, so that the compiler cannot merge accesses to a peer's shared memory with local ones.
namespace ptx {

#if KVIRE_CUDA_COMPILER
#if KVIRE_DEVICE_ARCH >= 900
KVIRE_DEVICE KVIRE_INLINE kstd::uint32_t cluster_rank() {
  kstd::uint32_t r;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}
/// All threads of all blocks arrive; who waits sees what they had written before. That makes it wait for all memory (some 700 clocks); relaxed, it promises
/// nothing but that they have come this far.
KVIRE_DEVICE KVIRE_INLINE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
KVIRE_DEVICE KVIRE_INLINE void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
KVIRE_DEVICE KVIRE_INLINE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
/// Where `p`, in shared memory, lies in the block of that rank.
KVIRE_DEVICE KVIRE_INLINE kstd::uint32_t peer_address(const void* p, kstd::uint32_t rank) {
  kstd::uint32_t a;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(a) : "r"(shared_address(p)), "r"(rank));
  return a;
}
KVIRE_DEVICE KVIRE_INLINE void peer_store(kstd::uint32_t a, unsigned long long v) { asm volatile("st.shared::cluster.u64 [%0], %1;" ::"r"(a), "l"(v) : "memory"); }
KVIRE_DEVICE KVIRE_INLINE kstd::uint32_t peer_add(kstd::uint32_t a, kstd::uint32_t v) {
  kstd::uint32_t old;
  asm volatile("atom.shared::cluster.add.u32 %0, [%1], %2;" : "=r"(old) : "r"(a), "r"(v) : "memory");
  return old;
}
/// Stores to a peer that nothing waits for: `barrier`, an mbarrier of the same peer, counts their bytes, and who waits for its phase sees them.
KVIRE_DEVICE KVIRE_INLINE void peer_store_async(kstd::uint32_t a, unsigned long long v, kstd::uint32_t barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];" ::"r"(a), "l"(v), "r"(barrier) : "memory");
}
KVIRE_DEVICE KVIRE_INLINE void peer_store_async(kstd::uint32_t a, kstd::uint32_t v, kstd::uint32_t barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(a), "r"(v), "r"(barrier) : "memory");
}
KVIRE_DEVICE KVIRE_INLINE void peer_store_async(kstd::uint32_t a, Words4 v, kstd::uint32_t barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(a), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w),
               "r"(barrier)
               : "memory");
}
/// Arrives at a peer's mbarrier and announces `bytes` of them.
KVIRE_DEVICE KVIRE_INLINE void peer_arrive_expect(kstd::uint32_t barrier, kstd::uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.relaxed.cluster.shared::cluster.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
#else
KVIRE_DEVICE KVIRE_INLINE kstd::uint32_t cluster_rank() { return 0; }
KVIRE_DEVICE KVIRE_INLINE void cluster_arrive() {}
KVIRE_DEVICE KVIRE_INLINE void cluster_arrive_relaxed() {}
KVIRE_DEVICE KVIRE_INLINE void cluster_wait() {}
KVIRE_DEVICE KVIRE_INLINE kstd::uint32_t peer_address(const void* p, kstd::uint32_t) { return shared_address(p); }
KVIRE_DEVICE KVIRE_INLINE void peer_store(kstd::uint32_t, unsigned long long) {}
KVIRE_DEVICE KVIRE_INLINE kstd::uint32_t peer_add(kstd::uint32_t, kstd::uint32_t) { return 0; }
KVIRE_DEVICE KVIRE_INLINE void peer_store_async(kstd::uint32_t, unsigned long long, kstd::uint32_t) {}
KVIRE_DEVICE KVIRE_INLINE void peer_store_async(kstd::uint32_t, kstd::uint32_t, kstd::uint32_t) {}
KVIRE_DEVICE KVIRE_INLINE void peer_store_async(kstd::uint32_t, Words4, kstd::uint32_t) {}
KVIRE_DEVICE KVIRE_INLINE void peer_arrive_expect(kstd::uint32_t, kstd::uint32_t) {}
#endif
#endif

}  // namespace ptx

KVIRE_NAMESPACE_END
