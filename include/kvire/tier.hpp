// SPDX-License-Identifier: Apache-2.0
#pragma once

/// What survives a request: the prefix cache, its eviction policies, the file tier, and the hot set of what lives on the host. Not part of kvire.hpp, since an engine with a cache of its own needs none of it.

#include <kvire/tier/file_tier.hpp>
#include <kvire/tier/hot_set.hpp>
#include <kvire/tier/policy.hpp>
#include <kvire/tier/prefix_cache.hpp>
#include <kvire/tier/tiered_budget.hpp>
#include <kvire/tier/tiered_cache.hpp>
