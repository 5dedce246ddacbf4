// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/exec/backend.hpp>
#include <kvire/preset/deepseek_v4.hpp>
#include <kvire/transfer/bundle.hpp>

namespace engine {

template <class IndexKey, class Backend>
class Tiers;

/// Pages that one transfer moves, per page-id space; host page first.
template <class IndexKey>
using Moves = kvire::BundlePlan<kvire::preset::deepseek_v4::Flash<IndexKey>>;

/// Something that damages pages below the typed surface, at the moments when a real engine could. The compute stream is idle whenever one
/// of these is called.
template <class IndexKey, class Backend = kvire::Host>
class Tamper {
 public:
  virtual ~Tamper() = default;
  /// A load is about to be issued.
  virtual void before_load(Tiers<IndexKey, Backend>&, const Moves<IndexKey>&) {}
  /// The load has landed, nothing has read it yet.
  virtual void after_load(Tiers<IndexKey, Backend>&, const Moves<IndexKey>&) {}
  /// A backup has landed, its device pages have not been given up yet.
  virtual void after_backup(Tiers<IndexKey, Backend>&, const Moves<IndexKey>&) {}
  /// A step has finished.
  virtual void after_step(Tiers<IndexKey, Backend>&) {}
  /// Kernels read without waiting, and loads land only after the step.
  virtual bool skips_gate() const { return false; }
};

}  // namespace engine
