"""
Indexes, mirrors, networks and disks that are wrong in one way each, and how the installer refuses them.

    python tests/release/attacks.py            # prints a Markdown table: case | reference | exit code

A case is a function that spoils a `Scene`: a good index with two releases, and a user who could install the newer one. Then the
scene's command line is run as a person would, and the environment has to be as it was. Further cases (those of the publisher)
are appended to `CASES`, or run by other means and given to `table`.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

ROOT = Path(__file__).parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT)]

from tests.release import world  # noqa: E402
from tests.support import (  # noqa: E402
    indexserver,
    verdicts,
    wheels,
)

from sparkwright.builder.wheel import archive  # noqa: E402
from sparkwright.builder.wheel.archive import WheelName  # noqa: E402
from sparkwright.cli import main  # noqa: E402
from sparkwright.core import http  # noqa: E402
from sparkwright.core.files import sha256_file  # noqa: E402
from sparkwright.gates.core import verdict_file  # noqa: E402
from sparkwright.gates.core.verdict import Ladder  # noqa: E402
from sparkwright.release.decide import facts  # noqa: E402
from sparkwright.release.evidence import make, predicates  # noqa: E402
from sparkwright.release.manifest import places, times  # noqa: E402
from sparkwright.release.manifest.records import Missing, Proved  # noqa: E402
from sparkwright.release.signing import keys  # noqa: E402
from sparkwright.release.signing.keys import KeySigner  # noqa: E402
from sparkwright.release.signing.statement import Statement, Subject  # noqa: E402

#: Of a table of cases, as `whole` returns them.
HEAD = ("case", "reference", "exit code")

HTML = b"<!DOCTYPE html>\n<html><head><title>Sign in</title></head><body>Please sign in.</body></html>\n"
NEWEST, OLDER = "2026.11.2", "2026.11.1"


class Scene:
    """
    What a case spoils.

    Attributes:
        index: A good index. *user*: an environment without anything in it. *words*: the command line, without what `world.User` adds.
        around: A command that the command line is run by, in a process of its own; by default it is run in this one.
    """

    def __init__(self, host: world.Host, user: world.User) -> None:
        self.host, self.user, self.index = host, user, host.index()
        self.words: list[str | Path] = ["install", "--index", self.index.url, "--key", self.index.public]
        self.around: list[str] = []

    def run(self, *more: str) -> Outcome:
        """Run the command line in this process, and say how it ended."""
        before = self.user.listing()
        words = [*self.user.words(str(self.words[0]), *self.words[1:]), "--json", *more]
        code, out, said = self._around(words) if self.around else self._here(words)
        error = json.loads(out or "{}").get("error", {})
        return Outcome(error.get("reference", ""), error.get("what", ""), code, self.user.listing() == before, said)

    def _around(self, words: list[str]) -> tuple[int, str, str]:
        command = [*self.around, sys.executable, "-m", "sparkwright", *words]
        done = subprocess.run(command, env={**os.environ, **self.user.env}, capture_output=True, text=True, check=False, timeout=100)
        return done.returncode, done.stdout, done.stderr

    def _here(self, words: list[str]) -> tuple[int, str, str]:
        out, said = io.StringIO(), io.StringIO()
        with self.user.active(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(said):
            code = main.main(words)
        return code, out.getvalue(), said.getvalue()

    def good(self) -> None:
        """Run the command line as it is so far, which has to succeed."""
        done = self.run()
        assert done.code == 0, done.said

    def fault(self, name: str, bad: bytes | int | str | Callable[[indexserver.Handler], object]) -> None:
        """Serve *bad* in the place of the file *name* of the index."""
        path = f"/{self.index.root.name}/{name}"
        self.host.served.fault = lambda asked: bad if asked == path else None

    @property
    def release(self) -> str:
        return self.index.entry(NEWEST).release

    def wheel(self, project: str) -> str:
        """Return where the newest release's wheel of *project* lies."""
        return next(one.url for one in self.index.release(NEWEST).wheels if one.project == project)

    def evidence(self, kind: str) -> str:
        """Return where the newest release's evidence of *kind* about vLLM lies."""
        release = self.index.release(NEWEST)
        served = next(one.sha256 for one in release.wheels if one.project == "vllm")
        about = next(one for one in self.index.proof(NEWEST).wheels if one.wheel == served)
        return places.evidence(self.index.named(about.evidence, kind).sha256)


class Outcome(NamedTuple):
    """How a run ended: the reference of its failure, what it said, its exit code, and whether the environment is as it was."""

    reference: str
    what: str
    code: int
    untouched: bool
    said: str = ""


class Case(NamedTuple):
    """A case, and the reference that it has to produce."""

    name: str
    expected: str
    spoil: Callable[[Scene], object]


CASES: list[Case] = []


def case(name: str, expected: str) -> Callable[[Callable[[Scene], object]], Callable[[Scene], object]]:
    """Append a case."""

    def add(spoil: Callable[[Scene], object]) -> Callable[[Scene], object]:
        CASES.append(Case(name, expected, spoil))
        return spoil

    return add


def flipped(path: Path) -> None:
    """Change one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


# The manifest.


@case("the manifest is changed", "signature-invalid")
def _changed(scene: Scene) -> None:
    path = scene.index.path(places.MANIFEST)
    envelope = json.loads(path.read_bytes())
    payload = base64.b64decode(envelope["payload"]).replace(b"2026.11.2", b"2026.11.3")
    path.write_bytes(json.dumps({**envelope, "payload": base64.b64encode(payload).decode()}).encode())


@case("the manifest is signed with another key", "signer-unknown")
def _another_key(scene: Scene) -> None:
    path = scene.user.folder / "another.key"
    keys.make(path)
    scene.index.signer = KeySigner.load(path)
    scene.index.save(scene.index.manifest)


@case("nothing says whose key counts", "trust-missing")
def _no_key(scene: Scene) -> None:
    scene.words = scene.words[:3]


@case("an older manifest is served again", "manifest-replayed")
def _replayed(scene: Scene) -> None:
    before = scene.index.path(places.MANIFEST).read_bytes()
    scene.index.yank(OLDER)
    scene.words.append("--dry-run")
    scene.good()
    scene.index.path(places.MANIFEST).write_bytes(before)


@case("two manifests have the same serial", "manifest-forked")
def _forked(scene: Scene) -> None:
    scene.words.append("--dry-run")
    scene.good()
    scene.index.save(replace(scene.index.manifest, expires=times.after(scene.index.manifest.made, 60)))


@case("the manifest has expired", "manifest-expired")
def _expired(scene: Scene) -> None:
    made = times.text(datetime.now(UTC) - timedelta(days=40))
    scene.index.save(replace(scene.index.manifest, made=made, expires=times.after(made, 30)))


@case("the manifest is from the future", "clock-wrong")
def _future(scene: Scene) -> None:
    made = times.text(datetime.now(UTC) + timedelta(days=9))
    scene.index.save(replace(scene.index.manifest, made=made, expires=times.after(made, 30)))


@case("an HTML page in the place of the manifest", "manifest-invalid")
def _html_manifest(scene: Scene) -> None:
    scene.fault(places.MANIFEST, HTML)


@case("the manifest is cut off", "manifest-invalid")
def _cut_manifest(scene: Scene) -> None:
    path = scene.index.path(places.MANIFEST)
    path.write_bytes(path.read_bytes()[:-200])


@case("the connection breaks in the middle of the manifest, each time", "source-unreachable")
def _broken_manifest(scene: Scene) -> None:
    scene.fault(places.MANIFEST, "truncate")


@case("the manifest never ends", "manifest-invalid")
def _endless_manifest(scene: Scene) -> None:
    scene.fault(places.MANIFEST, endless)


@case("the manifest is at another host, says a redirect", "manifest-invalid")
def _redirected(scene: Scene) -> None:
    scene.fault(places.MANIFEST, lambda handler: handler.reply(302, location="http://127.0.0.2:9/manifest.dsse.json"))


@case("the manifest is in a file, says a redirect", "manifest-invalid")
def _redirected_to_file(scene: Scene) -> None:
    target = scene.index.path(places.MANIFEST).as_uri()
    scene.fault(places.MANIFEST, lambda handler: handler.reply(302, location=target))


@case("the index is served at another address", "manifest-elsewhere")
def _elsewhere(scene: Scene) -> None:
    shutil.copytree(scene.index.root, scene.index.root.with_name("copy"), dirs_exist_ok=True)
    scene.words[2] = f"{scene.host.served.url}copy/"


@case("there is no index at the address", "index-missing")
def _nowhere(scene: Scene) -> None:
    scene.words[2] = f"{scene.host.served.url}nowhere/"


@case("the manifest is a statement about something else", "manifest-invalid")
def _other_statement(scene: Scene) -> None:
    sealed = scene.index.signer.sign(Statement((Subject("a", "0" * 64),), "https://example.org/other", {}))
    scene.index.write(places.MANIFEST, sealed)


@case("the record of what was seen is damaged", "state-unusable")
def _state(scene: Scene) -> None:
    scene.words.append("--dry-run")
    scene.good()
    for path in (scene.user.folder / "state" / "seen").glob("*.json"):
        path.write_text("{")


# The choice.


@case("every release was yanked, and one is asked for by range", "release-yanked")
def _yanked(scene: Scene) -> None:
    scene.index.yank(OLDER)
    scene.index.yank(NEWEST)


@case("a release that does not exist", "release-unknown")
def _unknown(scene: Scene) -> None:
    scene.words += ["--version", "2026.11.9"]


@case("a candidate, asked for as verified", "release-unproved")
def _candidate(scene: Scene) -> None:
    scene.index.again(NEWEST, channel="candidate")
    scene.words += ["--version", "2026.11.3"]


@case("a release for another machine", "release-unknown")
def _machine(scene: Scene) -> None:
    locks = tuple(
        replace(lock, machine="aarch64" if wheels.MACHINE == "x86_64" else "x86_64") for lock in scene.index.release(NEWEST).locks
    )
    scene.index.again(NEWEST, locks=locks)
    scene.words += ["--version", "2026.11.3"]


# What is proved.


@case("verified, and the proof says that a gate was not climbed", "release-unproved")
def _lacking(scene: Scene) -> None:
    judged = verdicts.ladder(served(scene), without=["G5"])
    lacks = (Missing("G5", "not-run", "not-climbed", "nobody ran G5"),)
    told(scene, judged, missing=lacks, gates=tuple(one for one in proved(scene).gates if one.name != "G5"))


@case("the verdicts are about another wheel", "verdict-foreign")
def _foreign(scene: Scene) -> None:
    told(scene, verdicts.ladder(served(scene), sha256="f" * 64))


@case("a pass without a figure or a sample", "verdict-hollow")
def _hollow(scene: Scene) -> None:
    judged = verdicts.ladder(served(scene))
    bare = [
        replace(one, checks=tuple(replace(check, figures=(), samples=()) for check in one.checks)) if one.gate == "G4" else one
        for one in judged.verdicts
    ]
    told(scene, replace(judged, verdicts=tuple(bare)))


@case("throughput passes, and no leg was measured", "verdict-hollow")
def _unmeasured(scene: Scene) -> None:
    path = served(scene)
    empty = replace(verdicts.result(path), legs=())
    told(scene, verdicts.ladder(path), throughput=msgspec.json.encode(empty))


@case("a failed gate is claimed as a pass", "evidence-invalid")
def _claimed(scene: Scene) -> None:
    told(scene, verdicts.ladder(served(scene), worse={"G4": "fail"}))


def served(scene: Scene) -> Path:
    """Return the wheel of vLLM in the newest release."""
    return scene.host.made["2"][-1]


def proved(scene: Scene) -> Proved:
    """Return what is proved of it."""
    sha256 = sha256_file(served(scene))
    return next(one for one in scene.index.proof(NEWEST).wheels if one.wheel == sha256)


def told(scene: Scene, judged: Ladder, *, throughput: bytes = b"", **claims: Any) -> None:
    """
    Publish the newest release again with other verdicts about vLLM, signed by its publisher, although they contradict the rest.

    Args:
        throughput: The measurement, in place of the one that there was. *claims*: what the proof says in place of what it said.
    """
    one, about = facts.inspect(served(scene)), replace(proved(scene), **claims)
    wheel = next(wheel for wheel in scene.index.release(NEWEST).wheels if wheel.sha256 == about.wheel)
    kept = {kind: scene.index.path(scene.evidence(kind)).read_bytes() for kind in ("throughput", "sbom")}
    raw: dict[Any, bytes] = {
        **kept,
        "verdicts": msgspec.json.encode(verdict_file.document(judged)),
        **({"throughput": throughput} if throughput else {}),
    }
    if not any(verdict.gate == "G8" for verdict in judged.verdicts):
        del raw["throughput"]
    subject = (Subject(wheel.filename, wheel.sha256),)
    parts: dict[Any, msgspec.Struct] = {
        "provenance": make.provenance(wheel, one.fork, raw, one.record, "", one.stack, predicates.SELF_HOSTED),
        "test-result": make.test_result(judged, about, raw),
    }
    payloads = {kind: Statement(subject, predicates.TYPES[kind], msgspec.to_builtins(part)) for kind, part in parts.items()}
    last = make.summary(wheel, about, payloads, raw, tuple(gate.name for gate in about.gates))
    payloads["summary"] = Statement(subject, predicates.TYPES["summary"], msgspec.to_builtins(last))
    files = make.signed(payloads, raw, wheel, scene.index.signer)
    for named, data in files.items():
        scene.index.write(places.evidence(named.sha256), data)
    claimed = replace(about, evidence=tuple(files))
    scene.index.again(NEWEST, proved=lambda other: claimed if other.wheel == claimed.wheel else other)


@case("the evidence of one wheel stands for another", "evidence-invalid")
def _swapped(scene: Scene) -> None:
    by_wheel = {one.wheel: one for one in scene.index.proof(NEWEST).wheels}
    first, second = sorted(by_wheel)[:2]
    scene.index.again(NEWEST, proved=lambda one: replace(one, evidence=by_wheel[second].evidence) if one.wheel == first else one)


@case("a proof without any evidence", "evidence-invalid")
def _bare(scene: Scene) -> None:
    scene.index.again(NEWEST, proved=lambda one: replace(one, evidence=()))


@case("evidence is signed with another key", "signer-unknown")
def _evidence_signer(scene: Scene) -> None:
    path = scene.user.folder / "another.key"
    keys.make(path)
    publisher, scene.index.signer = scene.index.signer, KeySigner.load(path)
    told_by = scene.index.signer
    told_ladder = verdicts.ladder(served(scene), companions=scene.host.made["2"][:-1])
    original = scene.index.save

    def save(manifest: Any) -> bytes:
        scene.index.signer = publisher
        return original(manifest)

    scene.index.save = save  # type: ignore[method-assign]  # the records are the publisher's, the statements are not
    assert told_by.by != publisher.by
    told(scene, told_ladder)


@case("evidence is missing", "evidence-invalid")
def _no_evidence(scene: Scene) -> None:
    scene.index.path(scene.evidence("provenance")).unlink()


@case("evidence is changed by one bit", "evidence-invalid")
def _evidence_bit(scene: Scene) -> None:
    flipped(scene.index.path(scene.evidence("verdicts")))


@case("an HTML page in the place of evidence", "evidence-invalid")
def _evidence_html(scene: Scene) -> None:
    scene.fault(scene.evidence("summary"), HTML)


@case("evidence that never ends", "evidence-invalid")
def _evidence_endless(scene: Scene) -> None:
    scene.fault(scene.evidence("test-result"), endless)


# Records and locks.


@case("an HTML page in the place of the release's record", "download-invalid")
def _html_release(scene: Scene) -> None:
    scene.fault(places.release(scene.release), HTML)


@case("the record of another release in its place", "set-mixed")
def _other_release(scene: Scene) -> None:
    scene.index.path(places.release(scene.release)).write_bytes(
        scene.index.path(places.release(scene.index.entry(OLDER).release)).read_bytes()
    )


@case("the release's record is missing", "index-damaged")
def _no_release(scene: Scene) -> None:
    scene.index.path(places.release(scene.release)).unlink()


@case("the release's record never ends", "download-invalid")
def _endless_release(scene: Scene) -> None:
    scene.fault(places.release(scene.release), endless)


@case("a file name in the release leaves its folder", "index-damaged")
def _leaving_release(scene: Scene) -> None:
    release = scene.index.release(NEWEST)
    bad = tuple(replace(one, filename="../../../tmp/vllm-1-py3-none-any.whl") for one in release.wheels[-1:])
    scene.index.again(NEWEST, wheels=(*release.wheels[:-1], *bad))


@case("an HTML page in the place of the proof", "download-invalid")
def _html_proof(scene: Scene) -> None:
    entry = scene.index.entry(NEWEST)
    scene.fault(places.proof(entry.release, entry.proof), HTML)


@case("the proof is about another release", "set-mixed")
def _other_proof(scene: Scene) -> None:
    older, newest = scene.index.entry(OLDER), scene.index.entry(NEWEST)
    data = scene.index.path(places.proof(older.release, older.proof)).read_bytes()
    scene.index.write(places.proof(newest.release, older.proof), data)
    entries = tuple(replace(one, proof=older.proof) if one == newest else one for one in scene.index.manifest.entries)
    scene.index.save(replace(scene.index.manifest, entries=entries))


@case("an HTML page in the place of the lock", "download-invalid")
def _html_lock(scene: Scene) -> None:
    scene.fault(places.lock(scene.release, wheels.MACHINE), HTML)


@case("a mirror mixes two releases: the older one's lock", "set-mixed")
def _mixed(scene: Scene) -> None:
    scene.index.path(places.lock(scene.release, wheels.MACHINE)).write_bytes(lock_of(scene, OLDER))


@case("the publisher mixes two releases: the older one's lock, signed", "set-mixed")
def _mixed_signed(scene: Scene) -> None:
    scene.index.again(NEWEST, lock=lock_of(scene, OLDER))


@case("the lock names another version than the release", "set-mixed")
def _other_version(scene: Scene) -> None:
    scene.index.again(NEWEST, lock=lock_of(scene, NEWEST).replace(b"2.14.0", b"2.13.0"))


@case("the lock lacks a wheel of the release", "set-mixed")
def _lacking_wheel(scene: Scene) -> None:
    head, *tables = lock_of(scene, NEWEST).decode().split("\n[[packages]]")
    kept = [one for one in tables if 'name = "flashinfer-python"' not in one]
    scene.index.again(NEWEST, lock="\n[[packages]]".join([head, *kept]).encode())


@case("a file name in the lock leaves its folder", "lock-invalid")
def _leaving_lock(scene: Scene) -> None:
    scene.index.again(NEWEST, lock=lock_of(scene, NEWEST).replace(b"/torch-2.14.0-", b"/..%2f..%2ftorch-2.14.0-"))


@case("a package of the lock is a folder of the user's machine", "lock-invalid")
def _folder(scene: Scene) -> None:
    text = lock_of(scene, NEWEST) + b'\n[[packages]]\nname = "more"\nversion = "1"\ndirectory = { path = "/etc" }\n'
    scene.index.again(NEWEST, lock=text)


def lock_of(scene: Scene, name: str) -> bytes:
    """Return the lock of that release."""
    return scene.index.path(places.lock(scene.index.entry(name).release, wheels.MACHINE)).read_bytes()


# Files.


@case("a wheel is changed by one bit", "download-invalid")
def _bit(scene: Scene) -> None:
    flipped(scene.index.path(scene.wheel("vllm")))


@case("a wheel is missing", "index-damaged")
def _no_wheel(scene: Scene) -> None:
    scene.index.path(scene.wheel("vllm")).unlink()


@case("an HTML page in the place of a wheel", "download-invalid")
def _html_wheel(scene: Scene) -> None:
    scene.fault(scene.wheel("vllm"), HTML)


@case("a proxy cuts a wheel off, each time", "download-invalid")
def _truncated(scene: Scene) -> None:
    scene.fault(scene.wheel("flashinfer-python"), short)


@case("a wheel that never ends", "download-invalid")
def _endless_wheel(scene: Scene) -> None:
    scene.fault(scene.wheel("vllm"), endless)


@case("a wheel is in a file, says a redirect", "download-invalid")
def _wheel_in_file(scene: Scene) -> None:
    scene.fault(scene.wheel("vllm"), lambda handler: handler.reply(302, location="file:///etc/passwd"))


@case("a wheel's METADATA names another project", "wheel-mismatch")
def _inner_name(scene: Scene) -> None:
    folder = scene.user.folder / "made"
    folder.mkdir()
    name = WheelName("torch", "2.14.0", "py3-none-any")
    archive.write(folder, name, {"torch.py": b""}, wheels.metadata("other", "2.14.0"), pure=True)
    torch = scene.host.made["others"][0]
    text = lock_of(scene, NEWEST).decode()
    row = next(line for line in text.splitlines() if "/torch-2.14.0-" in line)
    other = scene.index.lock([], [folder / name.filename]).decode().splitlines()[-1]
    assert torch.name == name.filename
    scene.index.again(NEWEST, lock=text.replace(row, other).encode())


def short(handler: indexserver.Handler) -> None:
    """Announce 1000 bytes more than are sent, whatever part was asked for."""
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\nContent-Length: 2000\r\n\r\n" + b"P" * 1000)


def endless(handler: indexserver.Handler) -> None:
    """Answer without end."""
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n")
    with contextlib.suppress(OSError):
        while True:
            handler.wfile.write(b" " * (1 << 20))


# The user's machine.


@case("torch is there in another version", "environment-foreign")
def _torch(scene: Scene) -> None:
    scene.user.pip("install", wheels.plain(scene.user.folder / "made", "torch", "2.13.0"))


@case("torch is there in another build of the same version", "environment-foreign")
def _torch_build(scene: Scene) -> None:
    scene.user.pip("install", wheels.plain(scene.user.folder / "made", "torch", "2.14.0"))


@case("no room for the files", "disk-full")
def _no_room(scene: Scene) -> None:
    scene.user.context()
    scene.around = small_disk(scene.user.store, "200k")


@case("no room for what they unpack to", "disk-full")
def _no_room_there(scene: Scene) -> None:
    scene.around = small_disk(scene.user.venv, "300k")


def small_disk(folder: Path, size: str) -> list[str]:
    """Return what runs a command with *folder*, as it is, on a file system of its own that takes *size* more."""
    kept = folder.with_name(f"{folder.name}-kept")
    steps = (
        'cp -a "$0" "$1"; s=$(du -sk "$1" | cut -f1); mount -t tmpfs -o size=$((s + ${2%k}))k none "$0"; '
        'cp -a "$1"/. "$0"; rm -rf "$1"; shift 2; exec "$@"'
    )
    return unshared("sh", "-ec", steps, str(folder), str(kept), size)


def unshared(*command: str) -> list[str]:
    """Return what runs *command* where it may mount."""
    rights = [] if os.geteuid() == 0 else ["--map-root-user"]
    return ["unshare", *rights, "--mount", "--propagation", "private", *command]


@case("no environment at the place", "environment-unusable")
def _no_environment(scene: Scene) -> None:
    scene.user.venv = scene.user.folder / "nothing"


@case("the set is for another Python", "environment-unusable")
def _python(scene: Scene) -> None:
    text = lock_of(scene, NEWEST).replace(b"torch-2.14.0-py3-none-any", b"torch-2.14.0-cp39-cp39-manylinux_2_28_aarch64")
    scene.index.again(NEWEST, lock=text)


@case("something replaced a package of the installed set", "environment-broken")
def _broken(scene: Scene) -> None:
    scene.good()
    scene.user.pip("install", wheels.plain(scene.user.folder / "made", "torch", "2.13.0"))


@case("offline, and the store has nothing", "offline")
def _offline(scene: Scene) -> None:
    scene.words.append("--offline")


@case("back, and nothing is installed", "nothing-installed")
def _nothing(scene: Scene) -> None:
    scene.words = ["rollback"]


@case("back, and there is no earlier set", "nothing-installed")
def _no_earlier(scene: Scene) -> None:
    scene.good()
    scene.words = ["rollback"]


@contextlib.contextmanager
def scenes() -> Iterator[Callable[[], Scene]]:
    """Yield what makes a fresh scene."""
    with tempfile.TemporaryDirectory(prefix="attacks-") as name, world.hosted(Path(name)) as host:
        count = iter(range(1 << 20))

        def fresh() -> Scene:
            host.served.fault = None
            http.PAUSE = 0.05  # nobody needs to wait for a server that is wrong on purpose
            return Scene(host, world.User(Path(name) / "users" / str(next(count))))

        yield fresh


def run(one: Case, fresh: Callable[[], Scene]) -> Outcome:
    """Spoil a fresh scene, and run it."""
    scene = fresh()
    one.spoil(scene)
    return scene.run()


def table(rows: Iterable[Sequence[str]], head: Sequence[str]) -> str:
    """Return *rows* below *head* as an aligned Markdown table."""
    cells = [head, *rows]
    wide = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["| " + " | ".join(text.ljust(width) for text, width in zip(row, wide, strict=True)) + " |" for row in cells]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in wide) + "|", *lines[1:]])


def whole() -> list[tuple[str, str, str]]:
    """Run every case, and return the rows; a case that came out otherwise says so."""
    rows = []
    with scenes() as fresh:
        for one in CASES:
            found = run(one, fresh)
            note = (
                "" if found.reference == one.expected and found.untouched else f" (expected {one.expected}, untouched: {found.untouched})"
            )
            rows.append((one.name + note, f"`{found.reference}`", str(found.code)))
    return rows


if __name__ == "__main__":
    sys.stdout.write(table(whole(), HEAD) + "\n")
