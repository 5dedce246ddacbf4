// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include <kvire/base/config.hpp>

KVIRE_NAMESPACE_BEGIN

/// Page ownership of another engine's allocator, so that its pages can be transferred and leased without copying its bookkeeping. Ids are
/// that allocator's. All functions may be called from any thread, and none may wait for another thread that uses the ledger.
///
/// | expression | meaning |
/// |---|---|
/// | `a.pages()` | ids are below this |
/// | `a.owners(page)` | owners of an id below `pages()`, those of `retain` included; 0: free, and the null page |
/// | `a.retain(page)`, `a.release(page)` | one owner more, one less; called around each transfer, `release` when it is proven finished |
template <class A>
concept OutsidePages = requires(A& a, std::int32_t page) {
  static_cast<std::int32_t>(a.pages());
  static_cast<std::int32_t>(a.owners(page));
  a.retain(page);
  a.release(page);
};

KVIRE_NAMESPACE_END
