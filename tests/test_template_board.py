"""LLaMA-Board sends its checkbox always; what nobody touched counts as LLaMA-Factory's default."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


# The page's own elements with their first values, its own translation into arguments, and the file that it writes.
PAGE = """
import json, sys
import gradio as gr
from llamafactory.webui.components import create_top, create_train_tab
from llamafactory.webui.engine import Engine
from llamafactory.webui.common import save_cmd
model, data_dir, output = sys.argv[1:]
engine = Engine(demo_mode=False, pure_chat=False)
with gr.Blocks():
    engine.manager.add_elems("top", create_top())
    engine.manager.add_elems("train", create_train_tab(engine))
values = {elem: getattr(elem, "value", None) for elem in engine.manager.get_elem_list()}
def put(name, value):
    values[engine.manager.get_elem_by_id(name)] = value
for name, value in {
    "top.lang": "en", "top.model_name": "Custom", "top.model_path": model, "top.template": "qwen3",
    "top.checkpoint_path": [], "train.compute_type": "fp32", "train.dataset": ["some"], "train.dataset_dir": data_dir,
}.items():
    put(name, value)
files = []
for number, box in enumerate((True, False)):
    put("train.enable_thinking", box)
    put("train.output_dir", f"{output}/{number}")
    files.append(save_cmd(engine.runner._parse_train_args(values)))
print("FILES", json.dumps(files))
"""
# What the page's child does with each file, and what a child of a terminal does.
CHILD = """
import json, os, sys
from llamafactory.data import get_template_and_fix_tokenizer
from llamafactory.hparams import get_train_args, read_args
from llamafactory.model import load_tokenizer
asked = []
for file in sys.argv[1:]:
    for board in ("1", "0"):
        os.environ["LLAMABOARD_ENABLED"] = board
        sys.argv = ["llamafactory-cli", file]
        model_args, data_args, *_ = get_train_args(read_args())
        tokenizer = load_tokenizer(model_args)["tokenizer"]
        template = get_template_and_fix_tokenizer(tokenizer, data_args)
        asked.append([data_args.enable_thinking, template.enable_thinking, type(template).__name__])
print("ASKED", json.dumps(asked))
"""


def _line(text: str, mark: str) -> Any:
    return json.loads(next(line for line in text.splitlines() if line.startswith(mark)).removeprefix(mark))


def test_the_page_s_box_counts_as_a_default(tmp_path: Path, tiny_model: Path, run: Callable[..., Any]) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "some.json").write_text(json.dumps([{"instruction": "q", "input": "", "output": "a"}]))
    (data / "dataset_info.json").write_text(json.dumps({"some": {"file_name": "some.json"}}))
    child = {"CUDA_VISIBLE_DEVICES": "", "GRADIO_ANALYTICS_ENABLED": "0"}
    page = run([sys.executable, "-c", PAGE, tiny_model, data, tmp_path / "out"], cwd=tmp_path, env=child)
    assert page.returncode == 0, page.stderr[-3000:]
    done = run([sys.executable, "-c", CHILD, *_line(page.stdout, "FILES ")], cwd=tmp_path, env=child)
    assert done.returncode == 0, done.stderr[-3000:]
    ours = "OfficialTemplate"
    assert _line(done.stdout, "ASKED ") == [
        [True, None, ours],
        [True, True, ours],
        [False, False, ours],
        [False, False, ours],
    ]
