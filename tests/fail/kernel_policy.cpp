// SPDX-License-Identifier: Apache-2.0
// Kernels on pages of another layout, or on none of a lease, that must not compile.
// each rule alone
#include <kvire/kernel/copy_pages.hpp>
#include <kvire/kernel/store.hpp>
#include <kvire/layout/policies.hpp>

using namespace kvire;

using Planar = Fp8WithScale<64, 128>;
using Interleaved = Fp8WithScaleInterleaved<64, 128>;

Status good(WriteLease<Planar, Host> lease, Stream<Host>& stream) {
  return store<Planar>(Rows(static_cast<const float*>(nullptr), 0), nullptr, lease, stream);
}

#if KVIRE_FAIL == 1  // expect: kernel.policy
// Both pages are equally large.
Status bad(WriteLease<Interleaved, Host> lease, Stream<Host>& stream) {
  return store<Planar>(Rows(static_cast<const float*>(nullptr), 0), nullptr, lease, stream);
}
#elif KVIRE_FAIL == 2  // expect: sync.no-lease
Status bad(PageView<Planar> view, Stream<Host>& stream) {
  return store<Planar>(Rows(static_cast<const float*>(nullptr), 0), nullptr, view, stream);
}
#elif KVIRE_FAIL == 3  // expect: sync.read-only
Status bad(ReadLease<Planar, Host> lease, Stream<Host>& stream) {
  return store<Planar>(Rows(static_cast<const float*>(nullptr), 0), nullptr, lease, stream);
}
#elif KVIRE_FAIL == 4  // expect: kernel.policy
Status bad(ReadLease<Planar, Host> from, WriteLease<Bf16Contiguous<64, 128>, Host> to, Stream<Host>& stream) {
  return copy_pages<Planar>(nullptr, from, nullptr, to, 0, stream);
}
#endif
