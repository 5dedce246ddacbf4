// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstring>

#include "batch.hpp"
#include "options.hpp"
#include "progress.hpp"
#include "report.hpp"
#include "timeline.hpp"
#include "trace.hpp"
#include "workload.hpp"

namespace engine {

/// The requests of the trace, or conversations of the same shape without one.
inline kvire::Result<std::vector<Request>> load_requests(const Options& options) {
  std::vector<TraceRequest> trace;
  if (options.trace.empty()) {
    trace = make_conversations(options.requests > 0 ? options.requests : 40, options.seed);
  } else {
    auto read = read_trace(options.trace, options.requests);
    if (!read) return read.error();
    trace = std::move(read).value();
  }
  std::vector<Request> requests;
  for (const TraceRequest& t : trace) requests.push_back(scale_request(t, options.block_tokens));
  return requests;
}

inline std::int64_t longest_request(const std::vector<Request>& requests) {
  std::int64_t longest = 1;
  for (const Request& r : requests) longest = std::max(longest, static_cast<std::int64_t>(r.prompt.size()) + r.output_tokens);
  return longest;
}

inline Model model_for(const Options& options, const std::vector<Request>& requests) {
  return make_model(options.seed, options.layers, options.index_heads, longest_request(requests) + 1);
}

/// Whether the longest request has room in the pools, asked before the reference runs.
inline kvire::Status check_fit(const Options& options, const std::vector<Request>& requests) {
  const std::int64_t needed = blocks_for(longest_request(requests)) + 1;
  if (needed > options.device_pages) {
    return kvire::Error{kvire::ErrorCode::invalid_argument,
                        fmt::format("--device-pages is {}: the longest request, {} tokens, needs {} pages at once and the null page", options.device_pages,
                                    longest_request(requests), needed - 1)};
  }
  if (options.host_pages == 1) {
    return kvire::Error{kvire::ErrorCode::invalid_argument, "--host-pages is 1: that is the null page alone; 0 is no host tier, 2 the smallest one"};
  }
  return {};
}

/// Decoded tokens whose logits differ in any bit.
inline std::int64_t count_mismatches(const Replay& a, const Replay& b) {
  std::int64_t count = 0;
  for (std::size_t r = 0; r < a.answers.size(); ++r) {
    const std::vector<float>& x = a.answers[r].logits;
    const std::vector<float>& y = b.answers[r].logits;
    const std::size_t common = std::min(x.size(), y.size());
    count += static_cast<std::int64_t>((std::max(x.size(), y.size()) - common) / vocabulary);
    for (std::size_t i = 0; i < common; i += vocabulary) count += std::memcmp(&x[i], &y[i], vocabulary * sizeof(float)) != 0 ? 1 : 0;
  }
  return count;
}

inline ReplaySettings replay_settings(const Options& options) {
  ReplaySettings s;
  s.cuda = options.cuda;
  s.kernel = options.kernel;
  s.captured = options.captured;
  s.layers = options.layers;
  s.top_k = options.top_k;
  s.device_pages = options.device_pages;
  s.host_pages = options.host_pages;
  s.file_folder = options.file_tier;
  s.file_bytes = options.file_bytes;
  s.model_name = fmt::format("kvire_engine/seed={}/index_heads={}/top_k={}/{}", options.seed, options.index_heads, options.top_k, options.cuda ? "cuda" : "host");
  s.sessions = options.sessions;
  s.chunk = options.chunk;
  s.pause_every = options.pause_every;
  s.hot_slots = options.hot_set;
  s.damage = options.inject;
  return s;
}

/// Without prefix reuse, host tier, eviction and graphs; other batches and chunks than the replay's, which must not matter.
inline ReplaySettings reference_settings(const Options& options, const std::vector<Request>& requests) {
  ReplaySettings s;
  s.cuda = options.cuda;
  s.kernel = options.kernel;
  s.layers = options.layers;
  s.top_k = options.top_k;
  s.sessions = 3;
  s.device_pages = s.sessions * blocks_for(longest_request(requests)) + 1;
  s.chunk = 320;
  s.reuse = false;
  return s;
}

template <class IndexKey>
kvire::Result<Replay> run_reference(const char* name, const Options& options, const Model& model, const std::vector<Request>& requests) {
  Progress progress(fmt::format("{} reference", name), static_cast<std::int64_t>(requests.size()), options.quiet);
  return replay<IndexKey>(reference_settings(options, requests), model, requests, progress.call());
}

template <class IndexKey>
kvire::Result<RunReport> run_policy(const char* name, const Options& options, const Model& model, const std::vector<Request>& requests) {
  auto reference = run_reference<IndexKey>(name, options, model, requests);
  if (!reference) return reference.error();
  Progress progress(name, static_cast<std::int64_t>(requests.size()), options.quiet);
  Timeline timeline(options.timeline_request);
  ReplaySettings settings = replay_settings(options);
  if (!options.timeline.empty()) settings.follow = timeline.sink();
  auto run = replay<IndexKey>(settings, model, requests, progress.call());
  if (!run) return run.error();
  if (!options.timeline.empty()) {
    if (auto status = timeline.write(options.timeline); !status.ok()) return status.error();
  }
  RunReport report;
  report.policy = name;
  report.stats = run.value().stats;
  report.reference_seconds = reference.value().stats.seconds;
  report.mismatched_tokens = count_mismatches(run.value(), reference.value());
  return report;
}

/// Calls f.template operator()<IndexKey>(name) for each policy that the options name, until one returns an error.
template <class F>
kvire::Status for_each_policy(const std::string& policy, F&& f) {
  using namespace kvire::preset::deepseek_v4;
  kvire::Status status;
  const auto visit = [&]<class IndexKey>(const char* name) {
    if (status.ok() && (policy == "all" || policy == name)) status = f.template operator()<IndexKey>(name);
  };
  visit.template operator()<IndexKeyFp8>("fp8");
  visit.template operator()<IndexKeyBf16>("bf16");
  visit.template operator()<IndexKeyFp4>("fp4");
  return status;
}

}  // namespace engine
