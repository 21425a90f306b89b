"""
The records that publisher and client share.

A release is one TUF target, `releases/<name>.json`: a `Release`, which names every other file by
size and sha256. How it stands (channel, yank) is a `ReleaseState`, the ``custom`` field of that
target in the signed ``targets.json``. All other files lie at `ReleaseFile.path`.
"""

import re
from typing import Annotated, Literal, Self

import msgspec

from sparkwright.core.files import Sha256
from sparkwright.core.states import State

#: Bytes of the largest release record, lock, and other small file (verdicts, provenance).
LARGEST_RELEASE = 8 << 20
LARGEST_LOCK = 16 << 20
LARGEST_EVIDENCE = 128 << 20
#: Bytes of the files of the largest warm pack; those of a hybrid model with drafts had 158 MB.
LARGEST_PACK = 4 << 30

# Patterns end in \Z, as $ admits a newline.
#: UTC, to the second, such as ``2026-11-22T07:30:00Z``; sorts as times do.
Time = Annotated[str, msgspec.Meta(pattern=r"\A\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ\Z")]
#: One line for people, without control characters.
Line = Annotated[str, msgspec.Meta(max_length=1000, pattern=r"\A[^\x00-\x1f\x7f-\x9f]*\Z")]
#: What may stand in a file name, a URL path and a shell word alike.
Name = Annotated[str, msgspec.Meta(max_length=255, pattern=r"\A[A-Za-z0-9][A-Za-z0-9._+!-]*\Z")]
#: ``<stack>.<n>``, *n* counting from 1.
ReleaseName = Annotated[
    str, msgspec.Meta(max_length=100, pattern=r"\A[A-Za-z0-9][A-Za-z0-9._-]*\.[1-9][0-9]{0,8}\Z")
]
#: An address without user, password or blanks; empty for a file that the index itself holds.
Url = Annotated[
    str, msgspec.Meta(max_length=2000, pattern=r"\A(https?://[^\s@\x00-\x1f\x7f\"<>\\]+)?\Z")
]
#: A file below the site-packages.
SitePath = Annotated[
    str,
    msgspec.Meta(max_length=500, pattern=r"\A(?!\.\.?(/|\Z))[\w.+-]+(/(?!\.\.?(/|\Z))[\w.+-]+)*\Z"),
]
Size = Annotated[int, msgspec.Meta(ge=0)]

#: ``verified`` holds the releases whose every required verdict is a pass, ``candidate`` all.
Channel = Literal["candidate", "verified"]
CHANNELS: tuple[Channel, ...] = ("candidate", "verified")
#: ``any`` for a wheel without machine code.
Machine = Literal["aarch64", "x86_64", "any"]

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]+")


def line(text: str) -> str:
    """Return *text* as a `Line`: control characters become blanks, and it is cut if too long."""
    return _CONTROL.sub(" ", text)[:1000]


class PackKey(msgspec.Struct, frozen=True, kw_only=True):
    """
    What a warm pack was made for; it is used only where all of this is the same.

    Attributes:
        recipe: Its name.
        model: The digest of the model's files.
        settings: Arguments and variables of vLLM that may change the compiled code, sorted.
        wheels: Project → sha256 of those wheels that compile, or whose code is compiled.
        python: Its version, such as ``3.12``.
        gpu: Its name and capability; of a machine without one, the processor.
        driver: Of the GPU; empty without one.
    """

    recipe: Line
    model: Sha256
    settings: tuple[Line, ...]
    wheels: dict[Name, Sha256]
    python: Line
    gpu: Line
    driver: Line

    def differences(self, here: Self) -> list[str]:
        """Return how *here* differs from this key, each difference in a few words."""
        differences = list[str]()
        for name in ("recipe", "model", "python", "gpu", "driver"):
            there, own = getattr(self, name), getattr(here, name)
            if there != own:
                differences.append(f"{name}: {there}, here {own}")
        for project in sorted(self.wheels.keys() | here.wheels.keys()):
            if self.wheels.get(project) != here.wheels.get(project):
                differences.append(f"wheel of {project}")
        for setting in sorted({*self.settings} ^ {*here.settings}):
            differences.append(f"{'pack' if setting in self.settings else 'here'}: {setting}")
        return differences


class ReleaseFile(msgspec.Struct, frozen=True, kw_only=True):
    """
    A file by its hash.

    Attributes:
        url: Where another host keeps it; empty if it lies at `path`.
    """

    name: Name
    size: Size
    sha256: Sha256
    url: Url = ""

    @property
    def path(self) -> str:
        """The place of the file below the root of the index."""
        return f"files/{self.sha256}/{self.name}"


class WarmPack(ReleaseFile, frozen=True, kw_only=True):
    """
    What a start of a recipe compiled and tuned, as an archive, and what it saved on the machine
    that gated.

    Attributes:
        unpacked: Bytes of its files. *tables*: how many of them hold tuned configurations.
        cold_s, warm_s: Seconds of a start without it, and with it.
        compiled, tuned: Graphs and kernels, and tables, that the gates' servers made with it.
    """

    key: PackKey
    unpacked: Annotated[int, msgspec.Meta(ge=0, le=LARGEST_PACK)]
    tables: Size
    cold_s: float
    warm_s: float
    compiled: Size
    tuned: Size

    @property
    def text(self) -> str:
        """Its size and the seconds that it saves, as text."""
        return (
            f"{self.key.recipe}, {self.size / 1e6:,.1f} MB for {self.key.gpu}: a start takes "
            f"{self.warm_s:g} s instead of {self.cold_s:g}; {self.compiled} compiled and "
            f"{self.tuned} tuned with it"
        )


class Missing(msgspec.Struct, frozen=True):
    """
    Why a wheel is not for ``verified``.

    Attributes:
        gate: The gate, or ``source``, ``sbom`` and the like. *state*: what it is instead of a pass.
        reference: The stable name of the reason. *says*: the reason in a sentence.
    """

    gate: Line
    state: State
    reference: Line
    says: Line


class GateResult(msgspec.Struct, frozen=True):
    """
    The result of one gate: its name, its subject, its state, and why it is no pass.

    Attributes:
        attempts: How each attempt ended, oldest first, by recipe.
    """

    name: Line
    title: Line
    state: State
    says: Line = ""
    attempts: Line = ""


class Speed(msgspec.Struct, frozen=True):
    """
    One metric of one workload against the baseline.

    Attributes:
        ratio: candidate / baseline; *low*, *high*: its 95 % interval; None if not measured.
    """

    cell: Line
    metric: Line
    state: State
    ratio: float | None = None
    low: float | None = None
    high: float | None = None


class Proof(msgspec.Struct, frozen=True, kw_only=True):
    """
    What is shown of one wheel.

    Attributes:
        policy: The sha256 of the release policy (``ci/release.yaml``) that decided.
        missing: Empty exactly if the wheel may stand in ``verified``.
        recipes: The recipes for which every gate of a served model passed.
        baseline: What the speeds are compared with. *margin*: the loss that still passes (0.02 is
            2 %).
        host: Facts of the machine that gated.
        verdicts, throughput, canary: What the gates wrote, where they did.
    """

    policy: Sha256
    missing: tuple[Missing, ...] = ()
    gates: tuple[GateResult, ...] = ()
    recipes: tuple[Line, ...] = ()
    speeds: tuple[Speed, ...] = ()
    baseline: Line = ""
    margin: float | None = None
    host: dict[Line, Line] = {}
    verdicts: ReleaseFile | None = None
    throughput: ReleaseFile | None = None
    canary: ReleaseFile | None = None


class ReleaseWheel(ReleaseFile, frozen=True, kw_only=True):
    """
    A wheel of ours.

    Attributes:
        fork: ``cutlass``, ``flashinfer`` or ``vllm``.
        project: The normalised name. *version*: with its local label.
        metadata: The sha256 of METADATA, which lies beside the wheel as ``<name>.metadata``.
        uploaded: When the wheel was first published.
        device_code: The digest of G0's verdict; empty without device code, or without a verdict.
        content: The digest by which an environment that holds the wheel is recognised.
        isolated: Whether its compilation had no network; None if nothing was compiled, or unknown.
        provenance: The SLSA statement about the wheel. *sbom*: the one inside the wheel.
    """

    fork: Name
    project: Name
    version: Name
    machine: Machine
    metadata: Sha256
    uploaded: Time
    proof: Proof
    requires_python: Line = ""
    device_code: str = ""
    content: str = ""
    isolated: bool | None = None
    provenance: ReleaseFile | None = None
    sbom: ReleaseFile | None = None


class ReleasePatch(msgspec.Struct, frozen=True):
    """
    A patch of a fork.

    Attributes:
        pick: The number of the pull request; 0 for a patch of ours.
    """

    name: Line
    sha256: Sha256
    subject: Line
    reason: Line
    pick: int = 0


class ForkSource(msgspec.Struct, frozen=True, kw_only=True):
    """
    Where the wheels of a fork come from.

    Attributes:
        version: Of the upstream release.
        kind, origin, pin, tree, resolved: Of the source, as in `forks.fetch.FetchedSource`.
        built: How it was built. *base*: the sha256 of the official wheel under a graft.
        source_tree: The tree that was built. *sites*: how many places arch rules changed.
        cuda: The compiler's release (``cu130``). *isolation*: what kept the build off the network.
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
    patches: tuple[ReleasePatch, ...] = ()
    sites: int = 0
    cuda: str = ""
    isolation: str = ""


class ReleaseLock(ReleaseFile, frozen=True, kw_only=True):
    """
    The locked set of one machine, ``pylock.<machine>.toml`` (PEP 751).

    Attributes:
        pythons: The Python versions that it is for (``3.12``).
        packages: Normalised name → version of everything in it, wheels of ours included.
    """

    machine: Machine
    pythons: tuple[Name, ...]
    packages: dict[Name, Name]


class TextChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A text that occurs exactly once, and its replacement."""

    anchor: Annotated[str, msgspec.Meta(pattern=r"\S")]
    replacement: str


class FileEdit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    An edit of one installed file, made on the user's machine as the licence of the wheel demands.

    Attributes:
        package: The project whose file it is: with overlays, the upper one.
        before, after: The sha256 of the file in the wheel, and after the changes.
        drop_when: What has to happen upstream for the edit to go.
    """

    name: Line
    package: Name
    file: SitePath
    before: Sha256
    after: Sha256
    changes: Annotated[tuple[TextChange, ...], msgspec.Meta(min_length=1)]
    reason: str
    drop_when: str


class Overlay(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    A project that may put files into the packages of another one.

    Attributes:
        files: How many files of *lower* it replaces.
    """

    upper: Name
    lower: Name
    files: Size
    reason: str


class Release(msgspec.Struct, frozen=True, kw_only=True):
    """
    One matched set.

    Attributes:
        name: ``<stack>.<n>``, unique in the index, *n* counting from 1.
        made: When it was first published.
        locks: One for each machine that has wheels.
        edits, overlays: What the client does after the installation.
        inexact_records: Project whose RECORD may disagree with its members → why.
        before: The name of the previous release of the stack; empty for the first.
        packs: For faster first starts.
    """

    name: ReleaseName
    stack: Name
    made: Time
    wheels: tuple[ReleaseWheel, ...]
    locks: tuple[ReleaseLock, ...]
    forks: tuple[ForkSource, ...] = ()
    edits: tuple[FileEdit, ...] = ()
    overlays: tuple[Overlay, ...] = ()
    inexact_records: dict[Name, str] = {}
    before: str = ""
    packs: tuple[WarmPack, ...] = ()
    #: A client refuses a release of another format; docs/howto/publish.md says when it is raised.
    format: Literal[1] = 1

    @property
    def missing(self) -> dict[str, tuple[Missing, ...]]:
        """What each wheel lacks for ``verified``, by file name; empty for a verified release."""
        return {wheel.name: wheel.proof.missing for wheel in self.wheels if wheel.proof.missing}

    @property
    def files(self) -> tuple[ReleaseFile, ...]:
        """Every file that the release names."""
        files: list[ReleaseFile | None] = [*self.locks, *self.packs]
        for wheel in self.wheels:
            proof = wheel.proof
            files += (wheel, wheel.provenance, wheel.sbom)
            files += (proof.verdicts, proof.throughput, proof.canary)
        return tuple(filter(None, files))


class ReleaseState(msgspec.Struct, frozen=True, kw_only=True):
    """
    How a release stands now: the signed ``custom`` field of its target.

    Attributes:
        machines: Machines that it has a lock for, and *pythons* Python versions of any of them.
        missing: The gates that it lacks for ``verified``; empty for a verified one.
        yanked: Why it is no longer offered; empty for one that is.
    """

    stack: Name
    made: Time
    channel: Channel
    machines: tuple[Machine, ...]
    pythons: tuple[Name, ...]
    missing: tuple[Line, ...] = ()
    yanked: Line = ""


def target_path(name: str) -> str:
    """Return the TUF target path of the release *name*."""
    return f"releases/{name}.json"


def number(name: str) -> int:
    """Return the number of the release *name* in its stack: 3 of ``2026.11.3``."""
    return int(name.rpartition(".")[2])
