// SPDX-License-Identifier: Apache-2.0
// Transfers between what does not belong together, that must not compile.
// each rule alone
#include <kvire/layout/policies.hpp>
#include <kvire/transfer/bundle.hpp>
#include <kvire/transfer/migrate.hpp>

using namespace kvire;

using Keys = Bf16Contiguous<64, 128>;
using Fp8 = Fp8WithScale<64, 128>;
template <class P>
using Device = DevicePool<P, Host>;
template <class P>
using Mirror = HostPool<P, Host>;
using Pairs = PagePlan<HostPage, DevicePage>;

struct Schedule {
  static constexpr int layers = 2;
  KVIRE_HD static constexpr int ratio(int) { return 4; }
};
struct Latent : CacheEntry<KvPages<64, 1, 64>, space::Full, Tokens<4>> {
  static constexpr const char* name = "latent";
};
struct IndexK : CacheEntry<Keys, space::Full, Tokens<4>> {
  static constexpr const char* name = "index_k";
};
using Both = CacheBundle<Schedule, Latent, IndexK>;
using LatentOnly = CacheBundle<Schedule, Latent>;
struct State : CacheEntry<KvPages<8, 1, 64>, space::Window, Ring> {
  static constexpr const char* name = "state";
};
using Stateful = CacheBundle<Schedule, Latent, IndexK, State>;

void good(Mirror<Keys>& host, Device<Keys>& device, Device<Fp8>& other, const Pairs& pairs, Stream<Host>& stream) {
  (void)load(host, device, pairs, stream);
  (void)migrate(device, other, PagePlan<DevicePage, DevicePage>{}, stream);
  (void)backup(device, host, PagePlan<DevicePage, HostPage>{}, stream);
}
void good(HostBundlePool<Both, Host>& host, DeviceBundlePool<Both, Host>& device, const BundlePlan<Both>& plan, Stream<Host>& stream) {
  (void)load(host, device, plan, stream);
  (void)backup(device, host, plan, stream);
}

BundlePlan<Stateful> good(const Pairs& pages, const Pairs& window_pages) {
  return BundlePlan<Stateful>(in_space<space::Full>(pages), in_space<space::Window>(window_pages));
}
BundlePlan<Stateful> good(const Pairs& pages) { return BundlePlan<Stateful>(in_space<space::Full>(pages), without<space::Window>()); }

#if KVIRE_FAIL == 1  // expect: transfer.same-policy
// The host pool was sized by another formula: 8,448 bytes a page against 16,384.
void bad(Mirror<Fp8>& host, Device<Keys>& device, const Pairs& pairs, Stream<Host>& stream) { (void)load(host, device, pairs, stream); }
#elif KVIRE_FAIL == 2  // expect: transfer.same-policy
// The same size in another order.
void bad(Device<Fp8>& device, Mirror<Fp8WithScaleInterleaved<64, 128>>& host, const Pairs& pairs, Stream<Host>& stream) {
  (void)backup(device, host, pairs, stream);
}
#elif KVIRE_FAIL == 3  // expect: transfer.same-bundle
// A host side that was built before the model had index keys.
void bad(HostBundlePool<LatentOnly, Host>& host, DeviceBundlePool<Both, Host>& device, const BundlePlan<Both>& plan, Stream<Host>& stream) {
  (void)load(host, device, plan, stream);
}
#elif KVIRE_FAIL == 4  // expect: transfer.same-bundle
// A plan that was made for the latents alone.
void bad(HostBundlePool<Both, Host>& host, DeviceBundlePool<Both, Host>& device, const BundlePlan<LatentOnly>& plan, Stream<Host>& stream) {
  (void)load(host, device, plan, stream);
}
#elif KVIRE_FAIL == 5  // expect: transfer.whole-bundle
// Bare pages do not say which spaces and entries they are of.
void bad(HostBundlePool<Both, Host>& host, DeviceBundlePool<Both, Host>& device, const Pairs& pairs, Stream<Host>& stream) {
  (void)backup(device, host, pairs, stream);
}
#elif KVIRE_FAIL == 6  // expect: base.id-space
// Host and device ids in the wrong order.
void bad(Pairs& pairs) { pairs.first.push_back(DevicePage(3)); }
#elif KVIRE_FAIL == 7  // expect: transfer.same-backend
void bad(Mirror<Keys>& host, PagePool<Keys, Cuda, DeviceSide>& device, const Pairs& pairs, Stream<Host>& stream) {
  (void)load(host, device, pairs, stream);
}
#elif KVIRE_FAIL == 8  // expect: transfer.migrate-shape
void bad(Device<Keys>& from, Device<Fp8WithScale<32, 128>>& to, Stream<Host>& stream) {
  (void)migrate(from, to, PagePlan<DevicePage, DevicePage>{}, stream);
}
#elif KVIRE_FAIL == 9  // expect: transfer.migrate-content
// V3.2 keys turn other dims than V4 keys: the numbers would decode and mean something else.
void bad(Device<Bf16Contiguous<64, 128, content::RopeHead64>>& from, Device<Bf16Contiguous<64, 128, content::RopeTail64Hadamard128>>& to,
         Stream<Host>& stream) {
  (void)migrate(from, to, PagePlan<DevicePage, DevicePage>{}, stream);
}
#elif KVIRE_FAIL == 10  // expect: transfer.every-space
// The states that go with the window were not thought of.
BundlePlan<Stateful> bad(const Pairs& pages) { return BundlePlan<Stateful>(in_space<space::Full>(pages)); }
#elif KVIRE_FAIL == 11  // expect: transfer.plan-sides
// Two lists of the host's pages: the second would be taken for pages of the device.
void bad(Mirror<Keys>& host, Device<Keys>& device, const std::vector<PageRef<HostPage>>& pages, Stream<Host>& stream) {
  (void)load(host, device, plan(pages, pages), stream);
}
#elif KVIRE_FAIL == 12  // expect: transfer.plan-sides
void bad(Mirror<Keys>& host, Device<Keys>& device, const std::vector<DeviceSlot>& slots, Stream<Host>& stream) {
  (void)backup(device, host, plan_tokens(slots, slots), stream);
}
#elif KVIRE_FAIL == 13  // expect: transfer.plan-sides
// A plan for the way to the host, used between two device pools.
void bad(Device<Keys>& from, Device<Fp8>& to, const Pairs& pairs, Stream<Host>& stream) { (void)migrate(from, to, pairs, stream); }
#elif KVIRE_FAIL == 14  // expect: transfer.plan-sides
BundlePlan<LatentOnly> bad(const PagePlan<DevicePage, DevicePage>& pages) { return BundlePlan<LatentOnly>(in_space<space::Full>(pages)); }
#elif KVIRE_FAIL == 15  // expect: transfer.plan-lists
// Numbers do not say whose pages they are.
void bad(const std::vector<int>& from, const std::vector<int>& to) { (void)plan(from, to); }
#elif KVIRE_FAIL == 16  // expect: transfer.plan-lists
// The Results of two allocations, either of which may hold an error.
void bad(Mirror<Keys>& host, Device<Keys>& device) { (void)plan(host.allocate(1), device.allocate(1)); }
#elif KVIRE_FAIL == 17  // expect: transfer.plan-lists
void bad(const PageRef<HostPage>& from, const PageRef<DevicePage>& to) { (void)plan(from, to); }
#elif KVIRE_FAIL == 18  // expect: transfer.plan-lists
// Owned pages on one side and ids on the other.
void bad(const std::vector<PageRef<HostPage>>& from, const std::vector<DevicePage>& to) { (void)plan(from, to); }
#elif KVIRE_FAIL == 19  // expect: transfer.plan-lists
void bad(const std::vector<HostSlot>& from, const std::vector<DevicePage>& to) { (void)plan_tokens(from, to); }
#elif KVIRE_FAIL == 20  // expect: transfer.plan-lists
void bad(const std::vector<std::pair<HostPage, DevicePage>>& pairs) { (void)plan(pairs); }
#elif KVIRE_FAIL == 21  // expect: transfer.not-a-plan
// A list of pages, which does not say where each is to go.
void bad(Mirror<Keys>& host, Device<Keys>& device, const std::vector<HostPage>& pages, Stream<Host>& stream) { (void)load(host, device, pages, stream); }
#elif KVIRE_FAIL == 22  // expect: transfer.not-a-plan
void bad(Mirror<Keys>& host, Device<Keys>& device, const BundlePlan<Both>& whole, Stream<Host>& stream) { (void)backup(device, host, whole, stream); }
#elif KVIRE_FAIL == 23  // expect: transfer.pools
// A backup's pools in the order of a load's.
void bad(Mirror<Keys>& host, Device<Keys>& device, const Pairs& pairs, Stream<Host>& stream) {
  (void)backup(host, device, pairs, stream, {.name = "out"});
}
#elif KVIRE_FAIL == 24  // expect: transfer.pools
void bad(Device<Keys>& device, const Pairs& pairs, Stream<Host>& stream) { (void)load(mirror_of(device, 8), device, pairs, stream); }
#elif KVIRE_FAIL == 25  // expect: transfer.pools
void bad(HostBundlePool<Both, Host>& host, DeviceBundlePool<Both, Host>& device, const BundlePlan<Both>& plan, Stream<Host>& stream) {
  (void)load(device, host, plan, stream);
}
#elif KVIRE_FAIL == 26  // expect: transfer.not-a-plan
// Two lists where one plan is meant.
void bad(Mirror<Keys>& host, Device<Keys>& device, const std::vector<HostPage>& from, const std::vector<DevicePage>& to, Stream<Host>& stream) {
  (void)load(host, device, from, to, stream);
}
#elif KVIRE_FAIL == 27  // expect: transfer.not-a-plan
void bad(Mirror<Keys>& host, Device<Keys>& device, const std::vector<int>& from, const std::vector<int>& to, Stream<Host>& stream) {
  (void)backup(device, host, from, to, stream, {.name = "out"});
}
#endif
