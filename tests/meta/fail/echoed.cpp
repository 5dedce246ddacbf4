// SPDX-License-Identifier: Apache-2.0
// The rule stands only in the source that a compiler echoes.

#if KVIRE_FAIL == 1  // expect: layout.right
int number = undeclared;  // error: kvire [layout.right]: only in the echoed source
#endif
