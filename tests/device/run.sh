#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Tests, sanitizes and measures kvire on a machine with a GPU; the last lines are a table of what ran and how it ended.
#
#   bash tests/device/run.sh [folder]
#
# folder: where kvire_device_tests, kvire_device_fast_math_tests and kvire_bench_cuda_* lie. Without one they are built (presets cuda and
# bench-cuda). What is not there is skipped and said to be.
#
#   KVIRE_GOLDEN_DIR      the reference vectors
#   KVIRE_STEPS           which of "tests sanitize bench", in this order (default: all three)
#   KVIRE_SOAK_SECONDS    how long the soak of transfers runs beside the sanitizers (default: not)
#   KVIRE_STEP_SECONDS    limit of one line of the table (default 900)
#   KVIRE_LOGS            where the complete outputs go (default: build/device)
#
# Exit status: 0 if everything that ran was clean.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1
steps=" ${KVIRE_STEPS:-tests sanitize bench} "
limit=${KVIRE_STEP_SECONDS:-900}
soak=${KVIRE_SOAK_SECONDS:-}
unset KVIRE_SOAK_SECONDS  # only the soak itself is to be long
logs=${KVIRE_LOGS:-build/device}
mkdir -p "$logs" && logs=$(cd "$logs" && pwd) || exit 1
rm -f "$logs"/*.row

folder=${1:-}
if [ -z "$folder" ]; then
  { cmake --preset cuda && cmake --build build/cuda --target kvire_device_tests kvire_device_fast_math_tests; } >"$logs/build.log" 2>&1 || { tail -n 40 "$logs/build.log"; exit 1; }
  if [[ $steps == *" bench "* ]]; then
    { cmake --preset bench-cuda && cmake --build build/bench-cuda; } >>"$logs/build.log" 2>&1 || { tail -n 40 "$logs/build.log"; exit 1; }
  fi
  folder=$logs/programs
  mkdir -p "$folder"
  find build/cuda/tests/device build/bench-cuda/benchmarks -maxdepth 1 -type f -perm -u+x -exec ln -sf "$PWD/{}" "$folder/" \; 2>/dev/null
fi

# row <name> <seconds> <command...>: one line of the table; the complete output is $logs/<name>.log.
row() {
  local name=$1 most=$2 start=$SECONDS code end
  shift 2
  local file=$logs/${name//[^a-z0-9_]/-}
  if [ ! -x "$1" ] && ! command -v "$1" >/dev/null; then
    printf '%-34s %-9s\n' "$name" "not there" >"$file.row"
    return
  fi
  timeout -k 5 "$most" "$@" >"$file.log" 2>&1
  code=$?
  case $code in
    0) end=ok ;;
    124 | 137) end="timeout" ;;
    *) end="rc $code" ;;
  esac
  printf '%-34s %-9s %4d s  %s\n' "$name" "$end" $((SECONDS - start)) \
    "$(grep -E '^soak:|test cases:|SUMMARY|skipped: no CUDA' "$file.log" | sed 's/^\[doctest\] //; s/^=* //' | tail -n 3 | paste -sd';')" >"$file.row"
  cat "$file.row"
}

# Groups of test cases, so that one line tells something soon. What holds a host function cannot run under the sanitizers, which wait for
# each launch.
transfers='cuda transfer*,cuda submit*,cuda migrate*,cuda soak*,cuda digest*,pinned memory*,cuda pools*,cuda event*,cuda stream*,cuda gate*'
logits='*logits*'
group() {
  case $1 in
    transfers) printf '%s\n' "--test-case=$transfers" ;;
    logits) printf '%s\n' "--test-case=$logits" ;;
    others) printf '%s\n' "--test-case-exclude=$transfers,$logits" ;;
  esac
}
sanitize() {
  local tool=$1 options=() name
  shift
  case $tool in
    memcheck) options=(--report-api-errors no) ;;       # tests provoke some, and look at them
    synccheck) options=(--num-cuda-barriers 65536) ;;  # each page and tile under way has one of its own
  esac
  for name in transfers others logits; do
    KVIRE_TEST_SMALL=1 KVIRE_SOAK_SECONDS=2 row "$tool $name" "$limit" "$sanitizer" --tool "$tool" "${options[@]}" --error-exitcode 9 "$folder/kvire_device_tests" "$(group $name)" \
      --test-suite-exclude=held --duration=true
  done
}

if [[ $steps == *" tests "* ]]; then
  row "device tests" "$limit" "$folder/kvire_device_tests"
  row "device tests, fast math" "$limit" "$folder/kvire_device_fast_math_tests"
fi
if [[ $steps == *" sanitize "* ]]; then
  sanitizer=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
  running=()
  if [ -n "$soak" ]; then
    KVIRE_SOAK_SECONDS=$soak row "soak" $((soak + 60)) "$folder/kvire_device_tests" "--test-case=cuda soak*" &
    running+=($!)
  fi
  for tool in memcheck racecheck initcheck synccheck; do
    sanitize "$tool" &
    running+=($!)
  done
  wait "${running[@]}"
fi
if [[ $steps == *" bench "* ]]; then
  for program in "$folder"/kvire_bench_cuda_*; do
    [ -x "$program" ] && row "$(basename "$program")" "$limit" "$program"
  done
fi

echo
cat "$logs"/*.row
! grep -q -E '(rc [0-9]+|timeout) +[0-9]+ s' "$logs"/*.row
