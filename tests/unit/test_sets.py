"""The matched set: resolved by uv from wheels of ours and one index, locked by hash, and read back as if it were hostile."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from urllib.parse import quote

import pytest
from packaging.markers import default_environment
from packaging.pylock import Pylock
from packaging.tags import sys_tags
from tests.refusals import allowed, refusal
from tests.support import verdicts, wheels
from uv import find_uv_bin

from sparkwright.core.files import sha256_file
from sparkwright.demo import upstreams
from sparkwright.forks import package_index
from sparkwright.forks.stack import Project, stack_names
from sparkwright.release import sets
from sparkwright.release.sets import Pinned, lock, resolving

#: The Python of the tests; what is installed here has to be for it.
PYTHON = f"3.{sys.version_info[1]}"
MACHINE = wheels.MACHINE


class Index:
    """A package index on loopback with the wheels of *folder*; *url* is what uv is told."""

    def __init__(self, folder: Path, address: str) -> None:
        self.folder, self.address, self.url = folder, address, f"{address}/simple/"

    def offer(self, project: str, version: str, requires: Sequence[str] = (), tag: str = "py3-none-any", *, hashed: bool = True) -> Path:
        """Offer a wheel, and return it."""
        return self.take(wheels.plain(self.folder / "made", project, version, requires=requires, tag=tag), hashed=hashed)

    def take(self, made: Path, *, hashed: bool = True) -> Path:
        """Offer the wheel *made*, and return where it lies now."""
        path = self.folder / "files" / made.name
        path.parent.mkdir(exist_ok=True)
        made.rename(path)
        project = path.name.partition("-")[0].replace("_", "-")
        page = self.folder / "simple" / project / "index.html"
        page.parent.mkdir(parents=True, exist_ok=True)
        fragment = f"#sha256={sha256_file(path)}" if hashed else ""
        with page.open("a", encoding="utf-8") as stream:
            stream.write(f'<a href="../../files/{quote(path.name)}{fragment}">{path.name}</a>\n')
        return path


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    """Return an index with torch 2.14.0, a newer one, and what they need."""
    folder = tmp_path / "index"
    (folder / "simple").mkdir(parents=True)
    with upstreams.serve(folder) as address:
        made = Index(folder, address)
        made.offer("torch", "2.14.0", ["numpy>=2"])
        made.offer("torch", "2.15.0", ["numpy>=2"])
        for version in ("1.26.0", "2.1.0", "2.4.0"):
            made.offer("numpy", version)
        yield made


@pytest.fixture
def ours(tmp_path: Path, index: Index) -> list[Path]:
    """Return the wheels of a release, which lie in the index's folder, too, where their addresses lead."""
    made = wheels.release(tmp_path / "release", judged=False, requires=["torch==2.14.0", "certifi>=2026.10.19"])
    index.offer("certifi", "2026.10.18")
    index.offer("ray", "2.60.0")
    for path in made:
        place = index.folder / "files" / sha256_file(path)
        place.mkdir(parents=True)
        (place / path.name).write_bytes(path.read_bytes())
    return made


def urls(index: Index, paths: Sequence[Path]) -> dict[str, str]:
    """Return where the index has wheels of ours."""
    return {path.name: f"{index.address}/files/{sha256_file(path)}/{path.name}" for path in paths}


def resolved(index: Index, paths: Sequence[Path], tmp_path: Path, **changed: object) -> sets.Resolved:
    """Resolve the wheels *paths* for this Python."""
    given = {"python": PYTHON, "overrides": ["certifi>=2026.10.18"], "torch": "2.14.0", "cache": tmp_path / "cache", **changed}
    return sets.resolve(paths, MACHINE, index_url=index.url, urls=urls(index, paths), **given)  # type: ignore[arg-type]  # a test's own words


def test_a_set_is_whole_and_pinned(index: Index, ours: list[Path], tmp_path: Path) -> None:
    """The set holds our wheels at our addresses with hash and size, and what they require from the index, by hash alone."""
    made = resolved(index, ours, tmp_path)
    assert made.packages == {
        "certifi": "2026.10.18",
        "flashinfer-jit-cache": "0.7.2.post1+spark.2026.11.p1a2b3c4d.cu130",
        "flashinfer-python": "0.7.2.post1+spark.2026.11.p1a2b3c4d.cu130",
        "numpy": "2.4.0",
        "sparkwright-cutlass": "4.7.1+spark.2026.11.p1a2b3c4d.cu130",
        "torch": "2.14.0",
        "vllm": "0.33.0+spark.2026.11.p1a2b3c4d.cu130",
    }
    found = {one.name: one for one in sets.select(sets.read(made.lock, "the lock"), list(sys_tags()), marked())}
    assert {name: one.version for name, one in found.items()} == made.packages
    vllm = found["vllm"]
    assert (vllm.filename, vllm.sha256, vllm.size) == (ours[3].name, sha256_file(ours[3]), ours[3].stat().st_size)
    assert vllm.url == urls(index, ours)[ours[3].name]
    assert found["numpy"].sha256 == sha256_file(index.folder / "files" / "numpy-2.4.0-py3-none-any.whl")
    assert resolved(index, ours, tmp_path) == made


def marked(python: str = PYTHON) -> dict[str, str]:
    """Return what markers are evaluated with here, or would be with another *python*."""
    here = {name: str(value) for name, value in default_environment().items()}
    return here if python == PYTHON else {**here, "python_version": python, "python_full_version": f"{python}.0"}


def test_the_lock_is_a_pylock(index: Index, ours: list[Path], tmp_path: Path) -> None:
    """The lock is what PEP 751 asks for, says which machines and Pythons it is for, and has no source but wheels."""
    read = tomllib.loads(resolved(index, ours, tmp_path).lock.decode())
    Pylock.from_dict(read)
    assert read["lock-version"] == "1.0"
    assert read["environments"] == [f"sys_platform == 'linux' and platform_machine == '{MACHINE}' and python_version == '{PYTHON}'"]
    assert all(set(package) == {"name", "version", "wheels"} for package in read["packages"])
    assert str(tmp_path / "release") not in resolved(index, ours, tmp_path).lock.decode()


@pytest.mark.parametrize("installer", ["pip", "uv"])
def test_installers_take_the_requirements(index: Index, ours: list[Path], tmp_path: Path, installer: str) -> None:
    """pip and uv install the whole set from the hashed requirements, without any index, and refuse it when one hash differs."""
    text = resolved(index, ours, tmp_path).requirements.decode()
    environment = tmp_path / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    python = environment / "bin" / "python"
    commands: dict[str, list[str | Path]] = {
        "pip": [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--disable-pip-version-check", "--no-cache-dir"],
        "uv": [find_uv_bin(), "pip", "install", "--quiet", "--python", python, "--cache-dir", tmp_path / "cache"],
    }
    command = commands[installer]
    file = tmp_path / "requirements.txt"
    options: list[str | Path] = ["--no-index", "--no-deps", "--require-hashes", "-r", file]
    sha256 = sha256_file(ours[3])
    file.write_text(text.replace(f"--hash=sha256:{sha256}", f"--hash=sha256:{hashlib.sha256(b'other').hexdigest()}"))
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "hash" in done.stderr.lower()
    assert not list(environment.glob("lib/*/site-packages/vllm"))
    file.write_text(text)
    subprocess.run([*command, *options], check=True)
    assert len(list(environment.glob("lib/*/site-packages/*.dist-info"))) == 7


def test_uv_takes_the_lock(index: Index, ours: list[Path], tmp_path: Path) -> None:
    """uv installs the lock itself."""
    file = tmp_path / f"pylock.{MACHINE}.toml"
    file.write_bytes(resolved(index, ours, tmp_path).lock)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True)
    python = tmp_path / "env" / "bin" / "python"
    command: list[str | Path] = [find_uv_bin(), "pip", "install", "--quiet", "--no-index", "--preview-features", "pylock"]
    subprocess.run([*command, "--python", python, "--cache-dir", tmp_path / "cache", "-r", file], check=True)
    assert len(list((tmp_path / "env").glob("lib/*/site-packages/*.dist-info"))) == 7


def test_every_package_has_one_version_for_all_pythons(index: Index, ours: list[Path], tmp_path: Path) -> None:
    """A lock for several Pythons has one version of each package, their own wheels, and a marker where only some need a package."""
    for python in ("311", "312"):
        index.offer("fast", "1.0", tag=f"cp{python}-cp{python}-manylinux_2_28_{MACHINE}")
    index.offer("fast", "2.0", tag=f"cp312-cp312-manylinux_2_28_{MACHINE}")
    index.offer("backport", "1.0")
    index.offer("user", "1.0", ["fast<2", "backport; python_version < '3.12'"])
    user = wheels.vllm(tmp_path / "user", requires=["user"])
    made = resolved(index, [user], tmp_path, python=("3.12", "3.11"))
    assert made.packages == {"backport": "1.0", "fast": "1.0", "user": "1.0", "vllm": made.packages["vllm"]}
    packages = {one["name"]: one for one in tomllib.loads(made.lock.decode())["packages"]}
    assert [one["name"] for one in packages["fast"]["wheels"]] == [
        f"fast-1.0-cp311-cp311-manylinux_2_28_{MACHINE}.whl", f"fast-1.0-cp312-cp312-manylinux_2_28_{MACHINE}.whl",
    ]  # fmt: skip
    assert packages["backport"]["marker"] == "python_version == '3.11'"
    assert "marker" not in packages["user"]
    read = sets.read(made.lock, "the lock")
    for python, count in (("3.11", 4), ("3.12", 3)):
        assert len(sets.select(read, resolving.tags(python, MACHINE), marked(python))) == count
    # Neither a Python that the lock is not for, nor one that takes no such wheel.
    with refusal("not-provided"):
        sets.select(read, resolving.tags("3.13", MACHINE), marked("3.13"))
    with refusal("not-provided"):
        sets.select(read, [], marked("3.12"))


def test_pythons_that_disagree_are_brought_together(index: Index, tmp_path: Path) -> None:
    """Where each Python by itself gets what the other cannot have, the set has the versions that both can."""
    for version in ("3.6", "3.7"):
        path = wheels.plain(tmp_path / "made", "graphs", version, python=">=3.12" if version == "3.7" else ">=3.9")
        index.take(path)
    for version in ("80.0", "84.0"):
        index.offer("tools", version)
    path = wheels.vllm(tmp_path / "v", requires=["graphs", "tools", "tools<81; python_version > '3.11'"])
    made = resolved(index, [path], tmp_path, python=("3.12", "3.11"))
    assert {name: made.packages[name] for name in ("graphs", "tools")} == {"graphs": "3.6", "tools": "80.0"}
    never = wheels.vllm(tmp_path / "n", requires=["tools==80.0; python_version > '3.11'", "tools==84.0; python_version <= '3.11'"])
    with refusal("set-unresolved"):
        resolved(index, [never], tmp_path, python=("3.12", "3.11"))


def test_without_its_override_the_set_is_unresolved(index: Index, ours: list[Path], tmp_path: Path) -> None:
    """A version that the index lacks makes the set unresolved, with uv's reason; an override replaces the requirement."""
    with refusal("set-unresolved") as caught:
        resolved(index, ours, tmp_path, overrides=[])
    assert any("certifi" in line for line in caught.value.details)


def test_another_torch_is_a_mixed_set(index: Index, tmp_path: Path) -> None:
    """Wheels that want another torch than they were compiled against make no set; where they leave it open, it is the one."""
    wants = wheels.vllm(tmp_path / "a", requires=["torch==2.15.0"])
    with refusal("set-mixed") as caught:
        resolved(index, [wants], tmp_path)
    assert any("2.15.0" in line for line in caught.value.details)
    both = [wheels.vllm(tmp_path / "b", requires=["torch==2.14.0"]), wheels.flashinfer(tmp_path / "b", requires=["torch==2.15.0"])]
    with refusal("set-unresolved"):
        resolved(index, both, tmp_path)
    assert resolved(index, [wheels.vllm(tmp_path / "c", requires=["torch"])], tmp_path).packages["torch"] == "2.14.0"


def test_further_requirements_belong_to_the_set(index: Index, tmp_path: Path) -> None:
    """What the stack's rule names besides is in the set."""
    index.offer("nvidia-cutlass-dsl", "4.4.2")
    index.offer("nvidia-cutlass-dsl", "4.8.0")
    made = resolved(index, [wheels.cutlass(tmp_path / "c")], tmp_path, requires=["nvidia-cutlass-dsl==4.4.2"])
    assert made.packages["nvidia-cutlass-dsl"] == "4.4.2"


def test_nothing_but_wheels_with_hashes(index: Index, tmp_path: Path) -> None:
    """A package without a wheel for the machine, or at an address of its own, makes no set; a hash comes from the bytes at least."""
    index.offer("foreign", "1.0", tag="cp312-cp312-macosx_11_0_arm64")
    bare = index.offer("bare", "1.0", hashed=False)
    index.offer("direct", "1.0", [f"numpy @ {index.address}/files/numpy-2.4.0-py3-none-any.whl"])
    for project in ("foreign", "direct"):
        with refusal("set-unresolved"):
            resolved(index, [wheels.vllm(tmp_path / project, requires=[project])], tmp_path)
    made = resolved(index, [wheels.vllm(tmp_path / "bare", requires=["bare"])], tmp_path)
    assert sha256_file(bare).encode() in made.lock


def test_the_users_configuration_does_not_leak(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither further indexes nor folders that the environment names are asked."""
    other = tmp_path / "other"
    wheels.plain(other, "numpy", "9.9")
    monkeypatch.setenv("UV_FIND_LINKS", str(other))
    monkeypatch.setenv("UV_EXTRA_INDEX_URL", "http://127.0.0.1:9/simple/")
    monkeypatch.setenv("UV_INDEX", "http://127.0.0.1:9/simple/")
    assert resolved(index, [wheels.vllm(tmp_path / "v", requires=["torch"])], tmp_path).packages["numpy"] == "2.4.0"


def test_an_address_is_published_without_its_password(index: Index, tmp_path: Path) -> None:
    """A user's name and password in the index's address do not reach the lock."""
    secret = index.url.replace("http://", "http://user:secret@")
    paths = [wheels.vllm(tmp_path / "v", requires=["torch"])]
    made = sets.resolve(paths, MACHINE, python=PYTHON, index_url=secret, urls=urls(index, paths), cache=tmp_path / "cache")
    assert b"secret" not in made.lock + made.requirements


def test_two_wheels_of_one_project(index: Index, tmp_path: Path) -> None:
    """A set holds one wheel of a project, and wheels alone."""
    twice = [wheels.vllm(tmp_path), wheels.vllm(tmp_path, label="spark.2026.11.2")]
    with refusal("set-mixed"):
        resolved(index, twice, tmp_path)
    with refusal("wheel-invalid"):
        sets.resolve([tmp_path / "vllm.tar.gz"], MACHINE, index_url=index.url, urls={})


def test_the_stacks_rule(index: Index, ours: list[Path], tmp_path: Path) -> None:
    """The repository's rule for a stack locks its wheels, with the torch that the build's own lock names."""
    project = Project(wheels.ROOT, "2026.11")
    assert resolving.torch_of(project.build_folder / "pylock.toml") == "2.14.0"
    assert resolving.torch_of(tmp_path / "absent.toml") == ""
    made = sets.of_stack(project, verdicts.policy(), ours, MACHINE, index_url=index.url, urls=urls(index, ours), cache=tmp_path / "cache")
    assert made.packages["torch"] == "2.14.0"
    assert tomllib.loads(made.lock.decode())["requires-python"] == ">=3.11,<3.15"
    read = sets.read(made.lock, "the lock")
    for python in verdicts.policy().sets["2026.11"].pythons:
        assert {one.name for one in sets.select(read, resolving.tags(python, MACHINE), marked(python))} == set(made.packages)


FILE = "torch-2.14.0-py3-none-any.whl"
TORCH = Pinned("torch", "2.14.0", FILE, f"https://example.org/{FILE}", "ab" * 32, 7)
SOUND = lock.write({TORCH: ["3.12"]}, machine="aarch64", pythons=["3.12"])
SDIST = f'sdist = {{ name = "torch-2.14.0.tar.gz", url = "https://example.org/a.tar.gz", hashes = {{ sha256 = "{"ab" * 32}" }} }}\n'

HOSTILE: dict[str, Callable[[str], str]] = {
    "an HTML page": lambda _: "<!DOCTYPE html>",
    "no TOML": lambda text: text + "[[",
    "no lock": lambda _: 'a = "b"\n',
    "another version of the format": lambda text: text.replace('"1.0"', '"2.0"'),
    "no hash": lambda text: text.replace('sha256 = "', 'md5 = "'),
    "a short hash": lambda text: text.replace("abab", "ab"),
    "a name that leaves the folder": lambda text: text.replace('name = "torch-2', 'name = "../torch-2'),
    "a name with a blank": lambda text: text.replace('name = "torch-2', 'name = "a torch-2'),
    "another project's file": lambda text: text.replace('name = "torch-2', 'name = "numpy-2'),
    "another version's file": lambda text: text.replace('name = "torch-2.14', 'name = "torch-2.15'),
    "a source archive": lambda text: text.replace("torch-2.14.0-py3-none-any.whl", "torch-2.14.0.tar.gz"),
    "an archive in place of wheels": lambda text: text.replace("wheels = [\n  {", "archive = {").replace("},\n]", "}"),
    "a folder": lambda text: text[: text.index("wheels")] + 'directory = { path = "/etc" }\n',
    "a repository": lambda text: (
        text[: text.index("wheels")] + 'vcs = { type = "git", url = "https://example.org/x.git", commit-id = "ab" }\n'
    ),
    "an sdist beside the wheels": lambda text: text + SDIST,
    "a path": lambda text: text.replace('url = "https://example.org/', 'path = "/etc/'),
    "an address of another kind": lambda text: text.replace("https://", "ftp://"),
    "an address with a password": lambda text: text.replace("https://", "https://me:secret@"),
    "a relative address that leaves": lambda text: text.replace("https://example.org/", "../../"),
    "another host without a scheme": lambda text: text.replace("https://example.org/", "//example.org/"),
    "no version": lambda text: text.replace('version = "2.14.0"\n', ""),
    "a choice": lambda text: text.replace("[[packages]]", 'extras = ["cuda"]\n\n[[packages]]', 1),
    "a negative size": lambda text: text.replace("size = 7", "size = -7"),
    "a name that is not normalised": lambda text: text.replace('name = "torch"', 'name = "Torch"'),
    "without end": lambda text: text + "#" * lock.LARGEST,
    "too many packages": lambda text: text + text[text.index("[[packages]]") :] * lock.MOST,
    "nested without end": lambda text: text + "a = " + "[" * 100_000,
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_lock_is_refused(case: str) -> None:
    """A lock with anything but wheels of its own names, with hashes, at addresses that can be asked, is refused."""
    assert sets.read(SOUND, "a lock").versions == {"torch": "2.14.0"}
    data = HOSTILE[case](SOUND.decode()).encode()
    assert data != SOUND
    with refusal("lock-invalid"):
        sets.read(data, "a lock")


def test_no_text_at_all_is_no_lock() -> None:
    """Bytes that are no UTF-8, and none, are no lock."""
    for data in (b"\xff\xfe", b""):
        with refusal("lock-invalid"):
            sets.read(data, "a lock")


def test_two_of_one_name_are_no_selection() -> None:
    """A lock that would install two of one name selects nothing."""
    twice = SOUND + SOUND[SOUND.index(b"[[packages]]") :]
    with allowed("lock-invalid"):
        read = sets.read(twice, "a lock")
        environment = {**marked(), "platform_machine": "aarch64", "python_version": "3.12", "python_full_version": "3.12.3"}
        with refusal("not-provided"):
            sets.select(read, list(sys_tags()), environment)


def test_the_clients_half_needs_little() -> None:
    """Reading and selecting import nothing that an installer on a Spark lacks."""
    heavy = {"git", "numpy", "pypi_simple", "psutil", "docker"}
    script = f"import sys, sparkwright.release.sets; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.network
def test_a_real_set_resolves(tmp_path: Path) -> None:
    """What a wheel of ours wants of the user's real package index is locked for a Spark: wheels for aarch64 with hashes and sizes."""
    path = wheels.flashinfer(tmp_path, requires=["torch==2.14.0", "setuptools<81; python_version > '3.11'"])
    at = {path.name: f"https://example.org/{path.name}"}
    made = sets.resolve([path], "aarch64", index_url=package_index.index_url(), urls=at, torch="2.14.0")
    found = {one.name: one for one in sets.select(
        sets.read(made.lock, "the lock"), [*resolving.tags("3.12", "aarch64")],
        {**marked(), "platform_machine": "aarch64", "python_version": "3.12", "python_full_version": "3.12.3"},
    )}  # fmt: skip
    assert found["flashinfer-python"].url == at[path.name]
    assert (found["torch"].version, found["torch"].size > 10**8) == ("2.14.0", True)
    assert all(one.filename.endswith(("any.whl", "aarch64.whl")) for one in found.values())


def test_the_set_of_every_stack_has_ray() -> None:
    """vLLM serves over two machines through it, and does not require it by itself."""
    rules = verdicts.policy().sets
    without = [stack for stack in stack_names(wheels.ROOT) if not any(one.startswith("ray>=") for one in rules[stack].requires)]

    assert without == []
