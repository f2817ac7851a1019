"""Finds a model's config.json: a local folder, the cache of Hugging Face or ModelScope, or the hub; never weights."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from llamafactory_preflight.errors import Refused, Unmodelled, UserError, words
from llamafactory_preflight.model import known_models
from llamafactory_preflight.model.hub_request import get_json
from llamafactory_preflight.phrases import phrase


LONGEST_NAME = 200  # the hub allows 96 characters for each of its two parts
WEIGHT_SUFFIXES = (".safetensors", ".bin")
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSource:
    """A model's configuration and where it came from.

    Attributes:
        config: The parsed config.json.
        place: Where it was read, in words.
        download_bytes: Size of the weights that are not on this machine yet; 0 if they are; None where not known.
        cache_dir: The folder that a download would fill.
        note: What to tell of it, or an empty text.
    """

    config: dict[str, Any]
    place: str
    download_bytes: int | None
    cache_dir: Path
    note: str = ""


def find(
    name: str,
    *,
    revision: str = "main",
    cache_dir: str | None = None,
    environ: Mapping[str, str] | None = None,
    asks: bool = True,
) -> ModelSource:
    """Reads the config.json of a model as LLaMA-Factory would locate it; without `asks` only on this machine.

    Raises:
        UserError: The folder has no readable config.json, or the hub does not have the model.
        Unmodelled: The hub cannot be reached, or may not be asked, and the model is none that this version knows.
    """
    env = os.environ if environ is None else environ
    folder = Path(name)
    if os.path.isdir(folder):  # unlike Path's own, it takes a name of any length
        return ModelSource(config=_local(folder), place=str(folder), download_bytes=0, cache_dir=folder)
    if os.path.exists(folder):
        raise UserError(
            phrase("{name} is a file", name=name),
            where="`model_name_or_path`",
            next_step="Name the folder, or a model of the hub",
        )
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or len(name) > LONGEST_NAME:
        kind = UserError if _enabled(env, "USE_RAY") else Refused  # a worker may be another machine
        raise kind(
            phrase("The model folder {name} does not exist", name=name),
            where="`model_name_or_path`",
            next_step="Write it from the root on, as ~ is not expanded" if name.startswith("~") else "Check the path",
        )
    if _enabled(env, "USE_OPENMIND_HUB"):
        raise Unmodelled("Models of the Openmind hub are not looked up; give a local folder")
    modelscope = _enabled(env, "USE_MODELSCOPE_HUB")
    cache = _modelscope_cache(cache_dir, env) if modelscope else huggingface_cache(cache_dir, env)
    snapshot = _modelscope_snapshot(cache, name) if modelscope else _huggingface_snapshot(cache, name, revision)
    if snapshot is not None and (snapshot / "config.json").is_file():
        has_weights = any(file.suffix in WEIGHT_SUFFIXES for file in snapshot.iterdir())
        return ModelSource(
            config=_local(snapshot),
            place="the local cache",
            download_bytes=0 if has_weights else None,
            cache_dir=cache,
        )
    if name == known_models.MADE_HERE:
        raise Refused(
            phrase("The tiny model {name} is not made yet", name=name),
            where="`model_name_or_path`",
            next_step=phrase(
                "Make it with `python scripts/build_tiny_model.py --link {name}`; scripts/quickstart.sh does that too",
                name=name,
            ),
        )
    if not asks:
        raise Unmodelled(phrase("{name} is not in the local cache", name=name))
    try:
        return _ask(name, revision, cache, env, modelscope=modelscope)
    except Unmodelled:
        known = known_models.config(name) if revision == "main" else None
        if known is None:
            raise
        note = phrase(
            "The hub could not be asked about {name}; these are the sizes that this version knows", name=name
        )
        return ModelSource(config=known, place=name, download_bytes=None, cache_dir=cache, note=note)


def _ask(name: str, revision: str, cache: Path, env: Mapping[str, str], *, modelscope: bool) -> ModelSource:
    if modelscope:
        return _from_modelscope(name, revision, cache, env)
    offline = next((variable for variable in OFFLINE if _enabled(env, variable)), None)
    if offline:
        raise Unmodelled(
            phrase(
                "{name} is not in the local cache, and {variable} forbids to ask the hub", name=name, variable=offline
            )
        )
    return _from_huggingface(name, revision, cache, env)


def answers(name: str, environ: Mapping[str, str]) -> bool:
    """Whether the hub of the models answers within a short time, also that it does not have this one."""
    if any(_enabled(environ, variable) for variable in OFFLINE):
        return False
    endpoint = _modelscope_endpoint(environ) if _enabled(environ, "USE_MODELSCOPE_HUB") else _endpoint(environ)
    path = "api/v1/models" if _enabled(environ, "USE_MODELSCOPE_HUB") else "api/models"
    try:
        get_json(f"{endpoint}/{path}/{quote(name)}", name=name, token=None)
    except UserError:
        return True
    except Unmodelled:
        return False
    return True


def _local(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    try:
        loaded = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        hint = "It holds an adapter: set `adapter_name_or_path` to it and `model_name_or_path` to its base model"
        is_adapter = (folder / "adapter_config.json").is_file()
        raise UserError(
            phrase("The model folder {folder} has no config.json", folder=folder),
            where="`model_name_or_path`",
            next_step=hint if is_adapter else "Point to the folder that holds config.json and the weights",
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        what = phrase("{file} is not readable JSON: {reason}", file=file, reason=words(error))
        raise UserError(what, where="`model_name_or_path`") from None
    if not isinstance(loaded, dict):
        raise UserError(phrase("{file} holds no JSON object", file=file), where="`model_name_or_path`")
    return loaded


def expanded(path: str) -> Path:
    """The path with `~` written out, unlike with Path's own also for a user without a home."""
    return Path(os.path.expanduser(path))


def huggingface_home(environ: Mapping[str, str]) -> Path:
    """The folder that huggingface_hub keeps everything in."""
    return expanded(environ.get("HF_HOME") or f"{environ.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface")


def huggingface_cache(cache_dir: str | None, environ: Mapping[str, str] | None = None) -> Path:
    """The folder that huggingface_hub downloads into."""
    env = os.environ if environ is None else environ
    return expanded(cache_dir or env.get("HF_HUB_CACHE") or str(huggingface_home(env) / "hub"))


def snapshot(name: str, environ: Mapping[str, str] | None = None) -> Path | None:
    """The folder of a model in the local cache of the hub in use, or None."""
    env = os.environ if environ is None else environ
    if not name or name.startswith((".", "/", "~")) or name.count("/") > 1 or len(name) > LONGEST_NAME:
        return None
    if _enabled(env, "USE_MODELSCOPE_HUB"):
        return _modelscope_snapshot(_modelscope_cache(None, env), name)
    return _huggingface_snapshot(huggingface_cache(None, env), name, "main")


def _huggingface_snapshot(cache: Path, name: str, revision: str) -> Path | None:
    model = cache / f"models--{name.replace('/', '--')}"
    try:
        commit = (model / "refs" / revision).read_text(encoding="utf-8").strip()
    except OSError:
        commit = revision
    snapshot = model / "snapshots" / commit
    return snapshot if snapshot.is_dir() else None


def _modelscope_cache(cache_dir: str | None, env: Mapping[str, str]) -> Path:
    return expanded(cache_dir or env.get("MODELSCOPE_CACHE") or "~/.cache/modelscope/hub")


def _modelscope_snapshot(cache: Path, name: str) -> Path | None:
    # ModelScope writes a dot in a model's name as three underscores; older versions have no `models` folder.
    candidates = [
        root / spelled
        for root in (cache / "models", cache / "hub" / "models", cache)
        for spelled in (name.replace(".", "___"), name)
    ]
    return next((folder for folder in candidates if folder.is_dir()), None)


def _from_huggingface(name: str, revision: str, cache: Path, env: Mapping[str, str]) -> ModelSource:
    endpoint = _endpoint(env)
    token = _token(env)
    config = get_json(
        f"{endpoint}/{quote(name)}/resolve/{quote(revision, safe='')}/config.json", name=name, token=token
    )
    if not isinstance(config, dict):
        raise UserError(phrase("config.json of {name} holds no JSON object", name=name), where=endpoint)
    try:
        tree = get_json(f"{endpoint}/api/models/{quote(name)}/tree/{quote(revision, safe='')}", name=name, token=token)
        size = _weights([(str(item["path"]), int(item["size"])) for item in tree])
    except (Unmodelled, UserError, KeyError, TypeError, ValueError):
        size = None
    return ModelSource(config=config, place=endpoint, download_bytes=size, cache_dir=cache)


def _from_modelscope(name: str, revision: str, cache: Path, env: Mapping[str, str]) -> ModelSource:
    endpoint = _modelscope_endpoint(env)
    wanted = quote("master" if revision == "main" else revision, safe="")
    files = f"{endpoint}/api/v1/models/{quote(name)}/repo"
    config = get_json(f"{files}?Revision={wanted}&FilePath=config.json", name=name)
    if not isinstance(config, dict):
        raise UserError(phrase("config.json of {name} holds no JSON object", name=name), where=endpoint)
    try:
        listing = get_json(f"{files}/files?Revision={wanted}", name=name)
        size = _weights([(str(item["Path"]), int(item["Size"])) for item in listing["Data"]["Files"]])
    except (Unmodelled, UserError, KeyError, TypeError, ValueError):
        size = None
    return ModelSource(config=config, place=endpoint, download_bytes=size, cache_dir=cache)


def _endpoint(env: Mapping[str, str]) -> str:
    return (env.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def _modelscope_endpoint(env: Mapping[str, str]) -> str:
    domain = env.get("MODELSCOPE_DOMAIN") or "www.modelscope.cn"
    return domain.rstrip("/") if "://" in domain else f"https://{domain.rstrip('/')}"


def _token(env: Mapping[str, str]) -> str | None:
    """What huggingface_hub would use: the variable, or what `hf auth login` stored."""
    if env.get("HF_TOKEN"):
        return env["HF_TOKEN"].strip()
    file = expanded(env.get("HF_TOKEN_PATH") or str(huggingface_home(env) / "token"))
    try:
        return file.read_text(encoding="utf-8").strip() or None
    except OSError:
        return None


def _weights(files: list[tuple[str, int]]) -> int | None:
    """Size of the weights among files; a model that offers both formats is downloaded as safetensors."""
    for suffix in WEIGHT_SUFFIXES:
        sizes = [size for path, size in files if path.endswith(suffix) and "/" not in path]
        if sizes:
            return sum(sizes)
    return None


def _enabled(env: Mapping[str, str], variable: str) -> bool:
    return env.get(variable, "").lower() in {"1", "true", "y", "yes", "on"}
