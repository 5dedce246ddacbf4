// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <cstring>

#include <kvire/transfer/digest.hpp>

KVIRE_NAMESPACE_BEGIN

namespace detail {

inline constexpr std::uint64_t seal_key_step = UINT64_C(0x9E3779B97F4A7C15);  // of the key, from word to word

/// What word number `at` of a page adds to its seal: keyed by its place, its halves multiplied (as in the NH hash of UMAC, RFC 4418). A flipped bit is
/// missed once in 2^32.
KVIRE_HD constexpr std::uint64_t seal_word(std::uint64_t key, std::uint64_t word, std::int64_t at) {
  const std::uint64_t x = word + key + static_cast<std::uint64_t>(at) * seal_key_step;
  return (x & 0xFFFFFFFFu) * (x >> 32) + word;
}
/// Part of a page's seal: of its words number `first`, `first` + `step` and so on. Parts add up in any order, so that a block of threads and a core
/// of the host come to the same sum at the speed of their memory.
KVIRE_HD inline std::uint64_t seal_part(std::uint64_t key, const std::byte* page, std::int64_t bytes, std::int64_t first, std::int64_t step) {
  std::uint64_t sum = 0;
  const std::int64_t whole = bytes / 8;
  std::int64_t at = first;
  for (; at < whole; at += step) sum += seal_word(key, digest_word(page + 8 * at, 8), at);
  if (at == whole && bytes % 8 != 0) sum += seal_word(key, digest_word(page + 8 * at, bytes % 8), at);
  return sum;
}
/// The seal from the sum of all parts; never 0, which is that of a page nobody has sealed.
KVIRE_HD constexpr std::uint64_t seal_of(std::uint64_t sum) {
  sum = mix64(sum ^ UINT64_C(0x2545F4914F6CDD1D));
  return sum == 0 ? 1 : sum;
}

inline constexpr std::int64_t line_bytes = 64;  // of a cache, on every host this runs on

#if KVIRE_X86_64
using Words2 = std::uint64_t __attribute__((vector_size(16)));
using Halves4 = int __attribute__((vector_size(16)));
using Line = Words2[4];

/// The seal of a page, of which the bytes come in order: lines of 64 bytes, and what is left at the end. Each pair of words of a line has a sum and a key of
/// its own, so that nothing waits for anything.
class SealSum {
 public:
  explicit SealSum(std::uint64_t key) : a_(key, 0), b_(key, 2), c_(key, 4), d_(key, 6) {}

  KVIRE_INLINE void take_line(const Line& line) {
    a_.take(line[0]);
    b_.take(line[1]);
    c_.take(line[2]);
    d_.take(line[3]);
  }
  /// Whole lines, but for the last bytes of the page.
  KVIRE_INLINE void take(const std::byte* bytes, std::int64_t n) {
    for (; n >= line_bytes; bytes += line_bytes, n -= line_bytes) {
      Line line;
      std::memcpy(line, bytes, sizeof line);
      take_line(line);
    }
    if (n > 0) a_.sum[0] += seal_part(a_.key[0], bytes, n, 0, 1);
  }
  std::uint64_t seal() const {
    const Words2 sum = (a_.sum + b_.sum) + (c_.sum + d_.sum);
    return seal_of(sum[0] + sum[1]);
  }

 private:
  struct Pair {
    Words2 key;
    Words2 sum = {};
    Pair(std::uint64_t of_page, std::uint64_t at) : key{of_page + at * seal_key_step, of_page + (at + 1) * seal_key_step} {}
    KVIRE_INLINE void take(Words2 words) {
      const Words2 x = words + key;
      sum += reinterpret_cast<Words2>(__builtin_ia32_pmuludq128(reinterpret_cast<Halves4>(x), reinterpret_cast<Halves4>(x >> 32))) + words;
      key += Words2{8 * seal_key_step, 8 * seal_key_step};
    }
  };
  Pair a_, b_, c_, d_;
};
#else
using Line = std::uint64_t[8];

class SealSum {
 public:
  explicit SealSum(std::uint64_t key) : key_(key) {}
  void take_line(const Line& line) { take(reinterpret_cast<const std::byte*>(line), line_bytes); }
  void take(const std::byte* bytes, std::int64_t n) {
    sum_ += seal_part(key_ + static_cast<std::uint64_t>(words_) * seal_key_step, bytes, n, 0, 1);
    words_ += n / 8;
  }
  std::uint64_t seal() const { return seal_of(sum_); }

 private:
  std::uint64_t key_;
  std::uint64_t sum_ = 0;
  std::int64_t words_ = 0;
};
#endif

/// What a page's bytes come to, padding included.
inline std::uint64_t seal_page(std::uint64_t key, const std::byte* page, std::int64_t bytes) {
  SealSum sum(key);
  sum.take(page, bytes);
  return sum.seal();
}

}  // namespace detail

KVIRE_NAMESPACE_END
