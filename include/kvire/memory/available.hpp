// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <cstdio>
#include <limits>

#include <kvire/base/config.hpp>

KVIRE_NAMESPACE_BEGIN

namespace detail {

/// The first integer in a file after an optional key ("MemAvailable:"), or `otherwise`.
inline std::int64_t read_number(const char* path, const char* key, std::int64_t otherwise) {
  std::FILE* file = std::fopen(path, "r");
  if (file == nullptr) return otherwise;
  std::int64_t found = otherwise;
  char line[256];
  while (std::fgets(line, sizeof line, file) != nullptr) {
    const char* at = line;
    const char* k = key;
    while (*k != '\0' && *at == *k) ++at, ++k;
    if (*k != '\0') continue;
    long long n = 0;
    if (std::sscanf(at, "%lld", &n) == 1) found = n;
    break;
  }
  std::fclose(file);
  return found;
}

}  // namespace detail

/// Bytes this process may still touch: the least of the machine's available memory and what its control group leaves (versions 2 and 1).
/// The largest integer where none of these can be read. An estimate: other processes move it at any time.
inline std::int64_t available_memory() {
  constexpr std::int64_t unknown = std::numeric_limits<std::int64_t>::max();
  std::int64_t least = unknown;
  const std::int64_t kib = detail::read_number("/proc/meminfo", "MemAvailable:", -1);
  if (kib >= 0) least = kib * 1024;
  const struct {
    const char* limit;
    const char* used;
  } groups[] = {{"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"},
                {"/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"}};
  for (const auto& group : groups) {
    const std::int64_t limit = detail::read_number(group.limit, "", -1);  // "max" is no number: no limit
    const std::int64_t used = detail::read_number(group.used, "", 0);
    if (limit >= 0 && limit - used < least) least = limit > used ? limit - used : 0;
  }
  return least;
}

KVIRE_NAMESPACE_END
