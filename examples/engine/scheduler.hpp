// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <chrono>
#include <deque>
#include <functional>
#include <string>

#include "cache.hpp"
#include "forward.hpp"
#include "forward_for.hpp"
#include "replay.hpp"

namespace engine {

/// Runs requests as concurrent sessions: chunked prefill beside batched decode, prefix reuse by whole pages, sessions paused and resumed,
/// pages evicted to the host tier and loaded back. Each step is one forward pass over the rows of all sessions that take part.
template <class Cache>
class Scheduler {
 public:
  Scheduler(const Model& model, Cache& cache, const std::vector<Request>& requests, const ReplaySettings& options)
      : model_(model), cache_(cache), requests_(requests), options_(options) {}

  /// `progress(requests done)` is called after every step.
  kvire::Result<Replay> run(const std::function<void(std::int64_t)>& progress = {}) {
    const auto start = std::chrono::steady_clock::now();
    replay_.answers.resize(requests_.size());
    for (std::size_t i = 0; i < requests_.size(); ++i) {
      const std::int64_t needed = blocks_for(total_tokens(requests_[i]));
      if (needed > cache_.usable_pages()) {
        return kvire::Error{kvire::ErrorCode::exhausted, "request " + std::to_string(i) + " needs " + std::to_string(needed) + " pages at once, the device has " +
                                                             std::to_string(cache_.usable_pages()) + " beside the null page"};
      }
    }
    while (done_ < static_cast<std::int64_t>(requests_.size())) {
      resume();
      admit();
      if (auto status = step(); !status.ok()) return status.error();
      if (progress) progress(done_);
    }
    if (auto status = cache_.finish(); !status.ok()) return status.error();
    Stats& stats = replay_.stats;
    stats.requests = static_cast<std::int64_t>(requests_.size());
    stats.recomputed_tokens = stats.prompt_tokens - stats.device_hit_tokens - stats.host_hit_tokens - stats.file_hit_tokens;
    const auto files = cache_.file_stats();
    stats.files_stored = files.stored;
    stats.files_read = files.hits;
    stats.files_lost = files.all_lost();
    stats.bytes_to_host = cache_.bytes_to_host();
    stats.bytes_to_device = cache_.bytes_to_device();
    stats.kernels = cache_.tiers().kernels();
    stats.graph_replays = cache_.tiers().graph_replays();
    stats.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    return std::move(replay_);
  }

 private:
  struct Session {
    std::size_t request = 0;
    std::vector<int> known;     // prompt and decoded tokens
    std::int64_t computed = 0;  // rows in the cache
    Blocks blocks;
    kvire::PageRef<kvire::DevicePage> row;
    int decoded = 0;
    bool active = false;
    int pause_left = 0;
    int rows = 0;  // of the present step
  };
  using SessionPtr = std::unique_ptr<Session>;

  // A request without prompt starts from token 0, so that there is a row to decode from.
  static std::vector<int> first_tokens(const Request& r) { return r.prompt.empty() ? std::vector<int>{0} : r.prompt; }
  static std::int64_t total_tokens(const Request& r) { return static_cast<std::int64_t>(first_tokens(r).size()) + r.output_tokens; }

  bool any_active() const {
    return std::any_of(sessions_.begin(), sessions_.end(), [](const SessionPtr& s) { return s->active; });
  }

  // Paused sessions come back oldest first, once their pause is over or when nobody else could work.
  void resume() {
    for (const bool insist : {false, true}) {
      for (const SessionPtr& s : sessions_) {
        if (s->active || (!insist && s->pause_left > 0)) continue;
        if (any_active() && (insist || cache_.available_pages() < blocks_for(total_tokens(requests_[s->request])))) return;
        std::int64_t lost = 0;
        do {
          lost = cache_.lost_blocks();
          keep_what_is_left(*s);
          s->active = cache_.acquire(s->blocks, first_window_block(s->computed));
        } while (!s->active && cache_.lost_blocks() != lost);
      }
    }
  }

  // A paused session may have lost pages for which the host had no room: it goes on from the last page boundary that it can restart at.
  void keep_what_is_left(Session& s) {
    std::size_t whole = 0;
    while (whole < s.blocks.size() && s.blocks[whole]->full.anywhere()) ++whole;
    const auto has_windows = [&](std::size_t first, std::size_t end) {
      return std::all_of(s.blocks.begin() + static_cast<std::ptrdiff_t>(first), s.blocks.begin() + static_cast<std::ptrdiff_t>(end),
                         [](const auto& b) { return b->window.anywhere(); });
    };
    if (whole == s.blocks.size() && has_windows(std::min(first_window_block(s.computed), whole), whole)) return;
    whole = std::min(whole, static_cast<std::size_t>(s.computed / page_raw_tokens));
    while (whole > 0 && !s.blocks[whole - 1]->window.anywhere()) --whole;
    const std::int64_t kept = static_cast<std::int64_t>(whole) * page_raw_tokens;
    replay_.stats.replayed_tokens += s.computed - kept;
    s.computed = kept;
    s.blocks.resize(whole);
  }

  void admit() {
    while (next_ < requests_.size() && static_cast<int>(sessions_.size()) < options_.sessions) {
      const Request& request = requests_[next_];
      // Optimistic: sessions under way still grow, and preempt each other when pages run out.
      if (any_active() && cache_.available_pages() < blocks_for(total_tokens(request))) return;
      auto s = std::make_unique<Session>();
      s->request = next_;
      s->known = first_tokens(request);
      const std::int64_t length = static_cast<std::int64_t>(s->known.size());
      std::int64_t device_hits = 0;
      std::int64_t file_hits = 0;
      if (options_.reuse) {
        std::shared_ptr<Block> at;
        for (std::int64_t b = 0; (b + 1) * page_raw_tokens <= length - 1; ++b) {
          at = cache_.find(at, s->known.data() + b * page_raw_tokens);
          if (at == nullptr || !at->full.anywhere()) break;
          s->blocks.push_back(at);
        }
        while (!s->blocks.empty() && !s->blocks.back()->window.anywhere()) s->blocks.pop_back();
        for (const auto& block : s->blocks) {
          const bool here = block->full.device && (block != s->blocks.back() || block->window.device);
          device_hits += here ? page_raw_tokens : 0;
          file_hits += !here && !block->full.device && !block->full.host ? page_raw_tokens : 0;
        }
        s->computed = static_cast<std::int64_t>(s->blocks.size()) * page_raw_tokens;
      }
      const std::int64_t lost = cache_.lost_blocks();
      if (!cache_.acquire(s->blocks, first_window_block(s->computed))) {
        if (cache_.lost_blocks() != lost) continue;  // a shorter prefix may do
        return;
      }
      s->row = cache_.request_row();
      s->active = true;
      replay_.stats.prompt_tokens += static_cast<std::int64_t>(request.prompt.size());
      replay_.stats.device_hit_tokens += device_hits;
      replay_.stats.file_hit_tokens += file_hits;
      replay_.stats.host_hit_tokens += s->computed - device_hits - file_hits;
      sessions_.push_back(std::move(s));
      ++next_;
    }
  }

  void pause(Session& s, int steps) {
    cache_.release(s.blocks, first_window_block(s.computed));
    s.active = false;
    s.pause_left = steps;
    ++replay_.stats.pauses;
  }

  // Pages for the next `rows` rows of a session; pauses younger sessions that are not in the step yet when there are none.
  int make_room(Session& s, int rows) {
    while (static_cast<std::int64_t>(s.blocks.size()) < blocks_for(s.computed + rows)) {
      auto block = std::make_shared<Block>();
      block->parent = s.blocks.empty() ? nullptr : s.blocks.back();
      block->depth = static_cast<int>(s.blocks.size());
      if (cache_.extend(block)) {
        s.blocks.push_back(std::move(block));
        continue;
      }
      const auto victim = std::find_if(sessions_.rbegin(), sessions_.rend(), [&](const SessionPtr& v) { return v->active && v->rows == 0 && v.get() != &s; });
      if (victim == sessions_.rend()) break;
      pause(**victim, 0);
    }
    const std::int64_t room = static_cast<std::int64_t>(s.blocks.size()) * page_raw_tokens - s.computed;
    return static_cast<int>(std::min<std::int64_t>(rows, room));
  }

  kvire::Status step() {
    Batch batch;
    std::vector<Session*> taking_part;
    const auto take = [&](Session& s, int rows) {
      s.rows = make_room(s, rows);
      if (s.rows == 0) return;
      for (std::int64_t b = s.computed / page_raw_tokens; b * page_raw_tokens < s.computed + s.rows; ++b) cache_.will_write(*s.blocks[static_cast<std::size_t>(b)]);
      PageTables tables;
      for (const auto& block : s.blocks) {
        tables.full.push_back(block->full.device.id().value);
        tables.window.push_back(block->window.users > 0 ? block->window.device.id().value : -1);
      }
      tables.request_row = s.row.id().value;
      batch.add(s.known.data() + s.computed, s.rows, s.computed, s.computed + s.rows == static_cast<std::int64_t>(s.known.size()), std::move(tables),
                s.request);
      taking_part.push_back(&s);
    };
    for (const SessionPtr& s : sessions_) s->rows = 0;
    for (const SessionPtr& s : sessions_) {
      if (s->active && s->decoded > 0 && static_cast<std::int64_t>(s->known.size()) - s->computed == 1) take(*s, 1);
    }
    int budget = options_.chunk;
    for (const SessionPtr& s : sessions_) {
      if (!s->active || s->rows > 0 || budget == 0) continue;
      take(*s, static_cast<int>(std::min<std::int64_t>(budget, static_cast<std::int64_t>(s->known.size()) - s->computed)));
      budget -= s->rows;
    }
    for (const SessionPtr& s : sessions_) {
      if (!s->active && s->pause_left > 0) --s->pause_left;
    }
    if (batch.spans.empty()) return kvire::Error{kvire::ErrorCode::exhausted, "no session can go on: too few device pages"};
    auto io = cache_.begin(batch);
    if (!io) return io.error();
    typename ForwardFor<typename Cache::StepIo>::type forward(model_, io.value(), batch, options_.top_k);
    forward.run();
    if (auto status = io.value().finish(); !status.ok()) return status;
    ++replay_.stats.steps;
    for (std::size_t i = 0; i < taking_part.size(); ++i) advance(*taking_part[i], batch.spans[i].wants_logits ? forward.logits(i) : nullptr);
    std::erase_if(sessions_, [](const SessionPtr& s) { return s->request == finished; });
    return {};
  }

  void advance(Session& s, const float* logits) {
    const std::size_t window_before = first_window_block(s.computed);
    const std::int64_t before = s.computed;
    s.computed += s.rows;
    seal(s, before);
    cache_.release_windows(s.blocks, window_before, std::min(first_window_block(s.computed), s.blocks.size()));
    if (logits == nullptr) return;
    Stats& stats = replay_.stats;
    const Request& request = requests_[s.request];
    std::vector<float>& answer = replay_.answers[s.request].logits;
    answer.insert(answer.end(), logits, logits + vocabulary);
    ++stats.decoded_tokens;
    if (static_cast<int>(model_.layers.size()) > 2 && Cache::Entries::IndexK::cached(kvire::RawTokens(s.computed)).count > options_.top_k) {
      ++stats.sparse_tokens;
      if (std::any_of(s.blocks.begin(), s.blocks.end(), [](const auto& b) { return b->full.from_host; })) ++stats.sparse_tokens_after_load;
    }
    if (++s.decoded == request.output_tokens) {
      cache_.release(s.blocks, first_window_block(s.computed));
      s.request = finished;
      ++done_;
      return;
    }
    s.known.push_back(options_.forced ? (*options_.forced)[s.request][static_cast<std::size_t>(s.decoded - 1)] : greedy_token(logits));
    if (options_.pause_every > 0 && s.decoded % options_.pause_every == 0) pause(s, options_.pause_steps);
  }

  // Blocks of the prompt that are complete now become shared. Where an equal block is known already, its pages join it.
  void seal(Session& s, std::int64_t before) {
    if (!options_.reuse) return;
    const std::int64_t prompt = static_cast<std::int64_t>(requests_[s.request].prompt.size());
    for (std::int64_t b = before / page_raw_tokens; (b + 1) * page_raw_tokens <= std::min(s.computed, prompt); ++b) {
      auto& block = s.blocks[static_cast<std::size_t>(b)];
      if (block->indexed) continue;
      const int* tokens = s.known.data() + b * page_raw_tokens;
      block->parent = b == 0 ? nullptr : s.blocks[static_cast<std::size_t>(b - 1)];
      if (auto known = cache_.index().find(block->parent, tokens)) {
        cache_.join(*known, *block);
        block = std::move(known);
      } else {
        cache_.index().insert(block, tokens);
      }
      cache_.keep(block);
    }
  }

  static constexpr std::size_t finished = static_cast<std::size_t>(-1);

  const Model& model_;
  Cache& cache_;
  const std::vector<Request>& requests_;
  const ReplaySettings options_;
  std::deque<SessionPtr> sessions_;  // oldest first
  std::size_t next_ = 0;
  std::int64_t done_ = 0;
  Replay replay_;
};

}  // namespace engine
