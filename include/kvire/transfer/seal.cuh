// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <kvire/transfer/cuda/engine.hpp>

KVIRE_NAMESPACE_BEGIN

namespace detail {

/// Pages of one layer of one entry on the device, as the seal kernel takes them.
struct SealPages {
  const std::byte* base = nullptr;  ///< page 0
  kstd::int64_t page_stride = 0;
  kstd::int64_t page_bytes = 0;
  const kstd::int32_t* ids = nullptr;
  kstd::uint64_t* seals = nullptr;  ///< one a page
  kstd::uint64_t key = 0;
  kstd::int32_t end = 0;  ///< pages of this layer and of those before it
};
/// What one launch seals; passed by value.
struct SealList {
  static constexpr int capacity = 32;
  SealPages of[capacity];
  int count = 0;
};

/// One page a block at a time.
template <int Threads>
__global__ void __launch_bounds__(Threads) seal_kernel(const __grid_constant__ SealList list) {
  __shared__ kstd::uint64_t warps[Threads / 32];
  const kstd::int32_t pages = list.of[list.count - 1].end;
  int layer = 0;
  for (kstd::int32_t i = static_cast<kstd::int32_t>(blockIdx.x); i < pages; i += static_cast<kstd::int32_t>(gridDim.x)) {
    while (i >= list.of[layer].end) ++layer;
    const SealPages& of = list.of[layer];
    const kstd::int32_t at = i - (layer == 0 ? 0 : list.of[layer - 1].end);
    kstd::uint64_t sum = seal_part(of.key, of.base + of.page_stride * of.ids[at], of.page_bytes, threadIdx.x, Threads);
    for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_down_sync(~0U, sum, distance);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
      for (int warp = 1; warp < Threads / 32; ++warp) sum += warps[warp];
      of.seals[at] = seal_of(sum);
    }
    __syncthreads();
  }
}

/// The seals of a transfer while it runs: what kernels find on the device, noted or compared when an event of the transfer is asked. Shared by the
/// events and the queued work.
class SealBook {
 public:
  static constexpr int threads = 256;
  static constexpr int blocks = 128;  // at most

  /// Of `pages` pages over all `layers`. `written`: once this is final no kernel writes there any more. Not an event that asks the book. Errors of the
  /// runtime.
  static Result<std::shared_ptr<SealBook>> make(std::size_t pages, std::size_t layers, const Event<Cuda>& written) {
    auto found = Scratch::make(pages * sizeof(kstd::uint64_t));
    if (!found.ok()) return found.error();
    auto book = std::make_shared<SealBook>();
    book->found_ = std::move(found).value();
    book->found_.busy_until(written);
    book->layers_.reserve(layers);  // early layers are judged while later ones are added
    return book;
  }

  /// Takes a layer into the next launch. `ids`: of the device's side, where kernels reach them.
  void add(PieceSeal seal, const CopyInfo& info, const PageList& list, const std::int32_t* ids) {
    const auto pages = static_cast<std::int32_t>(seal.host->size());
    SealPages of{seal.store ? list.from : list.to, seal.store ? list.from_stride : list.to_stride, list.page_bytes, ids,
                 reinterpret_cast<kstd::uint64_t*>(found_.device()) + used_, seal.layer.key, pages};
    queued_.push_back(of);
    layers_.push_back({std::move(seal), info.entry, info.layer, used_});
    used_ += static_cast<std::size_t>(pages);
  }
  std::size_t layers() const { return layers_.size(); }

  /// Launches what `add` collected.
  Status flush(Stream<Cuda>& stream) {
    DeviceScope scope(stream.device());
    for (std::size_t first = 0; first < queued_.size();) {
      SealList list;
      for (; first < queued_.size() && list.count < SealList::capacity; ++first, ++list.count) {
        list.of[list.count] = queued_[first];
        if (list.count > 0) list.of[list.count].end += list.of[list.count - 1].end;
      }
      seal_kernel<threads><<<std::min(list.of[list.count - 1].end, blocks), threads, 0, stream.native()>>>(list);
      if (const cudaError_t e = cudaGetLastError(); e != cudaSuccess) return stream.error(e, "launching a check of seals");
    }
    queued_.clear();
    return {};
  }

  /// After the work of the first `layers`.
  Status verdict(std::size_t layers) {
    std::lock_guard lock(mutex_);
    while (settled_ < layers && problem_.ok()) {
      const Layer& layer = layers_[settled_++];
      const auto* found = reinterpret_cast<const std::uint64_t*>(found_.host()) + layer.first;
      problem_ = layer.seal.settle(std::span(found, layer.seal.host->size()), layer.entry, layer.number);
    }
    return settled_ <= layers ? problem_ : Status();  // a problem is one of the layer before settled_
  }

 private:
  struct Layer {
    PieceSeal seal;
    std::string entry;
    int number = 0;
    std::size_t first = 0;
  };
  std::vector<SealPages> queued_;
  std::vector<Layer> layers_;
  std::size_t used_ = 0;
  Scratch found_;  // in pinned memory, written by kernels
  std::mutex mutex_;
  std::size_t settled_ = 0;
  Status problem_;
};

}  // namespace detail

KVIRE_NAMESPACE_END
