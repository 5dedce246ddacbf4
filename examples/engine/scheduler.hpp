// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <chrono>
#include <deque>
#include <functional>
#include <string>

#include "forward.hpp"
#include "forward_for.hpp"
#include "replay.hpp"
#include "session.hpp"
#include "step_io.hpp"

namespace engine {

/// Runs requests as concurrent sessions: chunked prefill beside batched decode, prefix reuse by whole pages, sessions that pause after any token and
/// go on from the tail that they have parked. The cache decides which pages are on the device. Each step is one forward pass over the rows of all
/// sessions that take part.
template <class IndexKey, class Io = StepIo<IndexKey>>
class Scheduler {
 public:
  using Tiers = engine::Tiers<IndexKey, typename Io::Backend>;

  Scheduler(const Model& model, Tiers& tiers, const std::vector<Request>& requests, const ReplaySettings& options)
      : model_(model), tiers_(tiers), requests_(requests), options_(options) {
    if (options.follow) tiers.cache().trace(options.follow);
  }

  /// `progress(requests done)` is called after every step.
  kvire::Result<Replay> run(const std::function<void(std::int64_t)>& progress = {}) {
    const auto start = std::chrono::steady_clock::now();
    replay_.answers.resize(requests_.size());
    for (std::size_t i = 0; i < requests_.size(); ++i) {
      const std::int64_t needed = blocks_for(total_tokens(requests_[i]));
      if (needed > usable_pages()) {
        return kvire::Error{kvire::ErrorCode::exhausted, "request " + std::to_string(i) + " needs " + std::to_string(needed) + " pages at once, the device has " +
                                                             std::to_string(usable_pages()) + " beside the null page"};
      }
    }
    while (done_ < static_cast<std::int64_t>(requests_.size())) {
      resume();
      admit();
      if (auto status = step(); !status.ok()) return status.error();
      if (progress) progress(done_);
    }
    tiers_.cache().finish();
    Stats& stats = replay_.stats;
    stats.requests = static_cast<std::int64_t>(requests_.size());
    stats.recomputed_tokens = stats.prompt_tokens - stats.device_hit_tokens - stats.host_hit_tokens - stats.file_hit_tokens;
    const auto files = tiers_.file_stats();
    stats.files_stored = files.stored;
    stats.files_read = files.hits;
    stats.files_lost = files.all_lost();
    stats.files = files;
    stats.cache = tiers_.cache().counters();
    stats.bytes_to_host = tiers_.cache().stored().bytes();
    stats.bytes_to_device = tiers_.cache().loaded().bytes();
    stats.kernels = tiers_.kernels();
    stats.graph_replays = tiers_.graph_replays();
    stats.hot_hits = shared_.hot_counts().hits;
    stats.hot_misses = shared_.hot_counts().misses;
    stats.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    return std::move(replay_);
  }

 private:
  using Session = engine::Session<Tiers>;
  using SessionPtr = std::unique_ptr<Session>;

  bool any_active() const {
    return std::any_of(sessions_.begin(), sessions_.end(), [](const SessionPtr& s) { return s->active; });
  }
  std::int64_t usable_pages() const { return options_.device_pages - 1; }
  // Full-space pages that no active session needs.
  std::int64_t available_pages() const {
    std::int64_t used = tiers_.cache().cache().held_pages(Tiers::full);
    for (const SessionPtr& s : sessions_) used += static_cast<std::int64_t>(s->own.size());
    return usable_pages() - used;
  }

  // The cache, at work for a session.
  auto& cache_for(const Session& s) {
    tiers_.cache().serve(static_cast<std::int64_t>(s.request));
    return tiers_.cache();
  }

  // Holds what the cache has of the session's first `tokens` tokens: whole pages and, with `tail`, what was parked behind them. False if there is no room.
  bool enter(Session& s, std::int64_t tokens, bool tail) {
    auto& cache = cache_for(s);
    const auto known = s.tokens(0, tokens);
    if (tiers_.has_files()) {
      (void)cache.prefetch(s.root, known.first(tail ? known.size() : known.size() / page_raw_tokens * page_raw_tokens));
      (void)cache.finish_prefetch();
    }
    s.held = cache.acquire(s.root, known);
    typename Tiers::Pages pages;
    if (tail && cache.resume(s.held, s.tokens(s.held.tokens, tokens), pages) > 0) {
      s.row = std::move(pages[Tiers::request]);
      s.own.push_back(std::move(pages));
    }
    if (!s.row) {
      auto row = cache.template allocate<kvire::space::Request>();
      if (!row.ok()) {
        s.leave();
        return false;
      }
      s.row = std::move(row).value();
    }
    s.computed = s.held.tokens;
    s.active = true;
    return true;
  }

  // Paused sessions come back oldest first, once their pause is over or when nobody else could work.
  void resume() {
    for (const bool insist : {false, true}) {
      for (const SessionPtr& s : sessions_) {
        if (s->active || (!insist && s->pause_left > 0)) continue;
        if (any_active() && (insist || available_pages() < blocks_for(total_tokens(requests_[s->request])))) return;
        const std::int64_t before = s->computed;
        if (enter(*s, before, true)) replay_.stats.replayed_tokens += before - s->computed;
      }
    }
  }

  void admit() {
    while (next_ < requests_.size() && static_cast<int>(sessions_.size()) < options_.sessions) {
      const Request& request = requests_[next_];
      // Optimistic: sessions under way still grow, and preempt each other when pages run out.
      if (any_active() && available_pages() < blocks_for(total_tokens(request))) return;
      auto s = std::make_unique<Session>();
      s->request = next_;
      s->known = first_tokens(request);
      // Without reuse every request has a namespace to itself.
      s->root = tiers_.cache().root({.model = options_.model_name, .salt = options_.reuse ? std::string() : std::to_string(next_)});
      const auto before = tiers_.cache().counters();
      const std::int64_t files_before = tiers_.file_stats().hits;
      if (!enter(*s, static_cast<std::int64_t>(s->known.size()) - 1, false)) return;
      const auto hits = [&](int tier) { return tiers_.cache().counters().hit_pages_on[tier] - before.hit_pages_on[tier]; };
      const std::int64_t from_files = std::min(hits(1), tiers_.file_stats().hits - files_before);  // by way of the host
      replay_.stats.prompt_tokens += static_cast<std::int64_t>(request.prompt.size());
      replay_.stats.device_hit_tokens += hits(0) * page_raw_tokens;
      replay_.stats.file_hit_tokens += from_files * page_raw_tokens;
      replay_.stats.host_hit_tokens += (hits(1) - from_files) * page_raw_tokens;
      sessions_.push_back(std::move(s));
      ++next_;
    }
  }

  // Leaves the session's tail with the cache, at whatever length it has.
  void pause(Session& s, int steps) {
    if (const std::int64_t whole = s.computed / page_raw_tokens * page_raw_tokens; s.computed > whole) {
      s.own.front()[Tiers::request] = std::move(s.row);
      (void)cache_for(s).park(s.held, s.tokens(whole, s.computed), s.own.front());  // what is not kept is computed again
    }
    s.leave();
    s.pause_left = steps;
    ++replay_.stats.pauses;
  }

  // Device pages of the full and the window space for a session's next 256 tokens; false if all are in use.
  bool extend(Session& s) {
    auto& cache = cache_for(s);
    auto full = cache.template allocate<kvire::space::Full>();
    if (!full.ok()) return false;
    auto window = cache.template allocate<kvire::space::Window>();
    if (!window.ok()) return false;
    tiers_.computed(full.value().id());
    typename Tiers::Pages& pages = s.own.emplace_back();
    pages[Tiers::full] = std::move(full).value();
    pages[Tiers::window] = std::move(window).value();
    return true;
  }

  // Pages for the next `rows` rows of a session; pauses younger sessions that are not in the step yet when there are none.
  int make_room(Session& s, int rows) {
    const auto pages = [&] { return s.held.prefix.pages() + static_cast<std::int64_t>(s.own.size()); };
    while (pages() < blocks_for(s.computed + rows)) {
      if (extend(s)) continue;
      const auto victim = std::find_if(sessions_.rbegin(), sessions_.rend(), [&](const SessionPtr& v) { return v->active && v->rows == 0 && v.get() != &s; });
      if (victim == sessions_.rend()) break;
      pause(**victim, 0);
    }
    return static_cast<int>(std::min<std::int64_t>(rows, pages() * page_raw_tokens - s.computed));
  }

  PageTables tables_of(const Session& s) const {
    const auto& cache = tiers_.cache().cache();
    PageTables tables;
    std::vector<std::int32_t> path(static_cast<std::size_t>(s.held.prefix.pages()));
    cache.path(s.held.prefix.node(), path);
    for (std::size_t i = 0; i < path.size(); ++i) {
      const bool windowed = cache.needed(Tiers::window, static_cast<std::int64_t>(path.size() - 1 - i));
      tables.full.push_back(cache.device(path[i], Tiers::full).id().value);
      tables.window.push_back(windowed ? cache.device(path[i], Tiers::window).id().value : -1);
    }
    for (const auto& pages : s.own) {
      tables.full.push_back(pages[Tiers::full].id().value);
      tables.window.push_back(pages[Tiers::window].id().value);
    }
    tables.request_row = s.row.id().value;
    return tables;
  }

  kvire::Status step() {
    Batch batch;
    std::vector<Session*> taking_part;
    typename Tiers::Dependencies loads;
    const auto take = [&](Session& s, int rows) {
      s.rows = make_room(s, rows);
      if (s.rows == 0) return;
      batch.add(s.known.data() + s.computed, s.rows, s.computed, s.computed + s.rows == static_cast<std::int64_t>(s.known.size()), tables_of(s), s.request);
      loads.insert(loads.end(), s.held.loads.begin(), s.held.loads.end());
      s.held.loads.clear();  // they have landed when the step has ended
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
    tiers_.cache().serve(-1);
    auto begun = tiers_.begin(std::move(loads));
    if (!begun) return begun.error();
    Io io(tiers_, std::move(begun).value(), batch, options_, model_.index_heads, shared_);
    typename ForwardFor<Io>::type forward(model_, io, batch, options_.top_k);
    forward.run();
    if (auto status = io.finish(); !status.ok()) return status;
    ++replay_.stats.steps;
    for (std::size_t i = 0; i < taking_part.size(); ++i) {
      if (auto status = advance(*taking_part[i], batch.spans[i], forward.logits(i)); !status.ok()) return status;
    }
    std::erase_if(sessions_, [](const SessionPtr& s) { return s->request == finished; });
    return {};
  }

  kvire::Status advance(Session& s, const Span& span, const float* logits) {
    s.computed += s.rows;
    if (auto status = publish(s); !status.ok() || !span.wants_logits) return status;
    Stats& stats = replay_.stats;
    const Request& request = requests_[s.request];
    std::vector<float>& answer = replay_.answers[s.request].logits;
    answer.insert(answer.end(), logits, logits + vocabulary);
    ++stats.decoded_tokens;
    if (static_cast<int>(model_.layers.size()) > 2 && Tiers::Entries::IndexK::cached(kvire::RawTokens(s.computed)).count > options_.top_k) {
      ++stats.sparse_tokens;
      const auto loaded = [&](std::int32_t page) { return tiers_.loaded(kvire::DevicePage(page)); };
      stats.sparse_tokens_after_load += std::any_of(span.tables.full.begin(), span.tables.full.end(), loaded) ? 1 : 0;
    }
    if (++s.decoded == request.output_tokens) {
      s.leave();
      s.request = finished;
      ++done_;
      return {};
    }
    s.known.push_back(options_.forced ? (*options_.forced)[s.request][static_cast<std::size_t>(s.decoded - 1)] : greedy_token(logits));
    if (options_.pause_every > 0 && s.decoded % options_.pause_every == 0) pause(s, options_.pause_steps);
    return {};
  }

  // Pages that are complete now become shared. Where the cache has an equal page already, the session goes on with that one.
  kvire::Status publish(Session& s) {
    const std::int64_t before = s.held.prefix.pages();
    const std::int64_t whole = s.computed / page_raw_tokens - before;
    if (whole == 0) return {};
    const auto complete = std::span(s.own).first(static_cast<std::size_t>(whole));
    if (auto status = cache_for(s).publish(s.held, s.tokens(before * page_raw_tokens, (before + whole) * page_raw_tokens), complete); !status.ok()) return status;
    s.own.erase(s.own.begin(), s.own.begin() + whole);
    return {};
  }

  static constexpr std::size_t finished = static_cast<std::size_t>(-1);

  const Model& model_;
  Tiers& tiers_;
  const std::vector<Request>& requests_;
  const ReplaySettings options_;
  typename Io::Shared shared_;       // what steps hand on to each other
  std::deque<SessionPtr> sessions_;  // oldest first
  std::size_t next_ = 0;
  std::int64_t done_ = 0;
  Replay replay_;
};

}  // namespace engine
