"""
What a rebuild shows: the same wheel, the same device code with the difference explained, or another wheel.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from sparkwright.audit import device_code as code
from sparkwright.audit.device_code import CodeDifference
from sparkwright.audit.policy import AuditPolicy
from sparkwright.builder import wheel_diff
from sparkwright.builder.errors import BuildError
from sparkwright.builder.wheel.archive import BUILD_RECORD, SBOM
from sparkwright.builder.wheel_diff import MEANS, MemberDifference
from sparkwright.core import digest
from sparkwright.core.console import console

Verdict = Literal["identical", "same-device-code", "different"]

#: Kinds of difference that change nothing for whoever installs the wheel.
HARMLESS = ("follows", "build-id", "symbols", "paths")
#: What another host compiler may make otherwise.
COMPILED = ("code", "device", "data")


class Rebuild(msgspec.Struct, frozen=True):
    """
    Two wheels of the same inputs, compared.

    Attributes:
        first, again: The sha256 of each.
        device_code: The digest of each wheel's device code.
        code: Libraries whose device code differs.
        members, archive, equal: See `WheelDifference`.
        compiler: The host compiler of each.
        cached: Whether units came from the compiler cache, which makes the second build less than one.
        unexplained: Members that differ for no reason that is known here.
    """

    wheel: str
    verdict: Verdict
    first: str
    again: str
    device_code: tuple[str, str]
    compiler: tuple[str, str]
    cached: bool
    code: tuple[CodeDifference, ...] = ()
    members: tuple[MemberDifference, ...] = ()
    archive: tuple[str, ...] = ()
    equal: int = 0
    unexplained: tuple[str, ...] = ()


def compare(first: Path, again: Path, policy: AuditPolicy, scratch: Path, *, compiler: tuple[str, str], cached: bool) -> Rebuild:
    """
    Return how the wheels *first* and *again*, made of the same inputs, compare; device code is compared in any case.

    Raises:
        wheel-invalid, archive-unsafe, disk-full: As `code.of`.
    """
    codes = [code.of(path, policy, scratch) for path in (first, again)]
    hashes = (digest.sha256_file(first), digest.sha256_file(again))
    made = Rebuild(first.name, "identical", *hashes, (codes[0].digest, codes[1].digest), compiler, cached)
    if first.name == again.name and hashes[0] == hashes[1]:
        return made
    found = wheel_diff.compare(first, again)
    differing = code.compare(*codes)
    open_questions = _unexplained(found.members, differing, same_compiler=compiler[0] == compiler[1])
    open_questions += () if first.name == again.name else (f"the file name: {again.name}",)
    return msgspec.structs.replace(
        made, verdict="different" if open_questions else "same-device-code", code=differing, members=found.members, archive=found.archive,
        equal=found.equal, unexplained=open_questions,
    )  # fmt: skip


def _unexplained(members: tuple[MemberDifference, ...], differing: tuple[CodeDifference, ...], *, same_compiler: bool) -> tuple[str, ...]:
    grave = {library.name for library in differing if not library.names_only}
    renamed = {library.name for library in differing if library.names_only}

    def explained(member: MemberDifference) -> bool:
        if member.name in grave:
            return False
        if member.kind in HARMLESS or member.kind == "device":
            return True
        # Host code names the kernels; and the build record and the bill of materials name the compiler.
        named = member.name.endswith((".so", f".dist-info/{BUILD_RECORD}", f".dist-info/{SBOM}"))
        return (member.kind in COMPILED and member.name in renamed) or (not same_compiler and named and member.kind != "absent")

    return tuple(member.name for member in members if not explained(member))


def show(made: Rebuild) -> None:
    """Print *made*: the members that differ and why, the kernels that do, and the verdict."""
    rows = [[member.name, MEANS[member.kind], "\n".join(member.says)] for member in made.members]
    if rows:
        console.table(f"{made.wheel}: {made.equal} members equal", ["member", "what differs", "particulars"], rows, result=True)
    for line in made.archive:
        console.note(f"the archives: {line}")
    if made.code:
        codes = [
            [library.name, f"{library.pieces[0]} of {library.pieces[1]}", _said(library), "\n".join(library.kernels[:10])]
            for library in made.code
        ]
        console.table("device code", ["library", ">pieces", "what differs", "kernels"], codes, result=True)
    how = ", units from the compiler cache: no real rebuild" if made.cached else ""
    console.result(f"{made.wheel}: {made.verdict}{how}")
    console.result(f"  sha256      {made.first}")
    console.result(f"  again       {made.again}")
    console.result(f"  device code {', '.join(dict.fromkeys(made.device_code)) or 'none'}")
    if made.compiler[0] != made.compiler[1]:
        console.result(f"  compiled by {made.compiler[0]}, then by {made.compiler[1]}: host code may differ")


def _said(library: CodeDifference) -> str:
    if library.unreadable:
        return f"it cannot be read: {library.unreadable}"
    return "names with a hash of the source's folder" if library.names_only else f"{len(library.kernels)} kernels"


def raise_for_difference(made: Rebuild) -> None:
    """
    Do nothing when the two wheels are the same but for what is explained.

    Raises:
        rebuild-differs: They are not.
    """
    if made.verdict == "different":
        details = [*made.unexplained, *(f"{library.name}: {kernel}" for library in made.code for kernel in library.kernels[:10])]
        raise BuildError("rebuild-differs", f"{made.wheel}, built again from the same inputs, is another wheel.", details=details)
