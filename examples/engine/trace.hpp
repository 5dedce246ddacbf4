// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fstream>
#include <string>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <kvire/base/result.hpp>

#include "request.hpp"

namespace engine {

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
    const bool too_large = at->is_number_unsigned() && at->get<std::uint64_t>() > std::uint64_t(1) << 40;
    if (too_large || at->get<std::int64_t>() < 0) return bad(fmt::format("\"{}\" is {}, not between 0 and 2^40", key, at->dump()));
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
  for (std::int64_t number = 1; std::getline(file, line); ++number) {
    if (limit > 0 && static_cast<std::int64_t>(requests.size()) == limit) break;
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    auto request = parse_trace_line(line, fmt::format("trace {}, line {}", path, number));
    if (!request) return request.error();
    requests.push_back(std::move(request).value());
  }
  if (file.bad()) return kvire::Error{kvire::ErrorCode::failed, "trace " + path + ": reading failed"};
  if (requests.empty()) return kvire::Error{kvire::ErrorCode::invalid_argument, "trace " + path + ": holds no request"};
  return requests;
}

}  // namespace engine
