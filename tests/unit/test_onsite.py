"""What is installed on the user's machine: the pinned bytes, the reviewed edits, a RECORD that is true, and a way back."""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.metadata
import io
import json
import os
import py_compile
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging import tags
from tests.refusals import refusal
from tests.support.mounts import mounting_shell
from uv import find_uv_bin

from sparkwright.builder.wheel import archive
from sparkwright.builder.wheel.archive import WheelName
from sparkwright.core import strict_yaml
from sparkwright.core.files import sha256_file
from sparkwright.core.store import Store
from sparkwright.demo import upstreams
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import Project
from sparkwright.release import layout, onsite, spec
from sparkwright.release.onsite import Installed
from sparkwright.release.spec import Package

ROOT = Path(__file__).parents[2]
VERSION = "1.0"

#: What the wheels hold. The third lies over the second, with other bytes in two of three files.
META = {"mini_dsl_start.py": b"START = True\n"}
BASE = {"mini_dsl/__init__.py": b"", "mini_dsl/guard.py": b"OLD = True\nADMITTED = arch == 120\n", "mini_dsl/lib.so": b"\x7fELF base"}
CU13 = {
    "mini_dsl/__init__.py": b"",
    "mini_dsl/guard.py": b"def admits(arch):\n    return arch == 120\n",
    "mini_dsl/lib.so": b"\x7fELF cu13" * 500_000,
    "mini_dsl/new.py": b"NEW = 1\nOTHER = 1\n",
}
GUARD = "mini_dsl/guard.py"
EDITED = CU13[GUARD].replace(b"arch == 120", b"arch in (120, 121)")
WHEELS = {"mini-dsl": META, "mini-dsl-libs-base": BASE, "mini-dsl-libs-cu13": CU13}

Tree = dict[str, bytes]


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def packed(folder: Path, name: str, files: Mapping[str, bytes], version: str = VERSION) -> Path:
    """Write a wheel."""
    made = WheelName(name.replace("-", "_"), version, "py3-none-any")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / made.filename
    archive.write(path.parent, made, files, f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n", pure=True)
    return path


class Site:
    """
    A virtual environment, and a project that installs three wheels of a loopback index into it.

    Args:
        index: The folder of the index.

    Attributes:
        spec: What onsite.yaml holds, to be changed by a test.
    """

    def __init__(self, folder: Path, index: Path) -> None:
        self.folder, self.root, self.venv, self.index = folder, folder / "project", folder / "venv", index
        self.wheels = {name: packed(index / "files", name, files) for name, files in WHEELS.items()}
        self.uv("venv", "--python", sys.executable, self.venv)
        self.site = next(self.venv.glob("lib/python3.*/site-packages"))
        stack = self.root / "forks" / "mini"
        stack.mkdir(parents=True)
        (stack / "stack.yaml").write_text('stack: mini\narch: "12.1f"\nlabel: mini\nforks: {}\n')
        self.spec: dict[str, Any] = {
            "reason": "the test wants it",
            "packages": [{"name": name, "version": VERSION} for name in self.wheels],
            "edits": [
                {"name": "admit-121", "package": "mini-dsl-libs-cu13", "file": GUARD, "before": sha(CU13[GUARD]), "after": sha(EDITED),
                 "changes": [{"anchor": "arch == 120", "replacement": "arch in (120, 121)"}],
                 "reason": "the test wants it", "drop_when": "the test ends"}
            ],
        }  # fmt: skip
        self.spec["packages"][2]["over"] = {"mini-dsl-libs-base": 3}
        for number in range(3):
            self.offer(number)

    def offer(self, number: int, path: Path | None = None) -> None:
        """Offer the wheel *path*, or as it is now that of package *number*, on the index, and pin it."""
        package = self.spec["packages"][number]
        path = path or self.wheels[package["name"]]
        self.wheels[package["name"]] = path
        package["wheels"] = {path.name: sha256_file(path)}
        page = self.index / "simple" / package["name"] / "index.html"
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(f'<!DOCTYPE html><html><body><a href="../../files/{path.name}">{path.name}</a></body></html>')

    def uv(self, *words: str | Path) -> str:
        command = [find_uv_bin(), "--offline", "--quiet", "--cache-dir", str(self.folder / "uv"), *map(str, words)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def pip(self, verb: str, *words: str | Path) -> None:
        """Let uv install or uninstall in the environment."""
        options = ("--no-index", "--no-deps", "--reinstall", "--link-mode", "copy") if verb == "install" else ()
        self.uv("pip", verb, "--python", self.venv / "bin" / "python", *options, *words)

    def context(self) -> RunContext:
        (self.root / "forks" / "mini" / "onsite.yaml").write_text(strict_yaml.dump(self.spec))
        return RunContext(Project(self.root, "mini"), Store(self.folder / "store"), (), self.folder / "dist")

    def install(self, *, restore: bool = False) -> Installed:
        context = self.context()
        wanted = spec.load(context.project)
        assert wanted is not None
        return onsite.install(context.store, wanted, self.venv, offline=context.offline, restore=restore)

    def command(self, *words: str | Path) -> list[str]:
        """Return the command line of the verb."""
        self.context()
        options = ["--root", self.root, "--stack", "mini", "--cache-dir", self.folder / "store", "--into", self.venv]
        return [sys.executable, "-m", "sparkwright", "install", "--onsite", *map(str, [*options, *words])]

    def tree(self, *, kept: bool = True) -> Tree:
        """Return every file of the site-packages but uv's own; without *kept*, none that an installer adds to ``.dist-info``."""
        added = ("RECORD", "INSTALLER", "REQUESTED", "sparkwright.json", "direct_url.json", "uv_cache.json")
        files = {path.relative_to(self.site).as_posix(): path.read_bytes() for path in self.site.rglob("*") if path.is_file()}
        return {
            name: data for name, data in files.items() if "mini" in name and (kept or name.rpartition("/")[2] not in added)
        }  # fmt: skip

    def records(self) -> dict[str, set[str]]:
        """Check every row of every RECORD against the disk, by Python's own reader, and return the files of each package."""
        owned: dict[str, set[str]] = {}
        for one in importlib.metadata.distributions(path=[str(self.site)]):
            rows = list(csv.reader(io.StringIO(one.read_text("RECORD") or "")))
            owned[one.name] = {row[0] for row in rows}
            for name, value, count in rows:
                data = (self.site / name).read_bytes()
                if not name.endswith(".dist-info/RECORD"):
                    plain = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
                    assert (value, count) == (f"sha256={plain}", str(len(data))), name
        return owned


@pytest.fixture(name="indexes", scope="module")
def _indexes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """Return a folder and the address that serves it."""
    folder = tmp_path_factory.mktemp("indexes")
    with upstreams.serve(folder) as address:
        yield folder, address


@pytest.fixture(name="bare")
def _bare(tmp_path: Path, indexes: tuple[Path, str]) -> Site:
    """Return an environment; the index of its project is not the one that is asked."""
    return Site(tmp_path / "onsite", Path(tempfile.mkdtemp(dir=indexes[0])))


@pytest.fixture(name="site")
def _site(bare: Site, indexes: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> Site:
    """Return an environment whose project's index is asked."""
    monkeypatch.setenv("SPARKWRIGHT_INDEX_URL", f"{indexes[1]}/{bare.index.name}/simple/")
    return bare


def merged(**changed: bytes) -> Tree:
    """Return the files as wheels that lie over each other make them."""
    return {**META, **BASE, **CU13, **changed}


def payload(tree: Tree) -> Tree:
    return {name: data for name, data in tree.items() if ".dist-info/" not in name}


# What is there afterwards.


def test_the_last_wheel_is_on_top_and_edited(site: Site) -> None:
    """Every file has the bytes of the last wheel that holds it, the edited one its edit, and the figures say so."""
    done = site.install()

    assert payload(site.tree()) == merged(**{GUARD: EDITED})
    assert [(one.files, one.differ) for one in done.shared] == [(3, 2)]
    assert [(edit.state, edit.sha256) for edit in done.edits] == [("made", sha(EDITED))]
    assert done.written == done.files == len(site.tree())
    assert list(done.wheels) == [path.name for path in site.wheels.values()]


def test_every_record_is_true_and_every_file_has_one_owner(site: Site) -> None:
    """Each row of each RECORD is what is on disk, no file is in two of them, and none is in no RECORD."""
    site.install()
    owned = site.records()

    assert sum(map(len, owned.values())) == len(set().union(*owned.values()))
    assert set(site.tree()) == set().union(*owned.values())
    assert owned["mini-dsl-libs-base"].isdisjoint(BASE)
    assert owned["mini-dsl-libs-cu13"] >= set(CU13)


def test_unedited_it_is_what_an_installer_makes_in_that_order(site: Site, tmp_path: Path) -> None:
    """Byte for byte and mode for mode, the result is that of uv with one wheel after the other."""
    site.install(restore=True)
    other = Site(tmp_path / "other", tmp_path / "index")
    for path in site.wheels.values():
        other.pip("install", path)

    assert site.tree(kept=False) == other.tree(kept=False)
    for name in site.tree(kept=False):
        assert os.access(site.site / name, os.X_OK) == os.access(other.site / name, os.X_OK), name


def test_the_note_says_where_it_came_from(site: Site) -> None:
    """The .dist-info names the installer, the wheel by hash, and the edit."""
    site.install()
    info = site.site / "mini_dsl_libs_cu13-1.0.dist-info"
    note = json.loads((info / "sparkwright.json").read_bytes())

    assert (info / "INSTALLER").read_text() == "sparkwright\n"
    assert note["sha256"] == sha256_file(site.wheels["mini-dsl-libs-cu13"])
    assert [(edit["name"], edit["after"]) for edit in note["edits"]] == [("admit-121", sha(EDITED))]


def test_python_sees_the_edit(site: Site) -> None:
    """The environment's Python runs the edited file, although a compiled form of the old one lay there that it must not check."""
    for path in site.wheels.values():
        site.pip("install", path)
    py_compile.compile(str(site.site / GUARD), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    ask = [str(site.venv / "bin" / "python"), "-c", "from mini_dsl.guard import admits; print(admits(121))"]

    assert subprocess.run(ask, capture_output=True, text=True, check=True).stdout == "False\n"
    site.install()
    assert subprocess.run(ask, capture_output=True, text=True, check=True).stdout == "True\n"


def test_a_second_run_writes_nothing(site: Site) -> None:
    """It finds the edit there already, and every file keeps its time."""
    site.install()
    before = {path: path.stat().st_mtime_ns for path in site.site.rglob("*")}
    done = site.install()

    assert [edit.state for edit in done.edits] == ["there already"]
    assert done.written == 0
    assert {path: path.stat().st_mtime_ns for path in site.site.rglob("*")} == before


# What was there before.


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (2,), (1,)])
def test_what_an_installer_left_is_put_in_order(site: Site, order: tuple[int, ...]) -> None:
    """Whatever uv installed before and in which order, the result is the same, and nothing of uv's bookkeeping stays."""
    for number in order:
        site.pip("install", list(site.wheels.values())[number])
    site.install()

    assert payload(site.tree()) == merged(**{GUARD: EDITED})
    assert set(site.tree()) == set().union(*site.records().values())


def test_a_file_changed_by_hand_is_left_alone(site: Site) -> None:
    """A file that is neither of a wheel nor of an edit stops the run, by name, and nothing is changed; --restore is the way on."""
    site.pip("install", *site.wheels.values())
    (site.site / GUARD).write_bytes(b"ADMITTED = True\n")
    before = site.tree()

    with refusal("onsite-mismatch") as caught:
        site.install()
    assert caught.value.details == (GUARD,)
    assert site.tree() == before

    assert [edit.state for edit in site.install(restore=True).edits] == ["taken back"]
    assert payload(site.tree()) == merged()
    assert [edit.state for edit in site.install().edits] == ["made"]


def test_restore_takes_the_edit_back(site: Site) -> None:
    """After an edit and its restoration the environment is as if there had been none, and its RECORDs say so."""
    site.install(restore=True)
    before = site.tree()
    site.install()
    assert site.tree() != before
    site.install(restore=True)

    assert site.tree() == before
    site.records()


def test_a_hard_link_into_a_cache_is_cut(site: Site, tmp_path: Path) -> None:
    """The other name of a file, as in uv's cache, keeps its bytes."""
    site.install(restore=True)
    os.link(site.site / GUARD, tmp_path / "cached.py")
    site.install()

    assert (tmp_path / "cached.py").read_bytes() == CU13[GUARD]
    assert (site.site / GUARD).read_bytes() == EDITED


@pytest.mark.parametrize("name", ["mini-dsl-libs-base", "Mini.DSL_libs-BASE", "other"])
def test_another_owner_is_not_pushed_aside(site: Site, tmp_path: Path, name: str) -> None:
    """Another version of a package, or another package with the same file, is named with the command that removes it."""
    plain = name.lower().replace(".", "-").replace("_", "-")
    site.pip("install", packed(tmp_path / "older", plain, {"mini_dsl/lib.so": b"older"}, "0.9"))
    if name != plain:
        (site.site / "mini_dsl_libs_base-0.9.dist-info").rename(site.site / f"{name}-0.9.dist-info")
    before = site.tree()

    with refusal("environment-unusable") as caught:
        site.install()
    assert caught.value.todo.endswith(f" {name if name != plain else plain.replace('-', '_')}")
    assert site.tree() == before


def test_a_neighbour_is_no_owner(site: Site, tmp_path: Path) -> None:
    """Packages with other files do not matter, nor do leftovers without a RECORD."""
    site.pip("install", packed(tmp_path / "wheels", "mini-neighbour", {"mini_neighbour.py": b""}))
    (site.site / "broken-1.dist-info").mkdir()

    assert site.install().written > 0


# What does not fit.


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"before": "0" * 64}, "before the edit"),
        ({"after": "0" * 64}, "after the edit"),
        ({"changes": [{"anchor": "NEW = 3", "replacement": ""}]}, "occurs 0 times"),
        ({"changes": [{"anchor": "= 1", "replacement": ""}]}, "occurs 2 times"),
        ({"package": "mini-dsl-libs-base"}, "comes from mini-dsl-libs-cu13"),
        ({"file": "mini_dsl/none.py"}, "is in no wheel"),
    ],
)
def test_an_edit_that_does_not_fit_changes_nothing(site: Site, change: dict[str, Any], says: str) -> None:
    """A wrong hash, an anchor that is not there once, or a file of another package stops the run, the good edit before it included."""
    name, data = "mini_dsl/new.py", CU13["mini_dsl/new.py"]
    changes = [{"anchor": "NEW = 1", "replacement": "NEW = 2"}]
    second = {"name": "second", "file": name, "before": sha(data), "after": sha(data.replace(b"NEW = 1", b"NEW = 2")), "changes": changes}
    site.spec["edits"].append(site.spec["edits"][0] | second | change)

    with refusal("onsite-mismatch", match=says):
        site.install()
    assert site.tree() == {}


@pytest.mark.parametrize(("over", "found"), [({}, 3), ({"mini-dsl-libs-base": 2}, 3), ({"mini-dsl-libs-base": 3, "mini-dsl": 1}, 0)])
def test_another_number_of_shared_files_stops_it(site: Site, over: dict[str, int], found: int) -> None:
    """Wheels that share more or fewer files than reviewed are not the wheels that somebody looked at."""
    site.spec["packages"][2]["over"] = over

    with refusal("onsite-mismatch") as caught:
        site.install()
    assert caught.value.details[1] == f"found:    {found}"
    assert site.tree() == {}


def test_another_wheel_under_the_same_name_is_refused(site: Site) -> None:
    """What the index delivers is held against the reviewed hash."""
    packed(site.index / "files", "mini-dsl-libs-base", {"mini_dsl/lib.so": b"other"})

    with refusal("source-mismatch"):
        site.install()
    assert site.tree() == {}


def test_offline_takes_what_is_in_the_store(bare: Site) -> None:
    """Without a network, an empty store is an error of its own."""
    context = RunContext(bare.context().project, Store(bare.folder / "store"), (), bare.folder, offline=True)
    wanted = spec.load(context.project)
    assert wanted is not None

    with refusal("offline"):
        onsite.install(context.store, wanted, bare.venv, offline=True)


def repack(path: Path, files: dict[str, bytes], record: Callable[[str], str] = str) -> Path:
    """Write the wheel *path* anew with more *files*, which RECORD knows, and RECORD passed through *record*."""
    with zipfile.ZipFile(path) as old:
        members = {name: old.read(name) for name in old.namelist()} | files
    name = next(name for name in members if name.endswith("/RECORD"))
    rows = [f"{one},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip('=')},{len(data)}\n"
            for one, data in members.items() if one != name]  # fmt: skip
    members[name] = record("".join([*rows, f"{name},,\n"])).encode()
    with zipfile.ZipFile(path, "w") as new:
        for one, data in members.items():
            new.writestr(one, data)
    return path


@pytest.mark.parametrize(
    ("files", "record"),
    [
        ({"mini_dsl-1.0.data/scripts/tool": b"#!python\n"}, str),
        ({"mini_dsl-1.0.dist-info/entry_points.txt": b"[console_scripts]\n"}, str),
        ({}, lambda text: text.replace("mini_dsl_start.py,sha256=", "mini_dsl_start.py,md5=")),
        ({}, lambda text: text.replace("mini_dsl_start.py,sha256=", "mini_dsl_start.py,sha256=AAAA")),
        ({}, lambda text: text.replace("mini_dsl_start.py,", "another.py,")),
    ],
)
def test_a_wheel_that_only_an_installer_can_place_is_refused(site: Site, files: dict[str, bytes], record: Callable[[str], str]) -> None:
    """Scripts, data folders and a RECORD that does not know a file by sha256 are refused before anything is written."""
    site.offer(0, repack(site.wheels["mini-dsl"], files, record))

    with refusal("wheel-invalid"):
        site.install()
    assert site.tree() == {}


def test_a_member_that_record_denies_is_not_left_behind(site: Site) -> None:
    """A file whose bytes are not those of its RECORD does not get its name."""
    site.offer(0, repack(site.wheels["mini-dsl"], {}, lambda text: text.replace(text.split("mini_dsl_start.py,sha256=")[1][:43], "A" * 43)))

    with refusal("wheel-invalid"):
        site.install()
    assert not list(site.site.rglob("*mini_dsl_start*"))


def test_a_member_outside_the_environment_is_refused(site: Site) -> None:
    """A wheel that names a path outside is refused, and nothing is written there or here."""
    site.offer(0, repack(site.wheels["mini-dsl"], {"../../outside.py": b""}))

    with pytest.raises(Exception, match="leave its folder"):
        site.install()
    assert site.tree() == {}


# The environment.


def test_a_link_that_leads_out_is_not_followed(site: Site, tmp_path: Path) -> None:
    """A folder of the site-packages that is a link to elsewhere stays as it is, and so does what lies there."""
    (tmp_path / "elsewhere").mkdir()
    (site.site / "mini_dsl").symlink_to(tmp_path / "elsewhere")

    with refusal("environment-unusable", match="leads out"):
        site.install()
    assert not any((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize("python", [None, "", "#!/bin/sh\nexit 3\n", "#!/bin/sh\necho hello\n", "#!/bin/sh\n", "not a program\n"])
def test_a_folder_without_a_python_is_no_environment(site: Site, python: str | None) -> None:
    """No folder, no Python in it, or one that answers something else."""
    (site.venv / "bin" / "python").unlink()
    if python is None:
        shutil.rmtree(site.venv)
    elif python:
        (site.venv / "bin" / "python").write_text(python)
        (site.venv / "bin" / "python").chmod(0o755)

    with refusal("environment-unusable", match="not a Python environment"):
        site.install()


def python_that_says(site: Site, **answers: object) -> None:
    """Put a program in the place of the environment's Python that gives the real answer, changed."""
    link = site.venv / "bin" / "python"
    real = link.readlink()
    text = (
        f"import json, subprocess, sys\nreal = json.loads(subprocess.check_output([{str(site.venv / 'bin' / 'real')!r}, *sys.argv[1:]]))\n"
    )
    (site.venv / "bin" / "real").symlink_to(real)
    link.unlink()
    link.write_text(f"#!{sys.executable}\n{text}print('from a .pth file')\nprint(json.dumps(real | {answers!r}))\n")
    link.chmod(0o755)


def test_words_before_the_answer_do_not_matter(site: Site) -> None:
    """A Python whose .pth files print is asked all the same."""
    python_that_says(site)

    assert site.install().written > 0


@pytest.mark.parametrize(("answers", "says"), [({"managed": True}, "package manager"), ({"plat": "/usr"}, "two folders")])
def test_a_python_that_is_not_the_users_own_is_refused(site: Site, answers: dict[str, object], says: str) -> None:
    """What the operating system's packages own is not for us, nor is a layout that wheels of ours cannot lie in."""
    python_that_says(site, **answers)

    with refusal("environment-unusable", match=says):
        site.install()
    assert site.tree() == {}


def test_a_python_that_no_wheel_is_for_is_named(site: Site) -> None:
    """Another interpreter or version gets a list of the wheels, and nothing is downloaded."""
    site.spec["packages"][2]["wheels"] = {"mini_dsl_libs_cu13-1.0-cp39-cp39-manylinux_2_28_aarch64.whl": "0" * 64}

    with refusal("not-provided", match="No wheel of mini-dsl-libs-cu13"):
        site.install()


def test_a_read_only_environment_is_said_to_be_one(site: Site) -> None:
    """On a file system that takes no writes the run ends with environment-unusable, and the environment is as it was."""
    bind = (
        f'mount --bind "{site.venv}" "{site.venv}" && mount -o remount,bind,ro "{site.venv}" && "$@"; s=$?; umount "{site.venv}"; exit $s'
    )
    command = [*mounting_shell(), bind, "sh", *site.command("--json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)

    assert done.returncode == 1, done.stderr
    assert json.loads(done.stdout)["error"]["reference"] == "environment-unusable"
    assert site.tree() == {}


def test_a_folder_in_the_place_of_a_file_is_said_to_be_one(site: Site) -> None:
    """What stands in the way is named, and not removed."""
    (site.site / "mini_dsl" / "new.py" / "kept").mkdir(parents=True)

    with refusal("environment-unusable", match="cannot be read or changed"):
        site.install()
    assert (site.site / "mini_dsl" / "new.py" / "kept").is_dir()


# Killed, and twice at once.


@pytest.mark.parametrize("files", [1, 3, 40])
def test_killed_anywhere_the_next_run_finishes(site: Site, tmp_path: Path, files: int) -> None:
    """After kill -9 in the middle no file is half there under its name, no package counts as installed, and the next run finishes."""
    many = CU13 | {f"mini_dsl/part{number}.bin": os.urandom(1000) * 500 for number in range(120)}
    site.offer(2, packed(site.index / "files", "mini-dsl-libs-cu13", many))
    child = subprocess.Popen(site.command(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while len(list(site.site.glob("mini_dsl/*"))) < files and child.poll() is None:
        time.sleep(0.001)
    child.send_signal(signal.SIGKILL)

    assert child.wait() == -signal.SIGKILL
    left = {name: data for name, data in payload(site.tree()).items() if not name.endswith(".sparkwright")}
    assert left == {name: ({**META, **BASE, **many, GUARD: EDITED})[name] for name in left}
    assert not list(site.site.glob("*.dist-info"))

    assert 0 < site.install().written <= len(many) + 20
    assert payload(site.tree()) == {**META, **BASE, **many, GUARD: EDITED}
    assert set(site.tree()) == set().union(*site.records().values())


def test_two_runs_at_once_do_not_meet(site: Site) -> None:
    """The second waits for the first and then finds everything there."""
    runs = [subprocess.Popen(site.command("--json"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [run.communicate(timeout=100) for run in runs]

    assert [run.returncode for run in runs] == [0, 0], said
    assert sorted(json.loads(out)["installed"]["written"] > 0 for out, _ in said) == [False, True]
    site.records()


# Removed again.


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_uninstalling_takes_everything(site: Site, order: tuple[int, ...]) -> None:
    """In any order of removal, nothing of the packages is left."""
    site.install()
    for number in order:
        site.pip("uninstall", list(site.wheels)[number])

    assert site.tree() == {}


def test_removing_the_lower_package_leaves_the_upper_one_whole(site: Site) -> None:
    """Unlike after an installer, no file is in the RECORD of a package that it did not come from."""
    site.install()
    site.pip("uninstall", "mini-dsl-libs-base")

    assert payload(site.tree()) == merged(**{GUARD: EDITED})


def test_pip_uninstalls_it_too(site: Site, tmp_path: Path) -> None:
    """pip reads the same RECORD."""
    site.install()
    pip = subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True, check=False)
    if pip.returncode:
        # The environment that runs this has none; a venv of the standard library brings the bundled one.
        subprocess.run([sys.executable, "-m", "venv", tmp_path / "pip"], check=True)
    program = tmp_path / "pip" / "bin" / "python" if pip.returncode else Path(sys.executable)
    words = ["-m", "pip", "--python", str(site.venv / "bin" / "python"), "uninstall", "--yes", *site.wheels]
    subprocess.run([program, *words], check=True, capture_output=True)

    assert site.tree() == {}


# The reviewed file.


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda made: made["packages"][1].update(over={"mini-dsl-libs-cu13": 3}), "is not before it"),
        (lambda made: made["packages"][1].update(over={"mini-dsl": 0}), ">= 1"),
        (lambda made: made["packages"][1].update(version="1.1"), "is no wheel of mini-dsl-libs-base 1.1"),
        (lambda made: made["packages"][1].update(wheels={"mini.zip": "0" * 64}), "is no wheel of"),
        (lambda made: made["packages"][1].update(wheels={"mini_dsl_libs_base-1.0-py3-none-any.whl": "0"}), "regex"),
        (lambda made: made["packages"].append(made["packages"][0]), "is there twice"),
        (lambda made: made.update(packages=[]), "length >= 1"),
        (lambda made: made["edits"][0].update(package="other"), "there is no package other"),
        (lambda made: made["edits"][0].update(file="../outside.py"), "leaves the environment"),
        (lambda made: made["edits"][0].update(changes=[]), "length >= 1"),
        (lambda made: made["edits"][0].update(reason=" "), "regex"),
        (lambda made: made["edits"].append(made["edits"][0]), "is edited twice"),
        (lambda made: made.update(command="rm"), "unknown field"),
    ],
)
def test_a_file_that_does_not_hold_together_is_refused(bare: Site, change: Callable[[dict[str, Any]], None], says: str) -> None:
    """Names that refer to nothing, and values of another kind, are found on reading."""
    bare.spec = json.loads(json.dumps(bare.spec))
    change(bare.spec)

    with refusal("file-invalid") as caught:
        spec.load(bare.context().project)
    assert says in " ".join(caught.value.details)


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("minor", [10, 11, 12, 13, 14])
def test_the_real_file_has_a_wheel_for_every_python_and_machine(minor: int, machine: str) -> None:
    """Of each package exactly one wheel is for a Python on a machine, and all three are of one version."""
    wanted = strict_yaml.load(ROOT / "forks" / "2026.05" / "onsite.yaml", spec.OnsiteSpec)
    platform = [f"manylinux_2_28_{machine}"]
    accepted = frozenset([*tags.cpython_tags((3, minor), [f"cp3{minor}"], platform), *tags.compatible_tags((3, minor), platforms=platform)])
    chosen = [package.wheel(accepted) for package in wanted.packages]

    assert {package.version for package in wanted.packages} == {"4.4.2"}
    assert all(f"cp3{minor}-manylinux_2_28_{machine}" in name for name in chosen[1:])
    assert [package.name for package in wanted.packages][-1] == "nvidia-cutlass-dsl-libs-cu13"


def test_the_real_file_is_of_a_stack() -> None:
    """It is found where the program looks for it, and holds together."""
    assert spec.load(Project(ROOT, "2026.05")) is not None
    assert spec.load(Project(ROOT, "2026.11")) is None


NAMES = st.sampled_from([f"package/{letter}.py" for letter in "abcdef"])


@settings(max_examples=40)
@given(held=st.lists(st.dictionaries(NAMES, st.binary(max_size=3)), min_size=3, max_size=3))
def test_layers_are_a_union_in_which_the_last_wins(held: list[Tree]) -> None:
    """For any wheels, each file is the last one's, and the RECORDs share the files out among the packages."""
    with tempfile.TemporaryDirectory() as name:
        paths = [packed(Path(name), f"layer-{number}", files) for number, files in enumerate(held)]
        over = [{f"layer-{low}": len(held[low].keys() & files.keys()) for low in range(high)} for high, files in enumerate(held)]
        packages = [Package(f"layer-{number}", VERSION, {path.name: "0" * 64}, over[number]) for number, path in enumerate(paths)]
        made = layout.make(list(zip(packages, paths, strict=True)), ())
        united = {name: data for files in held for name, data in files.items()}
        rows = [
            row[0] for name, file in made.files.items() if name.endswith("/RECORD") for row in csv.reader(io.StringIO(file.data.decode()))
        ]

    assert {name: file.sha256 for name, file in made.files.items() if ".dist-info/" not in name} == {
        name: sha(data) for name, data in united.items()
    }
    assert sorted(rows) == sorted(made.files)


# The verb.


def test_the_verb_says_what_it_covers(site: Site) -> None:
    """People read that the wheels themselves are another matter, and what was done; a second run and --restore say so, too."""
    first, second, third = (
        subprocess.run(site.command(*words), capture_output=True, text=True, check=True) for words in ((), (), ("--restore",))
    )

    assert "the wheels themselves are not installed" in first.stderr
    assert ["made" in one.stdout for one in (first, second)] == [True, False]
    assert "there already" in second.stdout
    assert "taken back" in third.stdout


def test_a_stack_without_the_file_has_nothing_to_do(bare: Site) -> None:
    """It says so and succeeds, whatever --into names."""
    command = bare.command("--json")
    (bare.root / "forks" / "mini" / "onsite.yaml").unlink()
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert (done.returncode, json.loads(done.stdout)) == (0, {"schema": 1, "installed": None})
    assert "nothing to do on site" in done.stderr


def test_the_verb_wants_an_environment(bare: Site) -> None:
    """Without --into nothing is guessed."""
    command = bare.command()[:-2]

    assert subprocess.run(command, capture_output=True, check=False).returncode == 2
