// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/kernel/candidate_slots.cuh>
#include <kvire/kernel/logits_math.cuh>

KVIRE_NAMESPACE_BEGIN

/// What a tuned sparse-logits kernel is given, and how many tokens of a row it scores: lengths are clamped inside the kernel. A plan says how pages and tiles lie
/// in each other: next_n, tokens, pages_per_tile, tiles_per_page; and whether the kernel has `options`: bf16 scores and lists of blocks.
namespace sm90 {

inline constexpr int tile_tokens = 64;

/// An L2 cache policy, as createpolicy.fractional makes it on every GPU from sm_80 on, with a fraction of 1. Lines that are evicted last: whoever reads them next
/// finds them there, and memory that is written launch after launch, as the scores of an engine's layers are, hardly ever goes to DRAM. As a number it can be a
/// parameter, which costs no instruction.
inline constexpr kstd::uint64_t evict_last = 0x14F0000000000000;

/// What the kernel reads. Plain pointers to device memory; lengths in cached tokens. Rows are (batch, query token) pairs.
struct LogitsArguments {
  const kstd::byte* pages = nullptr;      ///< page 0 of the layer
  kstd::int64_t page_stride = 0;          ///< bytes, a multiple of 16
  kstd::int32_t page_count = 0;           ///< ids at or above are skipped and counted
  kstd::int32_t batch = 0;                ///< B
  const void* queries = nullptr;          ///< [B][next_n][heads][dim], 16-byte aligned
  const float* weights = nullptr;         ///< [B][next_n][heads], 16-byte aligned
  const kstd::int32_t* page_table = nullptr;  ///< [B][table_stride]; negative: no page, scores -inf
  kstd::int64_t table_stride = 0;         ///< elements
  kstd::int32_t table_width = 0;          ///< entries of a row that may be read
  const kstd::int32_t* lengths = nullptr;  ///< [B], or [B][next_n] if lengths_per_query; one length is the last query token's, each earlier one sees one less
  bool lengths_per_query = false;
  void* logits = nullptr;                 ///< [B * next_n][logits_stride], f32, or bf16 if the kernel has options
  kstd::int64_t logits_stride = 0;        ///< elements
  bool bf16 = false;                      ///< options: scores are bf16, rounded to nearest even once
  kstd::uint64_t score_policy = evict_last;  ///< of L2, for the lines of scores
  const kstd::int32_t* blocks = nullptr;  ///< options: [B][max_blocks] entries of the page table to score in this order, negative: none; see SparseLogitsOptions
  kstd::int64_t max_blocks = 0;
  kstd::uint32_t* group_best = nullptr;   ///< KeepBest: [B * next_n][(logits_stride + 15) / 16], order_key of the best of 16 aligned tokens that are seen and on a page, 0 for none; groups beyond the length stay untouched
  CandidateSlots candidates;              ///< KeepCandidates: scores go there, and `logits` is not used
  unsigned long long* bad_pages = nullptr;   ///< counts page ids at or above page_count; may be null
  unsigned long long* nan_logits = nullptr;  ///< counts logits that were NaN, written as -inf; may be null
};

#if KVIRE_CUDA_COMPILER
namespace detail {

template <class Plan>
KVIRE_DEVICE KVIRE_INLINE bool listed(const LogitsArguments& a) {
  if constexpr (Plan::options) return a.blocks != nullptr;
  return false;
}
/// Tokens of a row that are scored, whatever the lengths say: what table and output have room for; listed blocks need not lie within the output.
template <class Plan>
KVIRE_DEVICE KVIRE_INLINE int clamp_length(const LogitsArguments& a, int length) {
  if (listed<Plan>(a)) return length <= 0 ? 0 : length;
  const kstd::int64_t pages = static_cast<kstd::int64_t>(a.table_width) * Plan::tokens;
  const kstd::int64_t room = pages < a.logits_stride ? pages : a.logits_stride;
  const int most = room < 0x7FFFFFFF ? static_cast<int>(room) : 0x7FFFFFFF;
  return length <= 0 ? 0 : length < most ? length : most;
}
/// Tokens that a query token of a row sees.
template <class Plan>
KVIRE_DEVICE KVIRE_INLINE int visible_tokens(const LogitsArguments& a, int row, int query) {
  if (Plan::next_n > 1 && a.lengths_per_query) return clamp_length<Plan>(a, a.lengths[static_cast<kstd::int64_t>(row) * Plan::next_n + query]);
  return clamp_length<Plan>(a, a.lengths[row] - (Plan::next_n - 1 - query));
}
/// Tokens that any query token of a row sees.
template <class Plan>
KVIRE_DEVICE KVIRE_INLINE int row_tokens(const LogitsArguments& a, int row) {
  int most = visible_tokens<Plan>(a, row, Plan::next_n - 1);
  if (Plan::next_n > 1 && a.lengths_per_query) {
    for (int q = 0; q + 1 < Plan::next_n; ++q) {
      const int v = visible_tokens<Plan>(a, row, q);
      most = v > most ? v : most;
    }
  }
  return most;
}
/// Scores of a query token that listed blocks have.
template <class Plan>
KVIRE_DEVICE KVIRE_INLINE int listed_scores(const LogitsArguments& a) {
  const kstd::int64_t all = a.max_blocks * Plan::tokens;
  return static_cast<int>(all < a.logits_stride ? all : a.logits_stride);
}
/// Scores of a row that some query token writes: those of what it sees, or of all listed blocks.
template <class Plan>
KVIRE_DEVICE KVIRE_INLINE int row_scores(const LogitsArguments& a, int row) {
  return listed<Plan>(a) ? listed_scores<Plan>(a) : row_tokens<Plan>(a, row);
}
/// The most that a row can have.
template <class Plan>
KVIRE_DEVICE KVIRE_INLINE int most_scores(const LogitsArguments& a) {
  return listed<Plan>(a) ? listed_scores<Plan>(a) : clamp_length<Plan>(a, 0x7FFFFFFF);
}
KVIRE_DEVICE KVIRE_INLINE int tiles_of(int tokens) { return (tokens + tile_tokens - 1) / tile_tokens; }

/// Writes the score of that index.
template <class Plan>
KVIRE_DEVICE KVIRE_INLINE void store_score(const LogitsArguments& a, kstd::int64_t index, float score) {
  if (Plan::options && a.bf16) {
    store_logit(static_cast<kstd::uint16_t*>(a.logits) + index, score, a.score_policy);
  } else {
    store_logit(static_cast<float*>(a.logits) + index, score, a.score_policy);
  }
}

}  // namespace detail
#endif  // KVIRE_CUDA_COMPILER
}  // namespace sm90

KVIRE_NAMESPACE_END
