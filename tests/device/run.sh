#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs the device tests on a machine with a GPU, then compute-sanitizer's four tools on them, and prints a table:
#
#   bash tests/device/run.sh [folder]     folder: where kvire_device_tests is (default: build/cuda/tests/device, built if need be)
#
# KVIRE_GOLDEN_DIR says where the reference vectors are. KVIRE_SANITIZE: test cases that the sanitizers see (doctest's filter), by default
# those of the portable kernels and top-k; sanitizers run a smaller selection of inputs. Exit status: 0 if everything is clean.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1
folder=${1:-build/cuda/tests/device}
if [ ! -x "$folder/kvire_device_tests" ]; then
  cmake --preset cuda >/dev/null && cmake --build build/cuda --target kvire_device_tests kvire_device_fast_math_tests || exit 1
fi
log=$(mktemp)
trap 'rm -f "$log"' EXIT
bad=0

# row <name> <command...>: one line of the table, and what went wrong.
row() {
  local name=$1 start=$SECONDS code
  shift
  "$@" >"$log" 2>&1
  code=$?
  printf '%-28s %-6s %4d s  %s\n' "$name" "$([ $code -eq 0 ] && echo ok || echo "rc $code")" $((SECONDS - start)) \
    "$(grep -E 'test cases:|SUMMARY|skipped: no CUDA' "$log" | sed 's/^\[doctest\] //; s/^=* //' | tail -n 2 | tr '\n' ' ')"
  [ $code -eq 0 ] && return
  bad=1
  grep -E 'ERROR|FAILED|=========' "$log" | head -n 40
}

row "device tests" "$folder/kvire_device_tests"
row "device tests, fast math" "$folder/kvire_device_fast_math_tests"
sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null)
for tool in memcheck racecheck initcheck synccheck; do
  if [ -z "$sanitizer" ]; then
    echo "$tool: skipped, compute-sanitizer was not found"
    continue
  fi
  KVIRE_TEST_SMALL=1 row "$tool" "$sanitizer" --tool "$tool" --error-exitcode 9 "$folder/kvire_device_tests" "--test-case=${KVIRE_SANITIZE:-cuda*,device*}"
done
exit $bad
