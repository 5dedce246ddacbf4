// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>

#include <kvire/base/result.hpp>
#include <kvire/base/sort.hpp>
#include <kvire/exec/host/parallel.hpp>
#include <kvire/kernel/body/top_k.hpp>
#include <kvire/kernel/host/heap_array.hpp>
#include <kvire/kernel/host/level.hpp>

KVIRE_NAMESPACE_BEGIN
namespace simd {

/// Top-k of all rows, one row a core. The same answer as body::top_k, to the slot: it finds the k-th key in three digits instead of 32 bits.
template <HostTag Backend = Host>
class TopK {
 public:
  TopK(const body::TopKArgs& args, SimdLevel level) : args_(args), level_(level) {}

  /// Error exhausted: no memory for a row's keys.
  Status run(TopKCounts& counts) {
    const std::int64_t rows = std::int64_t(args_.batch) * args_.next_n;
    HeapArray<std::int32_t> scratch;
    if (level_ == SimdLevel::plain && args_.order == TopKOrder::by_score) {
      if (!scratch.allocate(rows * args_.k)) return no_memory();
      args_.scratch = scratch.get();
    }
    std::atomic<bool> exhausted{false};
    std::atomic<std::int64_t> nan_scores{0};
    std::atomic<std::int64_t> bad_pages{0};
    parallel_for(rows, 1, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t row = begin; row < end; ++row) {
        TopKCounts found;
        if (level_ == SimdLevel::plain) {
          found = body::top_k(HostGroup<1>{}, row, args_);
        } else if (!select(row, found)) {
          exhausted.store(true, std::memory_order_relaxed);
        }
        nan_scores.fetch_add(found.nan_scores, std::memory_order_relaxed);
        bad_pages.fetch_add(found.bad_pages, std::memory_order_relaxed);
      }
    });
    counts.nan_scores += nan_scores;
    counts.bad_pages += bad_pages;
    return exhausted ? Status(no_memory()) : Status();
  }

 private:
  static constexpr int digit_bits = 11;
  static constexpr std::uint32_t digits = 1U << digit_bits;

  static Error no_memory() { return Error{ErrorCode::exhausted, "top_k: no memory for the keys of a row"}; }

  // Keys of a row's positions; returns how many are candidates.
  std::int64_t find_keys(std::int64_t row, std::int64_t length, std::uint32_t* keys, TopKCounts& found) const {
    const float* scores = args_.scores + row * args_.stride;
    std::int64_t candidates = 0;
    const std::int64_t step = args_.page_table != nullptr ? args_.tokens_per_page : length;
    for (std::int64_t first = 0; first < length; first += step) {
      const std::int64_t end = min_of(first + step, length);
      bool masked = false;
      if (args_.page_table != nullptr) {
        const std::int32_t id = args_.entry(row, first);
        masked = !args_.good_page(id);
        found.bad_pages += masked && id >= 0 ? 1 : 0;
      }
      for (std::int64_t i = first; i < end; ++i) {
        const bool nan = is_nan(scores[i]);
        found.nan_scores += nan ? 1 : 0;
        keys[i] = nan || masked ? 0 : order_key(scores[i]);
        candidates += keys[i] != 0 ? 1 : 0;
      }
    }
    return candidates;
  }

  // The `wanted`-th largest key, and how many of the wanted have exactly this key. Requires at least `wanted` > 0 keys.
  static std::uint32_t find_threshold(const std::uint32_t* keys, std::int64_t length, std::int64_t wanted, std::int64_t& ties) {
    std::uint32_t prefix = 0;
    for (int top = 32; top > 0;) {
      const int bits_here = min_of(top, digit_bits);
      const int shift = top - bits_here;
      std::int64_t counts[digits] = {};
      for (std::int64_t i = 0; i < length; ++i) {
        // Keys that agree with the digits found so far; all of them in the first round.
        if (top == 32 || (keys[i] >> top) == prefix) ++counts[(keys[i] >> shift) & ((1U << bits_here) - 1)];
      }
      std::uint32_t digit = (1U << bits_here) - 1;
      while (counts[digit] < wanted) wanted -= counts[digit--];
      prefix = (prefix << bits_here) | digit;
      top = shift;
    }
    ties = wanted;
    return prefix;
  }

  bool select(std::int64_t row, TopKCounts& found) const {
    const std::int64_t length = args_.visible(row);
    std::int32_t* selected = args_.selected + row * args_.k;
    const HeapArray<std::uint32_t> keys(length + 1);
    if (!keys) return false;
    const std::int64_t candidates = find_keys(row, length, keys.get(), found);
    const std::int64_t wanted = min_of<std::int64_t>(candidates, args_.k);

    std::uint32_t threshold = 0;
    std::int64_t ties = 0;
    if (candidates > args_.k) threshold = find_threshold(keys.get(), length, wanted, ties);
    std::int64_t done = 0;
    for (std::int64_t i = 0; i < length && done < wanted; ++i) {
      if (keys[i] > threshold || (keys[i] == threshold && ties > 0)) {
        if (keys[i] == threshold) --ties;
        selected[done++] = static_cast<std::int32_t>(i);
      }
    }
    for (std::int64_t j = wanted; j < args_.k; ++j) selected[j] = -1;

    if (args_.order == TopKOrder::by_score) {
      std::vector<std::int32_t> ranked(selected, selected + wanted);
      detail::sort(ranked, [&](std::int32_t a, std::int32_t b) { return keys[a] > keys[b]; });  // stable: the lower position first
      for (std::int64_t j = 0; j < wanted; ++j) selected[j] = ranked[static_cast<std::size_t>(j)];
    }
    if (args_.translate) {
      for (std::int64_t j = 0; j < wanted; ++j) {
        selected[j] = args_.entry(row, selected[j]) * args_.tokens_per_page + selected[j] % args_.tokens_per_page;
      }
    }
    return true;
  }

  body::TopKArgs args_;
  SimdLevel level_;
};

}  // namespace simd
KVIRE_NAMESPACE_END
