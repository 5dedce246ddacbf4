// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <type_traits>

#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include <kvire/kernel/cuda/launch.cuh>
#include <kvire/kernel/fp4_operand.cuh>
#include <kvire/kernel/sm90_logits_operand.cuh>

KVIRE_NAMESPACE_BEGIN

/// Paged sparse logits for Hopper: logit[b,t,s] = k_scale[s] * sum over heads of w[b,t,h] * relu(q[b,t,h] . k[s]).
///
/// How it works. The pages of all rows, cut into tiles of 64 tokens, form one list; each CTA, or each unit of a CTA, takes a contiguous share of it, found
/// from the lengths inside the kernel. One warp brings tiles to shared memory by bulk copies through a ring of mbarriers; a warpgroup multiplies each tile by the queries
/// and writes 64 logits for each query token. A tile is an operand in shared memory, brought there by tensor copies with a swizzle, or goes to registers
/// (and frees its stage at once); then no tensor map is needed, so any page stride that is a multiple of 16 bytes will do.
namespace sm90 {

/// A tensor map, as the driver makes it: of the pages of a layer, bytes of a key, tokens, pages; of the queries, bytes and heads of a query token.
struct alignas(128) TensorMap {
  unsigned char bytes[128];
};

namespace detail {

/// Units that a CTA can have.
template <class Shape>
inline constexpr int most_units = Shape::joined_from > 0 ? Shape::ctas_per_sm : 1;

#if KVIRE_SM90A

/// Barrier `first` + 2 * unit, waited for or only arrived at. The numbers are constants: with one in a register a CTA claims all sixteen barriers, and an SM
/// has no more than four times as many.
template <int Units>
KVIRE_DEVICE KVIRE_INLINE void unit_barrier(int unit, int first, int threads, bool wait = true) {
  if constexpr (Units > 1) {
    if (unit != Units - 1) return unit_barrier<Units - 1>(unit, first, threads, wait);
  }
  if (wait) {
    ptx::named_barrier(first + 2 * (Units - 1), threads);
  } else {
    ptx::named_barrier_arrive(first + 2 * (Units - 1), threads);
  }
}

/// Has the queries of a row brought to L2 by `count` threads.
template <class Plan>
KVIRE_DEVICE KVIRE_INLINE void prefetch_queries(const LogitsArguments& a, int row, int thread, int count) {
  constexpr int bytes = Plan::next_n * Plan::query_bytes;
  const char* queries = static_cast<const char*>(a.queries) + static_cast<kstd::int64_t>(row) * bytes;
  for (int i = thread * 128; i < bytes; i += count * 128) ptx::prefetch_l2(queries + i);
}

/// Brings tile `t` of a segment to a stage that is free; one warp.
template <class Plan>
KVIRE_DEVICE KVIRE_INLINE void bring_tile(const LogitsArguments& a, [[maybe_unused]] const TensorMap& map, const Segment<Plan>& s, int t, kstd::uint32_t shared, int stage) {
  constexpr int ids = Plan::pages_per_tile;
  constexpr int rows = tile_tokens / ids;  // of a tile on one page
  int id[ids];
  unsigned position[ids];
#pragma unroll
  for (int i = 0; i < ids; ++i) {
    id[i] = __shfl_sync(~0U, s.id[i], t);
    if constexpr (Plan::options) position[i] = __shfl_sync(~0U, s.position[i], t);
  }
  const kstd::uint32_t full = shared + Plan::full_at + stage * 8;
  const kstd::uint32_t to = shared + Plan::stages_at + stage * Plan::stage_bytes;
  if (ptx::elect()) {
    const int tile = s.tile + t;
    kstd::uint32_t bytes = 0;
#pragma unroll
    for (int i = 0; i < ids; ++i) {
      if constexpr (!Plan::options) position[i] = id[i] < 0 ? nowhere : static_cast<unsigned>(tile * tile_tokens + i * rows);
      if (id[i] >= 0) bytes += Plan::tile_bytes / ids;
    }
    ptx::store_shared4(shared + Plan::meta_at + stage * 16,
                       {static_cast<kstd::uint32_t>(s.row), static_cast<kstd::uint32_t>(tile * tile_tokens), position[0], position[ids - 1]});
    ptx::mbarrier_arrive_expect(full, bytes);
#pragma unroll
    for (int i = 0; i < ids; ++i) {
      if (id[i] < 0) continue;
      const kstd::byte* page = a.pages + a.page_stride * static_cast<unsigned>(id[i]);
      const int part = tile % Plan::tiles_per_page;
      if constexpr (Plan::swizzled) {
#pragma unroll
        for (int x = 0; x < Plan::key_row; x += Plan::width) {
          ptx::tensor_load(to + x / Plan::width * Plan::plane_bytes + i * rows * Plan::width, &map, x, part * tile_tokens, id[i], full);
        }
        if constexpr (Plan::scaled) {
          ptx::bulk_load(shared + Plan::scales_at + stage * Plan::scale_bytes + i * rows * Plan::scale_row,
                         page + Plan::tokens * Plan::key_row + part * tile_tokens * Plan::scale_row, rows * Plan::scale_row, full);
        }
      } else if constexpr (Plan::whole_page) {
        ptx::bulk_load(to, page, Plan::tile_bytes, full);
      } else {
        ptx::bulk_load(to + i * rows * Plan::key_pitch, page + part * Plan::value_bytes, rows * Plan::key_pitch, full);
        if constexpr (Plan::scale_plane) {
          ptx::bulk_load(to + Plan::value_bytes + i * rows * Plan::scale_row, page + Plan::tokens * Plan::key_pitch + part * tile_tokens * Plan::scale_row,
                         rows * Plan::scale_row, full);
        }
      }
    }
  }
  __syncwarp();
}

/// A ring of stages, seen by one side; `parity`: what it waits for next.
template <int Stages>
struct Ring {
  kstd::uint32_t parity;
  int stage = 0;

  KVIRE_DEVICE KVIRE_INLINE void advance() {
    if (Stages == 1 || ++stage == Stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

/// The producer warp. Row `guess` may be the first one's.
template <class Plan, int Heads, class Shape>
struct Producer {
  const LogitsArguments& a;
  const TensorMap& keys;
  const TensorMap& queries;
  kstd::uint32_t shared;
  int lane;
  Ring<Plan::query_stages> rows{1};

  KVIRE_DEVICE KVIRE_INLINE void bring_queries(int row) {
    ptx::mbarrier_wait(shared + Plan::query_empty_at + rows.stage * 8, rows.parity);
    bring_row<Plan, Heads>(a, &queries, row, shared, rows.stage, lane);
    announce_queries(row);
  }
  KVIRE_DEVICE KVIRE_INLINE void announce_queries(int row) {
    announce_row<Plan, Heads>(a, row, shared, rows.stage, lane);
    rows.advance();
  }
  /// Brings all tiles of the share.
  KVIRE_DEVICE KVIRE_INLINE void run(const Guess<Plan>& guess, Share share) {
    if constexpr (Plan::swizzled) {
      announce_queries(guess.row);  // which needed the lengths
      if (share.tiles == 0) return ptx::mbarrier_wait(shared + Plan::query_full_at, 0);  // what is on its way must have come before the CTA ends
      if (share.row != guess.row) bring_queries(share.row);
    }
    Walk<Plan> walk(a, lane, share, true);
    Segment<Plan> now, next;
    [[maybe_unused]] int row = share.row;  // whose queries have been asked for
    bool more = walk.next(now, &guess);
    Ring<Shape::stages> tiles{1};
    while (more) {
      walk.check(now);
#pragma unroll 1
      for (int t = 0; t < now.tiles; ++t) {
        ptx::mbarrier_wait(shared + Plan::empty_at + tiles.stage * 8, tiles.parity);
        bring_tile<Plan>(a, keys, now, t, shared, tiles.stage);
        tiles.advance();
        if constexpr (Plan::swizzled && Plan::query_stages == 1) {  // behind the tile that makes the consumers leave the row before
          if (now.row != row) bring_queries(now.row);
          row = now.row;
        }
        if (t == 1 || now.tiles == 1) {
          // The first tiles are under way: the ids of the next segment can follow, and, if it is of another row, its queries, at least as far as L2.
          more = walk.next(next);
          if (more && next.row != now.row) {
            if constexpr (Plan::query_stages > 1) {
              bring_queries(next.row);
            } else {
              prefetch_queries<Plan>(a, next.row, lane, 32);
            }
          }
        }
      }
      now = next;
    }
  }
};

/// Keeps a lane's number in its register: the assembler would compute it again at every use.
template <class T>
KVIRE_DEVICE KVIRE_INLINE T keep(T x, int lane) {
  return __shfl_sync(~0U, x, lane);
}

struct Nothing {};

/// The consumer warpgroup: all tiles of the share. `row`: whose queries are in shared memory.
///
/// What counts here is the number of instructions: while an ordinary one reads its operands, the tensor cores do not read theirs, so the time of a
/// tile is that of its products and of everything else, one after the other, however many warps there are.
template <class P, class Plan, int Heads, class Shape>
struct Consumer {
  static constexpr int columns = Plan::columns;
  static constexpr int next_n = Plan::next_n;
  static constexpr int together = Shape::together;
  static constexpr int products = next_n / together;  // of a tile
  static constexpr bool few = next_n <= 2;            // what belongs to a query token stays in registers
  static constexpr bool resident = Shape::resident && few;
  using Sums = float[columns * together];

  const LogitsArguments& a;
  int row;
  kstd::uint32_t shared;
  int thread;
  int unit;
  [[no_unique_address]] std::conditional_t<Shape::candidates, KeptScores<Plan::kept, next_n>, Nothing> kept;
  int lane = keep(thread % 32, thread);
  int c = lane & 3;
  int first = keep(thread / 32 * 16 + thread % 32 / 4, thread);  // row of a tile: this lane has a part of it and of the eighth behind
  int local = first + c % 2 * 8;                                 // the one that it finishes
  int key_at = keep(static_cast<int>(key_offset<Plan>(thread / 32, thread % 32)), thread);
  int scale_at = Plan::fp4 ? keep(first * Plan::scale_row + c * Plan::blocks / 4, thread) : 0;  // of its first key, in a tile
  kstd::uint32_t positive = Plan::fp4 && Plan::fp8 ? ptx::load_shared(shared + Plan::codes_at + 15 * 8) : 0;
  unsigned nans = 0;  // logits that this lane finished and that were NaN
  Ring<Shape::stages> tiles{0};
  Ring<Plan::query_stages> rows{0};  // swizzled
  float held[resident ? next_n : 1][columns / 2];
  char* out[few ? products : 1];
  int visible[few ? products : 1];

  KVIRE_DEVICE KVIRE_INLINE kstd::uint32_t weights(int q) const { return shared + Plan::weights_at + rows.stage * Plan::weight_stage_bytes + c * Plan::weight_run + q * 4 * Plan::weight_run; }
  /// Tokens of the row that query token q sees.
  KVIRE_DEVICE KVIRE_INLINE int seen_by(int q) const { return static_cast<int>(ptx::load_shared(shared + Plan::visible_at + (rows.stage * next_n + q) * 4)); }
  /// Whether this lane writes what it finishes.
  KVIRE_DEVICE KVIRE_INLINE bool mine() const { return together == 2 || c < 2; }
  KVIRE_DEVICE KVIRE_INLINE int token_of(int product) const { return product * together + (together == 2 ? c / 2 : 0); }
  KVIRE_DEVICE KVIRE_INLINE int score_shift() const { return Plan::options && a.bf16 ? 1 : 2; }
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
  KVIRE_DEVICE KVIRE_INLINE void take_row() {
#pragma unroll
    for (int i = 0; i < (few ? products : 1); ++i) {
      out[i] = static_cast<char*>(a.logits) + (((static_cast<kstd::int64_t>(row) * next_n + token_of(i)) * a.logits_stride) << score_shift());
      visible[i] = seen_by(token_of(i));
    }
    if constexpr (resident) {
#pragma unroll
      for (int q = 0; q < next_n; ++q) {
        load_weights<Plan>(held[q], weights(q));
        if constexpr (Plan::swizzled) {
#pragma unroll
          for (float& w : held[q]) w = mul_exact(0.5F, w);
        }
      }
    }
  }
  /// Sum over a quarter of the heads, of query token `q`, whose products are in d from column First on.
  template <int First, int Known>
  KVIRE_DEVICE KVIRE_INLINE float sum_token(const Sums& d, int q) const {
    float low, high;
    if constexpr (resident) {
      head_sums<Plan, First>(d, held[Known], low, high);
    } else {
      float w[columns / 2];
      load_weights<Plan>(w, weights(q));
      head_sums<Plan, First>(d, w, low, high);
    }
    return half_sum(low, high, c);
  }
  /// Writes a logit from the sum over the heads. `product`: of which query tokens; `to`: their scores; `seen`: the tokens that this lane's one sees;
  /// `token`: index of the score; `position`: of the key. Together: of a warp's 16 keys, lanes with c of 2 and 3 write those of the second query token.
  KVIRE_DEVICE KVIRE_INLINE void write(int product, char* to, int seen, int token, unsigned position, float sum, float scale) {
    const bool there = position < static_cast<unsigned>(seen);
    if constexpr (Plan::swizzled && !resident) sum = mul_exact(0.5F, sum);  // of 2 relu
    float logit = Plan::scaled ? mul_exact(sum, scale) : sum;
    if (!there) logit = -__int_as_float(0x7F800000);
    replace_nan(logit, nans);
    if constexpr (Shape::candidates) {
      if (mine() && token < seen) kept.put(token_of(product), token, there ? logit : float_of(nan_bits));
      return;
    }
    if (mine() && token < (listed<Plan>(a) ? listed_scores<Plan>(a) : seen)) {
      if (Plan::options && a.bf16) {
        store_logit(reinterpret_cast<kstd::uint16_t*>(to) + token, logit);
      } else {
        store_logit(reinterpret_cast<float*>(to) + token, logit);
      }
    }
    if constexpr (Shape::best) {
      const kstd::uint32_t key = there ? order_key(logit) : 0U;
#pragma unroll
      for (int t = 0; t < together; ++t) {
        const bool of_t = together == 1 || c / 2 == t;
        const kstd::uint32_t best = __reduce_max_sync(~0U, of_t ? key : 0U);
        if (lane == 2 * t && token < seen) {  // lanes with the first token
          const kstd::int64_t at = static_cast<kstd::int64_t>(row) * next_n + token_of(product);
          a.group_best[at * ((a.logits_stride + 15) / 16) + token / 16] = best;
        }
      }
    }
  }
  /// Sums and logits of a product, which is in d. Known: which one, if `few`.
  template <int Known>
  KVIRE_DEVICE KVIRE_INLINE void finish(const Sums& d, int product, int token, unsigned position, float scale) {
    float sum = sum_token<0, Known * together>(d, product * together);
    if constexpr (together == 2) {  // lanes with c of 0 and 1 finish the first query token, the others the second
      const float second = sum_token<columns, Known * together + 1>(d, product * together + 1);
      sum = add_exact(c >= 2 ? second : sum, __shfl_xor_sync(~0U, c >= 2 ? sum : second, 2));
    } else {
      sum = add_exact(sum, __shfl_xor_sync(~0U, sum, 2));
    }
    const int seen = few ? visible[few ? Known : 0] : seen_by(token_of(product));
    char* to = few ? out[few ? Known : 0] : out[0] + (product * together * a.logits_stride << score_shift());
    write(product, to, seen, token, position, sum, scale);
  }
  /// This lane reads a stage no more. All arrive: that one lane may speak for its warp is more than racecheck follows, and it costs no time.
  KVIRE_DEVICE KVIRE_INLINE void release(int which) { ptx::mbarrier_arrive(shared + Plan::empty_at + which * 8); }
  /// One product of a tile, to the last. `keys`: its operand, in registers or in shared memory; `done` is called when nothing reads it any more. Known:
  /// which product, if `few`.
  template <int Known, class Keys, class Done>
  KVIRE_DEVICE KVIRE_INLINE void product_of(const Keys& keys, int product, int token, unsigned position, float scale, Done&& done) {
    Sums d;
    start_product<Plan>(d, keys, query_operand<Plan>(shared + Plan::queries_at + rows.stage * Plan::query_stage_bytes +
                                                      product * together * (Plan::swizzled ? Heads * Plan::query_width : Plan::query_bytes)));
    ptx::wgmma_wait<0>();
    if (product == products - 1) done();
    ptx::touch(d);
    finish<Known>(d, product, token, position, scale);
  }
  template <class Keys, class Done>
  KVIRE_DEVICE KVIRE_INLINE void products_of(const Keys& keys, int token, unsigned position, float scale, Done&& done) {
    if constexpr (few) {
      product_of<0>(keys, 0, token, position, scale, done);
      if constexpr (products == 2) product_of<1>(keys, 1, token, position, scale, done);
    } else {
#pragma unroll 1
      for (int product = 0; product < products; ++product) product_of<0>(keys, product, token, position, scale, done);
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
          load_row<Plan, Heads>(a, row, shared, here(thread));
          unit_barrier<most_units<Shape>>(unit, 1, group_threads);
        }
        take_row();
      }
      if constexpr (Shape::candidates) {
        if (!begun) kept.begin(static_cast<int>(meta.y));
        begun = true;
        kept.next_tile();
      }
      const int token = static_cast<int>(meta.y) + local;
      const unsigned position = Plan::pages_per_tile > 1 ? (local < part ? meta.z : meta.w) + local % part : meta.z + local;
      const int used = tiles.stage;
      tiles.advance();
      if constexpr (Plan::swizzled) {
        float scale = 1;
        if constexpr (Plan::scaled) scale = __uint_as_float(ptx::load_shared(shared + Plan::scales_at + used * Plan::scale_bytes + local * 4));
        const ptx::Descriptor tile = ptx::swizzled_descriptor<Plan::width>(shared + Plan::stages_at + used * Plan::stage_bytes);
        products_of(tile, token, position, scale, [&] {
          release(used);
          // A branch ends the basic block, within which the assembler would move the release behind the sums.
          asm volatile("{\n.reg .pred p;\nsetp.ge.s32 p, %0, 0;\n@p bra over;\ntrap;\nover:\n}" ::"r"(count));
        });
      } else {
        const kstd::uint32_t tile = shared + Plan::stages_at + used * Plan::stage_bytes;
        kstd::uint32_t keys[Plan::steps][4];
        [[maybe_unused]] kstd::uint32_t depths = 0;
        float scale = 1;
        if constexpr (Plan::fp4) {
          const kstd::uint32_t from = tile + (Plan::blocks == 4 ? scale_at * 16 : key_at);  // 16 bytes of elements for one of scale
          scale = load_fp4_keys<Plan>(keys, depths, tile + Plan::value_bytes + scale_at, from, shared + Plan::codes_at, positive, c);
        } else {
          load_keys<Plan>(keys, tile + key_at, first % 2 != 0);
          if constexpr (Plan::scaled) {
            scale = __uint_as_float(ptx::load_shared(tile + (Plan::interleaved ? local * Plan::key_pitch + Plan::key_row : Plan::value_bytes + local * 4)));
          }
        }
        release(used);  // the tile is in registers
        complete(keys);
        products_of(keys, token, position, scale, [] {});
        if constexpr (Plan::fp4 && Plan::fp8) {
          if (__any_sync(~0U, loses<Plan>(depths)) && static_cast<int>(position) >= 0) {  // on a page
            const int back = local - first / 16 * 16;
            exact_logits<P, Plan, Heads, Shape>(a, row, token - back, static_cast<int>(position) - back, depths, shared, here(lane));
          }
        }
      }
    }
  }
};

#endif  // KVIRE_SM90A

}  // namespace detail

/// Starts nothing unless compiled for sm_90a. Grid: any number of CTAs; block: unit_threads; dynamic shared memory: Plan::shared_bytes. If Shape::joined_from
/// is not 0, also up to Shape::ctas_per_sm times as many threads, with Plan::unit_pitch more shared memory for each further unit.
template <class P, Element Query, int Heads, int NextN, class Shape>
__global__ void __launch_bounds__(detail::most_units<Shape>* unit_threads, Shape::ctas_per_sm / detail::most_units<Shape>)
    logits_kernel(const __grid_constant__ LogitsArguments a, const __grid_constant__ TensorMap keys, const __grid_constant__ TensorMap queries) {
#if KVIRE_SM90A
  using Plan = LogitsPlan<P, Query, Heads, NextN, Shape>;
  extern __shared__ __align__(1024) unsigned char memory[];
  constexpr int group_warps = group_threads / 32, most = detail::most_units<Shape>;
  const int units = most > 1 ? static_cast<int>(blockDim.x) / unit_threads : 1;
  const int warp = __shfl_sync(~0U, static_cast<int>(threadIdx.x) / 32, 0);
  const bool produces = warp >= units * group_warps;
  const int unit = most == 1 ? 0 : produces ? warp - units * group_warps : warp / group_warps;
  const int thread = static_cast<int>(threadIdx.x) - unit * group_threads, lane = thread % 32;  // of a consumer
  const unsigned index = static_cast<unsigned>(unit) * gridDim.x + blockIdx.x, count = static_cast<unsigned>(units) * gridDim.x;  // of the share
  const kstd::uint32_t shared = detail::keep(ptx::shared_address(memory) + unit * Plan::unit_pitch, lane);
  constexpr bool selected_from = Shape::candidates;  // by a kernel that reads the lengths as soon as it starts
  if constexpr (!selected_from) ptx::launch_dependents();
  // Where this CTA's share would start were all rows as long as the table is wide: what lies there is read while the lengths are on their way.
  const int width = detail::tiles_of(detail::most_scores<Plan>(a));
  int begin, size;
  detail::split(static_cast<unsigned>(width) * static_cast<unsigned>(a.batch), index, count, begin, size);
  const int guess = begin / width < a.batch ? begin / width : 0;

  if (produces) {
    if constexpr (Plan::swizzled) {
      ptx::prefetch_tensor_map(&keys);
      ptx::prefetch_tensor_map(&queries);
      if (lane < Plan::query_stages) {
        ptx::mbarrier_init(shared + Plan::query_full_at + lane * 8, 32);
        ptx::mbarrier_init(shared + Plan::query_empty_at + lane * 8, group_threads);
        ptx::fence_mbarrier_init();
      }
    }
    if (lane < Shape::stages) {
      ptx::mbarrier_init(shared + Plan::full_at + lane * 8, 1);
      ptx::mbarrier_init(shared + Plan::empty_at + lane * 8, group_threads);
      ptx::fence_mbarrier_init();
    }
    __syncwarp();
    detail::unit_barrier<most>(unit, 2, unit_threads, false);
    ptx::wait_for_earlier_grids();
    if constexpr (selected_from) ptx::launch_dependents();
    const detail::Guess<Plan> ids(a, lane, guess, begin - guess * width);
    detail::Producer<Plan, Heads, Shape> producer{a, keys, queries, shared, lane};
    if constexpr (Plan::swizzled) detail::bring_row<Plan, Heads>(a, &queries, guess, shared, 0, lane);
    producer.run(ids, detail::find_share<Plan>(a, lane, index, count));
  } else {
    ptx::wait_for_earlier_grids();
    if constexpr (selected_from) ptx::launch_dependents();
    // Warms L2: the whole page table, line by line over all CTAs.
    const kstd::int64_t lines = (a.table_stride * a.batch * 4 + 127) / 128;
    const kstd::int64_t line = static_cast<kstd::int64_t>(index) * group_threads + thread;
    if (line < lines) ptx::prefetch_l2(reinterpret_cast<const char*>(a.page_table) + line * 128);
    if constexpr (Plan::fp4 && Plan::fp8) {
      if (thread < 16) detail::make_codes(shared + Plan::codes_at, thread);
    }
    if constexpr (!Plan::swizzled) detail::load_row<Plan, Heads>(a, guess, shared, thread);
    detail::unit_barrier<most>(unit, 2, unit_threads);
    const detail::Share share = detail::find_share<Plan>(a, lane, index, count);
    if (share.tiles == 0) return;
    if (!Plan::swizzled && share.row != guess) {  // where lengths differ; known before the first tile is there
      detail::load_row<Plan, Heads>(a, share.row, shared, thread);
      detail::unit_barrier<most>(unit, 1, group_threads);
    }
    if constexpr (Shape::candidates) {
      auto& kept = *reinterpret_cast<detail::KeptScoresMemory<Plan::kept, NextN>*>(memory + Plan::kept_at);
      detail::Consumer<P, Plan, Heads, Shape>{a, share.row, shared, thread, unit, {a.candidates, kept, a.candidates.whole(share.each), thread}}.run(share.tiles);
    } else {
      detail::Consumer<P, Plan, Heads, Shape>{a, share.row, shared, thread, unit, {}}.run(share.tiles);
    }
  }
#else
  (void)a, (void)keys, (void)queries;
  __trap();
#endif
}

namespace detail {

/// Asks the driver for a tensor map of bytes: `extent` of them, then of Rank - 1 dimensions with their `stride` in bytes; `box`: what a copy brings. Swizzled
/// as wide as box[0], 64 or 128. Host only; touches no memory of the device.
template <int Rank>
cudaError_t make_tensor_map(TensorMap& map, const void* data, const cuuint64_t (&extent)[Rank], const cuuint64_t (&stride)[Rank - 1], const cuuint32_t (&box)[Rank]) {
  static const auto encode = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found{};
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found);
    return error == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(entry) : nullptr;
  }();
  if (encode == nullptr) return cudaErrorNotSupported;
  static_assert(require_tuning<TensorMap, (sizeof(TensorMap) == sizeof(CUtensorMap) && alignof(TensorMap) >= alignof(CUtensorMap))>());
  const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
  const CUresult result = encode(reinterpret_cast<CUtensorMap*>(&map), CU_TENSOR_MAP_DATA_TYPE_UINT8, Rank, const_cast<void*>(data), extent, stride, box, steps,
                                 CU_TENSOR_MAP_INTERLEAVE_NONE, box[0] == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

/// Pages: bytes of a key, tokens, pages.
template <class Plan>
cudaError_t make_key_map(TensorMap& map, const LogitsArguments& a) {
  constexpr cuuint64_t row = Plan::key_row, tokens = Plan::tokens;
  return make_tensor_map<3>(map, a.pages, {row, tokens, static_cast<cuuint64_t>(a.page_count > 0 ? a.page_count : 1)}, {row, static_cast<cuuint64_t>(a.page_stride)},
                            {Plan::width, tokens < tile_tokens ? static_cast<cuuint32_t>(tokens) : static_cast<cuuint32_t>(tile_tokens), 1});
}
/// Queries: bytes of a head, then heads in the order of load_row (column 8 n + 2 c + e: head Heads / 4 c + 2 n + e), then query tokens.
template <class Plan, int Heads>
cudaError_t make_query_map(TensorMap& map, const LogitsArguments& a) {
  constexpr cuuint64_t row = Plan::query_row;
  return make_tensor_map<5>(map, a.queries, {row, 2, 4, Heads / 8, static_cast<cuuint64_t>(a.batch) * Plan::next_n}, {row, Heads / 4 * row, 2 * row, Heads * row},
                            {Plan::query_width, 2, 4, Heads / 8, 1});
}

/// Tiles that the table, or the lists of blocks, have room for.
template <class P>
kstd::int64_t most_tiles(const LogitsArguments& a) {
  const kstd::int64_t scores = (a.blocks != nullptr ? a.max_blocks : a.table_width) * P::tokens_per_page;  // of a row, at most
  return a.batch * ((scores + tile_tokens - 1) / tile_tokens);
}

}  // namespace detail

/// Whether there are KeepCandidates kernels of these pages: not of fp4 keys, some of whose scores are mended when they have been written.
template <class P, int NextN>
constexpr bool keeps_candidates() {
  return NextN <= 2 && P::template element_of<role::Value> != Element::e2m1;
}

/// Shares that launch_logits makes, one for a CTA or for a unit of joined ones: at most `sms` times Shape::ctas_per_sm; fewer where the table cannot hold
/// as many tiles.
template <class P, class Shape>
kstd::int64_t logits_ctas(const LogitsArguments& a, int sms) {
  const kstd::int64_t most = detail::most_tiles<P>(a);
  const kstd::int64_t fits = static_cast<kstd::int64_t>(sms) * Shape::ctas_per_sm;
  return most < fits ? most : fits;
}

/// Launches the kernel on `stream` with at most `sms` times Shape::ctas_per_sm CTAs, fewer where the table cannot hold as many tiles, or, from
/// Shape::joined_from tiles a share on, with `sms` of Shape::ctas_per_sm units each.
/// `overlap`: programmatic dependent launch. The kernel may then start while the stream's earlier kernel ends; it waits for that one before
/// it reads anything.
template <class P, Element Query, int Heads, int NextN, class Shape = DefaultLogitsShape<P, Query, Heads, NextN>>
cudaError_t launch_logits(const LogitsArguments& a, int sms, cudaStream_t stream, bool overlap = false) {
  static_assert(require_reader<P, LogitsReader>());
  using Plan = LogitsPlan<P, Query, Heads, NextN, Shape>;
  auto* kernel = &logits_kernel<P, Query, Heads, NextN, Shape>;
  const kstd::int64_t tiles = detail::most_tiles<P>(a);
  if (tiles <= 0 || a.logits_stride <= 0) return cudaSuccess;
  if (!Shape::options && (a.bf16 || a.blocks != nullptr)) return cudaErrorInvalidValue;
  kstd::int64_t ctas = logits_ctas<P, Shape>(a, sms);
  int units = 1;
  if (detail::most_units<Shape> > 1 && tiles >= ctas * Shape::joined_from) {
    units = detail::most_units<Shape>;
    ctas = sms;
  }
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Plan::most_shared_bytes);
  if (error != cudaSuccess) return error;
  TensorMap keys{}, queries{};
  if constexpr (Plan::swizzled) {
    if (const cudaError_t e = detail::make_key_map<Plan>(keys, a); e != cudaSuccess) return e;
    if (const cudaError_t e = detail::make_query_map<Plan, Heads>(queries, a); e != cudaSuccess) return e;
  }
  const auto shared_bytes = static_cast<std::size_t>((units - 1) * Plan::unit_pitch + Plan::shared_bytes);
  return kvire::detail::launch_kernel(kernel, {ctas, units * unit_threads, shared_bytes, overlap}, stream, a, keys, queries);
}

}  // namespace sm90

KVIRE_NAMESPACE_END
