// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/layout/require.hpp>

KVIRE_NAMESPACE_BEGIN

/// Index keys as e4m3 values with one f32 scale per `Block` elements; planar: all values of the page, then all scales.
/// The format of SGLang's and DeepGEMM's fp8 index-K cache.
template <int Tokens, int Dim, int Block = Dim, class Meaning = content::Plain>
struct Fp8WithScale : PageLayout<Tokens, 1, Plane<Field<role::Value, Element::e4m3, Dim>>, Plane<Field<role::Scale, Element::f32, Dim / Block>>> {
  using Scaling = ScaleRule<role::Value, Block>;
  using Content = Meaning;
  static constexpr const char* name = "Fp8WithScale";
};

/// The same numbers with each token's scale behind its values. Same page size, other bytes: the fingerprint tells them apart.
template <int Tokens, int Dim, int Block = Dim, class Meaning = content::Plain>
struct Fp8WithScaleInterleaved
    : PageLayout<Tokens, 1, Plane<Field<role::Value, Element::e4m3, Dim>, Field<role::Scale, Element::f32, Dim / Block>>> {
  using Scaling = ScaleRule<role::Value, Block>;
  using Content = Meaning;
  static constexpr const char* name = "Fp8WithScaleInterleaved";
};

/// Index keys as bf16, nothing else.
template <int Tokens, int Dim, class Meaning = content::Plain>
struct Bf16Contiguous : PageLayout<Tokens, 1, Plane<Field<role::Value, Element::bf16, Dim>>> {
  using Content = Meaning;
  static constexpr const char* name = "Bf16Contiguous";
};

/// Index keys as packed e2m1 with one ue8m0 scale per `Block` elements; planar.
template <int Tokens, int Dim, int Block = 32, class Meaning = content::Plain>
struct Fp4WithScale : PageLayout<Tokens, 1, Plane<Field<role::Value, Element::e2m1, Dim>>, Plane<Field<role::Scale, Element::ue8m0, Dim / Block>>> {
  using Scaling = ScaleRule<role::Value, Block>;
  using Content = Meaning;
  static constexpr const char* name = "Fp4WithScale";
};

/// fp32 rows, `Rows` a page: compressor-state rings.
template <int Rows, int Width, class Meaning = content::CompressorState>
struct F32Rows : PageLayout<Rows, 1, Plane<Field<role::State, Element::f32, Width>>> {
  using Content = Meaning;
  static constexpr const char* name = "F32Rows";
};

/// Plain attention: keys and values of all heads, in two planes.
template <int Tokens, int Heads, int HeadDim, Element E = Element::bf16, class Meaning = content::Plain>
struct KvPages : PageLayout<Tokens, 1, Plane<Field<role::K, E, Heads * HeadDim>>, Plane<Field<role::V, E, Heads * HeadDim>>> {
  using Content = Meaning;
  static constexpr const char* name = "KvPages";
};

KVIRE_NAMESPACE_END
