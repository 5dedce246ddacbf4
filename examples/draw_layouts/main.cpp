// SPDX-License-Identifier: Apache-2.0
// Prints every shipped layout. Without arguments: docs/layouts.md. With --baseline: one line a layout (bytes, fingerprint, canonical form),
// which tests/baseline/layouts.txt holds so that an edit which changes a format cannot pass unseen.
#include <cstdio>
#include <cstring>

#include <kvire/layout.hpp>
#include <kvire/preset/all.hpp>

namespace {

void print_baseline() {
  kvire::preset::for_each_policy([]<class P>(const char* name) {
    std::printf("%s | %lld | %s | %s\n", name, static_cast<long long>(P::page_bytes), kvire::hex_text(kvire::fingerprint128<P>).c_str(),
                kvire::canonical_text<P>().c_str());
  });
  kvire::preset::for_each_bundle([]<class B>(const char* name) {
    std::printf("%s | %lld | %s | %s\n", name, static_cast<long long>(B::template page_bytes<kvire::space::Full>().count),
                kvire::hex_text(kvire::bundle_fingerprint128<B>).c_str(), kvire::canonical_bundle_text<B>().c_str());
  });
}

void print_page() {
  std::printf(
      "# Layouts\n\nEvery layout that kvire ships, drawn from its type by `examples/draw_layouts`. `@` is the byte offset in the page. The canonical form is what the\n"
      "fingerprint hashes: `printf %%s TEXT | sha256sum` begins with the 32 digits given (64 bits in types and messages: the first 16).\n");
  kvire::preset::for_each_policy([]<class P>(const char* name) {
    std::printf("\n## %s\n\n```\n%s\n```\n\n- canonical form: `%s`\n- fingerprint: `%s`\n", name, kvire::describe<P>().c_str(), kvire::canonical_text<P>().c_str(),
                kvire::hex_text(kvire::fingerprint128<P>).c_str());
  });
  std::printf("\n# Bundles\n");
  kvire::preset::for_each_bundle([]<class B>(const char* name) {
    std::printf("\n## %s\n\n%d layers, fingerprint `%s`\n\n| entry | policy | page ids | rows | layers | bytes a page id |\n| --- | --- | --- | --- | --- | --- |\n", name,
                B::layers, kvire::hex_text(kvire::bundle_fingerprint128<B>).c_str());
    B::for_each([]<class E>() {
      char rows[48];
      if (E::counts_tokens) {
        std::snprintf(rows, sizeof rows, "one per %d raw tokens", E::kind::ratio);
      } else {
        std::snprintf(rows, sizeof rows, "%d (%s)", E::policy::tokens_per_page, kvire::name_of(E::kind::kind));
      }
      std::printf("| %s | %s | %s | %s | %d | %lld |\n", E::name, E::policy::name, E::space::name, rows, E::slots(B::layers),
                  static_cast<long long>(E::policy::page_bytes * E::slots(B::layers)));
    });
  });
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 1) {
    print_page();
    return 0;
  }
  if (argc == 2 && std::strcmp(argv[1], "--baseline") == 0) {
    print_baseline();
    return 0;
  }
  std::fprintf(stderr, "usage: draw_layouts [--baseline]\n");
  return 2;
}
