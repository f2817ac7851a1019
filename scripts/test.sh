#!/usr/bin/env bash
# The whole test suite, in the environment of quickstart.sh plus what the tests need. Arguments go to pytest.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$ROOT"

prepare_environment "[test]"
prepare_browser
say "pytest${*:+ $*}"
exec "$VENV/bin/python" -m pytest "$@"
