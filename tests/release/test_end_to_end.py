"""A publisher and the client, over HTTP: install, second release, yank, rollback, promotion, rotation of all keys."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support import publisher, tufindex, verdicts, wheels

from sparkwright.client import main
from sparkwright.core.console import console
from sparkwright.release import keys

ROLES = {"root": ["root"], "targets": ["targets"], "online": ["snapshot", "timestamp"]}


def test_releases_from_publisher_to_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix = tmp_path / "prefix"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def user(url: str) -> Callable[..., dict[str, Any]]:
        def run(*words: object, code: int = 0) -> dict[str, Any]:
            capsys.readouterr()
            try:
                assert (
                    main.main([*map(str, words), "--json", "--prefix", str(prefix), "--index", url])
                    == code
                )
            finally:
                console.json = False
            document: dict[str, Any] = json.loads(capsys.readouterr().out)
            return document

        return run

    with publisher.index_owner(tmp_path) as owner:
        owner.root.mkdir()
        with tufindex.serve(owner.root) as url:
            owner.url, run = url, user(url)
            first = owner.publish(wheels.release(tmp_path / "first"))
            assert run("install", code=1)["error"]["reference"] == "trust-missing"
            run("install", "--trust", first.fingerprint)
            assert (prefix / "current").readlink().name == "2026.11.1"
            second = wheels.release(tmp_path / "second", judged=False, label="spark.2026.11.2")
            for path in second:
                verdicts.write(
                    path,
                    verdicts.ladder(
                        path, companions=second[:3], without=("G5", "G8"), recipes=verdicts.RECIPES
                    ),
                )
            owner.publish(second, "candidate")
            run("install")
            assert (prefix / "current").readlink().name == "2026.11.1"
            run("install", "--channel", "candidate")
            assert (prefix / "current").readlink().name == "2026.11.2"
            for path in second:
                wheels.judge(path, companions=second[:3] if path == second[-1] else ())
            owner.publisher().promote("2026.11.2", second[0].parent)
            run("install")
            assert (prefix / "current").readlink().name == "2026.11.2"
            owner.publisher().yank("2026.11.2", "it hangs")
            run("install")
            assert (prefix / "current").readlink().name == "2026.11.1"
            assert run("rollback", code=1)["error"]["reference"] == "release-yanked"
            for name, roles in ROLES.items():
                keys.make(tmp_path / "new", [name])
                owner.publisher().rotate(roles, keys.load([tmp_path / "new" / f"{name}.pem"]))
                shutil.copy(tmp_path / "new" / f"{name}.pem", owner.keys / f"{name}.pem")
            owner.publish(wheels.release(tmp_path / "third", label="spark.2026.11.3"))
            run("install")
            assert (prefix / "current").readlink().name == "2026.11.3"
            assert "2026.11.3" in json.dumps(run("verify", *(tmp_path / "third").glob("*.whl")))
