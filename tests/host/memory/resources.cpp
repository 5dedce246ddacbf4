// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include <kvire/memory/counting.hpp>
#include <kvire/memory/cuda/mr.hpp>
#include <kvire/memory/guarded.hpp>
#include <kvire/memory/host.hpp>
#include <kvire/memory/huge_page.hpp>

using namespace kvire;

static_assert(ByteResource<HostMemory> && ByteResource<HugePageMemory>);
static_assert(ByteResource<Counting<HostMemory>> && ByteResource<Guarded<Counting<HugePageMemory>>>);
static_assert(HugePageMemory::zeroed && Counting<HugePageMemory>::zeroed && !Guarded<HugePageMemory>::zeroed);
static_assert(!ByteResource<int>);

namespace {

template <class R>
void round_trip(R resource) {
  for (std::int64_t bytes : {std::int64_t{1}, std::int64_t{8448}, std::int64_t{3} << 20}) {
    for (std::int64_t alignment : {16, 256, 4096}) {
      auto p = resource.allocate(bytes, alignment);
      REQUIRE(p.ok());
      CHECK(reinterpret_cast<std::uintptr_t>(p.value()) % static_cast<std::uintptr_t>(alignment) == 0);
      if (R::zeroed) CHECK(p.value()[bytes - 1] == std::byte{0});
      std::memset(p.value(), 0x5A, static_cast<std::size_t>(bytes));
      resource.deallocate(p.value(), bytes, alignment);
    }
  }
  CHECK(resource.allocate(0, 16).error().code == ErrorCode::invalid_argument);
  CHECK(resource.allocate(-5, 16).error().code == ErrorCode::invalid_argument);
  CHECK(resource.allocate(16, 24).error().code == ErrorCode::invalid_argument);
}

}  // namespace

TEST_CASE("memory: every resource allocates aligned bytes and refuses nonsense") {
  round_trip(HostMemory{});
  round_trip(HugePageMemory{});
  round_trip(Counting<HostMemory>{});
  round_trip(Guarded<HostMemory>{});
  round_trip(Guarded<Counting<HugePageMemory>>{});
  CHECK(HugePageMemory{}.allocate(16, HugePageMemory::huge_page * 2).error().code == ErrorCode::invalid_argument);
}

TEST_CASE("memory: more than the machine or its control group has is an error with both numbers") {
  const std::int64_t available = available_memory();
  CHECK(available > 0);
  const std::int64_t wanted = std::int64_t{1} << 50;
  for (const auto& error : {HostMemory{}.allocate(wanted, 256).error(), HugePageMemory{}.allocate(wanted, 256).error()}) {
    CHECK(error.code == ErrorCode::exhausted);
    CHECK(error.message.find(std::to_string(wanted)) != std::string::npos);
    CHECK(error.message.find("available") != std::string::npos);
  }
}

TEST_CASE("memory: what the system keeps of files is available, to the machine, a control group and a memory node") {
  const auto root = std::filesystem::temp_directory_path() / ("kvire_memory_" + std::to_string(::getpid()));
  const auto write = [&](const char* name, const char* text) {
    const std::filesystem::path file = root.string() + name;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text;
  };
  const auto available = [&] { return detail::available_memory_under(root.string()); };
  CHECK(available() == std::numeric_limits<std::int64_t>::max());
  write("/proc/meminfo", "MemTotal:       1000 kB\nMemFree:         100 kB\nMemAvailable:    900 kB\n");
  CHECK(available() == 900 * 1024);
  // Version 1 of control groups, which counts the groups below apart.
  write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "600000\n");
  write("/sys/fs/cgroup/memory/memory.usage_in_bytes", "500000\n");
  CHECK(available() == 100'000);
  write("/sys/fs/cgroup/memory/memory.stat", "cache 300000\ninactive_file 1\nactive_file 2\ntotal_cache 300000\ntotal_inactive_file 90000\ntotal_active_file 10000\n");
  CHECK(available() == 200'000);
  // Version 2. Memory that is shared between processes is in `file`, and does not go.
  write("/sys/fs/cgroup/memory.max", "max\n");
  write("/sys/fs/cgroup/memory.current", "450000\n");
  write("/sys/fs/cgroup/memory.stat", "anon 50000\nfile 400000\nshmem 50000\ninactive_anon 1\nactive_anon 2\ninactive_file 200000\nactive_file 150000\n");
  CHECK(available() == 200'000);
  write("/sys/fs/cgroup/memory.max", "150000\n");
  CHECK(available() == 50'000);
  write("/sys/fs/cgroup/memory.max", "90000\n");
  CHECK(available() == 0);
  write("/sys/fs/cgroup/memory.current", "300000\n");
  CHECK(available() == 90'000);
  // The group of the process is further down, and each group on the way may have a limit.
  write("/proc/self/cgroup", "7:cpu,memory:/slurm/job/step\n4:cpuset:/elsewhere\n0::/system.slice/engine.service\n");
  CHECK(available() == 90'000);
  write("/sys/fs/cgroup/elsewhere/memory.max", "1\n");
  write("/sys/fs/cgroup/system.slice/memory.max", "80000\n");
  CHECK(available() == 80'000);
  write("/sys/fs/cgroup/system.slice/engine.service/memory.max", "70000\n");
  write("/sys/fs/cgroup/system.slice/engine.service/memory.current", "30000\n");
  CHECK(available() == 40'000);
  write("/sys/fs/cgroup/memory/slurm/job/memory.limit_in_bytes", "20000\n");
  CHECK(available() == 20'000);
  write("/proc/self/cgroup", "0::/\n");
  CHECK(available() == 90'000);

  write("/sys/devices/system/node/node1/meminfo",
        "Node 1 MemTotal:       4000 kB\nNode 1 MemFree:        1000 kB\nNode 1 Active(file):     30 kB\nNode 1 Inactive(file):  200 kB\nNode 1 FilePages:       900 kB\nNode 1 Shmem: 670 kB\n");
  CHECK(detail::available_on_node(1, root.string()) == 1230 * 1024);
  CHECK(detail::available_on_node(0, root.string()) == -1);
  std::filesystem::remove_all(root);
}

TEST_CASE("memory: a resource of cuda::mr is asked for no bytes at all, as containers do") {
  ToMr<Counting<HostMemory>> memory;
  void* const none = memory.allocate(0);
  void* const more = memory.allocate_sync(0, 64);
  CHECK(none != nullptr);
  CHECK(none != more);
  memory.deallocate(none, 0);
  memory.deallocate_sync(more, 0, 64);
}

TEST_CASE("memory: counting keeps live bytes, high water and failures, and holds a limit") {
  Counting<HostMemory> counting({}, 1000);
  auto any = AnyResource(counting);
  {
    auto a = Buffer::make(any, 600).value();
    auto b = Buffer::make(any, 400).value();
    CHECK(counting.counts().live_bytes == 1000);
    const auto refused = Buffer::make(any, 1);
    REQUIRE_FALSE(refused.ok());
    CHECK(refused.error().code == ErrorCode::exhausted);
    CHECK(refused.error().message.find("1 bytes wanted, 0 available") != std::string::npos);
    auto moved = std::move(b);
    CHECK(moved.bytes() == 400);
  }
  const auto counts = counting.counts();
  CHECK(counts.live_bytes == 0);
  CHECK(counts.live_allocations == 0);
  CHECK(counts.high_water_bytes == 1000);
  CHECK(counts.allocations == 2);
  CHECK(counts.failures == 1);
}

TEST_CASE("memory: a limit holds against several threads") {
  Counting<HostMemory> counting({}, 64 * 10);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([counting]() mutable {
      for (int i = 0; i < 500; ++i) {
        auto p = counting.allocate(64, 64);
        if (p.ok()) counting.deallocate(p.value(), 64, 64);
      }
    });
  }
  for (auto& t : threads) t.join();
  CHECK(counting.counts().live_bytes == 0);
  CHECK(counting.counts().high_water_bytes <= 640);
}

TEST_CASE("memory: guarded memory names the first bad byte") {
  using G = Guarded<HostMemory>;
  G guarded({}, G::OnViolation::keep);
  std::byte* p = guarded.allocate(100, 64).value();
  CHECK(p[0] == std::byte{GuardPatterns::fresh});
  CHECK(p[99] == std::byte{GuardPatterns::fresh});
  CHECK(guarded.check().ok());
  SUBCASE("behind") {
    p[103] = std::byte{1};
    p[110] = std::byte{2};
    CHECK(guarded.check().error().message.find("byte 103 of an allocation of 100 bytes was overwritten with 0x01") != std::string::npos);
    guarded.deallocate(p, 100, 64);
    CHECK_FALSE(guarded.last_error().ok());
  }
  SUBCASE("before") {
    p[-1] = std::byte{7};
    CHECK(guarded.check().error().message.find("byte -1 ") != std::string::npos);
    guarded.deallocate(p, 100, 64);
    CHECK_FALSE(guarded.last_error().ok());
  }
  SUBCASE("double free, foreign free, wrong size") {
    guarded.deallocate(p, 100, 64);
    CHECK(guarded.last_error().ok());
    guarded.deallocate(p, 100, 64);
    CHECK(guarded.last_error().error().message.find("double or foreign") != std::string::npos);
    std::byte* q = guarded.allocate(10, 64).value();
    guarded.deallocate(q, 11, 64);
    CHECK(guarded.last_error().error().code == ErrorCode::mismatch);
  }
}

TEST_CASE("guarded: a size that the fences would wrap is refused") {
  const auto refused = Guarded<HostMemory>().allocate(INT64_C(0x7FFFFFFFFFFFFFFF), 64);
  REQUIRE_FALSE(refused.ok());
  CHECK(refused.error().code == ErrorCode::exhausted);
  CHECK(refused.error().message.find("9223372036854775807 bytes and two fences") != std::string::npos);
}

TEST_CASE("memory: a size that rounding to huge pages would wrap is refused") {
  const auto refused = HugePageMemory{}.allocate(INT64_C(0x7FFFFFFFFFFFFFFF), 64);
  REQUIRE_FALSE(refused.ok());
  CHECK(refused.error().message == "huge-page memory: 9223372036854775807 bytes and two huge pages do not fit 63 bits");
}

TEST_CASE("memory: on the memory node that was asked for, or an error that names it") {
  HugePageMemory here{.numa_node = 0};
  auto memory = here.allocate(3 << 20, 256);
  if (memory.ok()) {
    memory.value()[1 << 20] = std::byte{1};
    const int node = memory_node(memory.value() + (1 << 20));
    CHECK((node == 0 || node == -1));
    here.deallocate(memory.value(), 3 << 20, 256);
  } else {
    MESSAGE("skipped: " << memory.error().message);
    CHECK(memory.error().code == ErrorCode::unsupported);
  }
  for (const int node : {1023, 5000, -2}) {
    const auto refused = HugePageMemory{.numa_node = node}.allocate(3 << 20, 256);
    REQUIRE_FALSE(refused.ok());
    CHECK(refused.error().code == (memory.ok() ? ErrorCode::out_of_range : ErrorCode::unsupported));
    CHECK(refused.error().message.find("huge-page memory: memory node " + std::to_string(node)) != std::string::npos);
  }
}
