"""Installing, listing, going back, removing and running, also killed, by the command line, with real TUF metadata, wheels, uv and HTTP."""

import importlib.metadata
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tests.client.test_refusals import answer, dripping
from tests.client.world import CLIENT, ONE, PYTHON, THREE, TWO, User, World, wheel
from tests.support import packs, processes
from uv import find_uv_bin

from sparkwright.client.environment import CANARY, PACKS, Prefix
from sparkwright.client.index import newest_first
from sparkwright.client.records import (
    FileEdit,
    Overlay,
    Release,
    ReleaseFile,
    ReleaseState,
    TextChange,
    WarmPack,
)
from sparkwright.core.files import sha256_bytes, sha256_file
from sparkwright.core.process import CACHES
from sparkwright.release import publisher


def test_install_puts_programs_data_and_headers_where_the_check_expects_them(world: World) -> None:
    """uv and the check of wheels agree on every scheme of the format."""
    files = {
        "{info}/entry_points.txt": b"[console_scripts]\nsome-demo = some_demo:main\n[demo.plugins]\n../x = a:b\n",
        "{data}/scripts/hello": b"#!python\nprint('hello')\n",
        "{data}/data/share/some/x.txt": b"x",
        "{data}/headers/some.h": b"x",
        "{data}/platlib/some_more/__init__.py": b"",
    }
    world.publish(ONE, [wheel("some-demo", files=files)])
    user = world.user()

    assert user.install().code == 0
    assert user.run("doctor", "--deep").code == 0
    root = user.prefix / "current"
    assert (root / f"include/site/python{PYTHON}/some-demo/some.h").is_file()
    assert (root / "share/some/x.txt").is_file()
    assert (root / "bin/some-demo").is_file()
    assert subprocess.check_output([root / "bin/hello"]) == b"hello\n"


def test_install_from_a_folder_copies_and_never_links(user: User) -> None:
    user.environment["SPARKWRIGHT_INDEX"] = str(user.world.root)

    assert user.install().code == 0
    wheels = [*user.world.root.rglob("*.whl"), *user.cache.rglob("*.whl")]
    assert {path.stat().st_nlink for path in wheels} == {1}


@pytest.mark.parametrize("project", ["vllm", "demo"])
def test_install_brings_what_a_server_of_the_release_must_answer(world: World, project: str) -> None:
    """That of vLLM's wheel; it is one of the files that `doctor` compares."""
    data, own = b"{}", wheel(project)
    file = ReleaseFile(name="own.canary.json", size=len(data), sha256=sha256_bytes(data))

    def with_canary(release: Release) -> Release:
        (record,) = release.wheels
        return replace(release, wheels=(replace(record, proof=replace(record.proof, canary=file)),))

    with world.changing() as transaction:
        transaction.put(file, data)
    world.publish(ONE, [own], change=with_canary)
    user = world.user()
    assert user.install().code == 0
    path = user.prefix / "current" / CANARY
    assert path.exists() == (project == "vllm")
    if path.exists():
        assert path.read_bytes() == data
        path.chmod(0o644)
        path.write_bytes(b"[] ")
        assert CANARY in "".join(user.run("doctor").document["error"]["details"])


def test_second_release_shares_equal_files_and_either_becomes_current(both: User) -> None:
    """A dry run says what would change, and changes nothing; nor does another installation."""
    inodes = {(both.site(name) / "other/__init__.py").stat().st_ino for name in (ONE, TWO)}
    assert (len(inodes), both.current) == (1, TWO)
    before = both.listing()

    assert both.run("install").document["release"]["state"] == "there already"
    (changed := both.site(TWO) / "other/added.py").write_text("")
    assert both.run("install").reference == "environment-broken"
    changed.unlink()
    trial = both.run("install", "--dry-run", "--version", ONE).document["release"]
    assert (trial["state"], both.listing()) == ("would switch", before)
    result = both.run("install", "--version", ONE).document["release"]
    changes = (result["state"], result["added"], result["removed"])
    assert changes == ("switched", ["demo 1.0"], ["demo 1.1"])


def test_rollback_asks_no_index_and_waits_for_no_installation(both: User) -> None:
    """
    Going back makes nothing, and can be undone. What is known of yanks is shown, also by `doctor`; an unreadable record of trust or of
    the history is in no way.
    """
    before, arrived, third = both.listing(), threading.Event(), wheel("demo", "1.2")
    both.world.yank(ONE)
    both.world.publish(THREE, [third])

    def drip(handler: BaseHTTPRequestHandler) -> None:
        arrived.set()
        dripping(handler)

    both.world.faults[f"files/{third.sha256}/{third.name}"] = drip
    with subprocess.Popen([*CLIENT, "install"], env=both.environment, stderr=subprocess.DEVNULL) as installation:
        assert arrived.wait(60)
        both.world.faults |= {f"metadata/{name}": dripping for name in ("timestamp.json", "1.root.json")}
        back = subprocess.run([*CLIENT, "rollback", "--yes"], env=both.environment, timeout=10, capture_output=True, text=True, check=False)
        assert (back.returncode, both.current, installation.poll()) == (0, ONE, None)
        assert "it answers wrongly" in back.stderr
        assert both.run("doctor").document["releases"][ONE]["yanked"] == "it answers wrongly"
        installation.kill()
    assert both.run("rollback").reference == "nothing-installed"
    both.world.faults.clear()
    for place, text in (("*/targets.json", "{}"), ("indexes.json", "{")):
        assert both.run("install", "--version", TWO).document["release"]["state"] == "switched"
        assert both.listing() == before
        next((both.prefix / "trust").glob(place)).write_text(text)
        assert both.run("rollback").code == 0
    (both.prefix / "history.json").write_text('["2026')
    assert both.run("rollback").reference == "nothing-installed"


def reverse(path: Path) -> bytes:
    """Reverse the bytes of a file, with its size and time kept; return them as they were."""
    state, data = path.stat(), path.read_bytes()
    path.chmod(0o644)
    path.write_bytes(data[::-1])
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    return data


def test_variables_of_a_prefix_with_odd_characters(user: User) -> None:
    """Whatever its name, a shell reads the folder from ``caches.env``."""
    prefix = user.folder / 'a"b $(id) `id` $HOME \\ c'
    assert user.install("--prefix", prefix).code == 0
    script = f". {shlex.quote(str(prefix))}/current/caches.env && printf %s \"$TRITON_CACHE_DIR\""
    shown = subprocess.check_output(["sh", "-c", script], text=True)
    assert shown == f"{prefix}/releases/{ONE}/caches/triton"


def test_rollback_ends_at_a_release_that_was_current_before(both: User) -> None:
    """A release that was current twice is no way round."""
    assert both.run("install", "--version", ONE).code == 0
    outcomes = [(both.run("rollback").reference, both.current) for _ in range(3)]
    assert outcomes == [("", TWO), ("", ONE), ("nothing-installed", ONE)]


def test_rollback_to_a_yanked_release_needs_a_yes(both: User) -> None:
    """Its own index said so when it was last asked, whichever the later release is from."""
    other = World(both.folder / "others")
    other.publish(TWO, [wheel("demo", "3.0")])
    both.environment["SPARKWRIGHT_INDEX"] = str(other.root)
    assert both.run("uninstall", TWO).code == 0
    assert both.run("install", "--trust", other.fingerprint).code == 0
    both.world.yank(ONE, "it answers wrongly")
    assert both.run("rollback").code == 0  # nobody here can know it
    assert both.run("install", "--version", TWO).code == 0
    assert both.run("list", "--index", both.world.url).code == 0
    back = both.run("rollback")

    assert (back.reference, both.current) == ("release-yanked", TWO)
    assert "it answers wrongly" in back.said
    assert both.run("rollback", "--yes").code == 0
    assert both.current == ONE
    listed = both.run("list", "--index", both.world.url).document
    assert {name: state["yanked"] for name, state in listed["releases"].items()} == {TWO: "", ONE: "it answers wrongly"}
    assert (listed["current"], listed["installed"]) == (ONE, [ONE, TWO])


def test_the_newest_release_is_that_of_the_latest_stack_and_number() -> None:
    """Whatever the publisher's clock said."""
    names = ("2026.11.2", "2026.11.1", "2026.9.10", "2026.9.9")
    states = {
        name: ReleaseState(stack=name.rpartition(".")[0], made=f"2026-12-0{day}T00:00:00Z", channel="verified", machines=("any",), pythons=("3.12",))
        for day, name in enumerate(names, 1)
    }
    assert newest_first(states) == [*names]


def test_install_skips_a_yanked_release_unless_it_is_named(both: User) -> None:
    both.world.yank(TWO)
    user = both.world.user()

    assert user.install().document["release"]["name"] == ONE
    named = user.run("install", "--version", TWO)
    assert (named.code, user.current) == (0, TWO)
    assert "yanked" in named.said


def test_candidate_is_installed_only_from_its_channel(world: World) -> None:
    """
    The gates that its signed record lacks count, also where it is called verified. A release that is promoted is the same
    environment.
    """
    demo, user = wheel("demo"), world.user()
    world.publish(
        ONE, [demo], channel="candidate", state=lambda old: replace(old, channel="verified")
    )
    assert (user.install().reference, user.listing()) == ("release-unproved", {})
    world.publish(ONE, [demo], channel="candidate")

    assert user.install().reference == "release-unproved"
    assert user.run("install", "--version", ONE).reference == "release-unproved"
    assert user.install("--channel", "candidate").code == 0
    world.publish(ONE, [demo])
    assert user.run("install").document["release"]["state"] == "there already"


def test_stack_and_channel_select_the_release(world: World) -> None:
    """The newest release is taken: of the stack that is named, else of the current one, else of the latest."""
    world.publish("2026.06.5", [wheel("demo", "0.9")])
    world.publish(ONE, [wheel("demo", "1.0")])
    world.publish(TWO, [wheel("demo", "1.1")], channel="candidate")
    user = world.user()

    def chosen(*words: str) -> str:
        return str(user.install("--dry-run", *words).document["release"]["name"])

    assert chosen() == ONE  # 2026.06.5 was made at a later second
    assert chosen("--channel", "candidate") == TWO
    assert user.listing() == {}
    assert user.install("--stack", "2026.06").code == 0
    assert chosen() == "2026.06.5"
    assert chosen("--stack", "2026.11") == chosen("--version", ONE) == ONE


def test_uninstall_removes_a_release(both: User) -> None:
    """Not while a program has loaded a file of it, was started from it or works in it; without the current one, nothing runs."""
    folder = both.prefix / "releases" / ONE
    wait, load = "print(flush=True); time.sleep(600)", "import mmap, os, sys, time; loaded = mmap.mmap(os.open(sys.argv[1], os.O_RDONLY), 0, prot=1); "
    loading = [sys.executable, "-c", load + wait, str(folder / "pyvenv.cfg")]
    for command, place in ((loading, None), ([str(folder / "bin/python"), "-c", f"import time; {wait}"], None), ([sys.executable, "-c", f"import time; {wait}"], folder)):
        with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=place) as server:
            assert server.stdout
            assert server.stdout.readline()
            assert both.run("uninstall", ONE).reference == "release-in-use"
            server.kill()
    assert both.run("uninstall", ONE).code == 0
    assert both.run("uninstall").document["removed"] == TWO
    assert both.listing() == {"history.json": both.listing()["history.json"]}
    commands = ["uninstall", f"uninstall {ONE}", "uninstall ../../etc", "run -- true", "rollback"]
    assert {both.run(*words.split()).reference for words in commands} == {"nothing-installed"}
    assert str(both.run("uninstall").document["error"]["what"]).endswith("has no current release.")


def test_run_has_the_programs_and_caches_of_the_release(installed: User) -> None:
    """A program sees the environment of the current release, with a cache of its own for each JIT compiler."""
    folder = installed.prefix / "releases" / ONE
    names = ("VIRTUAL_ENV", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH")
    text = f"import demo, os, sys; print(sys.prefix, *(os.environ[name] for name in {names}))"
    installed.environment["CUDA_CACHE_PATH"] = "/elsewhere"
    # A shell has the caches.env of another release.
    other = installed.prefix / "releases" / TWO / "caches/triton"
    installed.environment["TRITON_CACHE_DIR"] = str(other)
    command = [*CLIENT, "run", "--", "python", "-c", text]
    shown = subprocess.check_output(command, env=installed.environment, text=True)

    assert shown.split() == [str(folder), str(folder), f"{folder}/caches/triton", "/elsewhere"]
    assert f'TRITON_CACHE_DIR="{folder}/caches/triton"' in (folder / "caches.env").read_text()
    assert installed.run("run", "--", "no-such-program").reference == "tool-missing"
    program = installed.folder / "text"
    program.write_text("no program")
    program.chmod(0o755)
    assert installed.run("run", "--", program).reference == "tool-missing"
    assert installed.run("run").code == 2


def test_doctor_finds_every_kind_of_change_and_a_new_installation_has_none(both: User) -> None:
    """uv's cache was changed by the link, which the first installation notices and the second repairs."""
    assert both.run("doctor").code == both.run("doctor", "--deep").code == 0
    path = both.site() / "other/__init__.py"
    data = reverse(path)
    assert both.run("doctor").code == 0  # neither size nor time tell
    deep = both.run("doctor", "--deep")
    assert deep.reference == "environment-broken"
    # The file of the other release is the same one.
    lines = deep.document["error"]["details"]
    assert any("other/__init__.py" in line and ONE in line for line in lines)

    (both.site() / "demo/__init__.py").unlink()
    stranger = both.folder / "stranger-1.0-py3-none-any.whl"
    stranger.write_bytes(wheel("stranger").data)
    python = both.prefix / "current/bin/python"
    words: list[str | Path] = ["pip", "install", "-q", "--offline", "--python", python, stranger]
    subprocess.run([find_uv_bin(), *words], check=True)
    faults = "\n".join(both.run("doctor").document["error"]["details"])
    assert "removed: " in faults
    assert "added: " in faults
    assert both.run("rollback").code == 0  # the size and time of that one are right
    assert both.run("install").reference == "environment-broken"

    for name in (ONE, TWO):
        assert both.run("uninstall", name).code == 0
    assert (both.run("install").reference, both.current) == ("environment-broken", "")
    for name in (ONE, TWO):
        assert both.run("install", "--version", name).code == 0
    assert both.run("doctor", "--deep").code == 0
    assert path.read_bytes() == data


def test_environment_of_other_contents_or_without_a_readable_marker(installed: User) -> None:
    """It is not replaced, as it may be running, but removed."""
    marker = installed.prefix / "releases" / ONE / "sparkwright.json"
    other = {**msgspec.json.decode(marker.read_bytes()), "key": "0" * 64}
    marker.write_bytes(msgspec.json.encode(other))
    before = installed.listing()
    for words in ([], ["--dry-run"]):
        assert installed.run("install", *words).reference == "environment-unusable"
    assert installed.listing() == before
    marker.write_text("{")
    for words in (["doctor"], ["install"]):
        assert installed.run(*words).reference == "environment-broken"
    assert installed.run("uninstall", ONE).code == 0
    assert list((installed.prefix / "releases").iterdir()) == []


def test_doctor_runs_nothing_and_believes_no_record(installed: User) -> None:
    """A .pth that exits, a RECORD that names the interpreter and a Python that prints without end are shown, not obeyed."""
    (installed.site() / "evil.pth").write_text("import os; os._exit(0)\n")
    info = installed.site() / "evil-1.dist-info"
    info.mkdir()
    (info / "RECORD").write_text(f"../../../bin/python,,\n{Path(sys.executable).resolve()},,\n")
    python = installed.prefix / "current/bin/python"
    python.unlink()
    processes.script(python, "yes | head -c 2000000000")

    assert installed.run("doctor").reference == "environment-broken"
    assert installed.run("uninstall").code == 0
    assert Path(sys.executable).exists()


LOWER = {"shared/mma.py": b"admits = 'sm_120a'\n", "shared/__init__.py": b"# lower\n"}
UPPER = {"shared/mma.py": b"admits = 'sm_121'\n", "shared/__init__.py": b"# upper\n", "shared/more.py": b"", "shared/data.bin": b"\xff"}  # fmt: skip
EDIT = FileEdit(
    name="admit-sm-121a", package="upper", file="shared/mma.py", before=sha256_bytes(UPPER["shared/mma.py"]),
    after=sha256_bytes(b"admits = 'sm_121a'\n"), changes=(TextChange("'sm_121'", "'sm_121a'"),), reason="it refuses", drop_when="it admits",
)  # fmt: skip
OVERLAY = Overlay("upper", "lower", 2, "a test")


def overlaid(world: World, **changed: Any) -> User:
    """Publish a set in which one project's files lie over another's and one file is edited; return a user."""
    others = [wheel("lower", files=LOWER), wheel("upper", files=UPPER)]
    options = {"edits": (EDIT,), "overlays": (OVERLAY,), **changed}
    world.publish(ONE, [wheel("demo")], others, **options)
    return world.user()


def test_edits_and_overlays_are_made_on_the_machine(world: World) -> None:
    """Whatever order uv writes in; the wheels stay as they are."""
    user = overlaid(world)

    assert user.install().code == 0
    shared = user.site() / "shared"
    assert (shared / "mma.py").read_text() == "admits = 'sm_121a'\n"
    assert (shared / "__init__.py").read_text() == "# upper\n"
    assert user.run("doctor", "--deep").code == 0
    assert (shared / "mma.py").stat().st_nlink == 1


@pytest.mark.parametrize(
    ("reference", "fault"),
    [
        ("edit-mismatch", {"edits": (replace(EDIT, before="0" * 64),)}),
        ("edit-mismatch", {"edits": (replace(EDIT, after="0" * 64),)}),
        ("edit-mismatch", {"edits": (replace(EDIT, changes=(TextChange("nowhere", "x"),)),)}),
        ("edit-mismatch", {"edits": (replace(EDIT, package="lower"),)}),
        ("edit-mismatch", {"edits": (replace(EDIT, file="shared/data.bin"),)}),
        ("set-mixed", {"overlays": (replace(OVERLAY, files=1),)}),
        ("wheel-unsafe", {"overlays": ()}),
    ],
)
def test_edits_that_do_not_fit_are_refused(
    world: World, reference: str, fault: dict[str, Any]
) -> None:
    """An edit is for one file of one wheel, and an overlay for a number of files."""
    user = overlaid(world, **fault)

    assert (user.install().reference, user.listing()) == (reference, {})


def test_root_is_trusted_once_and_a_mirror_with_it(user: User) -> None:
    """The first use of an index needs its fingerprint; a copy at another address has the same root."""
    unknown, fingerprint = user.run("install"), user.world.fingerprint
    assert unknown.reference == "trust-missing"
    assert unknown.document["error"]["fingerprint"] == fingerprint
    assert user.run("install", "--trust", "0" * 64).reference == "trust-missing"
    coloned = ":".join(fingerprint[at : at + 2].upper() for at in range(0, 64, 2))
    first = user.run("install", "--trust", coloned)
    assert (first.code, first.document["release"]["added"]) == (0, ["demo 1.0", "other 2.0"])
    mirror = shutil.copytree(user.world.root, user.folder / "mirror")
    assert user.run("list", "--index", mirror).code == 0


def test_credentials_are_used_and_not_stored(user: User) -> None:
    """
    The password of an address stays out of the prefix and of what is shown; later runs find what was trusted, without an address that of
    the current release.
    """
    address = user.world.url.replace("://", "://user:s3cret-of-this-test@")
    user.environment["SPARKWRIGHT_INDEX"] = address

    outcomes = [user.install(), user.run("list"), user.run("doctor")]
    assert [outcome.code for outcome in outcomes] == [0, 0, 0]
    assert user.run("rollback").reference == "nothing-installed"
    assert "not known" not in str(outcomes)
    written = b"".join(path.read_bytes() for path in user.prefix.rglob("*") if path.is_file())
    assert "s3cret-of-this-test" not in f"{outcomes} {written!r}"
    del user.environment["SPARKWRIGHT_INDEX"]
    assert user.run("list").document["index"] == user.world.url


def test_usage(user: User) -> None:
    """An empty name is no name: it chose the newest candidate once."""
    for option in ("--version", "--stack", "--index", "--prefix"):
        assert user.run("install", option, "").code == 2
    for index in ("nowhere", "http://[", "x" * 5000):
        assert user.run("install", "--index", index).reference == "index-missing"


def test_runs_at_once_wait_for_each_other(user: User) -> None:
    """Each ends well, and the environment is whole."""
    user.install("--dry-run")
    command = ["sh", "-c", f"exec {shlex.join(CLIENT)} install >/dev/null 2>&1"]
    runs = [subprocess.Popen(command, env=user.environment) for _ in range(3)]

    assert [run.wait() for run in runs] == [0, 0, 0]
    assert user.run("doctor", "--deep").code == 0


# Kills.


@pytest.mark.parametrize(
    ("command", "before", "after", "first", "stride"),
    [
        # Each takes seconds.
        ("install", ONE, TWO, 1, 4),
        ("rollback", TWO, ONE, 1, 1),
        (f"uninstall {TWO}", TWO, "", 1, 1),
    ],
)
def test_kill_anywhere_leaves_a_whole_release_and_the_next_run_finishes(
    both: User, command: str, before: str, after: str, first: int, stride: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing unfinished stays."""
    user, words, ended, step = both, command.split(), "", first
    scratch = user.world.folder / "scratch"
    scratch.mkdir()
    user.environment["TMPDIR"] = str(scratch)
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    with user.forking() as run:
        while not ended.startswith("ended"):
            if before == ONE:
                user.run("uninstall", TWO)
            assert user.run("install", "--version", before).code == 0
            history = [ONE] if before == ONE else [ONE, TWO]
            (user.prefix / "history.json").write_text(json.dumps(history))
            ended = run(step, words)
            condition = user.run("doctor").document
            releases = condition.get("error", condition)["releases"]
            whole = {name for name, entry in releases.items() if not entry["faults"]}
            assert user.current in (whole if after else {*whole, ""}), (ended, releases)
            if step % 3 == 0 and words[0] == "install":
                assert user.run("rollback").reference in ("", "nothing-installed")
            again = user.run(*words)
            assert again.code == 0 or again.reference == "nothing-installed", again.said
            assert user.current == after
            assert user.run("doctor", "--deep").code == 0
            assert [*scratch.iterdir(), *user.prefix.rglob(".unfinished-*")] == []
            assert Prefix(user.prefix).history[-1] == (after or TWO)
            assert {path.name for path in user.prefix.glob("releases/*")} - {TWO} == {ONE}
            step += stride
    assert (ended, step > (30 if stride > 1 else 5)) == ("ended 0", True), step


# The distribution `sparkwright-install`.


#: Runs the client from a folder, without the modules that it does not require, and prints those of its own that it loaded.
RUN = """
import json, sys
sys.path.insert(0, sys.argv[1])
absent = set(json.loads(sys.argv[2]))
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in absent:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Blocker())
from sparkwright.client.main import main
code = main(sys.argv[3:])
print(json.dumps(sorted(name for name in sys.modules if name.partition(".")[0] == "sparkwright")))
sys.exit(code)
"""


def _required(name: str, extras: frozenset[str], seen: set[tuple[str, frozenset[str]]]) -> None:
    """Add the distribution *name* with *extras*, and all that it requires here, to *seen*."""
    key = (canonicalize_name(name), extras)
    if key not in seen:
        seen.add(key)
        for requirement in map(Requirement, importlib.metadata.requires(name) or ()):
            contexts = [{"extra": extra} for extra in ("", *extras)]
            if requirement.marker is None or any(map(requirement.marker.evaluate, contexts)):
                _required(requirement.name, frozenset(requirement.extras), seen)


def test_the_client_needs_exactly_its_modules_and_requirements(user: User, tmp_path: Path) -> None:
    """Every command works with the wheel and what it requires, knows its index, and no module is there in vain."""
    root = (user.world.root / "metadata/1.root.json").read_bytes()
    carried = (user.world.url, user.world.fingerprint, root)
    made, again = (
        publisher.write_client(folder, *carried, label="1")[1] for folder in (tmp_path, user.folder)
    )
    assert made.read_bytes() == again.read_bytes()
    unpacked = tmp_path / "unpacked"
    shutil.unpack_archive(made, unpacked, "zip")
    sources = [path.relative_to(unpacked).with_suffix("") for path in unpacked.rglob("*.py")]
    present = {".".join(path.parts).removesuffix(".__init__") for path in sources}
    [info] = unpacked.glob("*.dist-info")
    required: set[tuple[str, frozenset[str]]] = set()
    for line in importlib.metadata.Distribution.at(info).requires or ():
        if "extra ==" not in line:
            _required(Requirement(line).name, frozenset(Requirement(line).extras), required)
    owners = importlib.metadata.packages_distributions()
    names = {name for name, _ in required}
    absent = [top for top, parts in owners.items() if names.isdisjoint(map(canonicalize_name, parts)) and top != "sparkwright"]
    assert {"git", "numpy"} <= set(absent)
    environment = {**user.environment, "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}
    for name in ("SPARKWRIGHT_INDEX", "PYTHONPATH"):
        del environment[name]
    used = set()
    for command, reference in (
        ("install", ""),
        ("list", ""),
        ("doctor", ""),
        ("rollback", "nothing-installed"),
        ("uninstall", ""),
    ):
        words = [sys.executable, "-c", RUN, str(unpacked), json.dumps(absent), *command.split()]
        done = subprocess.run(words, env=environment, text=True, capture_output=True, check=False)
        assert (done.returncode, reference in done.stderr) == (bool(reference), True), done.stderr
        used |= set(json.loads(done.stdout.splitlines()[-1]))
    assert used == present


# Warm packs.

WHEEL = wheel("vllm")


def offer(world: World, folder: Path, name: str = ONE, **key: Any) -> WarmPack:
    """Publish a release with a pack for the recipe toy-cpu."""
    folder.mkdir(exist_ok=True)
    archive, pack = packs.pack(folder, key=replace(packs.KEY, **{"wheels": {"vllm": WHEEL.sha256}, **key}))
    with world.changing() as transaction:
        transaction.put(replace(pack, url=""), archive)

    def with_pack(release: Release) -> Release:
        return replace(release, packs=(pack,))

    world.publish(name, [WHEEL], change=with_pack)
    return pack


def own(user: User, name: str = ONE) -> set[str]:
    """Return the files of the packs of a release."""
    folder = user.prefix / "releases" / name / CACHES / PACKS
    return {path.name for path in folder.glob("*")}


def test_a_pack_is_fetched_when_it_is_asked_for_and_goes_with_its_release(world: World, tmp_path: Path) -> None:
    pack, user = offer(world, tmp_path / "one"), world.user()
    assert user.install().code == 0
    assert own(user) == set()
    marker = Prefix(user.prefix).marker(ONE)
    assert marker
    assert marker.packs == {"toy-cpu": pack.size}
    outcome = user.run("install", "--warm", "toy-cpu")
    assert (outcome.code, outcome.document["release"]["state"]) == (0, "there already")
    assert outcome.document["packs"][0]["sha256"] == pack.sha256
    assert own(user) == {pack.sha256, f"{pack.sha256}.json"}
    record = user.prefix / "releases" / ONE / CACHES / PACKS / f"{pack.sha256}.json"
    assert msgspec.json.decode(record.read_bytes(), type=WarmPack) == pack
    # A release that follows, and the way back.
    world.publish(TWO, [wheel("vllm", "1.1")])
    assert user.install().code == 0
    assert user.run("rollback").code == 0
    assert own(user) == {pack.sha256, f"{pack.sha256}.json"}
    assert user.run("doctor").code == 0
    assert user.run("uninstall", ONE).code == 0
    assert own(user) == set()


def test_a_pack_that_the_release_does_not_have_is_refused(world: World, tmp_path: Path) -> None:
    offer(world, tmp_path / "one")
    user = world.user()
    assert user.install("--warm", "other").reference == "pack-unknown"
    assert user.run("uninstall").code == 0
    assert user.install("--dry-run", "--warm", "toy-cpu").code == 0
    assert not own(user)


def test_a_pack_of_other_wheels_or_of_another_publisher_is_refused(world: World, tmp_path: Path) -> None:
    """An index elsewhere may have a release of the same name and wheels, and the user trusts its root."""
    offer(world, tmp_path / "one", wheels={"vllm": "b" * 64})
    user = world.user()
    outcome = user.install("--warm", "toy-cpu")
    assert (outcome.reference, outcome.document["error"]["details"]) == ("pack-foreign", ["vllm"])
    trusted = ("--trust", world.fingerprint)
    assert user.run("install", "--index", str(world.root), *trusted, "--warm", "toy-cpu").reference == "pack-foreign"
    (tmp_path / "second").mkdir()
    with World(tmp_path / "second").served() as second:
        offer(second, tmp_path / "two")
        words = ("--index", second.url, "--trust", second.fingerprint, "--version", ONE)
        assert user.run("install", *words, "--warm", "toy-cpu").reference == "environment-unusable"
    assert not own(user)


@pytest.mark.parametrize("spoil", [lambda data: data[::-1], lambda data: data + bytes(1_000_000)], ids=["other", "longer"])
def test_a_pack_that_is_not_the_signed_one_is_not_kept(world: World, tmp_path: Path, spoil: Callable[[bytes], bytes]) -> None:
    pack, user = offer(world, tmp_path / "one"), world.user()
    world.faults[pack.path] = answer(spoil((world.root / pack.path).read_bytes()))
    assert user.install("--warm", "toy-cpu").reference in ("download-invalid", "index-damaged")
    assert (user.current, own(user)) == (ONE, set())
    world.faults.clear()
    assert user.run("install", "--warm", "toy-cpu").code == 0


def test_a_kill_while_a_pack_is_brought_leaves_none_or_a_whole_one(world: World, tmp_path: Path) -> None:
    pack, user, kills = offer(world, tmp_path / "one"), world.user(), 0
    assert user.install().code == 0
    folder = user.prefix / "releases" / ONE / CACHES / PACKS
    with user.forking() as run:
        for step in range(1, 200):
            ended = run(step, ["install", "--json", "--warm", "toy-cpu"])
            if (folder / f"{pack.sha256}.json").exists():
                assert sha256_file(folder / pack.sha256) == pack.sha256
            if ended.startswith("ended"):
                break
            kills += 1
    assert (ended, kills > 5) == ("ended 0", True)
    assert own(user) == {pack.sha256, f"{pack.sha256}.json"}
