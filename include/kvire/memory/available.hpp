// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
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

/// The control group of the process, from the root of its hierarchy on: of version 2, or of the one of version 1 that counts memory. Empty for the root itself,
/// and where it cannot be read.
inline std::string control_group(const std::string& root, bool version_2) {
  std::FILE* file = std::fopen((root + "/proc/self/cgroup").c_str(), "r");
  if (file == nullptr) return {};
  std::string text;
  for (int c = std::fgetc(file); c != EOF; c = std::fgetc(file)) text.push_back(static_cast<char>(c));
  std::fclose(file);
  // A line is "number:controllers:path"; version 2 has no controllers.
  for (std::size_t at = 0, end = 0; at < text.size(); at = end + 1) {
    end = text.find('\n', at) == std::string::npos ? text.size() : text.find('\n', at);
    const std::string line = text.substr(at, end - at);
    const std::size_t first = line.find(':');
    const std::size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    if (version_2 ? controllers != ",," : controllers.find(",memory,") == std::string::npos) continue;
    const std::string path = line.substr(second + 1);
    return path == "/" ? std::string() : path;
  }
  return {};
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
  } versions[] = {{"/sys/fs/cgroup", "/memory.max", "/memory.current", ""}, {"/sys/fs/cgroup/memory", "/memory.limit_in_bytes", "/memory.usage_in_bytes", "total_"}};
  for (const auto& version : versions) {
    // Its own group and all above it may have a limit. In a container the path may be that of the host, of which the root alone is there.
    for (std::string group = control_group(root, *version.all == '\0'), above;; group = above) {
      const std::string folder = root + version.folder + group;
      const auto files = [&](const char* kind) { return read_number(folder + "/memory.stat", std::string(version.all) + kind, 0); };
      const std::int64_t limit = read_number(folder + version.limit, "", -1);  // "max" is no number: no limit
      const std::int64_t used = read_number(folder + version.used, "", 0) - files("inactive_file ") - files("active_file ");
      const std::int64_t left = used < 0 ? limit : limit > used ? limit - used : 0;
      if (limit >= 0 && left < least) least = left;
      if (group.empty()) break;
      above = group.substr(0, group.rfind('/') == std::string::npos ? 0 : group.rfind('/'));
    }
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

/// Bytes this process may still touch: the least of the machine's available memory and what its control group, and those above it, leave (versions 2 and 1).
/// The largest integer where none of these can be read. An estimate: other processes move it at any time.
inline std::int64_t available_memory() { return detail::available_memory_under(""); }

KVIRE_NAMESPACE_END
