// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <string>

#include "examples/engine/options.hpp"
#include "examples/engine/run.hpp"

namespace {

using engine::ReplaySettings;
using engine::Request;
using kvire::preset::deepseek_v4::IndexKeyBf16;
using kvire::preset::deepseek_v4::IndexKeyFp4;
using kvire::preset::deepseek_v4::IndexKeyFp8;

constexpr int layers = 4;  // window only twice, ratio 4, ratio 128
constexpr int index_heads = 4;
constexpr int top_k = 48;

std::vector<Request> conversations(int count) {
  std::vector<Request> requests;
  for (const auto& trace : engine::make_conversations(count, 3)) requests.push_back(engine::scale_request(trace, 40));
  return requests;
}

engine::Model model_for(const std::vector<Request>& requests) {
  return engine::make_model(11, layers, index_heads, engine::longest_request(requests) + 1);
}

ReplaySettings settings(std::int64_t device_pages, std::int64_t host_pages, int sessions, int chunk, int pause_every) {
  ReplaySettings s;
  s.layers = layers;
  s.top_k = top_k;
  s.device_pages = device_pages;
  s.host_pages = host_pages;
  s.sessions = sessions;
  s.chunk = chunk;
  s.pause_every = pause_every;
  return s;
}

ReplaySettings reference() {
  ReplaySettings s = settings(64, 0, 2, 300, 0);
  s.reuse = false;
  return s;
}

template <class IndexKey = IndexKeyFp8>
engine::Replay run(const ReplaySettings& s, const engine::Model& model, const std::vector<Request>& requests) {
  auto result = engine::replay<IndexKey>(s, model, requests);
  REQUIRE_MESSAGE(result.ok(), result.error().message);
  return std::move(result).value();
}

Request prompt(std::uint64_t id, int tokens, int output = 2) {
  Request r;
  for (int i = 0; i < tokens; ++i) r.prompt.push_back(engine::block_token(id, i));
  r.output_tokens = output;
  return r;
}

}  // namespace

TEST_CASE("logits are equal to the bit whatever the batch, chunk sizes, pauses, pages and order") {
  const auto requests = conversations(9);
  const auto model = model_for(requests);
  const auto expected = run(reference(), model, requests);
  struct Variant {
    const char* what;
    ReplaySettings settings;
  };
  const Variant variants[] = {
      {"one session", settings(64, 0, 1, 256, 0)},
      {"many sessions, odd chunks", settings(64, 0, 7, 37, 0)},
      {"one chunk", settings(64, 0, 3, 4000, 0)},
      {"pauses", settings(64, 0, 4, 100, 3)},
      {"few pages, host tier, pauses", settings(9, 40, 5, 130, 5)},
      {"few pages, a pause after every token", settings(9, 60, 5, 130, 1)},
      {"few pages, small host tier", settings(9, 4, 5, 200, 4)},
      {"few pages, no host tier", settings(8, 0, 4, 256, 4)},
  };
  for (const auto& variant : variants) {
    CAPTURE(variant.what);
    const auto got = run(variant.settings, model, requests);
    CHECK(engine::count_mismatches(got, expected) == 0);
    CHECK(got.stats.decoded_tokens == expected.stats.decoded_tokens);
    CHECK(got.stats.prompt_tokens == got.stats.device_hit_tokens + got.stats.host_hit_tokens + got.stats.recomputed_tokens);
    if (variant.settings.host_pages >= 40) {
      CHECK(got.stats.sparse_tokens_after_load > 0);
      CHECK(got.stats.replayed_tokens == 0);  // whoever pauses goes on from exactly there
    }
    if (variant.settings.host_pages == 0) CHECK(got.stats.bytes_to_device == 0);
  }

  auto reversed = requests;
  std::reverse(reversed.begin(), reversed.end());
  auto got = run(settings(10, 40, 5, 190, 6), model, reversed);
  std::reverse(got.answers.begin(), got.answers.end());
  CHECK(engine::count_mismatches(got, expected) == 0);
}

TEST_CASE("every policy agrees with its own reference, and they differ from each other") {
  const auto requests = conversations(5);
  const auto model = model_for(requests);
  const auto small = settings(9, 40, 4, 150, 4);
  const auto fp8 = run<IndexKeyFp8>(reference(), model, requests);
  const auto bf16 = run<IndexKeyBf16>(reference(), model, requests);
  const auto fp4 = run<IndexKeyFp4>(reference(), model, requests);
  CHECK(engine::count_mismatches(run<IndexKeyBf16>(small, model, requests), bf16) == 0);
  CHECK(engine::count_mismatches(run<IndexKeyFp4>(small, model, requests), fp4) == 0);
  CHECK(engine::count_mismatches(fp8, bf16) > 0);
  CHECK(engine::count_mismatches(fp8, fp4) > 0);
}

TEST_CASE("what page 0 holds never reaches an answer") {
  const auto requests = conversations(4);
  const auto model = model_for(requests);
  auto s = settings(9, 40, 4, 150, 3);
  s.null_page_fill = static_cast<unsigned char>(0);
  const auto zeros = run(s, model, requests);
  s.null_page_fill = static_cast<unsigned char>(0xFF);  // NaN in every format
  const auto poison = run(s, model, requests);
  CHECK(engine::count_mismatches(zeros, poison) == 0);
  CHECK(engine::count_mismatches(poison, run(reference(), model, requests)) == 0);
}

TEST_CASE("every damage below the typed surface changes answers") {
  const auto requests = conversations(11);
  const auto model = model_for(requests);
  const auto expected = run(reference(), model, requests);
  auto s = settings(8, 60, 4, 256, 2);
  CHECK(engine::count_mismatches(run(s, model, requests), expected) == 0);
  using engine::Damage;
  for (const Damage damage : {Damage::skip_gate, Damage::half_page, Damage::drop_scale, Damage::drop_index, Damage::early_reuse, Damage::wrong_layer,
                              Damage::stale_state}) {
    CAPTURE(static_cast<int>(damage));
    s.damage = damage;
    CHECK(engine::count_mismatches(run(s, model, requests), expected) > 0);
  }
}

TEST_CASE("the hand-made mirror damages bf16 keys and no fp8 keys") {
  const auto requests = conversations(7);
  const auto model = model_for(requests);
  auto s = settings(8, 60, 4, 256, 3);
  s.damage = engine::Damage::hand_made_mirror;
  CHECK(engine::count_mismatches(run<IndexKeyFp8>(s, model, requests), run<IndexKeyFp8>(reference(), model, requests)) == 0);
  CHECK(engine::count_mismatches(run<IndexKeyBf16>(s, model, requests), run<IndexKeyBf16>(reference(), model, requests)) > 0);
}

TEST_CASE("a hit is whole pages of at most length - 1 tokens") {
  struct Case {
    int first, second;
    std::int64_t hit;
  };
  for (const auto& c : {Case{256, 256, 0}, Case{256, 257, 256}, Case{255, 300, 0}, Case{512, 512, 256}, Case{513, 513, 512}, Case{700, 600, 512},
                        Case{1, 1, 0}, Case{0, 0, 0}, Case{0, 5, 0}}) {
    CAPTURE(c.first);
    CAPTURE(c.second);
    const std::vector<Request> requests{prompt(1, c.first), prompt(1, c.second), prompt(2, 40)};
    const auto model = model_for(requests);
    const auto got = run(settings(32, 0, 1, 256, 0), model, requests);
    CHECK(got.stats.device_hit_tokens == c.hit);
    CHECK(got.stats.host_hit_tokens == 0);
    CHECK(got.stats.prompt_tokens == c.first + c.second + 40);
    CHECK(engine::count_mismatches(got, run(reference(), model, requests)) == 0);
  }
}

TEST_CASE("a request that cannot fit is an error with both numbers") {
  const std::vector<Request> requests{prompt(1, 100), prompt(2, 1000, 30)};
  const auto result = engine::replay<IndexKeyFp8>(settings(5, 0, 2, 256, 0), model_for(requests), requests);
  REQUIRE_FALSE(result.ok());
  CHECK(result.error().message == "request 1 needs 5 pages at once, the device has 4 beside the null page");
}

TEST_CASE("a host tier of the null page alone is an error") {
  const std::vector<Request> requests{prompt(1, 100)};
  const auto result = engine::replay<IndexKeyFp8>(settings(5, 1, 2, 256, 0), model_for(requests), requests);
  REQUIRE_FALSE(result.ok());
  CHECK(result.error().message.find("1 pages") != std::string::npos);
}
