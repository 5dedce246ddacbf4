// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/kernel/top_k_short_cut.cuh>

KVIRE_NAMESPACE_BEGIN

namespace detail::topk {

#if KVIRE_CUDA_COMPILER

/// A short row: one block keeps it in registers, and looks for the k-th best by bins of equal width. Where they lie is a guess by a sample of the row, which
/// decides how many scores share the bin that is found, never what is selected.
template <int Threads, int Items, bool Paged>
struct ShortRow : ShortCut<Threads, Items, Paged> {
  using Base = ShortCut<Threads, Items, Paged>;
  using Base::bins, Base::by_counting, Base::clear, Base::count, Base::entry_at, Base::find, Base::get, Base::lane, Base::listed_as, Base::narrow, Base::none, Base::out, Base::p;
  using Base::part, Base::place, Base::quads, Base::rank, Base::row, Base::s, Base::tid, Base::warp, Base::warps;

  // The same number, of which the assembler does not know that, so that it keeps it instead of computing it again in each branch.
  __device__ u32 kept(u32 x) const { return __shfl_sync(~0U, x, lane); }

  // --- loads; NaN for what is not there ---
  __device__ static float4 load_whole(const float* from, int left) {
    float4 v;
    asm volatile(
        "{\n.reg .pred p;\nsetp.gt.s32 p, %5, 3;\n"
        "mov.b32 %0, 0x7FFFFFFF;\nmov.b32 %1, 0x7FFFFFFF;\nmov.b32 %2, 0x7FFFFFFF;\nmov.b32 %3, 0x7FFFFFFF;\n"
        "@p ld.global.nc.L1::no_allocate.v4.f32 {%0, %1, %2, %3}, [%4];\n}"
        : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
        : "l"(from), "r"(left));
    return v;
  }
  __device__ static float4 load_some(const float* from, int left) {
    return {left > 0 ? from[0] : none(), left > 1 ? from[1] : none(), left > 2 ? from[2] : none(), left > 3 ? from[3] : none()};
  }
  __device__ void load(float4 (&v)[quads], float4& sample, const float* scores, int length) const {
    const bool whole = p.vector_loads;
    const float* from = scores + place(0);
#pragma unroll
    for (int q = 0; q < quads; ++q) v[q] = load_whole(from + q * 128, whole ? length - place(q) : 0);
    const int at = lane / 4 * (length / 8 & ~3) + lane % 4 * 4;  // eight runs of 16 scores
    sample = load_whole(scores + at, whole ? length - at : 0);
    if (__builtin_expect(whole && length % 4 == 0, 1)) return;
#pragma unroll
    for (int q = 0; q < quads; ++q) {
      const int left = length - place(q);
      if (!whole || left < 4) v[q] = load_some(from + q * 128, left);
    }
  }
  // The row on its way to L2 while its length is on its way here; nothing is read.
  __device__ void prefetch(const float* scores) const {
    if (tid < min(p.most, Threads * Items) / 32) ptx::prefetch_l2(scores + tid * 32);
    if constexpr (Paged) {
      if (std::int64_t(tid) * 32 * p.args.tokens_per_page < min(p.most, Threads * Items)) ptx::prefetch_l2(p.args.page_table + std::int64_t(this->request()) * p.args.max_pages + tid * 32);
    }
  }
  __device__ void load_pages(std::int32_t (&id)[quads], int length) const {
    if (p.args.tokens_per_page % 4 != 0) return;
#pragma unroll
    for (int q = 0; q < quads; ++q) id[q] = place(q) < length ? this->entry_of_page(this->page_of(place(q))) : 0;
  }
  __device__ void drop_bad_pages(float4 (&v)[quads], const std::int32_t (&id)[quads], int length) const {
    const auto check = [&](float& x, int position) {
      if (position < length && !this->on_good_page(position)) x = none();
    };
#pragma unroll
    for (int q = 0; q < quads; ++q) {
      if (p.args.tokens_per_page % 4 == 0) {
        if (!this->good(id[q])) v[q] = float4{none(), none(), none(), none()};
      } else {
        check(v[q].x, place(q));
        check(v[q].y, place(q) + 1);
        check(v[q].z, place(q) + 2);
        check(v[q].w, place(q) + 3);
      }
    }
  }

  // The bins of a row: bin = offset - slope * score, rounded, is no more for a larger score, whatever slope and offset are.
  struct Scale {
    float slope, offset;
    __device__ u32 bin_of(float x) const {
      float y;  // 2^23 and the number of the bin, so that its bits are that number; NaN and what is below all bins are above
      asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(y) : "f"(x), "f"(-slope), "f"(offset));
      return u32(min(max(int(bits_of(y)) - 0x4B000000, 0), bins));
    }
  };
  // From somewhat above the largest of the sample down to where, of scores that are spread as most are, the k-th should have been passed. All warps find the
  // same. `least`: of the lanes' largest, so that it is not one stray score.
  __device__ Scale guess(const float4& sample, int length) const {
    const float best = larger(larger(sample.x, sample.y), larger(sample.z, sample.w));
    const bool is = is_finite(best);
    const u32 most = __reduce_max_sync(~0U, is ? order_key(best) : 0), least = __reduce_min_sync(~0U, is ? order_key(best) : ~0U);
    const float high = most == 0 ? 0 : float_of_key(most), range = most == 0 ? 0 : high - float_of_key(least);
    const float width = range * (0.9F + 1.4F * __fdividef(float(p.args.k), float(length)));
    Scale scale;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(scale.slope) : "f"(width));
    scale.slope = fminf(fmaxf(scale.slope * float(bins), 1e-36F), 1e30F);  // times an infinite score no NaN, whatever the sample was
    asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(scale.offset) : "f"(high + range / 4), "f"(scale.slope), "f"(8388608.0F));
    return scale;
  }

  // Where the scores of this warp that `reach` names are listed: slots of each quad's first one, counted from the warp's first; and how many there are.
  struct Slots {
    u32 of[quads];
    u32 all = 0;
  };
  __device__ static Slots number(u32 reach, int lane) {
    u32 n = 0;  // a byte for each quad: no more than 128 in a warp
#pragma unroll
    for (int q = 0; q < quads; ++q) n += u32(__popc(reach >> (q * 4) & 15U)) << (q * 8);
    const u32 up = scan_lanes(n, lane), all = __shfl_sync(~0U, up, 31);
    Slots slots;
#pragma unroll
    for (int q = 0; q < quads; ++q) {
      slots.of[q] = slots.all + ((up - n) >> (q * 8) & 255U);
      slots.all += all >> (q * 8) & 255U;
    }
    return slots;
  }
  // A warp packs its positions in shared memory and writes them side by side.
  __device__ void emit(u32 reach, const Slots& slots, std::int32_t* to, u32 packed) const {
#pragma unroll
    for (int q = 0; q < quads; ++q) {
      u32 at = packed + slots.of[q] * 4;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        asm volatile("{\n.reg .pred p;\n.reg .u32 b;\nand.b32 b, %1, %3;\nsetp.ne.u32 p, b, 0;\n@p st.shared.u32 [%0], %2;\n@p add.u32 %0, %0, 4;\n}"
                     : "+r"(at)
                     : "r"(reach), "r"(place(q) + i), "r"(1U << (q * 4 + i))
                     : "memory");
      }
    }
    __syncwarp();
#pragma unroll 1
    for (u32 i = u32(lane); i < slots.all; i += 32) to[i] = listed_as(int(ptx::load_shared(packed + i * 4)));
  }

  __device__ void run() {
    const float* const scores = p.args.scores + std::int64_t(row) * p.args.stride;
    prefetch(scores);
    int length = p.args.lengths == nullptr ? p.most : p.args.lengths[this->length_at()];
    clear();
    if (tid < by_counting) s.members[tid] = 0;
    if (tid < warps) s.rejected[tid] = 0;
    if (tid == 0) s.joined = s.emitted = 0, s.cut = 0;
    std::int32_t* const to = out();
    const u32 packed = kept(ptx::shared_address(s.packed + warp * 32 * Items));
    length = this->visible_of(length);
    float4 v[quads], sample;
    load(v, sample, scores, length);
    std::int32_t id[quads];
    if constexpr (Paged) load_pages(id, length);
    __syncthreads();
    u32 nans = 0;
    if (__builtin_expect(p.counts != nullptr, 0)) {
#pragma unroll
      for (int i = 0; i < Items; ++i) nans += is_nan(get(v, i)) ? 1U : 0U;
    }
    if constexpr (Paged) drop_bad_pages(v, id, length);

    typename Base::Choice c;
    u32 bin[Items], last = bins;
    bool full = length > p.args.k;  // k are selected
    if (__builtin_expect(full, 1)) {
      const Scale scale = guess(sample, length);
#pragma unroll
      for (int i = 0; i < Items; ++i) {
        bin[i] = scale.bin_of(get(v, i));
        count(bin[i]);
      }
      __syncthreads();
      const FoundBin f = find(u32(p.args.k));
      c.need = u32(p.args.k) - f.above;
      c.count = f.count;
      last = f.bin;
    } else {
#pragma unroll
      for (int i = 0; i < Items; ++i) bin[i] = 0;
    }
#pragma unroll
    for (int i = 0; i < Items; ++i) {
      c.reach |= bin[i] <= last ? 1U << i : 0;
      c.question |= bin[i] == last ? 1U << i : 0;
    }
    if (__builtin_expect(last == u32(bins), 0)) {  // NaN looks as if it were below all bins
      u32 valid = 0;
#pragma unroll
      for (int i = 0; i < Items; ++i) valid |= is_nan(get(v, i)) ? 0 : 1U << i;
      c.reach &= valid;
      c.question &= valid;
    }
    if (__builtin_expect(c.count > u32(by_counting) && c.count != c.need, 0)) {
      narrow(v, c);
      full = c.count != 0;
    }
    const bool ranks = c.count != c.need;
    if (ranks) {
#pragma unroll 1
      for (u32 left = c.question; left != 0; left &= left - 1) s.members[ptx::add_shared(ptx::shared_address(&s.joined), 1)] = entry_at(v, __ffs(int(left)) - 1);
      __syncthreads();
    }
    Slots slots = number(c.reach, lane);
    if (lane == 0) s.reached[warp] = slots.all;
    if (ranks && warp == warps - 1) rank(c);
    __syncthreads();
    const u32 listed = lane < warps ? s.reached[lane] - s.rejected[lane] : 0;
    const u32 before = __reduce_add_sync(~0U, lane < warp ? listed : 0);
    if (s.rejected[warp] != 0) {
#pragma unroll 1
      for (u32 left = c.question; left != 0; left &= left - 1) {
        const int i = __ffs(int(left)) - 1;
        if (entry_at(v, i) < s.cut) c.reach &= ~(1U << i);
      }
      slots = number(c.reach, lane);
    }
    if (__builtin_expect(p.args.order == TopKOrder::by_score, 0)) {
      u64* ranked = reinterpret_cast<u64*>(s.packed);
#pragma unroll 1
      for (u32 left = c.reach; left != 0; left &= left - 1) ranked[atomicAdd(&s.emitted, 1U)] = entry_at(v, __ffs(int(left)) - 1);
      __syncthreads();
      Row<Paged>::template emit_by_score<Threads>(ranked, s.emitted);
    } else {
      emit(c.reach, slots, to + before, packed);
      if (__builtin_expect(!full, 0)) {
#pragma unroll 1
        for (int j = int(__reduce_add_sync(~0U, listed)) + tid; j < p.args.k; j += Threads) to[j] = -1;
      }
    }
    if (p.counts != nullptr) {
      nans = __reduce_add_sync(~0U, nans) - u32(min(max((warp + 1) * part - length, 0), part));  // those that stand beyond the end
      if (lane == 0 && nans != 0) atomicAdd(p.counts, u64(nans));
      this->count_pages(length);
    }
  }
};

#endif  // KVIRE_CUDA_COMPILER

}  // namespace detail::topk

KVIRE_NAMESPACE_END
