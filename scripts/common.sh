# shellcheck shell=bash
# Sourced by quickstart.sh and test.sh: one virtual environment for both, outside the source tree.
# LLAMAFACTORY_PREFLIGHT_VENV chooses another folder for it, PYTHON another interpreter to make it with.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
: "${HOME:=$(cd ~ && pwd)}" # cron and some containers set none
CACHE=${XDG_CACHE_HOME:-$HOME/.cache}/llamafactory-preflight
VENV=${LLAMAFACTORY_PREFLIGHT_VENV:-$CACHE/venv}
# The pairing that this version is tested with. torch comes first, or its two companions resolve to others that do not fit.
PINS=('torch==2.9.1' 'torchvision==0.24.1' 'torchaudio==2.9.*' 'llamafactory==0.9.5')
NEEDED_GB=12 # what the installation takes at its height, pip's cache included

say() { printf '==> %s\n' "$*"; }
die() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

# Prints the first interpreter that is new enough.
find_python() {
  local candidate
  for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  candidate=${PYTHON:-python3}
  command -v "$candidate" >/dev/null || die "no $candidate here: install Python 3.11 or newer, or name one with PYTHON=/path/to/python3.11"
  die "Python too old: $candidate is $("$candidate" -V 2>&1), 3.11 or newer is needed; name another with PYTHON=/path/to/python3.11"
}

# pip install "$@", telling only the large downloads; the whole of pip's output goes to a log, and a failure to one line.
pip_install() {
  local log=$VENV/install.log line commas why failed=
  # Read line by line in the shell: some awks wait for a full block, and the progress would come after the fact.
  "$VENV/bin/python" -m pip install --progress-bar off --disable-pip-version-check "$@" 2>&1 | tee "$log" |
    while IFS= read -r line; do
      case $line in
        *'Downloading '*' MB)'*) printf '    %s\n' "${line#"${line%%[! ]*}"}" ;;
        'Installing collected packages'*)
          commas=${line//[^,]/}
          printf '    Installing packages: %d\n' $((${#commas} + 1))
          ;;
      esac
    done || failed=1
  [ -n "$failed" ] || return 0
  if grep -q 'No space left on device' "$log"; then
    die "disk full: the environment in $VENV takes about $NEEDED_GB GB"
  elif grep -qE 'Failed to establish|name resolution|unreachable|timed out|Connection (refused|reset|broken)|Max retries' "$log"; then
    die "no network: pip cannot reach the package index (log: $log)"
  fi
  why=$(grep '^ERROR: ' "$log" | tail -n 1) || why="no reason given"
  die "pip failed: ${why#ERROR: } (log: $log)"
}

# Runs pip_install unless the same step was already done with the same key: install_once NAME KEY MESSAGE PIP-ARGUMENT...
install_once() {
  local stamp=$VENV/.installed-$1 key=$2 message=$3
  shift 3
  [ "$(cat "$stamp" 2>/dev/null)" = "$key" ] && return
  say "$message"
  pip_install "$@"
  printf '%s\n' "$key" >"$stamp"
}

find_browser() {
  local candidate
  for candidate in ${CHROMIUM:-chromium chromium-browser google-chrome google-chrome-stable}; do
    ! command -v "$candidate" || return 0
  done
  return 1
}

# Finds Chromium for the tests of LLaMA-Board, or installs it where that is possible. Without it they are skipped,
# except in CI, where they fail.
prepare_browser() {
  ! find_browser >/dev/null || return 0
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    say "Installing Chromium for the tests of LLaMA-Board"
    (apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends chromium) \
      >"$VENV/chromium.log" 2>&1 || say "apt-get could not install it (log: $VENV/chromium.log)"
  fi
  find_browser >/dev/null ||
    say "No Chromium here, so LLaMA-Board is not tested in a browser: install it (apt install chromium) or name one with CHROMIUM=/path"
}

# Makes the environment, or finishes it, or finds it ready: prepare_environment [EXTRAS], such as [test].
prepare_environment() {
  local python free_gb
  if [ ! -x "$VENV/bin/pip" ]; then # what venv writes last
    python=$(find_python) || exit 1
    # venv writes pyvenv.cfg first, so a folder without it was never one of ours that is not finished.
    [ -z "$(ls -A "$VENV" 2>/dev/null)" ] || [ -e "$VENV/pyvenv.cfg" ] ||
      die "$VENV holds something else than a virtual environment: let LLAMAFACTORY_PREFLIGHT_VENV name a new folder"
    mkdir -p "$VENV" 2>/dev/null || die "cannot write to $VENV: choose another folder with LLAMAFACTORY_PREFLIGHT_VENV"
    free_gb=$(($(df -Pk "$VENV" | awk 'NR == 2 { print $4 }') / 1000000))
    [ "$free_gb" -ge "$NEEDED_GB" ] ||
      die "disk full: $VENV has $free_gb GB free, about $NEEDED_GB GB are needed; choose another folder with LLAMAFACTORY_PREFLIGHT_VENV"
    say "Making a virtual environment with $("$python" -V) in $VENV"
    "$python" -m venv "$VENV" || die "cannot make a virtual environment with $python (on Debian and Ubuntu: apt install python3-venv)"
  fi
  install_once framework "${PINS[*]}" "Installing torch and LLaMA-Factory: a few GB, some minutes" "${PINS[@]}"
  # Again only when the environment holds another tree or the packaging changed; the code itself is used from the tree.
  install_once project "$ROOT $(cat "$ROOT/pyproject.toml" "$ROOT"/plugin/*.{pth,start} | cksum)" \
    "Installing this project" -e "$ROOT"
  [ -z "${1-}" ] || install_once extras "$1 $(cksum <"$ROOT/pyproject.toml")" "Installing what $1 needs" -e "$ROOT$1"
}
