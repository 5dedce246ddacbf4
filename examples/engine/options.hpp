// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "replay.hpp"

namespace engine {

struct Options {
  std::string policy = "all";
  bool cuda = false;
  kvire::KernelChoice kernel = kvire::KernelChoice::automatic;
  bool captured = false;
  std::string trace;
  std::int64_t requests = 0;  ///< 0: all of the trace, or 40 made ones
  int block_tokens = 64;
  int sessions = 8;
  std::int64_t device_pages = 28;
  std::int64_t host_pages = 512;
  std::string file_tier;
  std::int64_t file_bytes = std::int64_t{1} << 30;
  int layers = 5;
  int top_k = 64;
  int index_heads = 8;
  int chunk = 256;
  int pause_every = 12;
  int hot_set = 0;  ///< slots of a session and layer
  std::uint64_t seed = 1;
  std::string json;
  Damage inject = Damage::none;
  std::string experiment;
  bool cache_only = false;
  int device_percent = 10;  ///< of a cache-only run: pages of each tier, of all distinct ones
  int host_percent = 30;
  std::string metrics;      ///< file for its counters, in Prometheus' text format
  std::string timeline;     ///< file for what its tiers did, in the trace event format
  std::optional<std::int64_t> timeline_request = {};  ///< what concerns this request alone
  bool quiet = false;
};

}  // namespace engine
