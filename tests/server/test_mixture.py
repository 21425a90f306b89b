"""What the program refuses as a mixture is what vLLM's own class would load in another format than it is stored in, or refuse itself."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from tests.support.mixtures import MIXTURES, Mixture

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
pytestmark = pytest.mark.server
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
