// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

#include <nlohmann/json.hpp>

#include <kvire/tier/cache_event.hpp>

#include "report.hpp"

namespace engine {

/// What a tiered cache did, as a file in the trace event format that Chrome, Perfetto and Speedscope show: a process for each request, in it a row for each
/// kind of work. Of one request: what was done for it, and what else happened to its pages (who made them, and for whom they were evicted).
class Timeline {
 public:
  /// `request`: of which one, by its number in the trace; none: all.
  explicit Timeline(std::optional<std::int64_t> request = {}) : request_(request) {}

  /// To be called with each event of a cache; the timeline must outlive it.
  auto sink() {
    return [this](const kvire::CacheEvent& event) { events_.push_back(event); };
  }

  nlohmann::ordered_json json() const {
    std::unordered_set<std::string> pages;
    for (const auto& e : events_) {
      if (e.request == request_) pages.insert(page_name(e));
    }
    std::int64_t start = events_.empty() ? 0 : events_.front().begin_ns;
    for (const auto& e : events_) start = std::min(start, e.begin_ns);
    auto shown = nlohmann::ordered_json::array();
    std::unordered_set<std::int64_t> requests;
    for (const auto& e : events_) {
      if (request_ && e.request != request_ && !pages.contains(page_name(e))) continue;
      requests.insert(e.request);
      const bool lasts = e.work < static_cast<kvire::CacheWork>(kvire::timed_cache_work);
      nlohmann::ordered_json event{{"name", kvire::name_of(e.work)},
                                   {"cat", kvire::name_of(e.tier)},
                                   {"ph", lasts ? "X" : "i"},
                                   {"ts", microseconds(e.begin_ns - start)},
                                   {"pid", e.request},
                                   {"tid", static_cast<int>(e.work)}};
      if (lasts) {
        event["dur"] = microseconds(e.end_ns - e.begin_ns);
      } else {
        event["s"] = "t";
      }
      event["args"] = {{"tier", kvire::name_of(e.tier)}, {"prefix", page_name(e)}, {"pages", e.pages}, {"tokens", e.tokens}, {"bytes", e.bytes}};
      if (e.space >= 0) event["args"]["space"] = e.space;
      if (*e.detail != '\0') event["args"]["detail"] = e.detail;
      shown.push_back(std::move(event));
    }
    for (const std::int64_t request : requests) {
      const std::string name = request < 0 ? "cache" : "request " + std::to_string(request);
      shown.push_back({{"name", "process_name"}, {"ph", "M"}, {"pid", request}, {"args", {{"name", name}}}});
      for (int work = 0; work <= static_cast<int>(kvire::CacheWork::evict); ++work) {
        shown.push_back({{"name", "thread_name"}, {"ph", "M"}, {"pid", request}, {"tid", work}, {"args", {{"name", kvire::name_of(static_cast<kvire::CacheWork>(work))}}}});
      }
    }
    return {{"displayTimeUnit", "ms"}, {"traceEvents", std::move(shown)}};
  }
  kvire::Status write(const std::string& path) const { return write_text(path, json().dump() + "\n"); }

 private:
  static double microseconds(std::int64_t ns) { return static_cast<double>(ns) * 1e-3; }
  static std::string page_name(const kvire::CacheEvent& e) { return kvire::hex_text(e.page).c_str(); }

  std::optional<std::int64_t> request_;
  std::vector<kvire::CacheEvent> events_;
};

}  // namespace engine
