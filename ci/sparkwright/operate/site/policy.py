"""``ci/site.yaml``: from when on a history is said to have changed, and which workflows are expected every night."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from sparkwright.core import strict_yaml


class Changes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    When a history is said to have changed.

    Attributes:
        alarm: Probability of saying so of one that did not. *least*: points before anything is said.
        side: Points on each side of a change. *floor*: relative spread between sessions that is taken for given.
        freedom: Degrees of freedom per point of the estimated spread.
    """

    alarm: Annotated[float, msgspec.Meta(gt=0, lt=0.5)]
    least: Annotated[int, msgspec.Meta(ge=4)]
    side: Annotated[int, msgspec.Meta(ge=1)]
    floor: Annotated[float, msgspec.Meta(gt=0, lt=1)]
    freedom: Annotated[float, msgspec.Meta(gt=0, le=1)]


class Nights(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """*on_demand*: workflows of which no night is missed."""

    on_demand: tuple[str, ...] = ()


class SitePolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that the site judges by."""

    changes: Changes
    nights: Nights


def load(root: Path) -> SitePolicy:
    """Return the policy of the checkout *root*; raises `file-invalid` as `yamlfile.load`."""
    return strict_yaml.load(root / "ci" / "site.yaml", SitePolicy)
