"""The bill of materials: true to what a wheel was made of, valid CycloneDX, and the same bytes each time."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import re
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkwright.builder import pipeline, self_wheel, source_tree
from sparkwright.builder.source_tree import SourceTree
from sparkwright.builder.wheel import archive as wheelfile
from sparkwright.builder.wheel import materials
from sparkwright.builder.wheel.archive import WheelName
from sparkwright.builder.wheel.graft import Transplant
from sparkwright.builder.wheel.sbom import SBOM, Archive, Bill, Papers, document
from sparkwright.cherry_picks.apply import AppliedPatch
from sparkwright.forks.fetch import FetchedSource
from sparkwright.forks.lock import FileLock, VendoredLock

if TYPE_CHECKING:
    from tests.unit.conftest import Mini

NAME = WheelName("mini_vllm", "0.33.0+spark.2026.11.p0", "cp38-abi3-manylinux_2_28_aarch64")
COMMIT, URL = "a" * 40, "https://github.com/acme/mini.git"
OURS = AppliedPatch("x.patch", "1" * 64, "Take the largest", "scales overflow", "e" * 40)
PICK = AppliedPatch("#35568", "2" * 64, "Fix <it> & more", "reports", "f" * 40, 35568, 3)
GIT = SourceTree("vllm", FetchedSource("vllm", "git", f"{URL} @ {COMMIT}", COMMIT, "b" * 40, True), "c" * 40, "d" * 40, (PICK, OURS), ())
FOLDER = FetchedSource("cutlass", "wheel", "vllm-0.33.0-py3-none-any.whl (cutlass)", "9" * 64, "8" * 40, True)
BILL = Bill(
    source=GIT,
    needs=(SourceTree("cutlass", FOLDER, "8" * 40, "8" * 40, (), ()),),
    bases=(Archive("vllm", "vllm-0.33.0-cp38-abi3-manylinux_2_28_aarch64.whl", "3" * 64),),
    vendored={
        "qutlass": VendoredLock("https://github.com/acme/qutlass.git", "main", "unresolved", "unresolved"),
        "third/party": VendoredLock("https://git.example/p.git", "v1", COMMIT, "b" * 40, kind="submodule"),
    },
    tools=(Archive("nvidia-cuda-nvcc", "nvidia_cuda_nvcc-13.0.88-py3-none-manylinux_2_17_aarch64.whl", "4" * 64),),
    compiled={"vllm/_C.abi3.so": "5" * 64},
    kept={"vllm/_D.abi3.so": "6" * 64, "vllm/odd.so": ""},
    facts={"stack": "2026.11", "cuda": "cu130"},
)


@functools.cache
def validator() -> JsonStrictValidator:
    """Return the validator, which reads its schema once."""
    return JsonStrictValidator(SchemaVersion.V1_6)


def checked(data: bytes) -> dict[str, Any]:
    """Return the document in *data*, valid by the strict schema of CycloneDX 1.6."""
    assert validator().validate_str(data.decode()) is None
    made: dict[str, Any] = json.loads(data)
    return made


def facts(component: dict[str, Any]) -> dict[str, str]:
    """Return our properties of a component."""
    return {one["name"].removeprefix("sparkwright:"): one["value"] for one in component["properties"]}


def by_ref(made: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return all components of the document by their reference."""
    main = made["metadata"]["component"]
    every = [main, *main.get("components", []), *made.get("components", []), *main["pedigree"].get("ancestors", [])]
    return {one["bom-ref"]: one for one in every}


def sha256_of(component: dict[str, Any]) -> str:
    """Return the one hash of a component."""
    (found,) = component["hashes"]
    assert found["alg"] == "SHA-256"
    return str(found["content"])


# The document.


def test_every_part_is_named_by_hash() -> None:
    """Upstream's commit and tree, each patch, the official wheel, vendored sources, the compiler and every library are in it."""
    made = checked(document(BILL, NAME))
    parts = by_ref(made)

    main = parts["wheel"]
    assert (main["name"], main["version"]) == ("mini-vllm", "0.33.0+spark.2026.11.p0")
    assert facts(main) == BILL.facts
    assert main["pedigree"]["commits"] == [{"uid": COMMIT, "url": URL}]
    upstream = facts(parts["source/vllm"])
    assert (upstream["pin"], upstream["tree"], upstream["tree:patched"], upstream["tree:built"]) == (COMMIT, "b" * 40, "c" * 40, "d" * 40)
    assert parts["source/vllm"]["purl"] == f"pkg:github/acme/mini@{COMMIT}"
    assert ("hashes" in parts["source/cutlass"], facts(parts["source/cutlass"])["pin"]) == (False, "9" * 64), "more than its folder"
    assert sha256_of(parts[f"base/{BILL.bases[0].filename}"]) == "3" * 64
    assert facts(parts["vendored/third/party"])["commit"] == COMMIT
    tool = parts[f"tool/{BILL.tools[0].filename}"]
    assert (tool["version"], tool["scope"], sha256_of(tool)) == ("13.0.88", "excluded", "4" * 64)
    libraries = {name: facts(parts[f"library/{name}"])["library:origin"] for name in (*BILL.compiled, *BILL.kept)}
    assert libraries == {"vllm/_C.abi3.so": "compiled", "vllm/_D.abi3.so": "base", "vllm/odd.so": "base"}
    assert sha256_of(parts["library/vllm/_C.abi3.so"]) == "5" * 64


def test_patches_keep_their_hash_order_and_reason() -> None:
    """CycloneDX's patch has no hash, so each points at a component that has it, and says which pull request it is."""
    made = checked(document(BILL, NAME))
    parts = by_ref(made)
    listed = made["metadata"]["component"]["pedigree"]["patches"]
    found = {one["type"]: parts[one["diff"]["url"].removeprefix("#")] for one in listed}

    assert {kind: (one["name"], sha256_of(one), one["description"]) for kind, one in found.items()} == {
        "cherry-pick": ("#35568", "2" * 64, "Fix <it> & more"),
        "unofficial": ("x.patch", "1" * 64, "Take the largest"),
    }
    assert [facts(found[kind])["patch:order"] for kind in ("cherry-pick", "unofficial")] == ["1", "2"]
    assert (facts(found["cherry-pick"])["patch:pick"], facts(found["unofficial"])["patch:reason"]) == ("35568", "scales overflow")


def test_what_the_lock_leaves_open_is_not_claimed() -> None:
    """A vendored source without a commit is called by its ref, and said to be unresolved."""
    part = by_ref(checked(document(BILL, NAME)))["vendored/qutlass"]

    assert (part["version"], facts(part)) == ("main", {"ref": "main", "resolved": "no"})


def test_equal_content_gives_equal_bytes_and_other_content_another_number() -> None:
    """There is no time in it; the serial number follows from the rest."""
    first = document(BILL, NAME)
    other = document(changed(BILL, compiled={"vllm/_C.abi3.so": "7" * 64}), NAME)

    assert document(BILL, NAME) == first
    assert "timestamp" not in json.loads(first)["metadata"]
    numbers = [json.loads(data)["serialNumber"] for data in (first, other)]
    assert numbers[0] != numbers[1]
    assert all(re.fullmatch(r"urn:uuid:[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", number) for number in numbers)


def changed(bill: Bill, **changes: Any) -> Bill:
    """Return *bill* with other fields."""
    import msgspec

    return msgspec.structs.replace(bill, **changes)


TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), min_size=1, max_size=20)


@settings(max_examples=10)
@given(st.lists(st.tuples(TEXTS, TEXTS, TEXTS), max_size=4), st.dictionaries(TEXTS, st.just("5" * 64), max_size=3))
def test_any_text_of_a_patch_survives(patches: list[tuple[str, str, str]], libraries: dict[str, str]) -> None:
    """Names, subjects and reasons in any script come out as they went in, in a valid document."""
    steps = tuple(
        AppliedPatch(name, hashlib.sha256(f"{at}".encode()).hexdigest(), subject, reason, "e" * 40)
        for at, (name, subject, reason) in enumerate(patches)
    )
    source = changed(BILL, source=SourceTree("vllm", GIT.source, "c" * 40, "d" * 40, steps, ()), compiled=libraries, kept={})
    parts = by_ref(checked(document(source, NAME)))
    found = [parts[f"patch/vllm/{step.sha256}"] for step in steps]

    assert [(one["name"], one["description"], facts(one)["patch:reason"]) for one in found] == patches
    assert set(libraries) == {ref.removeprefix("library/") for ref in parts if ref.startswith("library/")}


# In wheels.


def in_wheel(path: Path) -> dict[str, Any]:
    """Return the document in the wheel at *path*, whose RECORD knows it."""
    info = WheelName.of(path.name).info
    with zipfile.ZipFile(path) as archive:
        data = archive.read(f"{info}/{SBOM}")
        assert wheelfile.records(archive, info, path.name)[f"{info}/{SBOM}"][1] == str(len(data))
    return checked(data)


def test_a_built_wheel_holds_its_bill(mini: Mini) -> None:
    """The mini CUTLASS names its source by commit and tree, and nothing of the machine."""
    session = dataclasses.replace(mini.session(), output=mini.root / "dist")
    made = in_wheel(pipeline.path_of(session, pipeline.build(session, "cutlass")))
    source = source_tree.make(session, "cutlass")

    upstream = by_ref(made)["source/cutlass"]
    assert (facts(upstream)["pin"], facts(upstream)["tree"]) == (source.source.pin, source.source.tree)
    assert facts(made["metadata"]["component"]) == {"stack": "demo", "fork": "cutlass", "built": "headers", "arch": "12.1f"}
    assert "components" not in made


def test_the_bill_of_a_graft_names_what_is_under_it(mini: Mini) -> None:
    """The patches of the demo, CUTLASS, the base and the compiler of the lock are gathered; RECORD's digests become hex."""
    session = mini.session()
    source = source_tree.make(session, "vllm")
    base = FileLock("mini-vllm", "0.4.0", "mini_vllm-0.4.0-py3-none-any.whl", "3" * 64, 1)
    kept = "sha256=" + "A" * 43
    done = Transplant({"mini_vllm/_C.so": "5" * 64}, (), (), {"mini_vllm/_D.so": kept, "mini_vllm/_E.so": "md5=x"})
    bill = materials.bill(session, source, base=base, done=done, host_compiler="12.2.0", isolation="")

    assert [one.fork for one in bill.needs] == ["cutlass"]
    assert [one.project for one in (*bill.bases, *bill.tools)] == ["mini-vllm", "nvidia-cuda-nvcc"]
    assert bill.kept == {"mini_vllm/_D.so": "0" * 64, "mini_vllm/_E.so": ""}
    assert bill.facts == {
        "stack": "demo", "fork": "vllm", "built": "graft", "arch": "12.1f", "cuda": "cu130", "host-compiler": "12.2.0",
    }  # fmt: skip
    parts = by_ref(checked(document(bill, NAME)))
    assert [sha256_of(parts[f"patch/vllm/{step.sha256}"]) for step in source.steps] == [step.sha256 for step in source.steps]
    assert len(source.steps) == 2


def test_vendored_sources_are_those_that_the_build_takes(mini: Mini) -> None:
    """The default targets take no fetched source; all targets take each of them."""
    session = mini.session()
    source = source_tree.make(session, "vllm")

    assert materials.vendored(session, source) == {}
    everything = dataclasses.replace(session, targets=("all",))
    assert set(materials.vendored(everything, source)) == set(session.lock.forks["vllm"].fetched)


def test_an_sbom_of_upstream_stays_and_ours_is_replaced(tmp_path: Path) -> None:
    """A wheel may hold several (PEP 770); ours is the one of the wheel at hand, once."""
    info, name = "mini-1.0.dist-info", WheelName.of("mini-1.0-py3-none-any.whl")
    files = {f"{info}/{name}": b"old" for name in (SBOM, "sparkwright.json")} | {f"{info}/sboms/upstream.cdx.json": b"{}"}
    wheelfile.write(tmp_path / name.filename, name, files, "Metadata-Version: 2.4\nName: mini\nVersion: 1.0\n", pure=True)
    made = wheelfile.remake(tmp_path / name.filename, tmp_path, version="1.0+a", build_record=b"new", sbom=b"bill")

    with zipfile.ZipFile(made) as archive:
        assert len(archive.namelist()) == len(set(archive.namelist()))
        found = {member: archive.read(f"mini-1.0+a.dist-info/{member}") for member in ("sboms/upstream.cdx.json", SBOM, "sparkwright.json")}
    assert found == {"sboms/upstream.cdx.json": b"{}", SBOM: b"bill", "sparkwright.json": b"new"}


def test_the_program_itself_holds_one(tmp_path: Path) -> None:
    """The installer is a wheel of ours like the others, and the same code gives the same bytes."""
    first, second = (self_wheel.write(tmp_path, extra="", label="7") for _ in range(2))

    assert in_wheel(first)["metadata"]["component"]["version"].endswith("+7")
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize("origin", ["mini-0.4.0.tar.gz", "odd.zip"])
def test_an_archive_of_the_package_index_is_named_by_its_hash(origin: str) -> None:
    """A source distribution has the package URL of its release; a name that is none has no such URL."""
    source = SourceTree("vllm", FetchedSource("vllm", "sdist", origin, "7" * 64, "b" * 40, True), "b" * 40, "b" * 40, (), ())
    part = by_ref(checked(Papers(b"", Bill(source)).sbom(NAME)))["source/vllm"]

    assert (sha256_of(part), part.get("purl")) == ("7" * 64, "pkg:pypi/mini@0.4.0" if origin.startswith("mini") else None)
