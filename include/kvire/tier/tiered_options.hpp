// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

#include <kvire/base/result.hpp>

KVIRE_NAMESPACE_BEGIN

struct TieredOptions {
  std::int64_t window_tokens = 0;  ///< how far back the model's sliding window reaches, the token itself included; 0: none
  bool write_through = false;      ///< a page gets its copy on the host when it is published, not when the device gives it up
  bool keep_tokens = true;         ///< see PrefixShape
  int batch_pages = 8;             ///< pages of a space that are sent to the host at once when the device runs short; at least 1
  std::chrono::milliseconds room_limit{10'000};  ///< how long an `acquire`, `resume` or `allocate` waits, for all its pages together, for room that is on its way; 0: not at all
  bool seal = true;                ///< what comes back from the host, or goes on to a file, must be what the device had (see PageSeals)
  std::string name = "tiered cache";
};

/// Success, or invalid_argument with the option that is wrong.
inline Status check_options(const TieredOptions& options) {
  const auto bad = [&](const char* option, std::int64_t value, const char* bound) {
    return Error{ErrorCode::invalid_argument, options.name + ": " + option + " is " + std::to_string(value) + "; " + bound};
  };
  if (options.window_tokens < 0) return bad("window_tokens", options.window_tokens, "it counts tokens, 0 without a window");
  if (options.batch_pages < 1) return bad("batch_pages", options.batch_pages, "at least one page is sent at once");
  if (options.room_limit.count() < 0) return bad("room_limit in ms", options.room_limit.count(), "0 does not wait at all");
  return {};
}

KVIRE_NAMESPACE_END
