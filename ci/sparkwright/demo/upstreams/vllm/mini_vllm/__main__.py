"""``mini-vllm serve MODEL_DIR``: an OpenAI-shaped server of completions."""

from __future__ import annotations

import argparse
import http.server
import json
import sys
from pathlib import Path
from typing import Any

from ._version import __version__
from .model import Model


class Server(http.server.ThreadingHTTPServer):
    """A server of *model*; port 0 takes a free one."""

    def __init__(self, port: int, model: Model) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.model = model


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        """Answer ``/health``."""
        self.reply(200 if self.path == "/health" else 404, {})

    def do_POST(self) -> None:
        """Answer ``/v1/completions``."""
        if self.path != "/v1/completions":
            self.reply(404, {})
            return
        question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = self.server.model.complete(question["prompt"], question.get("max_tokens", 16))
        self.reply(200, {"object": "text_completion", "choices": [{"index": 0, "text": text}]})

    def reply(self, status: int, body: dict[str, Any]) -> None:
        """Send *body* as JSON."""
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def main() -> int:
    """Serve until a signal ends the program."""
    top = argparse.ArgumentParser(prog="mini-vllm")
    top.add_argument("--version", action="version", version=__version__)
    serve = top.add_subparsers(dest="verb", required=True).add_parser("serve", help="answer completions over HTTP")
    serve.add_argument("model", type=Path, metavar="MODEL_DIR")
    serve.add_argument("--port", type=int, default=8000, help="0 takes a free one, which is printed")
    arguments = top.parse_args()
    with Server(arguments.port, Model(arguments.model)) as server:
        sys.stdout.write(f"mini-vllm {__version__} serves on http://127.0.0.1:{server.server_port}\n")
        sys.stdout.flush()
        server.serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main())
