"""The tree of a fork as git confirms it, its version label, the wheels in its output folder, and wheels that are built again."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import zipfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.refusals import refusal
from tests.unit.conftest import Mini, Repository

from sparkwright.audit import policy, reproduce
from sparkwright.builder import pipeline, workspace
from sparkwright.builder.wheel import archive
from sparkwright.builder.wheel.archive import WheelName
from sparkwright.builder.workspace import source_tree
from sparkwright.cli import main
from sparkwright.core.store import Store


def label(mini: Mini, fork: str) -> str:
    context = mini.context()
    return workspace.version_label(context, source_tree(context, fork))


def test_the_patched_tree_is_what_plain_git_makes(mini: Mini, repository: Repository) -> None:
    """A clone of the upstream with the series applied by hand has the same tree id."""
    made = source_tree(mini.context(), "vllm")
    repository.git("fetch", "--quiet", str(mini.upstreams / "vllm.git"), "v0.33.0")
    repository.git("checkout", "--quiet", "FETCH_HEAD")
    for step in made.steps:
        repository.git("apply", "--index", str(mini.root / "forks/demo/vllm" / step.name))

    assert made.patched == repository.git("write-tree")


def test_a_patch_changes_the_label_of_its_fork_by_its_effect_alone(mini: Mini, locked_mini: Mini) -> None:
    """Equal inputs have equal labels in every checkout."""
    before = {fork: label(mini, fork) for fork in ("cutlass", "flashinfer", "vllm")}
    assert (before["cutlass"], before["vllm"]) == ("spark.demo.p0.cu130", label(locked_mini, "vllm"))
    patch = mini.root / "forks/demo/vllm/take-the-largest-scale-from-loaded-experts-only.patch"
    patch.write_text(patch.read_text().replace("Subject: [PATCH] ", "Subject: [PATCH] Really ", 1))
    assert label(mini, "vllm") == before["vllm"]

    added = next(line for line in patch.read_text().splitlines() if line.startswith("+    ") and line.strip("+ "))
    patch.write_text(patch.read_text().replace(added, f"{added}  # changed"))
    assert [fork for fork in before if before[fork] != label(mini, fork)] == ["vllm"]


def test_rules_and_needed_forks_are_part_of_the_patch_set(mini: Mini) -> None:
    context = mini.context()
    vllm, needed = (source_tree(context, fork) for fork in ("vllm", "cutlass"))
    other = msgspec.structs.replace(needed, tree=vllm.tree)
    before = workspace.patch_set(context.objects, (vllm, needed))
    assert before == workspace.patch_set(context.objects, (vllm,)) != workspace.patch_set(context.objects, (vllm, other))


def built(mini: Mini, output: Path | None = None) -> Path:
    """Return the mini CUTLASS, which is built without a compiler."""
    context = dataclasses.replace(mini.context(), output=output or mini.root / "dist")
    return pipeline.wheel_path(context, pipeline.build(context, "cutlass"))


@pytest.mark.parametrize(
    ("old", "expected"), [("0.33.0", "0.33.0+spark.1"), ("0.7.2.post1", "0.7.2.post1+spark.1"), ("1.0+cu130", "1.0+spark.1")]
)
def test_a_label_replaces_an_earlier_one(old: str, expected: str) -> None:
    assert archive.labelled(old, "spark.1") == expected


def test_a_build_that_is_interrupted_at_its_end_leaves_no_second_wheel(
    mini: Mini, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does the next one, of a third label."""
    put = Store.put

    def interrupted(store: Store, kind: str, key: str, record: Any) -> None:
        if kind == "last":
            raise KeyboardInterrupt
        put(store, kind, key, record)

    built(mini)
    mini.edit("forks/demo/stack.yaml", '"spark.demo"', '"spark.demo.1"')
    with monkeypatch.context() as patched:
        patched.setattr(Store, "put", interrupted)
        with pytest.raises(KeyboardInterrupt):
            built(mini)
    mini.edit("forks/demo/stack.yaml", '"spark.demo.1"', '"spark.demo.2"')
    path = built(mini)

    assert list(path.parent.glob("*.whl")) == [path]


def test_every_output_folder_has_one_wheel_of_a_release(mini: Mini, tmp_path: Path) -> None:
    """A build takes the place of the last one in its output folder; other wheels there stay."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "mine.whl").touch()
    for number, name in enumerate("aba"):
        path = built(mini, tmp_path / name)
        label = f'"spark.demo{f".{number}" if number else ""}"'
        mini.edit("forks/demo/stack.yaml", label, f'"spark.demo.{number + 1}"')

    assert {path.name for path in (tmp_path / "a").glob("*.whl")} == {"mine.whl", path.name}


# Builds again.


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
    mini: Mini, first: dict[str, bytes], again: dict[str, bytes], verdict: str, unexplained: tuple[str, ...]
) -> None:
    """Another host compiler makes another library of the same device code."""
    wheels = []
    for name, files in (("one", first), ("two", again)):
        (mini.root / name).mkdir()
        wheel = WheelName.of("mini-1.0-py3-none-any.whl")
        wheels.append(archive.write(mini.root / name, wheel, files, "Metadata-Version: 2.4\nName: mini\nVersion: 1.0\n", pure=True))
    result = reproduce.compare(*wheels, policy.load(mini.context().project.audit_file, "12.1f"), mini.root)

    assert (result.verdict, result.unexplained) == (verdict, unexplained)
    with refusal("rebuild-differs") if unexplained else contextlib.nullcontext():
        reproduce.raise_for_difference(result)


def test_other_inputs_are_refused_by_name(mini: Mini) -> None:
    """A changed setting, and a patch that the wheel's checkout did not have, are each named."""
    path = built(mini)
    mini.edit("build/demo/environment.yaml", "distribution: mini-cutlass\n", "distribution: mini-cutlass\n    variables: {X: '1'}\n")
    (mini.root / "forks" / "demo" / "cutlass").mkdir()
    (mini.root / "forks" / "demo" / "cutlass" / "series").write_text("# none\n")

    with refusal("inputs-differ") as caught:
        main.run(["build", "--again", *mini.words, str(path)])
    assert caught.value.details == ("forks/demo/cutlass/series", "build/demo/environment.yaml")


@pytest.mark.parametrize("record", [b"", b"{}", b"\xff", b'{"x":' * 10_000, "../demo", "other"])
def test_a_wheel_without_a_record_of_this_checkout_cannot_be_built_again(mini: Mini, record: bytes | str) -> None:
    """Its record is none, or names a stack that is not here; no path is made of that name."""
    path = built(mini)
    with zipfile.ZipFile(path) as source:
        files = {name: source.read(name) for name in source.namelist()}
    name = next(name for name in files if name.endswith("/sparkwright.json"))
    files[name] = record if isinstance(record, bytes) else json.dumps({**json.loads(files[name]), "stack": record}).encode()
    with zipfile.ZipFile(path, "w") as target:
        for item in files.items():
            target.writestr(*item)

    with refusal("not-provided", match="no build record|no stack"):
        main.run(["build", "--again", *mini.words, str(path)])


def test_a_wheel_that_is_built_again_is_the_same(mini: Mini, capsys: pytest.CaptureFixture[str]) -> None:
    """Fetched, patched and packed anew in another store, the wheel is identical; nothing is left behind."""
    main.run(["build", "--again", *mini.words, str(built(mini))])

    said = capsys.readouterr()
    assert ": identical" in said.out
    assert "fetch cutlass" in said.err, "the other store has no source yet"
    assert not (mini.cache / "work" / "rebuild").exists()
