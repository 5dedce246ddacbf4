// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "safetensors.hpp"

// Reference vectors lie in the folder that KVIRE_GOLDEN_DIR names, by default in ../shared/golden beside the project. They are not part of
// it: where there are none, a golden test says so and passes.

namespace kvire_test {

inline std::string golden_dir() {
  const char* named = std::getenv("KVIRE_GOLDEN_DIR");
  if (named != nullptr && *named != '\0') return named;
#ifdef KVIRE_GOLDEN_DEFAULT
  return KVIRE_GOLDEN_DEFAULT;
#else
  return "../shared/golden";
#endif
}

/// Paths of the reference files whose name starts with `prefix`, sorted.
inline std::vector<std::string> golden_files(const std::string& prefix) {
  std::vector<std::string> paths;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(golden_dir(), error)) {
    const std::string name = entry.path().filename().string();
    if (name.rfind(prefix, 0) == 0 && entry.path().extension() == ".safetensors") paths.push_back(entry.path().string());
  }
  std::sort(paths.begin(), paths.end());
  return paths;
}

/// Calls test(file) for each reference file whose name starts with `prefix`; says so if there is none.
template <class F>
void for_each_golden(const std::string& prefix, F&& test) {
  const auto paths = golden_files(prefix);
  if (paths.empty()) MESSAGE("skipped: no " << prefix << "*.safetensors in " << golden_dir());
  for (const auto& path : paths) {
    CAPTURE(path);
    const Safetensors file = read_safetensors(path);
    CHECK(file.error == "");
    if (file.error.empty()) test(file);
  }
}

}  // namespace kvire_test
