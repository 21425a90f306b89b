"""Wheels by a backend and grafts, with their bills of materials: what cannot be made is refused before anything is taken for a wheel."""

from __future__ import annotations

import dataclasses
import json
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from tests.refusals import refusal
from tests.unit.conftest import Mini

from sparkwright.audit import policy, report
from sparkwright.audit import wheel as wheel_audit
from sparkwright.builder import pipeline
from sparkwright.builder.configure import CMakeLibrary
from sparkwright.builder.toolchain import ForkEnvironment, Toolchain
from sparkwright.builder.wheel import archive, graft, source_wheel
from sparkwright.builder.wheel.archive import SBOM, WheelName
from sparkwright.builder.wheel.sbom import DistInfoFiles, SbomInput, document
from sparkwright.builder.workspace import SourceTree, source_tree
from sparkwright.cherry_picks.apply import AppliedPatch
from sparkwright.core.files import sha256_file
from sparkwright.core.git import REGULAR
from sparkwright.core.store import Store
from sparkwright.forks.context import RunContext
from sparkwright.forks.fetch import FetchedSource
from sparkwright.forks.lock import VendoredLock
from sparkwright.forks.stack import Project

ROOT = Path(__file__).parents[2]
PYPROJECT = b'[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'


@pytest.mark.parametrize(
    ("backend", "words"),
    [
        (b"def build_wheel(folder):\n    raise SystemExit('no compiler')\n", "mini's build backend failed"),
        (b"def build_wheel(folder):\n    return 'mini-1.0-py3-none-any.whl'\n", "made 0 wheels instead of one"),
    ],
    ids=["fails", "no wheel"],
)
def test_a_backend_that_makes_no_wheel_is_refused(tmp_path: Path, store: Store, backend: bytes, words: str) -> None:
    """The error names the log, and no wheel is there."""
    tools = Toolchain("key", tmp_path / "tools")
    tools.python.parent.mkdir(parents=True)
    tools.python.symlink_to(sys.executable)
    (tools.root / "lib/python3.11/site-packages/nvidia/cu13").mkdir(parents=True)
    run = RunContext(Project(ROOT, "2026.11"), store, (), tmp_path)
    tree = run.objects.store_files([("pyproject.toml", REGULAR, PYPROJECT), ("backend.py", REGULAR, backend)])
    files = DistInfoFiles(b"", SbomInput())

    with refusal("build-failed", match=words) as caught:
        source_wheel.build_by_backend(run, tools, ForkEnvironment(), "mini", tree, "t", files, tmp_path)
    assert "full log: " in caught.value.details[-1]
    assert not [*tmp_path.rglob("*.whl")]


CORE = CMakeLibrary("_core", "lib/_core.abi3.so", True)


def test_a_source_of_another_release_is_said_recorded_and_audited(mini: Mini, capsys: pytest.CaptureFixture[str]) -> None:
    """The build, its record and the audit say which release stands for the pinned one, and why; its bill of materials names it."""
    context = mini.context()
    tree = source_tree(context, "cutlass").source.tree
    files = {f"cutlass/{path}": data for path, data in context.objects.files(tree)}
    wheel = archive.write(mini.root, WheelName.of("mini_vllm-0.33.0-py3-none-any.whl"), files, "", pure=True)
    sha256 = sha256_file(wheel)
    wheel.rename(context.store.folder("downloads", sha256) / wheel.name)
    spec = "name: mini-vllm, version: 0.33.0"
    git = '      git: {url: "https://upstream.example/mini/cutlass.git", ref: "v4.7.1"}\n'
    extra = f"      wheel: {{{spec}, tag: py3-none-any, folder: cutlass, release: 4.8.0, accepted: upstream ships it}}\n"
    mini.edit("forks/demo/stack.yaml", git, git + extra)
    locked = f"{{{spec}, filename: {wheel.name}, sha256: {sha256}, size: 1, folder: cutlass, tree: {tree}}}"
    commit = source_tree(context, "cutlass").source.pin
    mini.edit("forks/demo/lock.yaml", f"      commit: {commit}\n", "      commit: unresolved\n")
    mini.edit("forks/demo/lock.yaml", "  flashinfer:\n", f"    wheel: {locked}\n  flashinfer:\n")
    context = dataclasses.replace(mini.context(), output=mini.root / "dist")
    path = pipeline.wheel_path(context, pipeline.build(context, "cutlass"))
    report.show(audited := wheel_audit.audit(path, policy.load(context.project.audit_file, "12.1f"), Path("/nonexistent")))

    text = "cutlass 4.8.0 of the official mini-vllm 0.33.0 wheel, although upstream pins v4.7.1; accepted, because upstream ships it."
    assert list(pipeline.deviations(context, source_tree(context, "vllm"))) == [f"vllm compiles against {text}"]
    assert audited.deviations == (f"cutlass packs {text}",)
    assert capsys.readouterr().err.count(f"cutlass packs {text}") == 2
    with zipfile.ZipFile(path) as opened:
        parts = parsed(opened.read(f"{WheelName.of(path.name).info}/{SBOM}"))[1]
    assert (parts["wheel"]["stack"], parts["source/cutlass"]["pin"]) == ("demo", sha256)


@pytest.mark.parametrize(
    ("targets", "libraries", "details"),
    [
        (("_core", "_more"), (CORE, CMakeLibrary("_more", "_more.abi3.so", False)), ("_more: _more.abi3.so: not in the wheel",)),
        (("all",), (CORE, CMakeLibrary("_more", "_more.abi3.so", True)), ("_more: _more.abi3.so: not in the wheel",)),
        (
            ("all",),
            (CORE, CMakeLibrary("_twice", "_twice.abi3.so", False)),
            ("_twice: _twice.abi3.so: mini/a/_twice.abi3.so, mini/b/_twice.abi3.so",),
        ),
        (("all",), (CMakeLibrary("_test", "_test.so", False),), ()),
    ],
    ids=["named", "installed", "twice", "none"],
)
def test_a_library_without_exactly_one_member_in_the_base_is_refused(
    tmp_path: Path, targets: tuple[str, ...], libraries: tuple[CMakeLibrary, ...], details: tuple[str, ...]
) -> None:
    """What the official wheel does not have cannot be replaced; the error names target, library and members."""
    files = {f"mini/{path}.abi3.so": b"" for path in ("_core", "a/_twice", "b/_twice")}
    base = archive.write(tmp_path, WheelName.of("mini-1.0-cp39-abi3-linux_x86_64.whl"), files, "Name: mini\n", pure=False)
    assert graft.replaced_members(base, [CORE], ForkEnvironment(targets=targets)) == {"mini/_core.abi3.so": CORE.path}
    with refusal("base-mismatch", match="not exactly one library for each target") as caught:
        graft.replaced_members(base, libraries, ForkEnvironment(targets=targets))

    assert caught.value.details == details


NAME = WheelName("mini_vllm", "0.33.0+spark.2026.11.p0", "cp38-abi3-manylinux_2_28_aarch64")
COMMIT, URL = "a" * 40, "https://github.com/acme/mini.git"
OURS = AppliedPatch("x.patch", "1" * 64, "Take the largest", "scales overflow", "e" * 40)
PICK = AppliedPatch("#35568", "2" * 64, "Fix <it> & more", "reports", "f" * 40, 35568)
GIT = SourceTree("vllm", FetchedSource("vllm", "git", f"{URL} @ {COMMIT}", COMMIT, "b" * 40, True), "c" * 40, "d" * 40, (PICK, OURS), ())
FOLDER = FetchedSource("cutlass", "wheel", "vllm-0.33.0-py3-none-any.whl (cutlass)", "9" * 64, "8" * 40, True)
PARTS = SbomInput(
    source=GIT,
    needs=(SourceTree("cutlass", FOLDER, "8" * 40, "8" * 40, (), ()),),
    bases=(("vllm", "vllm-0.33.0-cp38-abi3-manylinux_2_28_aarch64.whl", "3" * 64),),
    vendored={
        "qutlass": VendoredLock("https://github.com/acme/qutlass.git", "main", "unresolved", "unresolved", kind="fetchcontent"),
        "third/party": VendoredLock("https://git.example/p.git", "v1", COMMIT, "b" * 40, kind="submodule"),
    },
    tools=(("nvidia-cuda-nvcc", "nvidia_cuda_nvcc-13.0.88-py3-none-manylinux_2_17_aarch64.whl", "4" * 64),),
    compiled={"vllm/_C.abi3.so": "5" * 64},
    inherited={"vllm/_D.abi3.so": "6" * 64, "vllm/odd.so": ""},
    properties={"stack": "2026.11", "cuda": "cu130"},
)


def parsed(data: bytes) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return the document in *data*, valid by CycloneDX's strict schema, and its components by reference with their properties."""
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(data.decode()) is None
    content: dict[str, Any] = json.loads(data)
    main = content["metadata"]["component"]
    every = [main, *main.get("components", []), *content["components"], *main["pedigree"].get("ancestors", [])]
    for component in every:
        component.update({row["name"].removeprefix("sparkwright:"): row["value"] for row in component.get("properties", [])})
        component.update(sha256=hashes[0]["content"] if (hashes := component.get("hashes")) else "")
    return content, {component["bom-ref"]: component for component in every}


def test_every_part_is_named_by_hash() -> None:
    content, parts = parsed(document(PARTS, NAME))
    base, tool = f"base/{PARTS.bases[0][1]}", f"tool/{PARTS.tools[0][1]}"
    expected: dict[str, dict[str, Any]] = {
        "wheel": {
            "name": "mini-vllm", "version": NAME.version, "stack": "2026.11", "cuda": "cu130",
            "purl": "pkg:pypi/mini-vllm@0.33.0%2Bspark.2026.11.p0",
        },
        "source/vllm": {"pin": COMMIT, "tree": "b" * 40, "tree:patched": "c" * 40, "tree:built": "d" * 40,
                        "externalReferences": [{"type": "vcs", "url": URL}]},
        # The pin covers more than its folder.
        "source/cutlass": {"pin": "9" * 64, "sha256": ""},
        base: {"sha256": "3" * 64},
        tool: {"version": "13.0.88", "scope": "excluded", "sha256": "4" * 64},
        "vendored/third/party": {"commit": COMMIT},
        "vendored/qutlass": {"version": "main", "ref": "main", "resolved": "no"},
        "library/vllm/_C.abi3.so": {"library:origin": "compiled", "sha256": "5" * 64},
        "library/vllm/_D.abi3.so": {"library:origin": "base", "sha256": "6" * 64},
        "library/vllm/odd.so": {"library:origin": "base"},
        f"patch/vllm/{PICK.sha256}": {"patch:order": "1", "patch:pick": "35568", "description": "Fix <it> & more"},
        f"patch/vllm/{OURS.sha256}": {"patch:order": "2", "patch:reason": "scales overflow", "name": "x.patch", "sha256": "1" * 64},
    }  # fmt: skip

    assert {ref: {key: parts[ref][key] for key in expected.get(ref, {})} for ref in parts} == expected
    assert "commit" not in parts["vendored/qutlass"]
    pedigree = content["metadata"]["component"]["pedigree"]
    assert [patch["diff"]["url"] for patch in pedigree["patches"]] == [f"#patch/vllm/{step.sha256}" for step in (PICK, OURS)]
