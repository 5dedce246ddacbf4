// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdio>
#include <cstdlib>
#include <new>
#include <string>
#include <type_traits>
#include <utility>

#include <kvire/base/config.hpp>

KVIRE_NAMESPACE_BEGIN

enum class ErrorCode : unsigned char {
  invalid_argument,  ///< a value that no state of the program would accept
  out_of_range,      ///< an id, length or offset beyond its bound
  duplicate,         ///< the same thing named twice
  exhausted,         ///< no memory or no page left
  busy,              ///< shared or under transfer; may succeed later
  stale,             ///< a generation that has passed
  failed,            ///< the operation itself failed
  timeout,           ///< not finished by the deadline; proves nothing about the operation
  mismatch,          ///< two sides disagree about a layout or a count
  unsupported,       ///< a legal request that this build or device cannot serve
};

/// Name of a code, for messages.
constexpr const char* name_of(ErrorCode code) {
  switch (code) {
    case ErrorCode::invalid_argument: return "invalid argument";
    case ErrorCode::out_of_range: return "out of range";
    case ErrorCode::duplicate: return "duplicate";
    case ErrorCode::exhausted: return "exhausted";
    case ErrorCode::busy: return "busy";
    case ErrorCode::stale: return "stale";
    case ErrorCode::failed: return "failed";
    case ErrorCode::timeout: return "timeout";
    case ErrorCode::mismatch: return "mismatch";
    case ErrorCode::unsupported: return "unsupported";
  }
  return "unknown";
}

/// What went wrong: the message names the thing, the value and the bound.
struct Error {
  ErrorCode code = ErrorCode::failed;
  std::string message;
};

namespace detail {
[[noreturn]] inline void die(const Error& error) {
  std::fprintf(stderr, "kvire: %s: %s\n", name_of(error.code), error.message.c_str());
  std::abort();
}
}  // namespace detail

/// A value or an Error. Nothing in the library throws. `value()` of an error prints it and aborts; ask `ok()` first where failure is expected.
template <class T>
class KVIRE_NODISCARD Result {
 public:
  Result(T value) : value_(std::move(value)), ok_(true) {}
  Result(Error error) : error_(std::move(error)) {}

  Result(const Result& other)
    requires(std::is_copy_constructible_v<T>)
      : ok_(other.ok_), error_(other.error_) {
    if (ok_) ::new (static_cast<void*>(&value_)) T(other.value_);
  }
  Result(Result&& other) noexcept : ok_(other.ok_), error_(std::move(other.error_)) {
    if (ok_) ::new (static_cast<void*>(&value_)) T(std::move(other.value_));
  }
  Result& operator=(Result other) noexcept {
    this->~Result();
    return *::new (static_cast<void*>(this)) Result(std::move(other));
  }
  ~Result() {
    if (ok_) value_.~T();
  }

  bool ok() const { return ok_; }
  explicit operator bool() const { return ok_; }

  T& value() & {
    require();
    return value_;
  }
  const T& value() const& {
    require();
    return value_;
  }
  T value() && {
    require();
    return std::move(value_);
  }
  T* operator->() { return &value(); }
  T& operator*() & { return value(); }

  /// The error; without meaning, and without a message, if ok().
  const Error& error() const { return error_; }

 private:
  void require() const {
    if (!ok_) detail::die(error_);
  }
  // As std::optional<T>, which takes longer to compile than all else here: most files name many results and use few.
  union {
    T value_;  // alive if ok_
  };
  bool ok_ = false;
  Error error_;
};

/// Success, or an Error.
template <>
class KVIRE_NODISCARD Result<void> {
 public:
  Result() = default;
  Result(Error error) : ok_(false), error_(std::move(error)) {}

  bool ok() const { return ok_; }
  explicit operator bool() const { return ok_; }
  void value() const {
    if (!ok_) detail::die(error_);
  }
  /// The error; without meaning, and without a message, if ok().
  const Error& error() const { return error_; }

 private:
  bool ok_ = true;
  Error error_;
};

using Status = Result<void>;

KVIRE_NAMESPACE_END
