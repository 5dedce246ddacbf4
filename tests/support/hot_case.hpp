// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <random>
#include <vector>

// What a hot set has to do, said again without its data structures; and selections to do it with. For both backends.

namespace kvire_test {

/// The slots of one row and layer. `place` follows the documented rule literally.
class HotModel {
 public:
  explicit HotModel(std::int64_t slots) : held_(static_cast<std::size_t>(slots), -1), used_(static_cast<std::size_t>(slots), 0) {}

  std::int64_t hits = 0, misses = 0;
  std::vector<std::int64_t> missed = {};  ///< of the last call, in order

  /// Slot within the row of each listed token; -1 for those that `there` refuses and that are not held.
  template <class There>
  std::vector<std::int64_t> place(const std::vector<std::int32_t>& list, There&& there) {
    ++clock_;
    missed.clear();
    for (const std::int32_t token : list) {
      const auto at = std::find(held_.begin(), held_.end(), token);
      if (token < 0) continue;
      if (at != held_.end()) {
        auto& used = used_[static_cast<std::size_t>(at - held_.begin())];
        hits += used != clock_;
        used = clock_;
      } else if (there(token) && std::find(missed.begin(), missed.end(), token) == missed.end()) {
        missed.push_back(token);
      }
    }
    misses += static_cast<std::int64_t>(missed.size());
    std::vector<std::size_t> oldest;
    for (std::size_t s = 0; s < held_.size(); ++s) {
      if (used_[s] != clock_) oldest.push_back(s);
    }
    std::stable_sort(oldest.begin(), oldest.end(), [this](std::size_t a, std::size_t b) { return used_[a] < used_[b]; });
    oldest.resize(missed.size());
    std::sort(oldest.begin(), oldest.end());
    for (std::size_t i = 0; i < missed.size(); ++i) {
      held_[oldest[i]] = missed[i];
      used_[oldest[i]] = clock_;
    }
    std::vector<std::int64_t> slots;
    for (const std::int32_t token : list) {
      const auto at = std::find(held_.begin(), held_.end(), token);
      slots.push_back(token >= 0 && at != held_.end() ? at - held_.begin() : -1);
    }
    return slots;
  }

 private:
  std::vector<std::int64_t> held_;
  std::vector<std::int64_t> used_;
  std::int64_t clock_ = 0;
};

/// A list of k tokens below `tokens`: mostly those of a window that moves, so that many hit; some twice, some -1.
inline std::vector<std::int32_t> selection(std::mt19937& random, int k, int tokens, int step) {
  std::vector<std::int32_t> list;
  for (int i = 0; i < k; ++i) {
    const auto r = random();
    if (r % 16 == 0) {
      list.push_back(-1);
    } else if (r % 16 == 1 && !list.empty()) {
      list.push_back(list[random() % list.size()]);
    } else if (r % 16 < 5) {
      list.push_back(static_cast<std::int32_t>(random() % static_cast<unsigned>(tokens)));
    } else {
      list.push_back(static_cast<std::int32_t>((static_cast<unsigned>(step) * static_cast<unsigned>(k) / 8 + random() % static_cast<unsigned>(2 * k)) % static_cast<unsigned>(tokens)));
    }
  }
  return list;
}

}  // namespace kvire_test
