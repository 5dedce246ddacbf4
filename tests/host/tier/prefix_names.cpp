// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <numeric>
#include <random>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include <kvire/tier/prefix_tree.hpp>

using namespace kvire;
using kvire::detail::PrefixTable;
using kvire::detail::PrefixTree;

namespace {

std::vector<TokenId> counted(int n) {
  std::vector<TokenId> tokens(static_cast<std::size_t>(n));
  std::iota(tokens.begin(), tokens.end(), 0);
  return tokens;
}

}  // namespace

// The numbers come from a transcription of the comment into another language: names persist, so they may not change.
TEST_CASE("prefix names: version 1, to the bit") {
  const Hash128 root = PrefixNamespace{}.digest();
  CHECK(root == Hash128{0x2f09837e0882cd7b, 0xd975cc0ed8354d2f});
  const auto tokens = counted(67);
  CHECK(prefix_hash(root, tokens.data(), 1) == Hash128{0x4ff8987969e9a28c, 0x109fdbe86f7a0ab1});
  CHECK(prefix_hash(root, tokens.data(), 8) == Hash128{0x4873b9bba8c9e03b, 0xb454c9d524819063});
  CHECK(prefix_hash(root, tokens.data(), 64) == Hash128{0xbdfbb906ac8a4dd3, 0xd09a09970d369e70});
  CHECK(prefix_hash(root, tokens.data(), 67) == Hash128{0x2a2ad3009e878fe8, 0xab741bdc1bdeb5c7});
  const TokenId negative[] = {-1, 2, -3};
  CHECK(prefix_hash(root, negative, 3) == Hash128{0xc67c6436f7bfa114, 0x54c67e687ae0ab67});
}

TEST_CASE("prefix names: those of all lengths in one pass are those of each length") {
  const Hash128 root = PrefixNamespace{}.digest();
  for (const int n : {0, 1, 7, 8, 9, 15, 16, 17, 255}) {
    const auto tokens = counted(n);
    std::vector<Hash128> names(static_cast<std::size_t>(n));
    prefix_hashes(root, tokens.data(), n, names.data());
    for (int i = 1; i <= n; ++i) CHECK(names[static_cast<std::size_t>(i) - 1] == prefix_hash(root, tokens.data(), i));
  }
}

TEST_CASE("prefix names: any token, any order, any predecessor shows in both halves") {
  const Hash128 root = PrefixNamespace{}.digest();
  for (const int n : {1, 7, 8, 63, 64, 512}) {
    std::set<std::uint64_t> highs, lows;
    std::size_t names = 0;
    const auto note = [&](const Hash128& h) {
      highs.insert(h.high);
      lows.insert(h.low);
      ++names;
    };
    auto tokens = counted(n);
    note(prefix_hash(root, tokens.data(), n));
    note(prefix_hash(prefix_hash(root, tokens.data(), n), tokens.data(), n));
    note(prefix_hash({root.high ^ 1, root.low}, tokens.data(), n));
    note(prefix_hash({root.high, root.low ^ 1}, tokens.data(), n));
    for (auto& token : tokens) {
      for (const TokenId flip : {1, 1 << 16, 1 << 30}) {
        token ^= flip;
        note(prefix_hash(root, tokens.data(), n));
        token ^= flip;
      }
    }
    for (std::size_t i = 1; i < tokens.size(); ++i) {
      std::swap(tokens[i - 1], tokens[i]);
      note(prefix_hash(root, tokens.data(), n));
      std::swap(tokens[i - 1], tokens[i]);
    }
    // One flipped half of `before` may leave the other accumulators alone.
    CHECK(highs.size() >= names - 1);
    CHECK(lows.size() >= names - 1);
  }
  // A list that ends in zeros is not the shorter list.
  const TokenId zeros[9] = {};
  std::set<std::uint64_t> lengths;
  for (int n = 0; n <= 9; ++n) lengths.insert(prefix_hash(root, zeros, n).high);
  CHECK(lengths.size() == 10);
}

TEST_CASE("prefix namespaces: fields are tagged, not joined") {
  const PrefixNamespace base{.model = "m", .layout = {1, 2}, .adapter = "a", .salt = "s", .rank = 1, .ranks = 2};
  std::vector<PrefixNamespace> all(11, base);
  all[1].model = "ma", all[1].adapter = "";
  all[2].model = "", all[2].adapter = "ma";
  all[3].adapter = "as", all[3].salt = "";
  all[4].salt = "";
  all[5].layout = {1, 3};
  all[6].layout = {2, 2};
  all[7].rank = 0;
  all[8].ranks = 12, all[8].rank = 1;
  all[9].ranks = 2, all[9].rank = 11;
  all[10].model = "m;adapter=1:a";
  PrefixTree tree(4, true);
  std::set<std::string> texts;
  std::set<std::int32_t> roots;
  for (const auto& names : all) {
    texts.insert(names.text());
    roots.insert(tree.root(names));
    CHECK(tree.root(names) == tree.root(names));
    CHECK(tree.names(tree.root(names)) == names);
  }
  CHECK(texts.size() == all.size());
  CHECK(roots.size() == all.size());
  CHECK(tree.pages() == 0);

  // Names start from the salt, texts have its hash (both from `sha256sum`).
  const PrefixNamespace salted{.model = "m", .salt = "tenant 7 secret"};
  CHECK(salted.digest() == Hash128{0x9072939909cd030c, 0x80400b5de7d1c6b7});
  CHECK(salted.text() == "kvire.prefix/1;model=1:m;layout=" + std::string(32, '0') + ";adapter=0:;salt=32:841243221ec36b4dccf9e20f96debeb8;rank=0/1");

  // The same tokens below another root are another page.
  const auto tokens = counted(4);
  const std::int32_t one = tree.root(all[0]);
  const std::int32_t other = tree.root(all[4]);
  const std::int32_t node = tree.add(one, tree.name_below(one, tokens), tokens);
  CHECK(tree.child(one, tree.name_below(one, tokens), tokens) == node);
  CHECK(tree.child(other, tree.name_below(other, tokens), tokens) == -1);
  CHECK(tree.names(node) == all[0]);
}

TEST_CASE("prefix tree: equal hashes are told apart by tokens, or by the second digest") {
  const auto a = counted(64);
  auto b = a;
  b[63] = 7;
  for (const bool keep_tokens : {true, false}) {
    PrefixTree tree(64, keep_tokens);
    const std::int32_t root = tree.root({});
    const Hash128 name = tree.name_below(root, a);
    const Hash128 twin{name.high, name.low + 1};  // of the same place in the table
    const std::int32_t first = tree.add(root, name, a);
    CHECK(tree.child(root, twin, b) == -1);
    const std::int32_t second = tree.add(root, twin, b);
    CHECK(tree.child(root, name, a) == first);
    CHECK(tree.child(root, twin, b) == second);
    // Both digests collide: only the tokens know.
    CHECK(tree.child(root, name, b) == (keep_tokens ? -1 : first));
    // The right name behind another prefix.
    CHECK(tree.child(first, name, a) == -1);
    tree.remove(first);
    CHECK(tree.child(root, name, a) == -1);
    CHECK(tree.child(root, twin, b) == second);
    CHECK(tree.pages() == 1);
  }
}

TEST_CASE("prefix table: agrees with a standard map under inserts and erases, long runs included") {
  std::mt19937_64 random(3);
  PrefixTable table;
  std::unordered_map<std::int32_t, std::uint64_t> held;
  std::vector<std::int32_t> nodes;
  for (std::int32_t step = 0; step < 20000; ++step) {
    const bool insert = nodes.empty() || random() % 100 < (step < 10000 ? 60u : 40u);
    if (insert) {
      // Few distinct keys that lie side by side, and some that wrap around the end.
      const std::uint64_t key = random() % 3 == 0 ? 0xFFFFFFF0u + random() % 16 : random() % 700;
      table.insert(key << 32 | (random() & 0xFFFFFFFF), step);
      held[step] = key << 32;
      nodes.push_back(step);
    } else {
      const std::size_t at = random() % nodes.size();
      table.erase(held[nodes[at]], nodes[at]);
      held.erase(nodes[at]);
      nodes[at] = nodes.back();
      nodes.pop_back();
    }
    CHECK(table.size() == nodes.size());
    if (step % 500 != 0) continue;
    for (const std::int32_t node : nodes) CHECK(table.find(held[node], [&](std::int32_t n) { return n == node; }) == node);
    for (std::uint64_t key = 0; key < 700; ++key) {
      std::int64_t offered = 0, expected = 0;
      (void)table.find(key << 32, [&](std::int32_t) { return ++offered, false; });
      for (const auto& [node, hash] : held) expected += hash == key << 32 ? 1 : 0;
      CHECK(offered == expected);
    }
  }
}
