"""What a wheel is, from its bytes: everything that it says of itself is compared with everything else, and with what is in it."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format
from in_toto_attestation.predicates.provenance.v1 import provenance_pb2
from in_toto_attestation.v1 import statement_pb2
from in_toto_attestation.v1.statement import Statement
from tests.refusals import refusal
from tests.support import installers, wheels

from sparkwright.bench.server import wheel_identity
from sparkwright.core.errors import SparkwrightError
from sparkwright.core.files import sha256_file
from sparkwright.release import release_draft, wheel_facts

Members = dict[str, bytes]


def member(found: Members, end: str) -> str:
    """Return the one member whose name ends so."""
    [name] = [one for one in found if one.endswith(end)]
    return name


def replacing(end: str, old: str, new: str) -> Callable[[Members], object]:
    """Return an edit of the member whose name ends so."""

    def edit(found: Members) -> None:
        name = member(found, end)
        assert old.encode() in found[name]
        found[name] = found[name].replace(old.encode(), new.encode())

    return edit


def read(path: Path) -> wheel_facts.WheelFacts:
    """Return what one wheel is."""
    return wheel_facts.read_all([path])[0]


def refused(path: Path) -> str:
    """Return why the wheel is refused: the reference, the message and its details."""
    with pytest.raises(SparkwrightError) as caught:
        read(path)
    return f"{caught.value.reference}: {caught.value} {' '.join(caught.value.details)}"


def test_a_wheel_of_ours_is_known(tmp_path: Path) -> None:
    """Name, version, machine, origin and patches of a graft are those of the bytes and of the build record."""
    path = wheels.vllm(tmp_path, requires=["torch==2.14.0"], machine="aarch64")
    facts = read(path)
    wheel = facts.wheel
    assert (wheel.name, wheel.sha256, wheel.size) == (
        path.name,
        sha256_file(path),
        path.stat().st_size,
    )
    assert (wheel.project, wheel.version) == ("vllm", "0.33.0+spark.2026.11.p1a2b3c4d.cu130")
    assert (wheel.machine, facts.stack, wheel.isolated) == ("aarch64", "2026.11", True)
    fork = facts.source
    assert (fork.name, fork.version, fork.built, fork.cuda) == ("vllm", "0.33.0", "graft", "cu130")
    patches = [(patch.name, patch.pick) for patch in fork.patches]
    assert patches == [("clamp-the-samples.patch", 0), ("35568.patch", 35568)]


EDITS: dict[str, tuple[Callable[[Members], object], str, str]] = {
    "another tag in WHEEL": (replacing("/WHEEL", "cp38-abi3", "cp39-abi3"), "wheel-mismatch", "Tag"),
    "not built by": (lambda found: found.pop(member(found, "sparkwright.json")), "wheel-mismatch", "not built by"),
    "a build record that is a page": (
        lambda found: found.update({member(found, "sparkwright.json"): b"<html>"}), "wheel-mismatch", "cannot be read",
    ),
    # Of what the client refuses, too: see `tests/client/test_refusals.py`.
    "a file outside of the places for packages": (lambda found: found.update({"sitecustomize.py": b""}), "wheel-unsafe", "starts"),
}  # fmt: skip


@pytest.mark.parametrize(("edit", "kind", "says"), EDITS.values(), ids=EDITS)
def test_what_disagrees_is_refused(tmp_path: Path, edit: Callable[[Members], object], kind: str, says: str) -> None:
    """A wheel whose parts do not say the same is refused, though RECORD is true."""
    error = refused(wheels.changed(wheels.vllm(tmp_path / "good"), tmp_path / "bad", edit))
    assert (error.partition(":")[0], says in error) == (kind, True), error


def test_two_wheels_of_one_project(tmp_path: Path) -> None:
    """A release has one wheel of a project for each machine; two are refused, one for each machine is not."""
    one, other = wheels.vllm(tmp_path, machine="aarch64"), wheels.vllm(tmp_path, machine="x86_64")
    assert len(wheel_facts.read_all([one, other])) == 2
    with refusal("wheel-mismatch", match="one wheel of a project"):
        wheel_facts.read_all(
            [one, wheels.vllm(tmp_path, machine="aarch64", label="spark.2026.11.2")]
        )


@pytest.mark.parametrize("installer", ["pip", "uv"])
def test_installed_wheel_has_the_content_of_the_wheel(tmp_path: Path, installer: str) -> None:
    data = "vllm-0.33.0+spark.2026.11.p1a2b3c4d.cu130.data"
    files = {
        "vllm/old.pyc": b"compiled elsewhere",
        f"{data}/scripts/mini": b"#!python\nprint(1)\n",
        f"{data}/purelib/beside.py": b"x = 1\n",
        f"{data}/data/share/mini.txt": b"shared\n",
    }
    path = wheels.vllm(tmp_path, files=files)
    theirs = wheels.plain(tmp_path, "theirs", "1.0")
    command = installers.install(installer, installers.environment(tmp_path / "env"))
    subprocess.run([*command, "--no-index", "--no-deps", path, theirs], check=True)
    [site] = tmp_path.glob("env/lib/*/site-packages")
    expected = {"content vllm": read(path).wheel.content}
    assert wheel_identity.environment_contents(site) == expected
    (site / "vllm" / "__init__.py").write_bytes(b"print(2)")
    assert wheel_identity.environment_contents(site) not in (expected, {})
    (site / "vllm" / "__init__.py").unlink()
    assert wheel_identity.environment_contents(site) == {}


def test_every_kind_of_wheel_has_a_statement_of_in_toto_and_slsa(tmp_path: Path) -> None:
    found = wheel_facts.read_all(wheels.release(tmp_path, judged=False))
    assert [facts.source.built for facts in found] == ["headers", "backend", "graft"]
    for facts in found:
        data = release_draft.provenance(facts, "ab" * 32)
        statement: Any = Statement.copy_from_pb(json_format.Parse(data, statement_pb2.Statement()))
        statement.validate()
        assert dict(statement.pb.subject[0].digest) == {"sha256": facts.wheel.sha256}
        document = json_format.MessageToDict(statement.pb.predicate)
        predicate = json_format.ParseDict(document, provenance_pb2.Provenance())
        materials = predicate.build_definition.resolved_dependencies
        assert materials[0].name == facts.source.name
    # The last one is a graft with patches.
    assert [material.name for material in materials[1:]] == [
        "clamp-the-samples.patch",
        "35568.patch",
        "the official wheel",
        "lock.yaml",
        "toolchain",
    ]
    pins = {"gitCommit": facts.source.pin, "gitTree": facts.source.tree}
    assert dict(materials[0].digest) == pins
    assert predicate.run_details.byproducts[0].name == "sbom"
