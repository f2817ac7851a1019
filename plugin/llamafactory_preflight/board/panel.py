"""The memory panel as HTML: a verdict, a stacked bar against what the card has free, and the numbers behind it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from html import escape

from llamafactory_preflight import report, verdict
from llamafactory_preflight.advice.remedies import Remedy
from llamafactory_preflight.board.words import said, say
from llamafactory_preflight.result import Finding, Result


MARKS = {"fits": "✓", "tight": "!", "will_not_fit": "✕", "unknown": "?"}
SMALLEST_SHARE = 0.002  # of the bar; less would be no part that can be seen
Part = tuple[str, int]

STYLE = """<style>
.preflight { font-size: 14px; line-height: 1.5; overflow-wrap: anywhere; }
#preflight-tick, #preflight-told { display: none; }
.preflight p { margin: 0 0 6px; }
.preflight .verdict { border-left: 6px solid var(--tone); padding: 2px 10px; }
.preflight .verdict b { color: var(--tone); }
.preflight .cause { white-space: pre-line; }
.preflight .mark { display: inline-block; width: 1.4em; text-align: center; border-radius: 4px; color: #fff;
  background: var(--tone); font-weight: bold; margin-right: 6px; }
.preflight .fits { --tone: #1a7f37; } .preflight .tight { --tone: #9a6700; }
.preflight .will_not_fit { --tone: #cf222e; } .preflight .unknown { --tone: #57606a; }
.dark .preflight .fits { --tone: #3fb950; } .dark .preflight .tight { --tone: #d29922; }
.dark .preflight .will_not_fit { --tone: #ff7b72; } .dark .preflight .unknown { --tone: #9198a1; }
.dark .preflight .cause { white-space: pre-line; }
.preflight .mark { color: #000; }
.preflight .bar { position: relative; display: flex; height: 26px; margin: 8px 0; border-radius: 4px; overflow: hidden;
  background: repeating-linear-gradient(45deg, transparent 0 5px, rgba(128, 128, 128, .25) 5px 7px);
  outline: 1px solid rgba(128, 128, 128, .5); }
.preflight .bar i { display: block; height: 100%; background: var(--part);
  box-shadow: inset -1px 0 rgba(255, 255, 255, .6); }
.preflight .bar b { position: absolute; top: 0; bottom: 0; width: 0; border-left: 3px dashed var(--body-text-color); }
.preflight ul, .preflight li { list-style: none !important; } .preflight li::marker { content: none; }
.preflight ul { margin: 0 0 6px; padding: 0; display: flex; flex-wrap: wrap; gap: 2px 16px; }
.preflight li { margin: 0; } .preflight li i { display: inline-block; width: 11px; height: 11px; margin-right: 5px;
  border-radius: 2px; background: var(--part); outline: 1px solid rgba(128, 128, 128, .6); }
.preflight .weights { --part: #0b5cad; } .preflight .adapters { --part: #56b4e9; }
.preflight .gradients { --part: #009e73; } .preflight .optimizer { --part: #f0e442; }
.preflight .activations { --part: #e69f00; } .preflight .logits { --part: #d55e00; }
.preflight .buffers { --part: #cc79a7; } .preflight .on_top { --part: #7a5195; }
.preflight .slack { --part: #b0b7bf; }
.preflight .context, .preflight .nccl, .preflight .libraries { --part: #767d86; }
.preflight details { margin: 0 0 6px; } .preflight summary { cursor: pointer; }
.preflight td, .preflight th { padding: 1px 10px 1px 0; text-align: left; vertical-align: top; font-weight: normal; }
.preflight pre { white-space: pre-wrap; max-height: 320px; overflow: auto; padding: 8px; margin: 0 0 6px;
  border: 1px solid rgba(128, 128, 128, .4); }
.preflight mark { background: #b6e3c0; color: #10301a; } .preflight .special { font-weight: bold; }
.preflight .prompt { opacity: .75; }
.preflight-remedies button { white-space: normal; text-align: left; justify-content: start; height: auto; }
</style>"""


def panel(result: Result, lang: str | None, *, proposes: bool) -> str:
    """The panel of a run, in the board's language; with `proposes` remedies were looked for."""
    lines = [_verdict(result, lang)]
    if result.estimate is not None:
        lines += _bar(result, lang)
    if proposes and result.verdict.word == "will_not_fit" and result.device is not None and not result.remedies:
        lines.append(f"<p>{escape(say('no_remedy', lang))}</p>")
    lines += [f"<p>{escape(told(finding, lang))}</p>" for finding in result.findings]
    return page("".join(lines))


def message(key: str, lang: str | None, detail: str = "") -> str:
    """The panel where there is nothing to show but a sentence, and what led to it."""
    cause = f' <span class="cause">{escape(said(detail, lang))}</span>' if detail else ""
    mark = '<span class="mark" aria-hidden="true">?</span>'
    return page(f'<p class="verdict unknown">{mark}{escape(say(key, lang))}{cause}</p>')


def page(content: str) -> str:
    """A piece of HTML in the plugin's own style; it is announced to screen readers when it changes."""
    return f'{STYLE}<div class="preflight" role="status">{content}</div>'


def sentence(result: Result, lang: str | None) -> str:
    """The verdict without its word, in plain text."""
    estimate, device = result.estimate, result.device
    if estimate is None or result.verdict.word == "unknown":
        return _reasons(result, lang)
    if device is None:
        need, free = report.size(estimate.host_bytes), report.size(result.host_budget_bytes)
        return say("needs_host", lang, need=need, free=free)
    context = device.context_bytes
    low, high = verdict.need_bounds(estimate, context_bytes=context)
    figures = say(
        "needs",
        lang,
        need=report.size(verdict.needed_bytes(estimate, context_bytes=context)),
        low=report.size(low),
        high=report.size(high),
        free=report.size(device.free_bytes),
        place=_place(result, lang),
    )
    return f"{figures} {_reasons(result, lang)}" if result.verdict.word == "tight" else figures


def remedy(change: Remedy, lang: str | None) -> str:
    """The text of a button that applies a remedy."""
    size = report.size(max(change.estimate.phases.values()))
    return say("remedy", lang, set=change.line, size=size, costs=said(change.costs, lang))


def told(finding: Finding, lang: str | None) -> str:
    """A finding with its amounts in GiB, and how severe it is."""
    message = report.message(replace(finding, message=said(finding.message, lang)))
    return f"{say(finding.severity, lang)}: {message}"


def parts(result: Result) -> tuple[tuple[Part, ...], int | None]:
    """What takes memory, by the name of its text, and what there is for it; of main memory for a run on the CPU."""
    estimate, device = result.estimate, result.device
    assert estimate is not None
    components = tuple(estimate.components.items())
    peak = estimate.peak_allocated_bytes
    if device is None:
        return (*components, ("libraries", estimate.host_bytes - peak)), result.host_budget_bytes
    on_top = max(estimate.phases.values()) - peak
    beside = {"on_top": on_top, "slack": estimate.slack_bytes, "context": device.context_bytes}
    return (*components, *beside.items(), ("nccl", estimate.nccl_bytes)), device.free_bytes


def _verdict(result: Result, lang: str | None) -> str:
    word = result.verdict.word
    return (
        f'<p class="verdict {word}"><span class="mark" aria-hidden="true">{MARKS[word]}</span>'
        f"<b>{escape(say(word, lang))}</b>: {escape(sentence(result, lang))}</p>"
    )


def _bar(result: Result, lang: str | None) -> Iterator[str]:
    estimate = result.estimate
    assert estimate is not None
    taken, free = parts(result)
    needed = sum(size for _, size in taken)
    whole = max(needed, free or 0) or 1
    shown = [(name, size) for name, size in taken if size >= whole * SMALLEST_SHARE]
    blocks = "".join(
        f'<i class="{name}" style="width:{100 * size / whole:.2f}%" title="{_amount(name, size, lang)}"></i>'
        for name, size in shown
    )
    limit = f'<b style="left:calc({100 * free / whole:.2f}% - 3px)"></b>' if free is not None and free < needed else ""
    label = "; ".join(_amount(name, size, lang) for name, size in shown)
    yield f'<div class="bar" role="img" aria-label="{label}">{blocks}{limit}</div><ul>'
    for name, size in shown:
        yield f'<li><i class="{name}"></i>{_amount(name, size, lang)}</li>'
    yield "</ul><ul>"
    if result.device is not None:
        yield f"<li>{_amount('peak', estimate.peak_allocated_bytes, lang)}</li>"
    yield f"<li><b>{_amount('needed', needed, lang)}</b></li>"
    if free is not None:
        yield f"<li>{_amount('available', free, lang)}</li>"
        if free > needed:
            yield f"<li>{_amount('free', free - needed, lang)}</li>"
    if result.device is not None:
        yield f"<li>{_amount('main_memory', estimate.host_bytes, lang)}</li>"
    yield "</ul>"


def _amount(name: str, size: int, lang: str | None) -> str:
    return escape(f"{say(name, lang)} {report.size(size)}")


def _place(result: Result, lang: str | None) -> str:
    assert result.device is not None
    name = result.device.name
    name = say("planned", lang, name=name) if result.device.planned else name
    return say("each_of", lang, name=name, num=len(result.devices)) if len(result.devices) > 1 else name


def _reasons(result: Result, lang: str | None) -> str:
    return " ".join(said(reason, lang) for reason in result.verdict.reasons)
