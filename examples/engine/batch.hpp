// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include <kvire/layout/entry.hpp>

#include "model.hpp"

namespace engine {

/// Pages that so many raw tokens fill or begin.
inline std::int64_t blocks_for(std::int64_t tokens) { return (tokens + page_raw_tokens - 1) / page_raw_tokens; }

/// Where one session keeps its rows: a page table per page-id space, indexed by raw position / 256, and one request row.
/// A window page that the session no longer needs is -1.
struct PageTables {
  std::vector<std::int32_t> full;
  std::vector<std::int32_t> window;
  std::int32_t request_row = 0;
};

/// The tokens of one session in a step: raw positions [start, start + rows).
struct Span {
  int first_row = 0;
  int rows = 0;
  std::int64_t start = 0;
  bool wants_logits = false;  ///< of its last row
  PageTables tables;
  std::size_t request = 0;  ///< whose session it is

  std::int64_t end() const { return start + rows; }
};

/// One step: the rows of all sessions that take part in it.
struct Batch {
  std::vector<int> tokens;
  std::vector<std::int64_t> positions;
  std::vector<Span> spans;

  int rows() const { return static_cast<int>(tokens.size()); }

  void add(const int* first, int count, std::int64_t start, bool wants_logits, PageTables tables, std::size_t request = 0) {
    spans.push_back({rows(), count, start, wants_logits, std::move(tables), request});
    tokens.insert(tokens.end(), first, first + count);
    for (int i = 0; i < count; ++i) positions.push_back(start + i);
  }
};

/// Row of the hot set that serves a span's session: one for each request row that there is.
inline std::int32_t hot_row(const Span& span) { return span.tables.request_row - 1; }

// A slot is page id * rows per page + row: what kernels take to find a row. -1: none. The geometry is the entry's, never restated here.

/// Slot of the row of `Entry` (kind tokens) that covers raw position `position`.
template <class Entry>
std::int64_t row_slot(const std::vector<std::int32_t>& pages, std::int64_t position) {
  const std::int64_t page = pages[static_cast<std::size_t>(position / Entry::raw_tokens_per_page)];
  return page < 0 ? -1 : page * Entry::policy::tokens_per_page + position % Entry::raw_tokens_per_page / Entry::kind::ratio;
}

/// Slot of the state row of a position: a ring in each window page, or the rows of the request.
template <class Entry>
std::int64_t state_slot(const PageTables& tables, std::int64_t position) {
  constexpr int ring = Entry::policy::tokens_per_page;
  if constexpr (Entry::kind::kind == kvire::EntryKind::ring) {
    const std::int64_t page = tables.window[static_cast<std::size_t>(position / page_raw_tokens)];
    return page < 0 ? -1 : page * ring + position % ring;
  } else {
    return static_cast<std::int64_t>(tables.request_row) * ring + position % ring;
  }
}

/// Where the state row of a position of a span goes. Only a page's (ring) or a request's last rows are kept, so a row that a later row of the
/// same step would overwrite is not written (-1): rows stay independent and may be stored in any order.
template <class Entry>
std::int64_t kept_state_slot(const Span& span, std::int64_t position) {
  const bool per_page = Entry::kind::kind == kvire::EntryKind::ring;
  const std::int64_t last = per_page ? std::min(span.end(), (position / page_raw_tokens + 1) * page_raw_tokens) : span.end();
  return position + Entry::policy::tokens_per_page >= last ? state_slot<Entry>(span.tables, position) : -1;
}

/// The same for all rows of a step.
template <class Entry>
std::vector<std::int64_t> state_slots(const Batch& batch) {
  std::vector<std::int64_t> slots;
  slots.reserve(batch.tokens.size());
  for (const Span& s : batch.spans) {
    for (std::int64_t p = s.start; p < s.end(); ++p) slots.push_back(kept_state_slot<Entry>(s, p));
  }
  return slots;
}

/// What the store of an index key does to a row before it encodes it: RMSNorm, RoPE on the last 64 dims at a position, Hadamard.
struct KeyPrologue {
  const Model* model = nullptr;
  const float* gain = nullptr;
  std::vector<std::int64_t> positions;  ///< of each row
};

/// A group of raw tokens that becomes complete in this step and so fills one compressed row.
struct Group {
  int span = 0;
  std::int64_t index = 0;  ///< of the compressed row within its session
};

inline std::vector<Group> completed_groups(const Batch& batch, int ratio) {
  std::vector<Group> groups;
  for (int i = 0; i < static_cast<int>(batch.spans.size()); ++i) {
    const Span& s = batch.spans[static_cast<std::size_t>(i)];
    for (std::int64_t g = s.start / ratio; (g + 1) * ratio <= s.end(); ++g) groups.push_back({i, g});
  }
  return groups;
}

}  // namespace engine
