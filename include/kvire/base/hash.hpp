// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/base/std.hpp>

KVIRE_NAMESPACE_BEGIN

/// First 16 bytes of a SHA-256, as two big-endian halves. `high` alone is the 64-bit fingerprint.
struct Hash128 {
  kstd::uint64_t high = 0;
  kstd::uint64_t low = 0;
  friend constexpr bool operator==(const Hash128& a, const Hash128& b) { return a.high == b.high && a.low == b.low; }
  friend constexpr bool operator!=(const Hash128& a, const Hash128& b) { return !(a == b); }
};

namespace detail {

struct Sha256 {
  kstd::uint32_t state[8] = {0x6a09e667u, 0xbb67ae85u, 0x3c6ef372u, 0xa54ff53au, 0x510e527fu, 0x9b05688cu, 0x1f83d9abu, 0x5be0cd19u};

  constexpr void block(const unsigned char* p) {
    constexpr kstd::uint32_t k[64] = {
        0x428a2f98u, 0x71374491u, 0xb5c0fbcfu, 0xe9b5dba5u, 0x3956c25bu, 0x59f111f1u, 0x923f82a4u, 0xab1c5ed5u, 0xd807aa98u, 0x12835b01u, 0x243185beu,
        0x550c7dc3u, 0x72be5d74u, 0x80deb1feu, 0x9bdc06a7u, 0xc19bf174u, 0xe49b69c1u, 0xefbe4786u, 0x0fc19dc6u, 0x240ca1ccu, 0x2de92c6fu, 0x4a7484aau,
        0x5cb0a9dcu, 0x76f988dau, 0x983e5152u, 0xa831c66du, 0xb00327c8u, 0xbf597fc7u, 0xc6e00bf3u, 0xd5a79147u, 0x06ca6351u, 0x14292967u, 0x27b70a85u,
        0x2e1b2138u, 0x4d2c6dfcu, 0x53380d13u, 0x650a7354u, 0x766a0abbu, 0x81c2c92eu, 0x92722c85u, 0xa2bfe8a1u, 0xa81a664bu, 0xc24b8b70u, 0xc76c51a3u,
        0xd192e819u, 0xd6990624u, 0xf40e3585u, 0x106aa070u, 0x19a4c116u, 0x1e376c08u, 0x2748774cu, 0x34b0bcb5u, 0x391c0cb3u, 0x4ed8aa4au, 0x5b9cca4fu,
        0x682e6ff3u, 0x748f82eeu, 0x78a5636fu, 0x84c87814u, 0x8cc70208u, 0x90befffau, 0xa4506cebu, 0xbef9a3f7u, 0xc67178f2u};
    kstd::uint32_t w[64] = {};
    for (int i = 0; i < 16; ++i) {
      for (int b = 0; b < 4; ++b) w[i] = (w[i] << 8) | p[4 * i + b];
    }
    for (int i = 16; i < 64; ++i) {
      const kstd::uint32_t s0 = rotr(w[i - 15], 7) ^ rotr(w[i - 15], 18) ^ (w[i - 15] >> 3);
      const kstd::uint32_t s1 = rotr(w[i - 2], 17) ^ rotr(w[i - 2], 19) ^ (w[i - 2] >> 10);
      w[i] = w[i - 16] + s0 + w[i - 7] + s1;
    }
    // Eight names, not an array that moves up in each round: compilers make that a call.
    kstd::uint32_t a = state[0], b = state[1], c = state[2], d = state[3], e = state[4], f = state[5], g = state[6], h = state[7];
    for (int i = 0; i < 64; ++i) {
      const kstd::uint32_t t1 = h + (rotr(e, 6) ^ rotr(e, 11) ^ rotr(e, 25)) + ((e & f) ^ (~e & g)) + k[i] + w[i];
      const kstd::uint32_t t2 = (rotr(a, 2) ^ rotr(a, 13) ^ rotr(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
      h = g, g = f, f = e, e = d + t1;
      d = c, c = b, b = a, a = t1 + t2;
    }
    const kstd::uint32_t ended[8] = {a, b, c, d, e, f, g, h};
    for (int j = 0; j < 8; ++j) state[j] += ended[j];
  }
  static constexpr kstd::uint32_t rotr(kstd::uint32_t x, int n) { return (x >> n) | (x << (32 - n)); }
};

}  // namespace detail

/// First half of the SHA-256 (FIPS 180-4) of `size` bytes of text. Standard on purpose: `printf %s "$text" | sha256sum` gives the same digits,
/// so a fingerprint can be checked by anyone, in any language.
constexpr Hash128 hash_text(const char* text, int size) {
  detail::Sha256 sha;
  unsigned char block[64] = {};
  int done = 0;
  for (; size - done >= 64; done += 64) {
    for (int i = 0; i < 64; ++i) block[i] = static_cast<unsigned char>(text[done + i]);
    sha.block(block);
  }
  const int rest = size - done;
  for (int i = 0; i < 64; ++i) block[i] = i < rest ? static_cast<unsigned char>(text[done + i]) : static_cast<unsigned char>(i == rest ? 0x80 : 0);
  if (rest >= 56) {
    sha.block(block);
    for (int i = 0; i < 64; ++i) block[i] = 0;
  }
  const auto bit_count = static_cast<kstd::uint64_t>(size) * 8;
  for (int i = 0; i < 8; ++i) block[56 + i] = static_cast<unsigned char>(bit_count >> (56 - 8 * i));
  sha.block(block);
  return {(static_cast<kstd::uint64_t>(sha.state[0]) << 32) | sha.state[1], (static_cast<kstd::uint64_t>(sha.state[2]) << 32) | sha.state[3]};
}

KVIRE_NAMESPACE_END
