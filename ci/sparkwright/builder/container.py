"""
The container engine: its images, and one way to run a program in them.

A container has no network and no rights unless its options say otherwise, and is removed when it
ends.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import docker
import msgspec
import requests
import urllib3
from docker.models.images import Image

from sparkwright.builder import pylock, toolchain
from sparkwright.builder.pylock import Interpreter
from sparkwright.builder.wheel import source_wheel
from sparkwright.core.console import console
from sparkwright.core.errors import Advice, Failure, SparkwrightError, StoreError
from sparkwright.core.files import content_key, sha256_bytes
from sparkwright.core.words import ENGINE_FULL, FORMAT_UNKNOWN
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import SourceError

#: Prints the fields of an `Interpreter` as JSON, with nothing but the standard library.
_DESCRIBE = (
    "import json, platform; "
    "print(json.dumps({'version': platform.python_version(), 'machine': platform.machine(), "
    "'libc': platform.libc_ver()[1]}))"
)
#: Options of the SDK for a container.
_OPTIONS: Mapping[str, Any] = {
    "network_mode": "none",
    "cap_drop": ["ALL"],
    "security_opt": ["no-new-privileges:true"],
    "read_only": True,
    "tmpfs": {"/tmp": "rw,exec,nosuid,nodev,mode=1777"},  # noqa: S108  the container's own
    "pids_limit": 4096,
}
#: Label of an image: the key of its inputs.
IMAGE_LABEL = "sparkwright.image"
#: ``name@sha256:…`` as registries know an image, or the id by which the engine does.
PINNED = re.compile(r"(?:[^@\s]+@)?sha256:[0-9a-f]{64}")


class ContainerError(SparkwrightError):
    """The container engine or an image failed."""

    references: ClassVar[Mapping[str, Advice]] = {
        "base-unresolved": Advice(
            "The base image is not named by its digest, and a tag can name another image tomorrow.",
            "Give the digest with --base NAME@sha256:…, or the id of a local image (docker "
            "image ls --no-trunc), or set `image` in build/<stack>/environment.yaml.",
        ),
        "container-killed": Advice(
            "The container ended without a message from its program: it exceeded its memory "
            "limit, or somebody removed it.",
            "Run again with a larger --memory or fewer --jobs; finished objects are kept.",
        ),
        "emulation-missing": Advice(
            "The image holds programs of another architecture, and this machine has nothing that "
            "runs them.",
            "Install the emulator: sudo apt-get install qemu-user-static binfmt-support; or work "
            "on a machine of that architecture.",
        ),
        "engine-forbidden": Advice(
            "The container engine's socket belongs to another user or group; whoever may open it "
            "has the rights of root.",
            "Join its group (sudo usermod -aG docker $USER, then log in again), or set up a "
            "rootless engine (dockerd-rootless-setuptool.sh).",
        ),
        "engine-missing": Advice(
            "No container engine is installed on this machine, or it is not running.",
            "Install one (sudo apt-get install docker.io) or start it (sudo systemctl start "
            "docker).",
        ),
        "engine-refused": Advice(
            "The container engine reported an error; its message is above.",
            "Read the message; the engine's log says more (journalctl -u docker).",
        ),
        "engine-unreachable": Advice(
            "The container engine's socket is there, but the engine behind it was stopped, "
            "hangs, or ended during the work.",
            "Start it again (sudo systemctl restart docker) and read its log (journalctl -u "
            "docker). What is finished is kept.",
        ),
        "image-build-failed": Advice(
            "The base has no package that the image needs and could not install it, or its "
            "Python is older than 3.11.",
            "Read the last lines above. With --offline the base must have everything that "
            "build/serve.Dockerfile lists.",
        ),
        "image-mismatch": Advice(
            "The digest names an image of one architecture, and the image was asked for in "
            "another.",
            "Name an image of that architecture with --base, or change --platform.",
        ),
    }


# The engine.


@contextlib.contextmanager
def connected() -> Iterator[docker.DockerClient]:
    """
    Yield the connected engine.

    Raises:
        engine-missing, engine-forbidden, engine-unreachable: As `connect`.
        engine-unreachable: The connection broke.
        disk-full, engine-refused: The engine answered with an error.
    """
    try:
        yield connect()
    except docker.errors.APIError as error:
        raise translate_error(str(error.explanation or error)) from error
    except (
        requests.RequestException,
        urllib3.exceptions.HTTPError,
        docker.errors.DockerException,
        ConnectionResetError,
    ) as error:
        raise ContainerError(
            "engine-unreachable", "The container engine stopped answering.", details=[str(error)]
        ) from error


def connect() -> docker.DockerClient:
    """
    Connect to the engine that ``DOCKER_HOST`` names, else the system's. Folders of this machine are
    mounted, so its address is a socket in the file system.

    Raises:
        engine-missing: No engine listens.
        engine-forbidden: The user may not open its socket.
        engine-unreachable: It does not answer, or is on another machine.
    """
    address = os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"
    if not address.startswith("unix://"):
        raise ContainerError(
            "engine-unreachable",
            f"DOCKER_HOST names an engine that is not on this machine: {address}.",
            todo="Unset it, or name a socket (unix:///var/run/docker.sock): builds mount folders.",
        )
    causes: dict[type[Exception], str] = {
        FileNotFoundError: "engine-missing",
        PermissionError: "engine-forbidden",
    }
    try:
        # The SDK keeps of the operating system's error the text alone.
        with socket.socket(socket.AF_UNIX) as probe:
            probe.connect(address.removeprefix("unix://"))
        # A minute for one answer of the engine; builds and waits have no limit.
        return docker.DockerClient(base_url=address, version="auto", timeout=60)
    except (OSError, docker.errors.DockerException) as error:
        raise ContainerError(
            causes.get(type(error), "engine-unreachable"),
            f"There is no container engine to use at {address}.",
            details=[str(error)],
        ) from error


def translate_error(
    text: str,
    otherwise: Failure = partial(ContainerError, "engine-refused"),
    what: str = "The container engine refused.",
    *,
    foreign: bool = False,
) -> SparkwrightError:
    """
    Return the error for the engine's message *text*; unless common, `otherwise(what)`.

    Args:
        foreign: The message is about an image of another architecture than the engine's.
    """
    lines = text.strip().splitlines()[-25:]
    if ENGINE_FULL.search(text):
        return StoreError(
            "disk-full",
            "The container engine has no room left on its disk.",
            details=lines[-3:],
            todo="Make room: see docker system df, then docker system prune.",
        )
    if foreign and FORMAT_UNKNOWN.search(text):
        return ContainerError(
            "emulation-missing",
            "This machine cannot run the programs of the image.",
            details=lines[-3:],
        )
    return otherwise(what, details=lines)


# Containers.


def run(
    engine: docker.DockerClient,
    image: str,
    command: Sequence[str],
    *,
    commit: str = "",
    **options: Any,
) -> tuple[int, str, str]:
    """
    Run *command* in a container of *image* until it ends; return its exit status, standard output
    and standard error.

    Args:
        commit: The name of the image that the container becomes if the status is 0.
        options: Options of the SDK in addition to `_OPTIONS`, or in place of them.

    Raises:
        container-killed: A signal ended it.
        docker.errors.DockerException: The engine failed; `connected` translates it.
    """
    child = engine.containers.create(image, list(command), **{**_OPTIONS, **options})
    try:
        child.start()
        status = int(child.wait(timeout=None)["StatusCode"])
        child.reload()
        if status > 130:
            raise ContainerError(
                "container-killed",
                "The program in the container was killed.",
                details=[
                    f"status: {status}",
                    f"killed for lack of memory: {child.attrs['State'].get('OOMKilled')}",
                ],
            )
        if commit and status == 0:
            with console.step("write the layer"):
                child.commit(*commit.split(":"), changes=[f"LABEL {IMAGE_LABEL}={commit}"])
        output = child.logs(stdout=True, stderr=False).decode("utf-8", "replace")
        messages = child.logs(stdout=False, stderr=True).decode("utf-8", "replace")
        return status, output, messages
    finally:
        with contextlib.suppress(docker.errors.APIError):
            child.remove(force=True)


# Images.


def find_image(engine: docker.DockerClient, name: str) -> Image | None:
    """Return the image of that name, digest or id; None if the engine has none."""
    try:
        return engine.images.get(name)
    except docker.errors.ImageNotFound:
        return None


def build_image(
    context: RunContext,
    engine: docker.DockerClient,
    stage: str,
    key: str,
    arguments: Mapping[str, str],
    target: str,
    files: Mapping[str, bytes],
    labels: Mapping[str, str] | None = None,
) -> str:
    """
    Return the id of the image of *stage* with that key, built when the engine has none.

    Args:
        files: The context, ``Dockerfile`` among them.
        labels: Further labels of the image; *key* must depend on them.

    Raises:
        image-build-failed: A step of the Dockerfile failed.
        disk-full, emulation-missing, engine-refused: See `translate_error`.
    """
    tag = f"sparkwright-{stage}:{key[:16]}"
    if image := find_image(engine, tag):
        return str(image.id)
    with console.step(f"build the image {tag}"), tempfile.TemporaryDirectory() as folder:
        for name, data in files.items():
            path = Path(folder, name)
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(data)
            path.chmod(0o755 if data.startswith(b"#!") else 0o644)
        try:
            image, _ = engine.images.build(
                path=folder,
                tag=tag,
                target=stage,
                platform=target,
                # The engine gives the caller's proxies to build steps and leaves them out of the
                # image.
                buildargs={
                    **arguments,
                    **{
                        variable: text
                        for variable, text in os.environ.items()
                        if variable.lower().endswith("_proxy")
                    },
                },
                labels={**(labels or {}), IMAGE_LABEL: key},
                rm=True,
                forcerm=True,
                # All that this machine reaches (a package mirror on a loopback address, too), or
                # nothing.
                network_mode="none" if context.offline else "host",
            )
        except docker.errors.BuildError as error:
            text = "".join(str(event.get("stream") or "") for event in error.build_log)
            log = context.store.write(f"logs/image-{stage}.log", text.encode())
            raise translate_error(
                f"{text}\n{error}\nfull log: {log}",
                partial(ContainerError, "image-build-failed"),
                f"The image {stage} cannot be built.",
                foreign=target.rpartition("/")[2] != engine.version()["Arch"],
            ) from error
    return str(image.id)


# The base of an image.


def pinned_base(context: RunContext, name: str) -> str:
    """
    Return the base image *name*, by default the one of ``environment.yaml``.

    Raises:
        base-unresolved: The name is a tag, not a digest, or there is none.
    """
    base = name or toolchain.spec(context.project).image
    if not PINNED.fullmatch(base):
        raise ContainerError("base-unresolved", f"The base image {base!r} is named by no digest.")
    return base


def system_image(
    context: RunContext,
    engine: docker.DockerClient,
    base: str,
    target: str,
    stage: str,
    files: Mapping[str, bytes],
) -> tuple[str, Interpreter]:
    """
    Return the id of the image of *stage*, which has the system packages, and its Python.

    Args:
        target: The platform of the image. *files*: the context, ``Dockerfile`` among them.

    Raises:
        offline: The engine does not have the base, and the run is offline.
        emulation-missing, image-build-failed, disk-full: As `build_image`.
    """
    if context.offline and not find_image(engine, base):
        raise SourceError(
            "offline",
            f"The engine does not have {base}.",
            todo="Run once with a connection, or load the image with `docker load`.",
        )
    key = content_key(
        "image",
        {
            "base": base,
            "dockerfile": sha256_bytes(files["Dockerfile"]),
            "platform": target,
        },
    )
    system = build_image(context, engine, stage, key, {"BASE": base}, target, files)
    status, output, messages = run(engine, system, ["python3", "-c", _DESCRIBE])
    if status:
        raise ContainerError(
            "image-build-failed",
            "The Python of the image does not run.",
            details=messages.splitlines()[-10:],
        )
    return system, msgspec.json.decode(output, type=Interpreter)


def program_wheels(
    context: RunContext, python: Interpreter, folder: Path, *, extra: str
) -> list[Path]:
    """
    Return this program as a wheel in *folder*, and the wheels that it requires on *python*.

    Args:
        extra: Its optional requirements that become unconditional.

    Raises:
        offline, source-unreachable, source-mismatch, disk-full: As `pylock.required`.
    """
    return [
        source_wheel.write_program(folder, extra=extra),
        *pylock.required(context, python, source_wheel.stated_requirements(extra)),
    ]
