"""What a serving image is made of and says of itself, and what is refused before any engine is asked."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.refusals import refusal
from tests.release import world
from tests.support import publishing, wheels
from tests.support.publishing import Place

from sparkwright.builder.pylock import Interpreter
from sparkwright.cli.main import main
from sparkwright.core.store import Store
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import Project
from sparkwright.operate.image import lent, picked, recorded, registry, selected, settled
from sparkwright.operate.image.labels import SERIAL, labels
from sparkwright.operate.image.made import Made
from sparkwright.operate.image.picked import Picked
from sparkwright.release import environment
from sparkwright.release.client import health, install, packages, state
from sparkwright.release.client.install import Wish
from sparkwright.release.client.state import Pinned
from sparkwright.release.manifest import places
from sparkwright.release.signing import keys

BASE = "debian@sha256:" + "0123456789abcdef" * 4
SPARK = Interpreter("3.12.3", "aarch64", "2.39")
DIGEST = "sha256:" + "fedcba9876543210" * 4


class Shop:
    """A published index, and a run that makes images of it without a network."""

    def __init__(self, place: Place, folder: Path) -> None:
        self.place = place
        self.context = RunContext(Project(wheels.ROOT, wheels.STACK), Store(folder / "store"), (), folder / "dist", offline=True)

    def pick(self, machine: str = "aarch64", **wish: Any) -> Picked:
        return picked.pick(self.context, Wish(str(self.place.root), (keys.public_path(self.place.key),), **wish), machine)


@pytest.fixture(name="made", scope="module")
def _made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with two publishers: one of a verified release for the Spark, and one of a candidate."""
    root = tmp_path_factory.mktemp("made")
    with publishing.bare_index(root / "bare") as url, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARKWRIGHT_INDEX_URL", url)
        Place(root / "verified").publish(wheels.release(root / "dist", machine="aarch64"))
        Place(root / "candidate").publish(wheels.release(root / "raw", machine="aarch64", judged=False), "candidate")
    return root


@pytest.fixture(name="shop")
def _shop(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Shop]:
    """Return what gives a copy of one of the two, to somebody whose machine remembers nothing."""
    monkeypatch.setenv("SPARKWRIGHT_STATE_DIR", str(tmp_path / "state"))

    def shop(name: str = "verified") -> Shop:
        shutil.copytree(made / name, tmp_path / name, symlinks=True)
        return Shop(Place(tmp_path / name), tmp_path)

    return shop


# Which release.


def test_a_release_for_the_spark_is_picked_on_any_machine(shop: Callable[..., Shop]) -> None:
    """What counts is the machine of the image, not the one that makes it; the release's own installer comes with it."""
    found = shop().pick()

    assert {wheel.machine for wheel in found.wheels} == {"aarch64", "any"}
    assert (found.installer.project, found.missing) == ("sparkwright", ())


def test_a_release_without_wheels_for_the_platform_is_refused(shop: Callable[..., Shop]) -> None:
    """An image of one platform is never filled with wheels of another."""
    with refusal("release-unknown") as caught:
        shop().pick("x86_64")

    assert "x86_64" in caught.value.what


def test_a_candidate_has_to_be_asked_for_and_is_labelled(shop: Callable[..., Shop]) -> None:
    """Nobody gets what is not proved without saying so, and its image says what is missing."""
    offered = shop("candidate")
    with refusal("release-unproved"):
        offered.pick()
    said = labels(offered.pick(channel="candidate"), BASE)

    assert (said["sparkwright.proved"], said["sparkwright.channel"]) == ("no", "candidate")
    assert "G8: not-run" in said["sparkwright.missing"]


def test_another_signature_is_refused(shop: Callable[..., Shop], tmp_path: Path) -> None:
    """A release is taken from an index exactly as `install` takes it."""
    offered = shop()
    keys.make(tmp_path / "other")
    offered.place.key = tmp_path / "other"
    with refusal("signer-unknown"):
        offered.pick()


def test_an_index_without_an_installer_makes_no_image(tmp_path: Path) -> None:
    """The program inside is the release's own; where it has none, none is made up."""
    with world.hosted(tmp_path / "host") as host:
        bare = host.index()
        user = world.User(tmp_path / "user")
        context = RunContext(Project(wheels.ROOT, wheels.STACK), Store(tmp_path / "store"), (), tmp_path)
        with user.active(), refusal("installer-unfit"):
            picked.pick(context, world.wish(bare), world.MACHINE)


def test_an_installer_that_cannot_serve_is_refused(shop: Callable[..., Shop], monkeypatch: pytest.MonkeyPatch) -> None:
    """A release from before there was `serve` is told apart before anything is downloaded or built."""
    monkeypatch.setattr(selected, "NEEDED", frozenset({"sparkwright/cli/not_there_yet.py"}))
    offered = shop()
    with refusal("installer-unfit") as caught:
        selected.installer(offered.context, offered.pick(), SPARK)

    assert "not_there_yet" in str(caught.value.details)


def test_the_set_is_that_of_the_python_inside(shop: Callable[..., Shop]) -> None:
    """Tags and markers are those of the image's Python and machine: DGX OS 7 takes the wheels, an older C library does not."""
    offered = shop()
    found = selected.packages(offered.pick(), SPARK, "/opt/set")
    inside = selected.inside(SPARK, "/opt/set")

    assert {one.project for one in found.packages} == {"vllm", "flashinfer-python", "flashinfer-jit-cache", "sparkwright-cutlass", "ray"}
    assert (inside.markers["platform_machine"], inside.markers["python_version"]) == ("aarch64", "3.12")
    with refusal("environment-unusable"):
        selected.packages(offered.pick(), replace(SPARK, libc="2.28"), "/opt/set")


# What it says of itself.


def test_labels_name_the_bytes(shop: Callable[..., Shop]) -> None:
    """Each wheel, the lock, the release and the base stand there by hash, and nothing holds a date."""
    found = shop().pick()
    said = labels(found, BASE)

    assert said["sparkwright.release.sha256"] == found.entry.release
    assert {wheel.project: wheel.sha256 for wheel in found.wheels} == {
        name.removeprefix("sparkwright.wheel."): value for name, value in said.items() if name.startswith("sparkwright.wheel.")
    }
    assert (said["org.opencontainers.image.base.name"], said["org.opencontainers.image.base.digest"]) == tuple(BASE.split("@"))
    assert (said["org.opencontainers.image.version"], said[SERIAL], said["sparkwright.proved"]) == ("2026.11.1", "1", "yes")
    assert list(said) == sorted(said)
    assert all(value and "\n" not in value and found.entry.made[:10] not in value for value in said.values())


# What is lent to the container.


def test_the_installer_inside_believes_whom_we_do(shop: Callable[..., Shop]) -> None:
    """The manifest that was checked is lent byte for byte, with the same trust, and the installer's files by hash."""
    offered = shop()
    found = offered.pick()
    file = offered.place.root / places.wheel(found.installer.sha256, found.installer.filename)
    with lent.folders(offered.context, found, [file]) as folders:
        source = next(one.source for one in folders if one.target == lent.LENT)
        said = json.loads((source / "config" / "trust.yaml").read_text())["indexes"]
        listed = (source / lent.PROGRAM).read_text()

        assert (source / lent.INDEX / places.MANIFEST).read_bytes() == found.manifest
        assert said == {found.index.manifest.url: {"keys": [offered.place.signer.public.text], "identities": [], "root": ""}}
        assert listed.endswith(f"{found.installer.filename} --hash=sha256:{found.installer.sha256}\n")
        assert not any(one.writable for one in folders)
    assert not source.exists()


def test_room_is_looked_for_first(shop: Callable[..., Shop], tmp_path: Path) -> None:
    """A set that cannot fit is refused with both numbers before a byte of it is fetched."""
    large = Pinned("vllm", "1", "vllm-1-py3-none-any.whl", "0" * 64, "https://wheels.example/vllm", 1 << 50)
    with refusal("disk-full") as caught:
        selected.check_room(shop().context, SimpleNamespace(info=lambda: {"DockerRootDir": str(tmp_path)}), [large])  # type: ignore[arg-type]

    assert "needed" in caught.value.details[0]


# What is installed inside.


def test_what_is_installed_settles(tmp_path: Path) -> None:
    """Every file gets one time in whole seconds and its compiled form, and the set is known as it then lies there; twice is once."""
    with world.hosted(tmp_path / "host") as host:
        bare, user = host.index(), world.User(tmp_path / "user")
        with user.active():
            install.install(user.context(), user.venv, world.wish(bare))
        place = environment.probe(user.venv)
        kept = []
        for _ in range(2):
            settled.settle(user.venv.parent, user.venv)
            kept.append({path.relative_to(user.venv): path.read_bytes() for path in user.venv.rglob("*") if path.is_file()})

        assert kept[0] == kept[1]
        assert {path.lstat().st_mtime for path in (user.venv, *user.venv.rglob("*"))} == {settled.TIME}
        assert health.look(place, state.required(place), deep=True) == ()
        assert state.required(place).placed["vllm"].stat == packages.stat(place.site / state.required(place).placed["vllm"].info)
        assert [*(place.site / "vllm" / "__pycache__").glob("__init__.*.pyc")]


# What was pushed.


@pytest.fixture(name="image")
def _image(shop: Callable[..., Shop]) -> tuple[Shop, Picked, recorded.ImageRecord]:
    """Return an index, the release picked from it, and the record of an image of it."""
    offered = shop()
    found = offered.pick()
    made = Made(DIGEST, "sparkwright-serve:1", "linux/arm64", BASE, False, labels(found, BASE))
    return offered, found, recorded.record(made, found, "registry.example/spark/vllm", "2026.11.1-arm64", DIGEST)


def test_a_record_is_written_and_read(image: tuple[Shop, Picked, recorded.ImageRecord], tmp_path: Path) -> None:
    """The file is named by the digest, and holds what it was written from."""
    recorded.ready(tmp_path / "out")
    path = recorded.written(tmp_path / "out", image[2])

    assert path.name == f"image-{DIGEST.removeprefix('sha256:')}.json"
    assert msgspec.json.decode(path.read_bytes(), type=recorded.ImageRecord) == image[2]


def test_where_no_record_can_be_kept_nothing_is_pushed(tmp_path: Path) -> None:
    """What is pushed cannot be taken back, so the place of its record is tried first."""
    (tmp_path / "file").touch()
    with refusal("state-unusable"):
        recorded.ready(tmp_path / "file" / "out")


# Names.


@pytest.mark.parametrize("name", ["vllm", "spark/vllm", "registry.example/spark/vllm", "127.0.0.1:5000/a/b-c__d.e", "localhost/x"])
def test_repositories_are_taken(name: str) -> None:
    """Whatever an engine takes as the name of a repository."""
    assert registry.checked(name) == name


@pytest.mark.parametrize(
    "name", ["", "Spark/vllm", "spark/vllm:1", f"vllm@{DIGEST}", "a b", "-x", "/x", "x/", "--all", "a//b", "x\n", "é", "a" * 300]
)
def test_what_is_no_repository_is_refused(name: str) -> None:
    """A tag, a digest, a blank or an option is told before anything is built."""
    with refusal("usage"):
        registry.checked(name)


@given(st.text(min_size=1, max_size=200), st.sampled_from(["linux/arm64", "linux/amd64"]))
def test_every_release_has_a_tag(name: str, platform: str) -> None:
    """A release's name may hold more than a tag may; what comes out always is one."""
    assert registry.TAG.fullmatch(registry.tag_of(f"2026.11.{name}", platform))


# The verb.


@pytest.fixture(name="run")
def _run(shop: Callable[..., Shop], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, Any]]:
    """Return what runs the verb on the verified index, with no engine on the machine, and returns exit code and document."""
    offered = shop()
    monkeypatch.setenv("DOCKER_HOST", "unix:///nonexistent/engine.sock")

    def run(*words: str | Path) -> tuple[int, Any]:
        known = ["--index", offered.place.root, "--key", keys.public_path(offered.place.key), "--root", wheels.ROOT, "--json"]
        code = main([*map(str, ("lab", "image", *known, "--cache-dir", offered.context.store.root, "--offline", *words))])
        return code, json.loads(capsys.readouterr().out)

    return run


def test_a_dry_run_asks_no_engine(run: Callable[..., tuple[int, Any]]) -> None:
    """Everything about the release is checked, and said, without a container engine."""
    code, told = run("--base", BASE, "--dry-run", "2026.11.1")

    assert (code, told["state"], told["release"]["name"], told["base"]) == (0, "would be built", "2026.11.1", BASE)


@pytest.mark.parametrize(
    ("words", "reference"),
    [
        (["--base", BASE], "engine-missing"),
        (["--base", "debian:12"], "base-unresolved"),
        ([], "base-unresolved"),
        (["--base", BASE, "--platform", "linux/amd64"], "release-unknown"),
        (["--base", BASE, "2026.11.9"], "release-unknown"),
        (["--base", BASE, "--push", "Not/A:repository"], "usage"),
    ],
    ids=lambda value: " ".join(value)[-40:] if isinstance(value, list) else value,
)
def test_what_cannot_be_is_refused_first(run: Callable[..., tuple[int, Any]], words: list[str], reference: str) -> None:
    """Each has a reference of its own, and none has built or pushed anything."""
    code, told = run(*words)

    assert (code, told["error"]["reference"]) == (2 if reference == "usage" else 1, reference)
