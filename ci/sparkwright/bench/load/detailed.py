"""What ``bench serve --save-detailed`` writes, the Rust program's and the Python program's, as requests."""

from __future__ import annotations

from pathlib import Path

import msgspec

from sparkwright.bench.load.order import LoadInvalid, Order, Request
from sparkwright.core.console import one_line

#: Bytes of such a file beside those of its tokens, and for each token: its time, its text and what an error repeats.
BESIDE, PER_TOKEN = 4 << 20, 200


class _Detailed(msgspec.Struct):
    """The fields that are read; older releases of the Python program write no ``latencies``."""

    input_lens: list[int]
    output_lens: list[int]
    ttfts: list[float]
    itls: list[list[float]]
    errors: list[str]
    start_times: list[float]
    latencies: list[float] | None = None


def read(path: Path, order: Order) -> tuple[Request, ...]:
    """
    Return the requests in the file at *path*, which answers *order*, as they began.

    Raises:
        LoadInvalid: It is missing, too large, or not what was ordered.
    """
    largest = BESIDE + order.requests * (order.answer * PER_TOKEN + 10_000)
    try:
        if (size := path.stat().st_size) > largest:
            raise LoadInvalid("generator-unreadable", f"its result has {size} bytes; {largest} are the most")
        found = msgspec.json.decode(path.read_bytes(), type=_Detailed)
    except (OSError, ValueError, RecursionError) as error:
        raise LoadInvalid("generator-unreadable", f"its result cannot be read: {error!s:.200}") from None
    count = len(found.errors)
    # Without them they are the time to the first token and the gaps.
    latencies = found.latencies or [ttft + sum(gaps) for ttft, gaps in zip(found.ttfts, found.itls, strict=False)]
    columns = (found.input_lens, found.output_lens, found.ttfts, found.itls, found.start_times, latencies)
    if any(len(column) != count for column in columns):
        raise LoadInvalid("generator-unreadable", "its result has columns of different lengths")
    if count != order.requests:
        fit = " with their tokens, fit" if order.prompts == "texts" else " were made"
        raise LoadInvalid("generator-failed", f"{count} of {order.requests} requests{fit}")
    zero = min(found.start_times, default=0.0)
    chunks = (len(gaps) + (ttft > 0) for gaps, ttft in zip(found.itls, found.ttfts, strict=True))
    errors = (one_line(error, 300) for error in found.errors)
    began = (start - zero for start in found.start_times)
    made = map(Request, began, found.ttfts, latencies, found.input_lens, found.output_lens, chunks, errors)
    # The file has them in the order of the prompts, which is not that in which they were sent.
    return tuple(sorted(made, key=lambda one: one.began))
