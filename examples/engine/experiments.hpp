// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "recall.hpp"
#include "run.hpp"

namespace engine {

/// Replays with the hand-made mirror and with the typed one, with and without a host tier, with many sessions and with one that never evicts.
inline kvire::Status silent_corruption(const Options& options, const std::vector<Request>& requests) {
  struct Setting {
    const char* text;
    bool host;
    bool many;
  };
  const Setting settings[] = {
      {"host tier, many sessions", true, true}, {"no host tier, many sessions", false, true}, {"host tier, one session, never evicts", true, false}};
  std::int64_t everything = 2;
  for (const Request& r : requests) everything += blocks_for(static_cast<std::int64_t>(r.prompt.size()) + r.output_tokens) + 1;
  const Model model = model_for(options, requests);
  fmt::print("index keys mirrored by a formula restated by hand (64 tokens x (128 + 4) B, as the fp8 pages have them) against kvire's mirror_of:\n");
  fmt::print("share of decoded tokens whose logits differ from a run without cache\n{:<6} {:<38} {:>12} {:>12}\n", "policy", "setting", "hand-made", "typed");
  nlohmann::ordered_json json;
  const auto run = [&]<class IndexKey>(const char* name) -> kvire::Status {
    if (std::string(name) == "fp4") return {};
    auto reference = run_reference<IndexKey>(name, options, model, requests);
    if (!reference) return reference.error();
    for (const Setting& setting : settings) {
      ReplaySettings settings_now = replay_settings(options);
      if (!setting.host) settings_now.host_pages = 0;
      if (!setting.many) {
        settings_now.sessions = 1;
        settings_now.device_pages = everything;
      }
      double share[2];
      for (const bool by_hand : {true, false}) {
        settings_now.damage = by_hand ? Damage::hand_made_mirror : Damage::none;
        Progress progress(fmt::format("{}, {}", name, by_hand ? "hand-made" : "typed"), static_cast<std::int64_t>(requests.size()), options.quiet);
        auto result = replay<IndexKey>(settings_now, model, requests, progress.call());
        if (!result) return result.error();
        share[by_hand ? 0 : 1] = percent(count_mismatches(result.value(), reference.value()), result.value().stats.decoded_tokens);
      }
      fmt::print("{:<6} {:<38} {:>11.2f}% {:>11.2f}%\n", name, setting.text, share[0], share[1]);
      std::fflush(stdout);
      json["silent_corruption"].push_back(
          {{"policy", name}, {"host_tier", setting.host}, {"many_sessions", setting.many}, {"hand_made_percent", share[0]}, {"typed_percent", share[1]}});
    }
    return {};
  };
  if (auto status = for_each_policy("all", run); !status.ok()) return status;
  return options.json.empty() ? kvire::Status() : write_json(options.json, json);
}

}  // namespace engine
