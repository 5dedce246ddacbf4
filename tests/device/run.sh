#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Tests, sanitizes and measures kvire on a machine with a GPU; the last lines are a table of what ran and how it ended.
#
#   bash tests/device/run.sh [folder]
#
# folder: where kvire_device_tests, kvire_device_{fast_math,old_code}_tests and kvire_bench_cuda_* lie. Without one they are built (presets cuda and
# bench-cuda). What is not there is skipped and said to be.
#
#   KVIRE_GOLDEN_DIR      the reference vectors
#   KVIRE_STEPS           which of "tests sanitize bench", in this order (default: all three)
#   KVIRE_SOAK_SECONDS    how long the soak of transfers runs beside the sanitizers (default: not)
#   KVIRE_PROCESSES       how many sanitizers run at a time (default 16), on all GPUs in turn
#   KVIRE_STEP_SECONDS    limit of one line of the table (default 900)
#   KVIRE_LOGS            where the complete outputs go (default: build/device)
#
# Exit status: 0 if everything that ran was clean.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1
steps=" ${KVIRE_STEPS:-tests sanitize bench} "
limit=${KVIRE_STEP_SECONDS:-900}
processes=${KVIRE_PROCESSES:-16}
soak=${KVIRE_SOAK_SECONDS:-}
unset KVIRE_SOAK_SECONDS  # only the soak itself is to be long
logs=${KVIRE_LOGS:-build/device}
mkdir -p "$logs" && logs=$(cd "$logs" && pwd) || exit 1
rm -f "$logs"/*.row

folder=${1:-}
if [ -z "$folder" ]; then
  { cmake --preset cuda && cmake --build build/cuda --target kvire_device_tests kvire_device_fast_math_tests kvire_device_old_code_tests; } >"$logs/build.log" 2>&1 || { tail -n 40 "$logs/build.log"; exit 1; }
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

# Groups of test cases that the sanitizers take beside each other. A case is of the first group with a pattern for it. What holds a host function
# (suite "held") cannot run under the sanitizers, which wait for each launch.
groups=(soak transfers float64 held kept logits ties runs top-k tiers store others)
declare -A patterns=(
  [soak]='cuda soak*'
  [transfers]='cuda transfer*,cuda submit*,cuda migrate*,cuda digest*,pinned memory*,cuda pools*,cuda event*,cuda stream*,cuda gate*'
  [float64]='*with float64*'
  [held]='*held top-k*'
  [kept]='*kept scores*,*grouped top-k*'
  [logits]='*selection:*,*logits*'
  [ties]='*thousands of ties*,*million scores*'
  [runs]='cuda top-k: the same on 20 runs*'
  [top-k]='*top-k*'
  [tiers]='cuda hot set*,cuda tiered*,cuda tails*,cuda seals*'
  [store]='*store*,*gather*'
  [others]='*'
)
# filters [group]: what picks the cases of a group, or all that are in any; one argument of the test program a line.
filters() {
  local earlier="" name
  echo --test-suite-exclude=held
  [ $# = 0 ] && return
  for name in "${groups[@]}"; do
    [ "$name" = "$1" ] && break
    earlier+=${earlier:+,}${patterns[$name]}
  done
  printf '%s\n' "--test-case=${patterns[$1]}" "--test-case-exclude=$earlier"
}
# cases [group]: their names.
cases() {
  local arguments
  mapfile -t arguments < <(filters "$@")
  "$folder/kvire_device_tests" --list-test-cases "${arguments[@]}" | grep -v -E '^(\[doctest\]|===|skipped: no CUDA)' | sort
}
sanitize() {
  local tool=$1 name=$2 options=() arguments
  case $tool-$name in
    memcheck-*) options=(--report-api-errors no) ;;  # tests provoke some, and look at them
    synccheck-held | synccheck-kept | synccheck-ties | synccheck-runs | synccheck-top-k | synccheck-store) ;;
    synccheck-logits | synccheck-float64) options=(--num-cuda-barriers 65536) ;;  # each tile under way has one of its own; 60 ms a launch
    synccheck-*) options=(--num-cuda-barriers 16384) ;;                           # each page under way; as many as above take all memory
  esac
  mapfile -t arguments < <(filters "$name")
  # The soak alone has to load its kernels within its time.
  KVIRE_TEST_SMALL=1 KVIRE_SOAK_SECONDS=20 CUDA_VISIBLE_DEVICES=$device row "$tool $name" "$limit" "$sanitizer" --tool "$tool" "${options[@]}" --error-exitcode 9 "$folder/kvire_device_tests" \
    "${arguments[@]}" --duration=true
}

if [[ $steps == *" tests "* ]]; then
  row "device tests" "$limit" "$folder/kvire_device_tests"
  row "device tests, fast math" "$limit" "$folder/kvire_device_fast_math_tests"
  row "device tests, code for sm_80" "$limit" "$folder/kvire_device_old_code_tests"
fi
if [[ $steps == *" sanitize "* ]]; then
  sanitizer=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
  if [ -x "$folder/kvire_device_tests" ] && ! diff <(cases) <(for name in "${groups[@]}"; do cases "$name"; done | sort); then
    echo "the groups do not hold every test case once" >&2
    exit 1
  fi
  if [ -n "$soak" ]; then
    KVIRE_SOAK_SECONDS=$soak row "soak" $((soak + 60)) "$folder/kvire_device_tests" "--test-case=cuda soak*" &
  fi
  devices=$(nvidia-smi --list-gpus 2>/dev/null | grep -c GPU) || devices=1  # sanitizers take them in turn
  device=0
  for tool in racecheck synccheck initcheck memcheck; do  # what takes longest comes first
    for name in "${groups[@]}"; do
      while [ "$(jobs -rp | wc -l)" -ge "$processes" ]; do wait -n; done
      sanitize "$tool" "$name" &
      device=$(((device + 1) % devices))
    done
  done
  wait
fi
if [[ $steps == *" bench "* ]]; then
  for program in "$folder"/kvire_bench_cuda_*; do
    [ -x "$program" ] && row "$(basename "$program")" "$limit" "$program"
  done
fi

echo
cat "$logs"/*.row
! grep -q -E '(rc [0-9]+|timeout) +[0-9]+ s' "$logs"/*.row
