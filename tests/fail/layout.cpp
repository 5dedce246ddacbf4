// SPDX-License-Identifier: Apache-2.0
// Layouts, bundles and readers that must not compile.
#include <kvire/layout.hpp>
#include <kvire/layout/budget.hpp>
#include <kvire/layout/reader.hpp>

using namespace kvire;

using Good = Fp8WithScale<64, 128>;
static_assert(require_layout<Good>());

struct BulkReader {
  static constexpr ReaderNeeds needs{512, 16, 32, 128};
};
static_assert(require_reader<Bf16Contiguous<64, 128>, BulkReader>());

struct Schedule {
  static constexpr int layers = 2;
  static constexpr int ratio(int) { return 1; }
};
struct Latent : CacheEntry<Bf16Contiguous<64, 512>, space::Full, Tokens<1>> {
  static constexpr const char* name = "latent";
};
struct IndexK : CacheEntry<Good, space::Full, Tokens<1>> {
  static constexpr const char* name = "index_k";
};
static_assert(CacheBundle<Schedule, Latent, IndexK>::require());

#if KVIRE_FAIL == 1  // expect: layout.not-a-policy
struct Value {
  int rows = 64;
};
static_assert(require_layout<Value>());
#elif KVIRE_FAIL == 2  // expect: layout.scale-count
// 96 elements in blocks of 64 leave 32 without a scale.
static_assert(require_layout<Fp8WithScale<64, 96, 64>>());
#elif KVIRE_FAIL == 3  // expect: layout.align
// A scale behind 130 one-byte values.
struct P : PageLayout<64, 1, Plane<Field<role::Value, Element::e4m3, 130>, Field<role::Scale, Element::f32, 1>>> {
  using Scaling = ScaleRule<role::Value, 130>;
};
static_assert(require_layout<P>());
#elif KVIRE_FAIL == 4  // expect: layout.whole-bytes
struct P : PageLayout<64, 1, Plane<Field<role::Value, Element::e2m1, 5>>> {};
static_assert(require_layout<P>());
#elif KVIRE_FAIL == 5  // expect: layout.unique-roles
struct P : PageLayout<64, 1, Plane<Field<role::Value, Element::e4m3, 4>, Field<role::Value, Element::e4m3, 4>>> {};
static_assert(require_layout<P>());
#elif KVIRE_FAIL == 6  // expect: layout.positive
static_assert(require_layout<Bf16Contiguous<0, 128>>());
#elif KVIRE_FAIL == 7  // expect: layout.cover
// A hand-made table whose second plane starts inside the first.
constexpr auto overlapping() {
  auto table = Good::layout::table;
  table.plane_offset[1] -= 4;
  return table;
}
struct P : Good {
  static constexpr auto table = overlapping();
};
static_assert(require_layout<P>());
#elif KVIRE_FAIL == 8  // expect: layout.no-such-field
constexpr auto offset = Bf16Contiguous<64, 128>::offset<role::Scale>(0);
#elif KVIRE_FAIL == 9  // expect: layout.raw-tokens-per-page
struct Half : CacheEntry<Fp8WithScale<32, 128>, space::Full, Tokens<1>> {
  static constexpr const char* name = "half";
};
static_assert(CacheBundle<Schedule, Latent, Half>::require());
#elif KVIRE_FAIL == 10  // expect: layout.entry-names
struct Again : CacheEntry<Good, space::Full, Tokens<1>> {
  static constexpr const char* name = "latent";
};
static_assert(CacheBundle<Schedule, Latent, Again>::require());
#elif KVIRE_FAIL == 11  // expect: layout.no-such-entry
constexpr int index = CacheBundle<Schedule, Latent>::index_of<IndexK>();
#elif KVIRE_FAIL == 12  // expect: layout.not-tokens
struct States : CacheEntry<F32Rows<8, 16>, space::Window, Ring> {
  static constexpr const char* name = "states";
};
constexpr auto rows = States::cached(RawTokens(8));
#elif KVIRE_FAIL == 13  // expect: layout.reader-multiple
static_assert(require_reader<Fp4WithScale<64, 128>, BulkReader>());
#elif KVIRE_FAIL == 14  // expect: layout.reader-vector
struct Vector16 {
  static constexpr ReaderNeeds needs{0, 16, 0, 0};
};
static_assert(require_reader<Fp8WithScale<64, 128>, Vector16>());
#elif KVIRE_FAIL == 15  // expect: layout.reader-tokens
static_assert(require_reader<Bf16Contiguous<256, 128>, BulkReader>());
#elif KVIRE_FAIL == 16  // expect: layout.scale-rule
// The scales would stay zero: no rule fills them.
struct P : PageLayout<64, 1, Plane<Field<role::Value, Element::e4m3, 128>>, Plane<Field<role::Scale, Element::f32, 1>>> {};
static_assert(require_layout<P>());
#elif KVIRE_FAIL == 17  // expect: layout.scale-rule
// A rule for a role that no field has.
struct P : PageLayout<64, 1, Plane<Field<role::Value, Element::e4m3, 128>>> {
  using Scaling = ScaleRule<role::Nope, 128>;
};
static_assert(require_layout<P>());
#elif KVIRE_FAIL == 18  // expect: layout.scale-rule
// A rule that says which block but not how: as good as none.
struct P : PageLayout<64, 1, Plane<Field<role::Value, Element::e4m3, 128>>, Plane<Field<role::Scale, Element::f32, 1>>> {
  using Scaling = ScaleRule<role::Value, 128, ScaleFormula::none>;
};
static_assert(require_layout<P>());
#elif KVIRE_FAIL == 19  // expect: layout.cover
// A page made larger by hand: offsets and vector widths still go by the table's.
struct P : Good {
  static constexpr kstd::int64_t page_bytes = Good::page_bytes + 8;
};
static_assert(require_layout<P>());
#elif KVIRE_FAIL == 20  // expect: layout.positive
struct P : PageLayout<64, 0, Plane<Field<role::Value, Element::bf16, 128>>> {};
static_assert(require_layout<P>());
#elif KVIRE_FAIL == 21  // expect: layout.entry-rows
// A ratio that the schedule never has: the model would run without index keys.
struct Sparse : CacheEntry<Good, space::Full, Tokens<1>, LayersOfRatio<Schedule, 4>> {
  static constexpr const char* name = "sparse";
};
static_assert(CacheBundle<Schedule, Latent, Sparse>::require());
#elif KVIRE_FAIL == 22  // expect: layout.entry-rows
struct PerNothing : CacheEntry<Good, space::Window, Tokens<0>> {
  static constexpr const char* name = "per_nothing";
};
static_assert(CacheBundle<Schedule, Latent, PerNothing>::require());
#elif KVIRE_FAIL == 23  // expect: layout.space-names
// Page ids of its own, under the name of another space.
struct Full {
  static constexpr const char* name = "full";
};
struct Apart : CacheEntry<Good, Full, Tokens<1>> {
  static constexpr const char* name = "apart";
};
static_assert(CacheBundle<Schedule, Latent, Apart>::require());
#elif KVIRE_FAIL == 24  // expect: layout.no-such-space
constexpr auto pages = BundlePages<CacheBundle<Schedule, Latent>>{}.of<space::Window>();
#endif
