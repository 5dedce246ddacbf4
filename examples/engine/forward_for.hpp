// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace engine {

template <class Entries, class Io>
class Forward;

/// The forward pass of a step: the host's, unless the way to the cache brings one of its own.
template <class Io>
struct ForwardFor {
  using type = Forward<typename Io::Entries, Io>;
};

}  // namespace engine
