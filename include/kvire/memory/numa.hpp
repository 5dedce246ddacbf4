// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <string>

#include <kvire/base/result.hpp>
#include <kvire/memory/available.hpp>

KVIRE_NAMESPACE_BEGIN

/// The memory node (NUMA) that holds the byte at `p`, which must have been touched; -1 where the system does not say.
inline int memory_node(const void* p) {
#if defined(SYS_get_mempolicy)
  constexpr unsigned long node_of_address = 1UL | 2UL;  // MPOL_F_NODE | MPOL_F_ADDR
  int node = -1;
  if (::syscall(SYS_get_mempolicy, &node, nullptr, 0UL, p, node_of_address) != 0) return -1;
  return node;
#else
  (void)p;
  return -1;
#endif
}

namespace detail {

/// Makes fresh memory come from one memory node when it is touched; `p` and `bytes` at multiples of a page. -1: wherever who touches it runs. By system
/// calls, so that no library is needed. Errors: out_of_range for a node that this process may not use, with those that it may; exhausted, with the bytes that
/// the node has; unsupported where the system cannot be asked.
inline Status place_on_node(const std::string& resource, void* p, std::int64_t bytes, int node) {
  if (node == -1) return {};
  const std::string who = resource + ": memory node " + std::to_string(node);
#if defined(SYS_mbind) && defined(SYS_get_mempolicy)
  constexpr unsigned long nodes = 1024;  // as many as systems have
  constexpr unsigned long of_word = 8 * sizeof(unsigned long);
  unsigned long allowed[nodes / of_word] = {};
  constexpr unsigned long mems_allowed = 4;  // MPOL_F_MEMS_ALLOWED
  if (::syscall(SYS_get_mempolicy, nullptr, allowed, nodes, nullptr, mems_allowed) != 0) {
    return Error{ErrorCode::unsupported, who + " cannot be chosen here: " + std::strerror(errno)};
  }
  const auto may = [&](unsigned long n) { return n < nodes && (allowed[n / of_word] >> n % of_word & 1) != 0; };
  if (node < 0 || !may(static_cast<unsigned long>(node))) {
    std::string list;
    for (unsigned long n = 0; n < nodes; ++n) list += may(n) ? (list.empty() ? "" : ", ") + std::to_string(n) : std::string();
    return Error{ErrorCode::out_of_range, who + " is none of those that this process may use: " + list};
  }
  // A bound node does not overflow into another: who touches more than it has is killed instead of told.
  if (const std::int64_t available = available_on_node(node); available >= 0 && bytes > available) {
    return Error{ErrorCode::exhausted, who + ": " + std::to_string(bytes) + " bytes wanted, " + std::to_string(available) + " available"};
  }
  unsigned long chosen[nodes / of_word] = {};
  chosen[static_cast<unsigned long>(node) / of_word] = 1UL << static_cast<unsigned long>(node) % of_word;
  constexpr unsigned long bind = 2;  // MPOL_BIND
  if (::syscall(SYS_mbind, p, static_cast<unsigned long>(bytes), bind, chosen, nodes, 0UL) == 0) return {};
  return Error{ErrorCode::unsupported, who + " cannot be chosen here: " + std::strerror(errno)};
#else
  (void)p, (void)bytes;
  return Error{ErrorCode::unsupported, who + " cannot be chosen on this system"};
#endif
}

}  // namespace detail

KVIRE_NAMESPACE_END
