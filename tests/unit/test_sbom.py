"""The bill of materials: true to the parts of a wheel, valid CycloneDX, and the same bytes each time."""

from __future__ import annotations

import dataclasses
import functools
import json
import zipfile
from typing import TYPE_CHECKING, Any

from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from sparkwright.builder import pipeline
from sparkwright.builder.wheel import sbom
from sparkwright.builder.wheel.archive import SBOM, WheelName
from sparkwright.builder.wheel.sbom import SbomInput, document
from sparkwright.builder.workspace import SourceTree, source_tree
from sparkwright.cherry_picks.apply import AppliedPatch
from sparkwright.forks.fetch import FetchedSource
from sparkwright.forks.lock import FileLock, VendoredLock

if TYPE_CHECKING:
    from tests.unit.conftest import Mini

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


@functools.cache
def validator() -> JsonStrictValidator:
    return JsonStrictValidator(SchemaVersion.V1_6)


def parsed(data: bytes) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return the document in *data*, valid by CycloneDX's strict schema, and its components by reference with their properties."""
    assert validator().validate_str(data.decode()) is None
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
        "source/cutlass": {"pin": "9" * 64},
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

    assert {ref: {key: parts[ref][key] for key in fields} for ref, fields in expected.items()} == expected
    assert expected.keys() == parts.keys()
    assert not parts["source/cutlass"]["sha256"], "the pin covers more than its folder"
    assert "commit" not in parts["vendored/qutlass"]
    pedigree = content["metadata"]["component"]["pedigree"]
    assert [patch["diff"]["url"] for patch in pedigree["patches"]] == [f"#patch/vllm/{step.sha256}" for step in (PICK, OURS)]


def test_a_built_wheel_holds_its_bill(mini: Mini) -> None:
    context = dataclasses.replace(mini.context(), output=mini.root / "dist")
    path = pipeline.wheel_path(context, pipeline.build(context, "cutlass"))
    with zipfile.ZipFile(path) as wheel:
        parts = parsed(wheel.read(f"{WheelName.of(path.name).info}/{SBOM}"))[1]
    assert parts["wheel"]["stack"] == "demo"
    assert parts["source/cutlass"]["pin"] == source_tree(context, "cutlass").source.pin


def test_the_bill_of_a_graft_names_its_base_patches_and_compiler(mini: Mini) -> None:
    context = mini.context()
    source = source_tree(context, "vllm")
    base = FileLock("mini-vllm", "0.4.0", "mini_vllm-0.4.0-py3-none-any.whl", "3" * 64, 1)
    inherited = {"mini_vllm/_D.so": "sha256=" + "A" * 43, "mini_vllm/_E.so": "md5=x"}
    parts = sbom.gather(context, source, base=base, compiled={"mini_vllm/_C.so": "5" * 64}, inherited=inherited, compiler="12", isolation="")

    assert [need.fork for need in parts.needs] == ["cutlass"]
    assert [project for project, _, _ in (*parts.bases, *parts.tools)] == ["mini-vllm", "nvidia-cuda-nvcc"]
    assert parts.inherited == {"mini_vllm/_D.so": "0" * 64, "mini_vllm/_E.so": ""}
    assert parts.properties == {"stack": "demo", "fork": "vllm", "built": "graft", "arch": "12.1f", "cuda": "cu130", "compiler": "12"}
    assert parts.vendored == {}
    everything = dataclasses.replace(context, targets=("all",))
    assert set(sbom.vendored(everything, source)) == set(context.lock.forks["vllm"].fetched)
