"""A real training on a CPU, its export, and plain transformers, which knows nothing of the plugin."""

from __future__ import annotations

import base64
import json
import shutil
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest


QUESTION = [{"role": "user", "content": "hi"}]
PLAIN = [{"instruction": f"q{n}", "input": "", "output": f"a{n}"} for n in range(8)]
REASONED = [row | {"output": f"<think>r</think>{row['output']}"} for row in PLAIN]


class Commands:
    """LLaMA-Factory's own commands in one folder, with one data set of eight rows."""

    def __init__(self, folder: Path, run: Callable[..., Any], model: Path) -> None:
        self.folder = folder
        self.run = run
        self.common = {"model_name_or_path": str(model), "template": "qwen3", "trust_remote_code": False}

    def training(self, records: list[dict[str, str]]) -> dict[str, Any]:
        """Arguments of two steps of LoRA with checkpoints, into `adapter`."""
        data = self.folder / "data"
        data.mkdir(exist_ok=True)
        (data / "some.json").write_text(json.dumps(records))
        (data / "dataset_info.json").write_text(json.dumps({"some": {"file_name": "some.json"}}))
        return {
            **self.common,
            "stage": "sft",
            "do_train": True,
            "finetuning_type": "lora",
            "lora_rank": 4,
            "dataset": "some",
            "dataset_dir": str(data),
            "cutoff_len": 64,
            "output_dir": str(self.folder / "adapter"),
            "overwrite_output_dir": True,
            "max_steps": 2,
            "save_steps": 1,
            "per_device_train_batch_size": 2,
            "report_to": "none",
            "dataloader_pin_memory": False,
        }

    def train(self, records: list[dict[str, str]], *, switches: dict[str, str] | None = None, **arguments: Any) -> str:
        """Trains on records; what was said on standard output and error."""
        return self.call("train", self.training(records) | arguments, switches)

    def export(self, *, switches: dict[str, str] | None = None, **arguments: Any) -> str:
        """The adapter in the model, into `merged`."""
        folders = {"adapter_name_or_path": str(self.folder / "adapter"), "export_dir": str(self.folder / "merged")}
        return self.call("export", self.common | folders | arguments, switches)

    def call(self, verb: str, given: dict[str, Any], switches: dict[str, str] | None) -> str:
        file = self.folder / f"{verb}.yaml"
        file.write_text(json.dumps(given))
        environment = {"CUDA_VISIBLE_DEVICES": "", **(switches or {})}
        done = self.run(["llamafactory-cli", verb, file], cwd=self.folder, env=environment, timeout=600)
        assert done.returncode == 0, done.stderr[-3000:]
        said: str = done.stdout + done.stderr
        return said


SIDE_FILE = "llamafactory_preflight_template.json"


@pytest.fixture
def commands(tmp_path: Path, tiny_model: Path, run: Callable[..., Any]) -> Commands:
    return Commands(tmp_path, run, tiny_model)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, module_run: Callable[..., Any]) -> Commands:
    """A training on data without reasoning, and its export. Several tests look at it."""
    made = Commands(tmp_path_factory.mktemp("plain"), module_run, tiny_model)
    said = made.train(PLAIN)
    assert said.count("repaired for Qwen3") == 2  # in the log and, as the streams are two here, on standard error
    made.export()
    return made


@pytest.fixture(scope="module")
def reasoned(plain: Commands, tmp_path_factory: pytest.TempPathFactory, module_run: Callable[..., Any]) -> Commands:
    """A second stage on the export of the first, with reasoning this time."""
    made = Commands(tmp_path_factory.mktemp("reasoned"), module_run, plain.folder / "merged")
    made.train(REASONED)
    return made


def prompt(folder: Path, **options: Any) -> str:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    text: str = tokenizer.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True, **options)
    return text


THINK = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
NO_THINK = THINK + "<think>\n\n</think>\n\n"


OLDER = (
    ("transformers==4.57.6", "4c9e9de11333ddfe5114bc872c9f370509198acf0b87a832a0ab9458e2bd0550"),
    ("huggingface-hub==0.36.2", "48f0c8eac16145dfce371e9d2d7772854a4f591bcb56c9cf548accf531d54270"),
)
# What a server does with a folder: prompts in each mode, their ids, and where generation stops.
SERVE = """
import json, sys
import transformers
from transformers import AutoTokenizer, GenerationConfig
seen = []
for folder in sys.argv[1:]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for options in ({}, {"enable_thinking": True}, {"enable_thinking": False}):
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True, **options
        )
        seen.append([text, tokenizer.encode(text), tokenizer.eos_token_id, tokenizer.pad_token_id])
print(json.dumps([transformers.__version__, type(tokenizer).__name__, seen]))
"""


@pytest.fixture(scope="module")
def older_transformers(
    wheel: Callable[[str, str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Any]:
    """Runs `SERVE` with the last transformers 4, on top of this environment: `older_transformers(run, folders)`."""
    packages = tmp_path_factory.mktemp("older")
    for pin in OLDER:
        with zipfile.ZipFile(wheel(*pin)) as archive:
            archive.extractall(packages)

    def served(run: Callable[..., Any], folders: list[Path]) -> list[Any]:
        results = []
        for path in (str(packages), ""):
            environment = {"PYTHONPATH": path, "USE_TORCH": "0", "TRANSFORMERS_VERBOSITY": "error"}
            done = run([sys.executable, "-c", SERVE, *folders], env=environment)
            assert done.returncode == 0, done.stderr[-3000:]
            results.append(json.loads(done.stdout.splitlines()[-1]))
        return results

    return served


def test_what_is_saved_answers_as_it_was_trained(
    plain: Commands,
    reasoned: Commands,
    tiny_model: Path,
    run: Callable[..., Any],
    older_transformers: Callable[..., Any],
) -> None:
    wanted = {
        made.folder / name: (mode, text)
        for made, mode, text, names in (
            (plain, "no_think", NO_THINK, ("adapter", "adapter/checkpoint-1", "adapter/checkpoint-2", "merged")),
            (reasoned, "think", THINK, ("adapter", "adapter/checkpoint-1", "adapter/checkpoint-2")),
        )
        for name in names
    }
    for folder, (mode, _) in wanted.items():
        record = json.loads((folder / SIDE_FILE).read_text())
        assert (record["mode"], record["num_think"] + record["num_no_think"]) == (mode, 8), folder
        _same_files(tiny_model, folder)
    (version, kind, older), (_, _, now) = older_transformers(run, list(wanted))
    assert version.startswith("4.57.") and kind == "Qwen2TokenizerFast"
    assert older == now
    assert [seen[0] for seen in older] == [text for _, own in wanted.values() for text in (own, THINK, NO_THINK)]


def test_plain_transformers_chat_with_what_is_saved(plain: Commands) -> None:
    """An adapter's folder and an export: the default prompt is the one that was trained, and an answer can end."""
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    for name, loader in (("adapter", AutoPeftModelForCausalLM), ("merged", AutoModelForCausalLM)):
        tokenizer = AutoTokenizer.from_pretrained(plain.folder / name)
        model = loader.from_pretrained(plain.folder / name)
        given = tokenizer.apply_chat_template(
            QUESTION, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        ids = model.generate(**given, max_new_tokens=3)[0]
        assert tokenizer.decode(ids).startswith(NO_THINK) and len(ids) > given["input_ids"].shape[1]
    assert model.generation_config.eos_token_id == [151645, 151643]
    modelfile = (plain.folder / "merged" / "Modelfile").read_text(encoding="utf-8")
    assert ".Thinking" in modelfile and ".Tools" in modelfile


def test_a_second_stage_on_an_adapter_knows_how_it_was_trained(plain: Commands, commands: Commands) -> None:
    """Half of the data has reasoning: what the adapter was trained for decides."""
    said = commands.train(
        PLAIN[:4] + REASONED[4:],
        adapter_name_or_path=str(plain.folder / "adapter"),
        max_steps=1,
        save_strategy="no",
    )
    assert "4 answers are trained with thinking and 4 without. The saved chat template answers without" in said
    record = json.loads((commands.folder / "adapter" / SIDE_FILE).read_text())
    assert (record["mode"], record["num_think"], record["num_no_think"]) == ("no_think", 4, 4)
    assert prompt(commands.folder / "adapter") == NO_THINK


def _same_files(original: Path, saved: Path) -> None:
    """The tokenizer's files are those of the original, and so are their keys; only the chat template may differ."""
    names = {"tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "chat_template.jinja"}
    names |= {"special_tokens_map.json", "added_tokens.json"}
    assert {name for name in names if (saved / name).exists()} == {
        name for name in names if (original / name).exists()
    }
    assert (saved / "tokenizer.json").read_bytes() == (original / "tokenizer.json").read_bytes()
    before, after = (json.loads((folder / "tokenizer_config.json").read_text()) for folder in (original, saved))
    assert before.keys() == after.keys()
    assert {key for key in before if before[key] != after[key]} <= {"chat_template"}


class Hub(BaseHTTPRequestHandler):
    """As much of the hub's API as an upload needs; what was committed ends up in `files`."""

    files: dict[str, bytes]

    def do_GET(self) -> None:
        self._answer(404, {})

    do_HEAD = do_GET

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        address = f"http://{self.headers['Host']}/someone/merged"
        if self.path.endswith("/preupload/main"):
            names = [file["path"] for file in json.loads(body)["files"]]
            return self._answer(
                200,
                {
                    "files": [
                        {"path": name, "uploadMode": "regular", "shouldIgnore": False, "oid": None} for name in names
                    ]
                },
            )
        if "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            return self._answer(200, {"commitUrl": f"{address}/commit/1", "commitOid": "1"})
        return self._answer(200, {"url": address, "name": "someone/merged", "id": "1"})

    def _answer(self, status: int, content: dict[str, Any]) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[tuple[str, dict[str, bytes]]]:
    """A hub on this machine: its address and the files that were uploaded."""
    files: dict[str, bytes] = {}
    handler = type("OneHub", (Hub,), {"files": files})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", files
        server.shutdown()
        thread.join()


def test_a_base_model_resumes_stops_and_is_pushed_repaired(
    tmp_path: Path, tiny_model: Path, plain: Commands, run: Callable[..., Any], hub: tuple[str, dict[str, bytes]]
) -> None:
    """The same weights as those of a base model, trained on from the other run's first checkpoint."""
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    base = shutil.copytree(tiny_model, tmp_path / "base")
    for name, key, value in (
        ("config.json", "eos_token_id", 151643),
        ("tokenizer_config.json", "eos_token", "<|endoftext|>"),
    ):
        changed = json.loads((base / name).read_text()) | {key: value}
        (base / name).write_text(json.dumps(changed))
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": 151643, "max_new_tokens": 20}))
    made = Commands(tmp_path, run, base)
    shutil.copytree(plain.folder / "adapter" / "checkpoint-1", tmp_path / "adapter" / "checkpoint-1")
    said = made.train(PLAIN, overwrite_output_dir=False)
    assert "was never trained" in said
    assert json.loads((tmp_path / "adapter" / "trainer_state.json").read_text())["global_step"] == 2
    assert f"Resuming training from {tmp_path / 'adapter' / 'checkpoint-1'}" in said
    for folder in (tmp_path / "adapter", tmp_path / "adapter" / "checkpoint-2"):
        assert json.loads((folder / SIDE_FILE).read_text())["num_no_think"] == 8
        assert prompt(folder) == NO_THINK
    address, pushed = hub
    online = {"HF_ENDPOINT": address, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    said = made.export(export_hub_model_id="someone/merged", hf_hub_token="none", switches=online)
    assert "config.json: eos_token_id 151643 becomes 151645" in said
    merged = tmp_path / "merged"
    assert AutoTokenizer.from_pretrained(merged).eos_token == "<|im_end|>"
    assert AutoConfig.from_pretrained(merged).eos_token_id == 151645
    generation = GenerationConfig.from_pretrained(merged)
    assert (generation.eos_token_id, generation.pad_token_id) == ([151645, 151643], 151643)
    assert generation.max_new_tokens == 20
    assert {"model.safetensors", "config.json", "generation_config.json", "tokenizer.json"} <= pushed.keys()
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", SIDE_FILE):
        assert pushed[name] == (merged / name).read_bytes(), name
    assert "chat_template.jinja" not in pushed


def test_off_leaves_no_trace(commands: Commands) -> None:
    assert "repaired" not in commands.train(PLAIN, max_steps=1, switches={"LLAMAFACTORY_TEMPLATE": "off"})
    assert not (commands.folder / "adapter" / SIDE_FILE).exists()
    assert prompt(commands.folder / "adapter") == THINK


CACHED = """
import json, os, sys
from pathlib import Path
from llamafactory.data import get_dataset, get_template_and_fix_tokenizer
from llamafactory.hparams import get_train_args
from llamafactory.model import load_tokenizer
given, *runs = json.loads(sys.argv[1])
seen = []
for switches in runs:
    os.environ.update({"LLAMAFACTORY_TEMPLATE": "fix", "LLAMAFACTORY_TEMPLATE_EMPTY_THINK": "mask", **switches})
    model_args, data_args, training_args, *_ = get_train_args(given)
    loaded = load_tokenizer(model_args)
    template = get_template_and_fix_tokenizer(loaded["tokenizer"], data_args)
    rows = get_dataset(template, model_args, data_args, training_args, stage="sft", **loaded)["train_dataset"]
    trained = loaded["tokenizer"].decode([label for label in rows[0]["labels"] if label >= 0])
    seen.append([trained, len(list(Path(os.environ["HF_DATASETS_CACHE"]).rglob("cache-*.arrow")))])
print("SEEN", json.dumps(seen))
"""


def test_a_cache_of_other_rules_is_not_used(tmp_path: Path, tiny_model: Path, run: Callable[..., Any]) -> None:
    """One dataset cache: first without the fixer, then with it, then with another switch, and then both again."""
    given = Commands(tmp_path, run, tiny_model).training(PLAIN)
    off = {"LLAMAFACTORY_TEMPLATE": "off"}
    runs = [off, {}, {"LLAMAFACTORY_TEMPLATE_EMPTY_THINK": "train"}, off, {}]
    environment = {"CUDA_VISIBLE_DEVICES": "", "HF_DATASETS_CACHE": str(tmp_path / "cache")}
    done = run([sys.executable, "-c", CACHED, json.dumps([given, *runs])], cwd=tmp_path, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("SEEN "))
    texts, files = zip(*json.loads(line.removeprefix("SEEN ")), strict=True)
    block, answered = "<think>\n\n</think>\n\n", "a0<|im_end|>"
    assert texts == (f"{block}{answered}\n", answered, block + answered, f"{block}{answered}\n", answered)
    assert files[0] < files[1] < files[2] == files[3] == files[4]  # what fits is used again


def test_a_tokenized_dataset_keeps_its_record(commands: Commands) -> None:
    """The first run tokenizes and saves; what the second one trains is known. Without a record nothing is repaired."""
    tokenized = commands.folder / "tokenized"
    options = {"tokenized_path": str(tokenized), "max_steps": 1, "save_strategy": "no"}
    side_files = [folder / SIDE_FILE for folder in (tokenized, commands.folder / "adapter")]
    commands.train(PLAIN, **options)
    first = [file.read_text() for file in side_files]
    shutil.rmtree(commands.folder / "adapter")
    said = commands.train(REASONED, **options)
    assert "repaired for Qwen3" in said and "is used as it is" not in said
    assert [file.read_text() for file in side_files] == first
    assert prompt(commands.folder / "adapter") == NO_THINK
    for file in side_files:
        file.unlink()
    said = commands.train(REASONED, **options)
    assert said.count("tokenized_path is used as it is") == 2 and "repaired for" not in said  # on both streams
    assert not any(file.exists() for file in side_files)


def test_chat_and_a_second_stage_read_the_side_file(
    plain: Commands, run: Callable[..., Any], tiny_model: Path
) -> None:
    code = """
import json, sys
from llamafactory.data import get_template_and_fix_tokenizer
from llamafactory.hparams import get_infer_args
from llamafactory.model import load_tokenizer
for given in json.loads(sys.argv[1]):
    model_args, data_args, *_ = get_infer_args(given)
    tokenizer = load_tokenizer(model_args)["tokenizer"]
    template = get_template_and_fix_tokenizer(tokenizer, data_args)
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": ""}]
    print("PROMPT", json.dumps(tokenizer.decode(template.encode_oneturn(tokenizer, messages)[0])))
"""
    model = {"model_name_or_path": str(tiny_model), "template": "qwen3"}
    adapter = model | {"adapter_name_or_path": str(plain.folder / "adapter")}
    merged = {"model_name_or_path": str(plain.folder / "merged"), "template": "qwen3"}
    runs = [model, adapter, merged, adapter | {"enable_thinking": True}, merged | {"enable_thinking": True}]
    done = run([sys.executable, "-c", code, json.dumps(runs)], cwd=plain.folder, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    prompts = [
        json.loads(line.removeprefix("PROMPT ")) for line in done.stdout.splitlines() if line.startswith("PROMPT")
    ]
    assert prompts == [THINK, NO_THINK, NO_THINK, THINK, THINK]


def test_samples_are_shown(tmp_path: Path, tiny_model: Path, run: Callable[..., Any], root: Path) -> None:
    model = shutil.copytree(tiny_model, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    command = ["llamafactory-cli", "template", root / "presets/cpu_smoke.yaml", f"model_name_or_path={model}"]
    command += ["neat_packing=true", "bf16=true", "deepspeed=of_another_machine.json"]
    command += ["--sample", "2", "--html", tmp_path / "page.html"]
    done = run(command, cwd=tmp_path, env={"CUDA_VISIBLE_DEVICES": ""}, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.startswith("--- sample ") and done.stdout.count("--- sample ") == 2
    assert "<|im_start|>assistant\n<think>\n\n</think>\n\n[[" in done.stdout
    assert done.stdout.count("<|im_end|>]]") == 2
    assert "100 samples of" in done.stdout and "% of the tokens are trained" in done.stdout
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert page.count('<span class="loss special">&lt;|im_end|&gt;</span>') == 2
    assert "http" not in page and "<script" not in page
    assert not (tmp_path / "saves").exists()


def test_a_mistake_in_what_is_to_be_shown_is_one_sentence(
    tmp_path: Path, tiny_model: Path, run: Callable[..., Any], root: Path
) -> None:
    command = ["llamafactory-cli", "template", root / "presets/cpu_smoke.yaml", f"model_name_or_path={tiny_model}"]
    for mistake, said in (
        ("--html=no/page.html", "The folder of no/page.html does not exist"),
        ("template=nothing", "LLaMA-Factory has no `template: nothing`. The nearest are"),
    ):
        done = run([*command, mistake], cwd=tmp_path, timeout=600)
        assert done.returncode == 2
        assert done.stderr.splitlines()[-1].startswith(said)
