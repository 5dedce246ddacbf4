// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <kvire/sync/step.hpp>

KVIRE_NAMESPACE_BEGIN

/// A transfer that a step depends on: its progress, or anything that has one (a ticket, a prepared transfer).
template <class Backend>
class Dependency {
 public:
  Dependency(std::shared_ptr<const LoadProgress<Backend>> progress) : progress_(std::move(progress)) {}
  Dependency(std::shared_ptr<LoadProgress<Backend>> progress) : progress_(std::move(progress)) {}
  template <class T>
    requires requires(const T& t) {
      { t.progress() } -> std::convertible_to<std::shared_ptr<const LoadProgress<Backend>>>;
    }
  Dependency(const T& transfer) : progress_(transfer.progress()) {}

  const std::shared_ptr<const LoadProgress<Backend>>& progress() const { return progress_; }

 private:
  std::shared_ptr<const LoadProgress<Backend>> progress_;
};

struct GateOptions {
  std::string name = "gate";
  std::chrono::milliseconds issue_limit{10'000};  ///< how long `begin` waits for transfers to be issued unless told otherwise
  /// How long kernels wait, on the stream, for a load or for other kernels before the step fails. On the host: a CUDA stream waits without an end.
  std::chrono::milliseconds load_limit{30'000};
};

/// Where steps begin. The host blocks only here, until every transfer that the step names has been issued: a wait on what was never issued
/// would pass at once on most devices. Without names there is nothing to wait for. Stateless but for its options; safe from any thread.
template <class Backend>
class Gate {
 public:
  Gate() = default;
  explicit Gate(GateOptions options) : options_(std::move(options)) {}

  /// Begins a step on `stream`, which must outlive it. Errors: timeout, naming the transfer and its first layer that was not issued; failed,
  /// for a transfer that was dropped or has failed from its first layer on. A transfer that fails at a later layer lets the earlier ones
  /// through: `read` of the later ones reports it. invalid_argument for an empty ticket and for limits below 0.
  Result<Step<Backend>> begin(std::span<const Dependency<Backend>> transfers, Stream<Backend>& stream, Deadline deadline) const {
    for (const auto limit : {options_.issue_limit, options_.load_limit}) {
      if (limit.count() >= 0) continue;
      return Error{ErrorCode::invalid_argument, "gate '" + options_.name + "': a limit is " + std::to_string(limit.count()) + " ms, below 0"};
    }
    auto state = std::make_shared<typename Step<Backend>::State>();
    state->name = options_.name;
    state->stream = &stream;
    state->wait_limit = options_.load_limit;
    for (const auto& transfer : transfers) {
      const auto& progress = transfer.progress();
      if (!progress) return Error{ErrorCode::invalid_argument, "gate '" + options_.name + "': an empty ticket stands for no transfer"};
      if (Status status = progress->wait_issued(deadline); !status.ok()) {
        return Error{status.error().code, "gate '" + options_.name + "': " + status.error().message};
      }
      state->loads.push_back(progress);
    }
    return Step<Backend>(std::move(state));
  }
  Result<Step<Backend>> begin(std::span<const Dependency<Backend>> transfers, Stream<Backend>& stream) const {
    return begin(transfers, stream, deadline_in(options_.issue_limit));
  }
  Result<Step<Backend>> begin(std::initializer_list<Dependency<Backend>> transfers, Stream<Backend>& stream, Deadline deadline) const {
    return begin(std::span<const Dependency<Backend>>(transfers.begin(), transfers.size()), stream, deadline);
  }
  Result<Step<Backend>> begin(std::initializer_list<Dependency<Backend>> transfers, Stream<Backend>& stream) const {
    return begin(transfers, stream, deadline_in(options_.issue_limit));
  }

 private:
  GateOptions options_;
};

KVIRE_NAMESPACE_END
