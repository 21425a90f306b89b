"""Publications that are refused, by the command line: each has its reference, and neither the index nor anything beside it changes."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support import publisher, refused, wheels
from tests.support.publisher import IndexOwner

from sparkwright.cli import main
from sparkwright.core.console import console
from sparkwright.release import keys
from sparkwright.release.repository import IndexFolder

FIRST = "2026.11.1"


class Scene:
    """
    A copy of an index with one verified release, and the wheels of the next, which may go to ``verified``.

    Attributes:
        root, keys: Of the index. *elsewhere*: a folder that has nothing to do with it.
        first, wheels: The wheels of the two releases.
        words: The command, without the options that all cases share.
        around: What is held while the command runs.
    """

    def __init__(self, folder: Path, owner: IndexOwner) -> None:
        self.folder, self.owner = folder, owner
        self.root, self.keys, self.elsewhere = (
            folder / name for name in ("index", "keys", "elsewhere")
        )
        self.elsewhere.mkdir()
        (self.elsewhere / "secret").write_text("a secret")
        self.first, self.wheels = (
            sorted((folder / name).glob("*.whl")) for name in ("first", "next")
        )
        self.words: list[str | Path] = ["publish", *self.wheels]
        self.around = contextlib.ExitStack()

    def wheel(self, project: str) -> Path:
        """Return the wheel of *project* of the next release."""
        return next(path for path in self.wheels if path.name.startswith(f"{project}-"))

    def candidate(self, *paths: Path) -> None:
        """Publish *paths* as a candidate, by default the wheels of the next release."""
        self.words = ["publish", *(paths or self.wheels), "--channel", "candidate"]

    def command(self, *words: str | Path) -> str:
        """Run *words* on the index, and return the reference of the failure."""
        shared = ["--at", self.root, "--keys", self.keys, "--root", wheels.ROOT, "--json"]
        out = io.StringIO()
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
                code = main.main([*map(str, words), *map(str, shared)])
        finally:
            console.json = False
        document = json.loads(out.getvalue() or "{}")
        assert bool(code) == ("error" in document)
        return str(document.get("error", {}).get("reference", ""))


@pytest.fixture(scope="module", name="stock")
def _stock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, IndexOwner]]:
    folder = tmp_path_factory.mktemp("stock")
    with publisher.index_owner(folder) as owner:
        owner.publish(wheels.release(folder / "first"))
        wheels.release(folder / "next", label=f"{wheels.LABEL}.2")
        yield folder, owner


@pytest.fixture(name="scene")
def _scene(
    stock: tuple[Path, IndexOwner], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Scene]:
    folder, owner = stock
    for name in ("index", "keys", "first", "next"):
        shutil.copytree(folder / name, tmp_path / "scene" / name)
    for name, value in owner.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SPARKWRIGHT_CACHE_DIR", str(tmp_path / "store"))
    made = Scene(tmp_path / "scene", owner)
    with made.around:
        yield made


def _judged(**changed: object) -> Callable[[Scene], None]:
    """Return what writes other verdicts beside vLLM's wheel."""
    return lambda scene: wheels.judge(scene.wheel("vllm"), **changed)  # type: ignore[arg-type]


def _verdicts(scene: Scene, project: str) -> Path:
    path = scene.wheel(project)
    return path.with_name(f"{path.name.removesuffix('.whl')}.verdicts.json")


def _hollow(scene: Scene) -> None:
    path = _verdicts(scene, "sparkwright_cutlass")
    document = json.loads(path.read_text())
    for verdict in document["verdicts"]:
        for check in verdict["checks"]:
            check |= {"figures": [], "samples": []}
    path.write_text(json.dumps(document))


def _odd(**changed: object) -> Callable[[Scene], None]:
    """Return what lets one wheel of vLLM be published as a candidate."""
    return lambda scene: scene.candidate(wheels.vllm(scene.folder / "odd", **changed))


def _retired(scene: Scene) -> None:
    for number in (3, 4):
        path = wheels.vllm(scene.folder / str(number), label=f"{wheels.LABEL}.{number}")
        assert not scene.command("publish", path, "--channel", "candidate")
    assert not scene.command("release", "prune", "--keep", "1")
    _odd(label=f"{wheels.LABEL}.3", size=10)(scene)


def _published_as_candidate(scene: Scene) -> None:
    assert not scene.command("publish", *scene.wheels, "--channel", "candidate")


def _yanked_candidate(scene: Scene) -> None:
    _published_as_candidate(scene)
    assert not scene.command("release", "yank", "2026.11.2", "--reason", "it hangs")


def _below_verified(scene: Scene) -> None:
    _published_as_candidate(scene)
    paths = wheels.release(scene.folder / "later", label=f"{wheels.LABEL}.3")
    assert not scene.command("publish", *paths)


def _damaged_candidate(scene: Scene) -> None:
    _published_as_candidate(scene)
    next(scene.root.glob("files/*/vllm*.2026.11.2.*.whl")).write_bytes(b"other bytes")
    scene.wheel("vllm").unlink()


def _yanked(scene: Scene) -> None:
    assert not scene.command("release", "yank", FIRST, "--reason", "it hangs")


def _then(prepare: Callable[[Scene], None], *words: str) -> Callable[[Scene], None]:
    """Return what prepares, and then runs *words*; ``VERDICTS`` are those of the next release."""

    def spoil(scene: Scene) -> None:
        prepare(scene)
        scene.words = [str(scene.folder / "next") if word == "VERDICTS" else word for word in words]

    return spoil


def _words(*words: str) -> Callable[[Scene], None]:
    return _then(lambda scene: None, *words)


def _wheel(place: Callable[[Path], object]) -> Callable[[Scene], None]:
    """Return what has *place* put something in the place of a wheel."""

    def spoil(scene: Scene) -> None:
        path = scene.wheel("vllm")
        path.unlink()
        place(path)
        scene.candidate()

    return spoil


def _changed(change: Callable[[dict[str, bytes]], object]) -> Callable[[Scene], None]:
    """Return what changes the members of vLLM's wheel, but not its RECORD."""

    def spoil(scene: Scene) -> None:
        wheels.changed(scene.wheel("vllm"), scene.folder / "next", change, honest=False)
        scene.candidate()

    return spoil


def _truncated(scene: Scene) -> None:
    path = scene.wheel("vllm")
    path.write_bytes(path.read_bytes()[:-100])
    scene.candidate()


def _edited(pattern: str, old: bytes, new: bytes) -> Callable[[Scene], None]:
    """Return what edits a file of the index."""

    def spoil(scene: Scene) -> None:
        path = next(scene.root.glob(pattern))
        data = path.read_bytes()
        assert old in data
        path.write_bytes(data.replace(old, new, 1))

    return spoil


def _page(pattern: str) -> Callable[[Scene], object]:
    return lambda scene: next(scene.root.glob(pattern)).write_text("<!DOCTYPE html>")


def _in_place(name: str, place: Callable[[Path], object]) -> Callable[[Scene], None]:
    """Return what puts something in the place of the file or folder *name* of the index."""

    def spoil(scene: Scene) -> None:
        path = scene.root / name
        if path.exists():
            path.rename(scene.folder / "before")
        place(path)

    return spoil


def _linked(name: str) -> Callable[[Scene], None]:
    """Return what moves a file or folder of the index elsewhere, and leaves a link to it."""

    def spoil(scene: Scene) -> None:
        path = next(scene.root.glob(name))
        path.rename(scene.elsewhere / "moved")
        path.symlink_to(scene.elsewhere / "moved")

    return spoil


def _stray(path: Path) -> None:
    path.write_text("a stray file")


def _elsewhere(name: str, url: str = publisher.URL) -> Callable[[Scene], None]:
    """Return what publishes into *name* beside the index."""

    def spoil(scene: Scene) -> None:
        scene.root = scene.folder / name
        scene.words += ["--url", url]

    return spoil


def _steps(*steps: Callable[[Scene], object]) -> Callable[[Scene], None]:
    """Return what takes *steps* in their order."""

    def spoil(scene: Scene) -> None:
        for step in steps:
            step(scene)

    return spoil


def _foreign_folder(scene: Scene) -> None:
    (scene.elsewhere / "releases" / "mine").mkdir(parents=True)
    _elsewhere("elsewhere")(scene)


def _others(scene: Scene) -> None:
    scene.keys = scene.folder / "others"
    keys.make(scene.keys)


def _busy(scene: Scene) -> None:
    scene.around.enter_context(IndexFolder(scene.root).locked())


CASES: dict[str, tuple[str, Callable[[Scene], object]]] = {
    # Verdicts.
    "a gate was not run": ("verified-refused", _judged(without=["G7"])),
    "a gate failed": ("verified-refused", _judged(worse={"G4": "fail"})),
    "verdicts of other bytes": ("verdict-foreign", _judged(sha256="0" * 64)),
    "a pass without figures and samples": ("verdict-hollow", _hollow),
    "a page in the place of the verdicts": (
        "evidence-invalid",
        lambda scene: _verdicts(scene, "vllm").write_text("<!DOCTYPE html>"),
    ),
    # Wheels.
    "a stray file in the place of a wheel": ("wheel-invalid", _wheel(_stray)),
    "a folder in the place of a wheel": ("usage", _wheel(Path.mkdir)),
    "a pipe in the place of a wheel": ("usage", _wheel(os.mkfifo)),
    "a wheel that is cut off": ("wheel-invalid", _truncated),
    "a wheel with a changed file": (
        "wheel-mismatch",
        _changed(lambda members: members.update({"vllm/__init__.py": b"import os\n"})),
    ),
    "a wheel with a file that leaves its folder": (
        "archive-unsafe",
        _changed(lambda members: members.update({"../../etc/profile.d/x.sh": b"true\n"})),
    ),
    "a wheel of others": (
        "wheel-mismatch",
        lambda scene: scene.candidate(wheels.plain(scene.folder / "odd", "torch", "2.14.0")),
    ),
    "wheels of another stack": ("usage", _odd(stack="2026.05", label="spark.2026.12")),
    "a file name of other bytes": ("wheel-name-taken", _odd(size=1000)),
    "a retired file name with other bytes": ("wheel-name-taken", _retired),
    "a version that pip would pass over": ("version-order", _odd(label="spark.2026.10")),
    "a requirement that nothing satisfies": (
        "set-unresolved",
        _odd(label=f"{wheels.LABEL}.2", requires=["nothing-has-this-name==1"]),
    ),
    "the wheels of a yanked release": (
        "release-yanked",
        _steps(_yanked, lambda scene: scene.candidate(*scene.first)),
    ),
    "the wheels of a candidate, for verified": (
        "release-name-taken",
        _published_as_candidate,
    ),
    # Other commands.
    "promote without verdicts": (
        "verified-refused",
        _then(_published_as_candidate, "release", "promote", "2026.11.2", "--verdicts", "nowhere"),
    ),
    "promote what is verified": (
        "release-unknown",
        _words("release", "promote", FIRST, "--verdicts", "VERDICTS"),
    ),
    "promote what does not exist": (
        "release-unknown",
        _words("release", "promote", "2026.11.9", "--verdicts", "VERDICTS"),
    ),
    "promote a yanked candidate": (
        "release-yanked",
        _then(_yanked_candidate, "release", "promote", "2026.11.2", "--verdicts", "VERDICTS"),
    ),
    "promote below a verified version": (
        "version-order",
        _then(_below_verified, "release", "promote", "2026.11.2", "--verdicts", "VERDICTS"),
    ),
    "promote a wheel that was damaged": (
        "index-damaged",
        _then(_damaged_candidate, "release", "promote", "2026.11.2", "--verdicts", "VERDICTS"),
    ),
    "yank without a reason": ("usage", _words("release", "yank", FIRST)),
    "yank with two lines": ("usage", _words("release", "yank", FIRST, "--reason", "two\nlines")),
    "yank twice": (
        "release-yanked",
        _then(_yanked, "release", "yank", FIRST, "--reason", "again"),
    ),
    "yank without an index": (
        "index-missing",
        _then(_elsewhere("nowhere"), "release", "yank", FIRST, "--reason", "x"),
    ),
    "refresh without an index": (
        "index-missing",
        _then(_elsewhere("nowhere"), "release", "refresh"),
    ),
    # The index and its keys.
    "another address": (
        "usage",
        lambda scene: scene.words.extend(["--url", "https://other.example/"]),
    ),
    "no address": (
        "usage",
        _elsewhere("nowhere", ""),
    ),
    "an address of another kind": (
        "usage",
        _elsewhere("nowhere", "ftp://wheels.example/"),
    ),
    "another publisher's keys": ("key-missing", _others),
    "a yank with another publisher's keys": (
        "key-missing",
        _then(_others, "release", "yank", FIRST, "--reason", "it hangs"),
    ),
    "a refresh with another publisher's keys": (
        "key-missing",
        _then(_others, "release", "refresh"),
    ),
    "another publisher at work": ("index-busy", _busy),
    "a changed timestamp": ("index-damaged", _edited("metadata/timestamp.json", b"20", b"30")),
    "a page for the timestamp": ("index-damaged", _page("metadata/timestamp.json")),
    "a changed root": ("index-damaged", _edited("metadata/1.root.json", b"20", b"30")),
    "a changed snapshot": ("index-damaged", _edited("metadata/1.snapshot.json", b"20", b"30")),
    "changed targets": ("index-damaged", _edited("metadata/1.targets.json", b"20", b"30")),
    "a changed release": ("index-damaged", _edited("targets/releases/*", b"vllm", b"evil")),
    # Its folder.
    "a file in the place of the index": (
        "index-damaged",
        _steps(lambda scene: _stray(scene.folder / "file"), _elsewhere("file")),
    ),
    "the folder of something else": ("index-damaged", _foreign_folder),
    **{
        f"a file in the place of {name}": ("index-damaged", _in_place(name, _stray))
        for name in ("metadata", "targets", "files", "releases", "simple")
    },
    **{
        f"a link in the place of {name}": ("index-damaged", _linked(name))
        for name in ("metadata", "targets", "targets/releases", "files", "releases", "simple")
    },
    "a link in the place of the lock": (
        "index-unwritable",
        _linked(".lock"),
    ),
    "a link in the place of a wheel's folder": (
        "index-damaged",
        _linked("files/*"),
    ),
    "a pipe in the place of the timestamp": (
        "index-damaged",
        _in_place("metadata/timestamp.json", os.mkfifo),
    ),
    "a folder in the place of the front page": (
        "index-damaged",
        _in_place("index.html", Path.mkdir),
    ),
    "a pipe in the place of the front page": ("index-damaged", _in_place("index.html", os.mkfifo)),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("case", CASES)
def test_hostile_publication_is_refused_and_nothing_changes(
    scene: Scene, case: str, record_property: Callable[[str, object], None]
) -> None:
    expected, spoil = CASES[case]
    spoil(scene)
    before = refused.tree(scene.folder)
    reference = scene.command(*scene.words)
    row = refused.record(record_property, reference, before, refused.tree(scene.folder))
    assert row == (expected, "nothing")


def test_without_a_fault_it_is_published(scene: Scene) -> None:
    assert not scene.command(*scene.words)
    assert IndexFolder(scene.root).entries["2026.11.2"].state.channel == "verified"
