// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <kvire/preset/deepseek_v4.hpp>
#include <kvire/tier/counters.hpp>
#include <kvire/tier/file_stats.hpp>

#include "request.hpp"

namespace engine {

/// What a replay counts. prompt_tokens = device_hit_tokens + host_hit_tokens + file_hit_tokens + recomputed_tokens.
struct Stats {
  std::int64_t requests = 0;
  std::int64_t prompt_tokens = 0;
  std::int64_t decoded_tokens = 0;
  std::int64_t device_hit_tokens = 0;         ///< prompt tokens whose pages were on the device
  std::int64_t host_hit_tokens = 0;           ///< prompt tokens whose pages came back from the host tier
  std::int64_t file_hit_tokens = 0;           ///< prompt tokens whose pages came back from the file tier
  std::int64_t recomputed_tokens = 0;         ///< prompt tokens that were computed
  std::int64_t replayed_tokens = 0;           ///< computed again, because a paused session's pages had no place on the host
  std::int64_t sparse_tokens = 0;             ///< decoded with more keys than top-k
  std::int64_t sparse_tokens_after_load = 0;  ///< of those, with keys that came back from the host tier
  std::int64_t bytes_to_host = 0;
  std::int64_t bytes_to_device = 0;
  std::int64_t files_stored = 0;              ///< records written, read, and asked for in vain
  std::int64_t files_read = 0;
  std::int64_t files_lost = 0;
  std::int64_t pauses = 0;
  std::int64_t steps = 0;
  std::int64_t graph_replays = 0;  ///< steps whose decoding sessions were served by a captured graph
  std::int64_t hot_hits = 0;       ///< tokens that a selection found in the hot set, and that it fetched
  std::int64_t hot_misses = 0;
  double seconds = 0;
  std::map<std::string, std::int64_t> kernels;  ///< calls that each served, where the backend has several
  kvire::CacheCounters<kvire::preset::deepseek_v4::Flash<>::space_count> cache;  ///< of all policies alike
  kvire::FileTierStats files;
};

/// The highest logit's token, the lowest among equals.
inline int greedy_token(const float* logits) { return static_cast<int>(std::max_element(logits, logits + vocabulary) - logits); }

/// The logits of every decoded token of a request, [output_tokens][vocabulary].
struct Answer {
  std::vector<float> logits;
};

struct Replay {
  Stats stats;
  std::vector<Answer> answers;
};

}  // namespace engine
