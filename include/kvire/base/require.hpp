// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/base/std.hpp>

KVIRE_NAMESPACE_BEGIN

/// Witnesses: one struct a rule. The condition and its sentence stand in the struct, the numbers and types in its template arguments, where
/// g++, clang and nvcc all print them.
namespace rule {

template <class From, class To>
struct SameIdSpace {
  static_assert(kstd::is_same_v<From, To>,
                "kvire [base.id-space]: an id of one space is no id of another: host pages, device pages, layers and entry slots are numbered apart. They agree by "
                "luck at the start, and then address foreign memory. Fix: look the id up in the plan or the bundle, or construct it from the right number.");
};
template <class Tag, class Number, bool Fits>
struct IdWidth {
  static_assert(Fits,
                "kvire [base.id-width]: an id is made of an integer of at most 32 bits. A wider one would be cut without a word: 2^32 + 5 would be page 5, which is "
                "somebody else's. Fix: compare it with the pool's pages() and cast it, or keep ids in 32 bits, as page tables do.");
};
template <class From, class To>
struct SameUnit {
  static_assert(kstd::is_same_v<From, To>,
                "kvire [base.unit]: raw tokens, cached tokens, bytes, elements and pages do not mix. A length in the wrong unit reads beyond the row. "
                "Fix: convert raw to cached tokens with the entry's cached(), or pass the quantity that the parameter names.");
};

}  // namespace rule

KVIRE_NAMESPACE_END
