// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/pool/pool.hpp>
#include <kvire/transfer/fits.hpp>
#include <kvire/transfer/prepared.hpp>

KVIRE_NAMESPACE_BEGIN

namespace detail {

/// "pool a, pool b: 3 host pages against 2 device pages".
template <class First, class Second>
Status check_counts(const std::string& first_pool, const std::string& second_pool, std::size_t first, std::size_t second, const char* what) {
  if (first == second) return {};
  return Error{ErrorCode::mismatch, "pools " + first_pool + " and " + second_pool + ": the plan pairs " + std::to_string(first) + " " +
                                        First::tag::name + what + " with " + std::to_string(second) + " " + Second::tag::name + what};
}

template <class Index, class Id>
std::vector<Index> plain(const std::vector<Id>& ids) {
  std::vector<Index> out(ids.size());
  for (std::size_t i = 0; i < ids.size(); ++i) out[i] = ids[i].value;
  return out;
}

/// Checks and holds the pages of both sides; the ids are trusted afterwards.
template <class Backend, class From, class To, class Source, class Destination>
Result<std::shared_ptr<const CheckedIds<std::int32_t>>> hold_pages(TransferBuilder<Backend>& builder, const PageLedger<From, Backend>& from,
                                                                   const PageLedger<To, Backend>& to, const Source& source, const Destination& destination) {
  if (Status s = check_counts<From, To>(from.name(), to.name(), source.pages.size(), destination.pages.size(), "s"); !s.ok()) return s.error();
  auto ids = std::make_shared<CheckedIds<std::int32_t>>();
  ids->from = plain<std::int32_t>(source.pages);
  ids->to = plain<std::int32_t>(destination.pages);
  if (Status s = builder.hold(from, ids->from, source.generation, source.ledger, false); !s.ok()) return s.error();
  if (Status s = builder.hold(to, ids->to, destination.generation, destination.ledger, true); !s.ok()) return s.error();
  return std::shared_ptr<const CheckedIds<std::int32_t>>(std::move(ids));
}

/// Refuses a page that one plan both reads and writes: the pairs are moved side by side, in no order. Both lists are of one memory.
template <class PageId>
Status check_apart(const std::string& pool, const std::vector<PageId>& first, const std::vector<PageId>& second) {
  std::vector<std::int32_t> ids = plain<std::int32_t>(first);
  sort(ids);
  for (const PageId page : second) {
    if (!contains(ids, page.value)) continue;
    return Error{ErrorCode::duplicate, "pool " + pool + ": " + PageId::tag::name + " " + std::to_string(page.value) +
                                           " is source and destination of one plan"};
  }
  return {};
}

/// One side of a token plan: slots in range, no destination twice, their pages held.
template <class P, class Backend, class PageId, class Slot>
Status hold_slots(TransferBuilder<Backend>& builder, const PageLedger<PageId, Backend>& ledger, const std::vector<Slot>& slots, bool destination) {
  const std::int64_t bound = static_cast<std::int64_t>(ledger.pages()) * P::tokens_per_page;
  std::vector<std::int64_t> list;
  list.reserve(slots.size());
  for (const auto& slot : slots) {
    if (slot.page_tokens != 0 && slot.page_tokens != P::tokens_per_page) {
      return Error{ErrorCode::mismatch, "pool " + ledger.name() + ": token slot " + std::to_string(slot.value) + " counts pages of " +
                                            std::to_string(slot.page_tokens) + " tokens, those of the pool have " + std::to_string(P::tokens_per_page)};
    }
    if (slot.value < 0 || slot.value >= bound) {
      return Error{ErrorCode::out_of_range, "pool " + ledger.name() + ": token slot " + std::to_string(slot.value) +
                                                (slot.value < 0 ? " is negative" : " is not below " + std::to_string(bound))};
    }
    list.push_back(slot.value);
  }
  UniqueIds<std::int64_t> unique = unique_ids(list, bound);
  if (destination && unique.twice >= 0) {
    return Error{ErrorCode::duplicate, "pool " + ledger.name() + ": token slot " + std::to_string(unique.twice) +
                                           " is the destination of two tokens of the plan"};
  }
  std::vector<std::int32_t> pages;
  for (const std::int64_t slot : unique.ids) {
    const auto page = static_cast<std::int32_t>(slot / P::tokens_per_page);
    if (pages.empty() || pages.back() != page) pages.push_back(page);
  }
  if (destination) builder.progress().extent().limit(std::move(unique.ids), P::tokens_per_page);
  return builder.hold(ledger, pages, {}, {}, destination);
}

template <class P, class Backend, class From, class To, class Source, class Destination>
Result<std::shared_ptr<const CheckedIds<std::int64_t>>> hold_tokens(TransferBuilder<Backend>& builder, const PageLedger<From, Backend>& from,
                                                                    const PageLedger<To, Backend>& to, const Source& source, const Destination& destination) {
  if (Status s = check_counts<From, To>(from.name(), to.name(), source.size(), destination.size(), " tokens"); !s.ok()) return s.error();
  if (Status s = hold_slots<P>(builder, from, source, false); !s.ok()) return s.error();
  if (Status s = hold_slots<P>(builder, to, destination, true); !s.ok()) return s.error();
  auto ids = std::make_shared<CheckedIds<std::int64_t>>();
  ids->from = plain<std::int64_t>(source);
  ids->to = plain<std::int64_t>(destination);
  return std::shared_ptr<const CheckedIds<std::int64_t>>(std::move(ids));
}

/// The seals of one layer of a transfer between a host pool and a device pool; none if the options name none. Errors: mismatch for seals of another
/// host pool; unsupported for token plans.
template <class From, class To, class Ids, class Backend>
Result<PieceSeal> seal_of_piece(const From& from, const To& to, EntrySlot slot, const std::shared_ptr<const Ids>& ids, const TransferOptions<Backend>& options) {
  PieceSeal seal;
  if (!options.seals) return seal;
  seal.store = std::is_same_v<typename To::side, HostSide>;
  seal.table = options.seals;
  if constexpr (std::is_same_v<typename To::side, HostSide>) {
    seal.layer = options.seals->of(to, slot);
  } else {
    seal.layer = options.seals->of(from, slot);
  }
  if (!seal) return Error{ErrorCode::mismatch, "transfer '" + options.name + "': its seals are not of pool " + (seal.store ? to.name() : from.name())};
  if constexpr (std::is_same_v<Ids, CheckedIds<std::int32_t>>) {
    seal.host = {ids, seal.store ? &ids->to : &ids->from};
    return seal;
  } else {
    return Error{ErrorCode::unsupported, "transfer '" + options.name + "': seals are of whole pages, and this plan moves tokens"};
  }
}

/// The numbers of the positions that a range names. Error out_of_range.
template <class Int = std::int32_t>
Result<std::vector<Int>> layers_of(const LayerRange& range, int layers, const std::string& pool) {
  if (range.first < 0 || range.first > layers || range.count < -1 || range.count > layers - range.first) {
    return Error{ErrorCode::out_of_range, "pool " + pool + ": " + std::to_string(range.count) + " layers from " + std::to_string(range.first) + " of " +
                                              std::to_string(layers)};
  }
  const std::int32_t count = range.count < 0 ? layers - range.first : range.count;
  std::vector<Int> labels(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < labels.size(); ++i) labels[i] = range.first + static_cast<Int>(i);
  return labels;
}

/// Position of each slot for a pool whose slots are the positions' numbers.
template <class Int>
std::vector<int> positions_of(const std::vector<Int>& labels, int slots) {
  std::vector<int> position(static_cast<std::size_t>(slots), -1);
  for (std::size_t i = 0; i < labels.size(); ++i) position[static_cast<std::size_t>(labels[i])] = static_cast<int>(i);
  return position;
}

/// One pool to another. `fill(piece, slot, ids, digest key)` says how a layer moves, or why it is refused.
template <class From, class To, class Plan, class Fill>
Result<PreparedTransfer<typename From::backend>> prepare_pools(const From& from, To& to, const Plan& plan, CopyDirection direction,
                                                               const TransferOptions<typename From::backend>& options, Fill fill) {
  using P = typename From::policy;
  using Backend = typename From::backend;
  if (from.layers() != to.layers()) {
    return Error{ErrorCode::mismatch, "pools " + from.name() + " and " + to.name() + ": " + std::to_string(from.layers()) + " layers against " +
                                          std::to_string(to.layers())};
  }
  auto labels = layers_of(options.layers, from.layers(), from.name());
  if (!labels.ok()) return labels.error();
  if constexpr (Plan::granularity == Granularity::page && std::is_same_v<typename Plan::first_id, typename Plan::second_id>) {
    if (pool_access::memory(from) == pool_access::memory(to)) {
      if (Status s = check_apart(from.name(), plan.first, plan.second); !s.ok()) return s.error();
    }
  }
  TransferBuilder<Backend> builder(options, labels.value());
  // Before the ledgers have it: from then on any thread that asks them may look.
  const auto positions = positions_of(labels.value(), from.layers());
  builder.progress().extent().cover(pool_access::memory(from), positions);
  builder.progress().extent().cover(pool_access::memory(to), positions, to.ledger().identity());
  constexpr bool first = source_is_first<typename Plan::first_id, typename Plan::second_id, typename From::side::page_id, typename To::side::page_id>;
  auto ids = [&] {
    if constexpr (Plan::granularity == Granularity::page) {
      return hold_pages(builder, from.ledger(), to.ledger(), side_of<first>(plan), side_of<!first>(plan));
    } else {
      return hold_tokens<P>(builder, from.ledger(), to.ledger(), side_of<first>(plan), side_of<!first>(plan));
    }
  }();
  if (!ids.ok()) return ids.error();
  const char* const name = builder.keep(direction == CopyDirection::device_to_host ? from.name() : to.name());
  const std::size_t pieces = ids.value()->to.empty() ? 0 : labels.value().size();  // no copies, seals or digests of nothing
  for (std::size_t i = 0; i < pieces; ++i) {
    const EntrySlot slot(labels.value()[i]);
    typename TransferEngine<Backend>::Piece piece;
    piece.position = static_cast<int>(i);
    piece.info = {.entry = name, .layer = slot.value, .direction = direction};
    piece.count.entry = name;
    piece.count.copies = 1;
    if (Status s = fill(piece, slot, ids.value(), options.digest ? digest_key(fingerprint64<P>, slot.value) | 1 : std::uint64_t(0)); !s.ok()) return s.error();
    builder.add(std::move(piece));
  }
  return Result<PreparedTransfer<Backend>>(builder.finish());
}

template <class From, class To, class Plan>
Result<PreparedTransfer<typename From::backend>> prepare(const From& from, To& to, const Plan& plan, CopyDirection direction,
                                                         const TransferOptions<typename From::backend>& options) {
  using P = typename From::policy;
  using Engine = TransferEngine<typename From::backend>;
  return prepare_pools(from, to, plan, direction, options, [&](auto& piece, EntrySlot slot, auto ids, std::uint64_t digest) -> Status {
    auto seal = seal_of_piece(from, to, slot, ids, options);
    if (!seal.ok()) return seal.error();
    piece.seal = std::move(seal).value();
    if constexpr (Plan::granularity == Granularity::page) {
      Engine::template pages<P>(piece, pool_access::view(to, slot), pool_access::const_view(from, slot), std::move(ids), digest);
    } else {
      Engine::template rows<P>(piece, pool_access::view(to, slot), pool_access::const_view(from, slot), std::move(ids), digest);
    }
    return {};
  });
}

template <class Backend>
Result<Ticket<Backend>> issue(Result<PreparedTransfer<Backend>> prepared, Stream<Backend>& stream) {
  if (!prepared.ok()) return prepared.error();
  auto ticket = prepared.value().issue(stream);
  if (!ticket.ok()) prepared.value().withdraw();
  return ticket;
}

}  // namespace detail

/// A load that is checked and owns its pages, to be issued later by any thread. `plan` is a PagePlan or a TokenPlan of HostPage and
/// DevicePage, in either order. All ids are checked before any byte moves. Errors, naming pool, id and bound: mismatch for sides of different lengths or pools of
/// different layers, and for a PageRef of another pool; out_of_range, invalid_argument and duplicate for ids (see PageLedger::hold) and for a destination named twice; stale for
/// a generation that has passed.
template <class P, class Q, class B, class C, class Plan>
Result<PreparedTransfer<B>> prepare_load(const PagePool<P, B, HostSide>& host, PagePool<Q, C, DeviceSide>& device, const Plan& plan,
                                         const TransferOptions<B>& options = {}) {
  using From = PagePool<P, B, HostSide>;
  using To = PagePool<Q, C, DeviceSide>;
  detail::require_transfer<From, To, Plan>();
  if constexpr (detail::transfers<From, To, Plan>) {
    return detail::prepare(host, device, plan, CopyDirection::host_to_device, options);
  } else {
    return Error();
  }
}
/// The same from the device to the host.
template <class P, class Q, class B, class C, class Plan>
Result<PreparedTransfer<B>> prepare_backup(const PagePool<P, B, DeviceSide>& device, PagePool<Q, C, HostSide>& host, const Plan& plan,
                                           const TransferOptions<B>& options = {}) {
  using From = PagePool<P, B, DeviceSide>;
  using To = PagePool<Q, C, HostSide>;
  detail::require_transfer<From, To, Plan>();
  if constexpr (detail::transfers<From, To, Plan>) {
    return detail::prepare(device, host, plan, CopyDirection::device_to_host, options);
  } else {
    return Error();
  }
}

/// Queues the copy of pages or tokens from the host to the device, layer by layer with an event behind each. Returns at once; see
/// PreparedTransfer::issue for the order with other work, prepare_load for errors. Keep the ticket, or name its progress to a gate.
template <class P, class Q, class B, class C, class Plan>
Result<Ticket<B>> load(const PagePool<P, B, HostSide>& host, PagePool<Q, C, DeviceSide>& device, const Plan& plan, Stream<B>& stream,
                       const TransferOptions<B>& options = {}) {
  return detail::issue(prepare_load(host, device, plan, options), stream);
}
/// The same from the device to the host. Kernels that make the source on other streams are waited for if they use write leases; otherwise
/// name their events in TransferOptions::after.
template <class P, class Q, class B, class C, class Plan>
Result<Ticket<B>> backup(const PagePool<P, B, DeviceSide>& device, PagePool<Q, C, HostSide>& host, const Plan& plan, Stream<B>& stream,
                         const TransferOptions<B>& options = {}) {
  return detail::issue(prepare_backup(device, host, plan, options), stream);
}

/// Refused with a reason: anything else, and two lists where one plan is meant.
template <class From, class To, class Plan, class S>
Result<Ticket<Host>> load(const From&, const To&, const Plan&, const S&, const TransferOptions<Host>& = {}) {
  (void)sizeof(rule::TransferPools<From, To, Plan, S, !std::is_same_v<From, From>>);
  return Error();
}
template <class From, class To, class Plan, class S>
Result<Ticket<Host>> backup(const From&, const To&, const Plan&, const S&, const TransferOptions<Host>& = {}) {
  (void)sizeof(rule::TransferPools<From, To, Plan, S, !std::is_same_v<From, From>>);
  return Error();
}
template <class From, class To, class First, class Second, class B>
Result<Ticket<B>> load(const From&, const To&, const First&, const Second&, Stream<B>&, const TransferOptions<B>& = {}) {
  (void)sizeof(rule::TransferPlan<std::pair<First, Second>, !std::is_same_v<First, First>>);
  return Error();
}
template <class From, class To, class First, class Second, class B>
Result<Ticket<B>> backup(const From&, const To&, const First&, const Second&, Stream<B>&, const TransferOptions<B>& = {}) {
  (void)sizeof(rule::TransferPlan<std::pair<First, Second>, !std::is_same_v<First, First>>);
  return Error();
}

KVIRE_NAMESPACE_END
