// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fstream>
#include <string>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <kvire/base/result.hpp>

#include "request.hpp"

namespace engine {

/// Most tokens that a request may have, prompt and answer each: beyond the longest context of any model, and small enough for tables.
inline constexpr std::int64_t most_tokens = std::int64_t{1} << 22;
/// Longest line of a trace, in bytes: a request of `most_tokens` has 8,192 ids of at most 20 digits.
inline constexpr std::size_t longest_line = std::size_t{1} << 20;

/// Reads one line of a trace: {"timestamp", "input_length", "output_length", "hash_ids"}; other keys are ignored.
inline kvire::Result<TraceRequest> parse_trace_line(const std::string& line, const std::string& where) {
  using kvire::Error;
  using kvire::ErrorCode;
  const auto bad = [&](const std::string& what) { return Error{ErrorCode::invalid_argument, where + ": " + what}; };
  const nlohmann::json json = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) return bad("not a JSON object");
  TraceRequest request;
  for (const char* key : {"input_length", "output_length"}) {
    const auto at = json.find(key);
    if (at == json.end()) return bad(fmt::format("key \"{}\" is missing", key));
    if (!at->is_number_integer()) return bad(fmt::format("\"{}\" is {}, not a whole number", key, at->dump()));
    const bool too_large = at->is_number_unsigned() && at->get<std::uint64_t>() > static_cast<std::uint64_t>(most_tokens);
    if (too_large || at->get<std::int64_t>() < 0) return bad(fmt::format("\"{}\" is {}, not between 0 and {}", key, at->dump(), most_tokens));
    (key[0] == 'i' ? request.input_length : request.output_length) = at->get<std::int64_t>();
  }
  const auto ids = json.find("hash_ids");
  if (ids == json.end() || !ids->is_array()) return bad("\"hash_ids\" must be a list of block ids");
  for (const auto& id : *ids) {
    if (!id.is_number_integer() || (!id.is_number_unsigned() && id.get<std::int64_t>() < 0)) {
      return bad(fmt::format("hash id {} is not a whole number from 0", id.dump()));
    }
    request.blocks.push_back(id.get<std::uint64_t>());
  }
  const std::int64_t needed = (request.input_length + trace_block_tokens - 1) / trace_block_tokens;
  if (static_cast<std::int64_t>(request.blocks.size()) < needed) {
    return bad(fmt::format("input_length {} needs {} hash ids of {} tokens, the line has {}", request.input_length, needed, trace_block_tokens,
                           request.blocks.size()));
  }
  return request;
}

/// Reads at most `limit` requests (0: all) in the order of the file. Empty lines are skipped.
inline kvire::Result<std::vector<TraceRequest>> read_trace(const std::string& path, std::int64_t limit) {
  std::ifstream file(path);
  if (!file) return kvire::Error{kvire::ErrorCode::invalid_argument, "trace " + path + ": cannot be opened"};
  std::vector<TraceRequest> requests;
  std::string line;
  const auto next_line = [&] {  // not std::getline, which takes a device or a file without line ends until memory ends
    line.clear();
    for (int c = file.get(); c != std::ifstream::traits_type::eof(); c = file.get()) {
      if (c == '\n') return true;
      line.push_back(static_cast<char>(c));
      if (line.size() > longest_line) return true;
    }
    return !line.empty();
  };
  for (std::int64_t number = 1; next_line(); ++number) {
    if (line.size() > longest_line) {
      return kvire::Error{kvire::ErrorCode::invalid_argument, fmt::format("trace {}, line {}: longer than {} bytes", path, number, longest_line)};
    }
    if (limit > 0 && static_cast<std::int64_t>(requests.size()) == limit) break;
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    auto request = parse_trace_line(line, fmt::format("trace {}, line {}", path, number));
    if (!request) return request.error();
    requests.push_back(std::move(request).value());
  }
  if (file.bad()) return kvire::Error{kvire::ErrorCode::invalid_argument, "trace " + path + ": cannot be read"};
  if (requests.empty()) return kvire::Error{kvire::ErrorCode::invalid_argument, "trace " + path + ": holds no request"};
  return requests;
}

}  // namespace engine
