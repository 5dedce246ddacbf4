// SPDX-License-Identifier: Apache-2.0
// Ids and units that must not mix.
#include <kvire/base/ids.hpp>
#include <kvire/base/units.hpp>

using namespace kvire;

constexpr int device_row(DevicePage page) { return page.value; }
constexpr long long kernel_length(CachedTokens tokens) { return tokens.count; }

static_assert(device_row(DevicePage(3)) == 3 && kernel_length(CachedTokens(4)) == 4);

#if KVIRE_FAIL == 1  // expect: base.id-space
// A host page id from a swap-in table used to address the device pool.
constexpr int row = device_row(HostPage(11));
#elif KVIRE_FAIL == 2  // expect: base.unit
// The length of the sequence handed to a kernel that counts compressed tokens.
constexpr long long length = kernel_length(RawTokens(1024));
#elif KVIRE_FAIL == 3  // expect: base.id-space
// A model layer used as an index into an entry's layers.
constexpr EntrySlot slot = LayerId(5);
#elif KVIRE_FAIL == 4  // expect: base.unit
// Elements taken for bytes.
constexpr Bytes bytes = Elements(128);
#elif KVIRE_FAIL == 5  // expect: base.id-width
// A page index as a tensor library counts: 64 bits.
constexpr long long index = (1LL << 32) + 5;
constexpr DevicePage page(index);
#endif
