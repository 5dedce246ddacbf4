// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <kvire/pool/bundle_pool.hpp>
#include <kvire/pool/unique.hpp>
#include <kvire/sync/lease.hpp>
#include <kvire/sync/progress.hpp>
#include <kvire/sync/require.hpp>

KVIRE_NAMESPACE_BEGIN

template <class Backend>
class Gate;

/// One step of the engine: a pass of kernels on one stream that depends on the transfers its gate was given, and on no others. Leases come
/// from here. Copyable handle; the stream must outlive it. Safe from any thread, though kernels of one stream are queued by one thread at a time.
template <class Backend>
class Step {
 public:
  /// Permission to read a layer of a pool, for kernels of which the host does not say which pages they read. Queues, on the step's stream, waits for
  /// the step's loads of that layer, and for no others; never blocks the host. Errors: out_of_range; the failure of a load, if it is known already. One
  /// that fails later is found by the kernels, which then do nothing. It holds no pages: one that is freed, loaded into, or written by a kernel of another
  /// stream before the kernels have run is overwritten under them. Prefer the form below.
  template <class P, class B, class Side>
  Result<ReadLease<P, B>> read(const PagePool<P, B, Side>& pool, EntrySlot slot) const {
    (void)sizeof(rule::StepBackend<Backend, B, std::is_same_v<B, Backend>>);
    if constexpr (std::is_same_v<B, Backend>) {
      auto lease = begin_lease(pool, slot);
      if (!lease.ok()) return lease.error();
      return finish_read(pool, slot, std::move(lease).value());
    } else {
      return Error();
    }
  }

  /// The same for a kernel that reads these pages only: loads into them are waited for even if the step does not name them, and so are kernels of other streams
  /// with a lease to write them, in this slot, that was given before; the step fails if they do not run. Until the last kernel with this lease is done the pages
  /// are neither reused nor overwritten by a transfer or by such kernels. Loads and kernels of other pages do not matter. Host kernels that
  /// take page ids treat any other page as one beyond the pool; those of a GPU do not look, so that such a page is read unprotected. Further errors: busy if a load
  /// into them has not been issued, or (on CUDA) while a lease to write them is alive on another stream; failed, naming page and work, if what was to write them
  /// failed and nothing has since (PageLedger::failed_writes), unless it is a load that the step names and that brought this layer; those of PageLedger::hold.
  template <class P, class B, class Side>
  Result<ReadLease<P, B>> read(const PagePool<P, B, Side>& pool, EntrySlot slot, std::span<const typename Side::page_id> pages) const {
    (void)sizeof(rule::StepBackend<Backend, B, std::is_same_v<B, Backend>>);
    if constexpr (std::is_same_v<B, Backend>) {
      auto lease = begin_lease(pool, slot);
      if (!lease.ok()) return lease.error();
      if (Status status = claim(pool, slot, pages, PageUse::read, *lease.value()); !status.ok()) return status.error();
      lease.value()->named = true;
      return finish_read(pool, slot, std::move(lease).value());
    } else {
      return Error();
    }
  }

  /// Permission to write pages of a layer. Kernels with this lease run after loads into and backups of these pages, named by the step or not, and after kernels of
  /// other streams with a lease that names them in this slot; later transfers of these pages run after the last of these kernels. Errors: out_of_range and those
  /// of PageLedger::hold; busy, naming page and owners, for a page that another owner shares; busy for a page of a transfer that nobody has issued, or (on CUDA)
  /// while a lease of it is alive on another stream; the failure of a load.
  template <class P, class B, class Side>
  Result<WriteLease<P, B>> write(PagePool<P, B, Side>& pool, EntrySlot slot, std::span<const typename Side::page_id> pages) const {
    (void)sizeof(rule::StepBackend<Backend, B, std::is_same_v<B, Backend>>);
    if constexpr (std::is_same_v<B, Backend>) {
      auto started = begin_lease(pool, slot);
      if (!started.ok()) return started.error();
      auto lease = std::move(started).value();
      if (Status status = claim(pool, slot, pages, PageUse::store, *lease); !status.ok()) return status.error();
      lease->any_page = false;
      queue(*lease);
      return Result<WriteLease<P, B>>(detail::LeaseMaker::make<WriteLease<P, B>>(pool_access::view(pool, slot), std::move(lease)));
    } else {
      return Error();
    }
  }

  /// The same for an entry of a bundle, by model layer: `step.read<Model::IndexK>(pool, LayerId(7))`. Further error out_of_range: the layer is
  /// not kept, or does not own the entry.
  template <class Entry, class Bundle, class B, class Side>
  Result<ReadLease<typename Entry::policy, B>> read(const BundlePool<Bundle, B, Side>& pool, LayerId layer) const {
    const auto slot = slot_in<Entry>(pool, layer);
    if (!slot.ok()) return slot.error();
    return read(pool.template entry<Entry>(), slot.value());
  }
  template <class Entry, class Bundle, class B, class Side>
  Result<ReadLease<typename Entry::policy, B>> read(const BundlePool<Bundle, B, Side>& pool, LayerId layer,
                                                    std::span<const typename Side::page_id> pages) const {
    const auto slot = slot_in<Entry>(pool, layer);
    if (!slot.ok()) return slot.error();
    return read(pool.template entry<Entry>(), slot.value(), pages);
  }
  template <class Entry, class Bundle, class B, class Side>
  Result<WriteLease<typename Entry::policy, B>> write(BundlePool<Bundle, B, Side>& pool, LayerId layer,
                                                      std::span<const typename Side::page_id> pages) const {
    const auto slot = slot_in<Entry>(pool, layer);
    if (!slot.ok()) return slot.error();
    return write(pool.template entry<Entry>(), slot.value(), pages);
  }

  /// Either with a list of page references, such as `allocate` gives, instead of ids. Anything else than these is refused with a reason.
  template <class... Entry, class Pool, class Slot, class Pages>
    requires(requires { typename Pool::page_id; } && !(detail::LeasesSlot<Pool, Slot> && detail::LeasesPages<Pool, Pages>))
  auto read(const Pool& pool, const Slot& slot, const Pages& pages) const {
    detail::require_lease_arguments<Pool, Slot, Pages>();
    return read<Entry...>(pool, slot_of<Pool>(slot), detail::LeasePages<Pool>(detail::ids_of<Pool>(pages)));
  }
  template <class... Entry, class Pool, class Slot, class Pages>
    requires(requires { typename Pool::page_id; } && !(detail::LeasesSlot<Pool, Slot> && detail::LeasesPages<Pool, Pages>))
  auto write(Pool& pool, const Slot& slot, const Pages& pages) const {
    detail::require_lease_arguments<Pool, Slot, Pages>();
    return write<Entry...>(pool, slot_of<Pool>(slot), detail::LeasePages<Pool>(detail::ids_of<Pool>(pages)));
  }
  template <class... Entry, class Pool, class Slot>
    requires(requires { typename Pool::page_id; } && !detail::LeasesSlot<Pool, Slot>)
  auto read(const Pool& pool, const Slot& slot) const {
    detail::require_lease_arguments<Pool, Slot>();
    return read<Entry...>(pool, slot_of<Pool>(slot));
  }

  Stream<Backend>& stream() const { return *state_->stream; }

  /// The step's first failure. Complete once the stream has been synchronised: failures of loads are found as kernels run.
  Status status() const { return state_->failure->status(); }

 private:
  friend class Gate<Backend>;
  using LeaseState = detail::LeaseState<Backend>;

  struct State {
    std::string name;
    Stream<Backend>* stream = nullptr;
    std::vector<std::shared_ptr<const LoadProgress<Backend>>> loads;
    std::chrono::milliseconds wait_limit{0};
    std::shared_ptr<detail::StepFailure> failure = std::make_shared<detail::StepFailure>();
  };
  explicit Step(std::shared_ptr<const State> state) : state_(std::move(state)) {}

  template <class Pool, class Slot>
  static typename detail::LeaseSlot<Pool>::type slot_of(const Slot& slot) {
    if constexpr (detail::LeasesSlot<Pool, Slot>) return slot;
    return {};  // has been refused
  }

  template <class Entry, class Bundle, class B, class Side>
  static Result<EntrySlot> slot_in(const BundlePool<Bundle, B, Side>& pool, LayerId layer) {
    const bool kept = !layer.none() && layer.value < pool.layers();
    if (kept && Entry::owns(layer)) return Entry::slot(layer);
    return Error{ErrorCode::out_of_range, "pool " + pool.name() + "." + Entry::name + ": layer " + std::to_string(layer.value) +
                                              (kept ? std::string(" does not own this entry") : " is not in 0 to " + std::to_string(pool.layers() - 1))};
  }

  template <class P, class B, class Side>
  Result<std::shared_ptr<LeaseState>> begin_lease(const PagePool<P, B, Side>& pool, EntrySlot slot) const {
    if (slot.value < 0 || slot.value >= pool.layers()) {
      return Error{ErrorCode::out_of_range,
                   "pool " + pool.name() + ": entry slot " + std::to_string(slot.value) + " is not in 0 to " + std::to_string(pool.layers() - 1)};
    }
    auto lease = std::make_shared<LeaseState>();
    lease->failure = state_->failure;
    lease->stream = state_->stream->identity();
    lease->wait_limit = state_->wait_limit;
    lease->memory = pool_access::memory(pool);
    for (const auto& load : state_->loads) {
      const int position = load->position(lease->memory.get(), slot.value);
      if (position < 0) continue;
      if (Status status = load->known(position); !status.ok()) return status.error();
      add_wait(*lease, load->event(position), "transfer '" + load->name() + "', pool " + pool.name() + ", entry slot " + std::to_string(slot.value),
               false);
    }
    return lease;
  }

  // Notes the pages in the lease and registers its kernels as their users, and then collects what they have to come behind: of what the ledger has from before. What
  // comes later sees the lease and waits for it, so that no two wait for each other.
  template <class P, class B, class Side>
  Status claim(const PagePool<P, B, Side>& pool, EntrySlot slot, std::span<const typename Side::page_id> pages, PageUse use, LeaseState& lease) const {
    auto ledger = pool.ledger();
    std::vector<std::int32_t> named;
    named.reserve(pages.size());
    for (const auto page : pages) named.push_back(page.value);
    const std::vector<std::int32_t>& ids = lease.pages = detail::unique_ids(named, ledger.pages()).ids;
    const Event<Backend> own = lease.begin();
    lease.work = std::make_shared<WorkStream>(lease.stream);
    InFlight<Backend> work{use, own, lease.work};
    work.extent = std::make_shared<PageExtent>(lease.memory.get(), slot.value);
    auto hold = ledger.hold(ids, std::move(work));
    if (!hold.ok()) return hold.error();
    lease.hold = std::make_shared<PageHold<typename Side::page_id, B>>(std::move(hold).value());
    for (const auto& [page, flight] : ledger.in_flight(ids)) {
      if (flight.event == own) break;
      if (!(writes(use) || writes(flight.use)) || (flight.stream && flight.extent && !flight.extent->is(lease.memory.get(), slot.value))) continue;
      const std::string what = "pool " + pool.name() + ": " + name_of(flight.use) + " of " + Side::page_id::tag::name + " " + std::to_string(page);
      if (Status status = wait_for(flight, what, slot, writes(use), lease); !status.ok()) return status;
    }
    if (use != PageUse::read) return {};
    for (auto& failed : ledger.failed_writes(ids)) {
      if (!arrived_before(failed.event, slot, lease)) return std::move(failed.error);
    }
    return {};
  }

  // Whether a load that failed is one of the step's, and had brought this slot by then.
  bool arrived_before(const Event<Backend>& failed, EntrySlot slot, const LeaseState& lease) const {
    for (const auto& load : state_->loads) {
      const int position = load->done() == failed ? load->position(lease.memory.get(), slot.value) : -1;
      if (position >= 0 && load->known(position).ok()) return true;
    }
    return false;
  }

  // A transfer in flight: by its layer's event where the step names it, by the end of the whole transfer otherwise. Kernels of a lease: by its end; who writes
  // the pages need not care whether others have.
  Status wait_for(const InFlight<Backend>& flight, const std::string& what, EntrySlot slot, bool writing, LeaseState& lease) const {
    const bool may_fail = flight.use != PageUse::load && writing;
    const bool ordered = flight.stream && flight.stream->covers(lease.stream);
    for (const auto& load : state_->loads) {
      if (!(load->done() == flight.event)) continue;
      const int position = load->position(lease.memory.get(), slot.value);
      if (position >= 0) add_wait(lease, load->event(position), what, may_fail);
      return {};
    }
    if (!ordered && flight.event.query() == EventState::unrecorded) {
      return Error{ErrorCode::busy, what + " (" + flight.event.label() + ") has " + (flight.stream ? "not ended, and is of another stream" : "not been issued")};
    }
    add_wait(lease, flight.event, what, may_fail, ordered);
    return {};
  }

  static void add_wait(LeaseState& lease, Event<Backend> event, std::string what, bool may_fail, bool ordered = false) {
    if (event.query() == EventState::complete) return;
    for (auto& wait : lease.waits) {
      if (!(wait.event == event)) continue;
      wait.may_fail = wait.may_fail && may_fail;
      wait.ordered = wait.ordered && ordered;
      return;
    }
    lease.waits.push_back({std::move(event), std::move(what), may_fail, ordered});
  }

  void queue(const LeaseState& lease) const {
    for (const auto& wait : lease.waits) {
      if (!wait.ordered) detail::QueueWait<Backend>::queue(*state_->stream, wait, lease.failure, lease.wait_limit);
    }
  }

  template <class P, class B, class Side>
  Result<ReadLease<P, B>> finish_read(const PagePool<P, B, Side>& pool, EntrySlot slot, std::shared_ptr<LeaseState> lease) const {
    queue(*lease);
    return Result<ReadLease<P, B>>(detail::LeaseMaker::make<ReadLease<P, B>>(pool_access::const_view(pool, slot), std::move(lease)));
  }

  std::shared_ptr<const State> state_;
};

KVIRE_NAMESPACE_END
