"""What one preflight found out; data only, for `report` to put into words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from llamafactory_preflight.advice.remedies import Remedy
from llamafactory_preflight.data.images import Source
from llamafactory_preflight.device import Device
from llamafactory_preflight.memory import MemoryEstimate
from llamafactory_preflight.model.shape import ModelShape
from llamafactory_preflight.run import RunDescription
from llamafactory_preflight.software import Software
from llamafactory_preflight.verdict import Verdict


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Something about a run that is worth a line.

    Attributes:
        id: A stable name for scripts.
        severity: With `error` the run would not get through, whatever its memory.
        message: One or two sentences; `{name}` stands for one of the amounts.
        amounts: Bytes by name, for the report to put into the message.
        set: Arguments that would settle it, if any.
    """

    id: str
    severity: Literal["info", "warning", "error"]
    message: str
    amounts: Mapping[str, int] = field(default_factory=dict)
    set: Mapping[str, Any] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """One preflight.

    Attributes:
        origin: The file's name, or what stands for it.
        run: The arguments.
        software: Installed versions.
        shape: The model's dimensions, or None where they are not known.
        estimate: The prediction, or None where the run is not modelled.
        device: The GPU that decides, or None for a run on the CPU.
        devices: All GPUs that take part.
        host_budget_bytes: Available main memory, or None where it is not known.
        verdict: Of the GPU; of main memory for a run on the CPU.
        findings: Most severe first.
        remedies: Changes with which the run fits, the least costly first; where it certainly fits, none.
        resolved: One sentence for each path that was found elsewhere than written.
        images: Where the images of its samples come from, or None for text.
        serves: The arguments are those of `chat`, `api` or `export`.
    """

    origin: str
    run: RunDescription
    software: Software
    shape: ModelShape | None
    estimate: MemoryEstimate | None
    device: Device | None
    devices: tuple[Device, ...]
    host_budget_bytes: int | None
    verdict: Verdict
    findings: tuple[Finding, ...]
    resolved: tuple[str, ...]
    remedies: tuple[Remedy, ...] = ()
    images: Source | None = None
    serves: bool = False

    @property
    def lacks_host(self) -> bool:
        """Whether it takes more of main memory than there is."""
        budget = self.host_budget_bytes
        return self.estimate is not None and budget is not None and self.estimate.host_bytes > budget

    @property
    def exit_code(self) -> int:
        """0: fits or tight. 1: will not fit. 2: cannot tell, or the run would fail for another reason."""
        if self.verdict.word == "unknown" or any(finding.severity == "error" for finding in self.findings):
            return 2
        return 1 if self.verdict.word == "will_not_fit" else 0
