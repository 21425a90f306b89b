"""A pack of the real vLLM on the CPU, whose graphs Inductor compiles to C++: a start with it compiles no kernel, and its log is explained."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.packs import KEY
from tests.support.serving import VARIABLES

from sparkwright.bench.server import start_parts, warm_pack
from sparkwright.bench.server.launch import LaunchPlan

pytestmark = [pytest.mark.server, pytest.mark.timeout(1800)]

FLAGS = ("--max-model-len=1024", "--max-num-seqs=16", "--max-num-batched-tokens=2048")


def test_a_pack_of_the_real_server_spares_its_compiler(vllm_python: Path, toy: Path, tmp_path: Path) -> None:
    """vLLM 0.32 on a CPU traces its one graph again and writes it anew; every kernel of the pack is found."""
    variables = {name: value for name, value in VARIABLES.items() if name != "TORCHDYNAMO_DISABLE"}
    plan = LaunchPlan(vllm_python, toy, FLAGS, variables, "toy", timeout=900, kept_free=1000)
    archive = tmp_path / "toy.pack.tar.zst"
    pack = warm_pack.make(plan, KEY, archive, tmp_path / "logs")
    warm_pack.unpack(archive, pack.unpacked, tmp_path / "out")
    kernels = [path for path in (tmp_path / "out").rglob("*") if path.suffix in warm_pack.KERNELS]
    assert len(kernels) > 5
    assert (pack.compiled, pack.tuned) == (1, 0)
    cold, warm = (
        {part.name: part for part in start_parts.read(tmp_path / "logs" / f"{name}.log").parts()} for name in ("cold", "warm")
    )
    seconds = [parts["CPU's warm-up"].seconds or 0.0 for parts in (cold, warm)]
    assert seconds[1] < 0.6 * seconds[0]
    assert warm["torch.compile"].counts["that could not be loaded"] == 1
