// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>
#include <utility>

#include <kvire/exec/cuda/stream.hpp>

// Streams of tests that stand still until a hold is released.

namespace kvire_test {

/// A stream on which the copies that `which` picks wait, and all behind them.
template <class Which>
kvire::Stream<kvire::Cuda> holding_stream(std::string name, std::shared_ptr<kvire::CopyHold> hold, Which which) {
  return kvire::Stream<kvire::Cuda>::make({.name = std::move(name), .faults = kvire::FaultHooks::make([hold, which](const kvire::CopyInfo& info) mutable {
                                             return which(info) ? kvire::Fault::hold(hold) : kvire::Fault::none();
                                           })})
      .value();
}
/// The first copy alone.
inline kvire::Stream<kvire::Cuda> holding_stream(std::string name, std::shared_ptr<kvire::CopyHold> hold) {
  return holding_stream(std::move(name), std::move(hold), [copies = 0](const kvire::CopyInfo&) mutable { return copies++ == 0; });
}

/// Lets everything wait that is queued on the stream from now on.
inline kvire::Status hold_stream(kvire::Stream<kvire::Cuda>& stream, std::shared_ptr<kvire::CopyHold> hold) {
  return stream.launch([hold = std::move(hold)] {
    const std::atomic<bool> never{false};
    (void)hold->hold(never);
  });
}

}  // namespace kvire_test
