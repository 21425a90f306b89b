"""
What is published, as records: releases, what is proved of them, and the manifest that says which of both hold.

A `Release` and a `Proof` never change; each is a file named after the sha256 of its bytes (`files.canonical`). The `Manifest` changes with
every publication, is signed whole, and binds both by that hash. Index, pages and locks follow from it and from nothing else.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

import msgspec

from sparkwright.core.states import State

FORMAT = 1

Sha256 = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}$")]
#: UTC, to the second: ``2026-11-22T07:30:00Z``. Texts of this form sort as times do.
Time = Annotated[str, msgspec.Meta(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$")]
#: One line that people read; no control characters, so that no terminal and no log is led astray.
Line = Annotated[str, msgspec.Meta(max_length=1000, pattern=r"^[^\x00-\x1f\x7f]*$")]
#: What may stand in a file name, a URL path and a shell word alike.
Name = Annotated[str, msgspec.Meta(max_length=255, pattern=r"^[A-Za-z0-9][A-Za-z0-9._+!-]*$")]

#: ``verified`` holds releases whose every required verdict is a pass; ``candidate`` holds all, those included, so that nobody who
#: follows it loses a release when that is promoted.
Channel = Literal["candidate", "verified"]
Action = Literal["publish", "promote", "yank", "retain", "refresh"]
#: ``aarch64``, ``x86_64``, or ``any`` for a wheel without machine code.
Machine = Literal["aarch64", "x86_64", "any"]

_CONTROL = re.compile(r"[\x00-\x1f\x7f]+")


def line(text: str) -> str:
    """Return *text* as a `Line`: what cannot stand in one becomes a space, and what is too long is cut."""
    return _CONTROL.sub(" ", text)[:1000]


class Library(msgspec.Struct, frozen=True):
    """A library in a wheel: its size in bytes, whether it was compiled here or came from the official wheel, cubins by architecture."""

    name: Line
    size: int
    origin: Literal["compiled", "base"]
    code: dict[Line, int] = {}


class Wheel(msgspec.Struct, frozen=True):
    """
    A wheel of ours.

    Attributes:
        fork: ``cutlass``, ``flashinfer``, ``vllm``, or ``sparkwright`` for the installer itself.
        project: Normalised name (PEP 503). *version*: with its local label.
        url: Relative to the root of the index (``files/<sha256>/<filename>``), or absolute where another host keeps it. Its METADATA
            lies at the same address with ``.metadata`` added (PEP 658).
        requires_python: As METADATA says; empty where it says nothing.
        metadata: sha256 of its METADATA.
        uploaded: When it was first published (PEP 700).
        device_code: The audit's device-code digest; empty without device code.
        content: What an environment that holds it can be recognised by (`sparkwright.release.content`).
    """

    filename: Name
    sha256: Sha256
    size: int
    fork: Name
    project: Name
    version: Name
    machine: Machine
    url: Line
    metadata: Sha256
    uploaded: Time
    requires_python: Line = ""
    device_code: str = ""
    content: str = ""
    libraries: tuple[Library, ...] = ()


class Patch(msgspec.Struct, frozen=True):
    """A patch that a fork carries: its hash, subject and reason; *pick* is the pull request's number, 0 for ours."""

    name: Line
    sha256: Sha256
    subject: Line
    reason: Line
    pick: int = 0


class Fork(msgspec.Struct, frozen=True):
    """
    Where a wheel comes from, as its build record says.

    Attributes:
        version: Of the upstream release. *kind*, *origin*, *pin*, *tree*, *resolved*: of the source (`forks.sources.FetchedSource`).
        built: ``headers``, ``backend``, ``graft`` or ``full``. *base*: sha256 of the official wheel under a graft, else empty.
        source_tree: Tree id of what was built. *sites*: places that arch rules changed.
        cuda: The compiler's release (``cu130``), or empty. *isolation*: what kept the build from the network, or empty.
    """

    name: Name
    version: Name
    kind: Line
    origin: Line
    pin: Line
    tree: Line
    resolved: bool
    built: Line
    source_tree: Line
    base: str = ""
    patches: tuple[Patch, ...] = ()
    sites: int = 0
    cuda: str = ""
    isolation: str = ""


class Lock(msgspec.Struct, frozen=True):
    """
    The matched set for one kind of machine: ``b/<release>/pylock.<machine>.toml`` (PEP 751), and the same as hashed requirements.

    Attributes:
        packages: Normalised name → version of everything in it, ours included.
    """

    machine: Machine
    sha256: Sha256
    requirements: Sha256
    packages: dict[Name, Name]


class Need(msgspec.Struct, frozen=True):
    """
    Whether a patch is still needed, on the day of the release.

    Attributes:
        state: ``needed``: upstream's newest lacks it. ``upstream``: it has it. ``unknown``: nobody looked, and *says* why.
    """

    fork: Name
    patch: Line
    state: Literal["needed", "upstream", "unknown"]
    says: Line


class Release(msgspec.Struct, frozen=True):
    """
    One matched set, for good. Its address is the sha256 of its canonical bytes; it lies at ``b/<address>/release.json``.

    Attributes:
        name: ``<stack>.<n>``, unique in the index; *n* counts from 1. *made*: when it was first published.
        locks: One for each machine that it has wheels for.
        onsite: sha256 of ``b/<address>/onsite.json``, what is installed and edited on the user's machine; empty without.
        before: Address of the release of the same stack before it; empty for the first.
    """

    name: Name
    stack: Name
    made: Time
    wheels: tuple[Wheel, ...]
    forks: tuple[Fork, ...]
    locks: tuple[Lock, ...]
    needs: tuple[Need, ...] = ()
    onsite: str = ""
    before: str = ""
    format: int = FORMAT


class Missing(msgspec.Struct, frozen=True):
    """Why a wheel is not for ``verified``: the gate (or ``source``, ``sbom``, …), its state, the reason's reference, and a sentence."""

    gate: Line
    state: State
    reference: Line
    says: Line


class Evidence(msgspec.Struct, frozen=True):
    """
    A file ``evidence/<sha256>.json``.

    Attributes:
        kind: ``provenance`` (SLSA), ``test-result`` and ``summary`` (in-toto test result, SLSA VSA) are signed; ``sbom`` (CycloneDX, the
            one inside the wheel), ``verdicts`` and ``throughput`` (what the gates wrote) are named by hash in the signed ones; ``pep740``
            is the provenance object of the simple API, only where the signer has an identity.
    """

    kind: Literal["provenance", "test-result", "summary", "sbom", "verdicts", "throughput", "pep740"]
    sha256: Sha256
    size: int


class Gate(msgspec.Struct, frozen=True):
    """One gate of the ladder for people: its state, and in a sentence why (empty for a pass)."""

    name: Line
    title: Line
    state: State
    says: Line = ""


class Speed(msgspec.Struct, frozen=True):
    """
    One metric of one workload against the baseline.

    Attributes:
        ratio: candidate / baseline of the metric; *low*, *high*: 95 % interval; all None where not measured.
        evidence_pass, evidence_fail: The last e-values.
    """

    cell: Line
    metric: Line
    state: State
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    evidence_pass: float | None = None
    evidence_fail: float | None = None


class Proved(msgspec.Struct, frozen=True):
    """
    What is proved of one wheel.

    Attributes:
        wheel: Its sha256. *missing*: empty exactly where it may stand in ``verified``.
        policy: sha256 of the release policy (`ci/release.yaml`) that decided.
        baseline: What the speeds are against, for people; *margin*: the ratio that still passes (0.02 is 2 %).
        recipes: What the wheel was shown to serve: recipes for which every gate of a served model passed.
        host: Facts of the machine that gated; *evidence*: at most one of each kind.
    """

    wheel: Sha256
    policy: Sha256
    missing: tuple[Missing, ...]
    gates: tuple[Gate, ...] = ()
    speeds: tuple[Speed, ...] = ()
    baseline: Line = ""
    margin: float | None = None
    host: dict[Line, Line] = {}
    evidence: tuple[Evidence, ...] = ()
    recipes: tuple[Line, ...] = ()


class Proof(msgspec.Struct, frozen=True):
    """What is proved of a release's wheels, one for each; it lies at ``b/<release>/proof-<its sha256>.json``. Promoting makes a new one."""

    release: Sha256
    made: Time
    wheels: tuple[Proved, ...]
    format: int = FORMAT


class Entry(msgspec.Struct, frozen=True):
    """
    How a release stands today.

    Attributes:
        release, proof: Their addresses. *name*, *stack*, *made*: as in the release.
        channel: See `Channel`. *yanked*: why it is no longer offered (PEP 592); empty for one that is.
    """

    release: Sha256
    proof: Sha256
    name: Name
    stack: Name
    made: Time
    channel: Channel
    yanked: Line = ""


class Record(msgspec.Struct, frozen=True):
    """What was done: the serial that it made, when, to which release (its name; empty for all), why, and by which key or identity."""

    serial: int
    at: Time
    action: Action
    release: str
    reason: Line
    by: Line


class Manifest(msgspec.Struct, frozen=True):
    """
    What an index holds.

    Attributes:
        serial: One more with every change; a client that saw a higher one refuses this.
        expires: After it, a client refuses the manifest, so that nobody can keep it from news by answering with an old one.
        url: Where the index is served, with a final slash; signed, so that a copy elsewhere is known for one.
        entries: Oldest first. *retired*: file name → sha256 of wheels that `retain` removed; the names are never used for other bytes.
        log: Everything that was done, oldest first.
    """

    serial: int
    made: Time
    expires: Time
    url: Line
    entries: tuple[Entry, ...] = ()
    retired: dict[Name, Sha256] = {}
    log: tuple[Record, ...] = ()
    format: int = FORMAT
