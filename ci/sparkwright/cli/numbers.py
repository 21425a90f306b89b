"""Numbers of the command line; what is none is an error of usage."""

from __future__ import annotations

import argparse


def count(text: str) -> int:
    """Return *text* as a number of tokens."""
    if not text.isdigit() or int(text) > 1 << 40:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens")
    return int(text)


def bandwidth(text: str) -> float:
    """Return *text* as GB/s."""
    try:
        value = float(text)
    except ValueError:
        value = 0
    if not 0.1 <= value < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a bandwidth in GB/s")
    return value


def positive(text: str) -> int:
    """Return *text* as a whole number of 1 or more."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 1 or more")
    return int(text)


def gigabytes(text: str) -> int:
    """Return the bytes of *text* gigabytes."""
    try:
        value = float(text)
    except ValueError:
        value = 0
    if not 0.5 <= value < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of gigabytes of 0.5 or more")
    return int(value * 1e9)
