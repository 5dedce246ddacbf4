// SPDX-License-Identifier: Apache-2.0
#include <cstdio>

#include "cache_only.hpp"
#include "cli.hpp"
#include "experiments.hpp"
#include "host_vs_gpu.hpp"
#include "run.hpp"

namespace {

int fail(const kvire::Error& error) {
  std::fprintf(stderr, "kvire_engine: %s: %s\n", kvire::name_of(error.code), error.message.c_str());
  return error.code == kvire::ErrorCode::invalid_argument ? engine::exit_usage : engine::exit_failed;
}

// The replay of each policy against its reference.
int replay(const engine::Options& options, const std::vector<engine::Request>& requests) {
  const engine::Model model = engine::model_for(options, requests);
  std::vector<engine::RunReport> runs;
  const kvire::Status status = engine::for_each_policy(options.policy, [&]<class IndexKey>(const char* name) -> kvire::Status {
    auto run = engine::run_policy<IndexKey>(name, options, model, requests);
    if (!run) return run.error();
    runs.push_back(std::move(run).value());
    return {};
  });
  if (!status.ok()) return fail(status.error());
  engine::print_table(runs);
  nlohmann::ordered_json json;
  bool differs = false;
  for (const auto& run : runs) {
    json["runs"].push_back(engine::to_json(run));
    differs = differs || run.mismatched_tokens > 0;
  }
  if (!options.json.empty()) {
    if (const auto written = engine::write_json(options.json, json); !written.ok()) return fail(written.error());
  }
  return differs ? engine::exit_mismatch : 0;
}

// The prefix cache alone.
int run_cache_only(const engine::Options& options) {
  auto json = engine::cache_only(options);
  if (!json) return fail(json.error());
  if (options.json.empty()) return 0;
  const auto written = engine::write_json(options.json, json.value());
  return written.ok() ? 0 : fail(written.error());
}

}  // namespace

int main(int argc, char** argv) {
  engine::Options options;
  if (const auto status = engine::parse_command_line(argc, argv, options)) return *status;
  if (options.cache_only) return run_cache_only(options);
  auto requests = engine::load_requests(options);
  if (!requests) return fail(requests.error());
  if (options.trace.empty()) fmt::print("no --trace: {} requests of made-up multi-turn conversations\n", requests.value().size());
  if (options.experiment == "silent-corruption") {
    const auto status = engine::silent_corruption(options, requests.value());
    return status.ok() ? 0 : fail(status.error());
  }
  if (options.experiment == "host-vs-gpu") {
    const auto status = engine::host_vs_gpu(options, requests.value());
    return status.ok() ? 0 : fail(status.error());
  }
  if (options.experiment == "recall") {
    const auto status = engine::recall(options);
    return status.ok() ? 0 : fail(status.error());
  }
  return replay(options, requests.value());
}
