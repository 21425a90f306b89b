"""
Images and containers of the container engine: build an image, run one program in it.

A container has no network and no rights, runs as the caller's user, and is removed when the run
that started it ends. It carries the identity of its owner process, so that the next run removes the
containers of killed runs. The builder image is a base that is pinned by digest, the system packages
that it lacks, and this program.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import secrets
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from sparkwright.builder import self_wheel
from sparkwright.builder.container_engine import Engine, defer_signals
from sparkwright.builder.environment import toolchain
from sparkwright.builder.environment.sandbox import VARIABLE
from sparkwright.builder.errors import ContainerError
from sparkwright.builder.self_wheel import Interpreter
from sparkwright.core import digest
from sparkwright.core.console import console
from sparkwright.core.errors import FileError
from sparkwright.forks.context import RunContext
from sparkwright.forks.errors import SourceError

if TYPE_CHECKING:
    from docker.models.containers import Container

#: Labels of a container: the id of its run, and the identity of the process that owns it.
LABEL, OWNER = "sparkwright", "sparkwright.owner"
#: Label of an image: the key of what it was made from.
IMAGE_LABEL = "sparkwright.image"
#: Processes and threads of a build; ninja starts a few per core, and a build that starts thousands
#: does so by mistake.
PROCESSES = 4096
#: Seconds that an interrupted program has to end by itself, and so to keep what it learned.
GRACE = 10
#: ``name@sha256:…`` as registries know an image, or the id by which the engine does.
PINNED = re.compile(r"(?:[^@\s]+@)?sha256:[0-9a-f]{64}")
#: Path of the program in the builder image (build/builder.Dockerfile).
PROGRAM = "/usr/local/lib/sparkwright/bin/python"

_PROXIES = ("http_proxy", "https_proxy", "ftp_proxy", "no_proxy")
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


class BindMount(msgspec.Struct, frozen=True):
    """A folder of this machine, mounted at *target*; read-only unless *writable*."""

    source: Path
    target: Path
    writable: bool = False


class ExitStatus(msgspec.Struct, frozen=True):
    """
    Exit status of a program, and whether the kernel killed a process of its container for want of
    memory.
    """

    status: int
    out_of_memory: bool


class Image(msgspec.Struct, frozen=True):
    """An image that the engine has: its id, and its platform (``linux/arm64``)."""

    id: str
    platform: str


class BuilderImage(msgspec.Struct, frozen=True):
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


def owner_id() -> str:
    """
    Return the unique identity of this process: boot, process namespace, process id and start time.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    return (
        f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}/{os.getpid()}/{_start_time(os.getpid())}"
    )


def has_exited(owner: str) -> bool:
    """Return True only if the process *owner* (`owner_id`) has certainly exited."""
    boot, namespace, number, started = [*owner.split("/"), "", "", ""][:4]
    current_boot, current_namespace, *_ = owner_id().split("/")
    if boot != current_boot:
        return True
    if namespace != current_namespace or not number.isdigit():
        return False
    try:
        os.kill(int(number), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return _start_time(int(number)) not in ("", started)


def _start_time(process: int) -> str:
    """
    Return the start of *process* in clock ticks after boot (proc_pid_stat(5), field 22); empty if
    unreadable.
    """
    try:
        return (
            Path(f"/proc/{process}/stat")
            .read_text("ascii", "replace")
            .rpartition(")")[2]
            .split()[19]
        )
    except OSError:
        return ""


def remove_stale(engine: Engine) -> list[str]:
    """Remove the containers whose owners have exited, and return their names."""
    from docker.errors import APIError

    removed = []
    with engine.errors_translated():
        for container in engine.client.containers.list(
            all=True, filters={"label": OWNER}, ignore_removed=True
        ):
            if has_exited(container.labels.get(OWNER, "")):
                # Another run may be removing it at this moment.
                with contextlib.suppress(APIError):
                    container.remove(force=True)
                removed.append(str(container.name))
    if removed:
        console.note(f"removed the container of a run that was killed: {', '.join(removed)}")
    return removed


def run(
    engine: Engine,
    image: str,
    command: Sequence[str],
    *,
    folders: Iterable[BindMount] = (),
    variables: Mapping[str, str] | None = None,
    memory: int = 0,
    init: bool = True,
    further: Mapping[str, Any] | None = None,
    after: Callable[[Container, int], None] | None = None,
    on_out: Callable[[str], None] = console.result,
    on_err: Callable[[str], None] = console.note,
) -> ExitStatus:
    """
    Run *command* in a container of *image* until it ends.

    Args:
        folders: What it sees of this machine's files; everything else is the image's and read-only.
        memory: Limit in bytes, swap included; 0 sets none.
        init: Start a process that passes signals on and reaps orphans.
        further: Options of the SDK that replace the default ones.
        after: Called with the container and its status when it has ended, before it is removed.
        on_out: Called with each line of standard output, *on_err* with each of standard error.

    Raises:
        engine-unreachable, engine-refused, emulation-missing, disk-full: See
        `Engine.errors_translated`.
    """
    from docker.errors import APIError

    container: Container | None = None
    options = {**_options(engine, folders, variables or {}, memory, init), **(further or {})}
    with engine.errors_translated():
        try:
            with defer_signals():
                container = engine.client.containers.create(image, list(command), **options)
            output = engine.client.api.attach(
                str(container.id), stdout=True, stderr=True, stream=True, demux=True
            )
            container.start()
            _forward_lines(output, on_out, on_err)
            status = int(container.wait(timeout=None)["StatusCode"])
            container.reload()
            if after:
                after(container, status)
            return ExitStatus(status, bool(container.attrs["State"].get("OOMKilled")))
        except KeyboardInterrupt:
            # A second interruption cuts the wait short.
            with contextlib.suppress(APIError):
                if container is not None:
                    container.stop(timeout=GRACE)
            raise
        finally:
            # A container that was removed already is as good.
            with defer_signals(), contextlib.suppress(APIError):
                if container is not None:
                    container.remove(force=True)


def _options(
    engine: Engine,
    folders: Iterable[BindMount],
    variables: Mapping[str, str],
    memory: int,
    init: bool,
) -> dict[str, Any]:
    from docker.types import LogConfig, Mount

    run_id = secrets.token_hex(8)
    user, namespace = engine.user
    return {
        "name": f"sparkwright-{run_id}",
        "labels": {LABEL: run_id, OWNER: owner_id()},
        "user": user,
        "userns_mode": namespace or None,
        "network_mode": "none",
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "read_only": True,
        "tmpfs": {"/tmp": "rw,exec,nosuid,nodev,mode=1777"},  # noqa: S108  the container's own
        "mounts": [
            Mount(
                str(folder.target),
                str(folder.source.resolve()),
                "bind",
                read_only=not folder.writable,
            )
            for folder in folders
        ],
        "environment": {"HOME": "/tmp", "LC_ALL": "C.UTF-8", VARIABLE: "container", **variables},  # noqa: S108  see above
        "mem_limit": memory or None,
        "memswap_limit": memory or None,
        "pids_limit": PROCESSES,
        "init": init,
        # SIGINT lets the program keep what it has learned so far; SIGTERM would end Python at once.
        "stop_signal": "SIGINT",
        # The output is read as it comes; nobody needs a copy on the engine's disk.
        "log_config": LogConfig(type="none"),
    }


def _forward_lines(
    chunks: Iterable[tuple[bytes | None, bytes | None]],
    on_out: Callable[[str], None],
    on_err: Callable[[str], None],
) -> None:
    """
    Call *on_out* and *on_err* with the complete lines of two streams that arrive in *chunks* of any
    length.
    """
    rest = [b"", b""]
    sinks = (on_out, on_err)
    for pair in chunks:
        for stream, data in enumerate(pair):
            *lines, rest[stream] = (rest[stream] + (data or b"")).split(b"\n")
            for line in lines:
                sinks[stream](line.decode("utf-8", "replace"))
    for sink, line in zip(sinks, rest, strict=True):
        if line:
            sink(line.decode("utf-8", "replace"))


def pinned_base(session: RunContext, name: str) -> str:
    """
    Return the base image *name*, by default the one of ``environment.yaml``.

    Raises:
        base-unresolved: The name is a tag, not a digest, or there is none.
    """
    base = name or toolchain.spec(session.project).image
    if not PINNED.fullmatch(base):
        origin = "--base" if name else f"build/{session.project.stack}/environment.yaml"
        raise ContainerError(
            "base-unresolved",
            f"{origin} names "
            f"{f'the base image {base!r}, which is no digest' if base else 'no base image'}.",
        )
    return base


def builder_image(session: RunContext, engine: Engine, base: str, platform: str) -> BuilderImage:
    """
    Return the builder image on *base*, built when the engine has none.

    Args:
        platform: Empty for the engine's own.

    Raises:
        offline, source-unreachable, image-mismatch, emulation-missing, image-build-failed,
        disk-full, engine-unreachable: See there.
    """
    target, text = platform or engine.platform, read_dockerfile(session, "builder.Dockerfile")
    with engine.errors_translated(), console.step(f"builder image for {target}"):
        base_id = prepare_base(session, engine, base, target)
        # By its id, which a second tag on the same image does not change.
        key = digest.key(
            "image", {"base": base_id, "dockerfile": digest.sha256_bytes(text), "platform": target}
        )
        system = build_image(
            session, engine, "system", key, {"BASE": base}, target, {"Dockerfile": text}
        )
        python = image_python(session, engine, system)
        if _ARCHITECTURES.get(python.machine) != target.rpartition("/")[2]:
            raise ContainerError(
                "image-mismatch",
                f"{base} says that it is for {target}, but its programs are for {python.machine}.",
            )
        with tempfile.TemporaryDirectory() as folder:
            own_wheel = self_wheel.write(Path(folder))
            wheels = {
                f"wheels/{path.name}": path.read_bytes()
                for path in (own_wheel, *self_wheel.required(session, python))
            }
        key = digest.key(
            "image",
            {
                "system": system,
                "files": {name: digest.sha256_bytes(data) for name, data in wheels.items()},
            },
        )
        image = build_image(
            session, engine, "builder", key, {"BASE": base}, target, {"Dockerfile": text, **wheels}
        )
    return BuilderImage(base, target, system, image, python)


def read_dockerfile(session: RunContext, name: str) -> bytes:
    """
    Return the file *name* of ``build/``.

    Raises:
        file-invalid: It cannot be read.
    """
    path = session.project.root / "build" / name
    try:
        return path.read_bytes()
    except OSError as error:
        raise FileError("file-invalid", f"{path} cannot be read.", details=[str(error)]) from error


def prepare_base(session: RunContext, engine: Engine, base: str, target: str) -> str:
    """
    Return the id of the base image; pull it when the engine has none for that platform, and check
    that it runs.
    """
    image = find_image(engine, base)
    if image is None or image.platform != target:
        if base.startswith("sha256:"):
            if image is None:
                raise ContainerError(
                    "base-unresolved",
                    f"The engine has no image {base}.",
                    todo="See `docker image ls --no-trunc` for what it has.",
                )
        else:
            _pull(session, engine, base, target)
            image = find_image(engine, base)
    if image is None or image.platform != target:
        raise ContainerError(
            "image-mismatch",
            f"{base} is for {image.platform if image else 'another platform'}, not for {target}.",
        )
    if target != engine.platform:
        lines: list[str] = []
        # Without an init, which would be this machine's own program and start. Engines report the
        # kernel's refusal as an error of theirs or as output of a program that ended.
        shell = ["/bin/sh", "-c", "exit 0"]
        result = run(engine, image.id, shell, init=False, on_out=lines.append, on_err=lines.append)
        if result.status:
            raise engine.translate_error(
                "\n".join([*lines, f"status: {result.status}"]),
                partial(ContainerError, "image-mismatch"),
                f"The shell of {base} does not run.",
            )
    return image.id


def find_image(engine: Engine, name: str) -> Image | None:
    """Return the image of that name, digest or id; None if the engine has none."""
    from docker.errors import ImageNotFound

    try:
        image = engine.client.images.get(name)
    except ImageNotFound:
        return None
    return Image(str(image.id), f"{image.attrs['Os']}/{image.attrs['Architecture']}")


def _pull(session: RunContext, engine: Engine, base: str, target: str) -> None:
    from docker.errors import APIError

    if session.offline:
        raise SourceError(
            "offline",
            f"The engine does not have {base}.",
            todo="Run once with a connection, or load the image with `docker load`.",
        )
    name, _, image_digest = base.partition("@")
    try:
        with console.step(f"pull {base}"):
            for event in engine.client.api.pull(
                name, tag=image_digest, platform=target, stream=True, decode=True
            ):
                if "error" in event:
                    raise SourceError(
                        "source-unreachable",
                        f"{base} cannot be pulled.",
                        details=[str(event["error"])],
                    )
    except APIError as error:
        raise SourceError(
            "source-unreachable",
            f"{base} cannot be pulled.",
            details=[str(error.explanation or error)],
        ) from error


def build_image(
    session: RunContext,
    engine: Engine,
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
        arguments: The build arguments of the Dockerfile.
        target: The platform.
        files: The context, ``Dockerfile`` among them.
        labels: Further labels of the image; *key* must depend on them.

    Raises:
        image-build-failed, disk-full, emulation-missing, engine-refused: See there.
    """
    tag = f"sparkwright-{stage}:{key[:16]}"
    if existing := find_image(engine, tag):
        return existing.id
    log = session.store.folder("logs") / f"image-{stage}.log"
    lines: list[str] = []
    with (
        console.step(f"build the image {tag}"),
        log.open("w", encoding="utf-8") as sink,
        console.progress("steps", 0) as line,
    ):
        events = engine.client.api.build(
            fileobj=io.BytesIO(_context(files)),
            custom_context=True,
            encoding=None,
            tag=tag,
            target=stage,
            platform=target,
            buildargs={**arguments, **_proxies()},
            labels={**(labels or {}), IMAGE_LABEL: key},
            rm=True,
            forcerm=True,
            decode=True,
            # All that this machine reaches (a package mirror on a loopback address, too), or
            # nothing.
            network_mode="none" if session.offline else "host",
        )
        # The engine stops building when the connection is closed.
        with contextlib.closing(events):
            for event in events:
                if "error" in event:
                    lines.append(str(event["error"]))
                    raise engine.translate_error(
                        "\n".join([*lines, f"full log: {log}"]),
                        partial(ContainerError, "image-build-failed"),
                        f"The image {stage} cannot be built.",
                    )
                text = str(event.get("stream", ""))
                sink.write(text)
                lines = [*lines[-40:], *(row for row in text.splitlines() if row.strip())]
                line.update(len(lines), lines[-1][-80:] if lines else "")
    built = find_image(engine, tag)
    if built is None:
        raise ContainerError(
            "image-build-failed",
            f"The image {stage} cannot be built.",
            details=[*lines[-25:], f"full log: {log}"],
        )
    return built.id


def _proxies() -> dict[str, str]:
    """
    Return the caller's proxies, which the engine gives to build steps and leaves out of the image.
    """
    return {
        name: os.environ[name]
        for lower in _PROXIES
        for name in (lower, lower.upper())
        if name in os.environ
    }


def _context(files: Mapping[str, bytes]) -> bytes:
    """Return *files* as a tar with fixed times, so that equal files hit the engine's cache."""
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as archive:
        for name, data in sorted(files.items()):
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(data), 0o755 if data.startswith(b"#!") else 0o644
            archive.addfile(info, io.BytesIO(data))
    return sink.getvalue()


def image_python(session: RunContext, engine: Engine, system: str) -> Interpreter:
    """Return the description of the Python in the image *system*."""
    key = digest.key("interpreter", system)
    if cached := session.store.get("interpreter", key, Interpreter):
        return cached
    lines: list[str] = []
    result = run(
        engine,
        system,
        ["python3", "-c", Interpreter.SCRIPT],
        on_out=lines.append,
        on_err=lines.append,
    )
    if result.status:
        raise ContainerError(
            "image-build-failed", "The Python of the image does not run.", details=lines[-10:]
        )
    python = msgspec.json.decode("".join(lines), type=Interpreter)
    session.store.put("interpreter", key, python)
    return python
