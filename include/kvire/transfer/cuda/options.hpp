// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/exec/cuda/stream.hpp>
#include <kvire/transfer/ticket.hpp>

KVIRE_NAMESPACE_BEGIN

/// Who moves the bytes of a transfer.
enum class EngineChoice : unsigned char {
  automatic,    ///< by the mean length of runs of neighbouring pages: the copy engine from `copy_engine_run_bytes` on, a kernel below
  sm_kernel,    ///< a kernel on a few multiprocessors, at any run length
  copy_engine,  ///< the GPU's copy engine: no multiprocessor, but each run costs microseconds
};

/// Runs from which the copy engine is at least as fast as the kernel: on an H200 (PCIe 5 x16) it moves runs of 264 KiB at 91 % and of 528 KiB at 95 % of
/// the link's rate for one long copy, runs of 66 KiB at 72 %; the kernel reaches 91 to 95 % at any page size.
inline constexpr std::int64_t copy_engine_run_bytes = std::int64_t{1} << 18;

/// How much of the link a kernel takes, and what that costs compute kernels beside it (docs/performance.md has the measured trade).
enum class Pace : unsigned char {
  full,    ///< all of it, on as few multiprocessors as that takes
  gentle,  ///< nearly all of it: started by the clock just below what the link drains, fewer bytes under way, spread over more multiprocessors
  apart,   ///< by the clock too, from a few multiprocessors with room for nothing else: costs compute least if that leaves them free, and most if not
};

template <>
struct EngineOptions<Cuda> {
  EngineChoice choice = EngineChoice::automatic;
  int blocks = 0;            ///< multiprocessors that a kernel may use; 0: what the link needs and no more (4 for pages, 8 for tokens and for backups of pages below 8 KiB)
  Pace pace = Pace::full;
  double gigabytes_per_second = 0;  ///< of pages, at most, by the clock of the kernel; 0: what `pace` says. A backup at 41 leaves the link room for a load beside it.
  bool layer_events = true;  ///< false: all layers in one launch with one event, for loads that no gate waits for layer by layer
};

KVIRE_NAMESPACE_END
