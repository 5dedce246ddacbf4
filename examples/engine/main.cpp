// SPDX-License-Identifier: Apache-2.0
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>
#include <new>

#include "cache_only.hpp"
#include "cli.hpp"
#include "experiments.hpp"
#include "host_vs_gpu.hpp"
#include "metrics.hpp"
#include "run.hpp"

namespace {

int fail(const kvire::Error& error) {
  std::fprintf(stderr, "kvire_engine: %s: %s\n", kvire::name_of(error.code), error.message.c_str());
  return error.code == kvire::ErrorCode::invalid_argument ? engine::exit_usage : engine::exit_failed;
}

using Entries = kvire::preset::deepseek_v4::Flash<>;  // whose spaces have the names of all policies'

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
    json["runs"].back()["cache"] = engine::to_json<Entries>(run.stats.cache);
    json["runs"].back()["file_tier"] = engine::to_json(run.stats.files);
    differs = differs || run.mismatched_tokens > 0;
  }
  if (!options.json.empty()) {
    if (const auto written = engine::write_json(options.json, json); !written.ok()) return fail(written.error());
  }
  if (!options.metrics.empty()) {
    engine::PrometheusText text;
    engine::export_to<Entries>(text, runs.front().stats.cache);
    engine::export_to(text, runs.front().stats.files);
    if (const auto written = engine::write_text(options.metrics, text.text()); !written.ok()) return fail(written.error());
  }
  if (options.inject != engine::Damage::none && !differs) {
    return fail({kvire::ErrorCode::failed, "the injected damage changed no token: with these options it never acts, or the replay cannot see it"});
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

int run(int argc, char** argv) {
  engine::Options options;
  if (const auto status = engine::parse_command_line(argc, argv, options)) return *status;
  for (const std::string& path : {options.json, options.metrics, options.timeline}) {
    if (path.empty()) continue;
    if (const auto status = engine::check_writable(path, options.trace); !status.ok()) return fail(status.error());
  }
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
  if (const auto status = engine::check_fit(options, requests.value()); !status.ok()) return fail(status.error());
  return replay(options, requests.value());
}

}  // namespace

int main(int argc, char** argv) {
  int status = engine::exit_failed;
  try {
    status = run(argc, argv);
  } catch (const std::bad_alloc&) {
    std::fprintf(stderr, "kvire_engine: out of memory: fewer or shorter requests, layers or pages need less\n");
  } catch (const std::exception& error) {
    std::fprintf(stderr, "kvire_engine: %s\n", error.what());
  }
  // A report that did not arrive is no success.
  if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) {
    std::fprintf(stderr, "kvire_engine: the report cannot be written to the standard output: %s\n", std::strerror(errno));
    return status == 0 ? engine::exit_failed : status;
  }
  return status;
}
