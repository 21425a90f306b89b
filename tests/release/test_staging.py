"""An environment around unpublished wheels, made by a publication and an installation that leave nothing else."""

from __future__ import annotations

from pathlib import Path

from tests.refusals import refusal
from tests.support import publisher, wheels

from sparkwright.release import staging


def test_set_around_built_wheels_is_current(tmp_path: Path) -> None:
    with publisher.index_owner(tmp_path) as owner:
        context = owner.publisher().context
        with refusal("usage"):
            staging.install_built(context, tmp_path / "dist", tmp_path / "gate")
        wheels.release(tmp_path / "dist", judged=False)
        done = staging.install_built(context, tmp_path / "dist", tmp_path / "gate")
        assert done["state"] == "installed"
        assert list(
            (tmp_path / "gate" / "current").glob("lib/*/site-packages/vllm-0.33.0+spark.2026.11.*")
        )
        (tmp_path / "dist" / "old").mkdir()
        for path in (tmp_path / "dist").glob("*.whl"):
            path.rename(tmp_path / "dist" / "old" / path.name)
        wheels.release(tmp_path / "dist", judged=False, label="spark.2026.11.2")
        staging.install_built(context, tmp_path / "dist", tmp_path / "gate")
        assert list(
            (tmp_path / "gate" / "current").glob(
                "lib/*/site-packages/vllm-0.33.0+spark.2026.11.2.*"
            )
        )
