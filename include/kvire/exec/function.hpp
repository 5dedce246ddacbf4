// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <type_traits>
#include <utility>

#include <kvire/base/config.hpp>

KVIRE_NAMESPACE_BEGIN

template <class Signature>
class MoveOnlyFunction;

/// A callable that owns what it captured and need not be copyable: queued work may own tickets and page holds, which std::function cannot hold.
template <class R, class... Args>
class MoveOnlyFunction<R(Args...)> {
 public:
  MoveOnlyFunction() = default;
  MoveOnlyFunction(MoveOnlyFunction&& other) noexcept : target_(std::exchange(other.target_, nullptr)) {}
  MoveOnlyFunction& operator=(MoveOnlyFunction other) noexcept {
    std::swap(target_, other.target_);
    return *this;
  }
  ~MoveOnlyFunction() { delete target_; }

  template <class F>
    requires(!std::is_same_v<std::decay_t<F>, MoveOnlyFunction> && std::is_invocable_r_v<R, std::decay_t<F>&, Args...>)
  MoveOnlyFunction(F&& f) : target_(new Model<std::decay_t<F>>(std::forward<F>(f))) {}

  explicit operator bool() const { return target_ != nullptr; }

  /// Requires a target.
  R operator()(Args... args) { return target_->call(std::forward<Args>(args)...); }

 private:
  struct Concept {
    virtual ~Concept() = default;
    virtual R call(Args... args) = 0;
  };
  template <class F>
  struct Model final : Concept {
    template <class G>
    explicit Model(G&& g) : f(std::forward<G>(g)) {}
    R call(Args... args) override { return static_cast<R>(f(std::forward<Args>(args)...)); }
    F f;
  };
  Concept* target_ = nullptr;
};

KVIRE_NAMESPACE_END
