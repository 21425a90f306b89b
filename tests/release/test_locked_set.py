"""The matched set: resolved by uv from wheels of ours and one index, locked by hash, and read back as if it were hostile."""

import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from packaging.markers import default_environment
from packaging.pylock import Pylock
from tests.refusals import refusal
from tests.support import publisher, tufindex, wheels

from sparkwright.audit.wheel import read_subject
from sparkwright.builder import pylock
from sparkwright.client import locked_wheels
from sparkwright.core import files, store
from sparkwright.release import locked_set, policy

#: The Python of the tests; what is installed here has to be for it.
PYTHON = f"3.{sys.version_info[1]}"
MACHINE: Any = wheels.MACHINE


class Index:
    """A package index in *folder*, which is served at *address*; *url* is what uv is told."""

    def __init__(self, folder: Path, address: str) -> None:
        self.folder, self.address, self.url = folder, address, f"{address}simple/"

    def offer(
        self,
        project: str,
        version: str,
        requires: Sequence[str] = (),
        *,
        hashed: bool = True,
        **options: Any,
    ) -> Path:
        """Offer a wheel, and return it."""
        made = wheels.plain(self.folder / "made", project, version, requires=requires, **options)
        return publisher.offer(self.folder, made, hashed=hashed)


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    """Return an index with torch 2.14.0, a newer one, and what they need."""
    with tufindex.serve(tmp_path / "index") as address:
        made = Index(tmp_path / "index", address)
        for version in ("2.14.0", "2.15.0"):
            made.offer("torch", version, ["numpy>=2"])
        for version in ("1.26.0", "2.1.0", "2.4.0"):
            made.offer("numpy", version)
        yield made


@pytest.fixture
def ours(tmp_path: Path, index: Index) -> list[Path]:
    """Return the wheels of a release; the index has what they require."""
    index.offer("certifi", "2026.10.18")
    index.offer("ray", "2.60.0")
    requires = ["torch==2.14.0", "certifi>=2026.10.19"]
    return wheels.release(tmp_path / "release", judged=False, requires=requires)


def own_wheels(index: Index, paths: Sequence[Path]) -> dict[locked_wheels.LockedWheel, Path]:
    """Return wheels of ours with their addresses in the index."""
    abouts = [(path, read_subject(path)) for path in paths]
    return {
        locked_wheels.LockedWheel(
            about.name,
            about.version,
            path.name,
            f"{index.address}files/{about.sha256}/{path.name}",
            about.sha256,
            about.size,
        ): path
        for path, about in abouts
    }


def resolved(
    index: Index,
    paths: Sequence[Path],
    tmp_path: Path,
    *,
    index_url: str = "",
    **changed: Any,
) -> locked_set.LockedSet:
    """Resolve the wheels *paths* for this Python."""
    rule: dict[str, Any] = {
        "pythons": (PYTHON,),
        "overrides": (policy.Override("certifi>=2026.10.18", "the index lacks it"),),
        **changed,
    }
    return locked_set.resolve(
        own_wheels(index, paths), MACHINE, policy.SetRule(**rule), index_url=index_url or index.url
    )  # fmt: skip


def selected(made: locked_set.LockedSet, python: str = PYTHON) -> dict[str, locked_wheels.LockedWheel]:
    """Return what the client selects for a Python, by project."""
    lock = locked_wheels.read(made.lock, "the lock")
    tags = pylock.tags(tuple(map(int, python.split("."))), MACHINE)
    markers: Any = {name: str(value) for name, value in default_environment().items()}
    markers |= {"python_version": python, "python_full_version": f"{python}.0"}
    found = locked_wheels.select(lock, tags, markers, "the lock")
    return {wheel.project: wheel for wheel in found}


def test_a_set_is_whole_and_pinned(index: Index, ours: list[Path], tmp_path: Path) -> None:
    """
    The set holds our wheels at our addresses with hash and size, and what they require from the index, by hash alone;
    the lock is what PEP 751 asks for, and says which machines and Pythons it is for. Without the override, a version that the
    index lacks makes the set unresolved, with uv's reason.
    """
    made = resolved(index, ours, tmp_path)
    built = "+spark.2026.11.p1a2b3c4d.cu130"
    assert made.packages == {
        "certifi": "2026.10.18",
        "flashinfer-python": f"0.7.2.post1{built}",
        "numpy": "2.4.0",
        "sparkwright-cutlass": f"4.7.1{built}",
        "torch": "2.14.0",
        "vllm": f"0.33.0{built}",
    }
    found = selected(made)
    assert {name: one.version for name, one in found.items()} == made.packages
    assert [found["vllm"]] == list(own_wheels(index, ours[2:]))
    numpy = index.folder / "files" / "numpy-2.4.0-py3-none-any.whl"
    assert found["numpy"].sha256 == files.sha256_file(numpy)
    assert resolved(index, ours, tmp_path) == made
    read = tomllib.loads(made.lock.decode())
    Pylock.from_dict(read)
    platform = f"sys_platform == 'linux' and platform_machine == '{MACHINE}'"
    assert read["environments"] == [f"{platform} and python_version == '{PYTHON}'"]
    assert all(set(package) == {"name", "version", "wheels"} for package in read["packages"])
    assert str(tmp_path / "release") not in made.lock.decode()
    with refusal("set-unresolved", says="certifi"):
        resolved(index, ours, tmp_path, overrides=())


def test_every_package_has_one_version_for_all_pythons(
    index: Index, ours: list[Path], tmp_path: Path
) -> None:
    """A lock for several Pythons has one version of each package, their own wheels, and a marker where only some need a package."""
    for python in ("311", "312"):
        index.offer("fast", "1.0", tag=f"cp{python}-cp{python}-manylinux_2_28_{MACHINE}")
    index.offer("fast", "2.0", tag=f"cp312-cp312-manylinux_2_28_{MACHINE}")
    index.offer("backport", "1.0")
    index.offer("user", "1.0", ["fast<2", "backport; python_version < '3.12'"])
    user = wheels.vllm(tmp_path / "user", requires=["user"])
    made = resolved(index, [user], tmp_path, pythons=("3.12", "3.11"))
    assert made.packages == {
        "backport": "1.0",
        "fast": "1.0",
        "user": "1.0",
        "vllm": made.packages["vllm"],
    }
    packages = {one["name"]: one for one in tomllib.loads(made.lock.decode())["packages"]}
    assert [one["name"] for one in packages["fast"]["wheels"]] == [
        f"fast-1.0-cp311-cp311-manylinux_2_28_{MACHINE}.whl", f"fast-1.0-cp312-cp312-manylinux_2_28_{MACHINE}.whl",
    ]  # fmt: skip
    assert packages["backport"]["marker"] == "python_version == '3.11'"
    assert "marker" not in packages["user"]
    assert [len(selected(made, python)) for python in ("3.11", "3.12")] == [4, 3]


def test_later_pythons_take_what_the_oldest_got(index: Index, tmp_path: Path) -> None:
    """
    A newer version, or another local label, that only they could have is left. Where they cannot have that of the oldest, as vLLM
    wants an older setuptools behind 3.11, all take theirs; where the oldest cannot, there is no set.
    """
    for project, old, new in (("graphs", "3.6", "3.7"), ("local", "2.11.0", "2.11.0+cu130")):
        index.offer(project, old)
        index.offer(project, new, python=">=3.12")
    bound = "numpy<2.2; python_version > '3.11'"
    path = wheels.vllm(tmp_path / "v", requires=["graphs", "local", "numpy", bound])
    made = resolved(index, [path], tmp_path, pythons=("3.12", "3.11"))
    assert made.packages == {"graphs": "3.6", "local": "2.11.0", "numpy": "2.1.0", "vllm": made.packages["vllm"]}
    never = wheels.vllm(tmp_path / "n", requires=[bound, "numpy>=2.4; python_version < '3.12'"])
    with refusal("set-unresolved", match=r"No set for Python 3\.11"):
        resolved(index, [never], tmp_path, pythons=("3.12", "3.11"))


def test_nothing_but_wheels_with_hashes(index: Index, tmp_path: Path) -> None:
    """A package without a wheel for the machine, or at an address of its own, makes no set; a hash comes from the bytes at least."""
    index.offer("foreign", "1.0", tag="cp312-cp312-macosx_11_0_arm64")
    bare = index.offer("bare", "1.0", hashed=False)
    index.offer("direct", "1.0", [f"numpy @ {index.address}/files/numpy-2.4.0-py3-none-any.whl"])
    for project in ("foreign", "direct"):
        with refusal("set-unresolved"):
            resolved(index, [wheels.vllm(tmp_path / project, requires=[project])], tmp_path)
    made = resolved(index, [wheels.vllm(tmp_path / "bare", requires=["bare"])], tmp_path)
    assert files.sha256_file(bare).encode() in made.lock


def test_the_users_configuration_and_password_do_not_leak(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No variable of uv or pip changes the set, which is asked of the one index; the lock has no password of the index."""
    wheels.plain(tmp_path / "other", "numpy", "9.9")
    monkeypatch.setenv("UV_FIND_LINKS", str(tmp_path / "other"))
    for name in ("UV_EXTRA_INDEX_URL", "UV_INDEX", "UV_DEFAULT_INDEX"):
        monkeypatch.setenv(name, "http://127.0.0.1:9/simple/")
    for setting in ("RESOLUTION=lowest", "PRERELEASE=allow", "EXCLUDE_NEWER=2020-01-01", "TORCH_BACKEND=cpu"):
        monkeypatch.setenv(*f"UV_{setting}".split("="))
    index.offer("numpy", "9.8rc1")
    secret = index.url.replace("http://", "http://user:secret@")
    made = resolved(index, [wheels.vllm(tmp_path / "v", requires=["torch"])], tmp_path, index_url=secret)
    assert made.packages["numpy"] == "2.4.0"
    assert b"secret" not in made.lock


def test_tools_are_locked_from_the_index_of_the_site_alone(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The index that UV_DEFAULT_INDEX names is asked for the tools; no other variable of uv changes their lock."""
    monkeypatch.delenv("SPARKWRIGHT_INDEX_URL")
    monkeypatch.setenv("UV_DEFAULT_INDEX", index.url)
    (tmp_path / "requirements.in").write_text("torch\n")
    made = [pylock.resolve(store.Store(tmp_path / "store"), tmp_path / "requirements.in")]
    for setting in ("RESOLUTION=lowest", "EXCLUDE_NEWER=2020-01-01", "INDEX=http://127.0.0.1:9/simple/"):
        monkeypatch.setenv(*f"UV_{setting}".split("="))
        made.append(pylock.resolve(store.Store(tmp_path / "store"), tmp_path / "requirements.in"))
    assert 'name = "torch"\nversion = "2.15.0"' in made[0]
    assert made == made[:1] * 4
