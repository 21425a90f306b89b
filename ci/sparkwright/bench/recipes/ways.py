"""Which checkpoint a recipe serves, how its answers are drafted, and how a range of releases of vLLM is told so."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import Version

#: Never split at blanks: each is one argument, its value behind ``=``.
Flag = Annotated[str, Meta(pattern=r"^--[a-z0-9][a-z0-9-]*(\.[A-Za-z0-9_.-]+)?(=\S+)?$")]
Variable = Annotated[str, Meta(pattern="^[A-Z][A-Z0-9_]*$")]


class Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    Which checkpoint.

    Attributes:
        repository: On the hub of models; ``any`` for one that the user brings.
        revision: Its commit; ``unresolved`` where none of us has seen it, and then the checkpoint may change under the recipe.
        quantization: As people write it: ``NVFP4``, ``AWQ``.
        licence: As its card says it; empty where nobody looked.
        drafts: Whether it holds layers that draft (MTP); ``unknown`` where nobody looked.
    """

    repository: Annotated[str, Meta(pattern=r"^(any|[\w.-]{1,96}/[\w.-]{1,96})$")]
    revision: Annotated[str, Meta(pattern="^([0-9a-f]{40}|unresolved)$")]
    quantization: str
    licence: str = ""
    drafts: bool | Literal["unknown"] = "unknown"


class Speculation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    How answers are drafted.

    Attributes:
        method: In vLLM's words. *tokens*: in a draft.
        moe_backend: Of the layers that draft, which often are not quantized as the others are; said only where a `Way` sets the model's
            own ``--moe-backend``, which they would follow else.
    """

    method: Annotated[str, Meta(pattern="^[a-z0-9_]{2,30}$")]
    tokens: Annotated[int, Meta(ge=1, le=32)]
    moe_backend: str = ""

    def flag(self, way: Way) -> str:
        """Return the argument of ``vllm serve`` that says it."""
        said: dict[str, str | int] = {"method": self.method, "num_speculative_tokens": self.tokens}
        if self.moe_backend and any(flag.startswith("--moe-backend") for flag in way.flags):
            said["moe_backend"] = self.moe_backend
        return f"--speculative-config={msgspec.json.encode(said).decode()}"


class Way(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    How some releases of vLLM are told.

    Attributes:
        vllm: The releases, as Python's packages write ranges (``>=0.24,<0.34``); compared without labels and pre-releases.
        flags: Each with its value behind ``=``.
        variables: Of the environment.
        lacks: What the official wheels of these releases lack for it, so that only ours serve it; empty where they do.
        contract: What G3 expects of its log (``ci/gates/contract.yaml``), where that differs from the recipe's.
    """

    vllm: str
    flags: tuple[Flag, ...] = ()
    variables: dict[Variable, str] = {}
    lacks: str = ""
    contract: str = ""

    def __post_init__(self) -> None:
        try:
            SpecifierSet(self.vllm)
        except InvalidSpecifier:
            raise ValueError(f"{self.vllm!r} is no range of versions") from None

    def holds(self, version: Version) -> bool:
        """Is *version* among its releases?"""
        return SpecifierSet(self.vllm).contains(version.base_version)
