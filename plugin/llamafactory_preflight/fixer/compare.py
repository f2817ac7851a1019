"""Renders the probes with LLaMA-Factory's own template and with the official one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llamafactory_preflight.fixer.template import OfficialTemplate
from llamafactory_preflight.templates.audit import Difference, Rendering, differences
from llamafactory_preflight.templates.probe import PROBES, Probe


NUM_CHECKS = len(PROBES) + 1  # and one of the stop tokens


def audit(factory: Any, official: OfficialTemplate, tokenizer: Any) -> list[Difference]:
    """What differs between LLaMA-Factory's template and the model's own; nothing if LLaMA-Factory is right."""
    trained, served = (replace(official, purpose=purpose) for purpose in ("train", "predict"))
    return list(
        differences(
            (
                probe,
                _rendering(factory, tokenizer, probe),
                _rendering(served if probe.is_served else trained, tokenizer, probe),
            )
            for probe in PROBES
        )
    )


def _rendering(template: Any, tokenizer: Any, probe: Probe) -> Rendering:
    messages = [dict(message) for message in probe.messages]
    try:
        if probe.is_served:
            messages[-1] = {"role": "assistant", "content": ""}
            prompt, answer = template.encode_oneturn(tokenizer, messages, probe.system, probe.tools)
        else:
            pairs = template.encode_multiturn(tokenizer, messages, probe.system, probe.tools)
            prompt = [token for source, target in pairs[:-1] for token in (*source, *target)] + pairs[-1][0]
            answer = pairs[-1][1]
    except Exception as error:
        return Rendering(failure=" ".join(str(error).split())[:120] or type(error).__name__)
    line_break = tokenizer.encode("\n", add_special_tokens=False)
    if answer[-1:] == line_break:  # never generated, and harmless
        answer = answer[:-1]
    return Rendering(
        prompt=tuple(prompt),
        answer=tuple(answer),
        text=tokenizer.decode([*prompt, *answer]),
        stops=frozenset(template.get_stop_token_ids(tokenizer)),
    )
