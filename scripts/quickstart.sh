#!/usr/bin/env bash
# From a fresh clone to a finished training run, on any machine with Python 3.11 or newer; no GPU needed.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$ROOT"

prepare_environment
say "Building a tiny Qwen3 with random weights and the real tokenizer"
"$VENV/bin/python" scripts/build_tiny_model.py --link saves/tiny-qwen3 || exit 1

say "llamafactory-cli train presets/cpu_smoke.yaml"
# Only warnings of LLaMA-Factory and transformers; without this they print some 300 lines.
LLAMAFACTORY_VERBOSITY=${LLAMAFACTORY_VERBOSITY:-WARNING} "$VENV/bin/llamafactory-cli" train presets/cpu_smoke.yaml ||
  die "training failed, see above"

say "The loss, from saves/cpu_smoke/trainer_log.jsonl"
"$VENV/bin/python" - saves/cpu_smoke/trainer_log.jsonl <<'EOF'
import json
import sys

rows = [json.loads(line) for line in open(sys.argv[1], encoding="utf-8")]
for row in rows:
    if "loss" in row:
        print(f"    step {row['current_steps']:3d}  {row['loss']:6.3f}  {'#' * round((row['loss'] - 10) * 20)}")
EOF
cat <<EOF
==> Done. In saves/cpu_smoke: the adapter (adapter_model.safetensors) and the curve (training_loss.png).
    To go on in the same environment:
      source $VENV/bin/activate
      llamafactory-cli presets list
      llamafactory-cli preflight presets/24gb_lora.yaml --gpu 24GiB
EOF
