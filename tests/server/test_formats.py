"""Formats in vLLM: the default stack's loaders hold the numbers of slimmer copies, and mixtures are refused that it would load in another format."""

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from tests.support.mixtures import MIXTURES, Mixture
from tests.unit.test_slim import COMPRESSED, FORMATS, MODELOPT, dequantised, model, tensors

from sparkwright.bench.model.slim import Slimming

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


# Mixtures of formats.

ROOT = HERE.parents[1]
ROOTS = ("model.", "model.language_model.")


def wrong(mixture: Mixture, joined: str, parts: list[str], answer: str) -> bool:
    """Return whether vLLM, whose *answer* is about the layer *joined*, would not load its *parts* as they are stored."""
    forms = {mixture.stored.get(part.removeprefix("model.").removeprefix("language_model."), "BF16") for part in parts}
    families = {form if form == "NVFP4" else "FP8" if "FP8" in form else "" for form in forms}
    lacks = answer == "static FP8" and forms == {"FP8 without scale of inputs"}
    return len(forms) > 1 or families != {answer.removeprefix("static ")} or lacks


def test_the_program_judges_mixtures_as_the_vllm_of_the_default_stack_does(vllm_python: Path, release: Path) -> None:
    cases = [(name, root) for name in MIXTURES for root in ROOTS]
    documents = []
    for name, root in cases:
        rooted = [part if part.startswith(("lm_head", "mtp")) else root + part for part in MIXTURES[name].names()]
        documents.append((MIXTURES[name].quantization(root), rooted))
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], "PYTHONPATH": str(release), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [vllm_python, HERE / "mixture_of_vllm.py"], input=json.dumps(documents), env=environment, text=True, capture_output=True, check=True
    )
    answers = json.loads(done.stdout.rpartition("answers ")[2])
    assert len(answers) == len(cases) == 2 * len(MIXTURES) >= 24
    for (name, root), answer in zip(cases, answers, strict=True):
        differing = [layer for layer in answer if wrong(MIXTURES[name], *layer)]
        assert bool(differing) == bool(MIXTURES[name].refused), (name, root, differing)
