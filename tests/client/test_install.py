"""Installing, listing, going back, removing and running, by the command line, with real TUF metadata, wheels, uv and HTTP."""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import msgspec
import pytest
from tests.client.test_refusals import dripping
from tests.client.world import PYTHON, SITE, User, World, wheel
from tests.support import mounts, refused
from uv import find_uv_bin

from sparkwright.client import main
from sparkwright.client.records import FileEdit, Overlay, TextChange

ONE, TWO, THREE = "2026.11.1", "2026.11.2", "2026.11.3"


@pytest.fixture
def two(world: World) -> World:
    """An index with two releases of a stack, which share a package."""
    shared = wheel("other", "2.0")
    world.publish(ONE, [wheel("demo", "1.0")], [shared])
    world.publish(TWO, [wheel("demo", "1.1")], [shared])
    return world


def with_both(world: World) -> User:
    """Return a user who has installed one release after the other."""
    user = world.user()
    assert user.install("--version", ONE).code == 0
    assert user.install().code == 0
    return user


def test_install_makes_an_environment_and_leaves_it_alone(world: World) -> None:
    """`current` leads to an environment with the set; a second run does nothing."""
    world.publish(ONE, [wheel("demo")], [wheel("other", "2.0")])
    user = world.user()

    first = user.install()

    assert (first.code, user.current) == (0, ONE), first.said
    assert first.document["release"]["added"] == ["demo 1.0", "other 2.0"]
    assert (user.site() / "demo" / "__init__.py").is_file()
    before = user.listing()
    assert user.run("install").document["release"]["state"] == "there already"
    assert user.listing() == before


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
    assert {"some-demo", "hello"} <= {path.name for path in (root / "bin").iterdir()}


def test_install_from_a_folder_copies_and_never_links(world: World) -> None:
    """An index may be a folder; what lies in it shares nothing with what is installed."""
    world.publish(ONE, [wheel("demo")])
    user = world.user()
    user.environment["SPARKWRIGHT_INDEX"] = str(world.root)

    assert user.install().code == 0
    for path in [*world.root.rglob("*.whl"), *user.cache.rglob("*.whl")]:
        assert path.stat().st_nlink == 1


def test_second_release_shares_what_is_equal(two: World) -> None:
    """Each release has an environment; an equal package is the same file on the disk."""
    user = with_both(two)

    inodes = {(user.site(name) / "other/__init__.py").stat().st_ino for name in (ONE, TWO)}
    assert len(inodes) == 1
    assert user.current == TWO
    result = user.run("install", "--version", ONE).document["release"]
    assert (result["state"], result["added"], result["removed"]) == (
        "switched",
        ["demo 1.0"],
        ["demo 1.1"],
    )


def test_rollback_goes_back_and_install_forward_again(two: World) -> None:
    """Going back needs no index, makes nothing, and can be undone."""
    user = with_both(two)
    before = user.listing()
    two.faults["metadata/timestamp.json"] = lambda handler: handler.send_error(503)

    back = user.run("rollback")

    assert (back.code, user.current) == (0, ONE), back.said
    assert "not known" in back.said
    assert user.run("rollback").reference == "nothing-installed"
    two.faults.clear()
    assert user.run("install").document["release"]["state"] == "switched"
    assert user.listing() == before


def test_rollback_waits_for_no_index(two: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that answers slowly, or a folder of trust that is gone wrong, keeps nobody from going back."""
    monkeypatch.setattr(main, "PATIENCE", 0.5)
    user = with_both(two)
    two.faults["metadata/timestamp.json"] = dripping
    began = time.monotonic()

    assert user.run("rollback").code == 0
    assert time.monotonic() - began < 5
    two.faults.clear()
    assert user.run("install").code == 0
    (user.prefix / "trust" / "indexes.json").write_text("{")
    assert user.run("rollback").code == 0


@pytest.mark.parametrize("others", [False, True])
def test_rollback_to_a_yanked_release_needs_a_yes(two: World, others: bool) -> None:
    """
    A release that was yanked meanwhile is named with the reason, and not taken by the way; its own index says so,
    whichever the later one is from.
    """
    user = with_both(two)
    if others:
        other = World(two.folder / "others")
        other.publish(TWO, [wheel("demo", "3.0")])
        user.environment["SPARKWRIGHT_INDEX"] = str(other.root)
        assert user.run("install", "--renew", "--trust", other.fingerprint).code == 0
    two.yank(ONE, "it answers wrongly")

    refused = user.run("rollback")

    assert (refused.reference, user.current) == ("release-yanked", TWO)
    assert "it answers wrongly" in refused.said
    assert user.run("rollback", "--yes").code == 0
    assert user.current == ONE
    assert "yanked: it answers wrongly" in user.run("doctor").said + str(
        user.run("doctor").document
    )


def test_install_skips_a_yanked_release_unless_it_is_named(two: World) -> None:
    """The newest release that is offered is taken; a yanked one by its name alone, with a warning."""
    two.yank(TWO)
    user = two.user()

    assert user.install().document["release"]["name"] == ONE
    named = user.run("install", "--version", TWO)
    assert (named.code, user.current) == (0, TWO)
    assert "yanked" in named.said


def test_a_candidate_is_installed_only_from_its_channel(world: World) -> None:
    """The default channel is verified, also for a release that is named."""
    world.publish(ONE, [wheel("demo")], channel="candidate")
    user = world.user()

    assert user.install().reference == "release-unproved"
    assert user.run("install", "--version", ONE).reference == "release-unproved"
    assert user.install("--channel", "candidate").code == 0


def test_a_release_that_is_called_verified_and_lacks_a_gate_is_refused(world: World) -> None:
    """What the signed record of the release lacks counts, whatever its channel is said to be."""
    world.publish(
        ONE,
        [wheel("demo")],
        channel="candidate",
        state=lambda state: msgspec.structs.replace(state, channel="verified"),
    )
    user = world.user()

    assert user.install().reference == "release-unproved"
    assert user.listing() == {}


def test_a_promoted_release_is_the_same_environment(world: World) -> None:
    """Promotion changes what is shown, not what is installed."""
    demo = wheel("demo")
    world.publish(ONE, [demo], channel="candidate")
    user = world.user()
    user.install("--channel", "candidate")
    world.publish(ONE, [demo], channel="verified")

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
    assert chosen("--stack", "2026.06") == "2026.06.5"
    assert user.listing() == {}
    assert user.install("--stack", "2026.06").code == 0
    assert chosen() == "2026.06.5"
    assert chosen("--stack", "2026.11") == chosen("--version", ONE) == ONE


def test_list_shows_states_and_what_is_installed(two: World) -> None:
    """The list has every release of the channel, with its state."""
    user = with_both(two)
    two.yank(ONE)
    document = user.run("list").document

    assert list(document["releases"]) == [TWO, ONE]
    assert document["releases"][ONE]["yanked"]
    assert (document["current"], document["installed"]) == (TWO, [ONE, TWO])


def test_uninstall_removes_a_release(two: World) -> None:
    """A release goes with its folder; without the current one, nothing runs."""
    user = with_both(two)

    assert user.run("uninstall", ONE).code == 0
    assert not (user.prefix / "releases" / ONE).exists()
    assert user.run("uninstall").document["removed"] == TWO
    assert not (user.prefix / "current").is_symlink()
    for words in (
        ["uninstall"],
        ["uninstall", ONE],
        ["uninstall", "../../etc"],
        ["run", "--", "true"],
        ["rollback"],
    ):
        assert user.run(*words).reference == "nothing-installed"


def test_verify_names_the_release_of_a_wheel(two: World, tmp_path: Path) -> None:
    """A wheel file is known by its bytes alone."""
    user, path = two.user(), tmp_path / "renamed.whl"
    path.write_bytes(wheel("demo", "1.1").data)
    found = user.run("verify", "--trust", two.fingerprint, path).document["wheels"][0]

    assert (found["release"], found["wheel"]["name"]) == (TWO, "demo-1.1-py3-none-any.whl")
    assert found["state"]["channel"] == "verified"
    path.write_bytes(wheel("demo", "1.2").data)
    assert user.run("verify", path).reference == "release-unknown"
    two.asked.clear()
    assert user.run("verify", tmp_path / "nosuch.whl").reference == "wheel-invalid"
    assert not [place for place in two.asked if "targets/releases" in place]


def test_run_has_the_programs_and_caches_of_the_release(world: World) -> None:
    """A program sees the environment of the current release, with a cache of its own for each JIT compiler."""
    world.publish(ONE, [wheel("demo")])
    user = world.user()
    user.install()
    words = [sys.executable, "-m", "sparkwright.client.main", "run", "--", "python", "-c"]
    text = "import demo, os, sys; print(sys.prefix, os.environ['VIRTUAL_ENV'], os.environ['TRITON_CACHE_DIR'], os.environ['CUDA_CACHE_PATH'])"
    environment = {
        **user.environment,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "CUDA_CACHE_PATH": "/elsewhere",
        # A shell has the caches.env of another release.
        "TRITON_CACHE_DIR": str(user.prefix / "releases" / TWO / "caches/triton"),
    }
    done = subprocess.run(
        [*words, text], env=environment, capture_output=True, text=True, check=False
    )

    folder = user.prefix / "releases" / ONE
    assert done.stdout.split() == [
        str(folder),
        str(folder),
        str(folder / "caches/triton"),
        "/elsewhere",
    ], done.stderr
    assert f'TRITON_CACHE_DIR="{folder}/caches/triton"' in (folder / "caches.env").read_text()
    assert user.run("run", "--", "no-such-program").reference == "tool-missing"
    text_file = user.folder / "text"
    text_file.write_text("no program")
    text_file.chmod(0o755)
    assert user.run("run", "--", text_file).reference == "tool-missing"
    assert user.run("run").code == 2


def test_doctor_finds_every_kind_of_change_and_renew_makes_it_anew(two: World) -> None:
    """A changed, added or removed file is named; a new environment has the right ones, although uv's cache was changed by the link."""
    user = with_both(two)
    assert user.run("doctor").code == user.run("doctor", "--deep").code == 0
    path = user.site() / "other/__init__.py"
    state, data = path.stat(), path.read_bytes()
    path.chmod(0o644)
    path.write_bytes(data[::-1])
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert user.run("doctor").code == 0  # neither size nor time tell
    deep = user.run("doctor", "--deep")
    assert deep.reference == "environment-broken"
    assert [
        line
        for line in deep.document["error"]["details"]
        if "other/__init__.py" in line and ONE in line
    ]

    (user.site() / "demo/__init__.py").unlink()
    subprocess.run(
        [
            find_uv_bin(),
            "pip",
            "install",
            "-q",
            "--offline",
            "--python",
            user.prefix / "current/bin/python",
            _stranger(user),
        ],
        check=True,
    )
    faults = "\n".join(user.run("doctor").document["error"]["details"])
    assert "removed: " in faults
    assert "added: " in faults
    assert user.run("rollback").code == 0  # the size and time of that one are right
    assert user.run("install").reference == "environment-broken"

    for name in (ONE, TWO):
        renewed = user.run("install", "--renew", "--version", name)
        assert renewed.code == 0, renewed.said
    assert user.run("doctor", "--deep").code == 0
    assert path.read_bytes() == data


def test_renew_means_the_current_release_in_its_channel(two: World) -> None:
    """A damaged current release is not left for the newest verified one."""
    user = with_both(two)
    three = [wheel("demo", "1.2")]
    two.publish(THREE, three, channel="candidate")
    for release, words in ((THREE, ["--channel", "candidate"]), (ONE, ["--version", ONE])):
        assert user.run("install", *words).code == 0
        (user.site() / "demo/__init__.py").unlink()
        doctor = user.run("doctor")
        assert f"`sparkwright install --renew --version {release}`" in doctor.said

        assert user.run("install", "--renew").document["release"]["name"] == release
        assert (user.current, user.run("doctor").code) == (release, 0)


@pytest.mark.parametrize("text", [None, "{"])
def test_an_environment_without_a_readable_marker_is_renewed_or_removed(
    two: World, text: str | None
) -> None:
    """A lost marker keeps nobody from the two ways out; the environment is not replaced unasked."""
    user = with_both(two)
    marker = user.prefix / "releases" / TWO / "sparkwright.json"

    def damage() -> None:
        marker.unlink()
        if text is not None:
            marker.write_text(text)

    damage()
    assert user.run("doctor").reference == "environment-broken"
    assert user.run("install").reference == "environment-broken"
    assert user.run("install", "--renew", "--version", TWO).code == 0
    assert (user.current, user.run("doctor").code) == (TWO, 0)
    damage()
    assert user.run("uninstall", TWO).code == 0
    assert sorted(path.name for path in (user.prefix / "releases").iterdir()) == [ONE]


def test_uninstall_tells_what_cannot_be_removed(two: World) -> None:
    """What stays is reported, keeps its name free of a new environment, and goes with a later run."""
    user = with_both(two)
    mounted = user.prefix / "releases" / ONE / "caches/triton"
    mounted.mkdir()
    client = shlex.join([sys.executable, "-m", "sparkwright.client.main"])
    commands = [f"uninstall {ONE}", f"uninstall {ONE}", f"install --renew --version {ONE}"]
    script = "; ".join(f"{client} {command} >/dev/null" for command in commands)
    environment = {**user.environment, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [*mounts.mounting_shell(), f"mount -t tmpfs none {shlex.quote(str(mounted))} && {script}"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.stderr.count("environment-unusable") == 3, done.stderr
    assert user.run("uninstall", ONE).code == 0
    assert user.run("install", "--version", ONE).code == 0


def test_dry_run_switches_nothing(two: World) -> None:
    """A release that is installed does not become current by a trial."""
    user = with_both(two)
    before = user.listing()

    trial = user.run("install", "--dry-run", "--version", ONE).document["release"]

    assert (trial["state"], trial["added"], user.listing()) == (
        "would switch",
        ["demo 1.0"],
        before,
    )


def test_an_environment_of_other_contents_is_not_replaced_unasked(
    world: World, record_property: Callable[[str, object], None]
) -> None:
    """The same release for another Python leaves what may be running, until `--renew`."""
    world.publish(ONE, [wheel("demo")])
    user = world.user()
    assert user.install().code == 0
    marker = user.prefix / "releases" / ONE / "sparkwright.json"
    marker.write_bytes(
        msgspec.json.encode({**msgspec.json.decode(marker.read_bytes()), "key": "0" * 64})
    )
    before = user.listing()

    for words in ([], ["--dry-run"]):
        reference = user.run("install", *words).reference
        row = refused.record(record_property, reference, before, user.listing())
        assert row == ("environment-unusable", "nothing")
    assert user.run("install", "--renew").code == 0
    assert user.run("install").document["release"]["state"] == "there already"


def _stranger(user: User) -> Path:
    path = user.folder / "stranger-1.0-py3-none-any.whl"
    path.write_bytes(wheel("stranger").data)
    return path


def test_doctor_runs_nothing_and_believes_no_record(world: World) -> None:
    """A .pth that exits, a RECORD that names the interpreter and a Python that prints without end are shown, not obeyed."""
    world.publish(ONE, [wheel("demo")])
    user = world.user()
    user.install()
    (user.site() / "evil.pth").write_text("import os; os._exit(0)\n")
    info = user.site() / "evil-1.dist-info"
    info.mkdir()
    (info / "RECORD").write_text(f"../../../bin/python,,\n{Path(sys.executable).resolve()},,\n")
    python = user.prefix / "current/bin/python"
    python.unlink()
    python.write_text("#!/bin/sh\nyes | head -c 2000000000\n")
    python.chmod(0o755)

    assert user.run("doctor").reference == "environment-broken"
    assert user.run("install", "--renew").code == 0
    assert user.run("doctor", "--deep").code == 0
    assert user.run("uninstall").code == 0
    assert Path(sys.executable).exists()


def test_a_library_that_cannot_be_loaded_leaves_the_release_before(two: World) -> None:
    """An environment that does not work is removed before `current` leads to it."""
    user = two.user()
    user.install()
    before = user.listing()
    two.publish(
        THREE, [wheel("demo", "1.2", {"demo/_C.abi3.so": b"\x7fELF, and nothing that follows"})]
    )

    broken = user.run("install")

    assert broken.reference == "environment-broken"
    assert "demo/_C.abi3.so" in broken.said
    assert user.listing() == before


def test_a_library_that_needs_a_driver_is_left_out(world: World) -> None:
    """A machine without a GPU can install."""
    text = b"raise ImportError('libcuda.so.1: cannot open shared object file: No such file or directory')\n"
    world.publish(ONE, [wheel("torch", files={"torch/__init__.py": text})])

    assert world.user().install().code == 0


def test_a_module_of_another_python_is_not_loaded(world: World) -> None:
    """A wheel may carry an extension module for each Python (vLLM 0.23.0 does)."""
    own, other = EXTENSION_SUFFIXES[0], ".cpython-399-x86_64-linux-gnu.so"
    content = b"\x7fELF, and nothing that follows"
    world.publish(ONE, [wheel("demo", "1.1", {f"demo/_C{other}": content})])
    world.publish(TWO, [wheel("demo", "1.2", {f"demo/_C{own}": content})])
    user = world.user()
    assert user.install("--version", ONE).code == 0
    assert user.run("install", "--version", TWO).reference == "environment-broken"


@pytest.mark.parametrize("text", ["import os; os._exit(0)", "while True: print('x' * 100_000)"])
def test_a_package_that_ends_or_floods_its_python_is_refused(
    world: World,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    """The trial must say that everything was loaded; its output is bounded."""
    from sparkwright.client import environment
    from sparkwright.core.process import Limits

    monkeypatch.setattr(environment, "_LOAD_LIMITS", Limits(20, 4 << 20, 4))
    world.publish(ONE, [wheel("torch", files={"torch/__init__.py": text.encode()})])
    user = world.user()

    row = refused.record(record_property, user.install().reference, {}, user.listing())
    assert row == ("environment-broken", "nothing")


def _overlaid() -> tuple[list[object], list[object], dict[str, object]]:
    lower = wheel(
        "lower",
        files={"shared/mma.py": b"admits = 'sm_120a'\n", "shared/__init__.py": b"# lower\n"},
    )
    upper = wheel(
        "upper",
        files={
            "shared/mma.py": b"admits = 'sm_121'\n",
            "shared/__init__.py": b"# upper\n",
            "shared/more.py": b"",
        },
    )
    before, after = b"admits = 'sm_121'\n", b"admits = 'sm_121a'\n"
    edit = FileEdit(
        name="admit-sm-121a", package="upper", file="shared/mma.py", before=hashlib.sha256(before).hexdigest(),
        after=hashlib.sha256(after).hexdigest(), changes=(TextChange("'sm_121'", "'sm_121a'"),), reason="it refuses", drop_when="it admits",
    )  # fmt: skip
    return (
        [wheel("demo")],
        [lower, upper],
        {"edits": (edit,), "overlays": (Overlay("upper", "lower", 2, "a test"),)},
    )


def test_edits_and_overlays_are_made_on_the_machine(world: World) -> None:
    """One project's files lie over another's, and a file is edited, whatever order uv writes in; the wheels stay as they are."""
    ours, others, options = _overlaid()
    world.publish(ONE, ours, others, **options)  # type: ignore[arg-type]
    user = world.user()

    assert user.install().code == 0
    shared = user.site() / "shared"
    assert (shared / "mma.py").read_text() == "admits = 'sm_121a'\n"
    assert (shared / "__init__.py").read_text() == "# upper\n"
    assert user.run("doctor", "--deep").code == 0
    assert (shared / "mma.py").stat().st_nlink == 1


@pytest.mark.parametrize("fault", ["before", "after", "anchor", "package", "count", "none"])
def test_edits_that_do_not_fit_are_refused(
    world: World, fault: str, record_property: Callable[[str, object], None]
) -> None:
    """An edit is for one file of one wheel, and an overlay for a number of files."""
    ours, others, options = _overlaid()
    edit, overlay = options["edits"][0], options["overlays"][0]  # type: ignore[index]
    replace = msgspec.structs.replace
    if fault in ("before", "after"):
        edit = replace(edit, **{fault: "0" * 64})
    changes: dict[str, dict[str, object]] = {
        "anchor": {
            "edits": (replace(edit, changes=(TextChange("sm", "x"), TextChange("nowhere", "x"))),)
        },
        "package": {"edits": (replace(edit, package="lower"),)},
        "count": {"overlays": (replace(overlay, files=1),)},
        "none": {"overlays": ()},
    }
    options = {**options, "edits": (edit,), **changes.get(fault, {})}
    world.publish(ONE, ours, others, **options)  # type: ignore[arg-type]
    user = world.user()

    expected = {"count": "set-mixed", "none": "wheel-unsafe"}.get(fault, "edit-mismatch")
    row = refused.record(record_property, user.install().reference, {}, user.listing())
    assert row == (expected, "nothing")


def test_root_is_trusted_once_and_a_mirror_with_it(world: World) -> None:
    """The first use of an index needs its fingerprint; a copy at another address has the same root."""
    world.publish(ONE, [wheel("demo")])
    user = world.user()

    unknown = user.run("install")
    assert unknown.reference == "trust-missing"
    assert unknown.document["error"]["fingerprint"] == world.fingerprint
    assert user.run("install", "--trust", "0" * 64).reference == "trust-missing"
    coloned = ":".join(world.fingerprint[at : at + 2].upper() for at in range(0, 64, 2))
    assert user.run("install", "--trust", coloned).code == 0
    user.environment["SPARKWRIGHT_INDEX"] = str(
        shutil.copytree(world.root, world.folder / "mirror")
    )
    assert user.run("list").code == 0
    del user.environment["SPARKWRIGHT_INDEX"]
    assert user.run("list").document["index"] == world.url  # that of the current release


def test_credentials_are_used_and_not_stored(world: World) -> None:
    """The password of an address stays out of the prefix and of what is shown; later runs find what was trusted."""
    world.publish(ONE, [wheel("demo")], [wheel("other", "2.0")])
    user = world.user()
    user.environment["SPARKWRIGHT_INDEX"] = world.url.replace("://", "://user:s3cret-of-this-test@")

    shown = user.install().said
    shown += str(user.run("list")) + str(user.run("doctor"))
    assert user.run("rollback").reference == "nothing-installed"
    assert "not known" not in shown
    assert user.current == ONE
    for path in user.prefix.rglob("*"):
        assert not path.is_file() or b"s3cret-of-this-test" not in path.read_bytes()
    assert "s3cret-of-this-test" not in shown
    del user.environment["SPARKWRIGHT_INDEX"]
    assert user.run("list").document["index"] == world.url


def test_usage(world: World) -> None:
    """An empty name is no name: it chose the newest candidate once."""
    for words in (
        ["--version", ""],
        ["--stack", ""],
        ["--index", ""],
        ["--prefix", ""],
        ["--channel", "any"],
    ):
        assert world.user().run("install", *words).code == 2
    assert world.user().run("install", "--index", "nowhere").reference == "index-missing"


def test_python_is_chosen_by_name(world: World) -> None:
    """The release must be for the Python that is asked for, and a folder is none."""
    world.publish(ONE, [wheel("demo")])
    user = world.user()

    assert user.install("--python", "/etc").reference == "environment-unusable"
    assert user.install("--python", sys._base_executable).code == 0  # type: ignore[attr-defined]
    assert (user.prefix / "current" / SITE).is_dir()


def test_two_runs_at_once_wait_for_each_other(two: World) -> None:
    """Both end well, and the environment is whole."""
    user = two.user()
    user.install("--dry-run")
    command = [sys.executable, "-m", "sparkwright.client.main", "install"]
    environment = {**user.environment, "PYTHONPATH": os.pathsep.join(sys.path)}
    runs = [
        subprocess.Popen(
            command, env=environment, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        for _ in range(3)
    ]

    assert [run.wait() for run in runs] == [0, 0, 0]
    assert user.run("doctor", "--deep").code == 0
