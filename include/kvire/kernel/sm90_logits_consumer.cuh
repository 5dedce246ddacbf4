// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/kernel/fp4_exact_logits.cuh>
#include <kvire/kernel/fp4_operand.cuh>
#include <kvire/kernel/sm90_logits_epilogue.cuh>
#include <kvire/kernel/sm90_logits_operand.cuh>
#include <kvire/kernel/sm90_logits_queries.cuh>

KVIRE_NAMESPACE_BEGIN

/// The consumer warpgroup: waits for the tiles of a share, multiplies each by the queries of its row, and hands the products to the epilogue.
namespace sm90::detail {

#if KVIRE_SM90A

/// All tiles of the share. `row`: whose queries are in shared memory. `unit`: of the CTA.
///
/// What counts here is the number of instructions: while an ordinary one reads its operands, the tensor cores do not read theirs, so the time of a
/// tile is that of its products and of everything else, one after the other, however many warps there are. Those of the half-rate pipe, and integer
/// products, count twice.
template <class P, class Plan, int Heads, class Shape>
struct Consumer : Epilogue<Plan, Shape> {
  using Base = Epilogue<Plan, Shape>;
  using typename Base::Sums;
  using Base::a, Base::any_rare_of_tile, Base::c, Base::few, Base::finish, Base::first, Base::kept, Base::lane, Base::local, Base::mine, Base::nans;
  using Base::next_n, Base::plain, Base::products, Base::replace_nans, Base::row, Base::rows, Base::seen_by, Base::shared, Base::take_row, Base::thread;
  using Base::tiles, Base::together;

  int unit;
  int key_at = keep(static_cast<int>(key_offset<Plan>(thread / 32, thread % 32)), thread);
  int scale_at = Plan::fp4 ? keep(first * Plan::scale_row + c * Plan::blocks / 4, thread) : 0;  // of its first key, in a tile
  // Of load_fp4_keys.
  kstd::uint32_t pick = Plan::fp4 ? static_cast<kstd::uint32_t>(keep(c % 2 != 0 ? 0x3C000000 : 0x3C00, thread)) : 0;
  kstd::uint32_t positive = Plan::fp4 && Plan::fp8 ? ptx::load_shared(shared + Plan::codes_at + (Plan::fp4_codes - 1) * 8) : 0;

  /// The queries of `row`, which are on their way or here, are this lane's next ones.
  KVIRE_DEVICE KVIRE_INLINE void await_queries() {
    for (;;) {
      ptx::mbarrier_wait(shared + Plan::query_full_at + rows.stage * 8, rows.parity);
      if (static_cast<int>(ptx::load_shared(shared + Plan::rows_at + rows.stage * 4)) == row) return;
      leave_queries();  // a wrong guess
    }
  }
  KVIRE_DEVICE KVIRE_INLINE void leave_queries() {
    ptx::mbarrier_arrive(shared + Plan::query_empty_at + rows.stage * 8);
    rows.advance();
  }
  /// This lane reads a stage no more. All arrive: that one lane may speak for its warp is more than racecheck follows, and it costs no time.
  KVIRE_DEVICE KVIRE_INLINE void release(int which) { ptx::mbarrier_arrive(shared + Plan::empty_at + which * 8); }
  /// One product of a tile, to the last. `keys`: its operand, in registers or in shared memory; `done` is called when nothing reads it any more. Known:
  /// which product, if `few`.
  template <int Known, class Keys, class Done>
  KVIRE_DEVICE KVIRE_INLINE void product_of(const Keys& keys, int product, const TilePlace& place, float scale, Done&& done) {
    Sums d;
    start_product<Plan>(d, keys, query_operand<Plan>(shared + Plan::queries_at + rows.stage * Plan::query_stage_bytes +
                                                      product * together * (Plan::swizzled ? Heads * Plan::query_width : Plan::query_bytes)));
    ptx::wgmma_wait<0>();
    if (product == products - 1) done();
    ptx::touch(d);
    finish<Known>(d, product, place, scale);
  }
  template <class Keys, class Done>
  KVIRE_DEVICE KVIRE_INLINE void products_of(const Keys& keys, const TilePlace& place, float scale, Done&& done) {
    if constexpr (few) {
      product_of<0>(keys, 0, place, scale, done);
      if constexpr (products == 2) product_of<1>(keys, 1, place, scale, done);
    } else {
#pragma unroll 1
      for (int product = 0; product < products; ++product) product_of<0>(keys, product, place, scale, done);
    }
  }
  /// KeepCandidates: before a tile; `other`: it is of another row, or there is none.
  KVIRE_DEVICE KVIRE_INLINE void make_room([[maybe_unused]] bool other) {
    if constexpr (Shape::candidates) {
      if (!other && !kept.full()) return;
      kept.flush(other, (static_cast<kstd::int64_t>(blockIdx.x) + row) * next_n, [&](int q) { return seen_by(q); });
    }
  }
  /// `count`: tiles of the share.
  KVIRE_DEVICE KVIRE_INLINE void run(int count) {
    run_tiles(count);
    if (mine() && nans != 0 && a.nan_logits != nullptr) atomicAdd(a.nan_logits, static_cast<unsigned long long>(nans));
  }

  KVIRE_DEVICE KVIRE_INLINE void run_tiles(int count) {
    bool begun = false;  // KeepCandidates: this CTA's part of the row
    constexpr int part = tile_tokens / Plan::pages_per_tile;  // tokens of a tile on one page
    if constexpr (Plan::swizzled) await_queries();
    take_row();
#pragma unroll 1
    for (; Shape::candidates || count > 0; --count) {
      const bool last = Shape::candidates && count == 0;
      Words4 meta{};
      if (!last) {
        ptx::mbarrier_wait(shared + Plan::full_at + tiles.stage * 8, tiles.parity);
        meta = ptx::load_shared4(shared + Plan::meta_at + tiles.stage * 16);
      }
      if (begun) make_room(last || static_cast<int>(meta.x) != row);
      if (last) return;
      if (static_cast<int>(meta.x) != row) {
        begun = false;
        row = static_cast<int>(meta.x);
        if constexpr (Plan::swizzled) {
          leave_queries();
          await_queries();
        } else {
          unit_barrier<most_units<Shape>>(unit, 1, group_threads);  // all warps are through with the old row's queries
          load_row<Plan, Heads>(a, row, shared, here(thread), [] {});
          unit_barrier<most_units<Shape>>(unit, 1, group_threads);
        }
        take_row();
      }
      if constexpr (Shape::candidates) {
        if (!begun) kept.begin(static_cast<int>(meta.y));
        begun = true;
        kept.next_tile();
      }
      TilePlace place{static_cast<int>(meta.y), meta.z, __uint_as_float(meta.w)};
      if constexpr (!plain) {  // of the token that this lane finishes
        place.token += local;
        place.position = Plan::pages_per_tile > 1 ? (local < part ? meta.z : meta.w) + local % part : meta.z + local;
      }
      [[maybe_unused]] kstd::uint32_t depths = 0;  // fp4
      const int used = tiles.stage;
      tiles.advance();
      if constexpr (Plan::swizzled) {
        float scale = 1;
        if constexpr (Plan::scaled) scale = __uint_as_float(ptx::load_shared(shared + Plan::scales_at + used * Plan::scale_bytes + local * 4));
        const ptx::Descriptor tile = ptx::swizzled_descriptor<Plan::width, 8 * Plan::key_row>(shared + Plan::stages_at + used * Plan::stage_bytes);
        products_of(tile, place, scale, [&] {
          release(used);
          // A branch ends the basic block, within which the assembler would move the release behind the sums.
          asm volatile("{\n.reg .pred p;\nsetp.ge.s32 p, %0, 0;\n@p bra over;\ntrap;\nover:\n}" ::"r"(count));
        });
      } else {
        const kstd::uint32_t tile = shared + Plan::stages_at + used * Plan::stage_bytes;
        kstd::uint32_t keys[Plan::steps][4];
        float scale = 1;
        if constexpr (Plan::fp4) {
          scale = load_fp4_keys<Plan>(keys, depths, tile + Plan::value_bytes + scale_at, tile + key_at, shared + Plan::codes_at, positive, pick);
        } else {
          load_keys<Plan>(keys, tile + key_at, first % 2 != 0);
          if constexpr (Plan::scaled) {
            scale = __uint_as_float(ptx::load_shared(tile + (Plan::interleaved ? local * Plan::key_pitch + Plan::key_row : Plan::value_bytes + local * 4)));
          }
        }
        release(used);  // the tile is in registers
        complete(keys);
        products_of(keys, place, scale, [] {});
      }
      constexpr bool mends = Plan::fp4 && Plan::fp8;
      if constexpr (plain || mends) {
        kstd::uint32_t deep = 0;
        if constexpr (mends) deep = lost<Plan>(depths);
        if (plain ? any_rare_of_tile(deep) : __any_sync(~0U, deep != 0)) {
          const int position = here(static_cast<int>(place.position));
          if constexpr (plain) replace_nans(place.token, position >= 0);
          if (position >= 0) {  // on a page
            const int back = plain ? -(first / 16 * 16) : local - first / 16 * 16;  // to the warp's first token
            if constexpr (mends) exact_logits<P, Plan, Heads, Shape>(a, row, place.token - back, position - back, depths, shared, here(lane));
          }
        }
      }
    }
  }
};

#endif  // KVIRE_SM90A
}  // namespace sm90::detail

KVIRE_NAMESPACE_END
