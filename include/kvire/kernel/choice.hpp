// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/base/config.hpp>

KVIRE_NAMESPACE_BEGIN

/// Which of several kernels with the same answer a call may run.
enum class KernelChoice : unsigned char {
  automatic,  ///< the tuned one where layout, arguments and device allow it, otherwise the plain one
  tuned,      ///< the tuned one; where it cannot serve the call, an error says why and nothing is queued
  plain,      ///< the plain one
};

/// Which kernel served a call.
struct KernelServed {
  const char* name = "none";  ///< static text
  bool tuned = false;
};

KVIRE_NAMESPACE_END
