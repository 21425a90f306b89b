"""
Wheels, verdicts, hosts and indexes that are wrong in one way each, and how the publisher refuses them.

    python tests/release/refusals.py           # prints a Markdown table: case | reference | exit code

A case spoils a `Scene`: an index with one release, and the wheels of the next, which may go to ``verified``. Then the scene's command
line is run as a person would, and every file that a client can ask for has to be as it was.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT)]

from tests.release.attacks import HEAD, table  # noqa: E402
from tests.support import (  # noqa: E402
    githubapi,
    publishing,
    wheels,
)
from tests.support.publishing import Place  # noqa: E402

from sparkwright.cli import main  # noqa: E402
from sparkwright.release.manifest import places  # noqa: E402
from sparkwright.release.publish import changes, ground  # noqa: E402

FIRST = "2026.11.1"


class Outcome(NamedTuple):
    """How the program ended: its reference (empty for success), its exit code, and whether clients see what they saw."""

    reference: str
    code: int
    untouched: bool


class Scene:
    """
    What a case spoils.

    Attributes:
        place: An index with one release, made of *first*. *next*: the wheels of another. *words*: the command line, without what all share.
        environment: The variables that the program sees. *around*: what is held while it runs.
    """

    def __init__(self, folder: Path, packages: str) -> None:
        self.folder, self.place = folder, Place(folder / "place")
        self.environment = {"SPARKWRIGHT_INDEX_URL": packages, "GITHUB_TOKEN": githubapi.TOKEN}
        self.first, self.next = sorted((folder / "first").glob("*.whl")), sorted((folder / "next").glob("*.whl"))
        self.words: list[str | Path] = ["publish", *self.next]
        self.key = self.place.key
        self.around = contextlib.ExitStack()

    def one(self, project: str) -> Path:
        """Return the wheel of *project* of the next release."""
        return next(path for path in self.next if path.name.startswith(f"{project}-"))

    def candidate(self, *made: Path) -> None:
        """Let only *made* be published, where no verdict is asked for."""
        self.words = ["publish", *made, "--channel", "candidate"]

    def github(self) -> githubapi.World:
        """Let a wheel go to GitHub, which is returned."""
        world = self.around.enter_context(githubapi.serve())
        self.candidate(wheels.vllm(self.folder / "alone", label=f"{wheels.LABEL}.1"))
        self.words += ["--files", f"github:{world.repository}"]
        self.words += [f"--mirror=https://api.github.com={world.api}", f"--mirror=https://uploads.github.com={world.uploads}"]
        return world

    def run(self) -> Outcome:
        """Run the command line, and look at the index before and after."""
        before = self.place.files() if self.place.root.exists() else {}
        shared = ["--at", self.place.root, "--key", self.key, "--root", ROOT, "--offline", "--json"]
        out = io.StringIO()
        with self.around, contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
            code = main.main([*map(str, self.words), *map(str, shared)])
        after = self.place.files() if self.place.root.exists() else {}
        error = json.loads(out.getvalue()).get("error", {})
        return Outcome(error.get("reference", ""), code, before == after)


class Case(NamedTuple):
    """A way to be wrong, what it is called, and the reference that it has to be refused with."""

    name: str
    expected: str
    spoil: Callable[[Scene], None]


CASES: list[Case] = []


def case(name: str, expected: str) -> Callable[[Callable[[Scene], None]], Callable[[Scene], None]]:
    """Add the function to `CASES`."""

    def add(spoil: Callable[[Scene], None]) -> Callable[[Scene], None]:
        CASES.append(Case(name, expected, spoil))
        return spoil

    return add


def rewritten(path: Path, change: Callable[[str, bytes], tuple[str, bytes] | None], more: tuple[tuple[str, bytes], ...] = ()) -> None:
    """Write the archive again with each member as *change* has it, and *more*; RECORD stays as it was unless that changes it."""
    with zipfile.ZipFile(path) as archive:
        members = [(name, archive.read(name)) for name in archive.namelist()]
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in [*filter(None, (change(*one) for one in members)), *more]:
            archive.writestr(name, data)


def verdicts_of(path: Path) -> Path:
    return path.with_name(f"{path.name.removesuffix('.whl')}.verdicts.json")


@case("nobody climbed a gate", "verified-refused")
def _unclimbed(scene: Scene) -> None:
    wheels.judge(scene.one("vllm"), without=["G7"])


@case("a gate failed", "verified-refused")
def _failed(scene: Scene) -> None:
    wheels.judge(scene.one("vllm"), worse={"G4": "fail"})


@case("a verdict for another digest", "verdict-foreign")
def _foreign(scene: Scene) -> None:
    wheels.judge(scene.one("vllm"), sha256="0" * 64)


@case("a pass without figures and samples", "verdict-hollow")
def _hollow(scene: Scene) -> None:
    path = verdicts_of(scene.one("sparkwright_cutlass"))
    document = json.loads(path.read_text())
    for verdict in document["verdicts"]:
        for check in verdict["checks"]:
            check |= {"figures": [], "samples": []}
    path.write_text(json.dumps(document))


@case("an HTML page where the verdicts belong", "evidence-invalid")
def _page(scene: Scene) -> None:
    verdicts_of(scene.one("vllm")).write_text("<!DOCTYPE html><title>Sign in</title>")


@case("the source is pinned by a short commit only", "verified-refused")
def _unresolved(scene: Scene) -> None:
    path = wheels.cutlass(scene.folder / "next", label=f"{wheels.LABEL}.1", resolved=False)
    wheels.judge(path)


@case("the wheel holds no SBOM", "verified-refused")
def _bare(scene: Scene) -> None:
    path = wheels.cutlass(scene.folder / "next", label=f"{wheels.LABEL}.1", with_sbom=False)
    wheels.judge(path)


@case("a wheel changed by one bit", "wheel-mismatch")
def _bit(scene: Scene) -> None:
    scene.candidate(scene.one("vllm"))
    rewritten(scene.one("vllm"), lambda name, data: (name, data[:-1] + bytes([data[-1] ^ 1]) if name.endswith(".so") else data))


@case("METADATA says another version than the file name", "wheel-mismatch")
def _metadata(scene: Scene) -> None:
    scene.candidate(scene.one("vllm"))
    rewritten(scene.one("vllm"), lambda name, data: (name, data.replace(b"Version: 0.33.0", b"Version: 0.34.0")))


@case("the file name says another tag than WHEEL", "wheel-mismatch")
def _tag(scene: Scene) -> None:
    path = scene.one("sparkwright_cutlass")
    scene.candidate(path.rename(path.with_name(path.name.replace("py3-none-any", "py2-none-any"))))


@case("a member that RECORD does not list", "wheel-mismatch")
def _unlisted(scene: Scene) -> None:
    scene.candidate(scene.one("vllm"))
    rewritten(scene.one("vllm"), lambda name, data: (name, data), (("vllm/extra.py", b"import os\n"),))


@case("a member whose name leaves the folder", "wheel-unsafe")
def _leaves(scene: Scene) -> None:
    scene.candidate(scene.one("vllm"))
    rewritten(scene.one("vllm"), lambda name, data: (name, data), (("../../etc/profile.d/x.sh", b"true\n"),))


@case("a wheel that is cut off", "wheel-invalid")
def _cut(scene: Scene) -> None:
    scene.candidate(scene.one("vllm"))
    data = scene.one("vllm").read_bytes()
    scene.one("vllm").write_bytes(data[: len(data) // 2])


@case("a wheel that is not ours", "wheel-mismatch")
def _others(scene: Scene) -> None:
    scene.candidate(wheels.plain(scene.folder / "others", "torch", "2.14.0"))


@case("a file name that stands for other bytes", "wheel-name-taken")
def _taken(scene: Scene) -> None:
    scene.candidate(wheels.vllm(scene.folder / "again", size=10))


@case("a file name that was retired, with other bytes", "wheel-name-taken")
def _retired(scene: Scene) -> None:
    for number in (3, 4):
        scene.place.publish([wheels.vllm(scene.folder / str(number), label=f"{wheels.LABEL}.{number}")], "candidate")
    changes.retain(scene.place.publisher(), 1)
    scene.candidate(wheels.vllm(scene.folder / "again", label=f"{wheels.LABEL}.3", size=10))


@case("a version that pip would pass over", "version-order")
def _order(scene: Scene) -> None:
    scene.candidate(wheels.vllm(scene.folder / "old", version="0.32.0"))


@case("the wheels of a yanked release", "release-yanked")
def _yanked(scene: Scene) -> None:
    changes.yank(scene.place.publisher(), FIRST, "it is slow")
    scene.candidate(*scene.first)


@case("a requirement that nothing satisfies", "set-unresolved")
def _unresolvable(scene: Scene) -> None:
    scene.candidate(wheels.vllm(scene.folder / "odd", label=f"{wheels.LABEL}.1", requires=["nothing-has-this-name==1"]))


@case("wheels of another stack", "usage")
def _stack(scene: Scene) -> None:
    scene.candidate(wheels.vllm(scene.folder / "odd", stack="2026.05"))


@case("another publisher is at work", "index-busy")
def _busy(scene: Scene) -> None:
    scene.around.enter_context(ground.held(scene.place.root))


@case("an index that somebody else signs", "signer-unknown")
def _somebody(scene: Scene) -> None:
    scene.key = Place(scene.folder / "other").key


@case("a private key that others may read", "key-invalid")
def _open(scene: Scene) -> None:
    scene.key.chmod(0o644)


@case("the index's manifest was edited", "signature-invalid")
def _edited(scene: Scene) -> None:
    path = (scene.place.root / places.MANIFEST).resolve()
    envelope = json.loads(path.read_bytes())
    envelope["payload"] = envelope["payload"].swapcase()
    path.write_text(json.dumps(envelope))


@case("an HTML page where the index's manifest belongs", "manifest-invalid")
def _manifest(scene: Scene) -> None:
    (scene.place.root / places.MANIFEST).resolve().write_text("<!DOCTYPE html><title>Sign in</title>")


@case("a record of the index was damaged by a disk", "index-damaged")
def _damaged(scene: Scene) -> None:
    path = scene.place.root / places.release(scene.place.manifest().entries[0].release)
    path.write_bytes(path.read_bytes()[:-1])


@case("promote, and the verdicts are not there", "verified-refused")
def _promote(scene: Scene) -> None:
    scene.place.publish([wheels.vllm(scene.folder / "odd", label=f"{wheels.LABEL}.1")], "candidate")
    scene.words = ["release", "promote", "2026.11.2", "--verdicts", scene.folder / "odd"]


@case("promote what is verified already", "release-unknown")
def _again(scene: Scene) -> None:
    scene.words = ["release", "promote", FIRST, "--verdicts", scene.folder]


@case("yank without a reason", "usage")
def _reason(scene: Scene) -> None:
    scene.words = ["release", "yank", FIRST]


@case("no index at the place", "index-missing")
def _nowhere(scene: Scene) -> None:
    scene.place.root = scene.folder / "nowhere"
    scene.words = ["release", "refresh"]


@case("GitHub, and no token", "github-refused")
def _token(scene: Scene) -> None:
    scene.github()
    scene.environment["GITHUB_TOKEN"] = ""


@case("GitHub would let files be replaced", "release-mutable")
def _mutable(scene: Scene) -> None:
    scene.github().immutable = False


@case("GitHub has a fault that stays", "github-unreachable")
def _fault(scene: Scene) -> None:
    scene.github().once("POST", "/assets", githubapi.reply(500), times=100)


@case("GitHub asks to wait an hour", "github-limited")
def _limited(scene: Scene) -> None:
    scene.github().once("POST", "/assets", githubapi.reply(429, "slow down", Retry_After="3600"))


@case("GitHub keeps other bytes than it was sent", "publish-failed")
def _spoilt(scene: Scene) -> None:
    scene.github().spoil = lambda _, data: data[::-1]


@case("a proxy truncates what is read back from GitHub", "github-unreachable")
def _truncated(scene: Scene) -> None:
    scene.github().once("GET", r"^/\d+$", githubapi.cut(0.5), times=100)


@contextlib.contextmanager
def surroundings(variables: Mapping[str, str]) -> Iterator[None]:
    """Set the environment's *variables* for the block."""
    known = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in known.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


@contextlib.contextmanager
def scenes() -> Iterator[Callable[[], Scene]]:
    """Yield what makes a fresh scene; the package index has nothing."""
    with tempfile.TemporaryDirectory(prefix="refusals-") as name, contextlib.ExitStack() as stack:
        stock, count = Path(name) / "stock", iter(range(1 << 20))
        packages = stack.enter_context(publishing.bare_index(Path(name) / "bare"))
        wheels.release(stock / "next", label=f"{wheels.LABEL}.1")
        with surroundings({"SPARKWRIGHT_INDEX_URL": packages}):
            Place(stock / "place").publish(wheels.release(stock / "first"))

        def fresh() -> Scene:
            folder = Path(name) / str(next(count))
            shutil.copytree(stock, folder, symlinks=True)
            return Scene(folder, packages)

        yield fresh


def run(one: Case, fresh: Callable[[], Scene]) -> Outcome:
    """Spoil a fresh scene, and run it."""
    scene = fresh()
    with surroundings(scene.environment):
        one.spoil(scene)
    with surroundings(scene.environment):
        return scene.run()


def whole() -> list[tuple[str, str, str]]:
    """Run every case, and return the rows; a case that came out otherwise says so."""
    rows = []
    with scenes() as fresh:
        for one in CASES:
            found = run(one, fresh)
            odd = "" if (found.reference, found.untouched) == (one.expected, True) else f" (expected {one.expected}: {found})"
            rows.append((one.name + odd, f"`{found.reference}`", str(found.code)))
    return rows


if __name__ == "__main__":
    sys.stdout.write(table(whole(), HEAD) + "\n")
