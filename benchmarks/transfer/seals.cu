// SPDX-License-Identifier: Apache-2.0
// What seals cost: whole transfers of random pages between pinned memory and the device, with and without, from the call until the last event. They take
// turns, so that whatever else the machine does hits both.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <random>
#include <vector>

#include <kvire/preset/deepseek_v4.hpp>
#include <kvire/transfer/bundle.hpp>
#include <kvire/transfer/transfer.cuh>

using namespace kvire;

namespace {

double seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }
double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// `transfer(seals)` issues one. `bytes`: of it.
template <class Transfer>
void row(const char* what, const char* direction, std::int64_t bytes, std::shared_ptr<PageSeals> seals, Transfer transfer) {
  std::vector<double> times[2];
  std::vector<double> submits[2];
  for (int i = 0; i < 22; ++i) {
    const int sealed = i % 2;
    const double start = seconds();
    auto ticket = transfer(sealed == 1 ? seals : nullptr).value();
    const double submitted = seconds();
    ticket.wait().value();
    if (i < 4) continue;
    times[sealed].push_back(seconds() - start);
    submits[sealed].push_back(submitted - start);
  }
  const double without = median(times[0]);
  const double with = median(times[1]);
  const auto rate = [&](double time) { return static_cast<double>(bytes) / time * 1e-9; };
  std::printf("| %s | %s | %.0f | %.1f | %.1f | %.1f | %.2f | %.2f |\n", what, direction, static_cast<double>(bytes) * 1e-6, rate(without), rate(with), 100 * (with / without - 1),
              1e3 * median(submits[0]), 1e3 * median(submits[1]));
  std::fflush(stdout);
}

template <class Id>
std::vector<Id> shuffled(const std::vector<PageRef<Id>>& refs, unsigned seed) {
  std::vector<Id> ids;
  for (const auto& ref : refs) ids.push_back(ref.id());
  std::mt19937 random(seed);
  std::shuffle(ids.begin(), ids.end(), random);
  return ids;
}

template <class P>
void pool(const char* what, int layers, std::int64_t pages) {
  auto device = DevicePool<P, Cuda>::make({.layers = layers, .pages = pages + 1}).value();
  auto host = mirror_of(device, pages + 1).value();
  auto seals = PageSeals::make(host).value();
  auto stream = Stream<Cuda>::make({.name = "copies"}).value();
  const auto on_device = device.allocate(pages).value();
  const auto on_host = host.allocate(pages).value();
  const auto moves = plan(shuffled(on_host, 1), shuffled(on_device, 2));
  const std::int64_t bytes = layers * pages * P::page_bytes;
  row(what, "D2H", bytes, seals, [&](auto s) { return backup(device, host, moves, stream, {.seals = std::move(s)}); });
  row(what, "H2D", bytes, seals, [&](auto s) { return load(host, device, moves, stream, {.seals = std::move(s)}); });
}

void bundle(std::int64_t pages, std::int64_t windows) {
  using Model = preset::deepseek_v4::Flash<>;
  BundlePages<Model> counts;
  counts.of<space::Full>() = pages + 1;
  counts.of<space::Window>() = windows + 1;
  counts.of<space::Request>() = 2;
  auto device = DeviceBundlePool<Model, Cuda>::make({.pages = counts}).value();
  auto host = mirror_of(device, counts).value();
  auto seals = PageSeals::make(host).value();
  auto stream = Stream<Cuda>::make({.name = "copies"}).value();
  const auto full = device.allocate<space::Full>(pages).value();
  const auto full_host = host.allocate<space::Full>(pages).value();
  const auto window = device.allocate<space::Window>(windows).value();
  const auto window_host = host.allocate<space::Window>(windows).value();
  const BundlePlan<Model> moves(in_space<space::Full>(plan(shuffled(full_host, 1), shuffled(full, 2))), in_space<space::Window>(plan(shuffled(window_host, 3), shuffled(window, 4))),
                                without<space::Request>());
  const std::int64_t bytes = pages * Model::page_bytes<space::Full>(Model::layers).count + windows * Model::page_bytes<space::Window>(Model::layers).count;
  char what[80];
  std::snprintf(what, sizeof what, "V4-Flash, %d pages, %d windows", static_cast<int>(pages), static_cast<int>(windows));
  row(what, "D2H", bytes, seals, [&](auto s) { return backup(device, host, moves, stream, {.seals = std::move(s)}); });
  row(what, "H2D", bytes, seals, [&](auto s) { return load(host, device, moves, stream, {.seals = std::move(s)}); });
}

}  // namespace

int main() {
  std::printf("| what | direction | MB | GB/s | with seals GB/s | longer by %% | ms to submit | with seals |\n|---|---|---|---|---|---|---|---|\n");
  pool<Fp8WithScale<64, 128>>("fp8 keys, 21 layers, 64 pages", 21, 64);
  pool<Fp8WithScale<64, 128>>("fp8 keys, 21 layers, 1,024 pages", 21, 1024);
  bundle(4, 1);
  bundle(32, 4);
  bundle(256, 16);
  return 0;
}
