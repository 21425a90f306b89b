"""``publish`` and ``release`` on the command line, on an index in a folder."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.refusals import refusal
from tests.support import publisher, refused, wheels
from tests.support.publisher import IndexOwner

from sparkwright.cli import main
from sparkwright.core.console import console
from sparkwright.core.store import UNFINISHED

Run = Callable[..., Any]


@pytest.fixture(scope="module", name="world")
def _world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[IndexOwner]:
    with publisher.index_owner(tmp_path_factory.mktemp("world")) as owner:
        yield owner


@pytest.fixture(name="run")
def _run(
    world: IndexOwner,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Run:
    for name, value in world.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SPARKWRIGHT_CACHE_DIR", str(tmp_path / "store"))

    def run(*words: object, at: bool = True) -> Any:
        folder = ["--at", str(tmp_path / "index")] if at else []
        capsys.readouterr()
        try:
            assert main.main([*map(str, words), *folder, "--root", str(wheels.ROOT), "--json"]) == 0
        finally:
            console.json = False
        return json.loads(capsys.readouterr().out)

    return run


def test_index_from_the_first_key_to_the_last_command(run: Run, tmp_path: Path) -> None:
    keys = run("release", "key", "make", tmp_path / "keys", at=False)["keys"]
    assert (
        run("release", "key", "show", tmp_path / "keys" / "root.pub", at=False)["fingerprint"]
        == keys[str(tmp_path / "keys" / "root.pem")]
    )
    held = ("--keys", tmp_path / "keys")
    first = wheels.vllm(tmp_path / "a")
    dry = run("publish", first, "--channel", "candidate", "--url", publisher.URL, "--dry-run")
    assert (dry["dry_run"], dry["published"]["release"]) == (True, "2026.11.1")
    done = run("publish", first, "--channel", "candidate", "--url", publisher.URL, *held)[
        "published"
    ]
    assert done["version"] == 1
    shown = run("release", "key", "show")
    assert (shown["fingerprint"], set(shown["roles"])) == (
        done["fingerprint"],
        {"root", "targets", "snapshot", "timestamp"},
    )
    run(
        "publish",
        wheels.vllm(tmp_path / "b", label="spark.2026.11.2"),
        "--channel",
        "candidate",
        *held,
    )
    assert run("release", "yank", "2026.11.1", "--reason", "it hangs", *held)["changed"][
        "releases"
    ] == ["2026.11.1"]
    assert "# 2026.11.2" in run("release", "notes", "2026.11.2")["markdown"]
    assert run("release", "verify")["files"] > 0
    run("release", "key", "make", tmp_path / "new", "--name", "online", at=False)
    assert (
        run("release", "key", "rotate", "--role", "online", "--new", tmp_path / "new", *held)[
            "changed"
        ]["version"]
        == 4
    )
    assert run("release", "refresh", "--keys", tmp_path / "new")["changed"]["version"] == 5
    both = (*held, "--keys", tmp_path / "new")
    assert run("release", "prune", "--keep", 1, *both)["changed"]["releases"] == ["2026.11.1"]
    stray = tmp_path / "index" / f"files/{'0' * 64}"
    stray.mkdir()
    (stray / f"{UNFINISHED}x").write_bytes(b"killed")
    assert run("release", "refresh", *both)["changed"]["removed"][0] == f"files/{'0' * 64}"


#: Runs the commands of the job that signs where only what its requirements pin can be imported.
SIGNING = """
import importlib.metadata, json, sys
pinned, commands = set(json.loads(sys.argv[1])), json.loads(sys.argv[2])
normal = lambda name: name.lower().replace("_", "-").replace(".", "-")
owners = importlib.metadata.packages_distributions()
class Pinned:
    def find_spec(self, name, path=None, target=None):
        owned = {normal(owner) for owner in owners.get(name.partition(".")[0], [])}
        if owned - {"sparkwright"} and not owned & pinned:
            raise ModuleNotFoundError(f"{name} of {owned} is not pinned")
sys.meta_path.insert(0, Pinned())
from sparkwright.cli import main
sys.exit([main.main(words) for words in commands] != [0, 0, 0, 1, 0])
"""


def test_job_that_signs_imports_what_its_requirements_pin(
    world: IndexOwner, tmp_path: Path
) -> None:
    pins = (wheels.ROOT / ".github" / "signing.txt").read_text()
    pinned = re.findall(r"^([a-z0-9-]+)(?:\[.*\])?==", pins, re.MULTILINE)
    keys = str(tmp_path / "keys")
    owner = ["--root", str(wheels.ROOT), "--at", str(tmp_path / "index"), "--keys", keys]
    candidate = ["--channel", "candidate", "--url", publisher.URL]
    commands = [
        ["release", "key", "make", keys],
        ["publish", str(wheels.vllm(tmp_path / "a")), *candidate, *owner],
        ["release", "prune", *owner],
        ["release", "promote", "2026.11.1", "--verdicts", str(tmp_path / "a"), *owner],
        ["release", "yank", "2026.11.1", "--reason", "it hangs", *owner],
    ]
    words = [sys.executable, "-c", SIGNING, json.dumps(pinned), json.dumps(commands)]
    environment = {
        **os.environ,
        **world.environment,
        "SPARKWRIGHT_CACHE_DIR": str(tmp_path / "store"),
    }
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "verified-refused" in done.stderr


USAGE = {
    "no keys": ("publish", "WHEEL"),
    "no wheel": ("publish", "nowhere.whl", "--keys", "KEYS"),
    "files nowhere": ("publish", "WHEEL", "--files", "ftp", "--keys", "KEYS"),
    "no identity in the policy": ("release", "refresh", "--keys", "KEYS", "--identity"),
    "no folder": ("release", "key", "make"),
    "no new keys": ("release", "key", "rotate", "--role", "root", "--keys", "KEYS"),
    "no index": ("release", "key", "show"),
    "no index to check": ("release", "verify"),
    "no index with notes": ("release", "notes"),
    "no index to rotate": (
        *("release", "key", "rotate", "--role", "root", "--keys", "KEYS", "--new", "KEYS"),
    ),
    "another role": ("release", "key", "make", "KEYS", "--name", "mine"),
    "another folder": ("release", "key", "make", "KEYS", "--name", "root/../../mine"),
}


@pytest.mark.parametrize("name", USAGE)
def test_usage_is_refused(
    name: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    places = {"WHEEL": wheels.vllm(tmp_path), "KEYS": tmp_path / "keys"}
    main.run(["release", "key", "make", str(tmp_path / "keys")])
    words = [str(places.get(word, word)) for word in USAGE[name]]
    at = [] if words[:3] == ["release", "key", "make"] else ["--at", str(tmp_path / "index")]
    before = refused.tree(tmp_path, refused.LOCKS | {"cache"})
    expected = "index-missing" if name.startswith("no index") else "usage"
    with refusal(expected):
        main.run([*words, *at, "--root", str(wheels.ROOT)])
    row = refused.record(
        record_property, expected, before, refused.tree(tmp_path, refused.LOCKS | {"cache"})
    )
    assert row[1] == "nothing"


def test_damaged_index_is_shown(
    world: IndexOwner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in world.environment.items():
        monkeypatch.setenv(name, value)
    world.publish([wheels.vllm(tmp_path)], "candidate")
    wheel = world.index.entries["2026.11.1"].release.wheels[0]
    damaged = [wheel.path, f"{wheel.path}.metadata"]
    for path in damaged:
        (world.root / path).write_bytes(b"other bytes")
    with refusal("index-damaged") as caught:
        main.run(["release", "verify", "--at", str(world.root)])
    assert sorted(caught.value.details) == damaged


@pytest.mark.parametrize(
    "kind",
    ["missing", "FIFO", "open to others", "a stranger's", "folder without keys", "text"],
)
def test_key_that_cannot_sign_is_refused(
    kind: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    import os
    import subprocess

    folder = tmp_path / "keys"
    main.run(["release", "key", "make", str(folder)])
    path = folder / "targets.pem"
    if kind == "missing":
        path = folder / "nowhere.pem"
    elif kind == "FIFO":
        path = folder / "pipe.pem"
        os.mkfifo(path, 0o600)
    elif kind == "open to others":
        path.chmod(0o644)
    elif kind == "a stranger's":
        path.unlink()
        subprocess.run(
            [
                "openssl",
                "genpkey",
                "-algorithm",
                "EC",
                "-pkeyopt",
                "ec_paramgen_curve:P-256",
                "-out",
                path,
            ],
            check=True,
            capture_output=True,
        )
        path.chmod(0o600)
    elif kind == "folder without keys":
        path = tmp_path / "empty"
        path.mkdir()
    else:
        path.write_text("hello")
        path.chmod(0o600)
    words = [
        "release",
        "refresh",
        "--at",
        tmp_path / "index",
        "--keys",
        path,
        "--root",
        wheels.ROOT,
    ]
    before = refused.tree(tmp_path, refused.LOCKS | {"cache"})
    with refusal("key-invalid"):
        main.run([str(word) for word in words])
    row = refused.record(
        record_property, "key-invalid", before, refused.tree(tmp_path, refused.LOCKS | {"cache"})
    )
    assert row[1] == "nothing"


def test_key_with_a_passphrase(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sparkwright.release import keys

    monkeypatch.setenv(keys.PASSPHRASE, "secret")
    [(path, public)] = keys.make(tmp_path / "keys", ["root"]).items()
    assert (path.stat().st_mode & 0o777, keys.load_private(path).public_key) == (0o600, public)
    assert b"ENCRYPTED" in path.read_bytes()
    for wrong in ("", "other"):
        monkeypatch.setenv(keys.PASSPHRASE, wrong)
        with refusal("key-invalid") as caught:
            keys.load_private(path)
        assert "secret" not in str(caught.value.document())
    with refusal("key-invalid", match="never overwritten"):
        keys.make(tmp_path / "keys", ["root"])
