// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include <kvire/base/result.hpp>

KVIRE_NAMESPACE_BEGIN

namespace detail {

/// Starts a thread that runs `f`; `who` names it in the error. Error exhausted, with the system's reason, if the system has no thread to give.
/// Without exceptions the standard library ends the program then, as it cannot report it.
template <class F>
Result<std::thread> start_thread([[maybe_unused]] const std::string& who, F&& f) {
#if KVIRE_EXCEPTIONS
  try {
    return Result<std::thread>(std::thread(std::forward<F>(f)));
  } catch (const std::system_error& e) {
    return Error{ErrorCode::exhausted, who + ": no thread to be had: " + e.what()};
  }
#else
  return Result<std::thread>(std::thread(std::forward<F>(f)));
#endif
}

}  // namespace detail

KVIRE_NAMESPACE_END
