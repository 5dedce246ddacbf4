// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <map>
#include <set>
#include <string>

#include <kvire/tier/counters.hpp>
#include <kvire/tier/file_stats.hpp>

using namespace kvire;

TEST_CASE("time histogram: a duration counts up to its bound, the longest without one") {
  TimeHistogram times;
  std::int64_t sum = 0;
  for (int bucket = 0; bucket < TimeHistogram::buckets; ++bucket) {
    const bool last = bucket + 1 == TimeHistogram::buckets;
    const std::int64_t above = bucket == 0 ? 0 : TimeHistogram::bound_ns(bucket - 1) + 1;
    const std::int64_t most = last ? INT64_C(0x7FFFFFFFFFFFFF) : TimeHistogram::bound_ns(bucket);
    for (const std::int64_t ns : {above, most}) {
      CHECK(TimeHistogram::bucket_of(ns) == bucket);
      times.add(ns);
      sum += ns;
    }
    CHECK(times.in[bucket] == 2);
  }
  CHECK(TimeHistogram::bucket_of(-5) == 0);  // of a clock that someone set back: there is none
  CHECK(times.count == 2 * TimeHistogram::buckets);
  CHECK(times.sum_ns == sum);
  CHECK(TimeHistogram::bound_ns(0) == 1024);
  CHECK(TimeHistogram::bound_ns(TimeHistogram::buckets - 2) == INT64_C(17179869184));
}

TEST_CASE("counters: every number is visited once, under a name and label of its own") {
  CacheCounters<2> counters;
  // Each number another one: sizes of the struct's plain integers.
  auto* const numbers = reinterpret_cast<std::int64_t*>(&counters);
  constexpr std::size_t count = (sizeof counters - sizeof counters.times) / sizeof(std::int64_t);
  for (std::size_t i = 0; i < count; ++i) numbers[i] = static_cast<std::int64_t>(i) + 1;
  std::set<std::int64_t> values;
  std::set<std::string> names;
  counters.visit([&](const char* name, const CounterLabel& label, std::int64_t value) {
    values.insert(value);
    names.insert(std::string(name) + "/" + (label.tier ? label.tier : "") + "/" + std::to_string(label.space) + "/" + (label.reason ? label.reason : ""));
  });
  CHECK(values.size() == count);
  CHECK(names.size() == count);
  std::map<std::string, const TimeHistogram*> times;
  counters.visit_times([&](const char* name, const TimeHistogram& histogram) { times[name] = &histogram; });
  CHECK(times.size() == std::size(counters.times));
  CHECK(times["wait"] == &counters.times[static_cast<int>(CacheWork::wait)]);
}

TEST_CASE("file tier statistics: every reason of a loss is visited") {
  FileTierStats stats;
  for (int f = 0; f < record_fault_count; ++f) stats.lost[f] = 100 + f;
  std::map<std::string, std::int64_t> seen;
  stats.visit([&](const char* name, const char* reason, std::int64_t value) { seen[std::string(name) + "." + reason] = value; });
  for (int f = 0; f < record_fault_count; ++f) CHECK(seen["lost." + std::string(name_of(static_cast<RecordFault>(f)))] == 100 + f);
  CHECK(seen.count("hit_bytes.") == 1);
}
