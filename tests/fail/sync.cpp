// SPDX-License-Identifier: Apache-2.0
// Pages reached past the gate, that must not compile.
// each rule alone
#include <kvire/layout/policies.hpp>
#include <kvire/sync/gate.hpp>
#include <kvire/sync/host.hpp>

using namespace kvire;

using Keys = Bf16Contiguous<64, 128>;

// A kernel of the user's own, with the checks that every kernel has.
template <class Lease>
void scale_by_two(const Lease& lease, Stream<Host>& stream) {
  require_write_lease<Lease>();
  if constexpr (is_write_lease<Lease>) launch(stream, [](auto) {}, lease);
}

Status good(const Step<Host>& step, DevicePool<Keys, Host>& pool, std::span<const DevicePage> pages, Stream<Host>& stream) {
  auto lease = step.write(pool, EntrySlot(0), pages);
  if (!lease.ok()) return lease.error();
  scale_by_two(lease.value(), stream);
  launch(stream, [](ConstPageView<Keys, Host>) {}, step.read(pool, EntrySlot(0)).value());
  return {};
}

#if KVIRE_FAIL == 1  // expect: sync.no-lease
// A raw view: nothing says that its load has landed.
void bad(PageView<Keys, Host> view, Stream<Host>& stream) { scale_by_two(view, stream); }
#elif KVIRE_FAIL == 2  // expect: sync.no-lease
// The pool itself.
void bad(DevicePool<Keys, Host>& pool, Stream<Host>& stream) {
  launch(stream, [](auto) {}, pool);
}
#elif KVIRE_FAIL == 3  // expect: sync.read-only
void bad(const ReadLease<Keys, Host>& lease, Stream<Host>& stream) { scale_by_two(lease, stream); }
#elif KVIRE_FAIL == 4  // expect: sync.same-backend
void bad(const Step<Host>& step, const PagePool<Keys, Cuda, DeviceSide>& pool) { (void)step.read(pool, EntrySlot(0)); }
#elif KVIRE_FAIL == 5  // expect: base.id-space
// A model layer where the pool counts its own.
void bad(const Step<Host>& step, const DevicePool<Keys, Host>& pool) {
  EntrySlot slot = LayerId(7);
  (void)step.read(pool, slot);
}
#elif KVIRE_FAIL == 6  // expect: sync.no-lease
// The Result, not the lease.
void bad(const Step<Host>& step, const DevicePool<Keys, Host>& pool, std::span<const DevicePage> pages, Stream<Host>& stream) {
  launch(stream, [](ConstPageView<Keys, Host>) {}, step.read(pool, EntrySlot(0), pages));
}
#elif KVIRE_FAIL == 7  // expect: sync.lease-arguments
// A number: a slot, a layer, a page?
void bad(const Step<Host>& step, const DevicePool<Keys, Host>& pool) { (void)step.read(pool, 1); }
#elif KVIRE_FAIL == 8  // expect: sync.lease-arguments
void bad(const Step<Host>& step, const DevicePool<Keys, Host>& pool, std::span<const DevicePage> pages) { (void)step.read(pool, 1L, pages); }
#elif KVIRE_FAIL == 9  // expect: sync.lease-arguments
// Pages of the other side.
void bad(const Step<Host>& step, DevicePool<Keys, Host>& pool, const std::vector<HostPage>& pages) { (void)step.write(pool, EntrySlot(0), pages); }
#elif KVIRE_FAIL == 10  // expect: sync.lease-arguments
void bad(const Step<Host>& step, const DevicePool<Keys, Host>& pool, const std::vector<PageRef<HostPage>>& pages) { (void)step.read(pool, EntrySlot(0), pages); }
#elif KVIRE_FAIL == 11  // expect: sync.lease-arguments
// A page where a list of pages is meant, and a table as kernels take it.
void bad(const Step<Host>& step, DevicePool<Keys, Host>& pool) { (void)step.write(pool, EntrySlot(0), 1); }
#elif KVIRE_FAIL == 12  // expect: sync.lease-arguments
void bad(const Step<Host>& step, const DevicePool<Keys, Host>& pool, const std::vector<int>& pages) { (void)step.read(pool, EntrySlot(0), pages); }
#elif KVIRE_FAIL == 13  // expect: sync.lease-arguments
// The Result, not the pages.
void bad(const Step<Host>& step, DevicePool<Keys, Host>& pool) { (void)step.read(pool, EntrySlot(0), pool.allocate(2)); }
#endif
