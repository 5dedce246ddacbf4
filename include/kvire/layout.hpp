// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The cheap door: policies, proofs, fingerprints, bundles and model presets for compile-time checks. No container, no thread, no CUDA.

#include <kvire/layout/arrangement.hpp>
#include <kvire/layout/bundle.hpp>
#include <kvire/layout/describe.hpp>
#include <kvire/layout/policies.hpp>
#include <kvire/preset/deepseek_v3_2.hpp>
#include <kvire/preset/deepseek_v4.hpp>
#include <kvire/preset/deepseek_v4_1.hpp>
