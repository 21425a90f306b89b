"""An environment around unpublished wheels, made by a publication and an installation that leave nothing else."""

from __future__ import annotations

from tests.refusals import refusal
from tests.support.publisher import IndexOwner

from sparkwright.release import staging


def test_set_around_built_wheels_is_current(owner: IndexOwner) -> None:
    """Another set takes its place, under the same name."""
    context, gate = owner.publisher().context, owner.folder / "gate"
    with refusal("usage"):
        staging.install_built(context, owner.folder / "none", gate)
    for name, version in (("first", "2026.11.p"), ("next", "2026.11.2.p")):
        done = staging.install_built(context, owner.folder / name, gate)
        assert done["state"] == "installed"
        [info] = (gate / "current").glob("lib/*/site-packages/vllm-*.dist-info")
        assert f"+spark.{version}" in info.name
