"""LLaMA-Board in a real browser: the real server, every preset, and what users do and break."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import board
from llamafactory_preflight import presets
from llamafactory_preflight.arguments import schema
from llamafactory_preflight.board import words
from llamafactory_preflight.board.lookup import LONGEST_WAIT_SECONDS
from llamafactory_preflight.phrases import phrase
from llamafactory_preflight.presets import Preset


PRESETS = presets.available()
# What the board adds to every run that says nothing else. It is the whole list.
ADDITIONS = {
    "preprocessing_num_workers": 16,
    "trust_remote_code": True,
    "plot_loss": True,
    "ddp_timeout": 180000000,
    "include_num_input_tokens_seen": True,
}
CARD = "12GiB"
SCREENSHOTS = os.environ.get("LLAMAFACTORY_PREFLIGHT_SCREENSHOTS")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    executable = board.chromium()
    if executable is None:
        message = "no Chromium here: install it (on Debian and Ubuntu: apt install chromium) or name one with CHROMIUM"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # The sandbox needs rights that a container lacks; the pages are our own.
        launched = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """Where the board works, with the tiny model in it."""
    folder = tmp_path_factory.mktemp("board")
    (folder / "saves").mkdir()
    (folder / "saves" / "tiny-qwen3").symlink_to(tiny_model, target_is_directory=True)
    (folder / "mine").mkdir()
    (folder / "mine" / "dataset_info.json").write_text('{"empty": {"file_name": "empty.json"}}', encoding="utf-8")
    (folder / "mine" / "empty.json").write_text("[]", encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    """One server for all tests of this file; it plans for a small card."""
    board.fill_hub_cache(folder / "hf")
    with (
        board.hub() as hub,
        board.webui(
            folder,
            Path(sys.executable).parent,
            HF_HOME=str(folder / "hf"),
            HF_ENDPOINT=hub,
            LLAMAFACTORY_PREFLIGHT_GPU=CARD,
        ) as address,
    ):
        yield address


@pytest.fixture(scope="module")
def plain_errors(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What the board without the plugin writes to the browser's console; offline, it misses its web fonts."""
    folder = tmp_path_factory.mktemp("plain")
    with board.webui(folder, Path(sys.executable).parent, LLAMAFACTORY_PREFLIGHT="off") as address:
        page = board.BoardPage(browser.new_page(), address).open()
        assert page.page.get_by_label("Hardware preset").count() == 0
        page.choose("Language", "zh")
        return page.console_errors


@pytest.fixture(scope="module")
def shared(browser: Any, address: str) -> Iterator[board.BoardPage]:
    """A page for tests that leave it as they find it, or do not care how they find it."""
    page = board.BoardPage(browser.new_page(viewport={"width": 1280, "height": 900}), address)
    yield page
    page.page.close()


@pytest.fixture
def page(shared: board.BoardPage, plain_errors: list[str], folder: Path) -> Iterator[board.BoardPage]:
    shared.console_errors.clear()
    (folder / "llamaboard_cache" / "user_config.yaml").unlink(missing_ok=True)  # the last model and the language
    yield shared.open()
    assert [error for error in shared.console_errors if error not in plain_errors] == []
    assert "Traceback" not in shared.page.content()


@pytest.fixture(scope="module")
def same_page(browser: Any, address: str, plain_errors: list[str]) -> Iterator[board.BoardPage]:
    """A page that is loaded once: each preset follows another one."""
    page = board.BoardPage(browser.new_page(viewport={"width": 1280, "height": 900}), address).open()
    yield page
    assert [error for error in page.console_errors if error not in plain_errors] == []
    page.page.close()


def screenshot(page: board.BoardPage, name: str) -> None:
    if SCREENSHOTS:
        Path(SCREENSHOTS).mkdir(parents=True, exist_ok=True)
        page.page.locator("#preflight").screenshot(path=Path(SCREENSHOTS, f"{name}_panel.png"))
        page.page.screenshot(path=Path(SCREENSHOTS, f"{name}.png"), full_page=True)


def amount(text: str, name: str) -> float:
    """The GiB behind a word."""
    found = re.search(rf"\b{name} ([\d.]+) GiB", text)
    assert found is not None, text
    return float(found[1])


def same(one: Any, other: Any) -> bool:
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    texts = [",".join(item) if isinstance(item, list) else str(item) for item in (one, other)]
    try:
        return float(texts[0]) == float(texts[1])
    except ValueError:
        return texts[0] == texts[1]


def default(name: str, command: dict[str, Any]) -> Any:
    if name == "lora_alpha":
        return 2 * int(command["lora_rank"])
    if name == "packing":
        return command.get("neat_packing", False)
    if name == "flash_attn":
        return "auto"
    known = schema.load()
    assert known is not None
    return known.arguments[name].defaults[0]


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.name)
def test_a_preset_arrives_whole_in_the_command(same_page: board.BoardPage, preset: Preset) -> None:
    page = same_page
    page.preset("CPU / any" if preset.tier == presets.ANY else preset.tier, preset.name)
    command = page.command()
    wanted = dict(preset.arguments)
    if "deepspeed" in wanted:
        file = Path(command.pop("deepspeed"))
        assert file == (preset.file.parent.parent / wanted.pop("deepspeed")).resolve() and file.is_file()
    assert {name: command.get(name) for name in wanted if not same(command.get(name), wanted[name])} == {}
    added = {name: value for name, value in command.items() if name not in wanted}
    assert ADDITIONS.keys() <= command.keys()
    expected = {name: ADDITIONS[name] if name in ADDITIONS else default(name, command) for name in added}
    assert {name: value for name, value in added.items() if not same(value, expected[name])} == {}
    assert re.search(r"[✓!✕?] (Fits|Tight|Will not fit|Cannot tell): ", page.output())


def test_the_panel_follows_the_fields(page: board.BoardPage) -> None:
    assert "Choose a model" in page.panel()
    page.preset("24 GB", "24gb_lora")
    assert "Will not fit: needs " in page.panel() and f"{CARD}, planned" in page.panel()
    sizes = {name: amount(page.panel(), name) for name in ("needs", "peak", "needed", "free now", "main memory")}
    assert sizes["needs"] == sizes["needed"] > sizes["peak"] > 0 and sizes["main memory"] > 0
    assert sizes["needed"] > sizes["free now"] == 12
    page.choose("Plan for GPU", "RTX4090")
    assert "Fits: needs " in page.panel() and "rtx4090, planned" in page.panel()
    before = page.panel()
    page.type("Cutoff length", "512")
    assert "Fits" in page.panel() and page.panel() != before
    screenshot(page, "panel")


# The number of the first look at the fields.
LOOK = """() => {
  const {components, dependencies} = window.gradio_config;
  const tick = components.find(item => item.props.elem_id === "preflight-tick").id;
  return dependencies.find(item => item.targets.some(([id]) => id === tick)).id;
}"""


def test_fast_typing_asks_once_or_twice(page: board.BoardPage) -> None:
    page.preset("24 GB", "24gb_lora")
    before, look = page.panel(), page.page.evaluate(LOOK)
    page.field("Cutoff length").press("Control+a")
    asked: list[Any] = []

    def note(request: Any) -> None:
        asked.extend([request.post_data_json["fn_index"]] if "/run/" in request.url else [])

    page.page.on("request", note)
    page.field("Cutoff length").press_sequentially("65432", delay=30)
    page.settle()
    page.page.remove_listener("request", note)
    assert 1 <= asked.count(look) <= 2 and page.panel() != before


# What the first choice of a preset asks for is kept back for a while.
HELD = """name => {
  const plain = window.fetch;
  window.held = 0;
  window.fetch = async (...given) => {
    if (String(given[1]?.body).includes(`"${name}"`) && window.held++ === 0) {
      await new Promise(done => setTimeout(done, 1500));
      window.held = "sent";
    }
    return plain(...given);
  };
}"""


def test_of_two_presets_chosen_in_haste_the_second_one_stays(page: board.BoardPage) -> None:
    page.preset("24 GB", "24gb_lora_long")
    filled = page.command()
    page.open()
    page.choose("GPU memory tier", "24 GB")
    page.page.evaluate(HELD, "24gb_dpo_qlora")
    for name in ("24gb_dpo_qlora", "24gb_lora_long"):
        page.field("Hardware preset").click()
        page.page.get_by_role("option", name=f"{name}:").click()
    page.page.wait_for_function("window.held === 'sent'")
    page.settle()
    assert page.field("Hardware preset").input_value().startswith("24gb_lora_long:")
    assert page.command() == filled


# The second look of the first question is kept back for a while.
LATE = """look => {
  const again = window.gradio_config.dependencies.find(item => item.trigger_after === look).id;
  const plain = window.fetch;
  window.late = 0;
  window.fetch = async (...given) => {
    if (String(given[0]).includes("/run/") && JSON.parse(given[1].body).fn_index === again && window.late++ === 0)
      await new Promise(done => setTimeout(done, 3000));
    return plain(...given);
  };
}"""


def test_the_panel_ends_with_the_last_fields_however_late_a_second_look_is(page: board.BoardPage) -> None:
    page.preset("24 GB", "24gb_lora")
    page.page.evaluate(LATE, page.page.evaluate(LOOK))
    page.type("Batch size", "3")
    page.type("Batch size", "4")
    page.page.wait_for_timeout(3000)
    page.settle()
    panel, remedies = page.panel(), page.page.locator(".preflight-remedies button:visible").all_inner_texts()
    assert page.page.evaluate("window.late") == 2 and remedies
    page.type("Batch size", "5")
    assert page.panel() != panel
    page.type("Batch size", "4")
    assert page.panel() == panel
    assert page.page.locator(".preflight-remedies button:visible").all_inner_texts() == remedies


def test_a_remedy_sets_the_fields_and_can_be_undone(page: board.BoardPage) -> None:
    page.preset("24 GB", "24gb_lora")
    filled, listed = page.command(), page.changes()
    assert page.page.get_by_text(f"Fields changed: {len(listed)}").is_visible()
    assert listed["Model path"] == "– → Qwen/Qwen3-8B" and listed["Dataset"] == "– → identity"
    assert listed["Cutoff length"] == f"2048 → {filled['cutoff_len']}"
    assert "Will not fit" in page.panel()
    screenshot(page, "remedies")
    remedies = page.page.locator(".preflight-remedies button:visible")
    text = remedies.filter(has_text="quantization_bit=4 →").first.inner_text()
    page.press(text)
    assert re.search("Fits|Tight", page.panel())
    pairs = dict(item.split("=") for item in text.split(" → ")[0].split())
    command = page.command()
    assert {name: str(command[name]).lower() for name in pairs} == pairs
    assert page.changes() == {"Quantization bit": "none → 4"}
    page.press("Undo")
    assert page.command() == filled and page.changes() == listed
    page.press("Undo")
    assert page.changes() == {} and page.page.get_by_text("The fields are as before.").is_visible()
    assert page.field("Model path").input_value() == "" and page.field("Cutoff length").input_value() == "2048"
    assert page.page.locator("button:visible", has_text="Undo").count() == 0


def test_the_users_model_and_data_stay_unless_told_otherwise(page: board.BoardPage) -> None:
    page.field("Model name").fill("Qwen3-4B-Thinking")
    page.page.get_by_role("option", name="Qwen3-4B-Thinking", exact=True).first.click()
    page.settle()
    page.preset("24 GB", "24gb_lora")
    assert page.field("Model path").input_value() == "Qwen/Qwen3-4B"
    wanted = next(preset for preset in PRESETS if preset.name == "24gb_lora").arguments["cutoff_len"]
    command = page.command()
    assert (command["model_name_or_path"], command["cutoff_len"]) == ("Qwen/Qwen3-4B", str(wanted))
    with_small = page.panel()
    page.press("Undo")
    page.page.get_by_label("Keep my model and data").uncheck()
    page.preset("24 GB", "24gb_lora")
    assert page.field("Model path").input_value() == "Qwen/Qwen3-8B"
    assert page.panel() != with_small


def test_the_board_speaks_five_languages(page: board.BoardPage) -> None:
    page.preset("24 GB", "24gb_lora")
    seen = {}
    label = "Language"
    for lang, next_label, word in (
        ("ru", "Язык", "Не помещается"),
        ("zh", "语言", "放不下"),
        ("ko", "언어", "들어가지 않음"),
        ("ja", "言語", "収まりません"),
        ("en", "Language", "Will not fit"),
    ):
        page.choose(label, lang)
        label = next_label
        assert word in page.panel()
        seen[lang] = page.page.locator(".preflight-remedies button:visible").first.inner_text()
        screenshot(page, f"language_{lang}")
    assert len(set(seen.values())) == 5


def test_what_was_saved_is_loaded_after_the_page_was_loaded_again(page: board.BoardPage) -> None:
    page.preset("24 GB", "24gb_lora")
    page.type("Maximum gradient norm", "0.5")
    before = page.command()
    page.press("Save arguments", until="saved at")
    name = page.field("Config path").input_value()
    page.open()
    page.type("Config path", name)
    page.press("Load arguments", until="restored|loaded")
    after = page.command()
    assert {k: v for k, v in before.items() if after.get(k) != v and k != "output_dir"} == {}
    assert after.keys() == before.keys()


def test_a_training_runs_to_its_end_and_is_measured(page: board.BoardPage, folder: Path) -> None:
    page.preset("CPU / any", "cpu_smoke")
    page.press("Start", until="^Finished", timeout=400)
    assert (folder / "saves" / "cpu_smoke" / "adapter_model.safetensors").is_file()
    told = page.page.get_by_text("Last run, main memory: predicted")
    told.wait_for()
    found = re.search(r"predicted ([\d.]+) GiB, measured ([\d.]+) GiB \(([+-][\d.]+)%\)", told.inner_text())
    assert found is not None, told.inner_text()
    predicted, measured, difference = map(float, found.groups())
    assert abs(measured / predicted - 1 - difference / 100) < 0.02  # the amounts are rounded
    screenshot(page, "finished")


def test_what_was_trained_is_evaluated_chatted_with_and_exported(page: board.BoardPage, folder: Path) -> None:
    # The test before this one has trained the adapter.
    page.preset("CPU / any", "cpu_smoke")
    adapter = page.field("Checkpoint path")
    adapter.click()
    page.settle()  # the board answers the click with an empty menu
    adapter.fill("saves/cpu_smoke")
    adapter.press("Enter")
    page.settle()
    page.tab("Evaluate & Predict")
    page.type("Data dir", str(PRESETS[0].file.parent / "data"))
    page.choose("Dataset", "identity")
    page.type("Max samples", "2")
    page.page.get_by_label("Save predictions").uncheck()
    page.press("Preview command", until="do_eval")
    assert "adapter_name_or_path saves/cpu_smoke" in page.output()
    if importlib.util.find_spec("jieba"):  # LLaMA-Factory's metrics need it, with the plugin and without
        page.press("Start", until="^Finished", timeout=300)
    page.tab("Chat")
    page.press("Load model")
    assert page.chat("Hello")
    page.press("Unload model")
    page.tab("Export")
    page.type("Export dir", "saves/exported")
    page.page.locator("button:visible", has_text="Export").last.click()  # the first one is the tab's
    page.page.wait_for_function(
        "[...document.querySelectorAll('textarea')].some(box => box.value.startsWith('Model exported'))"
    )
    assert (folder / "saves" / "exported" / "model.safetensors").is_file()


def test_what_will_not_fit_starts_only_when_told_twice(page: board.BoardPage, folder: Path) -> None:
    shutil.rmtree(folder / "saves" / "cpu_smoke", ignore_errors=True)
    page.preset("CPU / any", "cpu_smoke")
    page.type("Batch size", "1024")
    page.type("Cutoff length", "100000")
    page.type("Data dir", "nowhere")
    assert "Will not fit" in page.panel()
    page.press("Start", until="Press Start again")
    assert "Will not fit" in page.output()
    assert not (folder / "saves" / "cpu_smoke" / "training_args.yaml").exists()
    # It goes on then, and so does the child: something else stops it, that there is no such data set.
    page.press("Start", until="^Failed", timeout=150)
    assert "Cannot open nowhere/dataset_info.json" in page.output()


@pytest.mark.parametrize(
    ("label", "value", "told"),
    [
        ("Model path", "/nowhere/model", "The model folder /nowhere/model does not exist"),
        ("Model path", "nobody/nothing", "has no nobody/nothing"),
        ("Model path", "down/model", "cannot be reached"),
        ("Learning rate", "fast", "Learning rate: 'fast' cannot be read"),
        ("Max samples", "many", "Max samples: 'many' cannot be read"),
        ("Plan for GPU", "a toaster", "is not a card known here"),
        ("Number of GPUs", "-3", "is not a number of GPUs"),
        ("Number of GPUs", "several", "is not a number of GPUs"),
    ],
)
def test_what_makes_no_sense_is_a_sentence(page: board.BoardPage, label: str, value: str, told: str) -> None:
    page.preset("CPU / any", "cpu_smoke")
    page.type(label, value)
    assert told in page.panel()


def test_what_is_wrong_is_said_in_the_language_of_the_board(page: board.BoardPage) -> None:
    page.preset("80 GB", "80gb_lora_moe")
    page.choose("Plan for GPU", "T4")
    menu = "Language"
    for lang, next_menu, bf16, number in (
        ("ru", "Язык", "У t4 нет bf16", "Число GPU"),
        ("zh", "语言", "t4 不支持 bf16", "显卡数量"),
        ("ko", "언어", "t4에는 bf16이 없어", "GPU 수"),
        ("ja", "言語", "t4 に bf16 はなく", "GPU の数"),
    ):
        page.choose(menu, lang)
        menu = next_menu
        assert bf16 in page.panel()
        assert not re.search("[a-z]{3,} [a-z]{3,} [a-z]{3,}", page.panel())  # no English sentence is left
        page.type(number, "several")
        assert words.said(phrase("{value} is not a number of GPUs", value="several"), lang) in page.panel()
        page.type(number, "")
    page.choose(menu, "en")


def test_extra_arguments_that_are_no_json_are_a_sentence(page: board.BoardPage) -> None:
    page.preset("CPU / any", "cpu_smoke")
    page.press("Extra configurations")
    for value in ("{", "[1]", '{"no_such_argument": 1}', '{"lora_rank": "many"}'):
        page.type("Extra arguments", value)
        assert "Please check the settings" in page.panel() or "Fits" in page.panel()


def test_a_model_of_the_hub_is_looked_up_in_the_background(page: board.BoardPage) -> None:
    page.choose("Model name", "Custom")
    page.field("Model path").fill(board.SLOW_MODEL)
    page.page.get_by_text("Asking the model hub").wait_for(timeout=5000)
    page.settle()
    assert re.search("Fits|Tight|Will not fit", page.panel())


def test_a_hub_that_says_nothing_is_given_up_and_keeps_nobody_waiting(page: board.BoardPage) -> None:
    page.choose("Model name", "Custom")
    page.field("Model path").fill(board.SILENT_MODEL)
    page.page.get_by_text("Asking the model hub").wait_for(timeout=5000)
    page.field("GPU memory tier").click()
    page.page.get_by_role("option", name="24 GB", exact=True).click()
    page.field("Hardware preset").click()
    page.page.get_by_role("option", name="24gb_lora:").wait_for(timeout=5000)
    assert "Asking the model hub" in page.panel()
    told = page.page.get_by_text(re.compile(f"Cannot tell: The hub cannot be reached to read .*{board.SILENT_MODEL}"))
    told.wait_for(timeout=1000 * LONGEST_WAIT_SECONDS)


def test_a_failed_training_says_why_in_short(page: board.BoardPage) -> None:
    page.preset("CPU / any", "cpu_smoke")
    page.type("Data dir", "mine")
    page.field("Dataset").press("Backspace")
    page.choose("Dataset", "empty")
    page.press("Start", until="^Failed", timeout=120)
    assert "Whole output" in page.output()
    assert len(page.output()) < 1500
    screenshot(page, "failed")


def test_the_template_is_checked_and_a_sample_shown(page: board.BoardPage) -> None:
    page.preset("CPU / any", "cpu_smoke")
    assert page.page.get_by_text("The template matches Qwen3.").is_visible()
    page.choose("Chat template", "llama3")
    assert page.page.get_by_text("not with `llama3`").is_visible()
    page.press("Use qwen3")
    assert page.field("Chat template").input_value() == "qwen3"
    page.page.locator("button:visible", has_text="Show a sample").click()
    sample = page.page.locator(".preflight pre mark").first
    sample.wait_for(timeout=120_000)
    shown = page.page.locator(".preflight pre")
    assert "<|im_start|>assistant" in shown.inner_text() and "<|im_start|>" not in sample.inner_text()
    screenshot(page, "sample")


def test_every_element_of_ours_has_a_name_and_is_reached_by_keyboard(page: board.BoardPage) -> None:
    page.preset("24 GB", "24gb_lora")
    page.choose("Chat template", "llama3")
    wanted = ["Use qwen3", "Show a sample", "GPU memory tier", "Hardware preset", "Keep my model and data", "Undo",
              "Fields changed", "Plan for GPU", "Number of GPUs"]  # fmt: skip
    page.field("Chat template").focus()
    reached = []
    for _ in range(45):
        reached.append(
            page.page.evaluate(
                "(document.activeElement.ariaLabel || '') + document.activeElement.innerText"
                " + (document.activeElement.labels?.[0]?.innerText || '')"
            )
        )
        page.page.keyboard.press("Tab")
        page.page.wait_for_timeout(30)
    assert [name for name in wanted if not any(name in text for text in reached)] == []
    assert any("→" in text for text in reached)  # a remedy
    assert page.page.locator("#preflight-panel [role=img]").get_attribute("aria-label")
    assert page.page.locator("#preflight-panel [role=status]").count() == 1


DEMO = "from llamafactory.webui.interface import create_ui; create_ui(demo_mode=True).queue().launch(inbrowser=False)"


def test_a_demo_shows_the_panel_and_starts_nothing(
    browser: Any, plain_errors: list[str], folder: Path, tmp_path: Path
) -> None:
    demo = {"DEMO_MODEL": str(folder / "saves" / "tiny-qwen3"), "DEMO_TEMPLATE": "qwen3"}
    environ = {"HF_HOME": str(folder / "hf"), "LLAMAFACTORY_PREFLIGHT_GPU": CARD, "HF_HUB_OFFLINE": "1"}
    with board.webui(tmp_path, Path(sys.executable).parent, program=DEMO, **demo, **environ) as address:
        page = board.BoardPage(browser.new_page(viewport={"width": 1280, "height": 900}), address).open()
        assert page.page.get_by_role("tab", name="Export").count() == 0
        page.preset("24 GB", "24gb_qlora")
        assert re.search("Fits|Tight|Will not fit", page.panel())
        assert re.search("Fits|Tight|Will not fit", page.command() and page.output())
        page.press("Start", until="demo")
        page.tab("Chat")
        assert page.chat("Hello")
        assert [error for error in page.console_errors if error not in plain_errors] == []
        assert "Traceback" not in (tmp_path / "webui.log").read_text()
        page.page.close()


OVERLAPS = """() => {
  const ours = '.preflight, .preflight-remedies button';
  const boxes = [...document.querySelectorAll(`${ours}, input, button.sm, .tabitem button`)]
    .filter(item => item.checkVisibility() && item.getBoundingClientRect().width > 2)
    .map(item => [item, item.getBoundingClientRect()]);
  const wide = document.documentElement.scrollWidth > window.innerWidth + 1 ? ['the page scrolls sideways'] : [];
  const outside = boxes.filter(([item, box]) => box.right > window.innerWidth + 1
    || item.matches('.preflight, button.sm') && item.scrollWidth > item.clientWidth + 1);
  const cut = outside.map(([item]) => item.outerHTML.slice(0, 90));
  const crossed = [];
  for (const [one, a] of boxes)
    for (const [other, b] of boxes)
      if (one !== other && !one.contains(other) && !other.contains(one) && a.left < b.right - 1 && b.left < a.right - 1
          && a.top < b.bottom - 1 && b.top < a.bottom - 1) crossed.push(other.outerHTML.slice(0, 90));
  return [...wide, ...cut, ...crossed];
}"""


def test_nothing_overlaps_or_is_cut_off(page: board.BoardPage) -> None:
    found = {}

    def look(state: str) -> None:
        for width in (400, 1280):
            page.page.set_viewport_size({"width": width, "height": 900})
            page.page.wait_for_timeout(500)
            screenshot(page, f"{state}_{width}")
            found[state, width] = page.page.evaluate(OVERLAPS)

    page.preset("24 GB", "24gb_lora")
    look("width")
    page.choose("Language", "ru")
    page.choose("Класс видеопамяти", "CPU / any")
    page.choose("Аппаратный пресет", "cpu_smoke:")
    page.press("Показать пример")
    page.page.locator(".preflight pre mark").first.wait_for(timeout=120_000)
    look("sample_ru")
    assert {state: items for state, items in found.items() if items} == {}
