// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <functional>
#include <string>

#include <fmt/format.h>

namespace engine {

/// One line on stderr that is rewritten as work proceeds; silent unless stderr is a terminal.
class Progress {
 public:
  Progress(std::string label, std::int64_t total, bool quiet) : label_(std::move(label)), total_(total), shown_(!quiet && isatty(STDERR_FILENO) != 0) {}
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  ~Progress() {
    if (shown_ && drawn_) std::fputs("\r\033[K", stderr);
  }

  /// What a replay calls; must not outlive this object.
  std::function<void(std::int64_t)> call() {
    return [this](std::int64_t done) { at(done); };
  }

  void at(std::int64_t done) {
    const auto now = std::chrono::steady_clock::now();
    if (!shown_ || (done < total_ && now - last_ < std::chrono::milliseconds(100))) return;
    last_ = now;
    drawn_ = true;
    constexpr std::int64_t width = 40;
    const std::int64_t full = total_ > 0 ? done * width / total_ : width;
    fmt::print(stderr, "\r{:<24} [{:#<{}}{:.<{}}] {}/{}", label_, "", full, "", width - full, done, total_);
    std::fflush(stderr);
  }

 private:
  std::string label_;
  std::int64_t total_;
  bool shown_;
  bool drawn_ = false;
  std::chrono::steady_clock::time_point last_{};
};

}  // namespace engine
