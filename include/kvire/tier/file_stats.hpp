// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

#include <kvire/tier/record.hpp>
#include <kvire/tier/time_histogram.hpp>

KVIRE_NAMESPACE_BEGIN

/// What a file tier has done since it was made. Every load asked for is a hit or lost for one reason.
struct FileTierStats {
  std::int64_t loads = 0;            ///< asked for
  std::int64_t hits = 0;
  std::int64_t hit_tokens = 0;       ///< raw tokens
  std::int64_t hit_bytes = 0;        ///< read from files
  std::int64_t lost[record_fault_count] = {};
  std::string last_lost[record_fault_count] = {};  ///< the latest of each reason, in words

  std::int64_t stores = 0;           ///< asked for, those of records that were there already included
  std::int64_t stored = 0;           ///< written
  std::int64_t stored_bytes = 0;
  std::int64_t store_failures = 0;
  std::int64_t stores_refused = 0;   ///< no room in the queue or the budget

  std::int64_t evictions = 0;
  std::int64_t evicted_bytes = 0;
  std::int64_t removal_failures = 0; ///< files that would not go; their bytes stay counted

  std::int64_t found_records = 0;    ///< in the folder at the start
  std::int64_t found_temporaries = 0;  ///< left by a crash, removed at the start
  std::int64_t found_foreign = 0;    ///< files that are not the tier's, left alone

  TimeHistogram reads = {};          ///< by the time that a worker took for a batch of loads: reading, verifying, copying
  TimeHistogram writes = {};         ///< the same for a store

  std::int64_t lost_for(RecordFault fault) const { return lost[static_cast<int>(fault)]; }
  std::int64_t all_lost() const {
    std::int64_t n = 0;
    for (const auto count : lost) n += count;
    return n;
  }

  /// Calls v(name, reason, value) for each number, for exports; the reason is empty but for losses.
  template <class V>
  void visit(V&& v) const {
    v("loads", "", loads);
    v("hits", "", hits);
    v("hit_tokens", "", hit_tokens);
    v("hit_bytes", "", hit_bytes);
    for (int f = 0; f < record_fault_count; ++f) v("lost", name_of(static_cast<RecordFault>(f)), lost[f]);
    v("stores", "", stores);
    v("stored", "", stored);
    v("stored_bytes", "", stored_bytes);
    v("store_failures", "", store_failures);
    v("stores_refused", "", stores_refused);
    v("evictions", "", evictions);
    v("evicted_bytes", "", evicted_bytes);
    v("removal_failures", "", removal_failures);
  }
  /// Calls v(name, histogram) for each kind of work that takes time.
  template <class V>
  void visit_times(V&& v) const {
    v("read", reads);
    v("write", writes);
  }
};

KVIRE_NAMESPACE_END
