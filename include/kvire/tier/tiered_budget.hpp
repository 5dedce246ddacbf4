// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

#include <kvire/base/result.hpp>
#include <kvire/layout/budget.hpp>

KVIRE_NAMESPACE_BEGIN

/// Pages of every space for one tier, so that all its pools and workspaces together stay within one budget in bytes. `workspaces`: what else is kept
/// in that memory (kernels' scratch, staging). `ratios` as in pages_for. Errors, with the numbers:
/// invalid_argument for workspaces below 0, and layers that the model has not; exhausted if not one page of every space fits.
template <class Bundle>
Result<BundlePages<Bundle>> pages_within(Bytes budget, Bytes workspaces, const PageRatio (&ratios)[Bundle::space_count], int layers = Bundle::layers) {
  const auto bad = [](const char* what, std::int64_t value, const std::string& bound) {
    return Error{ErrorCode::invalid_argument, std::string("tier budget: ") + what + " is " + std::to_string(value) + "; " + bound};
  };
  if (workspaces.count < 0) return bad("workspaces", workspaces.count, "it counts the bytes that are kept for other things");
  if (layers < 1 || layers > Bundle::layers) return bad("layers", layers, "the model has " + std::to_string(Bundle::layers));
  const BundlePages<Bundle> pages = pages_in_budget<Bundle>(budget - workspaces, ratios, layers);
  // The null page and one to hand out.
  for (const auto count : pages.count) {
    if (count >= 2) continue;
    PageRatio two[Bundle::space_count];
    for (int s = 0; s < Bundle::space_count; ++s) two[s] = {.numerator = ratios[s].numerator, .denominator = ratios[s].denominator, .minimum = max_of<kstd::int64_t>(2, ratios[s].minimum)};
    return Error{ErrorCode::exhausted, "a budget of " + std::to_string(budget.count) + " bytes, " + std::to_string(workspaces.count) +
                                           " of them for workspaces, does not hold the " + std::to_string(pages_for<Bundle>(2, two).bytes(layers).count) +
                                           " bytes of the fewest pages of every space"};
  }
  return pages;
}

KVIRE_NAMESPACE_END
