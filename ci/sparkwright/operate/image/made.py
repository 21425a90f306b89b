"""
``image``: from an index and a pinned base to an image that serves, in three stages that are each kept by the key of their inputs.

``serve-system`` (base and system packages) → the set, installed → ``serve`` (entrypoint, user, labels).
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from docker import DockerClient

from sparkwright.builder import container
from sparkwright.builder.container import ContainerError
from sparkwright.builder.pylock import Interpreter
from sparkwright.core.console import console
from sparkwright.core.files import content_key, read_bytes, sha256_bytes
from sparkwright.forks.context import RunContext
from sparkwright.operate.image import installed, picked, selected
from sparkwright.operate.image.labels import SERIAL, labels
from sparkwright.operate.image.picked import PLATFORMS, Picked
from sparkwright.release.client import files
from sparkwright.release.client.install import Wish

DOCKERFILE, ENTRYPOINT = "serve.Dockerfile", "entrypoint.sh"


class Asked(msgspec.Struct, frozen=True):
    """What is asked for: a release, the platform of the image, and its base (empty: that of ``environment.yaml``)."""

    wish: Wish
    platform: str = "linux/arm64"
    base: str = ""


class Made(msgspec.Struct, frozen=True):
    """
    A serving image.

    Attributes:
        id: As the engine knows it; *name*: its own tag there. *already*: it was there, and nothing was built.
        base: Name and digest, or id, of its base. *labels*: what it says of itself.
    """

    id: str
    name: str
    platform: str
    base: str
    already: bool
    labels: Mapping[str, str]


class _Stages(msgspec.Struct, frozen=True):
    """The recipe's two files, and the key of the first stage; the keys of the others follow from it."""

    dockerfile: bytes
    entrypoint: bytes
    platform: str
    system: str

    def set_key(self, found: Picked, program: Mapping[str, str]) -> str:
        facts = {"system": self.system, "release": found.entry.release, "program": program, "script": installed.SCRIPT}
        return content_key("serve-set", facts)

    def key(self, set_key: str, labelled: Mapping[str, str]) -> str:
        # The index's serial grows with every other release, and changes nothing of this one.
        said = {name: value for name, value in labelled.items() if name != SERIAL}
        return content_key("serve", {"set": set_key, "entrypoint": sha256_bytes(self.entrypoint), "labels": said})


def make(context: RunContext, asked: Asked, found: Picked, base: str) -> Made:
    """
    Return the image of the release *found* on *base*, built where the engine has none.

    Raises:
        engine-missing, engine-forbidden, engine-unreachable, image-mismatch, emulation-missing, image-build-failed, disk-full,
        installer-unfit,
        offline, source-unreachable, download-invalid, environment-unusable, set-mixed: See there.
    """
    with container.connected() as reached, console.step(f"serving image of {found.entry.name} for {asked.platform}"):
        return _make(context, reached, asked.platform, found, base)


def _make(context: RunContext, reached: DockerClient, platform: str, found: Picked, base: str) -> Made:
    brought = container.prepare_base(context, reached, base, platform)
    stages = _stages(context, brought, platform)
    files_of = {"Dockerfile": stages.dockerfile, ENTRYPOINT: stages.entrypoint}
    system = container.build_image(context, reached, "serve-system", stages.system, {"BASE": base}, platform, files_of)
    python = container.image_python(reached, system)
    if python.machine != PLATFORMS[platform]:
        raise ContainerError("image-mismatch", f"{base} says that it is for {platform}, but its programs are for {python.machine}.")
    program = selected.installer(context, found, python)
    set_key = stages.set_key(found, selected.addresses(program))
    labelled = labels(found, base)
    key = stages.key(set_key, labelled)
    name = f"sparkwright-serve:{key[:16]}"
    already = container.find_image(reached, name)
    if already is None:
        _bring_set(context, reached, set_key, found, python)
        held = installed.obtain(context, reached, system, set_key, found, program)
        container.build_image(context, reached, "serve", key, {"BASE": base, "SET": held}, platform, files_of, labelled)
    return _read(reached, name, platform, base, already=already is not None)


def _stages(context: RunContext, base: str, platform: str) -> _Stages:
    text, entrypoint = (read_bytes(context.project.root / "build" / name) for name in (DOCKERFILE, ENTRYPOINT))
    key = content_key("image", {"base": base, "dockerfile": sha256_bytes(text), "platform": platform})
    return _Stages(text, entrypoint, platform, key)


def _bring_set(context: RunContext, reached: DockerClient, set_key: str, found: Picked, python: Interpreter) -> None:
    """Bring the files of the set into the store, where the engine does not have them installed."""
    if container.find_image(reached, f"{installed.REPOSITORY}:{set_key[:16]}") is None:
        packages = selected.packages(found, python, installed.VENV).packages
        selected.check_room(context, reached, packages)
        files.obtain(picked.outside(context), packages)


def _read(reached: DockerClient, name: str, platform: str, base: str, *, already: bool) -> Made:
    """Return the image as the engine has it; an earlier run may have labelled it with an earlier serial."""
    there = reached.images.get(name)
    return Made(str(there.id), name, platform, base, already, dict(sorted(there.labels.items())))
