// SPDX-License-Identifier: Apache-2.0
// Transfers of random pages and tokens between pinned host memory and the device, against one contiguous memcpy of the same bytes; what they cost a
// memory-bound kernel beside them; both directions at once; pinned memory; the host's time to submit. Every result is verified before it is timed.
#include <cstdio>
#include <string>
#include <type_traits>
#include <vector>

#include <benchmarks/support/transfer_lists.cuh>
#include <kvire/codec/row.hpp>
#include <kvire/pool/mirror.hpp>
#include <kvire/preset/deepseek_v3_2.hpp>
#include <kvire/preset/deepseek_v4.hpp>
#include <kvire/transfer/migrate.cuh>
#include <kvire/transfer/submit.cuh>

using namespace kvire_bench;

namespace {

void pages_table(Machine& m) {
  std::printf(
      "\n| dir | page B | pages | one memcpy GB/s | kernel GB/s | %% of memcpy | queued: memcpy GB/s | kernel GB/s | %% of memcpy | SMs |\n|---|---|---|---|---|---|---|---|---|---|\n");
  std::uint32_t seed = 5;
  for (const std::int64_t page : {std::int64_t{1728}, std::int64_t{4352}, std::int64_t{8448}, std::int64_t{16384}, std::int64_t{37440}}) {
    for (const bool to_host : {false, true}) {
      m.scramble(seed += 100);
      for (const std::int64_t n : {256, 1024, 4096, 16384}) {
        if (n * page > pool_bytes - page) continue;
        const int repeats = n * page < (64 << 20) ? 15 : 7;
        const double one = memcpy_time(m, n * page, to_host, repeats);
        const double one_queued = memcpy_time(m, n * page, to_host, repeats, Start::queued);
        m.scramble(seed += 100);
        const RandomPages check(m, page, n, to_host);
        check.launch(m.copies);
        KVIRE_BENCH_CHECK(cudaStreamSynchronize(m.copies.native()));
        if (!check.right(m)) std::printf("WRONG\n");
        const double us = m.microseconds(repeats, [&] { check.launch(m.copies); });
        const double us_queued = m.microseconds(repeats, [&] { check.launch(m.copies); }, Start::queued);
        const double bytes = static_cast<double>(n * page);
        std::printf("| %s | %lld | %lld | %.1f | %.1f | %.1f | %.1f | %.1f | %.1f | %d |\n", to_host ? "D2H" : "H2D", static_cast<long long>(page), static_cast<long long>(n),
                    bytes / one / 1e3, bytes / us / 1e3, 100 * one / us, bytes / one_queued / 1e3, bytes / us_queued / 1e3, 100 * one_queued / us_queued, detail::CopyShape::of(Pace::full, to_host, page).blocks);
        std::fflush(stdout);
      }
    }
  }
}

template <class P>
void tokens_row(Machine& m, const char* name, bool whole, bool to_host, std::int64_t n, int blocks) {
  m.scramble(static_cast<std::uint32_t>(n + blocks));
  const RandomTokens<P> list(m, n, to_host, whole);
  const double one = memcpy_time(m, n * detail::token_bytes<P>, to_host, 9);
  m.scramble(static_cast<std::uint32_t>(n + blocks + 1));
  list.launch(m.copies, blocks);
  KVIRE_BENCH_CHECK(cudaStreamSynchronize(m.copies.native()));
  const char* const verdict = list.right(m) ? "" : " WRONG";
  const double us = m.microseconds(7, [&] { list.launch(m.copies, blocks); });
  const double bytes = static_cast<double>(n * detail::token_bytes<P>);
  std::printf("| %s | %s, %lld B | %lld%s | %.1f | %.1f | %.1f%s | %d |\n", to_host ? "D2H" : "H2D", name, static_cast<long long>(detail::token_bytes<P>),
              static_cast<long long>(n), whole ? ", whole pages" : "", bytes / one / 1e3, bytes / us / 1e3, 100 * one / us, verdict, blocks);
  std::fflush(stdout);
}

void tokens_table(Machine& m) {
  std::printf("\n| dir | token | tokens | one memcpy GB/s | kernel GB/s | %% of memcpy | SMs |\n|---|---|---|---|---|---|---|\n");
  for (const bool to_host : {false, true}) {
    tokens_row<Fp4WithScale<64, 128>>(m, "fp4 keys", false, to_host, 65536, 8);
    tokens_row<Fp8WithScale<64, 128>>(m, "fp8 keys", false, to_host, 65536, 8);
    tokens_row<Bf16Contiguous<64, 128>>(m, "bf16 keys", false, to_host, 65536, 8);
    tokens_row<preset::deepseek_v4::Latent<64>>(m, "V4 latent", false, to_host, 4096, 8);
    tokens_row<preset::deepseek_v4::Latent<64>>(m, "V4 latent", false, to_host, 65536, 8);
    tokens_row<preset::deepseek_v4::Latent<64>>(m, "V4 latent", false, to_host, 65536, 4);
    tokens_row<preset::deepseek_v4::Latent<64>>(m, "V4 latent", false, to_host, 65536, 16);
    tokens_row<preset::deepseek_v4::Latent<64>>(m, "V4 latent", true, to_host, 65536, 4);
    tokens_row<preset::deepseek_v3_2::Latent<64>>(m, "V3.2 latent", false, to_host, 65536, 8);
    tokens_row<Bf16Contiguous<64, 320>>(m, "640 B rows", false, to_host, 65536, 8);
  }
}

template <class Kernel>
void beside(Machine& m, bool shapes) {
  constexpr int page = 8448;
  constexpr std::int64_t n = 65536;
  Beside<Kernel> beside(m);
  std::printf("\nlogits of 64 x 32k, %s, %d query token%s: %.1f us alone, %.0f GB/s\n\n| beside it | its time, us | slowdown | transfer GB/s |\n|---|---|---|---|\n", Kernel::P::name,
              Kernel::query_tokens, Kernel::query_tokens == 1 ? "" : "s", beside.alone(), static_cast<double>(Kernel::pages_a_launch * Kernel::P::page_bytes) / beside.alone() / 1e3);
  const auto row = [&](const char* name, auto start, int free = 0) {
    const auto [us, ms] = beside.run(beside.launches, start, beside.all_but(free));
    std::printf("| %s | %.1f | %.3f | %.1f |\n", name, us, us / beside.alone(), static_cast<double>(n) * page / ms / 1e6);
    std::fflush(stdout);
  };
  for (const bool to_host : {false, true}) {
    row(to_host ? "D2H, copy engine, contiguous" : "H2D, copy engine, contiguous", [&] {
      KVIRE_BENCH_CHECK(cudaMemcpyAsync(to_host ? m.host : m.device, to_host ? m.device : m.host, static_cast<std::size_t>(n * page), cudaMemcpyDefault, m.copies.native()));
    });
    const RandomPages list(m, page, n, to_host);
    row(to_host ? "D2H, kernel, random pages" : "H2D, kernel, random pages", [&] { list.launch(m.copies); });
    row(to_host ? "D2H, kernel, random pages, logits leave 4 SMs" : "H2D, kernel, random pages, logits leave 4 SMs", [&] { list.launch(m.copies); }, 4);
    row(to_host ? "D2H, kernel, random pages, gentle" : "H2D, kernel, random pages, gentle", [&] { list.launch(m.copies, detail::CopyShape::of(Pace::gentle, to_host, page)); });
    row(to_host ? "D2H, kernel, random pages, apart, logits leave 5 SMs" : "H2D, kernel, random pages, apart, logits leave 5 SMs", [&] { list.launch(m.copies, detail::CopyShape::of(Pace::apart, to_host, page)); }, 5);
    if (!shapes) continue;
    // What the gentle shape was chosen from.
    for (const int blocks : {8, 16, 24, 33, 66}) {
      for (const std::int64_t chunk : {33, 66}) {
        for (const int slots : {2, 3, 4}) {
          for (const double rate : {0.0, 48.5, 49.5, 50.2}) {
            auto shape = detail::CopyShape::of(Pace::gentle, to_host, page);
            shape.blocks = blocks;
            shape.chunk_bytes = chunk * 128;
            shape.slots = slots;
            shape.gigabytes_per_second = rate;
            char name[120];
            std::snprintf(name, sizeof name, "%s, %d blocks, %d chunks of %d B each, at most %.1f GB/s", to_host ? "D2H" : "H2D", blocks, slots, static_cast<int>(chunk * 128), rate);
            row(name, [&] { list.launch(m.copies, shape); });
          }
        }
      }
    }
  }
}

void both(Machine& m) {
  constexpr std::int64_t page = 8448;
  constexpr std::int64_t n = 65536;
  RandomPages in(m, page, n, false);
  RandomPages out(m, page, n, true);
  std::printf("\n| both directions at once | sum GB/s | in, until its end | out, until its end |\n|---|---|---|---|\n");
  cudaEvent_t marks[4];
  for (auto& mark : marks) KVIRE_BENCH_CHECK(cudaEventCreate(&mark));
  const auto run = [&](const char* name, auto first, auto second) {
    std::vector<double> sum;
    std::vector<double> rates[2];
    for (int r = 0; r < 3; ++r) {
      KVIRE_BENCH_CHECK(cudaDeviceSynchronize());
      const double t = seconds();
      KVIRE_BENCH_CHECK(cudaEventRecord(marks[0], m.copies.native()));
      first();
      KVIRE_BENCH_CHECK(cudaEventRecord(marks[1], m.copies.native()));
      KVIRE_BENCH_CHECK(cudaEventRecord(marks[2], m.back.native()));
      second();
      KVIRE_BENCH_CHECK(cudaEventRecord(marks[3], m.back.native()));
      KVIRE_BENCH_CHECK(cudaDeviceSynchronize());
      const auto bytes = static_cast<double>(n * page);
      sum.push_back(2.0 * bytes / (seconds() - t) / 1e9);
      for (int i = 0; i < 2; ++i) {
        float ms = 0;
        KVIRE_BENCH_CHECK(cudaEventElapsedTime(&ms, marks[2 * i], marks[2 * i + 1]));
        rates[i].push_back(bytes / ms / 1e6);
      }
    }
    std::printf("| %s | %.1f | %.1f | %.1f |\n", name, median(sum), median(rates[0]), median(rates[1]));
  };
  const auto engine = [&](Stream<Cuda>& stream, bool to_host) { memcpy_half(m, stream, n * page, to_host); };
  run("copy engines, contiguous", [&] { engine(m.copies, false); }, [&] { engine(m.back, true); });
  run("kernels, random pages", [&] { in.launch(m.copies); }, [&] { out.launch(m.back); });
  const auto gentle = detail::CopyShape::of(Pace::gentle, true, page);
  run("kernels, random pages, backup gentle", [&] { in.launch(m.copies); }, [&] { out.launch(m.back, gentle); });
  run("copy engine in, kernel out", [&] { engine(m.copies, false); }, [&] { out.launch(m.back); });
  run("copy engine in, kernel out gentle", [&] { engine(m.copies, false); }, [&] { out.launch(m.back, gentle); });
  run("kernel in, copy engine out", [&] { in.launch(m.copies); }, [&] { engine(m.back, true); });
  for (const double rate : {40.0, 41.0, 42.0}) {
    auto held = detail::CopyShape::of(Pace::full, true, page);
    held.gigabytes_per_second = rate;
    const std::string at = "backup at " + std::to_string(static_cast<int>(rate)) + " GB/s at most";
    run(("kernels, random pages, " + at).c_str(), [&] { in.launch(m.copies); }, [&] { out.launch(m.back, held); });
    auto small = detail::CopyShape::of(Pace::full, false, page);
    small.warps = 8;
    small.chunk_bytes = 1024;
    run(("the same, load by 8 warps in chunks of 1 KiB, " + at).c_str(), [&] { in.launch(m.copies, small); }, [&] { out.launch(m.back, held); });
  }
}

// One line of the grid: both ways, both ways at once, beside compute. `make(to_host)` is a list ready to launch; `paced(list, stream, pace, rate)` launches it
// that way, null where there is no such way. Four lists take turns, since a device has the translations of a few thousand places at hand.
template <class Make, class Paced>
void grid_row(Machine& m, Beside<>& beside, std::int64_t item, std::int64_t n, int blocks_in, int blocks_out, Make make, Paced paced) {
  constexpr bool has_paces = !std::is_same_v<Paced, std::nullptr_t>;
  constexpr std::size_t lists = 4;
  const auto bytes = static_cast<double>(n * item);
  const int repeats = bytes < (64 << 20) ? 12 : 4;
  std::printf("| %lld | %lld |", static_cast<long long>(item), static_cast<long long>(n));
  std::vector<decltype(make(true))> of[2];
  double us[2];
  for (const bool to_host : {false, true}) {
    const double one = memcpy_time(m, n * item, to_host, repeats, Start::queued);
    for (std::size_t i = 0; i < lists; ++i) of[to_host].push_back(make(to_host));
    m.scramble(static_cast<std::uint32_t>(item * 7 + n + to_host));
    of[to_host][0].launch(m.copies);
    KVIRE_BENCH_CHECK(cudaStreamSynchronize(m.copies.native()));
    if (!of[to_host][0].right(m)) std::printf(" WRONG");
    us[to_host] = m.microseconds(repeats, [&, i = std::size_t(0)]() mutable { of[to_host][++i % lists].launch(m.copies); }, Start::queued);
    std::printf(" %.1f | %.1f |", bytes / us[to_host] / 1e3, 100 * one / us[to_host]);
  }
  std::size_t turn = 0;
  const auto in = [&] { of[false][++turn % lists].launch(m.copies); };
  const double engines = together(m, repeats, [&] { memcpy_half(m, m.copies, n * item, false); }, [&] { memcpy_half(m, m.back, n * item, true); });
  const double both = together(m, repeats, in, [&] { of[true][turn % lists].launch(m.back); });
  std::printf(" %.1f | %.1f |", 2 * bytes / both / 1e3, 100 * engines / both);
  if constexpr (has_paces) {
    const double held = together(m, repeats, in, [&] { paced(of[true][turn % lists], m.back, Pace::full, 42); });
    std::printf(" %.1f | %.1f |", 2 * bytes / held / 1e3, 100 * engines / held);
  } else {
    std::printf(" | |");
  }
  std::printf(" %d / %d |", blocks_in, blocks_out);
  const auto slowdown = [&](bool to_host, int sms, auto launch) {
    const int times = static_cast<int>(std::clamp(6000 / us[to_host], 1.0, 700.0));
    return beside.run(40, [&] {
      for (int i = 0; i < times; ++i) launch(of[to_host][static_cast<std::size_t>(i) % lists]);
    }, sms).us / beside.alone();
  };
  const int all = beside.all_but(0);
  const auto plain = [&](const auto& list) { list.launch(m.copies); };
  const double full_in = slowdown(false, all, plain);
  std::printf(" %.2f / %.2f |", full_in, slowdown(true, all, plain));
  if constexpr (has_paces) {
    for (const Pace pace : {Pace::gentle, Pace::apart}) {
      const int sms = pace == Pace::apart ? beside.all_but(5) : all;
      const auto with_pace = [&](const auto& list) { paced(list, m.copies, pace, 0); };
      const double paced_in = slowdown(false, sms, with_pace);
      std::printf(" %.2f / %.2f |", paced_in, slowdown(true, sms, with_pace));
    }
    std::printf("\n");
  } else {
    std::printf(" | |\n");
  }
  std::fflush(stdout);
}

void grid(Machine& m) {
  Beside<> beside(m);
  std::printf("\nbehind other work of the stream; beside: fp8 logits of 64 x 32k, %.1f us alone\n\n"
              "| item B | items | in GB/s | %% of memcpy | out GB/s | %% of memcpy | both ways at once GB/s | %% of two memcpy | with backups at 42 | %% | SMs in / out | logits beside in / out | gentle | apart |\n"
              "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|\n", beside.alone());
  const auto tokens = [&]<class P>(std::type_identity<P>) {
    for (const std::int64_t n : {256, 1024, 4096, 16384}) {
      grid_row(m, beside, detail::token_bytes<P>, n, 8, 8, [&](bool to_host) { return RandomTokens<P>(m, n, to_host); }, nullptr);
    }
  };
  tokens(std::type_identity<Fp4WithScale<64, 128>>{});
  tokens(std::type_identity<Fp8WithScale<64, 128>>{});
  tokens(std::type_identity<Bf16Contiguous<64, 128>>{});
  tokens(std::type_identity<preset::deepseek_v4::Latent<64>>{});
  tokens(std::type_identity<preset::deepseek_v3_2::Latent<64>>{});
  for (const std::int64_t page : {std::int64_t{4352}, std::int64_t{8448}, std::int64_t{16384}, std::int64_t{37440}}) {
    for (const std::int64_t n : {256, 1024, 4096, 16384}) {
      const auto blocks = [&](bool to_host) { return detail::CopyShape::of(Pace::full, to_host, page).blocks; };
      grid_row(m, beside, page, n, blocks(false), blocks(true), [&](bool to_host) { return RandomPages(m, page, n, to_host); },
               [&](const RandomPages& list, Stream<Cuda>& stream, Pace pace, double rate) {
                 auto shape = detail::CopyShape::of(pace, list.to_host, page);
                 if (rate > 0) shape.gigabytes_per_second = rate;
                 list.launch(stream, shape);
               });
    }
  }
}

// Eight layers in one launch, from and to pools that lie layer by layer or page by page.
void reorder_table(Machine& m) {
  constexpr std::int64_t layers = 8;
  std::printf("\n| dir | page B | pages x layers | same arrangement GB/s | page first on the host GB/s | %% of it |\n|---|---|---|---|---|---|\n");
  for (const std::int64_t page : {std::int64_t{8448}, std::int64_t{16384}}) {
    for (const bool to_host : {false, true}) {
      const std::int64_t pages = pool_bytes / page / layers;
      const std::int64_t n = 2048;
      RandomPages list(m, page, n, to_host);
      list.ids.from = m.ids(pages, n);
      list.ids.to = m.ids(pages, n);
      std::memcpy(list.scratch.host(), list.ids.from.data(), n * 4);
      std::memcpy(list.scratch.host() + n * 4, list.ids.to.data(), n * 4);
      const auto time = [&](bool page_first) {
        std::vector<detail::CopyRequest> requests;
        for (std::int64_t layer = 0; layer < layers; ++layer) {
          auto request = list.request;
          request.list.from_pages = request.list.to_pages = static_cast<std::int32_t>(pages);
          const std::int64_t host = layer * (page_first ? page : pages * page);
          const std::int64_t device = layer * pages * page;
          request.list.from += to_host ? device : host;
          request.list.to += to_host ? host : device;
          if (page_first) (to_host ? request.list.to_stride : request.list.from_stride) = layers * page;
          requests.push_back(request);
        }
        return m.microseconds(9, [&] { detail::launch_pages(m.copies, requests, to_host, detail::CopyShape::of(Pace::full, to_host, page)).value(); });
      };
      const double same = time(false);
      const double other = time(true);
      const auto bytes = static_cast<double>(n * layers * page);
      std::printf("| %s | %lld | %lld x %lld | %.1f | %.1f | %.1f |\n", to_host ? "D2H" : "H2D", static_cast<long long>(page), static_cast<long long>(n), static_cast<long long>(layers),
                  bytes / same / 1e3, bytes / other / 1e3, 100 * same / other);
    }
  }
}

// Pages rewritten on their way, against the plain copy of as many pages of the layout that crosses the link.
template <class From, class To>
void migrate_row(Machine& m, bool to_host) {
  constexpr std::int64_t n = 8192;
  const std::int64_t on_link = to_host ? To::page_bytes : From::page_bytes;
  const int blocks = detail::PieceQueue::migrate_blocks(to_host);
  const RandomPages plain(m, on_link, n, to_host);
  const double copy = m.microseconds(7, [&] { plain.launch(m.copies); });
  const RandomPages pages(m, std::max(From::page_bytes, To::page_bytes), n, to_host);
  auto list = pages.request.list;
  list.from_stride = From::page_bytes;
  list.to_stride = To::page_bytes;
  list.page_bytes = To::page_bytes;
  const auto launch = [&] { detail::launch_migrate_pages<From, To>(m.copies, list, pages.request.ids, n, {}, blocks).value(); };
  m.scramble(static_cast<std::uint32_t>(on_link));
  launch();
  KVIRE_BENCH_CHECK(cudaStreamSynchronize(m.copies.native()));
  int wrong = 0;
  std::vector<std::byte> from(static_cast<std::size_t>(From::page_bytes));
  std::vector<std::byte> to(static_cast<std::size_t>(To::page_bytes));
  std::vector<std::byte> want(to.size());
  for (std::size_t i = 0; i < static_cast<std::size_t>(n); i += 127) {
    const auto from_at = static_cast<std::size_t>(pages.ids.from[i]) * from.size();
    const auto to_at = static_cast<std::size_t>(pages.ids.to[i]) * to.size();
    KVIRE_BENCH_CHECK(cudaMemcpy(from.data(), (to_host ? m.device : m.host) + from_at, from.size(), cudaMemcpyDefault));
    KVIRE_BENCH_CHECK(cudaMemcpy(to.data(), (to_host ? m.host : m.device) + to_at, to.size(), cudaMemcpyDefault));
    for (int t = 0; t < From::tokens_per_page; ++t) {
      float x[From::dim];
      decode_row<From>(from.data(), t, x);
      encode_row<To>(x, want.data(), t);
    }
    wrong += want != to;
  }
  const double us = m.microseconds(7, launch);
  const auto bytes = static_cast<double>(n * on_link);
  std::printf("| %s | %s | %s | %d | %.1f | %.1f | %.1f%s |\n", to_host ? "D2H" : "H2D", From::name, To::name, blocks, bytes / copy / 1e3, bytes / us / 1e3, 100 * copy / us,
              wrong > 0 ? " WRONG" : "");
  std::fflush(stdout);
}

void migrate_table(Machine& m) {
  using Fp8 = Fp8WithScale<64, 128>;
  using Interleaved = Fp8WithScaleInterleaved<64, 128>;
  using Bf16 = Bf16Contiguous<64, 128>;
  using Fp4 = Fp4WithScale<64, 128>;
  std::printf("\n| dir | from | to | blocks | plain copy over the link GB/s | migrate GB/s | %% of it |\n|---|---|---|---|---|---|---|\n");
  for (const bool to_host : {false, true}) {
    migrate_row<Bf16, Fp8>(m, to_host);
    migrate_row<Fp8, Bf16>(m, to_host);
    migrate_row<Fp8, Interleaved>(m, to_host);
    migrate_row<Bf16, Fp4>(m, to_host);
    migrate_row<Fp4, Fp8>(m, to_host);
  }
}

void submit(Machine& m) {
  for (const bool to_host : {false, true}) {
    const RandomPages one(m, 8448, 1, to_host);
    std::printf("%s one page of 8448 B, event to event: kernel %.1f us, memcpy %.1f us\n", to_host ? "D2H" : "H2D", m.microseconds(31, [&] { one.launch(m.copies); }),
                memcpy_time(m, 8448, to_host, 31));
  }
  using P = Fp8WithScale<64, 128>;
  auto device = DevicePool<P, Cuda>::make({.pages = 2049}).value();
  auto host = mirror_of(device, 2049).value();
  auto d = device.allocate(1024).value();
  auto h = host.allocate(1024).value();
  auto* lists = device_array<std::int32_t>(2048);
  const auto a = m.ids(1025, 1024);
  const auto b = m.ids(1025, 1024);
  KVIRE_BENCH_CHECK(cudaMemcpy(lists, a.data(), 4096, cudaMemcpyHostToDevice));
  KVIRE_BENCH_CHECK(cudaMemcpy(lists + 1024, b.data(), 4096, cudaMemcpyHostToDevice));
  auto mover = PageMover<P>::make(host, device, h, d, true, m.copies).value();
  std::vector<double> all;
  for (int r = 0; r < 60; ++r) {
    const double t = seconds();
    mover.submit({lists, lists + 1024}, 1024, m.copies).value();
    if (r >= 10) all.push_back((seconds() - t) * 1e6);
    if (r % 10 == 9) KVIRE_BENCH_CHECK(cudaStreamSynchronize(m.copies.native()));
  }
  KVIRE_BENCH_CHECK(cudaStreamSynchronize(m.copies.native()));
  std::printf("\nsubmit, 1,024 pages, ids on the device: %.1f us of host time\n", median(all));
  std::vector<double> plans;
  for (int r = 0; r < 20; ++r) {
    mover = PageMover<P>::make(host, device, {}, {}, true, m.copies).value();
    const double t = seconds();
    auto ticket = load(host, device, plan(h, d), m.copies).value();
    plans.push_back((seconds() - t) * 1e6);
    ticket.wait().value();
  }
  std::printf("load, 1,024 pages by a checked plan with a ticket: %.1f us of host time\n", median(plans));
}

}  // namespace

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "all";
  cudaDeviceProp properties{};
  KVIRE_BENCH_CHECK(cudaGetDeviceProperties(&properties, 0));
  int driver = 0;
  int runtime = 0;
  KVIRE_BENCH_CHECK(cudaDriverGetVersion(&driver));
  KVIRE_BENCH_CHECK(cudaRuntimeGetVersion(&runtime));
  std::printf("%s, driver for CUDA %d, runtime %d\n", properties.name, driver, runtime);
  Machine m;
  if (what == "all" || what == "pages") pages_table(m);
  if (what == "all" || what == "tokens") tokens_table(m);
  if (what == "all" || what == "reorder") reorder_table(m);
  if (what == "all" || what == "migrate") migrate_table(m);
  if (what == "all" || what == "beside" || what == "beside_shapes") beside<Logits<>>(m, what == "beside_shapes");
  if (what == "all" || what == "beside") beside<Logits<Fp8WithScale<64, 128>, 2>>(m, false);
  if (what == "all" || what == "beside") beside<Logits<Fp4WithScale<64, 128>>>(m, false);
  if (what == "all" || what == "both") both(m);
  if (what == "all" || what == "grid") grid(m);
  if (what == "all" || what == "submit") submit(m);
  return 0;
}
