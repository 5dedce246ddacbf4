// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The only header that reads compiler macros. Everything else asks the KVIRE_ names defined here.

#include <kvire/base/version.hpp>

#define KVIRE_NAMESPACE_BEGIN \
  namespace kvire {           \
  inline namespace KVIRE_ABI_NAMESPACE {
#define KVIRE_NAMESPACE_END \
  }                         \
  }

// KVIRE_CUDA_COMPILER: nvcc (or NVRTC) parses this translation unit as CUDA.
// KVIRE_DEVICE_PASS:   this pass generates code for the GPU.
// KVIRE_RTC:           NVRTC, which has no host standard library.
#if defined(__CUDACC__)
#define KVIRE_CUDA_COMPILER 1
#else
#define KVIRE_CUDA_COMPILER 0
#endif
#if defined(__CUDA_ARCH__)
#define KVIRE_DEVICE_PASS 1
#else
#define KVIRE_DEVICE_PASS 0
#endif
// KVIRE_SM90A: this pass generates code for sm_90a, with Hopper's own instructions (wgmma).
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define KVIRE_SM90A 1
#else
#define KVIRE_SM90A 0
#endif
// KVIRE_DEVICE_ARCH: the compute capability this pass generates code for (900 is sm_90), 0 on the host.
#if defined(__CUDA_ARCH__)
#define KVIRE_DEVICE_ARCH __CUDA_ARCH__
#else
#define KVIRE_DEVICE_ARCH 0
#endif
// KVIRE_SM89_UP: this pass generates code for GPUs that convert fp8 in hardware.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ + 0 >= 890
#define KVIRE_SM89_UP 1
#else
#define KVIRE_SM89_UP 0
#endif
#if defined(__CUDACC_RTC__)
#define KVIRE_RTC 1
#else
#define KVIRE_RTC 0
#endif

// KVIRE_NODISCARD marks types whose values must be looked at. Not under nvcc, whose front end takes every assignment to such a type inside a
// generic lambda or a template for a value ignored.
#if KVIRE_CUDA_COMPILER
#define KVIRE_NODISCARD
#else
#define KVIRE_NODISCARD [[nodiscard]]
#endif

// KVIRE_HD marks what runs on both sides; a plain host compiler sees nothing.
#if KVIRE_CUDA_COMPILER
#define KVIRE_HD __host__ __device__
#define KVIRE_DEVICE __device__
#else
#define KVIRE_HD
#define KVIRE_DEVICE
#endif

#if defined(__GNUC__) || defined(__clang__)
#define KVIRE_INLINE inline __attribute__((always_inline))
#define KVIRE_NOINLINE __attribute__((noinline))
#define KVIRE_GNU 1
#define KVIRE_PREFETCH_WRITE(address) __builtin_prefetch((address), 1)
#else
#define KVIRE_INLINE inline
#define KVIRE_NOINLINE
#define KVIRE_GNU 0
#define KVIRE_PREFETCH_WRITE(address) ((void)(address))
#endif

#if defined(__clang__) && !KVIRE_CUDA_COMPILER
#define KVIRE_CLANG 1
#else
#define KVIRE_CLANG 0
#endif

// Vector versions of host kernels are built where the host is x86-64 and the compiler can target functions one by one; under nvcc too,
// so that a program's .cpp and .cu files agree about them (with clang as nvcc's host compiler they do not parse).
#if defined(__x86_64__) && KVIRE_GNU && !(KVIRE_CUDA_COMPILER && defined(__clang__))
#define KVIRE_X86_64 1
#else
#define KVIRE_X86_64 0
#endif
// Functions that a caller may enter only after asking the processor (kernel/host/level.hpp).
#if KVIRE_X86_64
#define KVIRE_TARGET_AVX2 __attribute__((target("avx2,fma")))
#define KVIRE_TARGET_AVX512 __attribute__((target("avx2,fma,avx512f")))
#endif

// KVIRE_OPAQUE(x): the optimiser may assume nothing about the float or double x from here on, so that no floating-point flag can fuse,
// reorder or approximate across this point. Costs no instruction (a store and a load where the register class is not known).
// KVIRE_HOST_FMA: the host target has a fused multiply-add instruction.
#if KVIRE_DEVICE_PASS
#define KVIRE_OPAQUE(x) ((void)(x))
#elif KVIRE_GNU && defined(__x86_64__)
#define KVIRE_OPAQUE(x) asm("" : "+x"(x))
#elif KVIRE_GNU && defined(__aarch64__)
#define KVIRE_OPAQUE(x) asm("" : "+w"(x))
#elif KVIRE_GNU
#define KVIRE_OPAQUE(x) asm("" : "+m"(x))
#else
#define KVIRE_OPAQUE(x) ((x) = *const_cast<const volatile decltype(x)*>(&(x)))
#endif
#if defined(__FMA__) || defined(__aarch64__)
#define KVIRE_HOST_FMA 1
#else
#define KVIRE_HOST_FMA 0
#endif

// Whether code may catch what others throw; kvire itself throws nothing.
#if defined(__cpp_exceptions)
#define KVIRE_EXCEPTIONS 1
#else
#define KVIRE_EXCEPTIONS 0
#endif

#if defined(__SANITIZE_THREAD__)
#define KVIRE_THREAD_SANITIZER 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define KVIRE_THREAD_SANITIZER 1
#endif
#endif
#if !defined(KVIRE_THREAD_SANITIZER)
#define KVIRE_THREAD_SANITIZER 0
#endif
