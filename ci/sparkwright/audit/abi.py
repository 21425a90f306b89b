"""
The ABI that a wheel promises: Python's limited one by abi3audit, torch's stable one by torch-abi-audit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from sparkwright.audit import checkers
from sparkwright.audit.checkers import PATIENCE, Half, NotRun, Outcome
from sparkwright.audit.elf import version_key
from sparkwright.audit.wheel_reader import Contents, Subject
from sparkwright.builder.wheel.elf import version_text

_TORCH = re.compile(r"lib(torch|c10)[\w]*\.so")
_ABI3_TAG = re.compile(r"cp3(\d+)-abi3-")


class _Abi3Result(msgspec.Struct):
    computed: str
    non_abi3_symbols: list[str]
    future_abi3_objects: dict[str, str] = {}


class _Abi3Object(msgspec.Struct):
    result: _Abi3Result


class _Abi3Spec(msgspec.Struct):
    object: _Abi3Object


class _Abi3Answer(msgspec.Struct):
    specs: dict[str, _Abi3Spec]


def python_floor(about: Subject, contents: Contents) -> tuple[int, ...]:
    """Return the oldest Python that may install the wheel: by its abi3 tag and by its ``Requires-Python``; (3, 2) where neither says."""
    floors = [version_key(text) for text in re.findall(r">=\s*(\d+\.\d+)", contents.python)]
    floors += [(3, int(minor)) for minor in _ABI3_TAG.findall(about.file)]
    return max(floors, default=(3, 2))


def abi3(about: Subject, contents: Contents, halves: Sequence[Half], scratch: Path, patience: float = PATIENCE) -> Outcome:
    """Return what abi3audit says of the libraries whose name promises the limited API of Python."""
    promised = {str(one.path): one for one in halves if one.name.endswith(".abi3.so")}
    floor = python_floor(about, contents)

    def work() -> tuple[str, list[tuple[str, str, str]]]:
        answer = checkers.answer("abi3audit", ["-R", *promised], scratch, _Abi3Answer, patience)
        if answer.specs.keys() != promised.keys():
            raise NotRun(f"abi3audit answered for {len(answer.specs)} of {len(promised)} libraries")
        findings = []
        for path, spec in answer.specs.items():
            found, name = spec.object.result, promised[path].name
            if found.non_abi3_symbols:
                findings.append((name, "abi3-violated", f"it uses {', '.join(sorted(found.non_abi3_symbols)[:5])}"))
            if version_key(found.computed) > floor:
                newer = ", ".join(f"{symbol} ({version})" for symbol, version in sorted(found.future_abi3_objects.items())[:5])
                message = f"it needs Python {found.computed}, the wheel promises {version_text(floor)}: {newer}"
                findings.append((name, "abi3-newer", message))
        highest = max((spec.object.result.computed for spec in answer.specs.values()), key=version_key)
        return f"{len(promised)} libraries, Python {highest} or later needed, {version_text(floor)} promised", findings

    return checkers.outcome("abi3audit", "" if promised else "no library is named .abi3.so", work)


class _TorchUse(msgspec.Struct):
    uses_torch: bool
    stable: bool
    unstable_symbols: list[str]
    min_torch_version: str | None = None


class _TorchExtension(msgspec.Struct):
    path: str
    torch: _TorchUse | None = None
    error: str | None = None


class _TorchPackage(msgspec.Struct):
    """*bundled_libs* are those without an entry for Python, such as one that torch itself loads."""

    extensions: list[_TorchExtension] = []
    bundled_libs: list[_TorchExtension] = []


class _TorchAnswer(_TorchPackage):
    """For one library it stands in the answer itself, for several in packages."""

    packages: list[_TorchPackage] = []


def torch_required(contents: Contents) -> tuple[int, ...]:
    """Return the torch that the wheel requires exactly or at least; nothing where it names none."""
    from packaging.requirements import InvalidRequirement, Requirement

    for text in contents.requires:
        try:
            wanted = Requirement(text)
        except InvalidRequirement:
            continue
        if wanted.name == "torch" and not wanted.marker:
            floors = [one.version.partition("+")[0] for one in wanted.specifier if one.operator in ("==", ">=", "~=")]
            return max(map(version_key, floors), default=())
    return ()


def torch(contents: Contents, halves: Sequence[Half], stable: Callable[[str], bool], scratch: Path, patience: float = PATIENCE) -> Outcome:
    """
    Return what torch-abi-audit says of the libraries that need torch.

    Args:
        stable: Whether the policy wants the member of that name to use torch's stable ABI alone.
    """
    using = {str(one.path): one for one in halves if any(_TORCH.match(needed) for needed in one.needed)}
    required = torch_required(contents)

    def work() -> tuple[str, list[tuple[str, str, str]]]:
        answer = checkers.answer("torch-abi-audit", ["--json", *using], scratch, _TorchAnswer, patience)
        packages = [answer, *answer.packages]
        extensions = {one.path: one for package in packages for one in [*package.extensions, *package.bundled_libs]}
        if extensions.keys() != using.keys():
            raise NotRun(f"torch-abi-audit answered for {len(extensions)} of {len(using)} libraries")
        findings, users, steady, newest = [], 0, 0, ""
        for path, extension in extensions.items():
            name, found = using[path].name, extension.torch
            if extension.error or found is None:
                raise NotRun(f"torch-abi-audit on {name}: {extension.error or 'no answer'}"[:300])
            users, steady = users + found.uses_torch, steady + found.stable
            if found.uses_torch and not found.stable and stable(name):
                findings.append((name, "torch-unstable", f"it uses {len(found.unstable_symbols)} symbols beside torch's stable ABI"))
            oldest = found.min_torch_version or ""
            newest = max(newest, oldest, key=version_key)
            if oldest and required and version_key(oldest) > (*required, 0, 0)[:3]:
                findings.append((name, "torch-newer", f"it needs torch {oldest}, the wheel requires {version_text(required)}"))
        says = f"{steady} of {users} libraries that use torch keep to its stable ABI"
        return says + (f", from torch {newest} on" if newest else ""), findings

    return checkers.outcome("torch-abi-audit", "" if using else "no library needs torch", work)
