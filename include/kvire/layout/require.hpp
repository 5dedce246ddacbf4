// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/layout/proofs.hpp>

KVIRE_NAMESPACE_BEGIN

/// What a layout policy is: an empty type whose static members describe a page. The geometry itself is checked by `require_layout`.
template <class P>
concept LayoutPolicy = kstd::is_empty_v<P> && requires {
  P::tokens_per_page;
  P::page_bytes;
  P::plane_count;
  P::table;
  P::name;
  P::Content::text;
  P::Scaling::formula;
};

/// Witnesses: one struct a rule, its numbers in the template arguments, where g++, clang and nvcc all print them.
namespace rule {

template <class P>
struct IsPolicy {
  static_assert(LayoutPolicy<P>,
                "kvire [layout.not-a-policy]: a layout policy is an empty type derived from PageLayout<tokens, multiple, planes...>. Anything "
                "else cannot say where its bytes are. Fix: derive a named struct from PageLayout, or pass the policy instead of a pool or value.");
};
template <class P, bool Positive>
struct PositiveCounts {
  static_assert(Positive,
                "kvire [layout.positive]: tokens per page, element counts, padding and the page multiple must be at least 1. An empty field has no "
                "address. Fix: drop the empty field, or give it a positive count.");
};
template <class P, bool Whole>
struct WholeBytes {
  static_assert(Whole,
                "kvire [layout.whole-bytes]: fields start on whole bytes and rows fill whole bytes. Otherwise two tokens share a byte and a store "
                "of one damages the other. Fix: use an even count of sub-byte elements, or add a Pad.");
};
template <class P, kstd::int64_t PageBytes, bool Covered>
struct ExactCover {
  static_assert(Covered,
                "kvire [layout.cover]: planes, fields and declared padding must cover every byte of the page exactly once. A gap travels as garbage, an "
                "overlap is overwritten. Fix: add a Pad for the gap, or derive the policy from PageLayout, which tiles by construction.");
};
template <class P, int SectionIndex>
struct Aligned {
  static_assert(SectionIndex < 0,
                "kvire [layout.align]: each row of a field must start on a multiple of its element's size. A misaligned load faults on the GPU. "
                "Fix: reorder the fields so that wider elements come first, or add a Pad before it.");
};
template <class P, bool Unique>
struct UniqueRoles {
  static_assert(Unique,
                "kvire [layout.unique-roles]: a role names one field of a page. With two, an offset would be ambiguous and a store would fill only one. "
                "Fix: merge the fields, or give one of them a role of its own.");
};
template <class P, kstd::int64_t ScaledElements, kstd::int64_t ScaleCapacity>
struct ScaleCount {
  static_assert(ScaledElements == ScaleCapacity,
                "kvire [layout.scale-count]: each block of scaled elements needs exactly one scale. Otherwise a reader takes a neighbour's scale. "
                "Fix: set the scale count to elements / block, or change the block of the policy's Scaling.");
};

template <class P, bool HasScale, bool Paired>
struct ScaleHasRule {
  static_assert(Paired,
                "kvire [layout.scale-rule]: a field of role::Scale and a Scaling rule come together. A scale without a rule is never written, a rule without one "
                "has nowhere to write. Fix: add `using Scaling = ScaleRule<role, block>` for a role of the policy, or give the field a role of its own.");
};

}  // namespace rule

/// Checks every layout rule of a policy; each pool, view and kernel asks for it. Cheap: a few dozen constant-evaluation steps.
template <class P>
constexpr bool require_layout() {
  (void)sizeof(rule::IsPolicy<P>);
  if constexpr (LayoutPolicy<P>) {
    (void)sizeof(rule::PositiveCounts<P, counts_are_positive<P>()>);
    (void)sizeof(rule::WholeBytes<P, whole_bytes<P>()>);
    (void)sizeof(rule::ExactCover<P, P::page_bytes, covers_exactly_once<P>()>);
    (void)sizeof(rule::Aligned<P, first_misaligned<P>()>);
    (void)sizeof(rule::UniqueRoles<P, roles_are_unique<P>()>);
    (void)sizeof(rule::ScaleHasRule<P, P::template has<role::Scale>, scale_has_rule<P>()>);
    (void)sizeof(rule::ScaleCount<P, scaled_elements<P>(), scale_capacity<P>()>);
  }
  return true;
}

KVIRE_NAMESPACE_END
