"""What vLLM does while it loads is read from its log, however the log comes in pieces, and earlier starts estimate the next one."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from sparkwright.core.store import Store
from sparkwright.serving import loading
from sparkwright.serving.loading import Starts, Watch

#: As the sources of vLLM 0.33.0 print it; colours, progress bars that write over themselves, and a letter of two bytes.
LOG = (
    "\x1b[36m(APIServer pid=1)\x1b[0m INFO 01-01 00:00:00 [api.py:1] vLLM API server version 0.33.0 ▄▄\n"
    "(EngineCore pid=2) INFO 01-01 00:00:01 [core.py:140] Initializing a V1 LLM engine (v0.33.0) with config: model='é'\n"
    "(EngineCore pid=2) INFO 01-01 00:00:02 [gpu_model_runner.py:4979] Starting to load model /models/x...\n"
    "Loading safetensors checkpoint shards:   0% Completed | 0/15 [00:00<?, ?it/s]\n"
    "Loading safetensors checkpoint shards:  20% Completed | 3/15 [00:10<00:40,  3.3s/it]\n"
    "(EngineCore pid=2) INFO 01-01 00:01:00 [backends.py:1188] Dynamo bytecode transform time: 4.20 s\n"
    "(EngineCore pid=2) INFO 01-01 00:01:30 [gpu_worker.py:773] Available KV cache memory: 16.00 GiB\n"
    "(EngineCore pid=2) INFO 01-01 00:01:31 [kv_cache_utils.py:1148] GPU KV cache size: 1,398,101 tokens, 1 GB\n"
    "\rCapturing CUDA graphs (mixed prefill-decode, PIECEWISE):   0%|          | 0/35 [00:00<?, ?it/s]"
    "\rCapturing CUDA graphs (mixed prefill-decode, PIECEWISE):  60%|██████    | 21/35 [00:03<00:02]\n"
    "(EngineCore pid=2) INFO 01-01 00:02:00 [gpu_model_runner.py:6517] Graph capturing finished in 5 secs, took 0.50 GiB\n"
    "(APIServer pid=1) INFO 01-01 00:02:01 [entry.py:139] Starting vLLM server on http://127.0.0.1:8000\n"
).encode()


def watched(pieces: list[bytes]) -> tuple[list[tuple[str, int, int]], Watch, list[str]]:
    """Return what a watch says after each piece of a log, and the lines that it passed on."""
    lines: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        log.touch()
        watch, said = Watch(log, Starts(), lines.append), []
        for piece in pieces:
            with log.open("ab") as sink:
                sink.write(piece)
            watch.look()
            said.append((watch.phase, watch.done, watch.total))
    return said, watch, lines


def test_every_phase_is_told_with_what_it_counts() -> None:
    """In the order in which they come."""
    said, watch, lines = watched(LOG.splitlines(keepends=True))
    assert [one for one, before in zip(said, [None, *said], strict=False) if one != before] == [
        ("start", 0, 0), ("engine", 0, 0), ("weights", 0, 0), ("weights", 0, 15), ("weights", 3, 15), ("compile", 0, 0), ("cache", 0, 0),
        ("graphs", 0, 35), ("graphs", 21, 35), ("warm-up", 0, 0), ("listen", 0, 0),
    ]  # fmt: skip
    assert list(watch.close()) == [name for name, _ in loading.PHASES]
    assert lines[0] == "(APIServer pid=1) INFO 01-01 00:00:00 [api.py:1] vLLM API server version 0.33.0 ▄▄"


@given(st.lists(st.integers(0, len(LOG)), max_size=20))
def test_the_pieces_do_not_matter(cuts: list[int]) -> None:
    """A log that comes in other pieces, letters cut in two included, says the same in the end."""
    places = [0, *sorted(cuts), len(LOG)]
    _, watch, lines = watched([LOG[start:end] for start, end in itertools.pairwise(places)])
    assert (watch.phase, lines) == ("listen", watched([LOG])[2])
    assert list(watch.times) == [name for name, _ in loading.PHASES[:-1]]


@given(st.binary(max_size=2000))
def test_any_bytes_are_a_log(data: bytes) -> None:
    """Nothing in it can end the watch, and what is passed on is printable."""
    _, _, lines = watched([data, b"\n"])
    assert all(line.isprintable() for line in lines)


def test_earlier_starts_estimate_what_is_left(tmp_path: Path) -> None:
    """The median of at most five; nothing is guessed without any."""
    store, log = Store(tmp_path / "store"), tmp_path / "log"
    log.touch()
    address = loading.key("recipe", "model")
    assert Watch(log, loading.recall(store, address)).remaining() is None
    for seconds in (1000.0, 10.0, 20.0, 30.0, 40.0, 50.0):
        loading.keep(store, address, {"start": seconds, "weights": 100.0})
    assert len(loading.recall(store, address).starts) == loading.KEPT
    left = Watch(log, loading.recall(store, address)).remaining()
    assert left is not None
    assert 100 < left <= 130
