"""What a rebuild compares: members, archives and build records, on real wheels and real libraries."""

from __future__ import annotations

import dataclasses
import io
import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.refusals import refusal

from sparkwright.audit import policy, reproduce
from sparkwright.audit.reproduce import Rebuild
from sparkwright.builder import pipeline
from sparkwright.builder.wheel import archive as wheelfile
from sparkwright.builder.wheel.archive import WheelName
from sparkwright.cli import main

if TYPE_CHECKING:
    from tests.unit.conftest import Cli, Mini

AUDIT = Path(__file__).parents[2] / "ci" / "sparkwright" / "demo" / "project" / "ci" / "audit" / "demo.yaml"
NAME = "mini-1.0-py3-none-any.whl"
METADATA = "Metadata-Version: 2.4\nName: mini\nVersion: 1.0\n"


def made(folder: Path, files: Mapping[str, bytes]) -> Path:
    """Return a wheel of *files* in the new *folder*."""
    folder.mkdir()
    wheelfile.write(folder / NAME, WheelName.of(NAME), files, METADATA, pure=True)
    return folder / NAME


def rebuild(first: Path, again: Path, **changes: Any) -> Rebuild:
    """Return the comparison of two wheels."""
    options = {"compiler": ("12.2.0", "12.2.0"), "cached": False, **changes}
    return reproduce.compare(first, again, policy.load(AUDIT, "12.1f"), first.parent, **options)


# Members.


def test_members_that_differ_are_named(tmp_path: Path) -> None:
    """A member with other bytes, and one that only one wheel has, are unexplained; RECORD follows from them."""
    one = made(tmp_path / "one", {"mini/a.py": b"1", "mini/gone.py": b"", "mini/same.py": b"s"})
    two = made(tmp_path / "two", {"mini/a.py": b"2", "mini/new.py": b"", "mini/same.py": b"s"})
    found = rebuild(one, two)

    assert (found.verdict, found.equal) == ("different", 3)
    assert found.members == ("mini-1.0.dist-info/RECORD", "mini/a.py", "mini/gone.py", "mini/new.py")
    assert found.unexplained == ("mini/a.py", "mini/gone.py", "mini/new.py")


def test_archives_of_equal_members_have_the_same_device_code(tmp_path: Path) -> None:
    """Order and compression of the archive change its hash, and nothing that is installed."""
    one = made(tmp_path / "one", {"mini/a.py": b"a" * 1000, "mini/b.py": b"b" * 1000})
    (tmp_path / "two").mkdir()
    with zipfile.ZipFile(one) as source, zipfile.ZipFile(tmp_path / "two" / NAME, "w") as target:
        for name in reversed(source.namelist()):
            target.writestr(name, source.read(name))
    found = rebuild(one, tmp_path / "two" / NAME)

    assert (found.verdict, found.members, found.equal) == ("same-device-code", (), 5)


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, "different"),
        ({"compiler": ("12.2.0", "13.3.0")}, "same-device-code"),
        ({"same_paths": False}, "same-device-code"),
    ],
)
def test_host_code_may_differ_only_for_a_reason(tmp_path: Path, changes: dict[str, Any], verdict: str) -> None:
    """Another host compiler, or folders of other names, explain another library; without them it is another wheel."""
    one, two = (made(tmp_path / name, {"mini/x.so": name.encode()}) for name in ("one", "two"))

    assert rebuild(one, two, **changes).verdict == verdict


def test_a_damaged_wheel_is_refused(tmp_path: Path) -> None:
    """The error names the file."""
    one = made(tmp_path / "one", {"mini/a.py": b"a"})
    (tmp_path / NAME).write_bytes(one.read_bytes()[:-20])

    with refusal("wheel-invalid", match="mini-1"):
        rebuild(one, tmp_path / NAME)


# Build records.


def built(mini: Mini) -> Path:
    """Return the mini CUTLASS, which is built without a compiler."""
    session = mini.session()
    session = dataclasses.replace(session, output=mini.root / "dist")
    return pipeline.path_of(session, pipeline.build(session, "cutlass"))


def test_every_wheel_says_what_it_was_made_of(mini: Mini) -> None:
    """The record names fork, source and every reviewed file, and nothing of the machine: equal on all of them."""
    record = reproduce.read_record(built(mini))

    assert (record.stack, record.source.fork, record.compiler) == ("demo", "cutlass", "")
    assert all("/" in name or name in ("sparkwright", "--targets") for name in record.inputs)
    assert {"forks/demo/lock.yaml (cutlass)", "build/demo/environment.yaml", "sparkwright"} <= record.inputs.keys()


def test_a_wheel_of_the_same_inputs_is_built_by_the_same_choices(mini: Mini) -> None:
    """Kind of source and target are the wheel's, whatever the command line says."""
    path = built(mini)
    session = dataclasses.replace(mini.session(), source="sdist", without=("supported-12.1",))
    found = reproduce.rebuild_session(session, path, reproduce.read_record(path))

    assert (found.source, found.without, found.forks, found.target) == ("git", (), ("cutlass",), "")


def test_other_inputs_are_refused_by_name(mini: Mini) -> None:
    """A changed setting, and a patch that the wheel's checkout did not have, are each named."""
    path = built(mini)
    mini.edit("build/demo/environment.yaml", "distribution: mini-cutlass\n", "distribution: mini-cutlass\n    variables: {X: '1'}\n")
    (mini.root / "forks" / "demo" / "cutlass").mkdir()
    (mini.root / "forks" / "demo" / "cutlass" / "series").write_text("# none\n")

    with refusal("inputs-differ") as caught:
        reproduce.rebuild_session(mini.session(), path, reproduce.read_record(path))
    assert caught.value.details == ("forks/demo/cutlass/series", "build/demo/environment.yaml")


def with_record(path: Path, folder: Path, record: bytes) -> Path:
    """Return a copy of a wheel with another build record."""
    folder.mkdir()
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(folder / path.name, "w") as target:
        for name in source.namelist():
            target.writestr(name, record if name.endswith("/sparkwright.json") else source.read(name))
    return folder / path.name


@pytest.mark.parametrize("stack", ["../demo", "other", ""])
def test_a_record_names_no_folder(mini: Mini, tmp_path: Path, stack: str) -> None:
    """A stack that is not among those that are here is refused; no path is made of the wheel's word."""
    path = built(mini)
    with zipfile.ZipFile(path) as archive:
        record = json.loads(archive.read(next(name for name in archive.namelist() if name.endswith("sparkwright.json"))))
    other = with_record(path, tmp_path / "other", json.dumps({**record, "stack": stack}).encode())

    with refusal("not-provided", match="is of stack"):
        reproduce.rebuild_session(mini.session(), other, reproduce.read_record(other))


@pytest.mark.parametrize("record", [b"", b"{}", b"[1", b'{"stack": 3}', b"\xff"])
def test_a_wheel_without_a_record_cannot_be_built_again(mini: Mini, tmp_path: Path, record: bytes) -> None:
    """An official wheel, and one whose record is no record, are refused with what to do."""
    with refusal("not-provided", match="no build record"):
        reproduce.read_record(with_record(built(mini), tmp_path / "other", record))


def test_elsewhere_is_a_new_folder(mini: Mini, tmp_path: Path) -> None:
    """A folder that holds something is nobody's to fill; a temporary one is gone afterwards; a named one stays."""
    session = mini.session()
    with refusal("usage", match="not an empty folder"), reproduce.separate_store(session, mini.root, cached=False):
        pass
    with reproduce.separate_store(session, None, cached=False) as other:
        place = other.store.root
        assert not (place / "cache").exists()
        assert not other.cached
    assert not place.exists()
    with reproduce.separate_store(session, tmp_path / "named", cached=True):
        pass
    assert (tmp_path / "named" / "store" / "cache").is_dir()


# The verb.


def test_a_wheel_built_again_is_the_same_to_the_byte(mini: Mini, cli: Cli) -> None:
    """Fetched, patched and packed anew in another store, the wheel is identical; nothing is left behind."""
    path = built(mini)
    done = cli("rebuild", *mini.words, "--check", "--json", path)

    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)["rebuilds"]
    assert (found["verdict"], found["first"], found["members"]) == ("identical", found["again"], [])
    assert "fetch cutlass" in done.stderr, "the other store has no source yet"
    assert not (mini.cache / "work" / "rebuild").exists()


@pytest.mark.parametrize("check", [True, False])
def test_a_changed_file_is_another_wheel(mini: Mini, tmp_path: Path, cli: Cli, check: bool) -> None:
    """One changed header in the first wheel is found and named; with --check the verb fails."""
    path = built(mini)
    (tmp_path / "changed").mkdir()
    changed = tmp_path / "changed" / path.name
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(changed, "w") as target:
        for name in source.namelist():
            target.writestr(name, source.read(name) + (b"//\n" if name.endswith("version.h") else b""))
    done = cli("rebuild", *mini.words, *(["--check"] if check else []), "--json", changed)

    document = json.loads(done.stdout)
    assert done.returncode == check
    assert document["rebuilds"][0]["verdict"] == "different"
    (name,) = [name for name in document["rebuilds"][0]["members"] if not name.endswith("RECORD")]
    assert name.endswith("version.h")
    error = document.get("error")
    assert not check or (error["reference"], error["details"]) == ("rebuild-differs", [name])


def test_a_wheel_that_is_not_there_is_said_to_be_missing(mini: Mini) -> None:
    """A file, a fork that was never built, and no build at all each have their own sentence."""
    for words, says in ((["x.whl"], "no wheel x.whl"), (["cutlass"], "is not in"), ([], "no wheel to build again")):
        with refusal("not-provided", match=says):
            main.run(["rebuild", *mini.words, *words])


def test_the_mode_of_a_member_says_only_whether_it_is_a_program(tmp_path: Path) -> None:
    """The umask of whoever packed the base leaves no trace."""
    files = {"mini/a.py": b"a", "mini-1.0.dist-info/METADATA": METADATA.encode(), "mini-1.0.dist-info/WHEEL": b"Root-Is-Purelib: true\n"}
    results = []
    for mode in (0o644, 0o664):
        base = made(tmp_path / f"{mode:o}", {name: data for name, data in files.items() if "dist-info" not in name})
        packed = io.BytesIO()
        with zipfile.ZipFile(base) as source, zipfile.ZipFile(packed, "w") as target:
            for name in source.namelist():
                info = zipfile.ZipInfo(name)
                info.external_attr = (0o100000 | mode) << 16
                target.writestr(info, source.read(name))
        base.write_bytes(packed.getvalue())
        (tmp_path / f"out{mode:o}").mkdir()
        results.append(wheelfile.remake(base, tmp_path / f"out{mode:o}", version="1.0+a").read_bytes())

    assert results[0] == results[1]
