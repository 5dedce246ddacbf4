#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs what is missing, builds the reference engine and runs it: bash examples/engine/run.sh [engine argument...]
# Without arguments it replays every policy over a workload of its own making.
set -eu
here=$(pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. tests/support/packages.sh
need_packages g++=g++ cmake=cmake ninja=ninja-build CLI/CLI.hpp=libcli11-dev fmt/format.h=libfmt-dev nlohmann/json.hpp=nlohmann-json3-dev

mkdir -p build
root=$(pwd)
log=build/engine.log
{ cmake --preset engine && cmake --build --preset engine --target kvire_engine; } >"$log" 2>&1 || { tail -n 60 "$log"; exit 1; }
[ $# -gt 0 ] || set -- --policy all
cd "$here"
exec "$root/build/engine/examples/engine/kvire_engine" "$@"
