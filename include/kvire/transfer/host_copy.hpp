// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <cstring>
#include <mutex>
#include <span>
#include <vector>

#include <kvire/base/ints.hpp>
#include <kvire/exec/host/parallel.hpp>
#include <kvire/pool/view.hpp>
#include <kvire/transfer/seal_sum.hpp>

/// The host engine: memcpy over all cores. Ids are trusted here; transfers check them first.

KVIRE_NAMESPACE_BEGIN

namespace detail {

/// Bytes that one core moves at a time: enough to hide the hand-over between threads, and small enough to share out a page list evenly.
inline constexpr std::int64_t copy_grain_bytes = std::int64_t(1) << 19;

/// From this many bytes a transfer writes around the caches: it would only sweep them, and reading each line before overwriting it costs a
/// third of the bandwidth. memcpy does the same for one large block; scattered pages are too small for it to notice.
inline constexpr std::int64_t streaming_bytes = std::int64_t(8) << 20;
// Ahead of the copy: across the end of a page no hardware prefetcher follows, and this much arrives in the time that memory takes to answer.
inline constexpr std::int64_t prefetch_bytes = 2048;

inline void prefetch(const std::byte* p) {
#if KVIRE_GNU
  __builtin_prefetch(p);
#else
  (void)p;
#endif
}

#if KVIRE_X86_64 && !KVIRE_THREAD_SANITIZER
/// memcpy around the caches. `next` is what will be copied afterwards. `to` must be aligned to 16 bytes. Followed by a fence. `see(line)` is shown every whole
/// line of 64 bytes on its way.
template <class See>
inline void stream_copy(std::byte* to, const std::byte* from, std::int64_t bytes, const std::byte* next, See&& see) {
  const std::int64_t lead = min_of(prefetch_bytes, bytes);
  std::int64_t i = 0;
  for (; i + line_bytes <= bytes; i += line_bytes) {
    const std::int64_t ahead = i + lead;
    prefetch(ahead < bytes ? from + ahead : next + (ahead - bytes));
    Line line;
    std::memcpy(line, from + i, sizeof line);
    for (int j = 0; j < 4; ++j) {
#if KVIRE_CLANG
      __builtin_nontemporal_store(line[j], reinterpret_cast<Words2*>(to + i) + j);
#else
      using Stored = long long __attribute__((vector_size(16)));
      __builtin_ia32_movntdq(reinterpret_cast<Stored*>(to + i) + j, reinterpret_cast<Stored>(line[j]));
#endif
    }
    see(line);
  }
  std::memcpy(to + i, from + i, static_cast<std::size_t>(bytes - i));
}
inline void stream_fence() { __builtin_ia32_sfence(); }
inline bool can_stream(const std::byte* to) { return reinterpret_cast<std::uintptr_t>(to) % sizeof(Words2) == 0; }
#else
template <class See>
inline void stream_copy(std::byte*, const std::byte*, std::int64_t, const std::byte*, See&&) {}
inline void stream_fence() {}
inline bool can_stream(const std::byte*) { return false; }
#endif

/// Items a chunk, of items of so many bytes: chunks of equal size, none of them small.
inline std::int64_t grain_of(std::int64_t items, std::int64_t bytes) {
  return ceil_div(items, max_of<std::int64_t>(1, items * bytes / copy_grain_bytes));
}

/// Pages from[i] to pages to[i]. Neighbours on both sides move together where nothing lies between them. `streaming`: see streaming_bytes.
template <class P>
void copy_pages(PageView<P, Host> to, std::span<const std::int32_t> to_pages, ConstPageView<P, Host> from, std::span<const std::int32_t> from_pages,
                bool streaming) {
  const bool dense = to.page_stride == P::page_bytes && from.page_stride == P::page_bytes;
  const auto n = static_cast<std::int64_t>(to_pages.size());
  parallel_for(n, grain_of(n, P::page_bytes), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end;) {
      const std::int32_t a = from_pages[static_cast<std::size_t>(i)];
      const std::int32_t b = to_pages[static_cast<std::size_t>(i)];
      std::int64_t run = 1;
      while (dense && i + run < end && from_pages[static_cast<std::size_t>(i + run)] == a + run && to_pages[static_cast<std::size_t>(i + run)] == b + run) ++run;
      const std::byte* const source = from.page(a);
      std::byte* const destination = to.page(b);
      if (streaming && can_stream(destination)) {
        stream_copy(destination, source, run * P::page_bytes, i + run < end ? from.page(from_pages[static_cast<std::size_t>(i + run)]) : source,
                    [](const Line&) {});
      } else {
        std::memcpy(destination, source, static_cast<std::size_t>(run * P::page_bytes));
      }
      i += run;
    }
    if (streaming) stream_fence();
  });
}

/// Rows of token slots from[i] to slots to[i], every plane of them. Neighbours within a page move together.
template <class P>
void copy_rows(PageView<P, Host> to, std::span<const std::int64_t> to_slots, ConstPageView<P, Host> from, std::span<const std::int64_t> from_slots) {
  constexpr std::int64_t tokens = P::tokens_per_page;
  constexpr std::int64_t rows_ahead = 4;
  const auto n = static_cast<std::int64_t>(to_slots.size());
  // f(plane offset, bytes of a row) for each plane.
  const auto each_plane = [](auto f) {
    [&]<int... I>(std::integer_sequence<int, I...>) {
      (f(P::template plane_offset<I>(), P::template row_bytes<I>()), ...);
    }(std::make_integer_sequence<int, P::plane_count>{});
  };
  parallel_for(n, grain_of(n, P::used_bytes / tokens), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end;) {
      const std::int64_t a = from_slots[static_cast<std::size_t>(i)];
      const std::int64_t b = to_slots[static_cast<std::size_t>(i)];
      const std::int64_t room = tokens - max_of(a % tokens, b % tokens);
      std::int64_t run = 1;
      while (run < room && i + run < end && from_slots[static_cast<std::size_t>(i + run)] == a + run && to_slots[static_cast<std::size_t>(i + run)] == b + run) ++run;
      if (run == 1 && i + rows_ahead < end) {
        const std::int64_t c = from_slots[static_cast<std::size_t>(i + rows_ahead)];
        const std::int64_t d = to_slots[static_cast<std::size_t>(i + rows_ahead)];
        each_plane([&](std::int64_t plane, std::int64_t row) {
          const std::byte* const source = from.page(static_cast<std::int32_t>(c / tokens)) + plane + row * (c % tokens);
          const std::byte* const destination = to.page(static_cast<std::int32_t>(d / tokens)) + plane + row * (d % tokens);
          for (std::int64_t at = 0; at < row; at += line_bytes) {
            prefetch(source + at);
            prefetch(destination + at);
          }
        });
      }
      const std::byte* const source = from.page(static_cast<std::int32_t>(a / tokens));
      std::byte* const destination = to.page(static_cast<std::int32_t>(b / tokens));
      each_plane([&](std::int64_t plane, std::int64_t row) {
        std::memcpy(destination + plane + row * (b % tokens), source + plane + row * (a % tokens), static_cast<std::size_t>(row * run));
      });
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
  parallel_for(n, grain_of(n, token_bytes<P>), [&](std::int64_t begin, std::int64_t end) {
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
