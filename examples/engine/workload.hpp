// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>

#include "random.hpp"
#include "request.hpp"

namespace engine {

/// Token `index` of the block with the given id, whatever request it stands in.
inline int block_token(std::uint64_t id, std::int64_t index) {
  return static_cast<int>(mix(mix(id) + static_cast<std::uint64_t>(index)) % static_cast<std::uint64_t>(vocabulary));
}

/// Scales a request of a trace so that a block has `block_tokens` tokens: lengths times block_tokens / 512, rounded down, at least one
/// output token. A block's tokens derive from its id alone, a partial block has its id's first ones; so equal ids stay equal prefixes.
inline Request scale_request(const TraceRequest& trace, int block_tokens) {
  Request request;
  const std::int64_t length = trace.input_length * block_tokens / trace_block_tokens;
  request.prompt.reserve(static_cast<std::size_t>(length));
  for (std::int64_t i = 0; i < length; ++i) {
    request.prompt.push_back(block_token(trace.blocks[static_cast<std::size_t>(i / block_tokens)], i % block_tokens));
  }
  request.output_tokens = static_cast<int>(std::max<std::int64_t>(1, trace.output_length * block_tokens / trace_block_tokens));
  return request;
}

/// A workload of the same shape as a trace of conversations, for when there is no trace: every prompt opens with one shared block, a
/// conversation's next turn repeats its history and adds the last answer and a new question, conversations interleave.
inline std::vector<TraceRequest> make_conversations(std::int64_t requests, std::uint64_t seed) {
  struct Conversation {
    std::vector<std::uint64_t> blocks;
    std::int64_t length = 0;
  };
  Random random(seed ^ 0x636f6e76u);
  std::uint64_t next_block = 1;
  std::vector<Conversation> open;
  std::vector<TraceRequest> out;
  const auto extend = [&](Conversation& c, std::int64_t tokens) {
    // The tail of a partial block changes when text is added, so the block gets a new id, as in the recorded traces.
    if (c.length % trace_block_tokens != 0 && c.blocks.size() > 1) c.blocks.back() = next_block++;
    c.length += tokens;
    while (static_cast<std::int64_t>(c.blocks.size()) * trace_block_tokens < c.length) c.blocks.push_back(next_block++);
  };
  while (static_cast<std::int64_t>(out.size()) < requests) {
    const std::size_t wanted = 12;
    if (open.size() < wanted && (open.empty() || random.below(2) == 0)) {
      Conversation fresh{{0}, trace_block_tokens};
      extend(fresh, 1500 + static_cast<std::int64_t>(random.below(6000)));
      open.push_back(std::move(fresh));
    }
    const std::size_t at = static_cast<std::size_t>(random.below(open.size()));
    Conversation& c = open[at];
    const std::int64_t answer = 16 + static_cast<std::int64_t>(random.below(480));
    out.push_back({c.length, answer, c.blocks});
    extend(c, answer + 32 + static_cast<std::int64_t>(random.below(600)));
    if (random.below(8) == 0 || c.length > 20000) open.erase(open.begin() + static_cast<std::ptrdiff_t>(at));
  }
  return out;
}

}  // namespace engine
