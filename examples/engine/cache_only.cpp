// SPDX-License-Identifier: Apache-2.0
#include "cache_only.hpp"

#include <algorithm>
#include <unordered_set>

#include <fmt/format.h>

#include "belady.hpp"
#include "cache_run.hpp"
#include "metrics.hpp"
#include "report.hpp"
#include "tiered_run.hpp"
#include "timeline.hpp"
#include "trace.hpp"

namespace engine {
namespace {

constexpr double rate(std::int64_t part, std::int64_t whole) { return whole == 0 ? 0 : static_cast<double>(part) / static_cast<double>(whole); }

template <class Policy>
kvire::Result<CacheRunCounts> replay_trace(const std::vector<TraceRequest>& trace, const CacheRunSizes& sizes) {
  auto run = CacheRun<Policy>::make(sizes);
  if (!run) return run.error();
  CacheRunCounts counts;
  for (const TraceRequest& request : trace) {
    if (auto status = run.value().request(request, counts); !status.ok()) return status.error();
  }
  return counts;
}

// Page lookups per second when everything is there, the verifying of every page included.
kvire::Result<double> lookup_rate(const std::vector<TraceRequest>& trace, std::int64_t pages, bool keep_tokens) {
  auto run = CacheRun<kvire::Lru>::make({.device_pages = pages, .keep_tokens = keep_tokens});
  if (!run) return run.error();
  CacheRunCounts filling, counts;
  for (const TraceRequest& request : trace) {
    if (auto status = run.value().request(request, filling); !status.ok()) return status.error();
  }
  double seconds = 0;
  for (const TraceRequest& request : trace) seconds += run.value().lookup(request, counts);
  if (counts.device_hits != counts.full_blocks) return kvire::Error{kvire::ErrorCode::failed, "a cache with room for all pages lost some"};
  return static_cast<double>(counts.device_hits) / std::max(seconds, 1e-6);
}

class Policies {
 public:
  Policies(const std::vector<TraceRequest>& trace, std::int64_t device_pages, std::int64_t host_pages)
      : trace_(trace), device_pages_(device_pages), host_pages_(host_pages) {}

  template <class Policy>
  kvire::Status add(WriteMode write) {
    auto counts = replay_trace<Policy>(trace_, {.device_pages = device_pages_, .host_pages = host_pages_, .write = write});
    if (!counts) return counts.error();
    const CacheRunCounts& c = counts.value();
    const char* const mode = write == WriteMode::back ? "write-back" : "write-through";
    fmt::print("{:<10} {:<14} {:>8.2f}% {:>8.2f}% {:>8.2f}%\n", Policy::name, mode, percent(c.device_hits, c.full_blocks),
               percent(c.host_hits, c.full_blocks), percent(c.hits(), c.full_blocks));
    json_.push_back({{"policy", Policy::name},
                     {"write", mode},
                     {"device_hit_blocks", c.device_hits},
                     {"host_hit_blocks", c.host_hits},
                     {"hit_blocks", c.hits()},
                     {"hit_rate", rate(c.hits(), c.full_blocks)}});
    return {};
  }
  nlohmann::ordered_json json() { return std::move(json_); }

 private:
  const std::vector<TraceRequest>& trace_;
  std::int64_t device_pages_, host_pages_;
  nlohmann::ordered_json json_ = nlohmann::ordered_json::array();
};

// Through the tiered cache, with bytes: once with room for everything, once with room for a part, whose counters are exported.
kvire::Result<nlohmann::ordered_json> tiered(const std::vector<TraceRequest>& trace, std::int64_t distinct, std::int64_t device_pages, std::int64_t host_pages, const Options& options) {
  auto all = TieredRun::run(trace, distinct, 0);
  if (!all) return all.error();
  Timeline timeline(options.timeline_request);
  auto some = TieredRun::run(trace, device_pages, host_pages, options.timeline.empty() ? kvire::CacheTrace() : timeline.sink());
  if (!some) return some.error();
  const TieredRunResult& r = some.value();
  fmt::print("{:<10} {:<14} {:>8.2f}% {:>8.2f}% {:>8.2f}%  with bytes: {:.0f} MB to the host, {:.0f} MB back, {} wrong pages\n", "lru", "tiered cache",
             percent(r.counters.hit_pages_on[0], r.counters.looked_up_pages), percent(r.counters.hit_pages_on[1], r.counters.looked_up_pages),
             percent(r.counters.hit_pages, r.counters.looked_up_pages), static_cast<double>(r.bytes_to_host) * 1e-6,
             static_cast<double>(r.bytes_to_device) * 1e-6, all.value().wrong_pages + r.wrong_pages);
  if (!options.metrics.empty()) {
    PrometheusText text;
    export_to<TraceBundle>(text, r.counters);
    if (auto status = write_text(options.metrics, text.text()); !status.ok()) return status.error();
  }
  if (!options.timeline.empty()) {
    if (auto status = timeline.write(options.timeline); !status.ok()) return status.error();
  }
  return nlohmann::ordered_json{{"hit_blocks_with_room_for_all", all.value().counters.hit_pages},
                                {"wrong_pages", all.value().wrong_pages + r.wrong_pages},
                                {"bytes_to_host", r.bytes_to_host},
                                {"bytes_to_device", r.bytes_to_device},
                                {"counters", to_json<TraceBundle>(r.counters)}};
}

}  // namespace

kvire::Result<nlohmann::ordered_json> cache_only(const Options& options) {
  std::vector<TraceRequest> trace;
  if (options.trace.empty()) {
    trace = make_conversations(options.requests > 0 ? options.requests : 400, options.seed);
    fmt::print("no --trace: {} requests of made-up multi-turn conversations\n", trace.size());
  } else {
    auto read = read_trace(options.trace, options.requests);
    if (!read) return read.error();
    trace = std::move(read).value();
  }
  std::vector<std::uint64_t> uses;
  for (const TraceRequest& r : trace) uses.insert(uses.end(), r.blocks.begin(), r.blocks.begin() + r.input_length / trace_block_tokens);
  const auto distinct = static_cast<std::int64_t>(std::unordered_set<std::uint64_t>(uses.begin(), uses.end()).size());
  if (distinct == 0) return kvire::Error{kvire::ErrorCode::invalid_argument, "the trace has no whole block of 512 prompt tokens"};
  const auto share = [&](int percentage) { return std::max<std::int64_t>(1, distinct * percentage / 100); };
  const std::int64_t device_pages = share(options.device_percent);
  const std::int64_t host_pages = options.host_percent == 0 ? 0 : share(options.host_percent);

  auto all = replay_trace<kvire::Lru>(trace, {.device_pages = distinct});
  if (!all) return all.error();
  const CacheRunCounts& c = all.value();
  fmt::print("{} requests, {} whole blocks of {} prompt tokens, {} distinct; with room for all of them {} hits ({:.2f}%)\n", trace.size(), c.full_blocks,
             trace_block_tokens, distinct, c.hits(), percent(c.hits(), c.full_blocks));
  auto by_tokens = lookup_rate(trace, distinct, true);
  if (!by_tokens) return by_tokens.error();
  auto by_digest = lookup_rate(trace, distinct, false);
  if (!by_digest) return by_digest.error();
  fmt::print("page lookups per second of one core's time: {:.2f} million verified by tokens, {:.2f} million by digest\n", by_tokens.value() * 1e-6,
             by_digest.value() * 1e-6);

  const std::int64_t belady_device = belady_hits(uses, device_pages);
  const std::int64_t belady_both = belady_hits(uses, device_pages + host_pages);
  fmt::print("device {} pages ({} %), host {} pages ({} %)\n{:<10} {:<14} {:>9} {:>9} {:>9}\n", device_pages, options.device_percent, host_pages,
             options.host_percent, "policy", "", "device", "host", "together");
  Policies policies(trace, device_pages, host_pages);
  kvire::Status status;
  for (const WriteMode write : {WriteMode::back, WriteMode::through}) {
    if (status.ok()) status = policies.add<kvire::Lru>(write);
    if (status.ok()) status = policies.add<kvire::Lfu>(write);
  }
  if (!status.ok()) return status.error();
  auto with_bytes = tiered(trace, distinct, device_pages, host_pages, options);
  if (!with_bytes) return with_bytes.error();
  fmt::print("{:<10} {:<14} {:>8.2f}% {:>9} {:>8.2f}%\n", "belady", "page by page", percent(belady_device, c.full_blocks), "",
             percent(belady_both, c.full_blocks));
  return nlohmann::ordered_json{{"requests", trace.size()},
                                {"block_tokens", trace_block_tokens},
                                {"full_blocks", c.full_blocks},
                                {"hit_blocks", c.hits()},
                                {"distinct_blocks", distinct},
                                {"lookups_per_second", by_tokens.value()},
                                {"lookups_per_second_by_digest", by_digest.value()},
                                {"device_blocks", device_pages},
                                {"host_blocks", host_pages},
                                {"policies", policies.json()},
                                {"tiered", with_bytes.value()},
                                {"belady", {{"device_hit_blocks", belady_device}, {"hit_blocks", belady_both}, {"hit_rate", rate(belady_both, c.full_blocks)}}}};
}

}  // namespace engine
