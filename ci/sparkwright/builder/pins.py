"""
Pins: what the releases of a stack require of each other.

METADATA comes from the official wheels that the lock names, the tag of CUTLASS from the tree.
"""

import contextlib
import itertools
import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from packaging.markers import UndefinedComparison
from packaging.metadata import parse_email
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from sparkwright.builder import BuildError, toolchain
from sparkwright.builder.wheel import archive
from sparkwright.core.console import console
from sparkwright.core.errors import WheelError
from sparkwright.core.zips import info_folder, member_text, zip_file, zip_members
from sparkwright.forks import package_index
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import ForkLock, ForkSpec, Lock


def requirements(
    context: RunContext, fork: str, locked: ForkLock
) -> Iterator[tuple[str, Requirement]]:
    """
    Yield what the *locked* release of *fork* requires, each with the file that says so: its
    official wheel for the machine of the run, as environment.yaml changes it, and CMakeLists.txt,
    which names the releases of the forks that a graft needs; each if it is in the store.

    Raises:
        wheel-invalid, archive-unsafe: The wheel is damaged.
        requirement-mismatch: An entry of environment.yaml changes nothing.
    """
    spec, settings = context.project.fork(fork), toolchain.spec(context.project).forks
    environment = {"extra": "", "platform_machine": context.machine}
    base = locked.bases.get(context.machine)
    if (
        base
        and (path := package_index.path_of(context.store, base.sha256, base.filename)).is_file()
    ):
        with zip_file(path) as wheel:
            listed = zip_members(wheel, base.filename)
            name = f"{info_folder(listed, base.filename)}/METADATA"
            metadata = member_text(wheel, listed, name)
        metadata = archive.change_requirements(metadata, settings[fork].requires)
        try:
            for requirement in map(Requirement, parse_email(metadata)[0].get("requires_dist", [])):
                if not requirement.marker or requirement.marker.evaluate(environment):
                    yield base.filename, requirement
        except (InvalidRequirement, UndefinedComparison) as error:
            raise WheelError(
                "wheel-invalid",
                f"{base.filename} states a requirement that is none.",
                details=[str(error)],
            ) from error
    elif base:
        console.note(f"not all pins of {fork} were compared: {base.filename} is not in the store")
    source = locked.sdist or locked.git
    text = context.objects.blob(source.tree, "CMakeLists.txt") if source else None
    for need, tag in re.findall(rb'(?m)^\s*set\(\s*(\w+)_REVISION\s+"v?([\w.]+)"', text or b""):
        if (name := need.decode().lower()) in spec.needs:
            try:
                pin = _exactly(settings[name].distribution, tag.decode())
            except InvalidRequirement:
                console.note(f"{fork} names no release of {name}: {tag.decode()}")
            else:
                yield f"CMakeLists.txt of {fork}", pin


def _exactly(project: str, version: str) -> Requirement:
    return Requirement(f"{project}=={version}")


def release(fork: ForkSpec) -> str:
    """
    Return the release of *fork* that others may require: the one that upstream pins where another
    was accepted in its place, else that of its source distribution or its tag.
    """
    sources, tag = fork.sources, fork.sources.git.ref if fork.sources.git else ""
    tag = sources.sdist.version if sources.sdist else tag
    return (sources.upstream or tag).removeprefix("v")


def disagreements(
    context: RunContext, lock: Lock, versions: Mapping[str, str] = MappingProxyType({})
) -> list[str]:
    """
    Return, a line each, which two files of the stack name releases of a project that exclude each
    other. What is not in the store is left out, with a note.

    Args:
        lock: Names the official wheels and the trees that are read.
        versions: Fork → a release in place of that of stack.yaml, whose files are not locked yet.

    Raises:
        wheel-invalid, archive-unsafe: An official wheel is damaged.
    """
    project, lines, claims = context.project, list[str](), list[tuple[str, Requirement]]()
    settings = toolchain.spec(project).forks
    for fork, spec in project.spec.forks.items():
        # A branch or a commit is no release.
        with contextlib.suppress(InvalidRequirement):
            own = _exactly(settings[fork].distribution, versions.get(fork) or release(spec))
            claims.append((f"forks/{project.stack}/stack.yaml", own))
        if fork in lock.forks and fork not in versions:
            try:
                claims.extend(requirements(context, fork, lock.forks[fork]))
            except BuildError as error:
                lines.append(f"build/{project.stack}/environment.yaml: {error.what}")
    tools = project.build_folder / "requirements.in"
    for line in tools.read_text("utf-8").splitlines() if tools.exists() else ():
        with contextlib.suppress(InvalidRequirement):
            wanted = Requirement(line.partition("#")[0])
            claims.append((f"build/{project.stack}/{tools.name}", wanted))
    return lines + [
        f"{file} names {ours}, {other} {theirs}"
        for (file, ours), (other, theirs) in itertools.combinations(claims, 2)
        if file != other
        and canonicalize_name(ours.name) == canonicalize_name(theirs.name)
        and (ours.specifier & theirs.specifier).is_unsatisfiable()
    ]


def check(
    context: RunContext,
    lock: Lock,
    versions: Mapping[str, str] = MappingProxyType({}),
    *,
    force: bool = False,
) -> list[str]:
    """
    Check that the releases of the stack fit together, and return what does not.

    Args:
        lock, versions: As for `disagreements`.
        force: Say what does not fit, and go on.

    Raises:
        pins-disagree: Releases do not fit together.
        wheel-invalid, archive-unsafe: An official wheel is damaged.
    """
    lines = disagreements(context, lock, versions)
    if lines and not force:
        raise BuildError(
            "pins-disagree",
            f"Releases of stack {context.project.stack} do not fit together.",
            details=lines,
            data={"pins": lines},
        )
    for line in lines:
        console.warn(f"--force-pin: {line}")
    return lines
