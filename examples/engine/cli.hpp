// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <CLI/CLI.hpp>
#include <cstdio>
#include <filesystem>
#include <map>
#include <optional>

#include "options.hpp"

namespace engine {

inline constexpr int exit_mismatch = 1;
inline constexpr int exit_usage = 2;
inline constexpr int exit_failed = 3;

/// Reads the command line into `options`. A value is the exit status to leave with at once (help, or a wrong option).
inline std::optional<int> parse_command_line(int argc, char** argv, Options& options) {
  CLI::App app{
      "Replays a request trace on a miniature of DeepSeek-V4 whose caches are kvire's: prefix reuse, eviction to a host tier, loads back layer by\n"
      "layer. Compares the logits of every decoded token with those of a run without any cache; exits with 1 if one bit differs.\n"
      "Page-id spaces: --device-pages and --host-pages count ids of the full-KV space (256 raw tokens each); the window space has as many ids,\n"
      "because every cached page keeps the window page that a restart behind it needs; request rows: one a session.",
      "kvire_engine"};
  app.get_formatter()->column_width(34);
  const auto at_least = [](auto low, auto high) { return CLI::Range(low, high); };
  app.add_option("--policy", options.policy, "layout of the index keys")->check(CLI::IsMember({"fp8", "bf16", "fp4", "all"}))->capture_default_str();
  // An unset variable of a shell script must not start another run than the one that was meant.
  const CLI::Validator named([](std::string& text) { return text.empty() ? std::string("must not be empty") : std::string(); }, "");
  const CLI::Validator whole(
      [](std::string& text) {
        const bool digits = !text.empty() && text.find_first_not_of("0123456789") == std::string::npos && (text.size() == 1 || text[0] != '0');
        return digits && (text.size() < 20 || (text.size() == 20 && text <= "18446744073709551615")) ? std::string()
                                                                                                     : "'" + text + "' is not a whole number from 0 to 2^64 - 1";
      },
      "");
  app.add_option("--trace", options.trace, "JSON lines with input_length, output_length, hash_ids; without it the engine makes conversations")->check(named);
  app.add_option("--requests", options.requests, "the first N requests only (0: all)")->check(whole)->check(at_least(std::int64_t{0}, std::int64_t{1000000}));
  app.add_option("--block-tokens", options.block_tokens, "prompt tokens of one trace block, 512 is full size")->check(at_least(1, 512))->capture_default_str();
  app.add_option("--sessions", options.sessions, "requests under way at once")->check(at_least(1, 1024))->capture_default_str();
  app.add_option("--device-pages", options.device_pages, "full-KV page ids of the device, with the null page")
      ->check(at_least(std::int64_t{2}, std::int64_t{1} << 24))
      ->capture_default_str();
  app.add_option("--host-pages", options.host_pages, "full-KV page ids of the host tier (0: no host tier)")
      ->check(at_least(std::int64_t{0}, std::int64_t{1} << 24))
      ->capture_default_str();
  app.add_option("--file-tier", options.file_tier, "folder of a file tier below the host, which outlives the engine (none: no file tier)")->check(named);
  app.add_option("--file-bytes", options.file_bytes, "bytes that the file tier may take")->check(at_least(std::int64_t{1} << 20, std::int64_t{1} << 50))->capture_default_str();
  app.add_option("--layers", options.layers, "layers of V4-Flash's 43 (3 and more have index keys)")->check(at_least(1, 43))->capture_default_str();
  app.add_option("--top-k", options.top_k, "compressed tokens that a row attends to")->check(at_least(1, 4096))->capture_default_str();
  app.add_option("--index-heads", options.index_heads, "heads of the indexer")->check(at_least(1, 64))->capture_default_str();
  app.add_option("--chunk", options.chunk, "prompt tokens of one step")->check(at_least(1, 1 << 16))->capture_default_str();
  app.add_option("--pause-every", options.pause_every, "a session pauses after so many decoded tokens (0: never)")
      ->check(at_least(0, 1 << 20))
      ->capture_default_str();
  app.add_option("--hot-set", options.hot_set, "sessions that decode read their C4 latents through a hot set of N slots each (0: from the pages); on a GPU the pages are pinned memory then")
      ->check(at_least(0, 1 << 20))
      ->capture_default_str();
  app.add_option("--seed", options.seed, "weights and made workloads derive from it")->check(whole)->capture_default_str();
  app.add_option("--json", options.json, "write the results to a file")->check(named);
  const std::map<std::string, Damage> injections{
      {"skip-gate", Damage::skip_gate},   {"half-page", Damage::half_page},     {"drop-scale", Damage::drop_scale}, {"drop-index", Damage::drop_index},
      {"early-reuse", Damage::early_reuse}, {"wrong-layer", Damage::wrong_layer}, {"stale-state", Damage::stale_state}};
  std::string inject;
  std::vector<std::string> names;
  for (const auto& entry : injections) names.push_back(entry.first);
  app.add_option("--inject", inject, "damage the cache below the typed surface; the replay must notice, or the engine fails")->check(CLI::IsMember(names));
  std::string backend = "host";
  app.add_option("--backend", backend, "where the engine runs: host, or cuda (pools, transfers and the whole forward pass on the GPU)")
      ->check(CLI::IsMember({"host", "cuda"}))
      ->capture_default_str();
  const std::map<std::string, kvire::KernelChoice> kernels{
      {"auto", kvire::KernelChoice::automatic}, {"tuned", kvire::KernelChoice::tuned}, {"plain", kvire::KernelChoice::plain}};
  std::string kernel = "auto";
  app.add_option("--kernel", kernel, "on the GPU: tuned kernels where they serve; tuned fails where one does not")
      ->check(CLI::IsMember({"auto", "tuned", "plain"}))
      ->capture_default_str();
  app.add_option("--experiment", options.experiment, "run an experiment instead")->check(CLI::IsMember({"silent-corruption", "recall", "host-vs-gpu"}));
  CLI::Option* const cache_only = app.add_flag("--cache-only", options.cache_only, "the trace through the prefix cache alone, without a model: hits by policy, beside the best possible");
  app.add_option("--device-percent", options.device_percent, "with --cache-only: device pages, of all distinct ones")->check(at_least(1, 100))->capture_default_str();
  app.add_option("--metrics", options.metrics, "write the tiered cache's counters to a file, in Prometheus' text format; of a replay, with one --policy")->check(named);
  CLI::Option* const timeline = app.add_option("--timeline", options.timeline, "write what the tiered cache did, and when, as trace events for Chrome or Perfetto; of a replay, with one --policy")->check(named);
  app.add_option("--timeline-request", options.timeline_request, "with --timeline: what concerns one request alone, by its number in the trace, from 0: what was done for it, and to its pages")
      ->check(whole)
      ->needs(timeline);
  app.add_option("--host-percent", options.host_percent, "with --cache-only: host pages, of all distinct ones")->check(at_least(0, 100))->capture_default_str();
  app.add_flag("--captured", options.captured, "on the GPU: sessions that decode a token do it in a replayed CUDA graph (the reference runs without)");
  app.add_flag("--quiet", options.quiet, "no progress");
  // What would be taken and not heeded.
  for (const char* other : {"--policy", "--sessions", "--device-pages", "--host-pages", "--file-tier", "--file-bytes", "--layers", "--top-k", "--index-heads", "--chunk", "--pause-every", "--hot-set",
                            "--inject", "--backend", "--kernel", "--experiment", "--captured"}) {
    cache_only->excludes(app.get_option(other));
  }
  for (const char* other : {"--metrics", "--timeline", "--inject"}) app.get_option("--experiment")->excludes(app.get_option(other));
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : exit_usage;
  }
  const auto refuse = [](const char* what) {
    std::fprintf(stderr, "kvire_engine: %s\n", what);
    return std::optional<int>(exit_usage);
  };
  const bool from_host_tier = inject != "early-reuse" && inject != "stale-state";
  if (!inject.empty() && options.host_pages == 0 && from_host_tier) return refuse("--inject damages loads: it needs a host tier, --host-pages above 0");
  if (options.experiment == "silent-corruption" && options.host_pages == 0) {
    return refuse("--experiment silent-corruption compares runs with a host tier: --host-pages must be above 0");
  }
  if (options.experiment == "silent-corruption" && app.count("--policy") > 0) {
    return refuse("--experiment silent-corruption compares fp8 with bf16: it takes no --policy");
  }
  if (options.experiment == "recall" && app.count("--trace") > 0) return refuse("--experiment recall makes its own keys: it takes no --trace");
  if (!options.cache_only && options.policy == "all" && (!options.metrics.empty() || !options.timeline.empty())) {
    return refuse("--metrics and --timeline are of one replay: they need --policy fp8, bf16 or fp4");
  }
  if (kernel != "auto" && backend == "host" && options.experiment != "host-vs-gpu") return refuse("--kernel chooses among GPU kernels: it needs --backend cuda");
  if (options.captured && backend == "host") return refuse("--captured needs --backend cuda: the host has no graphs");
  if (!options.file_tier.empty()) {
    if (options.host_pages == 0) return refuse("--file-tier needs a host tier, --host-pages above 0");
    const std::filesystem::path parent = std::filesystem::absolute(options.file_tier + "/.").parent_path().parent_path();
    std::error_code ignored;
    if (!std::filesystem::is_directory(parent, ignored)) return refuse(("--file-tier " + options.file_tier + ": there is no folder " + parent.string() + " to make it in").c_str());
  }
  if (options.hot_set > 0 && options.hot_set < options.top_k) return refuse("--hot-set needs a slot for each token that a row selects: at least --top-k");
  if (!inject.empty()) options.inject = injections.at(inject);
  options.cuda = backend == "cuda";
  options.kernel = kernels.at(kernel);
  return std::nullopt;
}

}  // namespace engine
