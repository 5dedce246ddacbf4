// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

namespace engine {

/// Size of the vocabulary; small, since weights are generated and nothing is learned.
inline constexpr int vocabulary = 512;
/// Prompt tokens that one id of a trace stands for at full size.
inline constexpr int trace_block_tokens = 512;

/// One request as a trace states it.
struct TraceRequest {
  std::int64_t input_length = 0;
  std::int64_t output_length = 0;
  std::vector<std::uint64_t> blocks;  ///< one id per 512 prompt tokens; equal ids are equal prefixes
};

/// One request as the engine runs it.
struct Request {
  std::vector<int> prompt;
  int output_tokens = 1;
};

}  // namespace engine
