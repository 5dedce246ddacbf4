// SPDX-License-Identifier: Apache-2.0
// The second variant compiles, beside one that the same rule refuses.

#if KVIRE_FAIL == 1  // expect: layout.right
static_assert(false, "kvire [layout.right]: the rule that is asked for.");
#elif KVIRE_FAIL == 2  // expect: layout.right
int this_is_fine = 3;  // kvire [layout.right]: and compiles
#endif
