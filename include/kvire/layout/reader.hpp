// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/base/ints.hpp>
#include <kvire/layout/require.hpp>

KVIRE_NAMESPACE_BEGIN

/// What a kernel needs of a page, stated by the kernel as `static constexpr ReaderNeeds needs`. Zero means "anything".
struct ReaderNeeds {
  kstd::int64_t page_multiple = 0;  ///< page bytes must be a multiple of this (bulk tensor copies, O_DIRECT)
  int vector_bytes = 0;             ///< every row of every plane must be movable by vectors of this width
  int least_tokens = 0;             ///< tokens per page, at least
  int most_tokens = 0;              ///< tokens per page, at most
};

namespace rule {
template <class P, class Reader, kstd::int64_t PageBytes, kstd::int64_t PageMultiple>
struct ReaderPageMultiple {
  static_assert(PageMultiple == 0 || PageBytes % (PageMultiple == 0 ? 1 : PageMultiple) == 0,
                "kvire [layout.reader-multiple]: this reader steps through pages by a stride that must be a multiple of its own. Another page size makes it read a "
                "neighbour's bytes. Fix: take the page size that smallest_legal_tokens finds, or pad the page with PageLayout's multiple.");
};
template <class P, class Reader, int VectorBytes, int ReaderVectorBytes>
struct ReaderVector {
  static_assert(ReaderVectorBytes == 0 || VectorBytes % (ReaderVectorBytes == 0 ? 1 : ReaderVectorBytes) == 0,
                "kvire [layout.reader-vector]: this reader moves rows by vectors wider than the policy's rows are aligned. It would fault, or read past a row. "
                "Fix: pad the rows to the vector, or use the planar twin of the policy.");
};
template <class P, class Reader, int TokensPerPage, int Least, int Most>
struct ReaderTokens {
  static_assert(TokensPerPage >= Least && (Most == 0 || TokensPerPage <= Most),
                "kvire [layout.reader-tokens]: this reader handles pages of a bounded number of tokens. Beyond it, tokens would be left out. "
                "Fix: choose tokens_per_page within its bounds, or use the generic kernel.");
};
}  // namespace rule

namespace detail {
template <class P>
constexpr int narrowest_row_vector() {
  kstd::int64_t all = P::page_bytes;
  for (int i = 0; i < P::plane_count; ++i) all |= P::table.plane_offset[i] | P::table.row_bytes[i];
  return static_cast<int>(power_of_two_divisor(all, kstd::int64_t(16)));
}
}  // namespace detail

/// True if `Reader` can read pages of `P`.
template <class P, class Reader>
constexpr bool reader_accepts() {
  constexpr ReaderNeeds needs = Reader::needs;
  return (needs.page_multiple == 0 || P::page_bytes % (needs.page_multiple == 0 ? 1 : needs.page_multiple) == 0) &&
         (needs.vector_bytes == 0 || detail::narrowest_row_vector<P>() % (needs.vector_bytes == 0 ? 1 : needs.vector_bytes) == 0) &&
         P::tokens_per_page >= needs.least_tokens && (needs.most_tokens == 0 || P::tokens_per_page <= needs.most_tokens);
}

/// Refuses an illegal pair at compile time, naming the need that failed.
template <class P, class Reader>
constexpr bool require_reader() {
  constexpr ReaderNeeds needs = Reader::needs;
  (void)sizeof(rule::ReaderPageMultiple<P, Reader, P::page_bytes, needs.page_multiple>);
  (void)sizeof(rule::ReaderVector<P, Reader, detail::narrowest_row_vector<P>(), needs.vector_bytes>);
  (void)sizeof(rule::ReaderTokens<P, Reader, P::tokens_per_page, needs.least_tokens, needs.most_tokens>);
  return true;
}

/// The smallest page of `Least` times a power of two tokens, at most 1024, of a family of policies that all readers accept; 0 if none
/// is. Example: 64 fp4 index keys make 4,352 B, which a reader that needs multiples of 512 B refuses; 128 make 8,704 B, which it takes.
template <template <int> class PolicyOf, int Least, class... Readers>
constexpr int smallest_legal_tokens() {
  if constexpr (Least > 1024) {
    return 0;
  } else if constexpr ((reader_accepts<PolicyOf<Least>, Readers>() && ...)) {
    return Least;
  } else {
    return smallest_legal_tokens<PolicyOf, Least * 2, Readers...>();
  }
}

KVIRE_NAMESPACE_END
