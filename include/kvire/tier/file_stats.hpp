// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

#include <kvire/tier/record.hpp>

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

  std::int64_t read_ns = 0;          ///< that workers spent on loads: reading, verifying, copying
  std::int64_t write_ns = 0;         ///< the same for stores

  std::int64_t lost_for(RecordFault fault) const { return lost[static_cast<int>(fault)]; }
  std::int64_t all_lost() const {
    std::int64_t n = 0;
    for (const auto count : lost) n += count;
    return n;
  }
};

KVIRE_NAMESPACE_END
