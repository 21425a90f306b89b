"""Wheels that are rewritten, grafted, or made by a backend, also for another machine; their bills of materials; what is refused."""

import csv
import fnmatch
import io
import itertools
import json
import os
import platform
import re
import sys
import zipfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cyclonedx.schema import SchemaVersion
from tests.refusals import refusal
from tests.support import fatbins, wheels
from tests.unit.conftest import ROOT, Mini

from sparkwright.audit import policy
from sparkwright.audit.wheel import audit
from sparkwright.builder import pipeline, pylock, toolchain, workspace
from sparkwright.builder.configure import CMakeLibrary
from sparkwright.builder.toolchain import EnvironmentSpec, ForkEnvironment, Toolchain, UnusedFiles
from sparkwright.builder.wheel import archive, graft, sbom
from sparkwright.cherry_picks.apply import AppliedPatch
from sparkwright.cli import main, options
from sparkwright.core import errors, git, strict_yaml, zips
from sparkwright.forks.fetch import FetchedSource
from sparkwright.forks.stack import MACHINES, FileLock, Project, VendoredLock

NAME = "mini-1.0-py3-none-any.whl"
INFO, NEW = "mini-1.0.dist-info", "mini-1.0+a.dist-info"
LABELLED = archive.WheelName("mini", "1.0+a", "py3-none-any")
FILES = {
    "mini/__init__.py": b'"""Mini."""\n\n__version__ = "1.0"\n',
    "mini/core.so": b"\x7fELF" + bytes(range(256)) * 20,
    "mini/data/a.bin": os.urandom(3000),
    "mini/empty.py": b"",
    "mini/ünïcode.txt": "é".encode(),
    "mini-1.0.data/scripts/tool": b"#!python\n",
}
META = {
    f"{INFO}/METADATA": b"Metadata-Version: 2.4\nName: mini\nVersion: 1.0\nKeywords: Version: 1.0\n\nVersion: 1.0\n",
    f"{INFO}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    f"{INFO}/licenses/LICENSE": b"free\n",
}


def packed(path: Path, files: Mapping[str, bytes]) -> Path:
    """Write a wheel by Python's own zipfile, its members deflated and stored in turn, the first with the sizes of zip64."""
    rows = [f"{name},sha256={wheels.unpadded(data)},{len(data)}\n" for name, data in files.items()]
    record = "".join([*rows, f"{INFO}/RECORD,,\n"]).encode()
    with zipfile.ZipFile(path, "w") as wheel:
        for number, (name, data) in enumerate({f"{INFO}/RECORD": record, **files}.items()):
            member = zipfile.ZipInfo(name, (2020, 2, 2, 2, 2, 2))
            member.compress_type = (zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED)[number % 2]
            member.external_attr = 0o100755 << 16 if name.endswith(".so") else 0o100644 << 16
            with wheel.open(member, "w", force_zip64=number == 0) as stream:
                stream.write(data)
    return path


# Rewriting.


def test_a_wheel_is_changed_where_it_is_asked_for_and_nowhere_else(tmp_path: Path) -> None:
    """
    Ours in .dist-info replace those of an earlier build; a bill of upstream's stays (PEP 770). Names and metadata follow the version; RECORD
    has every member.
    """
    before = {f"{INFO}/sparkwright.json": b"old", f"{INFO}/sboms/upstream.cdx.json": b"{}", f"{INFO}/RECORD.jws": b"of the old RECORD"}
    base = packed(tmp_path / NAME, {**FILES, **META, **before})
    replace = {"mini/core.so": b"\x7fELF new", "mini/new.py": b"new = 1\n", "mini/__init__.py": b"__version__ = '1.0'\nPATCHED = True\n"}
    changes: dict[str, Any] = {"remove": ["mini/empty.py"], "version_files": ["mini/__init__.py"], "dist_info": {"sparkwright.json": b"{}"}}
    wheel = archive.rewrite(base, tmp_path, LABELLED, replace=replace, **changes)

    assert wheel.name == "mini-1.0+a-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as opened:
        members = {name: opened.read(name) for name in opened.namelist()}
        assert opened.getinfo("mini/core.so").external_attr >> 16 == 0o100755
        assert {info.date_time for info in opened.infolist()} == {(1980, 1, 1, 0, 0, 0)}
    rows = list(csv.reader(io.StringIO(members.pop(f"{NEW}/RECORD").decode())))
    assert rows.pop() == [f"{NEW}/RECORD", "", ""]
    assert sorted(rows) == sorted([name, f"sha256={wheels.unpadded(data)}", str(len(data))] for name, data in members.items())
    stay = {name.replace("mini-1.0.data", "mini-1.0+a.data"): data for name, data in FILES.items() if name != "mini/empty.py"}
    assert members == {
        **stay,
        **replace,
        "mini/__init__.py": b"__version__ = '1.0+a'\nPATCHED = True\n",
        f"{NEW}/sparkwright.json": b"{}",
        f"{NEW}/sboms/upstream.cdx.json": b"{}",
        f"{NEW}/licenses/LICENSE": b"free\n",
        f"{NEW}/METADATA": META[f"{INFO}/METADATA"].replace(b"\nVersion: 1.0\nKey", b"\nVersion: 1.0+a\nKey"),
        f"{NEW}/WHEEL": b"Wheel-Version: 1.0\nGenerator: sparkwright\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_line_of_the_description_is_no_field_of_the_metadata(end: str, tmp_path: Path) -> None:
    metadata = end.join(["Metadata-Version: 2.1", "Name: mini", "Version: 1.0", "", "Version: 9", ""])
    base = packed(tmp_path / NAME, {**FILES, **META, f"{INFO}/METADATA": metadata.encode()})
    with zipfile.ZipFile(archive.rewrite(base, tmp_path, LABELLED)) as opened:
        assert opened.read(f"{NEW}/METADATA").decode() == metadata.replace("1.0", "1.0+a")


# Requirements.

#: As build backends write them: markers, extras, parentheses, a name in capitals, a continued line.
REQUIRING = (
    b"Metadata-Version: 2.4\nName: mini\nVersion: 1.0\n"
    b"Requires-Dist: numpy\n"
    b"Requires-Dist: Flash_Infer[cu13]==0.6.8.post1\n"
    b"Requires-Dist: flash.infer==0.6.8.post1; extra == 'fast'\n"
    b'requires-dist: cubin (>=1,<2); python_version > "3.11"\n'
    b'  and os_name == "posix"\n'
    b"Provides-Extra: fast\n"
    b"\nRequires-Dist: cubin\n"
)


def test_requirements_are_replaced_and_removed() -> None:
    """A line keeps its extras and its marker; the description is no header."""
    metadata = archive.change_requirements(REQUIRING, {"flash-infer": "flash-infer==0.6.9", "cubin": ""})

    assert metadata.decode().splitlines()[3:] == [
        "Requires-Dist: numpy",
        "Requires-Dist: Flash_Infer[cu13]==0.6.9",
        'Requires-Dist: flash.infer==0.6.9; extra == "fast"',
        "Provides-Extra: fast",
        "",
        "Requires-Dist: cubin",
    ]


@pytest.mark.parametrize(
    ("metadata", "requires", "reference"),
    [
        (REQUIRING, {"absent": ""}, "requirement-mismatch"),
        *((b"Requires-Dist: " + text, {"a": ""}, "wheel-invalid") for text in (b"numpy (", b"\xff", b"")),
    ],
)
def test_a_change_of_requirements_without_effect_or_sense_is_refused(
    metadata: bytes, requires: dict[str, str], reference: str
) -> None:
    with refusal(reference), zips.damage_guard("mini", partial(errors.WheelError, "wheel-invalid")):
        archive.change_requirements(metadata, requires)


CHOSEN = "vllm: `targets`, `sources` and `unlocked` are not stated here"


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("requires: {numpy: 'numpy=='}", "Expected"),
        ("requires: {numpy: ' '}", "Expected"),
        ("requires: {numpy: 'numpi==1'}", "is not a version of numpy"),
        ("requires: {numpy: 'numpy==1; os_name == \"nt\"'}", "is not a version of numpy"),
        ("requires: {numpy: 'numpy @ https://a.example/numpy.whl'}", "is not a version of numpy"),
        ("requires: {a_b: 'a-b==1'}", "is not the normalised name"),
        ("requires: {numpy: null}", "Expected `str`"),
        # What is chosen for each run.
        *((entry, CHOSEN) for entry in ("targets: [_C]", "sources: [zeta]", "unlocked: {late: gone}")),
    ],
)
def test_an_entry_that_cannot_be_meant_is_found_when_the_file_is_read(entry: str, words: str) -> None:
    """A slip in environment.yaml costs no compiling."""
    with refusal("file-invalid", says=words):
        strict_yaml.parse(f"forks: {{vllm: {{distribution: mini, {entry}}}}}\n", EnvironmentSpec, "environment.yaml")


# Refusals.


@pytest.mark.parametrize(
    ("change", "reference", "words"),
    [
        ({"mini/__init__.py": b'__version__ = "1.1"\n'}, "wheel-invalid", "does not set __version__ to '1.0'"),
        ({"mini/__init__.py": b'"""__version__ = "1.0" is elsewhere."""\n'}, "wheel-invalid", "does not set __version__"),
        ({"mini/__init__.py": b"\xff\xfe"}, "wheel-invalid", "does not set __version__"),
        ({"../evil.py": b""}, "archive-unsafe", "would leave its folder"),
        ({"/evil.py": b""}, "archive-unsafe", "would leave its folder"),
        ({"mini\\evil.py": b""}, "archive-unsafe", "would leave its folder"),
    ],
)
def test_a_wheel_that_contradicts_itself_is_refused(
    tmp_path: Path, change: dict[str, bytes], reference: str, words: str
) -> None:
    base = packed(tmp_path / NAME, {**FILES, **META, **change})

    with refusal(reference, match=words):
        archive.rewrite(base, tmp_path, LABELLED, version_files=("mini/__init__.py",))


def test_a_fault_of_ours_while_a_wheel_is_open_is_not_said_to_be_damage(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="of ours"), zips.zip_file(packed(tmp_path / NAME, {**FILES, **META})):
        raise KeyError("a fault of ours")


@pytest.fixture(name="tools")
def _tools(tmp_path: Path) -> Toolchain:
    """Return an environment with this Python, and without tools."""
    tools = Toolchain("key", tmp_path / "tools")
    (tools.root / "lib/python3.11/site-packages/nvidia/cu13").mkdir(parents=True)
    (tools.root / "bin").mkdir()
    tools.tool("python").symlink_to(sys.executable)
    return tools


@pytest.mark.parametrize(
    ("backend", "words"),
    [
        (b"def build_wheel(folder):\n    raise SystemExit('no compiler')\n", "flashinfer's build backend failed"),
        (b"def build_wheel(folder):\n    return 'mini-1.0-py3-none-any.whl'\n", "made 0 wheels instead of one"),
    ],
    ids=["fails", "no wheel"],
)
def test_a_backend_that_makes_no_wheel_is_refused(
    tmp_path: Path, mini: Mini, tools: Toolchain, monkeypatch: pytest.MonkeyPatch, backend: bytes, words: str
) -> None:
    """The error names the log, and no wheel is there."""
    run = mini.context()
    monkeypatch.setattr(toolchain, "obtain", lambda _context: tools)
    project = b'[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    tree = run.objects.store_files([("pyproject.toml", git.REGULAR, project), ("backend.py", git.REGULAR, backend)])
    source = workspace.SourceTree("flashinfer", GIT.source, tree, tree, (), ())
    with refusal("build-failed", match=words, says="full log: "):
        pipeline.build_by_backend(run, source, "t", tmp_path)
    assert not [*tmp_path.rglob("*.whl")]


CORE = CMakeLibrary("_core", "lib/_core.abi3.so", True)


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
    base = archive.write(tmp_path, archive.WheelName.parse("mini-1.0-cp39-abi3-linux_x86_64.whl"), files, "Name: mini\n", pure=False)
    assert graft.replaced_members(base, [CORE], ForkEnvironment(targets=targets)) == {"mini/_core.abi3.so": CORE.path}
    with refusal("base-mismatch", match="not exactly one library for each target", details=details):
        graft.replaced_members(base, libraries, ForkEnvironment(targets=targets))


@pytest.fixture
def official(tmp_path: Path) -> Path:
    """An official wheel with libraries that SM 12.1 loads in whole, in part, by its driver, and not at all, and with data."""
    cubin, ptx = partial(fatbins.cubin, tmp_path), fatbins.ptx
    units: dict[str, list[list[fatbins.Image]]] = {
        "_core.abi3.so": [[cubin("sm_121f")]],
        "_own.abi3.so": [[cubin("sm_120f")], [cubin("sm_120")]],
        "ops/_mixed.abi3.so": [[cubin("sm_80"), ptx("sm_80")], [cubin("sm_90a"), cubin("sm_120f"), cubin("sm_100f")], [cubin("sm_100f")]],
        "ops/_other.abi3.so": [[cubin("sm_90a"), cubin("sm_100f")], [cubin("sm_100f")]],
        "_host.abi3.so": [],
    }
    files = {f"mini/{name}": fatbins.library(tmp_path, *images) for name, images in units.items()}
    data = {f"mini/third_party/sm100/{name}": b"//\n" for name in ("kernel.cuh", "cutlass/gemm.h")}
    plain = {"mini/__init__.py": b'__version__ = "1.0"\n', "mini/odd.so": b"no ELF", "mini/third_party/x.py": b""}
    name = archive.WheelName.parse(f"mini-1.0-cp39-abi3-manylinux_2_34_{platform.machine()}.whl")
    return archive.write(tmp_path, name, {**files, **data, **plain}, "Metadata-Version: 2.4\nName: mini\nVersion: 1.0\n", pure=False)


SM100 = UnusedFiles("mini/third_party/sm100/*", "for SM 10.0 alone")
OTHER, MIXED = "mini/ops/_other.abi3.so", "mini/ops/_mixed.abi3.so"


@pytest.mark.parametrize(
    ("arch", "left_out", "trimmed"),
    [
        ("12.1f", {SM100.glob: SM100.reason, OTHER: "SM 12.1 loads none of its 2 units (sm_100f, sm_90a)"}, [MIXED]),
        (
            "9.0a",
            {SM100.glob: SM100.reason, "mini/_own.abi3.so": "SM 9.0 loads none of its 2 units (sm_120, sm_120f)"},
            [MIXED, OTHER],
        ),
    ],
    ids=["sm121", "sm90"],
)
def test_a_graft_leaves_out_what_the_gpu_cannot_use_and_says_so(
    official: Path, mini: Mini, tmp_path: Path, arch: str, left_out: dict[str, str], trimmed: list[str]
) -> None:
    """Files, RECORD, build record, bill of materials and audit agree; what stays is as it was."""
    settings = ForkEnvironment(unused=(SM100,), package="mini")
    omitted = graft.omissions(official, arch, ["mini/_core.abi3.so"], settings)
    source = workspace.source_tree(mini.context(), "vllm")
    changed, manifest = graft.changes(mini.context(), source, official, tmp_path, {}, omitted, settings)
    record = {"units": (), "transplant": manifest}
    parts: dict[str, Any] = {"source": source, "inherited": dict.fromkeys(manifest.base, "0" * 64), "trimmed": manifest.trimmed, "properties": {}}
    name = archive.WheelName.parse(official.name).labelled("a")
    dist_info = {archive.BUILD_RECORD: msgspec.json.encode(record), archive.SBOM: sbom.document(name, **parts)}
    made = archive.rewrite(official, tmp_path, name, replace=changed, remove=omitted.files, dist_info=dist_info)
    with zipfile.ZipFile(official) as old, zipfile.ZipFile(made) as new:
        before, after = ({name for name in opened.namelist() if name.startswith("mini/")} for opened in (old, new))
        rows = {row[0] for row in csv.reader(new.read("mini-1.0+a.dist-info/RECORD").decode().splitlines())}
        libraries = {name.removeprefix("library/") for name in parsed(new.read(f"mini-1.0+a.dist-info/{archive.SBOM}"))[1] if "library/" in name}
        assert {name for name in after if old.read(name) != new.read(name)} == {*trimmed} == {*manifest.trimmed}
    audited = audit(made, policy.AuditPolicy(arch, ("lib*",), {}), Path, judged="any")
    levels = {library.name: library.spark for library in audited.libraries}

    assert manifest.left_out == audited.left_out == left_out
    gone = {name for name in before if any(fnmatch.fnmatchcase(name, glob) for glob in left_out)}
    assert after == before - gone == {name for name in rows if name.startswith("mini/")}
    assert libraries == {name for name in after if name.endswith(".so")} - {"mini/_core.abi3.so"} | {*manifest.base}
    assert not [finding for finding in audited.findings if finding.rule in ("omission-present", "record-surplus", "record-missing")]
    if arch == "12.1f":
        assert levels[MIXED] == {"family": 1, "jit": 1, "nothing": 1}
        mixed = next(library for library in audited.libraries if library.name == MIXED)
        assert (mixed.cubins, mixed.ptx) == ({"sm_100f": 1, "sm_120f": 1}, {"sm_80": 1})


@pytest.mark.parametrize(
    ("settings", "details"),
    [
        (ForkEnvironment(unused=(SM100, UnusedFiles("mini/third_party/sm110/*", "moved"))), "mini/third_party/sm110/*"),
        (ForkEnvironment(unused=(UnusedFiles("mini/_core.*", "compiled here"),)), "mini/_core.*"),
    ],
)
def test_an_omission_without_effect_is_refused(official: Path, settings: ForkEnvironment, details: str) -> None:
    with refusal("omission-idle", details=(details,)):
        graft.omissions(official, "12.1f", ["mini/_core.abi3.so"], settings)


def test_a_file_that_is_said_to_be_left_out_is_found(official: Path, tmp_path: Path) -> None:
    left_out = {"mini/third_party/sm100/*": "for SM 10.0 alone"}
    record = msgspec.json.encode({"transplant": {"left_out": left_out}})
    name = archive.WheelName.parse(official.name).labelled("a")
    made = archive.rewrite(official, tmp_path, name, dist_info={archive.BUILD_RECORD: record})
    audited = audit(made, policy.AuditPolicy("12.1f", ("lib*",), {}), Path, judged="any")

    found = [finding.library for finding in audited.findings if finding.rule == "omission-present"]
    assert found == ["mini/third_party/sm100/cutlass/gemm.h", "mini/third_party/sm100/kernel.cuh"]


BUILT = archive.WheelName("mini_vllm", "0.33.0+spark.2026.11.p0", "cp38-abi3-manylinux_2_28_aarch64")
COMMIT, URL = "a" * 40, "https://github.com/acme/mini.git"
OURS = AppliedPatch("x.patch", "1" * 64, "Take the largest", "scales overflow", "e" * 40)
PICK = AppliedPatch("#35568", "2" * 64, "Fix <it> & more", "reports", "f" * 40, 35568)
GIT = workspace.SourceTree("vllm", FetchedSource("vllm", "git", f"{URL} @ {COMMIT}", COMMIT, "b" * 40, True), "c" * 40, "d" * 40, (PICK, OURS), ())
PARTS: dict[str, Any] = {
    "source": GIT,
    "needs": (
        workspace.SourceTree(
            "cutlass", FetchedSource("cutlass", "wheel", "vllm-0.33.0-py3-none-any.whl (cutlass)", "9" * 64, "8" * 40, True),
            "8" * 40, "8" * 40, (), (),
        ),
    ),
    "bases": (("vllm", "vllm-0.33.0-cp38-abi3-manylinux_2_28_aarch64.whl", "3" * 64),),
    "vendored": {
        "qutlass": VendoredLock("https://github.com/acme/qutlass.git", "main", "unresolved", "unresolved", kind="fetchcontent"),
        "third/party": VendoredLock("https://git.example/p.git", "v1", COMMIT, "b" * 40, kind="submodule"),
    },
    "tools": (("nvidia-cuda-nvcc", "nvidia_cuda_nvcc-13.0.88-py3-none-manylinux_2_17_aarch64.whl", "4" * 64),),
    "compiled": {"vllm/_C.abi3.so": "5" * 64},
    "inherited": {"vllm/_D.abi3.so": "6" * 64, "vllm/odd.so": ""},
    "properties": {"stack": "2026.11", "cuda": "cu130"},
}


def parsed(data: bytes) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return the document in *data*, valid by CycloneDX's strict schema, and its components by reference with their properties."""
    # Its import takes seconds, also in the processes that do not run these tests.
    from cyclonedx.validation.json import JsonStrictValidator

    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(data.decode()) is None
    content: dict[str, Any] = json.loads(data)
    main = content["metadata"]["component"]
    every = [main, *main.get("components", []), *content["components"], *main["pedigree"].get("ancestors", [])]
    for component in every:
        component.update({row["name"].removeprefix("sparkwright:"): row["value"] for row in component.get("properties", [])})
        component.update(sha256=hashes[0]["content"] if (hashes := component.get("hashes")) else "")
    return content, {component["bom-ref"]: component for component in every}


def test_the_bill_of_a_graft_names_its_base_and_compiler(mini: Mini) -> None:
    base = FileLock("mini-vllm", "0.4.0", "mini_vllm-0.4.0-py3-none-any.whl", "3" * 64, 1)
    manifest = graft.GraftManifest({}, (), (), {"mini_vllm/_D.so": "sha256=" + "A" * 43, "mini_vllm/_E.so": "md5=x"})
    made = pipeline.dist_info(mini.context(), BUILT, workspace.source_tree(mini.context(), "vllm"), base, transplant=manifest, compiler="12")
    _, parts = parsed(made[archive.SBOM])

    assert [part["name"] for ref, part in parts.items() if ref.startswith(("base/", "tool/"))] == ["nvidia-cuda-nvcc", "mini-vllm"]
    assert (parts["library/mini_vllm/_D.so"]["sha256"], parts["library/mini_vllm/_E.so"]["sha256"], parts["wheel"]["compiler"]) == ("0" * 64, "", "12")


def test_every_part_is_named_by_hash() -> None:
    content, parts = parsed(sbom.document(BUILT, **PARTS))
    base, tool = f"base/{PARTS['bases'][0][1]}", f"tool/{PARTS['tools'][0][1]}"
    expected: dict[str, dict[str, Any]] = {
        "wheel": {
            "name": "mini-vllm", "version": BUILT.version, "stack": "2026.11", "cuda": "cu130",
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


# Wheels for another machine: what is selected, unpacked and believed, and what a graft refuses.

HERE = platform.machine()
OTHER = next(machine for machine in MACHINES if machine != HERE)


@pytest.mark.parametrize("stack", ["2026.05", "2026.11"])
def test_one_lock_selects_the_same_projects_for_both_machines(stack: str) -> None:
    """For either machine every project has one wheel, of that machine or of none; whatever this one is."""
    project = Project(ROOT, stack)
    chosen = {machine: pylock.wheels(project, **pylock.selection("3.12.3", machine)) for machine in MACHINES}

    assert [name for name, _, _ in chosen["x86_64"]] == [name for name, _, _ in chosen["aarch64"]]
    for machine, selected in chosen.items():
        other = next(name for name in MACHINES if name != machine)
        assert not [filename for _, filename, _ in selected if other in filename]
        assert any(machine in filename for _, filename, _ in selected)


def test_a_missing_cross_compiler_is_named_with_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is downloaded, the error says which program is missing and how Debian installs it."""
    monkeypatch.setenv("PATH", str(tmp_path))
    toolchain.compiler_version.cache_clear()
    context = options.checkout(main.parse(["plan", "--root", str(ROOT), "--cache-dir", str(tmp_path / "cache"), "--target", OTHER]))

    package = f"sudo apt-get install g++-{OTHER.replace('_', '-')}-linux-gnu"
    with refusal("tool-missing", match=f"^{re.escape(OTHER)}-linux-gnu-g\\+\\+ is not installed", says=package):
        toolchain.target(context, Toolchain("key", tmp_path))


def wanting(folder: Path, versions: Sequence[str]) -> bytes:
    """Return a shared library that wants the given symbol versions, as of a C++ runtime that has them."""
    symbols = {f"f{number}": version for number, version in enumerate(("OWN", *versions))}
    (folder / "versions").write_text("".join(f"{version} {{ global: {name}; }};\n" for name, version in symbols.items()))
    defined, declared = ("".join(f"void {name}(void){end}\n" for name in symbols) for end in (" {}", ";"))
    calls = f"void g(void) {{ {' '.join(f'{name}();' for name in symbols)} }}\n"
    fatbins.compiled(folder, defined, "-nostdlib", "-Wl,-soname,runtime.so", "-Wl,--version-script=versions", name="runtime.so")
    return fatbins.compiled(folder, declared + calls, "-nostdlib", "-L.", "-l:runtime.so")


@pytest.mark.parametrize(
    ("versions", "tag"),
    [
        ((), "BASE"),
        (("GLIBC_2.17", "GLIBCXX_3.4.19", "CXXABI_1.3.7"), "BASE"),
        (("GLIBCXX_3.4.24", "CXXABI_1.3.11"), "manylinux_2_27"),
        (("GLIBCXX_3.4.25",), "manylinux_2_31"),
        (("CXXABI_1.3.12",), "manylinux_2_31"),
        (("GLIBCXX_3.4.29",), "manylinux_2_34"),
        (("GLIBCXX_3.4.30", "GLIBC_2.34"), "manylinux_2_35"),
        (("GLIBC_2.38", "GLIBCXX_3.4.21"), "manylinux_2_38"),
        (("CXXABI_1.3.15",), "manylinux_2_39"),
    ],
)
def test_the_platform_tag_is_the_lowest_that_promises_what_is_wanted(tmp_path: Path, versions: tuple[str, ...], tag: str) -> None:
    """It follows from the symbol versions alone, is never below the base's, and the machine in it stays, whatever this one is."""
    library = wanting(tmp_path, versions)

    for machine, base in itertools.product(MACHINES, ("manylinux_2_17", "manylinux2014")):
        expected = tag.replace("BASE", base)
        assert graft.platform_tag(f"{base}_{machine}", [library]) == f"{expected}_{machine}"
        both = f"manylinux_2_17_{machine}.manylinux2014_{machine}"
        assert graft.platform_tag(both, [library]) == (both if tag == "BASE" else f"{tag}_{machine}")


def test_a_tag_without_versions_stays_and_a_newer_runtime_than_any_tag_promises_is_refused(tmp_path: Path) -> None:
    library = wanting(tmp_path, ["GLIBCXX_3.4.99"])

    assert graft.platform_tag(f"linux_{OTHER}", [library]) == f"linux_{OTHER}"
    with refusal("target-mismatch", match="newer C\\+\\+ runtime"):
        graft.platform_tag(f"manylinux_2_17_{HERE}", [library])
