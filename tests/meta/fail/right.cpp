// SPDX-License-Identifier: Apache-2.0
// Both variants are refused by the rule that they name.
template <int Bytes, int Expected>
struct Right {
  static_assert(Bytes == Expected, "kvire [layout.right]: the rule that is asked for.");
};

#if KVIRE_FAIL == 1  // expect: layout.right
constexpr auto bytes = sizeof(Right<1, 2>);
#elif KVIRE_FAIL == 2  // expect: layout.other
static_assert(sizeof(Right<2, 2>) == 2, "kvire [layout.other]: another rule.");
#endif
