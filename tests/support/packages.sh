# SPDX-License-Identifier: Apache-2.0
# Sourced by tests/run.sh and examples/engine/run.sh: installs what is missing, with apt-get where it may. Never CUDA.

# need_packages <probe>=<package>...: a probe is a program, a header below an include folder, or an option with which clang++ links a program.
need_packages() {
  local missing=() pair probe package
  for pair in "$@"; do
    probe=${pair%=*}
    package=${pair##*=}
    case $probe in
      *.h | *.hpp) compgen -G "/usr/include/$probe" >/dev/null || compgen -G "/usr/include/*/$probe" >/dev/null ||
        compgen -G "/usr/local/include/$probe" >/dev/null || missing+=("$package") ;;
      -*) echo "int main() {}" | clang++ "$probe" -x c++ - -o /dev/null 2>/dev/null || missing+=("$package") ;;
      *) command -v "$probe" >/dev/null 2>&1 || missing+=("$package") ;;
    esac
  done
  [ ${#missing[@]} -eq 0 ] && return 0

  local root=()
  if [ "$(id -u)" -ne 0 ]; then
    if command -v sudo >/dev/null 2>&1 && { sudo -n true 2>/dev/null || [ -t 0 ]; }; then
      root=(sudo)
    else
      echo "missing: ${missing[*]}"
      echo "run as root: apt-get install ${missing[*]}"
      return 1
    fi
  fi
  if ! command -v apt-get >/dev/null 2>&1; then
    echo "missing, and there is no apt-get here to install them (Debian's names): ${missing[*]}"
    return 1
  fi
  echo "-- installing ${missing[*]}"
  local log
  log=$(mktemp)
  if ! { "${root[@]}" apt-get update -q &&
         "${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "${missing[@]}"; } >"$log" 2>&1 </dev/null; then
    tail -n 20 "$log"
    rm -f "$log"
    return 1
  fi
  rm -f "$log"
}
