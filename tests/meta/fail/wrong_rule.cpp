// SPDX-License-Identifier: Apache-2.0
// The second variant is refused by another rule.

#if KVIRE_FAIL == 1  // expect: layout.wrong
static_assert(false, "kvire [layout.wrong]: the rule that is asked for.");
#elif KVIRE_FAIL == 2  // expect: layout.right
static_assert(false, "kvire [layout.wrong]: another rule.");
#endif
