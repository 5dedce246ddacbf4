// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include <kvire/base/ids.hpp>
#include <kvire/exec/backend.hpp>

namespace engine {

template <class IndexKey, class Backend>
class Tiers;

/// Pages that one transfer moves, per page-id space; host page first.
struct Moves {
  struct Pair {
    kvire::HostPage host;
    kvire::DevicePage device;
  };
  std::vector<Pair> full;
  std::vector<Pair> window;

  bool empty() const { return full.empty() && window.empty(); }

  template <class Space>
  std::vector<Pair>& of() {
    if constexpr (std::is_same_v<Space, kvire::space::Full>) {
      return full;
    } else {
      return window;
    }
  }
  template <class Space>
  const std::vector<Pair>& of() const {
    return const_cast<Moves*>(this)->of<Space>();
  }
};

/// Something that damages pages below the typed surface, at the moments when a real engine could. The compute stream is idle whenever one
/// of these is called.
template <class IndexKey, class Backend = kvire::Host>
class Tamper {
 public:
  virtual ~Tamper() = default;
  /// A load is about to be issued.
  virtual void before_load(Tiers<IndexKey, Backend>&, const Moves&) {}
  /// The load has landed, nothing has read it yet.
  virtual void after_load(Tiers<IndexKey, Backend>&, const Moves&) {}
  /// A backup has landed, its device pages have not been given up yet.
  virtual void after_backup(Tiers<IndexKey, Backend>&, const Moves&) {}
  /// A step has finished.
  virtual void after_step(Tiers<IndexKey, Backend>&) {}
  /// Kernels read without waiting, and loads land only after the step.
  virtual bool skips_gate() const { return false; }
};

}  // namespace engine
