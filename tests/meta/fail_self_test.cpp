// SPDX-License-Identifier: Apache-2.0
// What the framework for code that must not compile has to tell apart.
#if KVIRE_FAIL == 1
template <int Bytes, int Expected>
struct Right {
  static_assert(Bytes == Expected, "kvire [layout.right]: the rule that is asked for.");
};
template struct Right<1, 2>;
#elif KVIRE_FAIL == 2
static_assert(false, "kvire [layout.wrong]: another rule.");
#elif KVIRE_FAIL == 3
int this_is_fine = 3;  // kvire [layout.right]: and compiles
#elif KVIRE_FAIL == 4
int number = undeclared;  // error: kvire [layout.right]: only in the echoed source
#elif KVIRE_FAIL == 5
int number = undeclared;
#endif
