"""What LLaMA-Board gets, without a browser: where arguments go, what is said, and the board that is really built."""

from __future__ import annotations

import json
import os
import string
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import board as boards
from llamafactory_preflight import presets
from llamafactory_preflight.arguments import schema
from llamafactory_preflight.board import failure, fields, menu, place, words
from llamafactory_preflight.board.fields import Element
from llamafactory_preflight.board.lookup import Lookup, StillAsking
from llamafactory_preflight.board.place import Board, Values
from llamafactory_preflight.board.session import Session
from llamafactory_preflight.device import Device
from llamafactory_preflight.errors import Unmodelled, UserError
from llamafactory_preflight.units import GIB


SLIDER = Element(kind="slider", value=100, minimum=10, maximum=5000, whole=True)
TEXT = Element(kind="text", value="100000")
MENU = Element(kind="menu", value="none", choices=("none", "8", "4"), custom=False)
SMALL_CARD = "12GiB"  # most presets do not fit it
PANEL_SECONDS = 0.2
LIST = Element(kind="menu", value=[], custom=True, several=True)


@pytest.mark.parametrize(
    ("element", "value", "shown"),
    [
        (SLIDER, 500, (500,)),
        (SLIDER, 500.0, (500,)),
        (SLIDER, 5, None),  # below the slider's range
        (SLIDER, 0.5, None),
        (SLIDER, True, None),
        (SLIDER, "many", None),
        (TEXT, 1e-4, ("0.0001",)),
        (TEXT, None, None),  # an empty field is no number
        (Element(kind="text", value=""), None, ("",)),
        (Element(kind="text"), ["q_proj", "v_proj"], ("q_proj,v_proj",)),
        (MENU, 4, ("4",)),
        (MENU, None, ("none",)),
        (MENU, 3, None),
        (LIST, "identity,alpaca_en", (["identity", "alpaca_en"],)),
        (LIST, ["identity"], (["identity"],)),
        (Element(kind="checkbox"), False, (False,)),
        (Element(kind="checkbox"), "yes", None),
    ],
)
def test_what_an_element_can_hold(element: Element, value: Any, shown: Any) -> None:
    assert element.shown(value) == shown


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (1e-4, "0.0001", True),
        (3, 3.0, True),
        ("a,b", ["a", "b"], True),
        ("a, b", "a,b", True),
        (False, None, False),
        (False, 0, False),
        (True, True, True),
        (None, None, True),
        ("auto", "fa2", False),
        ({"a": 1}, {"a": 1}, True),
    ],
)
def test_same(one: Any, other: Any, expected: bool) -> None:
    assert fields.same(one, other) is expected
    assert fields.same(other, one) is expected


@pytest.mark.parametrize(
    ("arguments", "choice"),
    [
        ({"flash_attn": "auto", "use_unsloth": False, "enable_liger_kernel": True}, "liger_kernel"),
        ({"flash_attn": "fa2", "use_unsloth": False, "enable_liger_kernel": True}, "flashattn2"),
        ({"flash_attn": "fa2", "use_unsloth": False, "enable_liger_kernel": False}, "flashattn2"),
        ({"flash_attn": "auto", "use_unsloth": False, "enable_liger_kernel": False}, "auto"),
        ({"flash_attn": "sdpa", "use_unsloth": False, "enable_liger_kernel": False}, "auto"),
    ],
)
def test_the_booster_stands_for_most_of_what_is_wanted(arguments: dict[str, Any], choice: str) -> None:
    assert fields.standing_for(fields.BOOSTERS, arguments) == choice


def test_every_text_has_five_languages_with_the_same_places_to_fill() -> None:
    for key, texts in words.TEXTS.items():
        names = [{name for _, name, _, _ in string.Formatter().parse(text) if name} for text in texts]
        assert len(texts) == 5 and all(texts) and all(name == names[0] for name in names), key


def test_an_unknown_language_gets_english() -> None:
    assert words.say("fits", None) == words.say("fits", "fr") == "Fits"


TORCHRUN = """Traceback (most recent call last):
  File "/x/launcher.py", line 3, in <module>
    run_exp()
RuntimeError: CUDA error: device-side assert triggered
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.

Traceback (most recent call last):
  File "/x/torchrun", line 8, in <module>
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
Traceback (most recent call last):
subprocess.CalledProcessError: Command '['torchrun']' returned non-zero exit status 1.
"""
REFUSED = """llamafactory-preflight 0.1.0: saves/training_args.yaml

  peak   48.00 GiB

WILL NOT FIT: needs 48.71 GiB and has 24.00 GiB.
  It fits with this added to the command:
    cutoff_len=1536
Stopped before loading anything. LLAMAFACTORY_PREFLIGHT=warn starts it all the same.
"""


@pytest.mark.parametrize(
    ("output", "told"),
    [
        ("x\nValueError: Cannot open data/dataset_info.json due to [Errno 2].\n", "ValueError: Cannot open"),
        (TORCHRUN, "RuntimeError: CUDA error"),
        (REFUSED, "WILL NOT FIT: needs 48.71"),
        ("Killed", "Killed"),
        ("", ""),
    ],
)
def test_a_failure_in_short(output: str, told: str) -> None:
    reason = failure.reason(output)
    assert reason.startswith(told)
    assert "Traceback" not in reason and "CalledProcessError" not in reason
    assert len(reason.splitlines()) <= 6


def test_a_failure_stays_in_its_block_and_names_the_file_with_all_of_it() -> None:
    shown = failure.short("Failed.", "Traceback\nValueError: ```<script>", "en", file="saves/x/failed_output.log")
    assert shown == "Failed.\n\n```text\nValueError: <script>\n```\n\nWhole output: `saves/x/failed_output.log`\n"


def test_the_suggested_tier_is_the_largest_that_the_smallest_card_belongs_to() -> None:
    available = presets.available()

    def suggested(*sizes: float) -> str:
        found = [Device(name="x", total_bytes=int(size * GIB), free_bytes=None) for size in sizes]
        return menu.suggested(available, found)

    assert suggested() == suggested(8) == "any"
    for size, tier in ((11.8, 12), (15.7, 16), (22.1, 24), (23.6, 24), (39.4, 40), (79.1, 80), (139.8, 80)):
        assert suggested(size) == f"{tier} GB"
    assert suggested(79.1, 15.7) == "16 GB"
    assert suggested(23.6, 23.6) == "2 x 24 GB"


def test_a_card_is_known_by_what_the_menu_shows() -> None:
    for lang in words.LANGUAGES:
        choices = menu.card_choices(lang)
        assert menu.card(choices[0][0]) == menu.card(menu.HERE) == menu.card(None) == ""
        assert menu.card(choices[1][0]) == menu.card(choices[1][1]) == choices[1][1]
    assert menu.card("24GiB") == "24GiB"


def test_the_board_is_answered_only_for_what_was_filled_in() -> None:
    session = Session()
    filled = {fields.MODEL_NAME: "A", fields.MODEL_PATH: "a/a", fields.TEMPLATE: "qwen3_nothink"}
    session.expect(filled, {fields.MODEL_NAME: "B"})
    assert session.answer("get_model_info", "A") == ("a/a", "qwen3_nothink")
    assert session.answer("get_model_info", "A") == ("a/a", "qwen3_nothink")  # browsers report a change twice
    assert session.answer("get_model_info", "B") is None
    session.expect(filled, {fields.MODEL_NAME: "A"})
    assert session.answer("get_model_info", "A") is None
    session.expect(filled)
    assert session.answer("get_model_info", "C") is None
    assert session.answer("get_model_info", "A") is None
    session.expect(filled)
    session.expect(filled | {fields.MODEL_NAME: "B", fields.MODEL_PATH: "b/b"})  # before the first was reported
    assert session.answer("get_model_info", "A") == ("a/a", "qwen3_nothink")
    assert session.answer("get_model_info", "B") == ("b/b", "qwen3_nothink")
    assert session.answer("get_model_info", "A") is None


def test_a_look_up_never_waits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lookup = Lookup()
    with boards.hub() as address:
        environ = {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path)}
        began = time.monotonic()
        with pytest.raises(StillAsking):
            lookup.find(boards.SLOW_MODEL, environ=environ)
        assert time.monotonic() - began < 0.5
        lookup.wait()
        assert lookup.find(boards.SLOW_MODEL, environ=environ).config["model_type"] == "qwen3"
        for name, error in (("nobody/nothing", UserError), ("down/model", Unmodelled)):
            with pytest.raises(StillAsking):
                lookup.find(name, environ=environ)
            lookup.wait()
            with pytest.raises(error):
                lookup.find(name, environ=environ)


def small_board(**elements: Element) -> Board:
    """A board that, like the real one, writes some arguments after the extra ones."""
    every = {"train.save_steps": SLIDER, "train.val_size": Element(kind="slider", maximum=1), fields.EXTRA: TEXT}
    every |= {fields.COMPUTE: Element(kind="menu"), fields.BOOSTER: Element(kind="menu")} | elements

    def parse(values: Values) -> dict[str, Any]:
        arguments = {"save_steps": values["train.save_steps"], **fields.COMPUTE_TYPES[values[fields.COMPUTE]]}
        arguments |= fields.BOOSTERS[values[fields.BOOSTER]] | place.extra_of(values)
        if values["train.val_size"]:
            arguments |= {"val_size": values["train.val_size"], "eval_steps": arguments["save_steps"]}
        return arguments

    return Board(elements=every, stages={"sft": "Supervised"}, models={}, parse=parse)


NEW_PAGE: Values = {
    "train.save_steps": 100, "train.val_size": 0, fields.COMPUTE: "bf16", fields.BOOSTER: "auto",
    fields.EXTRA: '{"optim": "adamw_torch"}',
}  # fmt: skip


def test_what_a_field_cannot_hold_goes_to_the_extra_arguments() -> None:
    board = small_board()
    wanted = {"save_steps": 5, "bf16": False, "pure_bf16": True, "optim": "adafactor"}
    placement = place.change(board, wanted, NEW_PAGE)
    assert placement.values["train.save_steps"] == 100 and placement.values[fields.COMPUTE] == "pure_bf16"
    assert json.loads(placement.values[fields.EXTRA]) == {"optim": "adafactor", "save_steps": 5}
    back = place.change(board, {"save_steps": 50}, placement.values)
    assert back.values["train.save_steps"] == 50 and "save_steps" not in json.loads(back.values[fields.EXTRA])


def test_what_the_board_overwrites_goes_to_the_extra_arguments_as_a_whole() -> None:
    wanted = {"val_size": 0.1, "eval_steps": 50, "save_steps": 200}
    placement = place.change(small_board(), wanted, NEW_PAGE)
    assert placement.values["train.val_size"] == 0 and placement.unplaced == ()
    assert json.loads(placement.values[fields.EXTRA]) == {"optim": "adamw_torch", "val_size": 0.1, "eval_steps": 50}


@pytest.mark.parametrize("text", ["{", "[1]", "3"])
def test_extra_arguments_that_are_no_object(text: str) -> None:
    with pytest.raises(UserError, match="extra arguments"):
        place.extra_of({fields.EXTRA: text})


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> dict[str, Any]:
    """What the board of the installed LLaMA-Factory makes of every preset."""
    folder = tmp_path_factory.mktemp("facts")
    (folder / "saves").mkdir()
    (folder / "saves" / "tiny-qwen3").symlink_to(tiny_model, target_is_directory=True)
    boards.fill_hub_cache(folder / "hf")
    environ = os.environ | {"HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(Path(__file__).with_name("board_facts.py")), SMALL_CARD]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environ)
    assert done.returncode == 0, done.stderr
    assert "llamafactory-preflight" not in done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_board_carries_our_elements(facts: dict[str, Any]) -> None:
    assert facts["ours"] == [
        "preflight_tier", "preflight_preset", "preflight_keep", "preflight_undo", "preflight_card",
        "preflight_num_cards", "preflight_sample",
    ]  # fmt: skip
    assert set(facts["without_element"]) <= {"train.train_seed"}  # a newer board has it


def test_every_argument_of_every_preset_reaches_the_training(facts: dict[str, Any]) -> None:
    known = schema.load()
    assert known is not None
    for name, run in facts["runs"].items():
        assert facts["unplaced"][name] == [], name
        wrong = {k: run["parsed"].get(k) for k, v in run["wanted"].items() if not fields.same(run["parsed"].get(k), v)}
        assert wrong == {}, name
        for key, value in run["wanted"].items():  # what the board leaves out is its argument's default
            assert key in run["sent"] or not value, (name, key)
        others = {key: value for key, value in run["sent"].items() if key not in run["wanted"]}
        computed = {"lora_alpha": 2 * run["parsed"].get("lora_rank", 0), "flash_attn": "auto"}
        computed["packing"] = run["parsed"]["neat_packing"]
        for key in others.keys() - place.ADDITIONS:
            default = computed[key] if key in computed else known.arguments[key].defaults[0]
            assert fields.same(others[key], default), (name, key)


def test_the_panel_of_every_preset_is_quick(facts: dict[str, Any]) -> None:
    assert facts["seconds"].keys() == facts["runs"].keys()
    assert {name: seconds for name, seconds in facts["seconds"].items() if seconds > PANEL_SECONDS} == {}


def test_the_panel_is_told_only_of_what_was_asked_last(facts: dict[str, Any]) -> None:
    told = facts["overlapping"]
    assert told["first"] is None and told["once more"] is None
    assert all("Will not fit" in told[name] for name in ("second", "again"))


def test_presets_are_copied_for_the_boards_own_loader(run: Any, tmp_path: Path, facts: dict[str, Any]) -> None:
    import yaml

    done = run(["llamafactory-cli", "presets", "copy", "--board"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    names = [preset.name for preset in presets.available()]
    assert sorted(done.stdout.split()) == sorted(f"llamaboard_config/{name}.yaml" for name in names)
    files = [tmp_path / "llamaboard_config" / f"{name}.yaml" for name in names]
    loaded = {file.stem: yaml.safe_load(file.read_text(encoding="utf-8")) for file in files}
    known = set(facts["ids"]) - {"top.lang", "top.hub_name"}
    assert {name: held.keys() - known for name, held in loaded.items() if held.keys() - known} == {}
    smoke = loaded["cpu_smoke"]
    assert smoke["top.model_path"] == "saves/tiny-qwen3" and smoke["train.batch_size"] == 4
    assert json.loads(smoke["train.extra_args"])["max_steps"] == 30


def test_a_board_that_changed_runs_without_us_and_says_so_once(tmp_path: Path, run: Any) -> None:
    code = """
import gradio as gr
from llamafactory.webui.runner import Runner
del Runner._initialize
from llamafactory.webui.components import create_top, create_train_tab
from llamafactory.webui.engine import Engine
for _ in range(2):
    engine = Engine(demo_mode=True)
    with gr.Blocks():
        engine.manager.add_elems("top", create_top())
        print(len([name for name in create_train_tab(engine) if "preflight" in name]))
"""
    done = run([sys.executable, "-c", code], cwd=tmp_path)
    assert done.stdout.split() == ["0", "0"], done.stderr
    told = [line for line in done.stderr.splitlines() if line.startswith("llamafactory-preflight: ")]
    assert len(told) == 1 and "LLaMA-Board has no _initialize; it runs without" in told[0]
