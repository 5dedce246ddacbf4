// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/base/std.hpp>

KVIRE_NAMESPACE_BEGIN

/// Hopper's warpgroup matrix products (sm_90a): 64 rows of A from registers or shared memory, B from shared memory, f32 accumulators.
///
/// Fragments, for lane l of warp w of the warpgroup, g = l / 4, c = l % 4: a[0], a[1] hold the c-th 4 bytes of the step's first 16 bytes of k
/// of rows 16w + g and 16w + g + 8; a[2], a[3] those of the second 16 bytes. d[4i + e] is row 16w + g + 8 (e / 2), column 8i + 2c + e % 2.
namespace ptx {

/// Where an operand lies in shared memory, as a product wants to know it. `low` has the address: adding bytes / 16 to it moves the operand.
struct Descriptor {
  kstd::uint32_t low;
  kstd::uint32_t high;

  KVIRE_DEVICE KVIRE_INLINE kstd::uint64_t at(kstd::uint32_t bytes) const {
    return static_cast<kstd::uint64_t>(high) << 32 | (low + (bytes >> 4));
  }
};
/// A B operand without swizzle: cores of 8 columns x 16 bytes of k, 128 contiguous bytes each. `k_step`: bytes from a core to the next along k;
/// `n_step`: along the columns; both, and the shared address, multiples of 16.
KVIRE_DEVICE KVIRE_INLINE Descriptor core_descriptor(kstd::uint32_t address, kstd::uint32_t k_step, kstd::uint32_t n_step) {
  return {(address >> 4) + (k_step >> 4 << 16), n_step >> 4};
}
/// An operand of rows of Width bytes, 64 or 128, as a tensor copy with that swizzle writes them: blocks of 8 rows, `Pitch` bytes from one to the next. The
/// shared address is a multiple of such a block.
template <int Width, int Pitch = 8 * Width>
KVIRE_DEVICE KVIRE_INLINE Descriptor swizzled_descriptor(kstd::uint32_t address) {
  return {(address >> 4) + (1U << 16), (Width == 128 ? 1U : 2U) << 30 | Pitch >> 4};
}

KVIRE_DEVICE KVIRE_INLINE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
KVIRE_DEVICE KVIRE_INLINE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
/// Waits until at most `Pending` committed groups are unfinished.
template <int Pending>
KVIRE_DEVICE KVIRE_INLINE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}
/// Tells the compiler that a register array may have changed, so that no use of it moves above a wait.
template <int N>
KVIRE_DEVICE KVIRE_INLINE void touch(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// wgmma_e4m3 and wgmma_bf16: d (+)= a x b of one k step (32 bytes), for 32, 64 and 128 columns, A as a descriptor or in registers; `accumulate` 0 starts
// from zero. wgmma_e5m2_e4m3: A of e5m2 in registers, B of e4m3. Inline assembly has no loops: macros spell the accumulators, and count the operands behind them.
#define KVIRE_WGMMA_LIST_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define KVIRE_WGMMA_LIST_32 KVIRE_WGMMA_LIST_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define KVIRE_WGMMA_LIST_64                                                                                              \
  KVIRE_WGMMA_LIST_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50," \
                      " %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define KVIRE_WGMMA_8(i) \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define KVIRE_WGMMA_OUT_16 KVIRE_WGMMA_8(0), KVIRE_WGMMA_8(8)
#define KVIRE_WGMMA_OUT_32 KVIRE_WGMMA_OUT_16, KVIRE_WGMMA_8(16), KVIRE_WGMMA_8(24)
#define KVIRE_WGMMA_OUT_64 KVIRE_WGMMA_OUT_32, KVIRE_WGMMA_8(32), KVIRE_WGMMA_8(40), KVIRE_WGMMA_8(48), KVIRE_WGMMA_8(56)
#define KVIRE_WGMMA_HEAD(columns, k, elements, n, accumulate) \
  "{\n.reg .pred p;\nsetp.ne.b32 p, %" #accumulate           \
  ", 0;\nwgmma.mma_async.sync.aligned.m64n" #columns "k" #k ".f32." elements " {" KVIRE_WGMMA_LIST_##n "}, "
// o0 to o5: the numbers of the operands behind n accumulators. `a_order`, `b_order`: which way 16-bit operands lie.
#define KVIRE_WGMMA_ELEMENT(columns, k, element, a_order, b_order, n, o0, o1, o2, o3, o4, o5)                                                             \
  KVIRE_DEVICE KVIRE_INLINE void wgmma_##element(float (&d)[n], kstd::uint64_t a, kstd::uint64_t b, int accumulate) {                                     \
    asm volatile(KVIRE_WGMMA_HEAD(columns, k, #element "." #element, n, o2) "%" #o0 ", %" #o1 ", p, 1, 1" a_order b_order ";\n}\n"                                      \
                 : KVIRE_WGMMA_OUT_##n                                                                                                                    \
                 : "l"(a), "l"(b), "r"(accumulate));                                                                                                      \
  }                                                                                                                                                       \
  KVIRE_DEVICE KVIRE_INLINE void wgmma_##element(float (&d)[n], const kstd::uint32_t (&a)[4], kstd::uint64_t b, int accumulate) {                         \
    asm volatile(KVIRE_WGMMA_HEAD(columns, k, #element "." #element, n, o5) "{%" #o0 ", %" #o1 ", %" #o2 ", %" #o3 "}, %" #o4 ", p, 1, 1" b_order ";\n}\n"              \
                 : KVIRE_WGMMA_OUT_##n                                                                                                                    \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));                                                                  \
  }
#define KVIRE_WGMMA_MIXED(columns, n, o0, o1, o2, o3, o4, o5)                                                                                             \
  KVIRE_DEVICE KVIRE_INLINE void wgmma_e5m2_e4m3(float (&d)[n], const kstd::uint32_t (&a)[4], kstd::uint64_t b, int accumulate) {                         \
    asm volatile(KVIRE_WGMMA_HEAD(columns, 32, "e5m2.e4m3", n, o5) "{%" #o0 ", %" #o1 ", %" #o2 ", %" #o3 "}, %" #o4 ", p, 1, 1;\n}\n"                    \
                 : KVIRE_WGMMA_OUT_##n                                                                                                                    \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));                                                                  \
  }
#define KVIRE_WGMMA(columns, ...)                                   \
  KVIRE_WGMMA_ELEMENT(columns, 32, e4m3, "", "", __VA_ARGS__)       \
  KVIRE_WGMMA_MIXED(columns, __VA_ARGS__)                           \
  KVIRE_WGMMA_ELEMENT(columns, 16, bf16, ", 0", ", 0", __VA_ARGS__)

KVIRE_WGMMA(32, 16, 16, 17, 18, 19, 20, 21)
KVIRE_WGMMA(64, 32, 32, 33, 34, 35, 36, 37)
KVIRE_WGMMA(128, 64, 64, 65, 66, 67, 68, 69)

#undef KVIRE_WGMMA
#undef KVIRE_WGMMA_MIXED
#undef KVIRE_WGMMA_ELEMENT
#undef KVIRE_WGMMA_HEAD
#undef KVIRE_WGMMA_OUT_64
#undef KVIRE_WGMMA_OUT_32
#undef KVIRE_WGMMA_OUT_16
#undef KVIRE_WGMMA_8
#undef KVIRE_WGMMA_LIST_64
#undef KVIRE_WGMMA_LIST_32
#undef KVIRE_WGMMA_LIST_16

}  // namespace ptx

KVIRE_NAMESPACE_END
