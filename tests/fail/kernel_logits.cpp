// SPDX-License-Identifier: Apache-2.0
// Logits over pages of another layout, or on none of a lease, that must not compile.
// each rule alone
#include <kvire/kernel/prefill_logits.hpp>
#include <kvire/kernel/sparse_logits.hpp>
#include <kvire/layout/policies.hpp>
#include <kvire/pool/pool.hpp>

using namespace kvire;

using Planar = Fp8WithScale<64, 128>;
using Interleaved = Fp8WithScaleInterleaved<64, 128>;

Status good(const ReadLease<Planar, Host>& lease, Stream<Host>& stream) {
  return sparse_logits<Planar>({}, {}, lease, {}, {}, {}, stream);
}

Status good(const ContiguousKeys<Planar>& keys, Stream<Host>& stream) { return prefill_logits({}, {}, keys, {}, {}, {}, stream); }

#if KVIRE_FAIL == 1  // expect: kernel.policy
// Both pages are equally large.
Status bad(const ReadLease<Interleaved, Host>& lease, Stream<Host>& stream) {
  return sparse_logits<Planar>({}, {}, lease, {}, {}, {}, stream);
}
#elif KVIRE_FAIL == 2  // expect: sync.no-lease
Status bad(const DevicePool<Planar, Host>& pool, Stream<Host>& stream) { return sparse_logits<Planar>({}, {}, pool, {}, {}, {}, stream); }
#elif KVIRE_FAIL == 3  // expect: sync.no-lease
Status bad(ConstPageView<Planar> view, Stream<Host>& stream) { return sparse_logits({}, {}, view, {}, {}, {}, stream); }
#elif KVIRE_FAIL == 4  // expect: kernel.policy
// An fp8 reader over a bf16 pool.
Status bad(const ReadLease<Bf16Contiguous<64, 128>, Host>& lease, Stream<Host>& stream) {
  return sparse_logits<Planar>({}, {}, lease, {}, {}, {}, stream);
}
#elif KVIRE_FAIL == 5  // expect: codec.readable-elements
struct Int8 : PageLayout<64, 1, Plane<Field<role::Value, Element::u8, 128>>, Plane<Field<role::Scale, Element::bf16, 1>>> {
  using Scaling = ScaleRule<role::Value, 128>;
};
Status bad(const ReadLease<Int8, Host>& lease, Stream<Host>& stream) { return sparse_logits({}, {}, lease, {}, {}, {}, stream); }
#elif KVIRE_FAIL == 6  // expect: codec.readable-elements
struct Int8 : PageLayout<32, 1, Plane<Field<role::Value, Element::u8, 128>>, Plane<Field<role::Scale, Element::bf16, 1>>> {
  using Scaling = ScaleRule<role::Value, 128>;
};
Status bad(const ContiguousKeys<Int8>& keys, Stream<Host>& stream) { return prefill_logits({}, {}, keys, {}, {}, {}, stream); }
#elif KVIRE_FAIL == 7  // expect: codec.readable-elements
struct Int8 : PageLayout<16, 1, Plane<Field<role::Value, Element::u8, 128>>, Plane<Field<role::Scale, Element::bf16, 1>>> {
  using Scaling = ScaleRule<role::Value, 128>;
};
// The body of a kernel of one's own.
void bad(const std::byte* page, float* numbers) { body::key_elements<Int8>(page, 0, numbers); }
#endif
