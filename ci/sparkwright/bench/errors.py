"""Failures of recipes and models, with their references."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from sparkwright.core.errors import Advice, SparkwrightError


class RecipeError(SparkwrightError):
    """A recipe cannot be used with this release, machine or model."""

    references: ClassVar[Mapping[str, Advice]] = {
        "recipe-unfit": Advice(
            "The recipe does not support this release of vLLM or its official wheel, its memory "
            "plan or checkpoint does not fit this machine, or its model has no accuracy floor.",
            "Choose a release that it names, or change the recipe after reading that release's "
            "flags (ci/recipes/README.md).",
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
