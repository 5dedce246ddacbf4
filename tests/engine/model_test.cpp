// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>

#include "examples/engine/forward.hpp"
#include "examples/engine/workload.hpp"
#include "examples/engine/plain_io.hpp"

namespace {

using Entries = kvire::preset::deepseek_v4::Flash<>;
using Io = engine::PlainIo<Entries>;
constexpr int top_k = 64;

struct Sequence {
  std::vector<int> tokens;
  std::int64_t done = 0;
  engine::PageTables tables;
};

Sequence sequence(std::uint64_t id, int length, std::int32_t first_page, std::int32_t step, std::int32_t row) {
  Sequence s;
  for (int i = 0; i < length; ++i) s.tokens.push_back(engine::block_token(id, i));
  for (int p = 0; p <= length / 256; ++p) {
    s.tables.full.push_back(first_page + step * p);
    s.tables.window.push_back(first_page + 100 + step * p);
  }
  s.tables.request_row = row;
  return s;
}

// Adds the next `count` tokens of a sequence to a batch.
void add(engine::Batch& batch, Sequence& s, int count) {
  batch.add(s.tokens.data() + s.done, count, s.done, true, s.tables);
  s.done += count;
}

std::vector<float> logits(const engine::Model& model, Io& io, const engine::Batch& batch) {
  engine::Forward<Entries, Io> forward(model, io, batch, top_k);
  forward.run();
  return {forward.logits(0), forward.logits(0) + engine::vocabulary * batch.spans.size()};
}

bool same_bits(const float* a, const float* b) { return std::memcmp(a, b, engine::vocabulary * sizeof(float)) == 0; }

}  // namespace

TEST_CASE("the last row's logits are equal to the bit however the prompt is cut") {
  const engine::Model model = engine::make_model(7, 6, 4, 1024);
  const int length = 613;
  std::vector<float> whole;
  {
    Io io(4, top_k);
    Sequence s = sequence(5, length, 1, 1, 1);
    engine::Batch batch;
    add(batch, s, length);
    whole = logits(model, io, batch);
  }
  for (const int chunk : {1, 3, 64, 127, 256, 300, 612}) {
    CAPTURE(chunk);
    Io io(4, top_k);
    Sequence s = sequence(5, length, 9, 3, 2);  // other pages, another request row
    Sequence other = sequence(6, 500, 50, 1, 3);
    std::vector<float> last;
    while (s.done < length) {
      engine::Batch batch;
      if (other.done + 5 < 500 && chunk > 1) add(batch, other, 5);  // shares the batch
      add(batch, s, static_cast<int>(std::min<std::int64_t>(chunk, length - s.done)));
      last = logits(model, io, batch);
    }
    CHECK(same_bits(whole.data(), last.data() + last.size() - engine::vocabulary));
  }
}
