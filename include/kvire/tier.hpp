// SPDX-License-Identifier: Apache-2.0
#pragma once

/// What survives a request: the prefix cache and its eviction policies. Not part of kvire.hpp, since an engine with a cache of its own needs none of it.

#include <kvire/tier/policy.hpp>
#include <kvire/tier/prefix_cache.hpp>
