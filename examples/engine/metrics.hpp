// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <kvire/tier/counters.hpp>
#include <kvire/tier/tiered_moves.hpp>

namespace engine {

/// Name of a bundle's page-id space by its number; empty for -1.
template <class Bundle>
std::string space_name(int space) {
  std::string name;
  kvire::detail::for_each_space<Bundle>([&]<class Space>(int index) { name = index == space ? Space::name : name; });
  return name;
}

/// The counters of a tiered cache: one value a name, objects by tier, space or reason where a number has such labels.
template <class Bundle, int Spaces>
nlohmann::ordered_json to_json(const kvire::CacheCounters<Spaces>& counters) {
  nlohmann::ordered_json json;
  counters.visit([&](const char* name, const kvire::CounterLabel& label, std::int64_t value) {
    auto* at = &json[name];
    if (label.tier != nullptr) at = &(*at)[label.tier];
    if (label.space >= 0) at = &(*at)[space_name<Bundle>(label.space)];
    if (label.reason != nullptr) at = &(*at)[label.reason];
    *at = value;
  });
  return json;
}

/// The same in the text format that Prometheus reads.
template <class Bundle, int Spaces>
std::string prometheus_text(const kvire::CacheCounters<Spaces>& counters) {
  // The samples of one name stand together.
  std::vector<std::pair<std::string, std::string>> metrics;
  counters.visit([&](const char* name, const kvire::CounterLabel& label, std::int64_t value) {
    const std::string metric = fmt::format("kvire_cache_{}_total", name);
    std::string labels;
    const auto add = [&](const char* key, const std::string& text) {
      if (!text.empty()) labels += fmt::format("{}{}=\"{}\"", labels.empty() ? "" : ",", key, text);
    };
    add("tier", label.tier == nullptr ? "" : label.tier);
    add("space", space_name<Bundle>(label.space));
    add("reason", label.reason == nullptr ? "" : label.reason);
    const std::string sample = fmt::format("{}{} {}\n", metric, labels.empty() ? "" : "{" + labels + "}", value);
    for (auto& [known, samples] : metrics) {
      if (known == metric) return void(samples += sample);
    }
    metrics.emplace_back(metric, fmt::format("# TYPE {} counter\n", metric) + sample);
  });
  std::string text;
  for (const auto& [metric, samples] : metrics) text += samples;
  return text;
}

}  // namespace engine
