// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include <kvire/base/result.hpp>
#include <kvire/kernel/choice.hpp>
#include <kvire/preset/deepseek_v4.hpp>
#include <kvire/tier/cache_event.hpp>

#include "model.hpp"
#include "row_log.hpp"
#include "stats.hpp"

namespace engine {

/// Damages below the typed surface. They exist to prove that the replay would see them.
enum class Damage {
  none,
  skip_gate,         ///< kernels read before the layer's load has landed
  half_page,         ///< the second half of each page is not loaded
  drop_scale,        ///< scales are not loaded
  drop_index,        ///< the index keys are not loaded
  early_reuse,       ///< device pages are reused while their backup still reads them
  wrong_layer,       ///< each layer gets the next layer's pages
  stale_state,       ///< compressor states are not loaded
  hand_made_mirror,  ///< index keys go through a mirror that restates the fp8 formula over raw bytes
};

/// One replay of requests: how large the caches are and how the work is cut. None of this may change a single bit of an answer.
struct ReplaySettings {
  int layers = 5;
  int top_k = 64;
  std::int64_t device_pages = 0;  ///< page ids of the full and of the window space, the null page included
  std::int64_t host_pages = 0;    ///< the same on the host; 0: no host tier
  std::string file_folder = {};   ///< of the file tier; empty: none
  std::int64_t file_bytes = 0;    ///< its budget
  std::string model_name = {};    ///< what must agree before a page of a file may be used
  int sessions = 1;
  int chunk = 256;      ///< prompt rows of one step
  int pause_every = 0;  ///< decoded tokens after which a session pauses; 0: never
  int pause_steps = 6;
  int hot_slots = 0;    ///< of a session and layer, through which decoding rows read C4 latents; 0: they read pages
  bool reuse = true;  ///< of prefixes
  Damage damage = Damage::none;
  bool cuda = false;    ///< pools, transfers and the whole forward pass on the GPU
  kvire::KernelChoice kernel = kvire::KernelChoice::automatic;  ///< on the GPU
  bool captured = false;  ///< on the GPU: sessions that decode a token do it in a replayed CUDA graph
  std::function<void(const kvire::CacheEvent&)> follow = {};  ///< is told what the cache does, and for which request
  std::shared_ptr<RowLog> log = {};  ///< notes what every row went through
  std::shared_ptr<const std::vector<std::vector<int>>> forced = {};  ///< tokens that each request is taken to have decoded, whatever its logits say
  std::optional<unsigned char> null_page_fill;  ///< what page 0 of every pool holds
};

using ProgressCall = std::function<void(std::int64_t requests_done)>;

/// Runs the requests with index keys of the given policy. Instantiated once a policy, in a translation unit of its own.
template <class IndexKey>
kvire::Result<Replay> replay(const ReplaySettings& settings, const Model& model, const std::vector<Request>& requests, const ProgressCall& progress = {});

/// The same on the GPU. Error unsupported: the engine was built without CUDA, or a damage is asked for.
template <class IndexKey>
kvire::Result<Replay> replay_on_cuda(const ReplaySettings& settings, const Model& model, const std::vector<Request>& requests, const ProgressCall& progress);

extern template kvire::Result<Replay> replay<kvire::preset::deepseek_v4::IndexKeyFp8>(const ReplaySettings&, const Model&, const std::vector<Request>&,
                                                                                      const ProgressCall&);
extern template kvire::Result<Replay> replay<kvire::preset::deepseek_v4::IndexKeyBf16>(const ReplaySettings&, const Model&, const std::vector<Request>&,
                                                                                       const ProgressCall&);
extern template kvire::Result<Replay> replay<kvire::preset::deepseek_v4::IndexKeyFp4>(const ReplaySettings&, const Model&, const std::vector<Request>&,
                                                                                      const ProgressCall&);

}  // namespace engine
