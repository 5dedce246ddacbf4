# SPDX-License-Identifier: Apache-2.0
# cmake -DWORK=<folder> -P self_test.cmake: every meta check is shown small bad trees and must report each, and good ones and must not.

cmake_minimum_required(VERSION 3.25)

set(failures "")

# tree(<name> <check> <expected finding, or "ok"> <file> <text> [<file> <text>]...)
function(tree name check expected)
  set(root "${WORK}/${name}")
  file(REMOVE_RECURSE "${root}")
  set(rest "${ARGN}")
  while(rest)
    list(POP_FRONT rest file text)
    # In the texts, @n is a new line and @s a semicolon.
    string(REPLACE "@n" "\n" text "${text}")
    string(REPLACE "@s" ";" text "${text}")
    file(WRITE "${root}/${file}" "${text}")
  endwhile()
  execute_process(COMMAND "${CMAKE_COMMAND}" "-DROOT=${root}" -P "${CMAKE_CURRENT_LIST_DIR}/check_${check}.cmake"
    OUTPUT_VARIABLE output ERROR_VARIABLE output RESULT_VARIABLE code)
  # CMake wraps long messages.
  string(REGEX REPLACE "[ \n]+" " " output "${output}")
  if(expected STREQUAL "ok")
    if(NOT code EQUAL 0)
      string(APPEND failures "${name}: reported a good tree: ${output}\n")
    endif()
  else()
    string(FIND "${output}" "${expected}" at)
    if(code EQUAL 0)
      string(APPEND failures "${name}: check_${check} passed a bad tree\n")
    elseif(at EQUAL -1)
      string(APPEND failures "${name}: '${expected}' is not in: ${output}\n")
    endif()
  endif()
  set(failures "${failures}" PARENT_SCOPE)
endfunction()

set(once "#pragma once@n")

tree(layers_good layers ok
  include/kvire/base/a.hpp "${once}" include/kvire/layout/b.hpp "#include <kvire/base/a.hpp>@n" include/kvire/all.hpp "#include <kvire/layout/b.hpp>@n")
tree(layers_up layers "includes <kvire/pool/b.hpp> (pool, rank 3)"
  include/kvire/layout/a.hpp "#include <kvire/pool/b.hpp>@n" include/kvire/pool/b.hpp "@n")
tree(layers_sibling layers "includes <kvire/memory/b.hpp> (memory, rank 2)"
  include/kvire/codec/a.hpp "#include <kvire/memory/b.hpp>@n" include/kvire/memory/b.hpp "@n")
tree(layers_umbrella layers "includes <kvire/kvire.hpp> (umbrella, rank 8)"
  include/kvire/pool/a.hpp "#include <kvire/kvire.hpp>@n" include/kvire/kvire.hpp "@n")
tree(layers_cycle layers "a cycle of includes inside a layer, among: kvire/pool/a.hpp, kvire/pool/b.hpp"
  include/kvire/pool/a.hpp "#include <kvire/pool/b.hpp>@n" include/kvire/pool/b.hpp "#include <kvire/pool/a.hpp>@n")
tree(layers_unknown layers "'util' is not a layer" include/kvire/util/a.hpp "@n")
tree(layers_missing layers "which does not exist" include/kvire/base/a.hpp "#include <kvire/base/none.hpp>@n")
tree(layers_quotes layers "with quotes" include/kvire/base/a.hpp "#include \"b.hpp\"@n" include/kvire/base/b.hpp "@n")

string(REPEAT "@n" 299 long)
tree(headers_good headers ok include/kvire/base/a.hpp "${once}${long}" include/kvire/kernel/b.cuh "${once}@n${long}#include <cuda_fp8.h>@n"
  include/kvire/pool/cuda/c.hpp "${once}#include <cuda_runtime_api.h>@n")
tree(headers_long headers "has 301 lines" include/kvire/base/a.hpp "${once}${long}@n")
tree(headers_once headers "has no #pragma once" include/kvire/base/a.hpp "int a@s@n")
tree(headers_cuda headers "includes <cuda_runtime_api.h>" include/kvire/base/a.hpp "${once}#include <cuda_runtime_api.h>@n")
tree(headers_cccl headers "includes <cuda/std/array>" include/kvire/layout/a.hpp "${once}#include <cuda/std/array>@n")
tree(headers_cuh headers "a .hpp includes <kvire/kernel/b.cuh>" include/kvire/kernel/a.hpp "${once}#include <kvire/kernel/b.cuh>@n")
tree(headers_mixed headers "which needs the toolkit" include/kvire/pool/a.hpp "${once}#include <kvire/pool/cuda/b.hpp>@n")

tree(macros_good macros ok include/kvire/base/config.hpp "#if defined(__CUDACC__)@n#endif@n"
  include/kvire/pool/a.hpp "// __GNUC__@n#if KVIRE_CUDA_COMPILER && !defined(KVIRE_RTC)@n#endif@n#if defined(SYS_get_mempolicy)@n#endif@n")
tree(macros_if macros "reads __GNUC__" include/kvire/pool/a.hpp "#if defined(__GNUC__)@n#endif@n")
tree(macros_ifdef macros "reads NDEBUG" include/kvire/pool/a.hpp "#ifdef NDEBUG@n#endif@n")
tree(macros_body macros "names __CUDA_ARCH__" include/kvire/pool/a.hpp "int a = __CUDA_ARCH__@s@n")

tree(literals_good literals ok include/kvire/preset/a.hpp "static_assert(x == 8448)@s@n"
  include/kvire/pool/a.hpp "// 132 bytes a token@nint a = 1320 + 5132@s float b = 0.132f@s@n")
tree(literals_bad literals "spells a byte size: int a = tokens * 132@E" include/kvire/pool/a.hpp "int a = tokens * 132@s@n")
tree(literals_separator literals "spells a byte size" include/kvire/pool/a.hpp "long a = 149'760L@s@n")

tree(kernels_good kernels ok include/kvire/kernel/a.cuh
  "template <class T> concept Policy = true@s@nenum class Ties { a }@s@ntemplate <Policy P, class G, int N, Ties T = Ties::a, std::uint32_t M>@n__global__ void k(P) {}@ntemplate <Layout L> void host() {}@n")
tree(kernels_bad kernels "takes 'Layout L'" include/kvire/kernel/a.cuh
  "struct Layout {}@s@ntemplate <class P, Layout L>@n__global__ void k(P) {}@n")
tree(kernels_bounds kernels "takes 'ns::Layout L'" tests/device/a.cu
  "template <ns::Layout L>@nstatic __launch_bounds__(128) __global__ void k() {}@n")
tree(kernels_early kernels "a.cuh: __ldg, which the compiler may move" include/kvire/kernel/a.cuh "__device__ int f(const int* p) { return __ldg (p)@s }@n")
tree(kernels_late kernels ok include/kvire/kernel/sm80_a.cuh "__device__ int f(const int* p) { return __ldg(p)@s }  // __ldg(q)@n")

tree(flags_good flags ok cmake/a.cmake "set(x --extended-lambda)@n")
set(flag "--exp")
tree(flags_bad flags "CMakePresets.json" CMakePresets.json "{ \"a\": \"${flag}t-relaxed-constexpr\" }@n")

tree(sources_good sources ok tests/a.cpp "// SPDX-License-Identifier: Apache-2.0@n" tests/run.sh "#!/bin/sh@n# SPDX-License-Identifier: Apache-2.0@n")
tree(sources_none sources "tests/a.cpp: has no" tests/a.cpp "int a@s@n")
tree(sources_adapt sources "adapt/a.hpp: has no" adapt/a.hpp "int a@s@n")
tree(sources_python sources "tests/a.py: has no" tests/a.py "pass@n")
set(home "/ho")
tree(sources_home sources "names a machine's folder" docs/a.md "see ${home}me/somebody/kvire@n")

tree(links_good links ok README.md "see [a](docs/a.md#x) and [b](https://example.org) and [c](#here)@n" docs/a.md "[up](../README.md)@n")
tree(links_bad links "docs/a.md: links to b.md" docs/a.md "[b](b.md)@n")

set(witness "template <int A> struct W { static_assert(A == 1,@n  \"kvire [layout.one]: A is one. Otherwise \"@n  \"all breaks. Fix: pass 1, or pass none.\")@s }@s@n")
set(test "#if KVIRE_FAIL == 1  // expect: layout.one@n#endif@n")
set(row "| rule | why |@n| --- | --- |@n| `layout.one` | because |@n")
tree(rules_good rules ok include/kvire/layout/a.hpp "${witness}" tests/fail/layout.cpp "${test}" docs/rules.md "${row}")
tree(rules_no_test rules "has no test" include/kvire/layout/a.hpp "${witness}" docs/rules.md "${row}")
tree(rules_no_row rules "has no row" include/kvire/layout/a.hpp "${witness}" tests/fail/layout.cpp "${test}")
tree(rules_no_witness_row rules "docs/rules.md: [layout.one] has a row" docs/rules.md "${row}")
tree(rules_no_witness_test rules "tests/fail: [layout.one] is expected" tests/fail/layout.cpp "${test}")
tree(rules_two rules "has a second witness" include/kvire/layout/a.hpp "${witness}${witness}" tests/fail/layout.cpp "${test}" docs/rules.md "${row}")
tree(rules_calls rules ok include/kvire/layout/a.hpp "static_assert(Bundle::require() && require_layout<P>())@s@nstatic_assert(sizeof(rule::W<1>) > 0)@s@n"
  include/kvire/preset/a.hpp "static_assert(Latent<64>::page_bytes == 1)@s@n")
tree(rules_bare rules "has no message" include/kvire/layout/a.hpp "static_assert(sizeof(int) == 4)@s@n")
tree(rules_form rules "does not read" include/kvire/layout/a.hpp "static_assert(x, \"kvire [layout.one]: x is wrong.\")@s@n"
  tests/fail/layout.cpp "${test}" docs/rules.md "${row}")

if(failures)
  message(FATAL_ERROR "${failures}")
endif()
