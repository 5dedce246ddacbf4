// SPDX-License-Identifier: Apache-2.0
#include "replay_body.hpp"

template kvire::Result<engine::Replay> engine::replay<kvire::preset::deepseek_v4::IndexKeyBf16>(const ReplaySettings&, const Model&, const std::vector<Request>&,
                                                                                         const ProgressCall&);
