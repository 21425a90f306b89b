"""What one run works with: the reviewed data, the store, and the choices made on the command line."""

from __future__ import annotations

import dataclasses
import os
import platform
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Literal

import msgspec

from sparkwright.core import strict_yaml
from sparkwright.core.errors import UsageError
from sparkwright.core.git_store import Objects
from sparkwright.core.store import Store
from sparkwright.forks import lock
from sparkwright.forks.mirror import Mirror, mirrored
from sparkwright.forks.stack import Project, SourceKind


@dataclasses.dataclass(frozen=True)
class Outside:
    """
    A run that needs no checkout: the store, whether the network may be asked, and where URLs are reached (see `Session`).

    Attributes:
        state: Where the machine remembers what it has seen of indexes; None for the user's own place (`release.manifest.seen`).
    """

    store: Store
    offline: bool = False
    mirrors: Mapping[str, str] = dataclasses.field(default_factory=dict)
    state: Path | None = None

    def mirrored(self, url: str) -> str:
        """Return where *url* is reached."""
        return mirrored(self.mirrors, url)


@dataclasses.dataclass(frozen=True)
class Session:
    """
    A run.

    Attributes:
        source: Which kind of source to take; ``auto`` decides by what is locked and reachable.
        offline: Never ask the network.
        mirrors: Replacement of a URL's beginning, longest first (DESIGN §4).
        forks: The forks to work on, in the order of the stack.
        jobs: Units compiled at once; 0 means one per core.
        memory: Bytes that compilers may hold together; 0 means most of what is available.
        without: Names of arch rules to leave out, to see what they do.
        targets: CMake targets to compile in place of those of the stack; ``all`` stands for every one.
        output: Where finished wheels go.
        target: The machine that wheels are made for; empty for this one.
        cached: Take units from the compiler cache, where there is one; a rebuild that is to prove something compiles them.
        unit_timeout: Seconds after which a compiler that uses no CPU hangs; 0 for the default.
        silent: Hosts that did not answer in this run, so that nobody waits for them twice.
    """

    project: Project
    store: Store
    forks: tuple[str, ...]
    output: Path
    source: Literal["auto"] | SourceKind = "auto"
    offline: bool = False
    mirrors: Mapping[str, str] = dataclasses.field(default_factory=dict)
    jobs: int = 0
    memory: int = 0
    without: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    target: str = ""
    cached: bool = True
    unit_timeout: float = 0
    silent: set[str] = dataclasses.field(default_factory=set, compare=False)

    @cached_property
    def objects(self) -> Objects:
        """The object database of the store, which borrows from its mirrors."""
        objects = Objects(self.store.root / "objects.git")
        objects.borrow((self.store.root / "mirrors").glob("*.git"))
        return objects

    def mirror(self, url: str) -> Mirror:
        """Return the mirror of the upstream repository *url*."""
        return Mirror(self.store, self.objects, url, self.mirrored(url), offline=self.offline)

    @cached_property
    def lock(self) -> lock.Lock:
        """The lock of the stack."""
        return lock.read(self.project)

    @property
    def machine(self) -> str:
        """The machine that wheels are built for: ``x86_64`` or ``aarch64``, as Python names it."""
        return self.target or platform.machine()

    @property
    def cross(self) -> bool:
        """Is that another machine than this one?"""
        return self.machine != platform.machine()

    def named(self, name: str) -> str:
        """Return *name* of a record or folder, with the machine where that is another than this one: the two must not be mixed."""
        return f"{name}-{self.machine}" if self.cross else name

    def mirrored(self, url: str) -> str:
        """Return where *url* is reached (`mirror.mirrored`)."""
        return mirrored(self.mirrors, url)


class CompilerCache(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    Where compiled units are kept beside the build folder.

    Attributes:
        tool: ``auto`` takes ccache where it is installed, ``ccache`` fails without it.
        remote: Address of a cache that machines share (``redis://…``, ``http://…``), without secrets.
        size: The most that the local cache may hold, as ccache spells it.
    """

    tool: Literal["auto", "ccache", "none"] = "auto"
    remote: str = ""
    size: str = "10G"


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the user's own file says: ``config.yaml`` in the platform's place for it, or where ``SPARKWRIGHT_CONFIG`` points."""

    mirrors: dict[str, str] = {}
    compiler_cache: CompilerCache = CompilerCache()
    #: The index that `install` takes releases from.
    releases: str = ""


def config() -> Config:
    """
    Return the user's configuration; nothing is configured where there is no file.

    Raises:
        file-invalid: It is damaged, or was named and is not there.
    """
    named = os.environ.get("SPARKWRIGHT_CONFIG")
    if named:
        return strict_yaml.load(Path(named), Config)
    import platformdirs

    path = Path(platformdirs.user_config_dir("sparkwright", appauthor=False)) / "config.yaml"
    return strict_yaml.load(path, Config) if path.is_file() else Config()


def mirror_map(values: list[str]) -> dict[str, str]:
    """
    Return the mirror map: that of the user's file, and of the ``--mirror URL=REPLACEMENT`` options, which win over it.

    Raises:
        UsageError: An option has no ``=`` or an empty side.
        file-invalid: The user's file cannot be read.
    """
    pairs = [value.partition("=") for value in values]
    for value, (url, _, replacement) in zip(values, pairs, strict=True):
        if not url or not replacement:
            raise UsageError("usage", f"--mirror {value!r} is not of the form URL=REPLACEMENT.")
    return {**config().mirrors, **{url: replacement for url, _, replacement in pairs}}
