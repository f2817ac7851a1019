"""Which versions are installed, read from package metadata: nothing is imported to find out."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from importlib import metadata


DISTRIBUTIONS = {
    "liger_kernel": "liger-kernel",
    "flash_attn": "flash-attn",
    "llamafactory_preflight": "llamafactory-preflight",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Software:
    """Installed versions as their metadata says them, or None where a package is absent."""

    llamafactory_preflight: str | None = None
    llamafactory: str | None = None
    torch: str | None = None
    transformers: str | None = None
    peft: str | None = None
    accelerate: str | None = None
    trl: str | None = None
    datasets: str | None = None
    deepspeed: str | None = None
    bitsandbytes: str | None = None
    flash_attn: str | None = None
    liger_kernel: str | None = None

    @classmethod
    def installed(cls) -> Software:
        """Reads the metadata of the running environment."""
        return cls(**{field.name: _version(DISTRIBUTIONS.get(field.name, field.name)) for field in fields(cls)})

    def at_least(self, name: str, *release: int) -> bool:
        """Whether `name` is installed in this release or a later one; `at_least("torch", 2, 8)`."""
        version = getattr(self, name)
        return version is not None and release_of(version) >= release

    def as_dict(self) -> dict[str, str | None]:
        """Every version by name, for the JSON report."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def release_of(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: `2.9.1+cu128` is (2, 9, 1), `0.9.6.dev0` is (0, 9, 6)."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
