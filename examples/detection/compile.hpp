// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <stdlib.h>

#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

// Faults that do not get past the compiler. Each is handed to one, with kvire's headers.

namespace detection {

struct CompileFault {
  const char* name;
  const char* headers;
  const char* code;
};

inline const std::vector<CompileFault>& compile_faults() {
  static const std::vector<CompileFault> faults = {
      {"wrong shape: fp8 pages behind a bf16 device pool", "kvire/exec/host/stream.hpp kvire/layout/policies.hpp kvire/transfer/transfer.hpp",
       "auto move(const HostPool<Fp8WithScale<64, 128>, Host>& h, DevicePool<Bf16Contiguous<64, 128>, Host>& d, Stream<Host>& s) {\n"
       "  return load(h, d, PagePlan<HostPage, DevicePage>{}, s);\n}"},
      {"swapped interleave: the same bytes a page, scales elsewhere", "kvire/exec/host/stream.hpp kvire/layout/policies.hpp kvire/transfer/transfer.hpp",
       "auto move(const HostPool<Fp8WithScale<64, 128>, Host>& h, DevicePool<Fp8WithScaleInterleaved<64, 128>, Host>& d, Stream<Host>& s) {\n"
       "  return load(h, d, PagePlan<HostPage, DevicePage>{}, s);\n}"},
      {"missing entry: one pool of a bundle moved alone", "kvire/exec/host/stream.hpp kvire/preset/deepseek_v4.hpp kvire/transfer/bundle.hpp",
       "using Model = preset::deepseek_v4::Flash<>;\n"
       "auto move(const HostBundlePool<Model, Host>& h, DeviceBundlePool<Model, Host>& d, Stream<Host>& s) {\n"
       "  return load(h, d, PagePlan<HostPage, DevicePage>{}, s);\n}"},
      {"missing space: the window forgotten in a plan", "kvire/preset/deepseek_v4.hpp kvire/transfer/bundle.hpp",
       "using Model = preset::deepseek_v4::Flash<>;\n"
       "BundlePlan<Model> moves(in_space<space::Full>(PagePlan<HostPage, DevicePage>{}), without<space::Request>());"},
      {"swapped sides: a list of host pages where the device's belong", "kvire/exec/host/stream.hpp kvire/layout/policies.hpp kvire/transfer/transfer.hpp",
       "using Keys = Fp8WithScale<64, 128>;\n"
       "auto move(const DevicePool<Keys, Host>& d, HostPool<Keys, Host>& h, std::vector<PageRef<HostPage>> pages, Stream<Host>& s) {\n"
       "  return backup(d, h, plan(pages, pages), s);\n}"},
      {"scale count: one scale for two blocks of values", "kvire/layout/policies.hpp",
       "struct Keys : PageLayout<64, 1, Plane<Field<role::Value, Element::e4m3, 128>>, Plane<Field<role::Scale, Element::f32, 1>>> {\n"
       "  static constexpr const char* name = \"Keys\";\n  using Scaling = ScaleRule<role::Value, 64>;\n};\nstatic_assert(require_layout<Keys>());"},
      {"foreign memory with a size for a layout", "kvire/exec/host/event.hpp kvire/pool/adopt.hpp", "inline void take(AdoptOptions options) { adopt(options); }"},
      {"early read: a kernel given a pool instead of a lease", "kvire/layout/policies.hpp kvire/pool/pool.hpp kvire/sync/host.hpp",
       "inline void read(Stream<Host>& s, DevicePool<Bf16Contiguous<64, 128>, Host>& pool) { launch(s, [](auto) {}, pool); }"},
      {"wrong id: a host page where a device page is meant", "kvire/base/ids.hpp", "DevicePage page = HostPage(3);"},
      {"old records without an entry, migrated", "kvire/layout/policies.hpp kvire/tier/file_migrate.hpp",
       "struct Schedule { static constexpr int layers = 1; };\n"
       "struct A : CacheEntry<Bf16Contiguous<64, 512>, space::Full, Tokens<1>> { static constexpr const char* name = \"a\"; };\n"
       "struct B : CacheEntry<Bf16Contiguous<64, 128>, space::Full, Tokens<1>> { static constexpr const char* name = \"b\"; };\n"
       "static_assert(detail::require_migrate_bundle<CacheBundle<Schedule, A>, CacheBundle<Schedule, A, B>>());"},
  };
  return faults;
}

/// The rule that refused the fault, as `layer.rule: what must hold.`; empty if it compiled; "-" if there is no compiler to ask.
inline std::string compile(const CompileFault& fault, const std::string& compiler, const std::string& include) {
  char file[] = "/tmp/kvire_detection_XXXXXX.cpp";
  const int made = mkstemps(file, 4);
  if (compiler.empty() || made < 0) return "-";
  std::FILE* source = fdopen(made, "w");
  std::string headers = fault.headers;
  for (std::size_t at = 0; at < headers.size();) {
    const std::size_t end = std::min(headers.find(' ', at), headers.size());
    std::fprintf(source, "#include <%s>\n", headers.substr(at, end - at).c_str());
    at = end + 1;
  }
  std::fprintf(source, "using namespace kvire;\n%s\n", fault.code);
  std::fclose(source);
  const std::string command = "'" + compiler + "' -std=c++20 -fsyntax-only -I'" + include + "' " + file + " 2>&1";
  std::FILE* pipe = popen(command.c_str(), "r");
  std::string found;
  char line[8192];
  while (pipe != nullptr && std::fgets(line, sizeof line, pipe) != nullptr) {
    const std::string text = line;
    const std::size_t rule = text.find("kvire [", std::min(text.find("error: static"), text.size()));  // g++ and clang++ differ in what is between
    if (!found.empty() || rule == std::string::npos) continue;
    const std::size_t begin = text.find('[', rule);
    found = text.substr(begin, text.find(". ", begin) + 1 - begin);
  }
  const int status = pipe != nullptr ? pclose(pipe) : -1;
  std::remove(file);
  if (status == -1 || status == 127 << 8) return "-";
  return found;
}

}  // namespace detection
