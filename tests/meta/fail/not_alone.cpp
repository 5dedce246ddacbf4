// SPDX-License-Identifier: Apache-2.0
// The second variant is refused by its rule, and by the compiler's own words as well.
// each rule alone
template <int Bytes, int Expected>
struct Right {
  static_assert(Bytes == Expected, "kvire [layout.right]: the rule that is asked for.");
};

#if KVIRE_FAIL == 1  // expect: layout.right
constexpr auto bytes = sizeof(Right<1, 2>);
#elif KVIRE_FAIL == 2  // expect: layout.right
constexpr auto bytes = sizeof(Right<2, 3>) + undeclared;
#endif
