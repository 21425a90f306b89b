"""``ci/runner.yaml``: how a machine is made a runner, and what a job may take of it; and what one machine was set up with."""

from __future__ import annotations

import ipaddress
import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from sparkwright.core import strict_yaml
from sparkwright.core.errors import FileError

# These become parts of units, rules and command lines: nothing that any of them could read as more than a name.
Name = Annotated[str, msgspec.Meta(pattern=r"^[a-z_][a-z0-9_-]{0,30}\Z")]
Place = Annotated[str, msgspec.Meta(pattern=r"^/[A-Za-z0-9._@-]+(/[A-Za-z0-9._@-]+)*\Z")]
Label = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}\Z")]
Host = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9]([a-z0-9.-]{0,250}[a-z0-9])?\Z")]
Network = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f.:]{2,39}/[0-9]{1,3}\Z")]
Address = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f.:]{2,39}\Z")]
#: The token is sent unencrypted to this machine alone.
API = r"^(https://[A-Za-z0-9.:/_-]+|http://(localhost|127\.0\.0\.1|\[::1\])([:/][A-Za-z0-9.:/_-]*)?)\Z"
Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 31)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=1e6)]


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A typo in a reviewed file is an error."""


class Folders(_Strict, frozen=True):
    """Where things lie; see the comments of the file."""

    config: Place
    state: Place
    work: Place
    models: Place
    program: Place
    runner: Place
    scratch: tuple[Place, ...]


class Software(_Strict, frozen=True):
    """GitHub's runner; ``unresolved`` where nobody has looked its release up."""

    version: str
    sha256: Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{64}|unresolved)\Z")]


class Capability(_Strict, frozen=True):
    """A label and what a machine must have to carry it: *memory* in megabytes."""

    name: Label
    means: str
    gpu: str = ""
    memory: int = 0


class Room(_Strict, frozen=True):
    """Megabytes."""

    work: Count
    work_floor: Count
    disk_floor: Count
    memory_floor: Count
    work_start: Count
    memory_start: Count


class Limits(_Strict, frozen=True):
    """*job* and *idle* in minutes, *look* and *stop* in seconds."""

    memory_high: Annotated[str, msgspec.Meta(pattern=r"^[0-9]{1,3}%\Z")]
    memory_max: Annotated[str, msgspec.Meta(pattern=r"^[0-9]{1,3}%\Z")]
    tasks: Count
    job: Seconds
    idle: Seconds
    look: Seconds
    stop: Seconds


class Egress(_Strict, frozen=True):
    """Where jobs may connect to; *refresh* and *forget* in minutes."""

    ports: tuple[Annotated[int, msgspec.Meta(ge=1, le=65535)], ...]
    hosts: tuple[Host, ...]
    networks: tuple[Network, ...]
    resolvers: tuple[Address, ...]
    index: bool
    refresh: Count
    forget: Count


class Policy(_Strict, frozen=True):
    """The reviewed file."""

    user: Name
    folders: Folders
    software: Software
    always: tuple[Label, ...]
    labels: tuple[Capability, ...]
    events: tuple[str, ...]
    refs: tuple[str, ...]
    public: Literal["refuse", "approved"]
    room: Room
    limits: Limits
    registration: Seconds
    egress: Egress

    def all_labels(self) -> tuple[str, ...]:
        """Return every label that any runner of ours may carry."""
        return (*self.always, *MACHINE_LABELS.values(), *(one.name for one in self.labels))


class Settings(_Strict, frozen=True):
    """
    What one machine was set up with.

    Attributes:
        name: The machine's, by which people find its runner.
        labels: Of the policy; empty for all that are true of the machine.
        index: Host of the package index, where the policy lets jobs reach one; as whoever set the machine up had it configured.
        api: GitHub's address.
    """

    repository: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9-]*/(?!\.{1,2}\Z)[A-Za-z0-9._-]{1,100}\Z")]
    name: Host
    labels: tuple[Label, ...] = ()
    index: Host | None = None
    api: Annotated[str, msgspec.Meta(pattern=API)] = "https://api.github.com"


#: GitHub's names of kinds of processor.
MACHINE_LABELS = {"aarch64": "ARM64", "x86_64": "X64"}
POLICY, SETTINGS = "runner.yaml", "machine.yaml"


def load(path: Path) -> Policy:
    """
    Return the policy at *path*.

    Raises:
        file-invalid: It does not read, or contradicts itself: a folder in another, a floor above a start.
    """
    policy = strict_yaml.load(path, Policy)
    if wrong := _wrong(policy):
        raise FileError("file-invalid", f"{path} contradicts itself.", details=[wrong])
    return policy


def _wrong(policy: Policy) -> str:
    room, folders = policy.room, policy.folders
    if room.work_start <= room.work_floor or room.memory_start <= room.memory_floor:
        return "room: a job would begin below the floor that ends it"
    if room.work <= room.work_start:
        return "room: the work folder is never as empty as work_start asks for"
    if any(_inside(folders.work, one) or _inside(one, folders.work) for one in (folders.models, folders.program, folders.runner)):
        return "folders: the work folder is emptied after each job, so nothing else may lie in it"
    try:
        for text in (*policy.egress.networks, *policy.egress.resolvers):
            ipaddress.ip_network(text)
    except ValueError as error:
        return f"egress: {error}"
    if len({one.name.lower() for one in policy.labels}) != len(policy.labels):
        return "labels: one appears twice"
    return ""


def _inside(inner: str, outer: str) -> bool:
    return inner == outer or inner.startswith(f"{outer}/")


def settings(path: Path) -> Settings:
    """Return what the machine was set up with; raise `file-invalid` if the file does not read."""
    return strict_yaml.load(path, Settings)


def allowed(ref: str, patterns: tuple[str, ...]) -> bool:
    """Is the branch or tag *ref* one of *patterns*?"""
    return bool(re.fullmatch(r"refs/[^\s\x00-\x1f]{1,250}", ref)) and any(fnmatchcase(ref, one) for one in patterns)
