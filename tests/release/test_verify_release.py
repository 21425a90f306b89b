"""The script by which a stranger checks a release: python-tuf and the standard library alone, on an index that was published here."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support import tufindex, wheels
from tests.support.publisher import IndexOwner

from sparkwright.core.files import sha256_file


def fingerprint(owner: IndexOwner) -> str:
    return sha256_file(owner.root / "metadata" / "1.root.json")


def verified(owner: IndexOwner, *words: str) -> tuple[int, str]:
    """Return the status and the output of the script, which is run without this program."""
    with tufindex.serve(owner.root) as url:
        command = [sys.executable, "-I", str(wheels.ROOT / "ci" / "verify_release.py"), url, *(words or (fingerprint(owner),))]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_every_file_of_a_release_is_checked(owner: IndexOwner, new: list[Path]) -> None:
    """The newest verified one, or a named candidate with what it lacks."""
    owner.publish(new, "candidate")
    status, said = verified(owner)
    assert (status, "every file is the one that was signed" in said) == (0, True), said
    assert "2026.11.1: signed, verified" in said
    assert all(file.sha256 in said for file in owner.index.entry("2026.11.1").release.files)
    status, said = verified(owner, fingerprint(owner), "2026.11.2")
    assert (status, "not shown: G5" in said) == (0, True), said
    owner.publisher().yank("2026.11.1", "it is slow")
    assert "no release in verified" in verified(owner)[1]
    assert "yanked: it is slow" in verified(owner, fingerprint(owner), "2026.11.1")[1]


def _another_wheel(owner: IndexOwner) -> None:
    [wheel] = owner.root.glob("files/*/vllm-*.whl")
    wheel.write_bytes(wheel.read_bytes()[:-1] + b"x")


def _another_record(owner: IndexOwner) -> None:
    [record] = owner.root.glob("targets/releases/*.json")
    record.write_bytes(record.read_bytes().replace(b"verified", b"verifiee", 1) + b" ")


def _another_state(owner: IndexOwner) -> None:
    metadata = owner.root / "metadata" / "1.targets.json"
    metadata.write_bytes(metadata.read_bytes().replace(b'"verified"', b'"verifiee"'))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_another_wheel, "1 of "), (_another_record, "error: "), (_another_state, "error: "),
        (lambda owner: next(owner.root.glob("files/*/vllm*.provenance.json")).unlink(), "1 of "),
    ],
)  # fmt: skip
def test_what_was_not_signed_is_refused(owner: IndexOwner, change: Callable[[IndexOwner], None], says: str) -> None:
    change(owner)
    status, said = verified(owner)
    assert (status, says in said, "every file is" in said) == (1, True, False), said


def test_another_root_than_the_stated_one_is_refused(owner: IndexOwner) -> None:
    status, said = verified(owner, "0" * 64)
    assert (status, "the first root of" in said) == (1, True), said
