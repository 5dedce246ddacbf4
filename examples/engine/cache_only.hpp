// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nlohmann/json.hpp>

#include <kvire/base/result.hpp>

#include "options.hpp"

namespace engine {

/// The trace through the prefix cache alone, in whole blocks of 512 prompt tokens, without a model: hits with room for everything, hits of each
/// eviction policy with room for a part beside Belady's choice, and lookups per second on one core. Prints a table; returns what it says.
kvire::Result<nlohmann::ordered_json> cache_only(const Options& options);

}  // namespace engine
