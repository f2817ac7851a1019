"""Time of preprocessing with the template fixer against LLaMA-Factory's own, per token that comes out.

    python scripts/bench_template.py [--samples 10000] [--turns 1 3 8] [--pairs 5] [--streaming]

Runs LLaMA-Factory's own tokenization step on made-up conversations with the real Qwen3 tokenizer, on one core. The
two are run in pairs, in turns which first, and timed in CPU time, so that other work on the machine does not count;
what is printed of each is its median, and of the ratio the median of the pairs and their range. What `datasets` does
around the step (hashing, writing files) is the same for both and left out. Streamed data goes through all of
LLaMA-Factory's step, as the fixer looks at the first samples twice there.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from statistics import median
from types import SimpleNamespace
from typing import Any

import command_line
from build_tiny_model import build


BATCH = 1000
LIMIT = 1.3
WORDS = "the model answers a question about memory templates tokens 模板 训练 数据 and code like x = f(y)".split()


def conversations(num: int, turns: int) -> list[list[dict[str, str]]]:
    """Made-up talks; every third answer has reasoning."""
    chance = random.Random(0)

    def text(low: int, high: int) -> str:
        return " ".join(chance.choices(WORDS, k=chance.randint(low, high)))

    talks = []
    for _ in range(num):
        talk = []
        for _ in range(turns):
            thought = f"<think>\n{text(40, 120)}\n</think>\n\n" if chance.random() < 1 / 3 else ""
            talk += [
                {"role": "user", "content": text(20, 80)},
                {"role": "assistant", "content": thought + text(60, 200)},
            ]
        talks.append(talk)
    return talks


def batches(talks: list[list[dict[str, str]]]) -> list[dict[str, list[Any]]]:
    """In LLaMA-Factory's standard format."""
    parts = [talks[start : start + BATCH] for start in range(0, len(talks), BATCH)]
    empty = {name: [None] * BATCH for name in ("_images", "_videos", "_audios")}
    return [
        {
            "_prompt": [talk[:-1] for talk in part],
            "_response": [talk[-1:] for talk in part],
            "_system": [""] * len(part),
            "_tools": [""] * len(part),
            **{name: values[: len(part)] for name, values in empty.items()},
        }
        for part in parts
    ]


def run(switch: str, data: list[dict[str, list[Any]]], tokenizer: Any, *, streaming: bool) -> tuple[float, int]:
    """Seconds and tokens of one pass."""
    from llamafactory.data import get_template_and_fix_tokenizer, loader
    from llamafactory.hparams import DataArguments

    from llamafactory_preflight.fixer import choose, prepare

    os.environ["LLAMAFACTORY_TEMPLATE"] = switch
    options = {"cutoff_len": 100_000, "preprocessing_batch_size": BATCH}
    arguments = DataArguments(template="qwen3", streaming=streaming, **options)
    template = get_template_and_fix_tokenizer(tokenizer, arguments)
    if streaming:
        return streamed(data, arguments, template, tokenizer)
    processor = loader._get_dataset_processor(arguments, "sft", template, tokenizer, None)
    mapper = None
    if switch == "fix":
        staged = choose.for_stage(template, "sft", do_generate=False, cutoff_len=arguments.cutoff_len)
        mapper = prepare.Preparation(template=staged, splits=True)
    tokens = 0
    start = time.process_time()
    for number, batch in enumerate(data):
        first = number * BATCH
        prepared = mapper(batch, list(range(first, first + len(batch["_prompt"])))) if mapper else batch
        tokens += sum(map(len, processor.preprocess_dataset(prepared)["input_ids"]))
    return time.process_time() - start, tokens


def streamed(data: list[dict[str, list[Any]]], arguments: Any, template: Any, tokenizer: Any) -> tuple[float, int]:
    """Seconds and tokens of one pass over streamed data, from LLaMA-Factory's own step to the last row."""
    import datasets
    from llamafactory.data import loader

    joined = {name: [value for batch in data for value in batch[name]] for name in data[0]}
    dataset = datasets.Dataset.from_dict(joined).to_iterable_dataset()
    training = SimpleNamespace(local_process_index=0, should_log=False, predict_with_generate=False)
    start = time.process_time()
    rows = loader._get_preprocessed_dataset(dataset, arguments, training, "sft", template, tokenizer, None)
    tokens = sum(len(row["input_ids"]) for row in rows)
    return time.process_time() - start, tokens


def compare(
    data: list[dict[str, list[Any]]], tokenizer: Any, *, pairs: int, streaming: bool
) -> tuple[dict[str, float], list[float]]:
    """Microseconds per token of each, as medians, and the ratio of every pair."""
    costs: dict[str, list[float]] = {"off": [], "fix": []}
    for number in range(pairs):
        for switch in ("off", "fix") if number % 2 else ("fix", "off"):
            seconds, tokens = run(switch, data, tokenizer, streaming=streaming)
            costs[switch].append(seconds / tokens * 1e6)
    ratios = [fix / off for off, fix in zip(costs["off"], costs["fix"], strict=True)]
    return {switch: median(values) for switch, values in costs.items()}, ratios


def main() -> int:
    """Prints one line for each number of turns."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=command_line.count, default=10_000)
    parser.add_argument("--turns", type=command_line.count, nargs="+", default=[1, 3, 8])
    parser.add_argument("--pairs", type=command_line.count, default=5)
    parser.add_argument("--streaming", action="store_true")
    options = parser.parse_args()
    from transformers import AutoTokenizer

    try:
        folder = build()
    except (RuntimeError, OSError) as error:
        command_line.fail(str(error))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    kind = "streamed" if options.streaming else "not streamed"
    worst = 0.0
    for turns in options.turns:
        data = batches(conversations(options.samples, turns))
        for switch in ("off", "fix"):
            run(switch, data[:1], tokenizer, streaming=options.streaming)  # what is made once
        cost, ratios = compare(data, tokenizer, pairs=options.pairs, streaming=options.streaming)
        worst = max(worst, median(ratios))
        print(
            f"{options.samples} conversations of {turns}, {kind}: LLaMA-Factory {cost['off']:.2f} us a token, "
            f"fixer {cost['fix']:.2f}: {median(ratios):.2f} times ({min(ratios):.2f} to {max(ratios):.2f})"
        )
    return 0 if worst <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
