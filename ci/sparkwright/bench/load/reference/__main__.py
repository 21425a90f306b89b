"""The reference server as a program: ``python -m sparkwright.bench.load.reference --behaviour '{"ttft": 0.2, "tpot": 0.02}'``."""

from __future__ import annotations

import argparse
import gc
import os
import sys

import msgspec

from sparkwright.bench.load.reference.behaviour import Behaviour, Listening
from sparkwright.bench.load.reference.service import Service


def main() -> None:
    """Serve until the process ends; the first line on standard output is a `Listening`."""
    parser = argparse.ArgumentParser(prog="python -m sparkwright.bench.load.reference", description=__doc__)
    parser.add_argument("--behaviour", default="", metavar="JSON", help="a Behaviour; left out, it is read from standard input")
    arguments = parser.parse_args()
    data = arguments.behaviour.encode() if arguments.behaviour else sys.stdin.buffer.read(1 << 20)
    try:
        behaviour = msgspec.json.decode(data or b"{}", type=Behaviour)
    except ValueError as error:
        parser.error(f"this is no behaviour: {error}")
    service = Service(behaviour)
    os.write(1, msgspec.json.encode(Listening(service.url)) + b"\n")
    # What was imported is never garbage; a collection over all of it would make tokens late.
    gc.collect()
    gc.freeze()
    service.loop.run()


if __name__ == "__main__":
    main()
