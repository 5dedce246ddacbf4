// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <kvire/tier/counters.hpp>
#include <kvire/tier/file_stats.hpp>
#include <kvire/tier/tiered_moves.hpp>

namespace engine {

/// Name of a bundle's page-id space by its number; empty for -1.
template <class Bundle>
std::string space_name(int space) {
  std::string name;
  kvire::detail::for_each_space<Bundle>([&]<class Space>(int index) { name = index == space ? Space::name : name; });
  return name;
}

/// A histogram: how many, their seconds, and how many of at most `le_ns` nanoseconds.
inline nlohmann::ordered_json to_json(const kvire::TimeHistogram& times) {
  nlohmann::ordered_json json{{"count", times.count}, {"seconds", static_cast<double>(times.sum_ns) * 1e-9}};
  std::int64_t below = 0;
  for (int i = 0; i + 1 < kvire::TimeHistogram::buckets; ++i) {
    below += times.in[i];
    if (times.in[i] > 0) json["at_most_ns"][std::to_string(kvire::TimeHistogram::bound_ns(i))] = below;
  }
  return json;
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
  counters.visit_times([&](const char* work, const kvire::TimeHistogram& times) { json["times"][work] = to_json(times); });
  return json;
}

/// Those of a file tier.
inline nlohmann::ordered_json to_json(const kvire::FileTierStats& stats) {
  nlohmann::ordered_json json;
  stats.visit([&](const char* name, const std::string& reason, std::int64_t value) { (reason.empty() ? json[name] : json[name][reason]) = value; });
  stats.visit_times([&](const char* work, const kvire::TimeHistogram& times) { json["times"][work] = to_json(times); });
  return json;
}

/// Samples in the text format that Prometheus reads; those of one name stand together.
class PrometheusText {
 public:
  using Labels = std::vector<std::pair<const char*, std::string>>;

  void counter(const std::string& metric, const Labels& labels, std::int64_t value) { sample(metric, "counter", metric, labels, fmt::to_string(value)); }
  /// In seconds.
  void histogram(const std::string& metric, const Labels& labels, const kvire::TimeHistogram& times) {
    std::int64_t below = 0;
    for (int i = 0; i < kvire::TimeHistogram::buckets; ++i) {
      below += times.in[i];
      Labels with = labels;
      const bool last = i + 1 == kvire::TimeHistogram::buckets;
      with.emplace_back("le", last ? "+Inf" : fmt::format("{}", static_cast<double>(kvire::TimeHistogram::bound_ns(i)) * 1e-9));
      sample(metric, "histogram", metric + "_bucket", with, fmt::to_string(below));
    }
    sample(metric, "histogram", metric + "_sum", labels, fmt::format("{}", static_cast<double>(times.sum_ns) * 1e-9));
    sample(metric, "histogram", metric + "_count", labels, fmt::to_string(times.count));
  }
  std::string text() const {
    std::string all;
    for (const auto& [metric, samples] : metrics_) all += samples;
    return all;
  }

 private:
  void sample(const std::string& metric, const char* type, const std::string& name, const Labels& labels, const std::string& value) {
    std::string text;
    for (const auto& [key, label] : labels) {
      if (!label.empty()) text += fmt::format("{}{}=\"{}\"", text.empty() ? "" : ",", key, label);
    }
    const std::string line = fmt::format("{}{} {}\n", name, text.empty() ? "" : "{" + text + "}", value);
    for (auto& [known, samples] : metrics_) {
      if (known == metric) return void(samples += line);
    }
    metrics_.emplace_back(metric, fmt::format("# TYPE {} {}\n", metric, type) + line);
  }

  std::vector<std::pair<std::string, std::string>> metrics_;
};

template <class Bundle, int Spaces>
void export_to(PrometheusText& out, const kvire::CacheCounters<Spaces>& counters) {
  counters.visit([&](const char* name, const kvire::CounterLabel& label, std::int64_t value) {
    out.counter(fmt::format("kvire_cache_{}_total", name),
                {{"tier", label.tier == nullptr ? "" : label.tier}, {"space", space_name<Bundle>(label.space)}, {"reason", label.reason == nullptr ? "" : label.reason}}, value);
  });
  counters.visit_times([&](const char* work, const kvire::TimeHistogram& times) { out.histogram("kvire_cache_seconds", {{"work", work}}, times); });
}

inline void export_to(PrometheusText& out, const kvire::FileTierStats& stats) {
  stats.visit([&](const char* name, const std::string& reason, std::int64_t value) { out.counter(fmt::format("kvire_files_{}_total", name), {{"reason", reason}}, value); });
  stats.visit_times([&](const char* work, const kvire::TimeHistogram& times) { out.histogram("kvire_files_seconds", {{"work", work}}, times); });
}

}  // namespace engine
