// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "recall.hpp"
#include "run.hpp"

namespace engine {

/// The host side of the index keys as a real engine had it: sized and strided by the fp8 formula, restated by hand over raw bytes, for
/// device pages of whatever policy. Everything else goes the typed way. This is the one place where a layout is restated, and it lives here
/// to show what that does: the typed path has no size to get wrong.
template <class IndexKey>
class HandMadeMirror : public LosesBytes<IndexKey, IndexKeys<IndexKey>> {
  using Base = LosesBytes<IndexKey, IndexKeys<IndexKey>>;

 public:
  static constexpr std::int64_t token_bytes = 128 + 4;
  static constexpr std::int64_t page_bytes = 64 * token_bytes;

  void after_backup(Tiers<IndexKey>& tiers, const Moves& moves) override {
    each(tiers, moves, [](std::byte* device, std::byte* host) { std::memcpy(host, device, page_bytes); });
  }
  void after_load(Tiers<IndexKey>& tiers, const Moves& moves) override {
    Base::after_load(tiers, moves);  // the typed transfer's index keys do not count
    each(tiers, moves, [](std::byte* device, std::byte* host) { std::memcpy(device, host, page_bytes); });
  }

 private:
  template <class F>
  void each(Tiers<IndexKey>& tiers, const Moves& moves, F&& copy) {
    using IndexK = typename kvire::preset::deepseek_v4::Flash<IndexKey>::IndexK;
    const int slots = tiers.template slots<IndexK>();
    rows_.resize(static_cast<std::size_t>(slots));
    for (int slot = 0; slot < slots; ++slot) {
      std::byte* const base = tiers.template raw_device<IndexK>(kvire::EntrySlot(slot)).page(0);
      std::vector<std::byte>& rows = rows_[static_cast<std::size_t>(slot)];
      rows.resize(static_cast<std::size_t>(tiers.host_pages() * page_bytes));
      for (const auto& pair : moves.full) copy(base + pair.device.value * page_bytes, rows.data() + pair.host.value * page_bytes);
    }
  }

  std::vector<std::vector<std::byte>> rows_;  // a layer each
};

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
      Options o = options;
      if (!setting.host) o.host_pages = 0;
      if (!setting.many) {
        o.sessions = 1;
        o.device_pages = everything;
      }
      double share[2];
      for (const bool by_hand : {true, false}) {
        auto replay = run_replay<IndexKey>(name, o, model, requests, by_hand ? std::make_unique<HandMadeMirror<IndexKey>>() : nullptr);
        if (!replay) return replay.error();
        share[by_hand ? 0 : 1] = percent(count_mismatches(replay.value(), reference.value()), replay.value().stats.decoded_tokens);
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
