"""
The reviewed audit policy: the required and the allowed contents of each library of each wheel.

`ci/audit.yaml` holds for every stack, `ci/audit/<stack>.yaml` for the libraries of one stack. A
library that neither names is a finding, so together they are a complete list.
"""

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec.structs import replace

from sparkwright.builder.wheel.gpu_target import parsed
from sparkwright.core import strict_yaml
from sparkwright.core.errors import FileError


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The base of every record of the file; an unknown field is an error."""


class Allowed(_Record, frozen=True):
    """
    Device code of another target that a library may hold.

    Attributes:
        arch: The target that it was made for (``sm_80``, ``sm_90a``); for PTX the ``.target`` of
            its text.
        most: How many files of it there may be.
        reason: Why it is there.
    """

    arch: str
    most: int
    reason: strict_yaml.Prose


class Opcode(_Record, frozen=True):
    """
    Machine instructions that a library must hold.

    Attributes:
        pattern: A regular expression searched in the opcode with its modifiers.
        least: How many there must be, over all kernels.
        kernels: A regular expression searched in mangled kernel names; only cubins with such a
            kernel are disassembled, and only in such kernels does the instruction count.
    """

    pattern: str
    least: int
    kernels: str = ""


class TrapFree(_Record, frozen=True):
    """
    Kernels that must not hold a trap.

    Attributes:
        kernels: A regular expression searched in mangled kernel names; one that matches no kernel
            is a finding.
        reason: What a trap there would mean.
    """

    kernels: str
    reason: strict_yaml.Prose


class LibraryPolicy(_Record, frozen=True):
    """
    The policy of the libraries that *glob* matches.

    Attributes:
        glob: Matched against the whole member name; ``*`` also matches ``/``.
        role: ``target`` was compiled here for the stack's arch; ``base`` came with the official
            wheel.
        reason: Why a base library is not compiled here.
        external: The external project of environment.yaml that a target library belongs to. If the
            build record says why that was not compiled, it is judged as a base library.
        also: Cubins of other targets that may be there.
        ptx: PTX that may be there.
        needed: Shared libraries wanted beyond the common ones, as globs.
        python: The oldest Python that an abi3 library may need (``3.11``), if the official wheel
            promises an older one.
        symbols: Dynamic symbols that it must define.
        operators: Operators of torch that it must declare and implement.
        external_operators: The same by external project, each unless the build record says why
            that was not compiled.
        torch: ``stable`` if it must use torch through its stable ABI alone, so that one build
            serves several versions of torch.
    """

    glob: str
    role: Literal["target", "base"]
    reason: str = ""
    external: str = ""
    also: tuple[Allowed, ...] = ()
    ptx: tuple[Allowed, ...] = ()
    opcodes: tuple[Opcode, ...] = ()
    trap_free: tuple[TrapFree, ...] = ()
    needed: tuple[str, ...] = ()
    python: Annotated[str, msgspec.Meta(pattern=r"^(3\.[0-9]+)?$")] = ""
    symbols: tuple[str, ...] = ()
    operators: tuple[str, ...] = ()
    external_operators: dict[str, tuple[str, ...]] = {}
    torch: Literal["", "stable"] = ""

    def __post_init__(self) -> None:
        code = self.also or self.ptx or self.opcodes or self.trap_free
        if self.role == "base" and code:
            raise ValueError(f"{self.glob} is a base library, whose device code is only reported")
        if self.role == "base" and not self.reason.strip():
            raise ValueError(f"{self.glob} is not compiled for the stack, which wants a reason")
        try:
            for pattern in self.kernels:
                re.compile(pattern)
            for rule in self.opcodes:
                re.compile(rule.pattern)
        except re.error as error:
            raise ValueError(f"{error.pattern!r} is not a regular expression: {error}") from error

    def without(self, projects: Mapping[str, str], *, compiled: bool) -> "LibraryPolicy":
        """
        Return the policy in a wheel without external *projects*.

        Args:
            projects: By name, each with the reason.
            compiled: Whether the library itself was compiled here.
        """
        if not compiled and (why := projects.get(self.external)):
            return LibraryPolicy(self.glob, "base", why, needed=self.needed, python=self.python)
        operators = [*self.operators]
        for project, names in self.external_operators.items():
            operators += names if project not in projects else ()
        return replace(self, operators=tuple(operators))

    @property
    def kernels(self) -> tuple[str, ...]:
        """Regular expressions of the kernels whose instructions are read."""
        rules: tuple[Opcode | TrapFree, ...] = (*self.opcodes, *self.trap_free)
        return tuple(rule.kernels for rule in rules)


class DistributionPolicy(_Record, frozen=True):
    """
    The policy of a wheel.

    Attributes:
        libraries: None for a wheel of data and Python.
        size_max: Bytes of the whole wheel.
    """

    reason: str
    libraries: tuple[LibraryPolicy, ...] = ()
    size_max: int | None = None


class CommonPolicy(_Record, frozen=True):
    """``ci/audit.yaml``: what holds for every stack; its fields are those of `AuditPolicy`."""

    needed: tuple[str, ...]
    distributions: dict[str, DistributionPolicy]


class StackPolicy(_Record, frozen=True):
    """
    ``ci/audit/<stack>.yaml``: by distribution, the libraries that its wheel has in this stack
    besides the common ones.
    """

    libraries: dict[str, tuple[LibraryPolicy, ...]] = {}


class AuditPolicy(_Record, frozen=True):
    """
    The whole policy of a stack.

    Attributes:
        arch: The architecture of the stack as CMake spells it, such as ``12.1f``; stack.yaml names
            it, and no file of the policy does.
        needed: Shared libraries that every library may want, as globs.
        distributions: By normalised distribution name; a wheel that is not listed may hold no
            library.
    """

    arch: str
    needed: tuple[str, ...]
    distributions: dict[str, DistributionPolicy]

    @property
    def target(self) -> str:
        """The target that ptxas must have been given: ``12.1f`` → ``sm_121f``."""
        return "sm_" + self.arch.replace(".", "")

    @property
    def device(self) -> tuple[int, int]:
        """The compute capability of the stack's GPU: ``12.1f`` → ``(12, 1)``."""
        return parsed(self.target)[:2]

    def library(self, distribution: str, name: str) -> LibraryPolicy | None:
        """Return the first policy of *distribution* whose glob matches the member *name*."""
        listed = self.distributions.get(distribution)
        for policy in listed.libraries if listed else ():
            if fnmatchcase(name, policy.glob):
                return policy
        return None


def load(path: Path, arch: str) -> AuditPolicy:
    """
    Return the policy of a stack, of the common file and its own, which comes first.

    Args:
        path: The stack's file, ``ci/audit/<stack>.yaml``; the common one lies beside its folder and
            is called like that.
        arch: The stack's.

    Raises:
        file-invalid: A file is missing or not valid, or the stack's names a distribution that the
            common one lacks.
    """
    common = strict_yaml.load(path.parent.with_suffix(".yaml"), CommonPolicy)
    own = strict_yaml.load(path, StackPolicy).libraries
    if unknown := sorted(own.keys() - common.distributions.keys()):
        raise FileError(
            "file-invalid",
            f"The policy of {path.stem} contradicts the common one.",
            details=[f"the common policy has no distribution {', '.join(unknown)}", str(path)],
        )
    distributions = {
        name: replace(listed, libraries=own.get(name, ()) + listed.libraries)
        for name, listed in common.distributions.items()
    }
    return AuditPolicy(arch, common.needed, distributions)
