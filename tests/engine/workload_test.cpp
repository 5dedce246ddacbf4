// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <algorithm>
#include <string>

#include "examples/engine/trace.hpp"
#include "examples/engine/workload.hpp"

namespace {

std::string error_of(const std::string& line) {
  const auto parsed = engine::parse_trace_line(line, "trace t, line 3");
  return parsed ? "" : parsed.error().message;
}

engine::TraceRequest request(std::int64_t input, std::int64_t output, std::vector<std::uint64_t> ids) { return {input, output, std::move(ids)}; }

}  // namespace

TEST_CASE("a trace line is read, and other keys are ignored") {
  const auto parsed = engine::parse_trace_line(R"({"timestamp": 5, "input_length": 1025, "output_length": 3, "hash_ids": [0, 7, 9], "extra": {}})", "t");
  REQUIRE(parsed.ok());
  CHECK(parsed.value().input_length == 1025);
  CHECK(parsed.value().output_length == 3);
  CHECK(parsed.value().blocks == std::vector<std::uint64_t>{0, 7, 9});
}

TEST_CASE("a bad trace line is an error that names the line, the value and what it should be") {
  CHECK(error_of("nonsense") == "trace t, line 3: not a JSON object");
  CHECK(error_of("[1]") == "trace t, line 3: not a JSON object");
  CHECK(error_of(R"({"output_length": 3, "hash_ids": []})") == "trace t, line 3: key \"input_length\" is missing");
  CHECK(error_of(R"({"input_length": "9", "output_length": 3, "hash_ids": []})") == "trace t, line 3: \"input_length\" is \"9\", not a whole number");
  CHECK(error_of(R"({"input_length": 1.5, "output_length": 3, "hash_ids": []})") == "trace t, line 3: \"input_length\" is 1.5, not a whole number");
  CHECK(error_of(R"({"input_length": -1, "output_length": 3, "hash_ids": []})") == "trace t, line 3: \"input_length\" is -1, not between 0 and 4194304");
  CHECK(error_of(R"({"input_length": 9, "output_length": 18446744073709551615, "hash_ids": [1]})").find("not between 0 and 4194304") != std::string::npos);
  CHECK(error_of(R"({"input_length": 9, "output_length": 3})") == "trace t, line 3: \"hash_ids\" must be a list of block ids");
  CHECK(error_of(R"({"input_length": 9, "output_length": 3, "hash_ids": [-4]})") == "trace t, line 3: hash id -4 is not a whole number from 0");
  CHECK(error_of(R"({"input_length": 1025, "output_length": 3, "hash_ids": [1, 2]})") ==
        "trace t, line 3: input_length 1025 needs 3 hash ids of 512 tokens, the line has 2");
  const auto missing = engine::read_trace("no/such/file.jsonl", 0);
  REQUIRE_FALSE(missing.ok());
  CHECK(missing.error().message == "trace no/such/file.jsonl: cannot be opened");
}

TEST_CASE("lengths scale by block tokens over 512, rounded down, with at least one output token") {
  const auto scaled = [](std::int64_t input, std::int64_t output, int n) {
    const std::vector<std::uint64_t> ids(static_cast<std::size_t>(input / 512 + 1), 1);
    return engine::scale_request(request(input, output, ids), n);
  };
  CHECK(scaled(1023, 700, 512).prompt.size() == 1023);
  CHECK(scaled(1023, 700, 512).output_tokens == 700);
  CHECK(scaled(1023, 700, 64).prompt.size() == 127);
  CHECK(scaled(1023, 700, 64).output_tokens == 87);
  CHECK(scaled(7, 7, 64).prompt.empty());
  CHECK(scaled(7, 0, 64).output_tokens == 1);
}

TEST_CASE("equal ids are equal tokens, whatever the request, and a partial block has its id's first ones") {
  const auto whole = engine::scale_request(request(1024, 1, {3, 4}), 64);
  const auto longer = engine::scale_request(request(1536, 1, {3, 4, 5}), 64);
  const auto partial = engine::scale_request(request(900, 1, {3, 4}), 64);
  CHECK(std::equal(whole.prompt.begin(), whole.prompt.end(), longer.prompt.begin()));
  CHECK(std::equal(partial.prompt.begin(), partial.prompt.end(), whole.prompt.begin()));
  const auto other = engine::scale_request(request(1024, 1, {3, 6}), 64);
  CHECK(std::equal(whole.prompt.begin(), whole.prompt.begin() + 64, other.prompt.begin()));
  CHECK_FALSE(std::equal(whole.prompt.begin() + 64, whole.prompt.end(), other.prompt.begin() + 64));
  for (const int token : longer.prompt) CHECK((token >= 0 && token < engine::vocabulary));
}

TEST_CASE("made conversations repeat their history") {
  const auto made = engine::make_conversations(60, 1);
  REQUIRE(made.size() == 60);
  std::size_t seen = 0, total = 0;
  std::vector<std::uint64_t> known;
  for (const auto& r : made) {
    CHECK(static_cast<std::int64_t>(r.blocks.size()) == (r.input_length + 511) / 512);
    CHECK(r.blocks.front() == 0);
    for (const auto id : r.blocks) {
      ++total;
      if (std::find(known.begin(), known.end(), id) != known.end()) {
        ++seen;
      } else {
        known.push_back(id);
      }
    }
  }
  CHECK(seen * 2 > total);
  CHECK(engine::make_conversations(60, 1)[59].blocks == made[59].blocks);
}
