"""
Known traps: a model, flags and a release of vLLM that start and serve wrongly, or end late.

They are reviewed records (``ci/traps.yaml``) whose conditions are decided by facts: the arguments
of ``vllm serve``, the release, and what the files of the model state.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from sparkwright.bench.model.modules import ModuleAudit
from sparkwright.bench.records import Reason
from sparkwright.bench.server import flags
from sparkwright.core import config, strict_yaml
from sparkwright.core.strict_yaml import Prose

_Source = Annotated[
    str, Meta(pattern=r"^([\w.-]+/[\w.-]+#\d+|seed \d{3}|vllm [\d.]+ [\w/.]+:\d+)$")
]


#: A model whose files were not read: it meets no condition.
UNREAD = ModuleAudit("", "", 0, (0, 0), 0, drafts=True, weights=0.0, rows=())


class Condition(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    When a trap holds: all that is stated.

    Attributes:
        vllm: Releases.
        model: Regular expression of ``model_type``.
        scheme: Beginning of the format of the weights.
        experts: The fewest of a layer.
        head_size: Of an attention head.
        drafts: ``false`` for a model without layers that draft.
        settings: Name as of `settings` → regular expression of its value.
    """

    vllm: str = ""
    model: str = ""
    scheme: str = ""
    experts: int = 0
    head_size: int = 0
    drafts: Literal[False] | None = None
    settings: dict[str, str] = {}

    def __post_init__(self) -> None:
        SpecifierSet(self.vllm)
        for pattern in (self.model, *self.settings.values()):
            re.compile(pattern)

    def holds(self, flag_values: Mapping[str, str], vllm: str, audit: ModuleAudit) -> bool:
        """Return whether the settings *flag_values* meet it for the model of *audit* on *vllm*."""
        if self.vllm:
            release = Version(vllm).base_version if vllm else ""
            if not release or release not in SpecifierSet(self.vllm):
                return False
        if self.model and not re.fullmatch(self.model, audit.model):
            return False
        if self.head_size not in (0, audit.head_size) or audit.experts[0] < self.experts:
            return False
        if self.drafts is not None and self.drafts != audit.drafts:
            return False
        for name, pattern in self.settings.items():
            if not re.fullmatch(pattern, flag_values.get(name, "")):
                return False
        return audit.scheme.startswith(self.scheme)


class Trap(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    A record of ``ci/traps.yaml``.

    Attributes:
        id: Its reference.
        happens: What happens.
        when: The condition under which it does.
        remedy: What to do instead.
        sources: Who saw it: OWNER/REPOSITORY#NUMBER, a seed report, or a line of a release of vLLM.
        seen: Day of the newest source that was read.
    """

    id: Annotated[str, Meta(pattern="^[a-z0-9]+(-[a-z0-9]+)*$")]
    happens: Prose
    when: Condition
    remedy: Prose
    sources: Annotated[tuple[_Source, ...], Meta(min_length=1)]
    seen: Annotated[str, Meta(pattern=r"^\d{4}-\d\d-\d\d$")]


def load() -> tuple[Trap, ...]:
    """
    Return the reviewed traps.

    Raises:
        file-invalid: Their file is damaged.
    """
    return strict_yaml.load(config.root() / "ci" / "traps.yaml", tuple[Trap, ...])


def find(words: Sequence[str], vllm: str, audit: ModuleAudit) -> Iterator[Reason]:
    """
    Yield the traps that hold, each with its source and its remedy.

    Args:
        words: Arguments of ``vllm serve``.
        vllm: The release; empty if unknown.
        audit: Of the model, or `UNREAD`.
    """
    flag_values = settings(words)
    for trap in load():
        if trap.when.holds(flag_values, vllm, audit):
            message = f"{trap.happens} ({', '.join(trap.sources)}). {trap.remedy}"
            yield Reason(trap.id, message.removesuffix("."))


def settings(words: Sequence[str]) -> dict[str, str]:
    """
    Return what the arguments *words* of ``vllm serve`` set: flag → its last value, and
    ``speculation.NAME`` → a setting of speculative decoding. Of these, ``drafter`` is a model,
    ``own`` for the layers of the model itself, or empty, and ``moe_backend`` the one that serves
    the drafter.
    """
    flag_values = {argument.name: argument.value for argument in flags.parse(words)}
    drafting = flags.speculation(words)
    own = "own" if "mtp" in str(drafting.get("method")) else ""
    drafting["drafter"] = drafting.get("model") or own
    drafting.setdefault("moe_backend", flag_values.get("--moe-backend", ""))
    for name, value in drafting.items():
        flag_values[f"speculation.{name}"] = str(value)
    return flag_values
