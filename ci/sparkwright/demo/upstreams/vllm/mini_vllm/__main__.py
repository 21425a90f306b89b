"""``mini-vllm MODEL_DIR PROMPT``: the words that a model writes after a prompt."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .model import Model


def main() -> int:
    """Print at most ``--count`` words after the prompt."""
    parser = argparse.ArgumentParser(prog="mini-vllm")
    parser.add_argument("model", type=Path, metavar="MODEL_DIR")
    parser.add_argument("prompt", metavar="PROMPT")
    parser.add_argument("--count", type=int, default=64)
    arguments = parser.parse_args()
    sys.stdout.write(Model(arguments.model).complete(arguments.prompt, arguments.count) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
