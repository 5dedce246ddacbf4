// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/codec/error_bound.hpp>
#include <kvire/transfer/transfer.hpp>

KVIRE_NAMESPACE_BEGIN

namespace rule {
template <class From, class To, int FromDim, int ToDim, int FromTokens, int ToTokens, bool Same>
struct MigrateShape {
  static_assert(Same,
                "kvire [transfer.migrate-shape]: migrate keeps the numbers of every token and changes only how they are stored. With other dims or tokens a page "
                "there would be no element or no row to put them in. Fix: give both policies the same dim and tokens per page, or recompute the cache.");
};
template <class From, class To, bool Same>
struct MigrateContent {
  static_assert(Same,
                "kvire [transfer.migrate-content]: both policies of a migrate say that their numbers mean the same. Keys with another rotation or transform decode "
                "well and are still wrong. Fix: give both policies the same Content, or recompute the cache.");
};
}  // namespace rule

namespace detail {

template <class From, class To>
constexpr bool require_migrate() {
  (void)sizeof(rule::MigrateShape<From, To, From::dim, To::dim, From::tokens_per_page, To::tokens_per_page,
                                  From::dim == To::dim && From::tokens_per_page == To::tokens_per_page>);
  (void)sizeof(rule::MigrateContent<From, To, equal_text(From::Content::text, To::Content::text)>);
  return true;
}

template <class From, class To, HostTag Backend>
void migrate_pages(PageView<To, Backend> to, ConstPageView<From, Backend> from, const CheckedIds<std::int32_t>& ids, const RowOptions& row) {
  constexpr std::int64_t tokens = From::tokens_per_page;
  parallel_for(static_cast<std::int64_t>(ids.to.size()) * tokens, tokens, [&](std::int64_t begin, std::int64_t end) {
    float numbers[From::dim];
    for (std::int64_t i = begin; i < end; ++i) {
      const auto pair = static_cast<std::size_t>(i / tokens);
      const auto token = static_cast<int>(i % tokens);
      decode_row<From>(from.page(ids.from[pair]), token, numbers);
      encode_row<To>(numbers, to.page(ids.to[pair]), token, row);
    }
  });
}

template <class From, class To>
constexpr CopyDirection direction_between() {
  constexpr bool from_host = std::is_same_v<typename From::side, HostSide>;
  constexpr bool to_host = std::is_same_v<typename To::side, HostSide>;
  return from_host ? (to_host ? CopyDirection::host_to_host : CopyDirection::host_to_device)
                   : (to_host ? CopyDirection::device_to_host : CopyDirection::device_to_device);
}

}  // namespace detail

/// The one way between two policies, only ever by this name: decodes each row of the source pages of the plan and encodes it, by the other
/// policy's rules and `row`, into the destinations. Of a plan between pools of one side the first pages are the source. Layers, order, ownership and errors as for `load`; duplicate for
/// a page of one pool on both sides; unsupported with TransferOptions::digest, since the bytes differ on purpose. Host backend.
///
/// Error: what has arrived differs from what `from` decodes to by at most error_bound<To, role>(row) of each element's field in `To`
/// (codec/error_bound.hpp), and `from` itself by error_bound<From, role>() from what was once stored. Padding of the page is left alone.
template <class P, class Q, HostTag Backend, class Side, class OtherSide, class First, class Second>
Result<PreparedTransfer<Backend>> prepare_migrate(const PagePool<P, Backend, Side>& from, PagePool<Q, Backend, OtherSide>& to,
                                               const PagePlan<First, Second>& plan,
                                               const TransferOptions<Backend>& options = {}, const RowOptions& row = {}) {
  static_assert(detail::require_migrate<P, Q>());
  if (options.digest || options.seals) return Error{ErrorCode::unsupported, "migrate '" + options.name + "': the checksums of two layouts cannot agree"};
  constexpr auto direction = detail::direction_between<PagePool<P, Backend, Side>, PagePool<Q, Backend, OtherSide>>();
  return detail::prepare_pools(from, to, plan, direction, options, [&](auto& piece, EntrySlot slot, auto ids, std::uint64_t) -> Status {
    const auto n = static_cast<std::int64_t>(ids->to.size());
    piece.count.engine = Engine::host_codec;
    piece.count.pages = n;
    piece.count.tokens = n * Q::tokens_per_page;
    piece.count.bytes = n * Q::used_bytes;
    piece.move = [destination = pool_access::view(to, slot), source = pool_access::const_view(from, slot), ids, row](bool) {
      detail::migrate_pages<P, Q>(destination, source, *ids, row);
    };
    return {};
  });
}
template <class P, class Q, HostTag Backend, class Side, class OtherSide, class First, class Second>
Result<Ticket<Backend>> migrate(const PagePool<P, Backend, Side>& from, PagePool<Q, Backend, OtherSide>& to,
                             const PagePlan<First, Second>& plan, Stream<Backend>& stream,
                             const TransferOptions<Backend>& options = {}, const RowOptions& row = {}) {
  return detail::issue(prepare_migrate(from, to, plan, options, row), stream);
}

KVIRE_NAMESPACE_END
