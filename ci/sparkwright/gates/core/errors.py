"""Failures of gates, with their references."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from sparkwright.core.errors import Advice, SparkwrightError


class GateError(SparkwrightError):
    """A gate did not pass, or could not run."""

    references: ClassVar[Mapping[str, Advice]] = {
        "gate-failed": Advice(
            "A gate saw something wrong in the wheel, the source tree or the server; the checks that failed are above, with samples.",
            "Do not install or publish it. The reason of each failed check is in "
            "docs/gates.md; `sparkwright gate --json` holds all samples.",
        ),
        "gate-inconclusive": Advice(
            "What was measured decides neither way: too few samples, or a machine whose own noise is as large as the margin.",
            "Measure more (see the check's figures), on an idle machine. Until then this wheel may only be published as a candidate.",
            exit_code=4,
        ),
        "gate-not-run": Advice(
            "Nothing failed, but a gate or one of its rows could not run here, so this is not a pass.",
            "Run those gates where they can run, or ask for the others alone with --only; each row says what it needs.",
            exit_code=4,
        ),
        "measurement-invalid": Advice(
            "What was measured does not count: a half stream, another model, a reference that does not agree with itself.",
            "Mend what the checks name, and run the gate again. An invalid measurement says nothing about the wheel.",
        ),
        "recipe-unfit": Advice(
            "The recipe says nothing of this release of vLLM, or of its official wheel; memory and checkpoint here are not as it plans; "
            "or no floor is known for its model.",
            "Choose a release that it names, or change the recipe once somebody has read that release's flags (ci/recipes/README.md).",
        ),
    }


class ModelError(SparkwrightError):
    """A model is missing, or its files cannot be used."""

    references: ClassVar[Mapping[str, Advice]] = {
        "checkpoint-invalid": Advice(
            "A file of the model is cut off, was made by a program that is wrong, or was made to mislead.",
            "Fetch the model again and compare its hashes with those that its publisher states; do not load it.",
        ),
        "model-missing": Advice(
            "The folder holds no model, or the model is not whole in the cache of models on this machine.",
            "Name the folder with --model, fetch the model (`hf download`), or let vLLM fetch it with --download.",
        ),
        "modules-unexpected": Advice(
            "Weights of the model are not as its own quantisation config says: it is slower than its format, or it is read wrongly.",
            "Look at the modules named above. Ask the model's publisher for a checkpoint that agrees with its config.",
        ),
    }
