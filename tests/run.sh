#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds and runs kvire's tests: bash tests/run.sh [stage...]
#
#   host        g++: every host test, the golden vectors, the engine
#   checks      headers, code that must not compile, the sources themselves, consumer projects (g++, clang++, nvcc; headers under clang++ with all)
#   clang       clang++ -O2: codecs, kernels and golden vectors
#   fast-math   codecs, kernels and golden vectors under -O3 -march=native -ffast-math: the bits must not change
#   asan        clang++ with AddressSanitizer and UBSan: every host test, the golden vectors and the small examples
#   tsan        clang++ with ThreadSanitizer: the layers that have threads, a short replay of the engine
#   cuda        nvcc: compiles the device tests; where there is a GPU, also those with fast math, and runs them
#   bench       builds the benchmarks and prints their figures; not part of the default
#
# Without a stage: host, checks, fast-math and cuda, which is every test there is once. "all" repeats them under clang++ and the sanitizers,
# as CI does. What is missing is installed from Debian's packages where this may be done; CUDA never is, and what
# needs it is skipped with the reason. Build trees lie in build/<preset>.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
. tests/support/packages.sh

jobs=$(nproc 2>/dev/null || echo 2)
stages=("$@")
[ ${#stages[@]} -eq 0 ] && stages=(host checks fast-math cuda)
everything=
[ "${stages[*]}" = all ] && everything=1 && stages=(host checks clang fast-math asan tsan cuda)

wants() {
  local stage
  for stage in "${stages[@]}"; do [ "$stage" = "$1" ] && return 0; done
  return 1
}
for stage in "${stages[@]}"; do
  case $stage in
    host | checks | clang | fast-math | asan | tsan | cuda | bench) ;;
    *) sed -n 's/^# \{0,1\}//; 3,14p' "${BASH_SOURCE[0]}"; exit 2 ;;
  esac
done

packages=(g++=g++ cmake=cmake ninja=ninja-build doctest/doctest.h=doctest-dev CLI/CLI.hpp=libcli11-dev fmt/format.h=libfmt-dev
  nlohmann/json.hpp=nlohmann-json3-dev)
if wants host; then packages+=(python3=python3); fi  # counts prefix hits apart from the engine
if wants clang || wants checks || wants asan || wants tsan; then packages+=(clang++=clang); fi
if wants asan || wants tsan; then packages+=(-fsanitize=address=libclang-rt-dev); fi
if wants bench; then packages+=(benchmark/benchmark.h=libbenchmark-dev cblas.h=libopenblas-dev fio=fio); fi
need_packages "${packages[@]}" || exit 1
# Adaptors are tested where their libraries are, and CI tests them; nothing needs them.
if [ -n "$everything" ]; then need_packages xxhash.h=libxxhash-dev liburing.h=liburing-dev || true; fi

# Counts over all stages, from ctest's own closing lines.
passed=0 failed=0 skipped=0
broken=()

# configure_and_build <preset> [target...]
configure_and_build() {
  local preset=$1
  shift
  cmake --preset "$preset" >"build/$preset.log" 2>&1 || { tail -n 40 "build/$preset.log"; return 1; }
  grep -h "kvire: skipped" "build/$preset.log" || true
  if [ $# -gt 0 ]; then
    cmake --build "build/$preset" -j "$jobs" --target "$@"
  else
    cmake --build "build/$preset" -j "$jobs"
  fi >"build/$preset.log" 2>&1 && return 0
  grep -E "error|FAILED|undefined reference" "build/$preset.log" | cut -c1-300 | head -n 30
  echo "all of it: build/$preset.log"
  return 1
}

# run_tests <stage> <preset> <ctest argument>...
run_tests() {
  local stage=$1 preset=$2 log="build/$1.ctest.log" total bad skip
  shift 2
  ctest --test-dir "build/$preset" --output-on-failure --no-tests=error -j "$jobs" "$@" >"$log" 2>&1
  local code=$?
  # A stage of several hundred checks is only worth reading where something went wrong.
  if [ $code -ne 0 ]; then
    grep -v -E "  Passed |^ +Start +[0-9]+:" "$log"
  else
    grep -E "\*\*\*Skipped|tests passed|Total Test time" "$log"
  fi
  total=$(sed -n 's/.*tests failed out of \([0-9]*\).*/\1/p' "$log")
  bad=$(sed -n 's/.*tests passed, \([0-9]*\) tests failed.*/\1/p' "$log")
  skip=$(grep -c -E "\*\*\*Skipped" "$log")
  passed=$((passed + ${total:-0} - ${bad:-0} - skip))
  failed=$((failed + ${bad:-0}))
  skipped=$((skipped + skip))
  [ $code -eq 0 ] || broken+=("$stage")
}

# stage <name> <preset> <targets, or all> <ctest argument>...: one line says what and how long.
stage() {
  wants "$1" || return 0
  local name=$1 preset=$2 targets=$3 start=$SECONDS
  shift 3
  echo "== $name"
  # shellcheck disable=SC2086
  if configure_and_build "$preset" $targets; then
    run_tests "$name" "$preset" "$@"
  else
    echo "$name: the build failed"
    broken+=("$name")
    failed=$((failed + 1))
  fi
  echo "== $name: $((SECONDS - start)) s"
}

mkdir -p build
golden=${KVIRE_GOLDEN_DIR:-../shared/golden}
[ -d "$golden" ] || echo "== golden vectors: skipped, there is no folder $golden (KVIRE_GOLDEN_DIR names another)"
stage host host all -L "host|golden|engine|example"
# Headers under clang++ once more take a minute and a half; what it refuses, g++ mostly does too.
once=(-E '^kvire[.]header[.]clangxx')
[ -z "$everything" ] || once=()
stage checks host all -L "header|fail|meta|consumer" "${once[@]}"
stage clang host-clang all -L "host|golden"
stage fast-math fast-math all -L "host|golden"
small="kvire_tests kvire_adapt_tests kvire_adopt kvire_detection"
stage asan asan "$small own_layout draw_layouts" -L "host|golden|example"
stage tsan tsan "$small kvire_engine" -L "host|example|smoke|soak" -E "baseline|own_layout"

if wants cuda; then
  nvcc=${CUDACXX:-$(ls /usr/local/cuda/bin/nvcc 2>/dev/null || command -v nvcc)}
  version=$([ -n "$nvcc" ] && "$nvcc" --version 2>/dev/null | sed -n 's/.*release \([0-9.]*\),.*/\1/p')
  if [ -z "$version" ]; then
    echo "== cuda: skipped, nvcc was not found (kvire's CUDA parts need 12.8 or newer; this script does not install it)"
  elif [ "$(printf '%s\n' 12.8 "$version" | sort -V | head -n 1)" != 12.8 ]; then
    echo "== cuda: skipped, $nvcc is $version and kvire's CUDA parts need 12.8 or newer"
  else
    # Without a GPU compiling is all there is to do, and the second build with fast math tells nothing more.
    if nvidia-smi -L >/dev/null 2>&1; then
      stage cuda cuda all -L device
    else
      stage cuda cuda-compile "kvire_device_tests kvire_device_old_code_tests kvire_link_twice_cuda" -L device -E fast_math
    fi
  fi
fi

if wants bench; then
  echo "== bench"
  if configure_and_build bench; then
    for program in build/bench/benchmarks/kvire_bench_*; do
      [ -x "$program" ] && [ -f "$program" ] && { "$program" || broken+=("bench"); }
    done
    cmake --build build/bench --target kvire_bench_compile || broken+=("bench")
  else
    broken+=("bench")
  fi
fi

[ ${#broken[@]} -eq 0 ] || echo "failed: ${broken[*]}"
echo "$SECONDS s"
echo "$passed passed, $failed failed, $skipped skipped"
[ ${#broken[@]} -eq 0 ]
