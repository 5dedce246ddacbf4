// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <atomic>
#include <memory>
#include <numeric>

#include <kvire/exec/host/parallel.hpp>
#include <kvire/memory/cuda/address.hpp>
#include <kvire/memory/huge_page.hpp>

KVIRE_NAMESPACE_BEGIN

/// Makes the registration of a chunk fail, for tests.
struct PinFaults {
  std::atomic<int> fail_chunk{-1};
};

struct PinnedOptions {
  std::int64_t page_stride = 1;                     ///< chunks end at multiples of this: no page lies in two registrations
  std::int64_t chunk_bytes = std::int64_t{1} << 35;  ///< at most so much in one registration; drivers refuse very large ones
  int numa_node = -1;                               ///< the memory node that all of it is to be on; -1: spread by the cores that touch it
  std::shared_ptr<PinFaults> faults = {};
};

/// Page-locked host memory that devices can address: huge pages, touched by all cores, then registered in chunks. Allocating this way takes a
/// small part of the time of cudaHostAlloc, which touches small pages with one thread.
/// Errors, after which nothing is left registered or mapped and no error is pending in the runtime: invalid_argument; exhausted with the bytes
/// wanted and available; failed with the chunk and the runtime's reason; for a memory node as HugePageMemory.
class PinnedMemory {
 public:
  static constexpr bool zeroed = true;

  PinnedMemory() = default;
  explicit PinnedMemory(PinnedOptions options) : options_(std::move(options)) {}

  std::string name() const { return "pinned memory"; }

  Result<std::byte*> allocate(std::int64_t bytes, std::int64_t alignment) {
    HugePageMemory pages{.numa_node = options_.numa_node};
    auto memory = pages.allocate(bytes, alignment);
    if (!memory.ok()) return Error{memory.error().code, name() + ": " + memory.error().message};
    std::byte* const p = memory.value();
    // One small page after the other where the system gave no huge ones; the place on machines with several memory nodes is decided here.
    parallel_for(ceil_div(bytes, HugePageMemory::huge_page), 1, [&](std::int64_t begin, std::int64_t end) {
      const std::int64_t stop = std::min(end * HugePageMemory::huge_page, bytes);
      for (std::int64_t at = begin * HugePageMemory::huge_page; at < stop; at += small_page) {
        *reinterpret_cast<volatile unsigned char*>(p + at) = 0;
      }
    });
    detail::RelaxedCapture relaxed;
    std::int64_t done = 0;
    std::int64_t offset_on_device = 0;
    for (int chunk = 0; done < bytes; ++chunk) {
      const std::int64_t size = std::min(chunk_size(), bytes - done);
      Status status = pin(p, done, size, chunk, bytes);
      if (status.ok()) {
        auto mapped = device_address(HostAddress{p + done}, name());
        if (mapped.ok() && chunk == 0) offset_on_device = mapped.value().value - p;
        if (!mapped.ok()) {
          (void)(status = mapped.error());
        } else if (mapped.value().value - (p + done) != offset_on_device) {
          (void)(status = Error{ErrorCode::unsupported, name() + ": chunk " + std::to_string(chunk) + " is not next to the one before it on the device"});
        }
        if (!status.ok()) unpin(p + done);
      }
      if (!status.ok()) {
        unpin_chunks(p, done);
        pages.deallocate(p, bytes, alignment);
        return status.error();
      }
      done += size;
    }
    return p;
  }

  void deallocate(std::byte* p, std::int64_t bytes, std::int64_t alignment) {
    detail::RelaxedCapture relaxed;
    unpin_chunks(p, bytes);
    HugePageMemory().deallocate(p, bytes, alignment);
  }

  /// Bytes of every registration but the last.
  std::int64_t chunk_size() const {
    const std::int64_t unit = std::lcm(std::max<std::int64_t>(options_.page_stride, 1), small_page);
    return std::max<std::int64_t>(1, options_.chunk_bytes / unit) * unit;
  }

 private:
  static constexpr std::int64_t small_page = 4096;

  Status pin(std::byte* p, std::int64_t at, std::int64_t size, int chunk, std::int64_t bytes) const {
    cudaError_t e = cudaSuccess;
    if (options_.faults && options_.faults->fail_chunk.load() == chunk) {
      e = cudaErrorMemoryAllocation;
    } else {
      e = cudaHostRegister(p + at, static_cast<std::size_t>(size), cudaHostRegisterPortable | cudaHostRegisterMapped);
    }
    if (e == cudaSuccess) return {};
    return detail::cuda_error(e, name() + ": " + std::to_string(bytes) + " bytes wanted, " + std::to_string(available_memory()) + " available; chunk " +
                                     std::to_string(chunk) + " (" + std::to_string(size) + " bytes after " + std::to_string(at) +
                                     ") could not be registered");
  }
  static void unpin(std::byte* p) {
    if (const cudaError_t e = cudaHostUnregister(p); e != cudaSuccess) (void)detail::cuda_error(e, "unregistering");
  }
  void unpin_chunks(std::byte* p, std::int64_t bytes) const {
    for (std::int64_t at = 0; at < bytes; at += chunk_size()) unpin(p + at);
  }

  PinnedOptions options_;
};

KVIRE_NAMESPACE_END
