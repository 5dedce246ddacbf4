// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <cstdio>
#include <limits>
#include <string>

#include <kvire/base/config.hpp>

KVIRE_NAMESPACE_BEGIN

namespace detail {

/// The first integer in a file after an optional key ("MemAvailable:"), or `otherwise`.
inline std::int64_t read_number(const std::string& path, const std::string& key, std::int64_t otherwise) {
  std::FILE* file = std::fopen(path.c_str(), "r");
  if (file == nullptr) return otherwise;
  std::int64_t found = otherwise;
  char line[256];
  while (std::fgets(line, sizeof line, file) != nullptr) {
    const char* at = line;
    const char* k = key.c_str();
    while (*k != '\0' && *at == *k) ++at, ++k;
    if (*k != '\0') continue;
    long long n = 0;
    if (std::sscanf(at, "%lld", &n) == 1) found = n;
    break;
  }
  std::fclose(file);
  return found;
}

// What the system keeps of files counts as available everywhere: it makes room when memory is touched.

/// `available_memory` of a system whose files lie under `root`.
inline std::int64_t available_memory_under(const std::string& root) {
  std::int64_t least = std::numeric_limits<std::int64_t>::max();
  const std::int64_t kib = read_number(root + "/proc/meminfo", "MemAvailable:", -1);
  if (kib >= 0) least = kib * 1024;
  const struct {
    const char* folder;
    const char* limit;
    const char* used;
    const char* all;  // before the names of memory.stat: those of the groups below are in there, too
  } groups[] = {{"/sys/fs/cgroup/", "memory.max", "memory.current", ""}, {"/sys/fs/cgroup/memory/", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"}};
  for (const auto& group : groups) {
    const std::string folder = root + group.folder;
    const auto files = [&](const char* kind) { return read_number(folder + "memory.stat", std::string(group.all) + kind, 0); };
    const std::int64_t limit = read_number(folder + group.limit, "", -1);  // "max" is no number: no limit
    const std::int64_t used = read_number(folder + group.used, "", 0) - files("inactive_file ") - files("active_file ");
    if (limit < 0) continue;
    const std::int64_t left = used < 0 ? limit : limit > used ? limit - used : 0;
    least = left < least ? left : least;
  }
  return least;
}

/// Bytes of a memory node (NUMA); -1 where they cannot be read.
inline std::int64_t available_on_node(int node, const std::string& root = "") {
  const std::string name = std::to_string(node);
  const auto kib = [&](const char* kind, std::int64_t otherwise) {
    return read_number(root + "/sys/devices/system/node/node" + name + "/meminfo", "Node " + name + " " + kind + ":", otherwise);
  };
  const std::int64_t free = kib("MemFree", -1);
  return free < 0 ? -1 : (free + kib("Inactive(file)", 0) + kib("Active(file)", 0)) * 1024;
}

}  // namespace detail

/// Bytes this process may still touch: the least of the machine's available memory and what its control group leaves (versions 2 and 1).
/// The largest integer where none of these can be read. An estimate: other processes move it at any time.
inline std::int64_t available_memory() { return detail::available_memory_under(""); }

KVIRE_NAMESPACE_END
