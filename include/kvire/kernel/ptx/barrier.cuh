// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/base/std.hpp>

KVIRE_NAMESPACE_BEGIN

/// Thin names for the PTX of mbarriers, bulk copies and named barriers (sm_90 and later). Addresses of shared memory are 32-bit `shared` addresses.
namespace ptx {

KVIRE_DEVICE KVIRE_INLINE kstd::uint32_t shared_address(const void* p) { return static_cast<kstd::uint32_t>(__cvta_generic_to_shared(p)); }

KVIRE_DEVICE KVIRE_INLINE void mbarrier_init(kstd::uint32_t barrier, kstd::uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
/// Makes initialised mbarriers visible to the copy engine.
KVIRE_DEVICE KVIRE_INLINE void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

KVIRE_DEVICE KVIRE_INLINE void mbarrier_arrive(kstd::uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
/// Arrives and announces `bytes` that the copy engine will deliver in this phase.
KVIRE_DEVICE KVIRE_INLINE void mbarrier_arrive_expect(kstd::uint32_t barrier, kstd::uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
/// Waits until the phase with this parity has completed. On a fresh barrier, parity 1 counts as completed.
KVIRE_DEVICE KVIRE_INLINE void mbarrier_wait(kstd::uint32_t barrier, kstd::uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra over;\n"
      "bra again;\n"
      "over:\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

/// Copies `bytes` (a multiple of 16; both addresses 16-byte aligned) from global to shared memory; counted on the mbarrier.
KVIRE_DEVICE KVIRE_INLINE void bulk_load(kstd::uint32_t to, const void* from, kstd::uint32_t bytes, kstd::uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}

/// Copies a box of a five-dimensional tensor map at (x, 0, 0, u, v), in elements, to shared memory; counted on the mbarrier.
KVIRE_DEVICE KVIRE_INLINE void tensor_load(kstd::uint32_t to, const void* map, int x, int u, int v, kstd::uint32_t barrier) {
  asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %3, %4, %5}], [%6];" ::"r"(to), "l"(map),
               "r"(x), "r"(0), "r"(u), "r"(v), "r"(barrier)
               : "memory");
}
KVIRE_DEVICE KVIRE_INLINE void prefetch_tensor_map(const void* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }

/// Orders this thread's ordinary shared-memory writes before later reads by the tensor cores and the copy engine.
KVIRE_DEVICE KVIRE_INLINE void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

/// Hardware barrier `id` (0 is __syncthreads) among `threads` threads.
KVIRE_DEVICE KVIRE_INLINE void named_barrier(int id, int threads) { asm volatile("barrier.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

/// The same without waiting.
KVIRE_DEVICE KVIRE_INLINE void named_barrier_arrive(int id, int threads) { asm volatile("barrier.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

/// True for one lane of the warp, all of whose lanes are here.
KVIRE_DEVICE KVIRE_INLINE bool elect() {
  kstd::uint32_t chosen;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xFFFFFFFF;\nselp.b32 %0, 1, 0, p;\n}" : "=r"(chosen));
  return chosen != 0;
}

/// Programmatic dependent launch: lets the stream's next kernel start, and waits until the earlier one has finished and its writes are visible. Nothing
/// before sm_90, where kernels start in turn. What earlier grids write is to be read by ordinary loads: those of __ldg, which the compiler takes for loads of
/// constants, it moves above the wait.
KVIRE_DEVICE KVIRE_INLINE void launch_dependents() {
#if KVIRE_DEVICE_ARCH >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
KVIRE_DEVICE KVIRE_INLINE void wait_for_earlier_grids() {
#if KVIRE_DEVICE_ARCH >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

KVIRE_DEVICE KVIRE_INLINE void prefetch_l2(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

struct Words4 {
  kstd::uint32_t x, y, z, w;
};
KVIRE_DEVICE KVIRE_INLINE Words4 load_shared4(kstd::uint32_t at) {
  Words4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
  return v;
}
KVIRE_DEVICE KVIRE_INLINE kstd::uint32_t load_shared(kstd::uint32_t at) {
  kstd::uint32_t v;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(at) : "memory");
  return v;
}
KVIRE_DEVICE KVIRE_INLINE void store_shared(kstd::uint32_t at, kstd::uint32_t v) { asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(v) : "memory"); }
/// Adds, and returns what was there. As it stands: atomicAdd of one lane becomes that of a warp's lanes together.
KVIRE_DEVICE KVIRE_INLINE kstd::uint32_t add_shared(kstd::uint32_t at, kstd::uint32_t v) {
  kstd::uint32_t old;
  asm volatile("atom.shared.add.u32 %0, [%1], %2;" : "=r"(old) : "r"(at), "r"(v) : "memory");
  return old;
}
KVIRE_DEVICE KVIRE_INLINE void store_shared4(kstd::uint32_t at, Words4 v) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
/// Global load of 16 bytes.
KVIRE_DEVICE KVIRE_INLINE Words4 load_global4(const void* p) {
  Words4 v;
  asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}

}  // namespace ptx

KVIRE_NAMESPACE_END
