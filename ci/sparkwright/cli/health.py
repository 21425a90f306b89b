"""
``sparkwright health``: whether a server answers, works, loads, hangs or is dead; for people, and
for a container's health check.
"""

from __future__ import annotations

import argparse
import os

import msgspec

from sparkwright.core.console import console
from sparkwright.forks.context import StandaloneContext
from sparkwright.operate.errors import ServeError
from sparkwright.operate.serving import health, held


def run(session: StandaloneContext, arguments: argparse.Namespace) -> int:
    """
    Say how the server fares.

    Raises:
        server-dead, server-stuck, node-lost: It does not serve.
    """
    key = os.environ.get("VLLM_API_KEY", "")
    if arguments.server:
        found = health.of_server(arguments.server, arguments.patience, key)
    else:
        found = health.of_machine(held.read(), arguments.patience, key)
    where = f" at {found.url}" if found.url else ""
    console.document({"health": found})
    if failure := health.FAILURES.get(found.state):
        raise ServeError(
            failure,
            f"The server{where} is not well: {found.state}.",
            details=[found.says],
            data=msgspec.to_builtins(found),
        )
    console.result(f"{found.state}: {found.says}{where}")
    return 0
