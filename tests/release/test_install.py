"""From an index to an environment: which release is taken, what is laid down, and what it costs when there is nothing to do."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.refusals import refusal
from tests.release import attacks, world
from tests.release.attacks import NEWEST, OLDER, Scene
from tests.support import verdicts, wheels

from sparkwright.core.files import canonical, sha256_bytes, sha256_file
from sparkwright.forks.package_index import path_of
from sparkwright.release import content, environment
from sparkwright.release.client import address, back, health, install, state
from sparkwright.release.client.install import Done
from sparkwright.release.manifest import places

TORCH = {"torch"}


def installs(scene: Scene, *, offline: bool = False, **wish: object) -> Done:
    """Install as somebody who has the publisher's key."""
    return install.install(scene.user.context(offline=offline), scene.user.venv, world.wish(scene.index, **wish))


def known(scene: Scene) -> state.Installed:
    return state.required(environment.probe(scene.user.venv))


def frozen(scene: Scene) -> set[str]:
    """Return what pip would say is installed."""
    return set(scene.user.pip("freeze").split())


# What is installed.


def test_the_newest_verified_release_is_laid_down_whole(scene: Scene) -> None:
    """Every package of the lock is there as its wheel has it, from no address of this machine, and the record says which."""
    done = installs(scene)
    release = scene.index.release(NEWEST)

    assert (done.state, done.name, done.missing) == ("installed", NEWEST, ())
    assert frozen(scene) == {f"{name}=={version}" for name, version in release.locks[0].packages.items()}
    assert known(scene).chosen.release == scene.index.entry(NEWEST).release
    for wheel in release.wheels:
        assert content.of_installed(scene.user.site / known(scene).placed[wheel.project].info, deep=True) == wheel.content


def test_the_next_release_takes_the_place_of_the_one_before(scene: Scene) -> None:
    """Packages that it does not have go, those that are the same stay untouched, the rest is new."""
    installs(scene, release=OLDER)
    before = (scene.user.site / "torch" / "__init__.py").stat().st_mtime_ns
    assert (scene.user.venv / "bin" / "f2py").exists()
    done = installs(scene)

    assert done.stayed == ("torch",)
    assert (scene.user.site / "torch" / "__init__.py").stat().st_mtime_ns == before
    assert "numpy==2.4.0" not in frozen(scene)
    assert "scipy==1.18.0" in frozen(scene)
    assert not (scene.user.venv / "bin" / "f2py").exists()
    assert not (scene.user.site / "numpy").exists()


def test_nothing_to_do_asks_for_the_manifest_alone(scene: Scene) -> None:
    """A second run reads no other file of the index, and writes none of the environment."""
    installs(scene)
    before, asked = scene.user.listing(), len(scene.host.served.asked)
    done = installs(scene)

    assert done.state == "there already"
    assert scene.host.served.paths[asked:] == [f"/{scene.index.root.name}/{places.MANIFEST}"]
    assert scene.user.listing() == before


def test_a_run_may_remember_elsewhere(scene: Scene, tmp_path: Path) -> None:
    """What was seen of an index is kept where the run says: a demo's or a test's indexes are none of the user's memory."""
    context = dataclasses.replace(scene.user.context(), state=tmp_path / "state")
    install.install(context, scene.user.venv, world.wish(scene.index))

    assert len([*(tmp_path / "state" / "seen").glob("*.json")]) == 1
    assert not (scene.user.folder / "state" / "seen").exists()


def test_a_folder_is_an_index_too(scene: Scene) -> None:
    """A copy on a disk needs no server but for what it does not hold, and no address; what is checked is the same."""
    done = installs(scene, index=str(scene.index.root))
    assert done.name == NEWEST
    attacks.flipped(scene.index.path(places.MANIFEST))
    found = scene.run("--index", str(scene.index.root))

    assert found.reference in ("signature-invalid", "manifest-invalid")


def test_a_mirror_is_good_when_its_signed_address_is_named(scene: Scene) -> None:
    """The bytes may come from anywhere: with --signed-for, a copy at another address is what it was at its own."""
    (scene.index.root / "mirror").symlink_to(scene.index.root)

    assert installs(scene, index=f"{scene.index.url}mirror/", signed_for=scene.index.url).name == NEWEST


def test_somebody_elses_wheels_come_through_the_users_mirror_map(scene: Scene) -> None:
    """--mirror replaces the beginning of addresses, those in the lock included."""
    scene.host.served.fault = lambda path: 404 if path.startswith("/others/") else None
    (scene.host.folder / "served" / "moved").mkdir(exist_ok=True)
    for path in (scene.host.folder / "served" / "others").iterdir():
        link = scene.host.folder / "served" / "moved" / path.name
        if not link.exists():
            link.symlink_to(path)
    found = scene.run("--mirror", f"{scene.index.others_url}={scene.host.served.url}moved/")

    assert found.code == 0, found.said


# Which release.


def test_a_yanked_release_is_had_by_its_full_name_alone(scene: Scene) -> None:
    """The newest is passed over once it is yanked; named whole it is installed, and the reason is said."""
    scene.index.yank(NEWEST, "it is slow")

    assert installs(scene, dry=True).name == OLDER
    assert installs(scene, release=NEWEST).yanked == "it is slow"
    scene.index.yank(OLDER)
    with refusal("release-yanked", match="Every verified release"):
        installs(scene)


def test_a_candidate_says_what_is_missing(scene: Scene) -> None:
    """In the channel candidate it is installed, and every lack is named; verified does not have it."""
    folder = scene.user.folder / "lacking"
    made = wheels.release(folder, label="spark.2026.11.3", requires=["torch==2.14.0"], judged=False)
    for path in made:
        wheels.judge(path, companions=made[:-1] if path == made[-1] else (), without=["G5", "G8"])
    scene.index.add(made, scene.host.made["others"][:1], channel="candidate")

    assert installs(scene).name == NEWEST
    with refusal("release-unproved"):
        installs(scene, release="2026.11.3")
    done = installs(scene, channel="candidate")
    assert (done.name, {one.gate for one in done.missing}) == ("2026.11.3", {"G5", "G8"})


def test_one_follows_the_stack_that_is_installed(scene: Scene) -> None:
    """A release of another stack, however new, does not replace the installed one unless it is named."""
    installs(scene)
    scene.index.put(replace(scene.index.release(NEWEST), name="2026.12.1", stack="2026.12"), (), b"", "verified")

    assert installs(scene).state == "there already"
    with refusal("evidence-invalid", match=r"proof of 2026\.12\.1"):
        installs(scene, stack="2026.12")


def test_a_promotion_changes_the_record_and_no_package(scene: Scene) -> None:
    """When the proof of the installed release is a better one, that is checked and noted, and nothing is laid down again."""
    scene.index.again(NEWEST, channel="candidate")
    installs(scene, channel="candidate")
    before = {path: path.stat().st_mtime_ns for path in scene.user.site.rglob("*.py")}
    entries = tuple(replace(one, channel="verified") if one.name == "2026.11.3" else one for one in scene.index.manifest.entries)
    proof = canonical(replace(scene.index.proof("2026.11.3"), made=scene.index.manifest.expires))
    entries = tuple(replace(one, proof=sha256_bytes(proof)) if one.name == "2026.11.3" else one for one in entries)
    scene.index.write(places.proof(entries[-1].release, entries[-1].proof), proof)
    scene.index.save(replace(scene.index.manifest, serial=scene.index.manifest.serial + 1, entries=entries))
    done = installs(scene)

    assert (done.state, done.channel, done.came, done.went) == ("installed", "verified", (), ())
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert known(scene).history == ()


# What else is in the environment.


def test_what_others_installed_is_replaced_only_when_told(scene: Scene) -> None:
    """Another torch stops the run, by version and by who put it there; --replace takes its place."""
    scene.user.pip("install", wheels.plain(scene.user.folder / "made", "torch", "2.13.0"))
    with refusal("environment-foreign") as caught:
        installs(scene)
    assert "torch: 2.13.0 is there (by uv from file:" in caught.value.details[0]

    installs(scene, replace=True)
    assert "torch==2.14.0" in frozen(scene)
    assert health.look(environment.probe(scene.user.venv), known(scene), deep=True) == ()


def test_the_setuptools_of_a_new_environment_gives_way(scene: Scene) -> None:
    """What ``python -m venv`` brings was nobody's choice: the set's own takes its place unasked, whatever put it there."""
    made = scene.user.folder / "made"
    scene.user.pip("install", wheels.plain(made, "setuptools", "65.5.0"))
    scene.index.add(scene.host.made["2"], [scene.host.made["others"][0], wheels.plain(made, "setuptools", "84.0.0")])
    done = installs(scene)

    assert done.went == ("setuptools 65.5.0",)
    assert "setuptools==84.0.0" in frozen(scene)


def test_what_is_there_already_with_the_same_bytes_is_left_in_place(scene: Scene) -> None:
    """The very torch of the lock, installed by somebody else, is kept; uninstalling leaves it."""
    scene.user.pip("install", scene.host.made["others"][0])
    done = installs(scene)
    gone = back.uninstall(scene.user.context(), scene.user.venv)

    assert done.stayed == ("torch",)
    assert gone.kept == ("torch",)
    assert {line.partition(" ")[0].partition("==")[0] for line in frozen(scene)} >= TORCH
    assert len(scene.user.pip("freeze").splitlines()) == 1


def test_a_dry_run_checks_all_and_changes_nothing(scene: Scene) -> None:
    """The environment is as it was, and what would come and go is named."""
    before = scene.user.listing()
    done = installs(scene, dry=True)

    assert done.state == "would install"
    assert set(done.came) == set(scene.index.release(NEWEST).locks[0].packages)
    assert scene.user.listing() == before


def test_compiled_kernels_have_a_folder_of_their_own(scene: Scene) -> None:
    """Python in the environment finds the caches of this very set; what a user has set stays; two sets never share a folder."""

    def asked(**env: str) -> str:
        command = [str(scene.user.venv / "bin" / "python"), "-c", "import os; print(os.environ['VLLM_CACHE_ROOT'])"]
        return subprocess.run(command, env={**env}, capture_output=True, text=True, check=True).stdout.strip()

    installs(scene, release=OLDER)
    first = Path(asked())
    installs(scene)
    second = Path(asked())

    assert first != second
    assert first.parent.is_dir()
    assert second.is_relative_to(scene.user.venv / "sparkwright" / "caches")
    assert asked(VLLM_CACHE_ROOT="/elsewhere") == "/elsewhere"


# Networks and disks.


def test_a_broken_line_is_taken_up_where_it_broke(scene: Scene) -> None:
    """A connection that breaks in the middle of each reply brings every file in the end, each byte once."""
    path = f"/{scene.index.root.name}/{scene.wheel('vllm')}"
    left = [3]

    def fault(asked: str) -> str | None:
        left[0] -= asked == path
        return "truncate" if asked == path and left[0] >= 0 else None

    scene.host.served.fault = fault
    assert installs(scene).state == "installed"
    ranges = [one.headers.get("range", "") for one in scene.host.served.asked if one.path == path]
    assert ranges[0] == ""
    assert all(ranges[1:])
    assert len(ranges) == 4


def test_a_file_damaged_in_the_store_is_fetched_again(scene: Scene) -> None:
    """A bit that fell over on the disk is found before anything is changed, and mended."""
    installs(scene, dry=True)
    wheel = scene.index.release(NEWEST).wheels[0]
    attacks.flipped(path_of(scene.user.context().store, wheel.sha256, wheel.filename))

    assert installs(scene).state == "installed"
    assert sha256_file(path_of(scene.user.context().store, wheel.sha256, wheel.filename)) == wheel.sha256


def test_a_server_that_trickles_is_not_waited_for(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small file that comes byte by byte has a time in which it must be there as a whole."""
    monkeypatch.setattr(address, "PATIENCE", 0.5)
    stop = threading.Event()

    def trickle(handler: object) -> None:
        handler.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")  # type: ignore[attr-defined]
        while not stop.wait(0.05):
            handler.wfile.write(b"{")  # type: ignore[attr-defined]

    scene.fault(places.MANIFEST, trickle)
    try:
        with refusal("source-unreachable", match="cannot be fetched"):
            installs(scene)
    finally:
        stop.set()


def test_two_installations_into_one_environment_wait_for_each_other(scene: Scene) -> None:
    """Both end well, one after the other, and the set is whole."""
    words = [sys.executable, "-m", "sparkwright", *scene.user.words("install", *scene.words[1:])]
    both = [subprocess.Popen(words, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) for _ in range(2)]
    said = [one.communicate(timeout=100)[1] for one in both]

    assert [one.returncode for one in both] == [0, 0], said
    assert health.look(environment.probe(scene.user.venv), known(scene), deep=True) == ()


# The program.

#: Runs the program with nothing but what it requires without its part "full".
BARE = """
import importlib.metadata as metadata, re, sys
def canonical(name): return re.sub(r"[-_.]+", "-", name).lower()
allowed, todo = {"sparkwright"}, ["sparkwright"]
while todo:
    for line in metadata.requires(todo.pop()) or ():
        name = canonical(re.match(r"[A-Za-z0-9._-]+", line)[0])
        if "extra ==" not in line and name not in allowed:
            try: metadata.distribution(name)
            except metadata.PackageNotFoundError: continue
            allowed.add(name); todo.append(name)
known = metadata.packages_distributions()
class Blocker:
    def find_spec(self, name, path=None, target=None):
        owners = {canonical(one) for one in known.get(name.partition(".")[0], ())}
        if owners and not owners & allowed:
            raise ModuleNotFoundError(f"blocked: {name}", name=name)
sys.meta_path.insert(0, Blocker())
from sparkwright.cli.main import main
sys.exit(main())
"""


def test_a_users_machine_needs_only_the_base_of_the_program_and_no_checkout(scene: Scene, tmp_path: Path) -> None:
    """Install, list, doctor, rollback and uninstall run with the requirements of a plain `pip install`, in a folder of no checkout."""

    def run(*words: str | Path) -> dict[str, object]:
        command = [sys.executable, "-c", BARE, *scene.user.words(str(words[0]), *words[1:]), "--json"]
        done = subprocess.run(command, cwd=tmp_path, env={**os.environ}, capture_output=True, text=True, check=False, timeout=100)
        assert done.returncode == 0, done.stdout + done.stderr
        found: dict[str, object] = json.loads(done.stdout)
        return found

    which: list[str | Path] = ["--index", scene.index.url, "--key", scene.index.public]
    assert len(run("list", *which)["releases"]) == 2  # type: ignore[arg-type]
    run("install", *which, "--version", OLDER)
    run("install", *which)
    assert run("doctor", "--deep")["state"] == "intact"
    run("rollback")
    run("uninstall")
    assert not (scene.user.venv / "sparkwright").exists()


def test_the_list_shows_what_a_choice_rests_on(scene: Scene) -> None:
    """Name, channel, versions, size, what is missing and why it was yanked, with a mark at the installed one."""
    installs(scene, release=OLDER)
    scene.index.yank(NEWEST, "it is slow")
    done = scene.user.run("list", *scene.words[1:])
    lines = {line.lstrip(" *").partition(" ")[0]: line for line in done.stdout.splitlines()}

    assert done.returncode == 0, done.stderr
    assert lines[OLDER].lstrip().startswith("* ")
    assert "torch 2.14.0" in done.stdout
    assert f"signed by {scene.index.signer.by} (known from " in done.stdout
    assert lines[NEWEST].rstrip().endswith("yanked: it is slow")


def test_trust_and_address_may_come_from_the_users_files(scene: Scene) -> None:
    """With an index in config.yaml and its key in trust.yaml, plain `install` is all there is to type."""
    with refusal("trust-missing"):
        install.install(scene.user.context(), scene.user.venv, install.Wish(index=scene.index.url))
    (scene.user.folder / "config.yaml").write_text(f"releases: {scene.index.url}\n")
    text = scene.index.signer.public.text
    (scene.user.folder / "trust.yaml").write_text(f"indexes:\n  {scene.index.url}:\n    keys:\n      - {text}\n")

    assert scene.user.run("install", "--dry-run").returncode == 0


def test_verdicts_of_the_template_are_whole(scene: Scene) -> None:
    """The good index is good for the reason that people would think: every gate of its vLLM passes."""
    assert set(verdicts.states(verdicts.ladder(scene.host.made["2"][-1])).values()) == {"pass"}
