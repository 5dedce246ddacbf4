// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "run.hpp"

namespace engine {

/// How far two replays of the same tokens are apart.
struct Difference {
  std::int64_t tokens = 0;
  std::int64_t other_token = 0;  ///< whose highest logit is another one
  double worst_logit = 0;        ///< largest difference of a token's logits, of its largest logit
  double mean_logit = 0;
  double worst_layer = 0;         ///< largest difference of what a layer adds to a row, of the largest that it adds
  double mean_layer = 0;
  std::int64_t rows = 0;          ///< selections of rows with more keys than k
  std::int64_t other_rows = 0;    ///< that differ
  double worst_margin = 0;        ///< of the keys that only one of them selected: distance of the score to the k-th, of the row's largest

  void add(const Replay& a, const Replay& b) {
    double sum = 0;
    for (std::size_t r = 0; r < a.answers.size(); ++r) {
      const std::vector<float>& x = a.answers[r].logits;
      const std::vector<float>& y = b.answers[r].logits;
      for (std::size_t t = 0; t + vocabulary <= std::min(x.size(), y.size()); t += vocabulary) {
        double largest = 0;
        double apart = 0;
        for (std::size_t i = t; i < t + vocabulary; ++i) {
          largest = std::max(largest, std::fabs(static_cast<double>(x[i])));
          // Not a number is further away than anything.
          const double d = std::fabs(static_cast<double>(x[i]) - static_cast<double>(y[i]));
          apart = d <= apart ? apart : d;
        }
        const double relative = apart / largest;
        worst_logit = relative <= worst_logit ? worst_logit : relative;
        sum += relative;
        other_token += greedy_token(&x[t]) != greedy_token(&y[t]) ? 1 : 0;
        ++tokens;
      }
    }
    mean_logit = sum / static_cast<double>(std::max<std::int64_t>(1, tokens));
  }

  void add(const RowLog& a, const RowLog& b, int k) {
    for (const auto& [key, row] : a.selections()) {
      if (static_cast<int>(row.indices.size()) < k) continue;
      ++rows;
      const auto other = b.selections().find(key);
      if (other == b.selections().end()) {
        ++other_rows;
        worst_margin = 1;
        continue;
      }
      if (other->second.indices == row.indices) continue;
      ++other_rows;
      margins(row, other->second);
      margins(other->second, row);
    }
    // The input of a layer is what the one before it came to, from the same input.
    double sum = 0;
    std::int64_t n = 0;
    for (const auto& [key, row] : a.hidden()) {
      if (RowLog::layer_of(key) == 0) continue;
      const std::vector<float>& before = a.hidden().at(key - (std::uint64_t(1) << 32));
      const std::vector<float>& other = b.hidden().at(key);
      double largest = 0;
      double apart = 0;
      for (std::size_t d = 0; d < row.size(); ++d) {
        largest = std::max(largest, std::fabs(static_cast<double>(row[d]) - static_cast<double>(before[d])));
        const double difference = std::fabs(static_cast<double>(row[d]) - static_cast<double>(other[d]));
        apart = difference <= apart ? apart : difference;
      }
      const double relative = apart / largest;
      worst_layer = relative <= worst_layer ? worst_layer : relative;
      sum += relative;
      ++n;
    }
    mean_layer = sum / static_cast<double>(std::max<std::int64_t>(1, n));
  }

 private:
  void margins(const RowLog::Selection& row, const RowLog::Selection& other) {
    const float last = *std::min_element(row.scores.begin(), row.scores.end());
    float largest = 0;
    for (const float s : row.scores) largest = std::max(largest, std::fabs(s));
    for (std::size_t i = 0; i < row.indices.size(); ++i) {
      if (std::binary_search(other.indices.begin(), other.indices.end(), row.indices[i])) continue;
      worst_margin = std::max(worst_margin, static_cast<double>(row.scores[i] - last) / static_cast<double>(largest));
    }
  }
};

/// The host's forward pass and the GPU's on the same tokens, without prefix reuse, so that every row is computed on both. Every layer of the GPU
/// takes the host's row: what an ulp makes of an 8-bit code would otherwise grow from layer to layer to the size of the quantisation itself.
/// Error mismatch: they are further apart than docs/engine.md allows.
inline kvire::Status host_vs_gpu(const Options& options, const std::vector<Request>& requests) {
  constexpr double layer_tolerance = 0.1;
  constexpr double logit_tolerance = 1e-5;
  constexpr double margin_tolerance = 0.01;
  const Model model = model_for(options, requests);
  fmt::print("the same tokens, and the same rows in front of every layer, on the host and on the GPU; {} layers, top {}:\n", options.layers, options.top_k);
  fmt::print("{:<6} {:>8} {:>11} {:>11} {:>11} {:>11} {:>10} {:>10} {:>10} {:>12}\n", "policy", "tokens", "worst logit", "mean logit", "worst layer", "mean layer", "other best",
             "selections", "other sets", "worst margin");
  kvire::Status verdict;
  nlohmann::ordered_json json;
  const auto compare = [&]<class IndexKey>(const char* name) -> kvire::Status {
    ReplaySettings settings = reference_settings(options, requests);
    const auto run = [&](const char* where) {
      Progress progress(fmt::format("{}, {}", name, where), static_cast<std::int64_t>(requests.size()), options.quiet);
      return replay<IndexKey>(settings, model, requests, progress.call());
    };
    const auto host_log = std::make_shared<RowLog>();
    settings.cuda = false;
    settings.log = host_log;
    const auto on_host = run("host");
    if (!on_host) return on_host.error();
    auto forced = std::make_shared<std::vector<std::vector<int>>>();
    for (const Answer& answer : on_host.value().answers) {
      auto& tokens = forced->emplace_back();
      for (std::size_t t = 0; t < answer.logits.size(); t += vocabulary) tokens.push_back(greedy_token(&answer.logits[t]));
    }
    const auto gpu_log = std::make_shared<RowLog>(host_log);
    settings.cuda = true;
    settings.log = gpu_log;
    settings.forced = forced;
    const auto on_gpu = run("GPU");
    if (!on_gpu) return on_gpu.error();
    Difference apart;
    apart.add(on_host.value(), on_gpu.value());
    apart.add(*host_log, *gpu_log, options.top_k);
    fmt::print("{:<6} {:>8} {:>11.2e} {:>11.2e} {:>11.2e} {:>11.2e} {:>10} {:>10} {:>10} {:>12.2e}\n", name, apart.tokens, apart.worst_logit, apart.mean_logit, apart.worst_layer,
               apart.mean_layer, apart.other_token, apart.rows, apart.other_rows, apart.worst_margin);
    json["host_vs_gpu"].push_back({{"policy", name},
                                   {"tokens", apart.tokens},
                                   {"worst_logit", apart.worst_logit},
                                   {"mean_logit", apart.mean_logit},
                                   {"worst_layer", apart.worst_layer},
                                   {"mean_layer", apart.mean_layer},
                                   {"other_token", apart.other_token},
                                   {"selections", apart.rows},
                                   {"other_selections", apart.other_rows},
                                   {"worst_margin", apart.worst_margin}});
    if (!(apart.worst_logit <= logit_tolerance) || !(apart.worst_layer <= layer_tolerance) || !(apart.worst_margin <= margin_tolerance)) {
      verdict = kvire::Error{kvire::ErrorCode::mismatch, std::string(name) + ": host and GPU are further apart than the tolerance"};
    }
    return {};
  };
  if (auto status = for_each_policy(options.policy, compare); !status.ok()) return status;
  fmt::print(
      "logit: largest difference of a token's logits, of its largest one. layer: the same of what a layer adds to a row. other best: tokens whose highest logit is\n"
      "another. selections: of rows with more keys than k. worst margin: how far a key that only one side selected is from the k-th score, of the row's largest.\n");
  if (!options.json.empty()) {
    if (auto written = write_json(options.json, json); !written.ok()) return written;
  }
  return verdict;
}

}  // namespace engine
