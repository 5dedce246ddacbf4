// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include <kvire/preset/deepseek_v4.hpp>

// From the words of a reference file to a compiled policy.

namespace kvire_test {

template <class P>
struct Policy {
  using type = P;
};

template <int Tokens, int Dim, class F>
bool with_key_policy(const std::string& policy, F&& f) {
  if (policy == "fp8") return f(Policy<kvire::Fp8WithScale<Tokens, Dim>>{}), true;
  if (policy == "bf16") return f(Policy<kvire::Bf16Contiguous<Tokens, Dim>>{}), true;
  if (policy == "fp4") return f(Policy<kvire::Fp4WithScale<Tokens, Dim>>{}), true;
  return false;
}

template <int Tokens, class F>
bool with_dim(const std::string& policy, int dim, F&& f) {
  if (policy == "latent") return dim == 512 ? (f(Policy<kvire::preset::deepseek_v4::Latent<Tokens>>{}), true) : false;
  if (dim == 64) return with_key_policy<Tokens, 64>(policy, f);
  if (dim == 128) return with_key_policy<Tokens, 128>(policy, f);
  if (dim == 512) return with_key_policy<Tokens, 512>(policy, f);
  return false;
}

/// Calls f(Policy<P>{}) for the policy that "fp8", "bf16", "fp4" or "latent" names with pages of 2, 16, 32, 64 or 256 tokens of 64, 128 or
/// 512 elements. False if there is none.
template <class F>
bool with_policy(const std::string& policy, int tokens, int dim, F&& f) {
  if (tokens == 2) return with_dim<2>(policy, dim, f);
  if (tokens == 16) return with_dim<16>(policy, dim, f);
  if (tokens == 32) return with_dim<32>(policy, dim, f);
  if (tokens == 64) return with_dim<64>(policy, dim, f);
  if (tokens == 256) return with_dim<256>(policy, dim, f);
  return false;
}

}  // namespace kvire_test
