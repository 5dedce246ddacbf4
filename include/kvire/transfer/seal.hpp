// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include <kvire/pool/bundle_pool.hpp>
#include <kvire/pool/table.hpp>
#include <kvire/transfer/host_copy.hpp>

KVIRE_NAMESPACE_BEGIN

/// The seals of one layer of one entry of a host pool.
struct LayerSeals {
  std::span<std::uint64_t> of_page = {};  ///< by host page id; 0: never sealed; empty: none are kept
  std::uint64_t key = 0;
};

/// Checksums of the pages of a host tier, as the device had them: a transfer to the host notes what its pages are (TransferOptions::seals), and one
/// that brings them back compares. So a copy that moved nothing or went elsewhere, and memory that changed in between, fail the load at their
/// layer, though every copy has reported success. The device's side alone is read, once a transfer. Keyed by entry and layer; 8 bytes a page
/// and layer. Against accidents, not against forgery.
///
/// The seals of a page belong to whoever may write it: no lock is taken. Those of a store are there when its event has been asked and is complete,
/// and not before that may a load of the pages be issued. Who fills host pages by other means seals them (`of`), or their load fails.
class PageSeals {
 public:
  /// Errors of the memory resource.
  template <class P, class Backend>
  static Result<std::shared_ptr<PageSeals>> make(const PagePool<P, Backend, HostSide>& host) {
    auto seals = std::make_shared<PageSeals>();
    if (Status status = seals->add(host, 0); !status.ok()) return status.error();
    return seals;
  }
  template <class Bundle, class Backend>
  static Result<std::shared_ptr<PageSeals>> make(const BundlePool<Bundle, Backend, HostSide>& host) {
    auto seals = std::make_shared<PageSeals>();
    Status status;
    Bundle::for_each([&]<class Entry>() {
      if (status.ok()) status = seals->add(host.template entry<Entry>(), Bundle::template index_of<Entry>());
    });
    if (!status.ok()) return status.error();
    return seals;
  }

  /// The seals of a layer of one of the pools that they were made for; empty for any other.
  template <class P, class Backend>
  LayerSeals of(const PagePool<P, Backend, HostSide>& pool, EntrySlot slot) {
    for (Part& part : parts_) {
      if (part.memory.lock() != pool_access::memory(pool) || slot.value < 0 || slot.value >= part.slots) continue;
      const auto pages = static_cast<std::size_t>(part.pages);
      return {std::span(&part.seals[slot.value * part.pages], pages), detail::digest_key(part.key, slot.value)};
    }
    return {};
  }
  /// Memory that they take.
  Bytes bytes() const {
    std::int64_t n = 0;
    for (const Part& part : parts_) n += part.slots * part.pages * static_cast<std::int64_t>(sizeof(std::uint64_t));
    return Bytes(n);
  }

 private:
  struct Part {
    std::weak_ptr<const void> memory;  // a later pool may lie at the same address
    std::int64_t slots;
    std::int64_t pages;
    std::uint64_t key;
    detail::Table<std::uint64_t> seals;
  };

  template <class P, class Backend>
  Status add(const PagePool<P, Backend, HostSide>& pool, int entry) {
    if (pool.layers() == 0) return {};
    auto table = detail::Table<std::uint64_t>::make(std::int64_t{pool.layers()} * pool.pages());
    if (!table.ok()) return Error{table.error().code, "seals of pool " + pool.name() + ": " + table.error().message};
    parts_.push_back({pool_access::memory(pool), pool.layers(), pool.pages(), fingerprint64<P> + static_cast<std::uint64_t>(entry), std::move(table).value()});
    return {};
  }

  std::vector<Part> parts_;
};

namespace detail {

/// How one layer of a transfer is sealed.
struct PieceSeal {
  LayerSeals layer = {};
  std::shared_ptr<PageSeals> table = {};             // which owns the layer's
  std::shared_ptr<const std::vector<std::int32_t>> host = {};    // pages of the plan, in its order
  bool store = false;

  explicit operator bool() const { return !layer.of_page.empty(); }

  /// Notes (of a store) or compares (of a load) what the pages of the device came to. Error mismatch.
  Status settle(std::span<const std::uint64_t> found, const std::string& entry, int number) const {
    for (std::size_t i = 0; i < found.size(); ++i) {
      std::uint64_t& seal = layer.of_page[static_cast<std::size_t>((*host)[i])];
      if (store) {
        seal = found[i];
      } else if (seal != found[i]) {
        return Error{ErrorCode::mismatch, "seal of entry '" + entry + "', layer " + std::to_string(number) + ", host page " + std::to_string((*host)[i]) +
                                              (seal == 0 ? ": nothing was stored there" : ": what arrived is not what was stored")};
      }
    }
    return {};
  }
};

/// The seals of pages by the host's cores.
template <class View>
std::vector<std::uint64_t> seal_pages(const LayerSeals& layer, const View& view, std::int64_t page_bytes, std::span<const std::int32_t> pages) {
  std::vector<std::uint64_t> found(pages.size());
  const auto n = static_cast<std::int64_t>(pages.size());
  parallel_for(n, grain_of(n, page_bytes), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) found[static_cast<std::size_t>(i)] = seal_page(layer.key, view.page(pages[static_cast<std::size_t>(i)]), page_bytes);
  });
  return found;
}

/// Pages from[i] to pages to[i], and the seals of one side's: of the source, or of what has arrived. They are summed up as the bytes pass by: around the caches
/// of what is read and written on, otherwise block by block while a block is in the nearest cache.
template <class P>
std::vector<std::uint64_t> copy_sealed_pages(PageView<P, Host> to, std::span<const std::int32_t> to_pages, ConstPageView<P, Host> from,
                                             std::span<const std::int32_t> from_pages, const LayerSeals& layer, bool source, bool streaming) {
  constexpr std::int64_t block = 4096;
  std::vector<std::uint64_t> found(to_pages.size());
  const auto n = static_cast<std::int64_t>(to_pages.size());
  parallel_for(n, grain_of(n, P::page_bytes), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::byte* const a = from.page(from_pages[static_cast<std::size_t>(i)]);
      std::byte* const b = to.page(to_pages[static_cast<std::size_t>(i)]);
      const std::byte* const next = i + 1 < end ? from.page(from_pages[static_cast<std::size_t>(i + 1)]) : a;
      SealSum sum(layer.key);
      if (streaming && can_stream(b)) {
        stream_copy(b, a, P::page_bytes, next, [&](const Line& line) { sum.take_line(line); });
        constexpr std::int64_t lines = P::page_bytes / line_bytes * line_bytes;
        sum.take(a + lines, P::page_bytes - lines);
      } else {
        for (std::int64_t at = 0; at < P::page_bytes; at += block) {
          const std::int64_t bytes = min_of(block, P::page_bytes - at);
          std::memcpy(b + at, a + at, static_cast<std::size_t>(bytes));
          sum.take((source ? a : b) + at, bytes);
        }
      }
      found[static_cast<std::size_t>(i)] = sum.seal();
    }
    if (streaming) stream_fence();
  });
  return found;
}

}  // namespace detail

KVIRE_NAMESPACE_END
