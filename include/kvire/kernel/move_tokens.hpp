// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/kernel/body/move_tokens.hpp>
#include <kvire/kernel/copy_pages.hpp>

KVIRE_NAMESPACE_BEGIN

/// Queues the move of `n` tokens, each from slot `from_slots[i]` (page * tokens_per_page + token) under `from` to `to_slots[i]` under `to`: their
/// rows in every plane, scales with values. Rules, counts and errors as copy_pages, by slot.
template <LayoutPolicy P, class From, class To>
Status move_tokens(const std::int64_t* from_slots, const From& from, const std::int64_t* to_slots, const To& to, std::int64_t n,
                   Stream<Host>& stream, CopyCounts* counts = nullptr) {
  require_source<P, From>();
  require_target<P, To>();
  if constexpr (reads_pages<P, From> && writes_pages<P, To>) {
    if (Status status = detail::check_list("move_tokens", n, from_slots, to_slots); !status.ok()) return status;
    launch(
        stream,
        [=](const auto& source, const auto& target) {
          const body::MoveTokensArgs args{source.base, source.page_stride, source.pages, target.base, target.page_stride, target.pages, from_slots, to_slots};
          const CopyCounts total = detail::count_parallel(n, 256, [&](std::int64_t item) {
            const std::int64_t page = to_slots[item] / P::tokens_per_page;
            if (from_slots[item] >= 0 && page > null_page && page < target.pages && !kernel_access::covers(to, static_cast<std::int32_t>(page))) {
              return CopyCounts{.bad_ids = 1};
            }
            const std::int64_t read = from_slots[item] / P::tokens_per_page;
            if (from_slots[item] >= 0 && read < source.pages && page > null_page && !kernel_access::reads(from, static_cast<std::int32_t>(read))) {
              return CopyCounts{.bad_ids = 1};
            }
            return body::move_tokens<P>(HostGroup<1>{}, item, args);
          });
          if (counts != nullptr) *counts += total;
        },
        from, to);
  }
  return {};
}

KVIRE_NAMESPACE_END
