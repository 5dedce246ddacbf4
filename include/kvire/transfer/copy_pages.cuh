// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <mutex>
#include <vector>

#include <kvire/base/ints.hpp>
#include <kvire/transfer/bulk_copy.cuh>
#include <kvire/transfer/cuda/engine.hpp>
#include <kvire/transfer/vector_copy.cuh>

KVIRE_NAMESPACE_BEGIN

namespace detail {

/// How the page kernel is launched; what benchmarks/transfer measured on an H200 unless a caller says otherwise.
struct CopyShape {
  int blocks = 4;
  int warps = 0;                        // of a block; 0: by the size of the chunks
  std::int64_t chunk_bytes = 66 * 128;  // a page is cut into chunks of at most so much
  std::int64_t shared_bytes = 102000;   // of a block: leaves room for a compute kernel's blocks beside it
  int slots = 32;                       // chunks of a warp in shared memory, at most
  bool gentle = false;                  // one write to the host at a time a warp, instead of two
  bool whole = false;                   // a block takes all shared memory of its multiprocessor
  double gigabytes_per_second = 0;      // paced to this; 0: not

  /// `page_bytes`: of the smallest pages.
  static CopyShape of(Pace pace, bool to_host, std::int64_t page_bytes) {
    CopyShape shape;
    if (pace == Pace::full) {
      // A multiprocessor has only so many writes under way, and short ones do not fill the link.
      if (to_host && page_bytes < 8192) shape.blocks = 8;
      return shape;
    }
    if (pace == Pace::apart) {
      shape.gentle = shape.whole = true;
      shape.gigabytes_per_second = 49.3;
      shape.blocks = to_host ? 5 : 4;
      shape.warps = 2;
      shape.shared_bytes = 200000;
      return shape;
    }
    // What a PCIe 5 x16 link drains, nearly: a queue in front of it would hold up everybody's memory traffic. Slower links are paced by their own
    // acknowledgements.
    shape.gentle = true;
    shape.gigabytes_per_second = 49.5;
    shape.blocks = 24;
    shape.warps = 1;
    shape.chunk_bytes = 37 * 128;
    shape.slots = to_host ? 2 : 3;
    return shape;
  }
};

/// Pages of one piece: where, and which.
struct CopyRequest {
  PageList list;
  UploadedPages ids;
  std::int64_t pages = 0;
  const CheckedIds<std::int32_t>* known = nullptr;  // the same ids on the host, if they are there
};

/// What this program's kernels can do on a device: found out once.
struct CopyKernels {
  bool bulk = false;  // the code for this device has bulk copies in it
  int most_shared = 0;  // bytes that a block may have
  cudaError_t error = cudaSuccess;

  static const CopyKernels& of(int device) {
    static std::mutex mutex;
    static std::vector<std::unique_ptr<CopyKernels>> known;
    std::lock_guard lock(mutex);
    const auto index = static_cast<std::size_t>(device);
    if (known.size() <= index) known.resize(index + 1);
    if (!known[index]) known[index] = std::make_unique<CopyKernels>(ask(device));
    return *known[index];
  }

  static constexpr int few = 1;
  static constexpr int many = 48;
  static constexpr int inline_ids = 256;  // pairs whose ids travel with the launch

  template <int Capacity, int Ids>
  static auto kernel(bool to_host, bool gentle) {
    if (!to_host) return bulk_copy_kernel<Capacity, 1, false, Ids>;
    return gentle ? bulk_copy_kernel<Capacity, 0, true, Ids> : bulk_copy_kernel<Capacity, 1, true, Ids>;
  }

 private:
  static CopyKernels ask(int device) {
    CopyKernels kernels;
    DeviceScope scope(device);
    RelaxedCapture relaxed;
    cudaFuncAttributes attributes{};
    kernels.error = cudaFuncGetAttributes(&attributes, kernel<few, 0>(false, false));
    // What it was compiled from: the driver makes code for older GPUs into some for this one, without bulk copies.
    kernels.bulk = kernels.error == cudaSuccess && attributes.ptxVersion >= 90;
    if (!kernels.bulk) return kernels;
    kernels.error = cudaDeviceGetAttribute(&kernels.most_shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    for (const int mode : {0, 2, 3}) {
      kernels.allow(reinterpret_cast<const void*>(kernel<few, 0>(mode > 1, mode > 2)));
      kernels.allow(reinterpret_cast<const void*>(kernel<many, 0>(mode > 1, mode > 2)));
      kernels.allow(reinterpret_cast<const void*>(kernel<few, inline_ids>(mode > 1, mode > 2)));
    }
    return kernels;
  }
  // All of a multiprocessor's memory as shared memory: with less, a compute kernel's block could not be placed beside this one.
  void allow(const void* kernel) {
    for (const cudaError_t e : {cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most_shared),
                                cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared)}) {
      if (e != cudaSuccess) error = e;
    }
  }
};

template <int Capacity, int Ids>
void launch_bulk(Stream<Cuda>& stream, const CopyList<Capacity>& list, const CopyRequest& first, int warps, const CopyShape& shape) {
  InlineIds<Ids> ids;
  if constexpr (Ids > 0) {
    const auto n = static_cast<std::size_t>(std::min<std::int64_t>(first.pages, Ids));
    std::copy_n(first.known->from.begin(), n, ids.from);
    std::copy_n(first.known->to.begin(), n, ids.to);
  } else {
    (void)first;
  }
  const int shared = shape.whole ? CopyKernels::of(stream.device()).most_shared : warps * BulkRing::bytes(list.slots, list.slot_bytes);
  CopyKernels::kernel<Capacity, Ids>(list.to_host != 0, shape.gentle)<<<static_cast<unsigned>(shape.blocks), static_cast<unsigned>(32 * warps), static_cast<std::size_t>(shared), stream.native()>>>(list, ids);
}

template <int Capacity>
Status launch_list(Stream<Cuda>& stream, std::span<const CopyRequest> requests, bool to_host, const CopyShape& shape, int* bad) {
  const CopyKernels& kernels = CopyKernels::of(stream.device());
  if (kernels.error != cudaSuccess) return stream.error(kernels.error, "preparing the copy kernels");
  CopyList<Capacity> list;
  bool bulk = kernels.bulk;
  std::int64_t end = 0;
  std::int64_t slot = 0;
  for (const CopyRequest& request : requests) {
    const PageList& pages = request.list;
    const auto host_base = reinterpret_cast<std::uintptr_t>(to_host ? pages.to : pages.from);
    const std::int64_t host_stride = to_host ? pages.to_stride : pages.from_stride;
    const auto bits = reinterpret_cast<std::uintptr_t>(pages.to) | reinterpret_cast<std::uintptr_t>(pages.from) |
                      static_cast<std::uintptr_t>(pages.to_stride | pages.from_stride | pages.page_bytes);
    bulk = bulk && bits % 16 == 0;
    // Chunks end at multiples of 128 on the host; a page that does not start at one needs so much more room.
    const std::int64_t skew = (host_base | static_cast<std::uintptr_t>(host_stride)) % 128 == 0 ? 0 : 112;
    const std::int64_t chunks = ceil_div(pages.page_bytes + skew, shape.chunk_bytes);
    const std::int64_t chunk = align_up(ceil_div(pages.page_bytes + skew, chunks), std::int64_t{128});
    end += request.pages * chunks;
    if (end > INT64_C(0x7FFFFF00) || pages.page_bytes > INT64_C(0x7FFFFF00)) {
      return Error{ErrorCode::invalid_argument, "transfer: " + std::to_string(end) + " chunks in one launch"};
    }
    slot = std::max(slot, chunk);
    list.piece[list.pieces++] = {reinterpret_cast<const unsigned char*>(pages.from), reinterpret_cast<unsigned char*>(pages.to), pages.from_stride, pages.to_stride,
                                 request.ids.from, request.ids.to, pages.from_pages, pages.to_pages, static_cast<std::int32_t>(pages.page_bytes),
                                 static_cast<std::int32_t>(chunk), static_cast<std::int32_t>(chunks), static_cast<std::int32_t>(end)};
  }
  list.to_host = to_host;
  list.bad = bad;
  if (bulk) {
    // A warp issues one copy after the other: small chunks need more of them to fill the link.
    const int warps = shape.warps > 0 ? shape.warps : slot < 4096 ? 8 : 4;
    list.slot_bytes = static_cast<std::int32_t>(slot);
    list.slots = static_cast<std::int32_t>(std::clamp<std::int64_t>(std::min<std::int64_t>(shape.slots, shape.shared_bytes / warps / slot), 2, BulkRing::max_slots));
    const CopyRequest& first = requests.front();
    const bool inline_ids = Capacity == CopyKernels::few && first.known != nullptr;
    // As many as have their ids with the launch: a warp whose first batch has ids of the list too would wait for these before it asks for a page.
    if (inline_ids) {
      const int at_hand = CopyKernels::inline_ids * list.piece[0].chunks / (shape.blocks * warps);
      list.batch = std::clamp(at_hand, list.slots + 1, 32);
    }
    if (shape.gigabytes_per_second > 0) list.pace = static_cast<std::int32_t>(static_cast<double>(slot * shape.blocks * warps) / shape.gigabytes_per_second);
    if (inline_ids) {
      launch_bulk<Capacity, Capacity == CopyKernels::few ? CopyKernels::inline_ids : 0>(stream, list, first, warps, shape);
    } else {
      launch_bulk<Capacity, 0>(stream, list, first, warps, shape);
    }
  } else {
    vector_copy_kernel<Capacity><<<static_cast<unsigned>(shape.blocks), 512, 0, stream.native()>>>(list);
  }
  if (const cudaError_t e = cudaGetLastError(); e != cudaSuccess) return stream.error(e, "launching the copy of pages");
  return {};
}

/// Queues pages of any number of layers and entries, in as few launches as their descriptions fit in.
inline Status launch_pages(Stream<Cuda>& stream, std::span<const CopyRequest> requests, bool to_host, const CopyShape& shape, int* bad = nullptr) {
  DeviceScope scope(stream.device());
  if (requests.size() == 1) return launch_list<CopyKernels::few>(stream, requests, to_host, shape, bad);
  for (std::size_t first = 0; first < requests.size(); first += CopyKernels::many) {
    const std::size_t n = std::min<std::size_t>(CopyKernels::many, requests.size() - first);
    if (Status status = launch_list<CopyKernels::many>(stream, requests.subspan(first, n), to_host, shape, bad); !status.ok()) return status;
  }
  return {};
}

}  // namespace detail

KVIRE_NAMESPACE_END
