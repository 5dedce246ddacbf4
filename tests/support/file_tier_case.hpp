// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <dirent.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <string>
#include <vector>

#include <kvire/layout/policies.hpp>
#include <kvire/tier/file_tier.hpp>
#include <tests/support/pages.hpp>

// A small model whose records are a few blocks, and folders that go with the test.

namespace kvire_test {

struct SmallSchedule {
  static constexpr int layers = 3;
  static constexpr int ratio(int layer) { return layer == 0 ? 0 : 4; }
};
struct SmallLatent : kvire::CacheEntry<kvire::Bf16Contiguous<16, 32>, kvire::space::Full, kvire::Tokens<1>> {
  static constexpr const char* name = "latent";
};
template <class P>
struct SmallIndexK : kvire::CacheEntry<P, kvire::space::Full, kvire::Tokens<4>, kvire::LayersOfRatio<SmallSchedule, 4>> {
  static constexpr const char* name = "index_k";
};
struct SmallWindow : kvire::CacheEntry<kvire::Bf16Contiguous<16, 32>, kvire::space::Window, kvire::Tokens<1>> {
  static constexpr const char* name = "window";
};
template <class IndexKey>
using SmallModel = kvire::CacheBundle<SmallSchedule, SmallLatent, SmallIndexK<IndexKey>, SmallWindow>;

using SmallFp8 = kvire::Fp8WithScale<4, 32>;
using SmallBf16 = kvire::Bf16Contiguous<4, 32>;

/// A folder of the test's own, removed with what is in it.
struct Folder {
  Folder() {
    const char* base = getenv("TMPDIR");
    path = std::string(base != nullptr ? base : "/tmp") + "/kvire_file_tier_XXXXXX";
    if (mkdtemp(path.data()) == nullptr) std::abort();
  }
  Folder(const Folder&) = delete;
  ~Folder() {
    for (const auto& name : files()) unlink((path + "/" + name).c_str());
    rmdir(path.c_str());
  }
  std::vector<std::string> files() const {
    std::vector<std::string> names;
    DIR* const open = opendir(path.c_str());
    if (open == nullptr) return names;
    while (const dirent* entry = readdir(open)) {
      if (entry->d_name[0] != '.') names.push_back(entry->d_name);
    }
    closedir(open);
    return names;
  }
  /// Names that end with `.kvire`.
  std::vector<std::string> records() const {
    auto names = files();
    std::erase_if(names, [](const auto& n) { return n.size() < 6 || n.compare(n.size() - 6, 6, ".kvire") != 0; });
    return names;
  }
  std::int64_t bytes() const {
    std::int64_t sum = 0;
    struct stat info = {};
    for (const auto& name : files()) sum += stat((path + "/" + name).c_str(), &info) == 0 ? info.st_size : 0;
    return sum;
  }
  std::vector<std::byte> read(const std::string& name) const {
    std::vector<std::byte> bytes;
    if (std::FILE* file = std::fopen((path + "/" + name).c_str(), "rb")) {
      std::byte block[4096];
      for (std::size_t n; (n = std::fread(block, 1, sizeof block, file)) > 0;) bytes.insert(bytes.end(), block, block + n);
      std::fclose(file);
    }
    return bytes;
  }
  void write(const std::string& name, const std::vector<std::byte>& bytes) const {
    std::FILE* file = std::fopen((path + "/" + name).c_str(), "wb");
    const bool written = file != nullptr && (bytes.empty() || std::fwrite(bytes.data(), 1, bytes.size(), file) == bytes.size());
    if (!written || std::fclose(file) != 0) std::abort();
  }
  std::string path;
};

inline kvire::RecordKey key_of(std::uint64_t n) {
  return {.space = "model=m;rank=0/1", .prefix = {n * 0x9E3779B97F4A7C15u, n}, .first_token = 16 * static_cast<std::int64_t>(n), .token_count = 16};
}

/// Host pools of the small model.
template <class IndexKey = SmallFp8>
struct SmallHost {
  using Model = SmallModel<IndexKey>;
  using Pool = kvire::HostBundlePool<Model, kvire::Host>;
  using Refs = kvire::BundleRefs<Model, kvire::HostPage>;

  explicit SmallHost(std::int64_t pages = 17)
      : pool(Pool::make({.pages = counts(pages, pages), .layers = SmallSchedule::layers, .name = "host"}).value()) {}

  static kvire::BundlePages<Model> counts(std::int64_t full, std::int64_t window) {
    kvire::BundlePages<Model> pages;
    pages.template of<kvire::space::Full>() = full;
    pages.template of<kvire::space::Window>() = window;
    return pages;
  }
  Refs allocate(std::int64_t full = 1, std::int64_t window = 1) { return pool.allocate(counts(full, window)).value(); }
  void fill(const Refs& refs, std::uint32_t seed) {
    Model::for_each([&]<class Entry>() {
      std::uint32_t n = seed * 100 + 10 * static_cast<std::uint32_t>(Model::template index_of<Entry>());
      for (const auto& ref : refs.template of<typename Entry::space>()) kvire_test::fill(pool.template entry<Entry>(), ref.id(), n++);
    });
  }
  bool holds(const Refs& refs, std::uint32_t seed) const {
    bool all = true;
    Model::for_each([&]<class Entry>() {
      std::uint32_t n = seed * 100 + 10 * static_cast<std::uint32_t>(Model::template index_of<Entry>());
      for (const auto& ref : refs.template of<typename Entry::space>()) all = all && kvire_test::holds(pool.template entry<Entry>(), ref.id(), n++);
    });
    return all;
  }
  std::int32_t free_pages() const {
    return pool.template ledger<kvire::space::Full>().free_pages() + pool.template ledger<kvire::space::Window>().free_pages();
  }

  Pool pool;
};

}  // namespace kvire_test
