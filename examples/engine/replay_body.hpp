// SPDX-License-Identifier: Apache-2.0
#pragma once

// The body of replay(); included by the translation units that instantiate it.

#include "hand_made_mirror.hpp"
#include "inject.hpp"
#include "replay.hpp"
#include "scheduler.hpp"

namespace engine {

template <class IndexKey>
kvire::Result<Replay> replay(const ReplaySettings& settings, const Model& model, const std::vector<Request>& requests, const ProgressCall& progress) {
  if (settings.cuda) return replay_on_cuda<IndexKey>(settings, model, requests, progress);
  if (settings.captured) return kvire::Error{kvire::ErrorCode::invalid_argument, "--captured needs --backend cuda: the host has no graphs"};
  auto damage = settings.damage == Damage::hand_made_mirror ? std::make_unique<HandMadeMirror<IndexKey>>() : make_damage<IndexKey>(settings.damage);
  auto tiers = Tiers<IndexKey>::make(settings, std::move(damage));
  if (!tiers) return tiers.error();
  return Scheduler<IndexKey>(model, *tiers.value(), requests, settings).run(progress);
}

}  // namespace engine
