"""``mini-vllm serve MODEL_DIR``."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from pathlib import Path
from types import FrameType

from ._version import __version__
from .model import Model, ModelError
from .server import Server


def _end(_number: int, _frame: FrameType | None) -> None:
    raise SystemExit(0)


def main() -> int:
    """Serve until SIGTERM or Ctrl-C comes."""
    top = argparse.ArgumentParser(prog="mini-vllm")
    top.add_argument("--version", action="version", version=__version__)
    serve = top.add_subparsers(dest="verb", required=True).add_parser("serve", help="answer completions over HTTP")
    serve.add_argument("model", type=Path, metavar="MODEL_DIR")
    serve.add_argument("--host", default="127.0.0.1")
    serve.add_argument("--port", type=int, default=8000, help="0 takes a free one, which is printed")
    serve.add_argument("--served-model-name", default="", metavar="NAME")
    given = top.parse_args()
    signal.signal(signal.SIGTERM, _end)
    try:
        model = Model(given.model)
    except (ModelError, OSError) as error:
        sys.stderr.write(f"mini-vllm: {error}\n")
        return 1
    with Server((given.host, given.port), model, given.served_model_name or given.model.resolve().name) as server:
        sys.stdout.write(f"mini-vllm {__version__} serves {server.name} on http://{given.host}:{server.server_address[1]}\n")
        sys.stdout.flush()
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main())
