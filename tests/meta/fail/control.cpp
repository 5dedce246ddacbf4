// SPDX-License-Identifier: Apache-2.0
// What should compile does not.
int number = undeclared;

#if KVIRE_FAIL == 1  // expect: layout.right
static_assert(false, "kvire [layout.right]: the rule that is asked for.");
#endif
