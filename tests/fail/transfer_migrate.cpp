// SPDX-License-Identifier: Apache-2.0
// Migrations of what is no plan of pages, or between what are no two pools, that must not compile.
// each rule alone
#include <kvire/layout/policies.hpp>
#include <kvire/transfer/migrate.hpp>

using namespace kvire;

using Keys = Bf16Contiguous<64, 128>;
using Fp8 = Fp8WithScale<64, 128>;
template <class P>
using Device = DevicePool<P, Host>;
using Pairs = PagePlan<HostPage, DevicePage>;

void good(const HostPool<Keys, Host>& host, Device<Fp8>& device, const std::vector<HostPage>& from, const std::vector<DevicePage>& to, Stream<Host>& stream) {
  (void)migrate(host, device, plan(from, to), stream);
  (void)migrate(host, device, plan(to, from), stream, {.name = "convert"}, RowOptions{.ties = Ties::to_even});
}

#if KVIRE_FAIL == 1  // expect: transfer.not-a-plan
// Two lists where one plan is meant.
void bad(Device<Keys>& from, Device<Fp8>& to, const std::vector<int>& ids, Stream<Host>& stream) { (void)migrate(from, to, ids, ids, stream); }
#elif KVIRE_FAIL == 2  // expect: transfer.not-a-plan
void bad(Device<Keys>& from, Device<Fp8>& to, const std::vector<DevicePage>& pages, Stream<Host>& stream) { (void)migrate(from, to, pages, stream); }
#elif KVIRE_FAIL == 3  // expect: transfer.migrate-pages
// Slots of tokens, where whole pages are converted.
void bad(Device<Keys>& from, Device<Fp8>& to, const std::vector<DeviceSlot>& slots, Stream<Host>& stream) {
  (void)migrate(from, to, plan_tokens(slots, slots), stream);
}
#elif KVIRE_FAIL == 4  // expect: transfer.plan-lists
void bad(const HostPool<Keys, Host>& from, Device<Fp8>& to, const std::vector<int>& ids, Stream<Host>& stream) { (void)migrate(from, to, plan(ids, ids), stream); }
#elif KVIRE_FAIL == 5  // expect: transfer.plan-sides
void bad(Device<Keys>& from, Device<Fp8>& to, const PagePlan<HostPage, HostPage>& pages, Stream<Host>& stream) { (void)migrate(from, to, pages, stream); }
#elif KVIRE_FAIL == 6  // expect: transfer.pools
void bad(Device<Keys>& device, Device<Fp8>& to, const Pairs& pairs, Stream<Host>& stream) { (void)migrate(mirror_of(device, 8), to, pairs, stream); }
#elif KVIRE_FAIL == 7  // expect: transfer.pools
// A destination that is not to be written.
void bad(const Device<Keys>& from, const Device<Fp8>& to, const Pairs& pairs, Stream<Host>& stream) { (void)migrate(from, to, pairs, stream, {.name = "convert"}); }
#elif KVIRE_FAIL == 8  // expect: transfer.same-backend
void bad(Device<Keys>& from, PagePool<Fp8, Cuda, DeviceSide>& to, Stream<Host>& stream) {
  (void)migrate(from, to, PagePlan<DevicePage, DevicePage>{}, stream);
}
#endif
