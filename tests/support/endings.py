"""
The signals that end a program, as one that a test starts meets them.

A program ignores what its parent ignored, unless it says otherwise; a test run that was started with ``nohup … &`` by a script, by cron or
by many CI systems ignores interruptions and the end of its terminal. What a test sends is then heard only by a program that was started
with this as its ``preexec_fn``.
"""

from __future__ import annotations

import signal


def heard() -> None:
    """Let the program be ended by each, as one that was started at a terminal."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
