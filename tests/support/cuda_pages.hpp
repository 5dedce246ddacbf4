// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>
#include <doctest/doctest.h>

#include <cstdint>
#include <cstring>
#include <vector>

#include <kvire/pool/cuda/memory.hpp>
#include <kvire/pool/mirror.hpp>
#include <tests/support/device_array.hpp>

// Page bytes of CUDA pools for tests: written and read with plain synchronous copies, so that only what is tested is asynchronous.

namespace kvire_test {

/// Different for every layer, page seed and word.
inline std::uint32_t word(std::uint32_t seed, int layer, std::int64_t i) {
  std::uint64_t x = (static_cast<std::uint64_t>(seed) << 32) ^ (static_cast<std::uint64_t>(layer) << 48) ^ static_cast<std::uint64_t>(i);
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
  return static_cast<std::uint32_t>(x ^ (x >> 31));
}

template <class P>
std::vector<std::byte> page_pattern(std::uint32_t seed, int layer) {
  std::vector<std::byte> bytes(static_cast<std::size_t>(P::page_bytes) + 4);
  for (std::int64_t i = 0; i * 4 < P::page_bytes; ++i) {
    const std::uint32_t w = word(seed, layer, i);
    std::memcpy(bytes.data() + i * 4, &w, 4);
  }
  bytes.resize(static_cast<std::size_t>(P::page_bytes));
  return bytes;
}

/// The bytes of a page of either side.
template <class Pool>
std::vector<std::byte> page_bytes(const Pool& pool, typename Pool::page_id page, int layer) {
  using P = typename Pool::policy;
  std::vector<std::byte> bytes(static_cast<std::size_t>(P::page_bytes));
  const auto view = kvire::pool_access::const_view(pool, kvire::EntrySlot(layer));
  REQUIRE(cudaMemcpy(bytes.data(), view.page(page.value), bytes.size(), cudaMemcpyDefault) == cudaSuccess);
  return bytes;
}

/// Fills a page in all layers.
template <class Pool>
void fill_page(Pool& pool, typename Pool::page_id page, std::uint32_t seed) {
  using P = typename Pool::policy;
  for (int layer = 0; layer < pool.layers(); ++layer) {
    const auto bytes = page_pattern<P>(seed, layer);
    upload(kvire::pool_access::view(pool, kvire::EntrySlot(layer)).page(page.value), bytes.data(), bytes.size());
  }
}

/// True if `fill_page` made every byte of the page, in the layers [first, end).
template <class Pool>
bool has_page(const Pool& pool, typename Pool::page_id page, std::uint32_t seed, int first = 0, int end = -1) {
  for (int layer = first; layer < (end < 0 ? pool.layers() : end); ++layer) {
    if (page_bytes(pool, page, layer) != page_pattern<typename Pool::policy>(seed, layer)) return false;
  }
  return true;
}

/// True if the runtime remembers no error of this thread.
inline bool clean() { return cudaPeekAtLastError() == cudaSuccess; }

/// A device pool and its mirror of as many pages, and some pages of both for a transfer between them.
template <class P>
struct MirroredPages {
  MirroredPages(int layers, std::int64_t pages, std::int64_t moved)
      : device(kvire::DevicePool<P, kvire::Cuda>::make({.layers = layers, .pages = pages}).value()),
        host(kvire::mirror_of(device, pages).value()),
        on_host(host.allocate(moved).value()),
        on_device(device.allocate(moved).value()) {}

  kvire::DevicePool<P, kvire::Cuda> device;
  kvire::HostPool<P, kvire::Cuda> host;
  std::vector<kvire::PageRef<kvire::HostPage>> on_host;
  std::vector<kvire::PageRef<kvire::DevicePage>> on_device;
};

inline bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

}  // namespace kvire_test
