// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include <kvire/pool/cuda/memory.hpp>

KVIRE_NAMESPACE_BEGIN

namespace detail {

/// Calls f(layer, bytes) for a page of every layer, its bytes copied to the host. Waits for the device.
template <class P, class F>
Status each_layer(const DevicePool<P, Cuda>& pool, DevicePage page, F f) {
  std::vector<std::byte> bytes(static_cast<std::size_t>(P::page_bytes));
  RelaxedCapture relaxed;
  for (int layer = 0; layer < pool.layers(); ++layer) {
    const auto view = pool_access::const_view(pool, EntrySlot(layer));
    if (const cudaError_t e = cudaMemcpy(bytes.data(), view.page(page.value), bytes.size(), cudaMemcpyDeviceToHost); e != cudaSuccess) {
      return cuda_error(e, "pool " + pool.name() + ": reading page " + std::to_string(page.value));
    }
    if (const std::string bad = f(bytes.data()); !bad.empty()) {
      return Error{ErrorCode::mismatch, "pool " + pool.name() + ": page " + std::to_string(page.value) + ", layer " + std::to_string(layer) + ": " + bad};
    }
  }
  return {};
}

}  // namespace detail

/// PagePool::verify_free for pages of the device: a page that was freed and is free now must hold the pattern that the pool was told to fill it
/// with (`fill_on_free`); somebody wrote it after its free otherwise. Copies every such page to the host and waits for the device: for debugging.
template <class P>
Status verify_free(const DevicePool<P, Cuda>& pool, unsigned char fill_on_free) {
  for (std::int32_t id = null_page + 1; id < pool.pages(); ++id) {
    const DevicePage page(id);
    const auto& ledger = pool.ledger();
    if (ledger.generation(page) == 0 || ledger.owners(page) > 0 || ledger.holds(page) > 0) continue;
    const Status status = detail::each_layer(pool, page, [&](const std::byte* bytes) { return detail::first_other_byte(bytes, 0, P::page_bytes, fill_on_free); });
    if (!status.ok()) return status;
  }
  return {};
}

/// PagePool::verify_padding for a page of the device.
template <class P>
Status verify_padding(const DevicePool<P, Cuda>& pool, DevicePage page, unsigned char expected = 0) {
  if (auto ok = pool.check_row(page); !ok.ok()) return ok;
  return detail::each_layer(pool, page, [&](const std::byte* bytes) {
    auto bad = detail::first_other_byte(bytes, P::used_bytes, P::page_bytes - P::used_bytes, expected);
    for (const Section& s : P::table.sections) {
      for (int token = 0; s.padding && bad.empty() && token < P::tokens_per_page; ++token) {
        const std::int64_t row = P::table.plane_offset[s.plane] + P::table.row_bytes[s.plane] * token;
        bad = detail::first_other_byte(bytes, row + s.row_offset_bits / 8, s.size_bits / 8, expected);
      }
    }
    return bad;
  });
}

KVIRE_NAMESPACE_END
