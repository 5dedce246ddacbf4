// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <span>
#include <vector>

#include <kvire/exec/host/parallel.hpp>
#include <kvire/pool/view.hpp>
#include <kvire/transfer/digest.hpp>

/// The host engine: memcpy over all cores. Ids are trusted here; transfers check them first.

KVIRE_NAMESPACE_BEGIN

namespace detail {

/// Bytes that one core moves at a time: enough to hide the hand-over between threads, and small enough to share out a page list evenly.
inline constexpr std::int64_t copy_grain_bytes = std::int64_t(1) << 19;

/// Pages from[i] to pages to[i]. Neighbours on both sides move together where nothing lies between them.
template <class P>
void copy_pages(PageView<P, Host> to, std::span<const std::int32_t> to_pages, ConstPageView<P, Host> from, std::span<const std::int32_t> from_pages) {
  const bool dense = to.page_stride == P::page_bytes && from.page_stride == P::page_bytes;
  const auto n = static_cast<std::int64_t>(to_pages.size());
  parallel_for(n, std::max<std::int64_t>(1, copy_grain_bytes / P::page_bytes), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end;) {
      const std::int32_t a = from_pages[static_cast<std::size_t>(i)];
      const std::int32_t b = to_pages[static_cast<std::size_t>(i)];
      std::int64_t run = 1;
      while (dense && i + run < end && from_pages[static_cast<std::size_t>(i + run)] == a + run && to_pages[static_cast<std::size_t>(i + run)] == b + run) ++run;
      std::memcpy(to.page(b), from.page(a), static_cast<std::size_t>(run * P::page_bytes));
      i += run;
    }
  });
}

/// Rows of token slots from[i] to slots to[i], every plane of them. Neighbours within a page move together.
template <class P>
void copy_rows(PageView<P, Host> to, std::span<const std::int64_t> to_slots, ConstPageView<P, Host> from, std::span<const std::int64_t> from_slots) {
  constexpr std::int64_t tokens = P::tokens_per_page;
  const auto n = static_cast<std::int64_t>(to_slots.size());
  parallel_for(n, std::max<std::int64_t>(1, copy_grain_bytes * tokens / P::page_bytes), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end;) {
      const std::int64_t a = from_slots[static_cast<std::size_t>(i)];
      const std::int64_t b = to_slots[static_cast<std::size_t>(i)];
      const std::int64_t from_token = a % tokens;
      const std::int64_t to_token = b % tokens;
      const std::int64_t room = tokens - std::max(from_token, to_token);
      std::int64_t run = 1;
      while (run < room && i + run < end && from_slots[static_cast<std::size_t>(i + run)] == a + run && to_slots[static_cast<std::size_t>(i + run)] == b + run) ++run;
      const std::byte* const source = from.page(static_cast<std::int32_t>(a / tokens));
      std::byte* const destination = to.page(static_cast<std::int32_t>(b / tokens));
      [&]<int... I>(std::integer_sequence<int, I...>) {
        (std::memcpy(destination + P::template plane_offset<I>() + P::template row_bytes<I>() * to_token,
                     source + P::template plane_offset<I>() + P::template row_bytes<I>() * from_token,
                     static_cast<std::size_t>(P::template row_bytes<I>() * run)),
         ...);
      }(std::make_integer_sequence<int, P::plane_count>{});
      i += run;
    }
  });
}

/// Bytes of one token's rows in all planes.
template <class P>
inline constexpr std::int64_t token_bytes = P::used_bytes / P::tokens_per_page;

/// Digest of `n` rows; row(i) gives page and token of position i.
template <class P, class Row>
Digest digest_rows(std::uint64_t key, std::int64_t n, Row row) {
  Digest sum;
  std::mutex mutex;
  parallel_for(n, std::max<std::int64_t>(1, copy_grain_bytes / token_bytes<P>), [&](std::int64_t begin, std::int64_t end) {
    Digest part;
    for (std::int64_t i = begin; i < end; ++i) {
      const auto [page, token] = row(i);
      part += digest_row<P>(key, i, page, token);
    }
    std::lock_guard lock(mutex);
    sum += part;
  });
  return sum;
}

template <class P>
Digest digest_pages(std::uint64_t key, ConstPageView<P, Host> view, std::span<const std::int32_t> pages) {
  constexpr std::int64_t tokens = P::tokens_per_page;
  return digest_rows<P>(key, static_cast<std::int64_t>(pages.size()) * tokens, [&](std::int64_t i) {
    return std::pair(view.page(pages[static_cast<std::size_t>(i / tokens)]), static_cast<int>(i % tokens));
  });
}

template <class P>
Digest digest_slots(std::uint64_t key, ConstPageView<P, Host> view, std::span<const std::int64_t> slots) {
  constexpr std::int64_t tokens = P::tokens_per_page;
  return digest_rows<P>(key, static_cast<std::int64_t>(slots.size()), [&](std::int64_t i) {
    const std::int64_t slot = slots[static_cast<std::size_t>(i)];
    return std::pair(view.page(static_cast<std::int32_t>(slot / tokens)), static_cast<int>(slot % tokens));
  });
}

}  // namespace detail

KVIRE_NAMESPACE_END
