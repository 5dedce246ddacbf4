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

/// Refuses two policies between which no number could keep its place and meaning.
template <class From, class To>
constexpr bool require_migrate() {
  (void)sizeof(rule::MigrateShape<From, To, From::dim, To::dim, From::tokens_per_page, To::tokens_per_page,
                                  From::dim == To::dim && From::tokens_per_page == To::tokens_per_page>);
  (void)sizeof(rule::MigrateContent<From, To, equal_text(From::Content::text, To::Content::text)>);
  return true;
}

/// Whether pages of one pool migrate to the other by such a plan.
template <class From, class To, class Plan>
inline constexpr bool migrates = [] {
  using P = typename From::policy;
  using Q = typename To::policy;
  if constexpr (plan_fits<From, To, Plan>) {
    return same_backend<From, To> && P::dim == Q::dim && P::tokens_per_page == Q::tokens_per_page && Plan::granularity == Granularity::page;
  } else {
    return false;
  }
}();
/// Refuses it, in words, if not.
template <class From, class To, class Plan>
constexpr void require_migrate_pools() {
  require_migrate<typename From::policy, typename To::policy>();
  require_backend<From, To>();
  require_plan<From, To, Plan>();
  if constexpr (is_plan<Plan>) (void)sizeof(rule::MigratePlan<Plan, Plan::granularity == Granularity::page>);
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
template <class P, class Q, HostTag Backend, class OtherBackend, class Side, class OtherSide, class Plan>
Result<PreparedTransfer<Backend>> prepare_migrate(const PagePool<P, Backend, Side>& from, PagePool<Q, OtherBackend, OtherSide>& to, const Plan& plan,
                                                  const TransferOptions<Backend>& options = {}, const RowOptions& row = {}) {
  using From = PagePool<P, Backend, Side>;
  using To = PagePool<Q, OtherBackend, OtherSide>;
  detail::require_migrate_pools<From, To, Plan>();
  if constexpr (detail::migrates<From, To, Plan>) {
    if (options.digest || options.seals) return Error{ErrorCode::unsupported, "migrate '" + options.name + "': the checksums of two layouts cannot agree"};
    constexpr auto direction = detail::direction_between<From, To>();
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
  } else {
    return Error();
  }
}
template <class P, class Q, HostTag Backend, class OtherBackend, class Side, class OtherSide, class Plan>
Result<Ticket<Backend>> migrate(const PagePool<P, Backend, Side>& from, PagePool<Q, OtherBackend, OtherSide>& to, const Plan& plan, Stream<Backend>& stream,
                                const TransferOptions<Backend>& options = {}, const RowOptions& row = {}) {
  return detail::issue(prepare_migrate(from, to, plan, options, row), stream);
}

/// Refused with a reason: anything else, and two lists where one plan is meant. Of CUDA pools what is accepted is in migrate.cuh.
template <class From, class To, class Plan, class S>
Result<Ticket<Host>> migrate(const From&, const To&, const Plan&, const S&, const TransferOptions<Host>& = {}, const RowOptions& = {}) {
  (void)sizeof(rule::TransferPools<From, To, Plan, S, !std::is_same_v<From, From>>);
  return Error();
}
template <class From, class To, class First, class Second, class B>
Result<Ticket<B>> migrate(const From&, const To&, const First&, const Second&, Stream<B>&, const TransferOptions<B>& = {}, const RowOptions& = {}) {
  (void)sizeof(rule::TransferPlan<std::pair<First, Second>, !std::is_same_v<First, First>>);
  return Error();
}

KVIRE_NAMESPACE_END
