// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <bit>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include <kvire/exec/cuda/event.hpp>
#include <kvire/memory/cuda/address.hpp>

KVIRE_NAMESPACE_BEGIN

namespace detail {

/// Small pinned blocks for page ids, reused once the work that read them has finished, so that submitting allocates nothing in the long run. Kept
/// for the life of the process.
class ScratchCache {
 public:
  static ScratchCache& get() {
    static auto* cache = new ScratchCache;
    return *cache;
  }

  struct Block {
    HostAddress host;
    DeviceAddress device;
    std::size_t bytes = 0;
    Event<Cuda> busy;  // until this is final; empty: free
  };

  /// Errors of the runtime.
  Result<Block> take(std::size_t bytes) {
    const std::size_t size = std::bit_ceil(bytes < smallest ? smallest : bytes);
    {
      std::lock_guard lock(mutex_);
      for (auto& block : blocks_) {
        if (block.bytes != size || (block.busy.valid() && !is_final(block.busy.query()))) continue;
        Block found = std::move(block);
        block = std::move(blocks_.back());
        blocks_.pop_back();
        found.busy = {};
        return found;
      }
    }
    RelaxedCapture relaxed;
    void* p = nullptr;
    if (const cudaError_t e = cudaHostAlloc(&p, size, cudaHostAllocMapped | cudaHostAllocPortable); e != cudaSuccess) return cuda_error(e, "memory for page ids");
    auto device = device_address(HostAddress{static_cast<std::byte*>(p)}, "memory for page ids");
    if (!device.ok()) return device.error();
    return Block{HostAddress{static_cast<std::byte*>(p)}, device.value(), size, {}};
  }

  void give(Block block) {
    std::lock_guard lock(mutex_);
    blocks_.push_back(std::move(block));
  }

 private:
  static constexpr std::size_t smallest = 4096;
  std::mutex mutex_;
  std::vector<Block> blocks_;
};

/// A block of the cache that goes back to it with the event that proves it unread.
class Scratch {
 public:
  Scratch() = default;
  static Result<Scratch> make(std::size_t bytes) {
    auto block = ScratchCache::get().take(bytes);
    if (!block.ok()) return block.error();
    Scratch scratch;
    scratch.block_ = std::move(block).value();
    return Result<Scratch>(std::move(scratch));
  }
  Scratch(Scratch&& other) noexcept : block_(std::exchange(other.block_, {})) {}
  Scratch& operator=(Scratch&& other) noexcept {
    std::swap(block_, other.block_);
    return *this;
  }
  ~Scratch() {
    if (block_.bytes > 0) ScratchCache::get().give(std::move(block_));
  }

  std::byte* host() const { return block_.host.value; }
  std::byte* device() const { return block_.device.value; }
  /// Not to be reused before.
  void busy_until(Event<Cuda> event) { block_.busy = std::move(event); }

 private:
  ScratchCache::Block block_;
};

}  // namespace detail

KVIRE_NAMESPACE_END
