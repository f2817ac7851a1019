"""Asks the installed LLaMA-Factory, as the one rank that torchrun would start here, whether it takes arguments.

Reads a JSON list of arguments on standard input, and prints one of answers, `null` or the error, on the last line.
"""

from __future__ import annotations

import json
import sys


def main() -> None:
    """Parses each one."""
    cases = json.load(sys.stdin)
    from llamafactory.hparams import parser

    parser.is_torch_bf16_gpu_available = lambda: True  # the cards that the arguments are for have it
    answers: list[str | None] = []
    for given in cases:
        try:
            parsed = parser.get_train_args(given)  # held, as DeepSpeed's configuration lives as long
        except Exception as error:
            answers.append(f"{type(error).__name__}: {error}")
        else:
            answers.append(None)
            del parsed
    print("\n" + json.dumps(answers))


if __name__ == "__main__":
    main()
