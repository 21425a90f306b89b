"""
Pins: what the releases of a stack require of each other, known before anything large is fetched.

METADATA of a wheel comes from the index (PEP 658), which need not have it, or from the wheel in the
store; the tag of CUTLASS from the tree that the lock names.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterator, Mapping
from email.parser import BytesParser
from typing import ClassVar

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from sparkwright.builder import BuildError, toolchain
from sparkwright.builder.wheel import archive
from sparkwright.core import http
from sparkwright.core.console import console
from sparkwright.core.errors import Advice, SparkwrightError
from sparkwright.core.http import HttpFailure
from sparkwright.core.zips import damage_guard, info_folder, zip_file, zip_members
from sparkwright.forks import package_index
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import ForkSpec, SdistSpec, SourceUnreachable, WheelSpec, earlier_lock


class PinError(SparkwrightError):
    """Releases of the stack do not fit together."""

    references: ClassVar[Mapping[str, Advice]] = {
        "pins-disagree": Advice(
            "A release of the stack requires another release of a project than the stack names.",
            "Choose releases that fit. To accept another release for good, name it under `requires`"
            " in build/<stack>/environment.yaml. lock, plan and patch bump go on once with "
            "--force-pin.",
        ),
    }


def _metadata(context: RunContext, named: WheelSpec | SdistSpec, version: str) -> tuple[str, bytes]:
    """
    Return the name and METADATA of a wheel of *version* of the project *named*, of several that for
    the tag of *named*.

    Raises:
        offline, source-unreachable: It is not in the store, and the index does not give it.
        archive-unsafe: The wheel in the store is damaged.
    """
    earlier = earlier_lock(context.project)
    tag = named.tag if isinstance(named, WheelSpec) else ""
    locked = (
        [base for fork in earlier.forks.values() for base in fork.bases.values()] if earlier else []
    )
    for base in locked:
        if (base.name, base.version) == (named.name, version) and tag in base.filename:
            path = package_index.path_of(context.store, base.sha256, base.filename)
            if path.is_file():
                with zip_file(path) as wheel:
                    listed = zip_members(wheel, base.filename)
                    name = f"{info_folder(listed, base.filename)}/METADATA"
                    return base.filename, archive.member_text(wheel, listed, name, base.filename)
            if stored := context.store.get("metadata", base.sha256, bytes):
                return base.filename, stored
    if context.offline:
        raise SourceUnreachable("offline", f"{named.name} {version} is not in the store.")
    offers = package_index.offers(named.name, version, ".whl")
    file = min(offers, key=lambda offer: tag not in offer.name)
    try:
        reply = http.request("GET", f"{file.url}.metadata", redirects=True)
        if reply.status != 200:
            raise HttpFailure("status", f"answered {reply.status}", reply.status)
    except HttpFailure as failure:
        raise SourceUnreachable(
            "source-unreachable",
            f"The index does not give METADATA of {file.name}.",
            details=[str(failure)],
        ) from None
    if file.sha256:
        context.store.put("metadata", file.sha256, reply.body)
    return file.name, reply.body


def requirements(context: RunContext, fork: str, version: str) -> Iterator[tuple[str, Requirement]]:
    """
    Yield what *version* of *fork* requires, each with the file that says so: its official wheel for
    the machine of the run, as environment.yaml changes it, then CMakeLists.txt, which names the
    releases of the forks that a graft needs, if its tree is in the store.

    Raises:
        offline, source-unreachable, archive-unsafe: As `_metadata`.
        requirement-mismatch: An entry of environment.yaml changes nothing.
    """
    spec, settings = context.project.fork(fork), toolchain.spec(context.project).forks
    environment = {"extra": "", "platform_machine": context.machine}
    if not (named := spec.bases.get(context.machine) or spec.sources.sdist):
        return
    file, metadata = _metadata(context, named, version or named.version)
    with damage_guard(file):
        metadata = archive.change_requirements(metadata, settings[fork].requires)
        header = BytesParser().parsebytes(metadata, headersonly=True)
        for requirement in map(Requirement, map(str, header.get_all("Requires-Dist") or [])):
            if not requirement.marker or requirement.marker.evaluate(environment):
                yield file, requirement
    earlier = earlier_lock(context.project)
    locked = earlier.forks.get(fork) if earlier and not version else None
    source = locked and (locked.sdist or locked.git)
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
    context: RunContext, versions: Mapping[str, str] = {}, *, every: bool = False
) -> list[str]:
    """
    Return, a line each, which two files of the stack name releases of a project that exclude each
    other. What cannot be read now is left out, with a note.

    Args:
        versions: Fork → a release in place of that of stack.yaml.
        every: Read what each fork requires; else what the locked bases of grafts do.

    Raises:
        archive-unsafe: An official wheel is damaged.
    """
    project, lines, claims = context.project, list[str](), list[tuple[str, Requirement]]()
    settings = toolchain.spec(project).forks
    for fork, spec in project.spec.forks.items():
        version = versions.get(fork) or release(spec)
        # A branch or a commit is no release.
        with contextlib.suppress(InvalidRequirement):
            own = _exactly(settings[fork].distribution, version)
            claims.append((f"forks/{project.stack}/stack.yaml", own))
        if every or spec.bases:
            try:
                claims.extend(requirements(context, fork, versions.get(fork, "")))
            except SourceUnreachable as error:
                console.note(f"not all pins of {fork} were compared: {error.what}")
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
    versions: Mapping[str, str] = {},
    *,
    every: bool = False,
    force: bool = False,
) -> list[str]:
    """
    Check that the releases of the stack fit together, and return what does not.

    Args:
        versions, every: As for `disagreements`.
        force: Say what does not fit, and go on.

    Raises:
        pins-disagree: Releases do not fit together.
        archive-unsafe: An official wheel is damaged.
    """
    lines = disagreements(context, versions, every=every)
    if lines and not force:
        raise PinError(
            "pins-disagree",
            f"Releases of stack {context.project.stack} do not fit together.",
            details=lines,
            data={"pins": lines},
        )
    for line in lines:
        console.warn(f"--force-pin: {line}")
    return lines
