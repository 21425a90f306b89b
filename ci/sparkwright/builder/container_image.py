"""
The builder image: a base that is pinned by digest, the system packages that it lacks, and this very program.

It is made in two steps, because which files of the package index the second one needs depends on the Python that the first one gives.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import tarfile
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import msgspec

from sparkwright.builder import container, self_wheel
from sparkwright.builder.container_engine import Engine
from sparkwright.builder.environment import toolchain
from sparkwright.builder.errors import ContainerError
from sparkwright.builder.self_wheel import Interpreter
from sparkwright.core import digest
from sparkwright.core.console import console
from sparkwright.core.errors import FileError
from sparkwright.forks.context import Session
from sparkwright.forks.errors import SourceError

#: ``name@sha256:…`` as registries know an image, or the id by which the engine does.
PINNED = re.compile(r"(?:[^@\s]+@)?sha256:[0-9a-f]{64}")
#: Label of our images: the address of what they were made from.
LABEL = "sparkwright.image"
#: Where the program lies in the image (build/builder.Dockerfile).
PROGRAM = "/usr/local/lib/sparkwright/bin/python"

_PROXIES = ("http_proxy", "https_proxy", "ftp_proxy", "no_proxy")
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


class Builder(msgspec.Struct, frozen=True):
    """
    A builder image.

    Attributes:
        base: Digest or id that names its base.
        platform: ``linux/amd64`` or ``linux/arm64``.
        system: Id of the image without the program: compilers and Python.
        image: Id of the whole image.
    """

    base: str
    platform: str
    system: str
    image: str
    python: Interpreter


def pinned(session: Session, named: str) -> str:
    """
    Return the base image: *named*, else the one of ``environment.yaml``.

    Raises:
        base-unresolved: It is named by a tag, not by its digest, or not at all.
    """
    base = named or toolchain.spec(session.project).image
    if not PINNED.fullmatch(base):
        origin = "--base" if named else f"build/{session.project.stack}/environment.yaml"
        raise ContainerError(
            "base-unresolved", f"{origin} names {f'the base image {base!r}, which is no digest' if base else 'no base image'}."
        )
    return base


def obtain(session: Session, engine: Engine, base: str, wanted: str) -> Builder:
    """
    Return the builder image on *base*, made when the engine has none.

    Args:
        wanted: The platform; empty for the engine's own.

    Raises:
        offline, source-unreachable, image-mismatch, emulation-missing, image-build-failed, disk-full, engine-unreachable: See there.
    """
    target, text = wanted or engine.platform, recipe(session, "builder.Dockerfile")
    with engine.answering(), console.step(f"builder image for {target}"):
        found = bring(session, engine, base, target)
        # By its id, which a second tag on the same image does not change.
        key = digest.key("image", {"base": found, "dockerfile": digest.sha256_bytes(text), "platform": target})
        system = make(session, engine, "system", key, {"BASE": base}, target, {"Dockerfile": text})
        python = python_of(session, engine, system)
        if _ARCHITECTURES.get(python.machine) != target.rpartition("/")[2]:
            raise ContainerError("image-mismatch", f"{base} says that it is for {target}, but its programs are for {python.machine}.")
        with tempfile.TemporaryDirectory() as folder:
            ours = self_wheel.wheel(Path(folder))
            wheels = {f"wheels/{path.name}": path.read_bytes() for path in (ours, *self_wheel.required(session, python))}
        key = digest.key("image", {"system": system, "files": {name: digest.sha256_bytes(data) for name, data in wheels.items()}})
        image = make(session, engine, "builder", key, {"BASE": base}, target, {"Dockerfile": text, **wheels})
    return Builder(base, target, system, image, python)


def recipe(session: Session, name: str) -> bytes:
    """Return the file *name* of ``build/``; raise `file-invalid` where it cannot be read."""
    path = session.project.root / "build" / name
    try:
        return path.read_bytes()
    except OSError as error:
        raise FileError("file-invalid", f"{path} cannot be read.", details=[str(error)]) from error


def bring(session: Session, engine: Engine, base: str, target: str) -> str:
    """Return the id of the base image, pulled when the engine has none for that platform, and able to run."""
    image = known(engine, base)
    if image is None or image.platform != target:
        if base.startswith("sha256:"):
            if image is None:
                raise ContainerError(
                    "base-unresolved", f"The engine has no image {base}.", todo="See `docker image ls --no-trunc` for what it has."
                )
        else:
            _pull(session, engine, base, target)
            image = known(engine, base)
    if image is None or image.platform != target:
        raise ContainerError("image-mismatch", f"{base} is for {image.platform if image else 'another platform'}, not for {target}.")
    if target != engine.platform:
        said: list[str] = []
        # Without an init, which would be this machine's own program and start. Engines report the kernel's refusal in either way:
        # as an error of theirs, or as words of a program that ended.
        ended = container.run(engine, image.id, ["/bin/sh", "-c", "exit 0"], init=False, on_out=said.append, on_err=said.append)
        if ended.status:
            raise engine.meaning(
                "\n".join([*said, f"status: {ended.status}"]),
                partial(ContainerError, "image-mismatch"),
                f"The shell of {base} does not run.",
            )
    return image.id


class Image(msgspec.Struct, frozen=True):
    """An image that the engine has: its id, and what it is for (``linux/arm64``)."""

    id: str
    platform: str


def known(engine: Engine, name: str) -> Image | None:
    """Return the image of that name, digest or id; None where the engine has none."""
    from docker.errors import ImageNotFound

    try:
        found = engine.client.images.get(name)
    except ImageNotFound:
        return None
    return Image(str(found.id), f"{found.attrs['Os']}/{found.attrs['Architecture']}")


def _pull(session: Session, engine: Engine, base: str, target: str) -> None:
    from docker.errors import APIError

    if session.offline:
        raise SourceError(
            "offline", f"The engine does not have {base}.", todo="Run once with a connection, or load the image with `docker load`."
        )
    sizes: dict[str, tuple[int, int]] = {}
    name, _, digested = base.partition("@")
    try:
        with console.step(f"pull {base}"), console.progress("layers", 0, "bytes") as line:
            for news in engine.client.api.pull(name, tag=digested, platform=target, stream=True, decode=True):
                if "error" in news:
                    raise SourceError("source-unreachable", f"{base} cannot be pulled.", details=[str(news["error"])])
                if total := (detail := news.get("progressDetail") or {}).get("total"):
                    sizes[news.get("id", "")] = (detail.get("current", 0), total)
                line.total = sum(total for _, total in sizes.values())
                line.update(sum(done for done, _ in sizes.values()))
    except APIError as error:
        raise SourceError("source-unreachable", f"{base} cannot be pulled.", details=[str(error.explanation or error)]) from error


def make(
    session: Session, engine: Engine, stage: str, key: str, arguments: Mapping[str, str], target: str, files: Mapping[str, bytes],
    labels: Mapping[str, str] | None = None,
) -> str:  # fmt: skip
    """
    Return the id of the image of *stage* with that key, built when the engine has none.

    Args:
        arguments: The ``ARG`` s of the Dockerfile. *target*: the platform. *files*: the context, ``Dockerfile`` among them.
        labels: Further ones of the image; who changes them changes the key.

    Raises:
        image-build-failed, disk-full, emulation-missing, engine-refused: See there.
    """
    tag = f"sparkwright-{stage}:{key[:16]}"
    if found := known(engine, tag):
        return found.id
    log = session.store.folder("logs") / f"image-{stage}.log"
    said: list[str] = []
    with console.step(f"build the image {tag}"), log.open("w", encoding="utf-8") as sink, console.progress("steps", 0) as line:
        heard = engine.client.api.build(
            fileobj=io.BytesIO(_context(files)), custom_context=True, encoding=None, tag=tag, target=stage, platform=target,
            buildargs={**arguments, **_proxies()}, labels={**(labels or {}), LABEL: key}, rm=True, forcerm=True, decode=True,
            # What this machine reaches (a package mirror on a loopback address, too), or nothing at all.
            network_mode="none" if session.offline else "host",
        )  # fmt: skip
        # Closing the connection is how an engine learns that nobody waits for the image any more.
        with contextlib.closing(heard):
            for news in heard:
                if "error" in news:
                    said.append(str(news["error"]))
                    raise engine.meaning(
                        "\n".join([*said, f"full log: {log}"]),
                        partial(ContainerError, "image-build-failed"),
                        f"The image {stage} cannot be built.",
                    )
                text = str(news.get("stream", ""))
                sink.write(text)
                said = [*said[-40:], *(row for row in text.splitlines() if row.strip())]
                line.update(len(said), said[-1][-80:] if said else "")
    built = known(engine, tag)
    if built is None:
        raise ContainerError("image-build-failed", f"The image {stage} cannot be built.", details=[*said[-25:], f"full log: {log}"])
    return built.id


def _proxies() -> dict[str, str]:
    """Return the caller's proxies, which the engine hands to build steps and leaves out of the image."""
    return {name: os.environ[name] for lower in _PROXIES for name in (lower, lower.upper()) if name in os.environ}


def _context(files: Mapping[str, bytes]) -> bytes:
    """Return *files* as a tar with fixed times, so that the engine knows equal files again."""
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as archive:
        for name, data in sorted(files.items()):
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(data), 0o755 if data.startswith(b"#!") else 0o644
            archive.addfile(info, io.BytesIO(data))
    return sink.getvalue()


def python_of(session: Session, engine: Engine, system: str) -> Interpreter:
    """Return what the Python of the image *system* is."""
    key = digest.key("interpreter", system)
    if known := session.store.get("interpreter", key, Interpreter):
        return known
    said: list[str] = []
    ended = container.run(engine, system, ["python3", "-c", Interpreter.SCRIPT], on_out=said.append, on_err=said.append)
    if ended.status:
        raise ContainerError("image-build-failed", "The Python of the image does not run.", details=said[-10:])
    found = msgspec.json.decode("".join(said), type=Interpreter)
    session.store.put("interpreter", key, found)
    return found
