"""`python -m llamafactory_preflight check A.yaml`: the subcommands without LLaMA-Factory's command line."""

from __future__ import annotations

import sys

from llamafactory_preflight.cli import main


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
