// SPDX-License-Identifier: Apache-2.0
//
// Injects the faults that corrupt caches silently, one by one, and prints which check noticed. Exits with 1 if none did.
//
//   kvire_detection [--markdown]     the compiler of the compile-time faults: KVIRE_DETECTION_COMPILER, else the one that built this

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "compile.hpp"
#include "faults.hpp"

namespace {

int missed_faults = 0;
bool markdown = false;

void row(const char* fault, const std::string& check, std::string message) {
  message = message.substr(0, message.find('\n'));
  if (const auto at = message.find("/tmp/kvire_detection_"); at != std::string::npos) message.replace(at, 27, "...");
  if (markdown) {
    std::printf("| %s | %s | %s |\n", fault, check.c_str(), message.substr(0, 140).c_str());
  } else {
    std::printf("%-66s %-18s %s\n", fault, check.c_str(), message.substr(0, 140).c_str());
  }
  std::fflush(stdout);
}

void inject(const std::vector<detection::Fault>& faults) {
  for (const auto& fault : faults) {
    const auto verdict = fault.inject();
    const bool caught = !verdict.ok() && verdict.error().code == fault.code && verdict.error().message.rfind("(set-up)", 0) != 0;
    missed_faults += caught ? 0 : 1;
    row(fault.name, caught ? fault.check : "NOBODY", verdict.ok() ? "" : std::string(kvire::name_of(verdict.error().code)) + ": " + verdict.error().message);
  }
}

}  // namespace

int main(int argc, char** argv) {
  markdown = argc > 1 && std::strcmp(argv[1], "--markdown") == 0;
  if (markdown) std::printf("| fault | caught by | what it says |\n| --- | --- | --- |\n");
  const char* named = std::getenv("KVIRE_DETECTION_COMPILER");
  for (const auto& fault : detection::compile_faults()) {
    const auto rule = detection::compile(fault, named != nullptr ? named : KVIRE_DETECTION_CXX, KVIRE_DETECTION_INCLUDE);
    missed_faults += rule.empty() ? 1 : 0;
    row(fault.name, rule == "-" ? "(not run)" : rule.empty() ? "NOBODY" : "compile time", rule == "-" ? "there is no compiler here" : rule);
  }
  inject(detection::transfer_faults());
  inject(detection::tier_faults());
  inject(detection::file_faults());
  if (missed_faults > 0) std::printf("%d faults that nobody noticed\n", missed_faults);
  return missed_faults > 0 ? 1 : 0;
}
