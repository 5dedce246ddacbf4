// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <system_error>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <kvire/base/result.hpp>

#include "stats.hpp"

namespace engine {

/// One policy's replay beside its reference.
struct RunReport {
  std::string policy;
  Stats stats;
  std::int64_t mismatched_tokens = 0;
  double reference_seconds = 0;
};

inline double percent(std::int64_t part, std::int64_t whole) { return whole == 0 ? 0 : 100.0 * static_cast<double>(part) / static_cast<double>(whole); }

inline nlohmann::ordered_json to_json(const RunReport& run) {
  const Stats& s = run.stats;
  return {{"policy", run.policy},
          {"requests", s.requests},
          {"prompt_tokens", s.prompt_tokens},
          {"decoded_tokens", s.decoded_tokens},
          {"mismatched_tokens", run.mismatched_tokens},
          {"device_hit_tokens", s.device_hit_tokens},
          {"host_hit_tokens", s.host_hit_tokens},
          {"file_hit_tokens", s.file_hit_tokens},
          {"recomputed_tokens", s.recomputed_tokens},
          {"replayed_tokens", s.replayed_tokens},
          {"sparse_tokens", s.sparse_tokens},
          {"sparse_tokens_after_load", s.sparse_tokens_after_load},
          {"bytes_to_host", s.bytes_to_host},
          {"bytes_to_device", s.bytes_to_device},
          {"files_stored", s.files_stored},
          {"files_read", s.files_read},
          {"files_lost", s.files_lost},
          {"pauses", s.pauses},
          {"steps", s.steps},
          {"kernels", s.kernels},
          {"graph_replays", s.graph_replays},
          {"hot_hits", s.hot_hits},
          {"hot_misses", s.hot_misses},
          {"seconds", s.seconds},
          {"reference_seconds", run.reference_seconds}};
}

inline void print_table(const std::vector<RunReport>& runs) {
  fmt::print("{:<6} {:>8} {:>9} {:>8} {:>9} {:>9} {:>10} {:>8} {:>11} {:>9} {:>9} {:>8} {:>10}\n", "policy", "requests", "prompt", "decoded", "dev hit", "host hit",
             "recomputed", "sparse", "after load", "to host", "to device", "seconds", "mismatched");
  for (const RunReport& run : runs) {
    const Stats& s = run.stats;
    fmt::print("{:<6} {:>8} {:>9} {:>8} {:>8.1f}% {:>8.1f}% {:>9.1f}% {:>7.1f}% {:>10.1f}% {:>6.0f} MB {:>6.0f} MB {:>8.1f} {:>10}\n", run.policy, s.requests,
               s.prompt_tokens, s.decoded_tokens, percent(s.device_hit_tokens, s.prompt_tokens), percent(s.host_hit_tokens, s.prompt_tokens),
               percent(s.recomputed_tokens, s.prompt_tokens), percent(s.sparse_tokens, s.decoded_tokens),
               percent(s.sparse_tokens_after_load, s.decoded_tokens), static_cast<double>(s.bytes_to_host) * 1e-6, static_cast<double>(s.bytes_to_device) * 1e-6,
               s.seconds, run.mismatched_tokens);
  }
  for (const RunReport& run : runs) {
    const Stats& s = run.stats;
    if (s.files_stored + s.files_read + s.files_lost == 0) continue;
    fmt::print("{}: {:.1f}% of the prompt tokens from files; {} records stored, {} read, {} lost\n", run.policy, percent(s.file_hit_tokens, s.prompt_tokens),
               s.files_stored, s.files_read, s.files_lost);
  }
  for (const RunReport& run : runs) {
    const std::int64_t listed = run.stats.hot_hits + run.stats.hot_misses;
    if (listed > 0) fmt::print("{}: hot set, {:.1f}% of {} selected latents in their slots\n", run.policy, percent(run.stats.hot_hits, listed), listed);
    for (const auto& [kernel, calls] : run.stats.kernels) fmt::print("{}: {} by the {} kernel\n", run.policy, calls, kernel);
    if (run.stats.graph_replays > 0) fmt::print("{}: {} of {} steps replayed the decode graph\n", run.policy, run.stats.graph_replays, run.stats.steps);
  }
  fmt::print(
      "dev hit, host hit, recomputed: of the prompt tokens. sparse: decoded tokens with more index keys than top-k; after load: of the decoded\n"
      "tokens, sparse ones whose keys came back from the host tier. mismatched: decoded tokens whose logits differ in any bit from a run without cache.\n");
}

/// Whether results can be written to `path` later: asked before a run of minutes, so that its numbers are not lost. `input` is a file that
/// they must not overwrite (empty: none).
inline kvire::Status check_writable(const std::string& path, const std::string& input) {
  std::error_code same;
  if (!input.empty() && std::filesystem::equivalent(path, input, same)) {
    return kvire::Error{kvire::ErrorCode::invalid_argument, "results: " + path + " is the trace, which they would overwrite"};
  }
  std::error_code none;
  const bool there = std::filesystem::exists(path, none);
  std::FILE* file = std::filesystem::is_directory(path, none) ? nullptr : std::fopen(path.c_str(), "ab");
  if (file == nullptr) return kvire::Error{kvire::ErrorCode::invalid_argument, "results: " + path + " cannot be written: " + std::strerror(errno)};
  std::fclose(file);
  if (!there) std::filesystem::remove(path, none);
  return {};
}

/// All of the text or none of it: a file that is there stays as it is unless the new one is complete.
inline kvire::Status write_text(const std::string& path, const std::string& text) {
  std::error_code error;
  const bool replace = !std::filesystem::exists(path, error) || std::filesystem::is_regular_file(path, error);
  const std::string target = replace ? path + ".part" : path;  // a pipe or a device is written, not replaced
  std::ofstream file(target);
  file << text;
  file.close();
  if (file && replace) std::filesystem::rename(target, path, error);
  if (!file || (replace && error)) {
    if (replace) std::filesystem::remove(target, error);
    return kvire::Error{kvire::ErrorCode::failed, "results: " + path + " cannot be written: " + std::strerror(errno)};
  }
  return {};
}

inline kvire::Status write_json(const std::string& path, const nlohmann::ordered_json& json) { return write_text(path, json.dump(2) + "\n"); }

}  // namespace engine
