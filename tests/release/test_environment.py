"""What is installed and then changed, by others, by going back, by leaving, or by a run that was killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.refusals import refusal
from tests.release import world
from tests.release.attacks import NEWEST, OLDER, Scene
from tests.support import forked, wheels

from sparkwright.builder.wheel.archive import WheelName
from sparkwright.cli import main
from sparkwright.core.files import sha256_bytes, sha256_file
from sparkwright.forks.package_index import path_of
from sparkwright.release import environment
from sparkwright.release.client import back, health, install, packages, state
from sparkwright.release.client.health import Fault
from sparkwright.release.client.install import Done
from sparkwright.release.environment import Environment

GUARD = b"def admits(arch):\n    return arch == 120\n"
EDITED = GUARD.replace(b"== 120", b"in (120, 121)")


def installs(scene: Scene, **wish: object) -> Done:
    return install.install(scene.user.context(), scene.user.venv, world.wish(scene.index, **wish))


def place(scene: Scene) -> Environment:
    return environment.probe(scene.user.venv)


def faults(scene: Scene, *, deep: bool = False) -> tuple[Fault, ...]:
    return health.look(place(scene), state.required(place(scene)), deep=deep)


def contents(scene: Scene) -> dict[str, str]:
    """Return every file of site-packages and its hash, less what differs between equal installations."""
    own = ("_sparkwright_caches.py",)
    return {name: value for name, value in scene.user.listing().items() if "site-packages" in name and not name.endswith(own)}


def whole(scene: Scene, name: str) -> bool:
    """Is that release there, untouched to the last byte, and nothing under way?"""
    known = state.installed(place(scene))
    return known is not None and known.chosen.name == name and not faults(scene, deep=True) and state.installing(place(scene)) is None


# Looking.


def replaced(scene: Scene) -> None:
    scene.user.pip("install", wheels.plain(scene.user.folder / "made", "torch", "2.13.0"))


def rebuilt(scene: Scene) -> None:
    scene.user.pip("install", wheels.plain(scene.user.folder / "made", "torch", "2.14.0"))


def removed(scene: Scene) -> None:
    scene.user.pip("uninstall", "torch")


def edited(scene: Scene) -> None:
    (scene.user.site / "torch" / "__init__.py").write_text("print('changed')\n")


def deleted(scene: Scene) -> None:
    (scene.user.site / "torch" / "data.bin").unlink()


def doubled(scene: Scene) -> None:
    shutil.copytree(scene.user.site / "torch-2.14.0.dist-info", scene.user.site / "torch-2.12.0.dist-info")


@pytest.mark.parametrize(
    ("harm", "kind", "says"),
    [
        (replaced, "replaced", "replaced by 2.13.0, installed by uv from file:"),
        (rebuilt, "replaced", "other bytes of the same version, installed by uv from file:"),
        (removed, "removed", "removed"),
        (edited, "changed", "1 files changed or missing: torch/__init__.py"),
        (deleted, "changed", "1 files changed or missing: torch/data.bin"),
        (doubled, "doubled", "there twice, also as 2.12.0"),
    ],
)
def test_what_others_did_is_seen_named_and_put_back(scene: Scene, harm: Callable[[Scene], None], kind: str, says: str) -> None:
    """Doctor says which package and who; install refuses to call it installed; --repair puts back that package and nothing else."""
    installs(scene)
    harm(scene)
    [fault] = faults(scene)
    assert (fault.project, fault.kind) == ("torch", kind)
    assert says in fault.says
    done = scene.user.run("doctor", "--json")
    assert (done.returncode, json.loads(done.stdout)["error"]["faults"][0]["project"]) == (1, "torch")
    with refusal("environment-broken", match="no longer holds"):
        installs(scene)

    assert installs(scene, repair=True).came == ("torch",)
    assert whole(scene, NEWEST)


def test_the_same_bytes_put_there_again_are_no_fault(scene: Scene) -> None:
    """A package that somebody reinstalled from the very wheel is what it was, whatever the times of its files."""
    installs(scene)
    scene.user.pip("install", scene.host.made["others"][0])

    assert faults(scene) == faults(scene, deep=True) == ()
    assert installs(scene).state == "there already"


def test_a_byte_changed_behind_its_time_is_found_when_every_byte_is_read(scene: Scene) -> None:
    """Size and time can be forged, so there is a look that believes neither."""
    installs(scene)
    path = scene.user.site / "torch" / "__init__.py"
    before = path.stat()
    path.write_bytes(path.read_bytes()[::-1])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))

    assert faults(scene) == ()
    assert [fault.files for fault in faults(scene, deep=True)] == [("torch/__init__.py",)]


def _bent(scene: Scene) -> Path:
    """Return a wheel, one file of which was edited after its RECORD had been written."""
    bent = wheels.plain(scene.user.folder / "made", "bent", "1.0", files={"bent/lib.so": b"as it was recorded"})
    with zipfile.ZipFile(bent) as source:
        members = {name: source.read(name) for name in source.namelist()}
    with zipfile.ZipFile(bent, "w") as target:
        for name, data in {**members, "bent/lib.so": b"and as it was edited by a tool"}.items():
            target.writestr(name, data)
    return bent


def test_a_wheel_whose_own_record_is_wrong_is_no_fault(scene: Scene) -> None:
    """Some wheels were edited after their RECORD was written; what came with the wheel's own bytes is what has to stay."""
    scene.index.add(scene.host.made["2"], [scene.host.made["others"][0], _bent(scene)])
    installs(scene)

    assert faults(scene) == faults(scene, deep=True) == ()
    (scene.user.site / "bent" / "lib.so").write_bytes(b"and as it was edited by a fool")
    assert [fault.files for fault in faults(scene, deep=True)] == [("bent/lib.so",)]


def test_what_came_wrong_is_known_once_and_for_good(scene: Scene) -> None:
    """A file behind a wrong RECORD, changed with its size and time kept, is not taken for good by the next installation."""
    bent, path = _bent(scene), scene.user.site / "bent" / "lib.so"
    for made in ("1", "2"):
        scene.index.add(scene.host.made[made], [scene.host.made["others"][0], bent])
    older, newer = (entry.name for entry in scene.index.manifest.entries[-2:])
    installs(scene, release=older)
    before = path.stat()
    path.write_bytes(path.read_bytes()[::-1])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    installs(scene, release=newer)

    assert faults(scene) == ()
    assert [fault.files for fault in faults(scene, deep=True)] == [("bent/lib.so",)]


def test_what_points_to_the_caches_is_looked_after(scene: Scene) -> None:
    """The file that sets the variables is part of the set: removed or edited, it is named and put back."""
    installs(scene)
    (scene.user.site / "_sparkwright_caches.pth").unlink()

    assert [fault.project for fault in faults(scene)] == ["_sparkwright_caches.pth"]
    installs(scene, repair=True)
    assert whole(scene, NEWEST)


# Going back.


def test_back_is_where_one_was(scene: Scene) -> None:
    """Without a network, every file is again what it was before, and so is the folder for compiled kernels."""
    installs(scene, release=OLDER)
    before, caches = scene.user.listing(), state.required(place(scene)).caches
    made = scene.user.venv / "sparkwright" / "caches" / caches[scene.index.entry(OLDER).release] / "kernel"
    made.write_bytes(b"compiled")
    installs(scene)
    done = back.rollback(scene.user.context(offline=True), scene.user.venv)

    assert (done.state, done.name) == ("back", OLDER)
    assert contents(scene) == {name: value for name, value in before.items() if name in contents(scene)}
    assert made.read_bytes() == b"compiled"
    assert whole(scene, OLDER)


def test_back_again_goes_further_back(scene: Scene) -> None:
    """Each time one set further, to the first; five earlier ones are kept."""
    made = [OLDER, NEWEST, *(scene.index.again(NEWEST).name for _ in range(5))]
    for name in made:
        installs(scene, release=name)
    gone = [back.rollback(scene.user.context(), scene.user.venv).name for _ in range(state.KEPT)]

    assert gone == made[-2::-1][: state.KEPT]
    with refusal("nothing-installed"):
        back.rollback(scene.user.context(), scene.user.venv)


def test_back_fetches_what_the_store_lost(scene: Scene) -> None:
    """Files that somebody cleared away come from the index again; offline, the run says which, and changes nothing."""
    installs(scene, release=OLDER)
    installs(scene)
    shutil.rmtree(scene.user.store / "downloads")
    before = scene.user.listing()
    with refusal("offline"):
        back.rollback(scene.user.context(offline=True), scene.user.venv)
    assert scene.user.listing() == before

    assert back.rollback(scene.user.context(), scene.user.venv).name == OLDER
    assert whole(scene, OLDER)


# Leaving.


def test_nothing_is_left(scene: Scene) -> None:
    """After uninstalling, the environment is what it was before there was anything of ours in it."""
    scene.user.pip("install", wheels.plain(scene.user.folder / "made", "neighbour", "1.0"))
    before = scene.user.listing()
    installs(scene, release=OLDER)
    subprocess.run([scene.user.venv / "bin" / "python", "-c", "import torch, vllm"], check=True)
    installs(scene)
    gone = back.uninstall(scene.user.context(), scene.user.venv)

    assert set(gone.removed) == set(scene.index.release(NEWEST).locks[0].packages)
    assert scene.user.listing() == before
    assert not list(scene.user.site.glob("torch*"))


def test_what_others_need_stays(scene: Scene) -> None:
    """A package that something else requires, directly or not, is left in place, and which one requires it is said."""
    scene.user.pip("install", wheels.plain(scene.user.folder / "made", "neighbour", "1.0", requires=["flashinfer-jit-cache"]))
    installs(scene)
    gone = back.uninstall(scene.user.context(), scene.user.venv)

    assert set(gone.kept) == {"flashinfer-jit-cache", "flashinfer-python"}
    assert "vllm" in gone.removed


def test_a_record_that_leads_out_is_not_followed(scene: Scene) -> None:
    """What an edited RECORD names outside of the environment is not removed."""
    installs(scene)
    kept = scene.user.folder / "kept.txt"
    kept.write_text("mine")
    with (scene.user.site / "torch-2.14.0.dist-info" / "RECORD").open("a") as record:
        record.write(f"{os.path.relpath(kept, scene.user.site)},,\n{kept},,\n")
    back.uninstall(scene.user.context(), scene.user.venv)

    assert kept.read_text() == "mine"


# Edits on the machine.


def release_with_edits(scene: Scene) -> str:
    """Publish the newest release again with a package that is edited on the machine, and return its name."""
    folder = scene.user.folder / "made"
    dsl = wheels.plain(folder, "mini-dsl", "1.0", files={"mini_dsl/guard.py": GUARD})
    change = {"anchor": "== 120", "replacement": "in (120, 121)"}
    edit = {
        "name": "admit-121", "package": "mini-dsl", "file": "mini_dsl/guard.py", "before": sha256_bytes(GUARD),
        "after": sha256_bytes(EDITED), "changes": [change], "reason": "the test wants it", "drop_when": "the test ends",
    }  # fmt: skip
    package = {"name": "mini-dsl", "version": "1.0", "wheels": {dsl.name: sha256_file(dsl)}}
    spec = json.dumps({"reason": "the test wants it", "packages": [package], "edits": [edit]}).encode()
    made = scene.host.made["2"]
    return scene.index.add(made, [*scene.host.made["others"][::2], dsl], onsite=spec).name


def test_edits_are_made_kept_and_taken_away_with_their_set(scene: Scene) -> None:
    """The package is installed edited; a later set with the same wheel and no edit has it unedited; going back edits it again."""
    name = release_with_edits(scene)
    done = installs(scene, release=name)
    guard = scene.user.site / "mini_dsl" / "guard.py"

    assert [edit.state for edit in done.edits] == ["made"]
    assert guard.read_bytes() == EDITED
    assert whole(scene, name)
    assert installs(scene, release=name).state == "there already"
    guard.write_bytes(GUARD)
    assert [fault.project for fault in faults(scene)] == ["mini-dsl"]
    installs(scene, release=name, repair=True)
    assert guard.read_bytes() == EDITED

    plain = scene.index.again(name, onsite="").name
    installs(scene, release=plain)
    assert guard.read_bytes() == GUARD
    back.rollback(scene.user.context(offline=True), scene.user.venv)
    assert guard.read_bytes() == EDITED
    assert whole(scene, name)


def test_edits_of_a_package_that_is_not_in_the_lock_are_refused(scene: Scene) -> None:
    """What is edited has to be part of the set that was locked."""
    name = release_with_edits(scene)
    lock = scene.index.path(f"b/{scene.index.entry(NEWEST).release}/pylock.{wheels.MACHINE}.toml").read_bytes()
    other = scene.index.again(name, lock=lock)
    data = scene.index.path(f"b/{scene.index.entry(name).release}/onsite.json").read_bytes()
    scene.index.write(f"b/{other.release}/onsite.json", data)

    with refusal("set-mixed"):
        installs(scene, release=other.name)


# Runs that were killed.

#: Operations that a kill may come before; of programs only those that install.
WATCHED = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.symlink", "os.link", "subprocess.Popen", "open"}


def killed(scene: Scene, after: int, verb: str, *words: str | Path) -> bool:
    """Run the command line and kill it before its operation number *after*; return whether it came that far."""
    killer = forked.Killer(after)

    def hook(event: str, values: tuple[Any, ...]) -> None:
        if event not in WATCHED or (event == "open" and not (values[2] and values[2] & (os.O_WRONLY | os.O_RDWR))):
            return
        if event == "subprocess.Popen":
            counts = "install" in map(str, values[1])
        else:
            counts = any(isinstance(value, str | os.PathLike) and str(value).startswith(str(scene.user.venv)) for value in values)
        if counts:
            killer.count()

    def run() -> None:
        sys.addaudithook(hook)
        sys.exit(main.main(scene.user.words(verb, *words)))

    status = forked.exit_code(run)
    assert status in (-signal.SIGKILL, 0)
    return status != 0


def which(scene: Scene) -> list[str | Path]:
    return ["--index", scene.index.url, "--key", scene.index.public]


@pytest.mark.parametrize("after", [3, 9, 40, 70])
def test_a_killed_installation_is_finished_by_the_next_run(scene: Scene, after: int) -> None:
    """Whenever it is killed: doctor says that it is half done or that nothing was, and the same command again makes it whole."""
    installs(scene, release=OLDER)
    was_killed = killed(scene, after, "install", *which(scene))
    half = state.installing(place(scene)) is not None
    said = scene.user.run("doctor")

    assert not half or (said.returncode == 1 and "half installed" in said.stderr)
    assert was_killed or not half
    installs(scene)
    assert whole(scene, NEWEST)
    assert [old.name for old in state.required(place(scene)).history] == [OLDER]


@pytest.mark.parametrize("after", [9, 60])
def test_a_killed_installation_is_undone_by_going_back(scene: Scene, after: int) -> None:
    """Rollback after a kill brings the set that was there before, whole."""
    installs(scene, release=OLDER)
    killed(scene, after, "install", *which(scene))
    assert state.installing(place(scene))
    back.rollback(scene.user.context(offline=True), scene.user.venv)

    assert whole(scene, OLDER)


@pytest.mark.parametrize("after", [3, 30])
def test_a_killed_removal_is_finished_by_the_next_run(scene: Scene, after: int) -> None:
    """Killed anywhere in uninstalling, a second run leaves nothing."""
    before = scene.user.listing()
    installs(scene)
    killed(scene, after, "uninstall")
    if state.installed(place(scene)) or state.installing(place(scene)):
        back.uninstall(scene.user.context(), scene.user.venv)

    assert scene.user.listing() == before


def cut_off(scene: Scene, rest: Callable[[Path], None]) -> None:
    """Leave the environment as a run leaves it that is killed while uv lays down the newest set over the older one."""
    installs(scene, release=OLDER)
    old = state.required(place(scene))
    installs(scene)
    new = state.required(place(scene))
    state.begin(place(scene), new.chosen, old, (old.chosen,))
    (state.folder(place(scene)) / "installed.json").unlink()
    rest(scene.user.site)


def without_record(site: Path) -> None:
    next(site.glob("vllm-*.dist-info/RECORD")).unlink()
    (site / "vllm" / "__init__.py").unlink()


def without_info(site: Path) -> None:
    shutil.rmtree(next(site.glob("vllm-*.dist-info")))


def with_a_short_file(site: Path) -> None:
    (site / "scipy" / "__init__.py").write_bytes(b"")


@pytest.mark.parametrize("rest", [without_record, without_info, with_a_short_file])
def test_whatever_uv_was_killed_in_is_made_whole(scene: Scene, rest: Callable[[Path], None]) -> None:
    """Files without a RECORD, and a RECORD with half a file, are neither taken for whole nor left behind."""
    cut_off(scene, rest)
    installs(scene)
    assert whole(scene, NEWEST)


@pytest.mark.parametrize("rest", [without_record, without_info, with_a_short_file])
def test_whatever_uv_was_killed_in_can_be_undone(scene: Scene, rest: Callable[[Path], None]) -> None:
    """Going back removes also what no RECORD names, because the wheel says what that can be."""
    cut_off(scene, rest)
    back.rollback(scene.user.context(), scene.user.venv)

    assert whole(scene, OLDER)
    assert not (scene.user.site / "scipy").exists()


def test_a_damaged_record_of_ours_is_an_error(scene: Scene) -> None:
    """A record that cannot be read is not taken for none."""
    installs(scene)
    (state.folder(place(scene)) / "installed.json").write_text("{")

    with refusal("environment-broken", match="cannot be read"):
        installs(scene)


def test_names_are_told_from_folders(scene: Scene) -> None:
    """Project and version come from a folder's name as PEP 503 spells the one, whatever the other holds."""
    assert packages.of_info("Flash_Infer.Py-0.7.2.post1+spark.2026.11.dist-info") == ("flash-infer-py", "0.7.2.post1+spark.2026.11")
    wheel = scene.host.made["2"][0]
    assert path_of(scene.user.context().store, "0" * 64, wheel.name).name == WheelName.of(wheel.name).filename
