"""Slimmer copies in vLLM: the default stack's loaders hold the numbers that were written, and a served copy answers as the model does."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.server.test_night import ROOT, edited_copy
from tests.support import refserved
from tests.unit.test_slim import COMPRESSED, FORMATS, MODELOPT, dequantised, model, tensors

from sparkwright.bench.model.checkpoint import model_digest
from sparkwright.bench.model.slim import Slimming
from sparkwright.gates import distributions
from sparkwright.gates.core import ladder

HERE = Path(__file__).parent
pytestmark = pytest.mark.server
#: Layer of vLLM → its parts in the checkpoint.
PARTS = {
    "model.layers.0.self_attn.qkv_proj": [f"model.layers.0.self_attn.{part}_proj" for part in "qkv"],
    "model.layers.0.self_attn.o_proj": ["model.layers.0.self_attn.o_proj"],
    "model.layers.1.linear_attn.in_proj_qkvz": ["model.layers.1.linear_attn.in_proj_qkvz"],
    "language_model.lm_head": ["lm_head"],
}
PLAIN = {"model.layers.1.linear_attn.in_proj_ba", "model.layers.0.mlp.gate"}
SCHEMES = {
    ("fp8", True): "ModelOptLinearMethod", ("nvfp4-w4a16", True): "ModelOptLinearMethod",
    ("fp8", False): "CompressedTensorsW8A8Fp8", ("nvfp4-w4a16", False): "CompressedTensorsW4A4Fp4",
}  # fmt: skip


def test_the_loaders_of_the_default_stack_hold_the_numbers_that_were_written(vllm_python: Path, release: Path, tmp_path: Path) -> None:
    """Also of joined layers, of a head that vLLM calls otherwise, and of checkpoints that had patterns for what is ignored."""
    copies = []
    for number, quantization in enumerate((None, MODELOPT, COMPRESSED)):
        source = model(tmp_path / f"{number}" / "source", quantization)
        for form in FORMATS:
            folder = tmp_path / f"{number}" / form
            Slimming(source, form).write(folder)
            copies.append((form, quantization is MODELOPT, folder))
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], "PYTHONPATH": str(release), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [vllm_python, HERE / "slim_of_vllm.py", *(folder for _, _, folder in copies)], env=environment, text=True, capture_output=True, check=False
    )
    assert not done.returncode, done.stderr[-4000:]
    for (form, modelopt, folder), answer in zip(copies, json.loads(done.stdout.rpartition("answers ")[2]), strict=True):
        arrays = tensors(folder)
        assert answer.keys() == PARTS.keys() | PLAIN
        for layer, parts in PARTS.items():
            assert answer[layer]["scheme"] == SCHEMES[form, modelopt], (folder, layer)
            expected = np.concatenate([dequantised(arrays, part) for part in parts])
            assert np.array_equal(np.array(answer[layer]["values"])[: len(expected)], expected), (folder, layer)
        for layer in PLAIN:
            assert "Unquantized" in answer[layer]["scheme"]
            assert np.array_equal(answer[layer]["values"], arrays[f"{layer}.weight"].astype(np.float64))


@pytest.mark.timeout(1200)
def test_a_copy_is_certified_against_its_original_by_a_night(vllm_python: Path, trained: Path, tmp_path: Path) -> None:
    """The stock wheel serves the original and ours the copy, in FP8 with its head; what G5 measures between them is the copy's distance."""
    project = refserved.project(tmp_path / "project")
    for name in ("audit.yaml", "release.yaml"):
        shutil.copy(ROOT / "ci" / name, project / "ci" / name)
    refserved.edit(project / "ci" / "gates" / "logprobs.yaml", texts=16, tokens=256, decode_texts=8, decode_prompt=64)
    python, wheel = edited_copy(vllm_python, tmp_path / "ours")
    (stock,) = (vllm_python.parents[1] / "wheel").glob("*.whl")
    copy = tmp_path / "copy"
    record = Slimming(trained, "fp8").write(copy)
    assert record.read_after < 0.6 * record.read_before
    command = [
        sys.executable, "-m", "sparkwright", "gate", str(wheel), "--recipe", "toy-cpu", "--model-folder", str(copy), "--against", str(trained),
        "--root", str(project), "--cache-dir", str(tmp_path / "cache"), "--output", str(tmp_path / "out"), "--python", str(python),
        "--baseline", str(stock), "--baseline-python", str(vllm_python), "--keep-going", "--only", "G5",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "gate-failed" in done.stderr, done.stderr
    (document,) = (tmp_path / "out").glob("*.verdicts.json")
    (verdict,) = ladder.read_verdicts(document.read_bytes()).verdicts
    assert verdict.model == model_digest(copy) != model_digest(trained)
    (reference,) = (tmp_path / "cache" / "references").glob("*/logprobs.json")
    assert distributions.load(reference).served.model == model_digest(trained)
    checks = {check.name: check for check in verdict.checks}
    (distance, *_) = checks["divergence"].figures
    assert 0.0005 < distance.value < 0.05, (done.stderr, checks)
    # What the copy generates has the distributions of what it reads.
    assert checks["decode-greedy"].state == "pass", checks
