"""What a rebuild compares: members, archives and build records, on real wheels and real libraries."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.refusals import refusal
from tests.support import fatbins
from tests.unit.conftest import Cli, Mini

from sparkwright.audit import policy, reproduce, wheel
from sparkwright.audit.reproduce import Rebuild
from sparkwright.builder import pipeline
from sparkwright.builder.wheel import archive as wheelfile
from sparkwright.builder.wheel.archive import WheelName
from sparkwright.cli import main

AUDIT = (
    Path(__file__).parents[2]
    / "ci"
    / "sparkwright"
    / "demo"
    / "project"
    / "ci"
    / "audit"
    / "demo.yaml"
)
NAME = "mini-1.0-py3-none-any.whl"
METADATA = "Metadata-Version: 2.4\nName: mini\nVersion: 1.0\n"


def made(folder: Path, files: Mapping[str, bytes]) -> Path:
    """Return a wheel of *files* in the new *folder*."""
    folder.mkdir()
    wheelfile.write(folder, WheelName.of(NAME), files, METADATA, pure=True)
    return folder / NAME


def rebuild(first: Path, again: Path) -> Rebuild:
    """Return the comparison of two wheels."""
    return reproduce.compare(first, again, policy.load(AUDIT, "12.1f"), first.parent)


# Members.


@pytest.mark.parametrize(
    ("first", "again", "verdict", "unexplained"),
    [
        (
            {"mini/a.py": b"1", "mini/gone.so": b""},
            {"mini/a.py": b"2", "mini/new.so": b""},
            "different",
            ("mini/a.py", "mini/gone.so", "mini/new.so"),
        ),
        ({"mini/x.so": b"1"}, {"mini/x.so": b"2"}, "same-device-code", ()),
        ({"mini/a.py": b"1"}, {"mini/a.py": b"1"}, "identical", ()),
    ],
)
def test_only_host_code_may_differ(
    tmp_path: Path,
    first: dict[str, bytes],
    again: dict[str, bytes],
    verdict: str,
    unexplained: tuple[str, ...],
) -> None:
    """Another host compiler makes another library of the same device code."""
    result = rebuild(made(tmp_path / "one", first), made(tmp_path / "two", again))

    assert (result.verdict, result.unexplained) == (verdict, unexplained)
    with refusal("rebuild-differs") if unexplained else contextlib.nullcontext():
        reproduce.raise_for_difference(result)


def test_a_library_with_other_device_code_is_different(tmp_path: Path) -> None:
    wheels = []
    for name in ("one", "two"):
        data = fatbins.library(tmp_path, [fatbins.cubin(tmp_path, "sm_121f", kernels=(name,))])
        wheels.append(made(tmp_path / name, {"mini/x.so": data}))
    result = rebuild(*wheels)
    report = wheel.audit(wheels[0], policy.load(AUDIT, "12.1f"), tmp_path, judged="any")

    assert (result.verdict, result.unexplained) == ("different", ("mini/x.so",))
    assert result.device_code[0] == report.device_code != result.device_code[1]


# Build records.


def built(mini: Mini) -> Path:
    """Return the mini CUTLASS, which is built without a compiler."""
    context = mini.context()
    context = dataclasses.replace(context, output=mini.root / "dist")
    return pipeline.wheel_path(context, pipeline.build(context, "cutlass"))


def test_other_inputs_are_refused_by_name(mini: Mini) -> None:
    """A changed setting, and a patch that the wheel's checkout did not have, are each named."""
    path = built(mini)
    mini.edit(
        "build/demo/environment.yaml",
        "distribution: mini-cutlass\n",
        "distribution: mini-cutlass\n    variables: {X: '1'}\n",
    )
    (mini.root / "forks" / "demo" / "cutlass").mkdir()
    (mini.root / "forks" / "demo" / "cutlass" / "series").write_text("# none\n")

    with refusal("inputs-differ") as caught:
        reproduce.rebuild_context(mini.context(), path, reproduce.read_record(path))
    assert caught.value.details == ("forks/demo/cutlass/series", "build/demo/environment.yaml")


@pytest.mark.parametrize("record", [b"", b"{}", b"\xff", b'{"x":' * 10_000, "../demo", "other"])
def test_a_wheel_without_a_record_of_this_checkout_cannot_be_built_again(
    mini: Mini, tmp_path: Path, record: bytes | str
) -> None:
    """Its record is none, or names a stack that is not here; no path is made of that name."""
    path = built(mini)
    other = tmp_path / path.name
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(other, "w") as target:
        for name in source.namelist():
            data = source.read(name)
            if name.endswith("/sparkwright.json"):
                good = {**json.loads(data), "stack": record}
                data = record if isinstance(record, bytes) else json.dumps(good).encode()
            target.writestr(name, data)

    with refusal("not-provided", match="no build record|no stack"):
        reproduce.rebuild_context(mini.context(), other, reproduce.read_record(other))


# The verb.


def test_rebuild_finds_the_same_wheel(
    mini: Mini, cli: Cli
) -> None:
    """Fetched, patched and packed anew in another store, the wheel is identical; nothing is left behind."""
    path = built(mini)
    done = cli("build", "--again", *mini.words, "--json", path)

    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)["rebuilds"]
    assert (found["verdict"], found["first"], found["members"]) == ("identical", found["again"], [])
    assert "fetch cutlass" in done.stderr, "the other store has no source yet"
    assert not (mini.cache / "work" / "rebuild").exists()
    with refusal("not-provided", match="no such wheel"):
        main.run(["build", "--again", *mini.words, "x.whl"])
