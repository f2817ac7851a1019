#!/usr/bin/env bash
# Contract tests and the smoke training against other versions of LLaMA-Factory.
#
#   scripts/compat.sh [VERSION | PATH-OF-A-SOURCE-CHECKOUT]...     (default: 0.9.4 0.9.5)
#   GRADIO=4.38.1 scripts/compat.sh 0.9.4                         only LLaMA-Board's tests, on another gradio
#
# Each gets a thin environment on top of the one of test.sh: torch is taken from there, and only what a version pins
# otherwise is installed again. Both lie in the cache, outside the source tree.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$ROOT"

TESTS=(tests/test_hooks.py tests/test_launch.py tests/test_arguments.py tests/test_run.py tests/test_schema.py
  tests/test_mistakes.py tests/test_mistakes_real.py
  tests/test_presets_run.py tests/test_deepspeed_files.py tests/test_families.py tests/test_template_rules.py tests/test_template_fixer.py
  tests/test_template_faults.py tests/test_template_matrix.py tests/test_template_export.py
  tests/test_template_board.py tests/test_template_files.py tests/test_ollama.py tests/test_board.py tests/test_board_browser.py)
[ -z "${GRADIO-}" ] || TESTS=(tests/test_board.py tests/test_board_browser.py tests/test_template_board.py)

# A source checkout is installed editable, so that its present state is what is tested.
requirement() {
  if [ -d "$1" ]; then
    printf '%s\n' -e "$(cd "$1" && pwd)"
  else
    printf '%s\n' "llamafactory==$1"
  fi
  # The last one that it takes.
  [[ $1 != 0.9.4* ]] || printf '%s\n' 'deepspeed==0.16.9'
  [ -z "${GRADIO-}" ] || printf '%s\n' "gradio==$GRADIO"
  # What was current with gradio 4; with later ones its page stays empty, with or without the plugin.
  [[ ${GRADIO-} != 4.* ]] || printf '%s\n' 'pydantic==2.10.6' 'fastapi==0.112.2'
}

# The environment of one version: layer FOLDER VERSION-OR-PATH. It runs in a subshell, as common.sh works on VENV.
layer() {
  local base wanted
  base=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  mapfile -t wanted < <(requirement "$2")
  if [ ! -x "$1/bin/pip" ]; then
    "$VENV/bin/python" -m venv "$1" || die "cannot make a virtual environment in $1"
  fi
  # Last in the path, and plain: the startup files of the base are not run, so the plugin is this layer's own.
  printf '%s\n' "$base" >"$("$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/zz_base.pth"
  VENV=$1
  install_once framework "${wanted[*]} $base" "Installing LLaMA-Factory from $2" "${wanted[@]}"
  install_once project "$ROOT $(cat "$ROOT/pyproject.toml" "$ROOT"/plugin/*.{pth,start} | cksum)" \
    "Installing this project" --no-deps -e "$ROOT"
  # torch is in the base, and so is its launcher, which would start the base's Python.
  printf '#!%s\nimport sys\nfrom torch.distributed.run import main\nsys.exit(main())\n' "$1/bin/python" >"$1/bin/torchrun"
  chmod +x "$1/bin/torchrun"
}

prepare_environment "[test]"
[ $# -gt 0 ] || set -- 0.9.4 0.9.5
failed=()
for version in "$@"; do
  [ -d "$version" ] || [[ $version == [0-9]* ]] || die "$version is neither a version nor a folder"
  folder=$CACHE/compat/$(basename "$(realpath -m "$version")")${GRADIO:+-gradio$GRADIO}
  (layer "$folder" "$version") || exit 1
  say "LLaMA-Factory $("$folder/bin/python" -c 'import llamafactory; print(llamafactory.__version__)') from $version"
  "$folder/bin/python" -m pytest -p no:cacheprovider "${TESTS[@]}" || failed+=("$version")
done
[ ${#failed[@]} -eq 0 ] || die "failed with ${failed[*]}"
say "All of it passed with $*"
