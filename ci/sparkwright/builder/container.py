"""
Builds in a container: the container engine, its images, and one way to run a program in them.

A container has no network and no rights, runs as the caller's user, and is removed when the run
that started it ends. It carries the identity of its owner process, so that the next run removes the
containers of killed runs. The builder image is a base that is pinned by digest, the system packages
that it lacks, and this program.

A build fetches outside, then runs the same command inside without a network. The container has a
store of its own for everything that depends on its Python and compilers, at the same path inside
and outside, so that every path it prints can be opened. Downloads and mirrors are shared read-only;
objects, locks, cost records and the compiler cache are shared for writing.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import secrets
import shutil
import signal
import socket
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from sparkwright.builder import self_wheel, vendored
from sparkwright.builder.compile import ninja
from sparkwright.builder.environment import cross, pylock, toolchain
from sparkwright.builder.environment.pylock import Interpreter
from sparkwright.builder.environment.sandbox import VARIABLE
from sparkwright.builder.errors import ContainerError
from sparkwright.builder.wheel.sbom import LockedFile
from sparkwright.core import digest
from sparkwright.core.console import console
from sparkwright.core.errors import Failure, FileError, SparkwrightError, StoreError
from sparkwright.core.store import Store
from sparkwright.forks import fetch, package_index
from sparkwright.forks.context import RunContext
from sparkwright.forks.errors import SourceError

if TYPE_CHECKING:
    from docker import DockerClient
    from docker.models.containers import Container

SOCKET = "/var/run/docker.sock"
#: Seconds for one answer of the engine; builds and waits have no limit.
PATIENCE = 60
#: Labels of a container: the id of its run, and the identity of the process that owns it.
LABEL, OWNER = "sparkwright", "sparkwright.owner"
#: Label of an image: the key of its inputs.
IMAGE_LABEL = "sparkwright.image"
#: Processes and threads of a build; ninja starts a few per core, and a build that starts thousands
#: does so by mistake.
PROCESSES = 4096
#: Seconds that an interrupted program has to end by itself, and so to keep its cost records.
GRACE = 10
#: ``name@sha256:…`` as registries know an image, or the id by which the engine does.
PINNED = re.compile(r"(?:[^@\s]+@)?sha256:[0-9a-f]{64}")
#: Path of the program in the builder image (build/builder.Dockerfile).
PROGRAM = "/usr/local/lib/sparkwright/bin/python"
#: Bytes of the container's limit above the compilers' budget: for sparkwright, ninja, the linker
#: and file pages.
OVERHEAD = 10**9
#: Folders of the store that a build in a container shares.
READ = ("downloads", "mirrors")
WRITTEN = ("objects.git", "locks", "records/source", "records/costs", "ccache")

_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
#: Options that the program inside gets other values of, or none.
_OUTER = "--container --offline --platform --base --root --cache-dir --output --memory --mirror"


class BindMount(msgspec.Struct, frozen=True):
    """A folder of this machine, mounted at *target*; read-only unless *writable*."""

    source: Path
    target: Path
    writable: bool = False


class ExitStatus(msgspec.Struct, frozen=True):
    """Exit status of a program, and whether a process of its container was killed for memory."""

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


# The engine.


class Engine:
    """A container engine, reached by the SDK's connected *client*."""

    def __init__(self, client: DockerClient) -> None:
        self.client = client

    @cached_property
    def platform(self) -> str:
        """Platform that runs without emulation: ``linux/amd64`` or ``linux/arm64``."""
        return f"linux/{self.client.version()['Arch']}"

    @cached_property
    def root(self) -> str:
        """Folder of the engine's images and containers."""
        return str(self.client.info().get("DockerRootDir", ""))

    @cached_property
    def user(self) -> tuple[str, str]:
        """
        User inside a container that is the caller outside (``uid:gid``), and its user namespace
        mode.
        """
        options = " ".join(self.client.info().get("SecurityOptions") or ())
        if "name=rootless" in options:
            # A rootless engine's root is the caller; every other user inside would be nobody
            # outside.
            return "0:0", ""
        return f"{os.getuid()}:{os.getgid()}", "host" if "name=userns" in options else ""

    @contextlib.contextmanager
    def errors_translated(self) -> Iterator[None]:
        """
        Translate the errors that the SDK raises inside the block.

        Raises:
            engine-unreachable: The connection broke.
            disk-full, emulation-missing, engine-refused: The engine answered with an error.
        """
        import requests
        import urllib3
        from docker.errors import APIError, DockerException

        try:
            yield
        except BrokenPipeError:
            # The reader of our own output has gone; the SDK wraps its own errors.
            raise
        except APIError as error:
            raise self.translate_error(str(error.explanation or error)) from error
        except (
            requests.RequestException,
            urllib3.exceptions.HTTPError,
            DockerException,
            ConnectionError,
        ) as error:
            what = "The container engine went away."
            raise ContainerError("engine-unreachable", what, details=[str(error)]) from error

    def translate_error(
        self,
        text: str,
        otherwise: Failure = partial(ContainerError, "engine-refused"),
        what: str = "The container engine refused.",
    ) -> SparkwrightError:
        """Return the error for the engine's message *text*; unless common, `otherwise(what)`."""
        lines = text.strip().splitlines()[-25:]
        if "no space left on device" in text.lower():
            what = f"The container engine has no room left under {self.root}."
            todo = (
                "Make room there: docker system df lists what is stored, docker system prune "
                "removes what is unused."
            )
            return StoreError("disk-full", what, details=lines[-3:], todo=todo)
        if "exec format error" in text.lower():
            what = "This machine cannot run the programs of the image."
            return ContainerError("emulation-missing", what, details=lines[-3:])
        return otherwise(what, details=lines)


def connect() -> Engine:
    """
    Connect to the engine of this machine: that of ``DOCKER_HOST``, else the system's, else the
    user's own. Folders of this machine are mounted, so its address is a socket in the file system.

    Raises:
        engine-missing: No engine listens.
        engine-forbidden: The user may not open its socket.
        engine-unreachable: It does not answer, or is on another machine.
    """
    import docker
    import requests
    from docker.errors import DockerException

    own = Path(os.environ.get("XDG_RUNTIME_DIR", "/nonexistent"), "docker.sock")
    usual = own if own.exists() and not Path(SOCKET).exists() else SOCKET
    address = os.environ.get("DOCKER_HOST") or f"unix://{usual}"
    if not address.startswith("unix://"):
        what = f"DOCKER_HOST names an engine that is not on this machine: {address}."
        todo = "Unset it, or name a socket (unix:///var/run/docker.sock): builds mount folders."
        raise ContainerError("engine-unreachable", what, todo=todo)
    silent = f"The container engine at {address} does not answer."
    try:
        # The SDK does not report why the socket cannot be opened.
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(PATIENCE)
            connection.connect(address.removeprefix("unix://"))
        return Engine(docker.DockerClient(base_url=address, version="auto", timeout=PATIENCE))
    except (FileNotFoundError, NotADirectoryError) as error:
        what = f"No container engine listens: there is no {address}."
        raise ContainerError("engine-missing", what) from error
    except PermissionError as error:
        what = f"This user may not open {address}."
        raise ContainerError("engine-forbidden", what, details=[str(error)]) from error
    except (OSError, DockerException, requests.RequestException) as error:
        raise ContainerError("engine-unreachable", silent, details=[str(error)]) from error


@contextlib.contextmanager
def termination_interrupts() -> Iterator[None]:
    """Let SIGTERM end the block as Ctrl-C does, so that its cleanup runs."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# Containers.


def owner_id() -> str:
    """
    Return the unique identity of this process: boot, process namespace, process id and start time.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    namespace = Path("/proc/self/ns/pid").stat().st_ino
    return f"{boot}/{namespace}/{os.getpid()}/{_start_time(os.getpid())}"


def has_exited(owner: str) -> bool:
    """Return True only if the process *owner* (`owner_id`) has certainly exited."""
    boot, namespace, process, started = [*owner.split("/"), "", "", ""][:4]
    current_boot, current_namespace, *_ = owner_id().split("/")
    if boot != current_boot:
        return True
    if namespace != current_namespace or not process.isdigit():
        return False
    try:
        os.kill(int(process), 0)
        return _start_time(int(process)) != started
    except ProcessLookupError:
        return True
    except OSError:
        return False


def _start_time(process: int) -> str:
    """Return the start of *process* in clock ticks after boot (proc_pid_stat(5), field 22)."""
    text = Path(f"/proc/{process}/stat").read_text("ascii", "replace")
    return text.rpartition(")")[2].split()[19]


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
        folders: Its folders of this machine; all other files are the image's and read-only.
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
    from docker.types import LogConfig, Mount

    run_id = secrets.token_hex(8)
    user, namespace = engine.user
    options: dict[str, Any] = {
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
        "environment": {
            "HOME": "/tmp",  # noqa: S108  see above
            "LC_ALL": "C.UTF-8",
            VARIABLE: "container",
            **(variables or {}),
        },
        "mem_limit": memory or None,
        "memswap_limit": memory or None,
        "pids_limit": PROCESSES,
        "init": init,
        # SIGINT lets the program keep its records; SIGTERM would end Python at once.
        "stop_signal": "SIGINT",
        # The output is read as it comes; no copy is needed on the engine's disk.
        "log_config": LogConfig(type="none"),
        **(further or {}),
    }
    containers = engine.client.containers
    with engine.errors_translated():
        try:
            container = containers.create(image, list(command), **options)
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
                containers.get(options["name"]).stop(timeout=GRACE)
            raise
        finally:
            # By its name: an interruption may come before the engine has answered.
            with contextlib.suppress(APIError):
                containers.get(options["name"]).remove(force=True)


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


# Images.


def pinned_base(context: RunContext, name: str) -> str:
    """
    Return the base image *name*, by default the one of ``environment.yaml``.

    Raises:
        base-unresolved: The name is a tag, not a digest, or there is none.
    """
    base = name or toolchain.spec(context.project).image
    if not PINNED.fullmatch(base):
        origin = "--base" if name else f"build/{context.project.stack}/environment.yaml"
        fault = f"the base image {base!r}, which is no digest" if base else "no base image"
        raise ContainerError("base-unresolved", f"{origin} names {fault}.")
    return base


def builder_image(context: RunContext, engine: Engine, base: str, platform: str) -> BuilderImage:
    """
    Return the builder image on *base*, built when the engine has none.

    Args:
        platform: Empty for the engine's own.

    Raises:
        offline, source-unreachable: The base or a requirement of the program cannot be had.
        image-mismatch, emulation-missing, image-build-failed, disk-full, engine-unreachable: As
            `prepare_base` and `build_image`.
    """
    target, text = platform or engine.platform, read_dockerfile(context, "builder.Dockerfile")
    with engine.errors_translated(), console.step(f"builder image for {target}"):
        base_id = prepare_base(context, engine, base, target)
        # By its id, which a second tag on the same image does not change.
        inputs = {"base": base_id, "dockerfile": digest.sha256_bytes(text), "platform": target}
        key, arguments = digest.key("image", inputs), {"BASE": base}
        files = {"Dockerfile": text}
        system = build_image(context, engine, "system", key, arguments, target, files)
        python = image_python(context, engine, system)
        if _ARCHITECTURES.get(python.machine) != target.rpartition("/")[2]:
            what = f"{base} is labelled for {target}, but its programs are for {python.machine}."
            raise ContainerError("image-mismatch", what)
        with tempfile.TemporaryDirectory() as folder:
            own = self_wheel.write(Path(folder))
            wheels = {
                f"wheels/{path.name}": path.read_bytes()
                for path in (own, *self_wheel.required(context, python))
            }
        hashes = {name: digest.sha256_bytes(data) for name, data in wheels.items()}
        key = digest.key("image", {"system": system, "files": hashes})
        files |= wheels
        image = build_image(context, engine, "builder", key, arguments, target, files)
    return BuilderImage(base, target, system, image, python)


def read_dockerfile(context: RunContext, name: str) -> bytes:
    """Return the file *name* of ``build/``; raise `file-invalid` if it cannot be read."""
    path = context.project.root / "build" / name
    try:
        return path.read_bytes()
    except OSError as error:
        raise FileError("file-invalid", f"{path} cannot be read.", details=[str(error)]) from error


def prepare_base(context: RunContext, engine: Engine, base: str, target: str) -> str:
    """
    Return the id of the base image; pull it when the engine has none for that platform.
    """
    image = find_image(engine, base)
    if image is None and base.startswith("sha256:"):
        todo = "See `docker image ls --no-trunc` for what it has."
        raise ContainerError("base-unresolved", f"The engine has no image {base}.", todo=todo)
    if (image is None or image.platform != target) and not base.startswith("sha256:"):
        _pull(context, engine, base, target)
        image = find_image(engine, base)
    if image is None or image.platform != target:
        platform = image.platform if image else "another platform"
        raise ContainerError("image-mismatch", f"{base} is for {platform}, not for {target}.")
    return image.id


def find_image(engine: Engine, name: str) -> Image | None:
    """Return the image of that name, digest or id; None if the engine has none."""
    from docker.errors import ImageNotFound

    try:
        image = engine.client.images.get(name)
    except ImageNotFound:
        return None
    return Image(str(image.id), f"{image.attrs['Os']}/{image.attrs['Architecture']}")


def _pull(context: RunContext, engine: Engine, base: str, target: str) -> None:
    from docker.errors import APIError

    if context.offline:
        todo = "Run once with a connection, or load the image with `docker load`."
        raise SourceError("offline", f"The engine does not have {base}.", todo=todo)
    name, _, sha256 = base.partition("@")
    try:
        with console.step(f"pull {base}"):
            events = engine.client.api.pull(
                name, tag=sha256, platform=target, stream=True, decode=True
            )
            failures = [str(event["error"]) for event in events if "error" in event]
    except APIError as error:
        failures = [str(error.explanation or error)]
    if failures:
        raise SourceError("source-unreachable", f"{base} cannot be pulled.", details=failures)


def build_image(
    context: RunContext,
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
        image-build-failed: A step of the Dockerfile failed.
        disk-full, emulation-missing, engine-refused: See `Engine.translate_error`.
    """
    tag = f"sparkwright-{stage}:{key[:16]}"
    if image := find_image(engine, tag):
        return image.id
    log = context.store.folder("logs") / f"image-{stage}.log"
    lines: list[str] = []
    with (
        console.step(f"build the image {tag}"),
        log.open("w", encoding="utf-8") as sink,
        console.progress("steps", 0) as progress,
    ):
        events = engine.client.api.build(
            fileobj=io.BytesIO(_tar(files)),
            custom_context=True,
            encoding=None,
            tag=tag,
            target=stage,
            platform=target,
            # The engine gives the caller's proxies to build steps and leaves them out of the image.
            buildargs={**arguments, **_proxies()},
            labels={**(labels or {}), IMAGE_LABEL: key},
            rm=True,
            forcerm=True,
            decode=True,
            # All that this machine reaches (a package mirror on a loopback address, too), or
            # nothing.
            network_mode="none" if context.offline else "host",
        )
        # The engine stops building when the connection is closed.
        with contextlib.closing(events):
            for event in events:
                text = str(event.get("error") or event.get("stream") or "")
                sink.write(text)
                lines = [*lines[-40:], *(row for row in text.splitlines() if row.strip())]
                progress.update(len(lines), lines[-1][-80:] if lines else "")
                if "error" in event:
                    break
    image = find_image(engine, tag)
    if image is None:
        raise engine.translate_error(
            "\n".join([*lines, f"full log: {log}"]),
            partial(ContainerError, "image-build-failed"),
            f"The image {stage} cannot be built.",
        )
    return image.id


def _proxies() -> dict[str, str]:
    names = re.compile("(https?|ftp|no)_proxy", re.IGNORECASE)
    return {name: value for name, value in os.environ.items() if names.fullmatch(name)}


def _tar(files: Mapping[str, bytes]) -> bytes:
    """Return *files* as a tar with fixed times, so that equal files hit the engine's cache."""
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as archive:
        for name, data in sorted(files.items()):
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(data), 0o755 if data.startswith(b"#!") else 0o644
            archive.addfile(info, io.BytesIO(data))
    return sink.getvalue()


def image_python(context: RunContext, engine: Engine, system: str) -> Interpreter:
    """Return the description of the Python in the image *system*."""
    key = digest.key("interpreter", system)
    if cached := context.store.get("interpreter", key, Interpreter):
        return cached
    lines: list[str] = []
    script = ["python3", "-c", Interpreter.SCRIPT]
    result = run(engine, system, script, on_out=lines.append, on_err=lines.append)
    if result.status:
        what = "The Python of the image does not run."
        raise ContainerError("image-build-failed", what, details=lines[-10:])
    python = msgspec.json.decode("".join(lines), type=Interpreter)
    context.store.put("interpreter", key, python)
    return python


# The build in a container.


def build(
    context: RunContext, words: Sequence[str], *, base: str = "", platform: str = ""
) -> tuple[int, dict[str, Any]]:
    """
    Run the command line *words* in the builder image; return its exit status and the document that
    it printed.

    Args:
        base: Base image instead of the one of ``environment.yaml``.
        platform: Platform of the image; empty for the engine's own.

    Raises:
        engine-missing, engine-forbidden, engine-unreachable: As `connect`.
        base-unresolved: As `pinned_base`.
        container-killed: The container ended without a result.
    """
    with termination_interrupts():
        engine = connect()
        remove_stale(engine)
        base = pinned_base(context, base)
        needs = {need for fork in context.forks for need in context.project.fork(fork).needs}
        for fork in dict.fromkeys([*context.forks, *sorted(needs)]):
            fetch.fetch(context, fork)
        for fork in context.forks:
            if toolchain.settings(context, fork).needs_vendored:
                vendored.fetch(context, fork)
        builder = builder_image(context, engine, base, platform)
        for file in needed(context, builder.python):
            package_index.obtain(
                context.store, file.project, file.filename, file.sha256, offline=context.offline
            )
        image = f"{builder.base}, {builder.platform}, Python {builder.python.version}"
        with console.step(f"build in a container of {image}"):
            return run_program(context, engine, builder, words)


def needed(context: RunContext, python: Interpreter) -> tuple[LockedFile, ...]:
    """Return the files of the package index that a build by *python* reads, sorted."""
    machine = context.target or python.machine
    builds = {fork: context.project.fork(fork).build for fork in context.forks}
    files: set[LockedFile] = set()
    if set(builds.values()) - {"headers"}:
        files |= {LockedFile(*wheel) for wheel in pylock.wheels(context.project, python=python)}
    if files and machine != python.machine:
        wheels = pylock.wheels(context.project, machine, python=python)
        files |= {LockedFile(*wheel) for wheel in wheels if wheel[0].startswith(cross.LINKED)}
    for fork, kind in builds.items():
        base = context.lock.forks[fork].bases.get(machine)
        if kind == "graft" and base:
            files.add(LockedFile(base.name, base.filename, base.sha256))
    return tuple(sorted(files))


def inner_arguments(words: Sequence[str]) -> list[str]:
    """Return *words* without the options that `run_program` replaces by those of the container."""
    outer = argparse.ArgumentParser(add_help=False)
    for option in _OUTER.split():
        flag = option in ("--container", "--offline")
        outer.add_argument(option, action="store_true" if flag else "append")
    return outer.parse_known_args(list(words))[1]


def run_program(
    context: RunContext, engine: Engine, builder: BuilderImage, words: Sequence[str]
) -> tuple[int, dict[str, Any]]:
    """
    Run sparkwright in the image with the command line *words*; return its status and the JSON
    document that it printed, if any.

    Raises:
        container-killed: It ended without a result.
    """
    # Environments and build folders depend on the compilers and the Python of this image.
    name = builder.system.removeprefix("sha256:")[:16]
    store = Store(context.store.root / "containers" / name)
    memory = ninja.memory_budget(context.memory) * 10**6
    command = [PROGRAM, "-m", "sparkwright", *inner_arguments(words), "--offline"]
    command += ["--root", str(context.project.root), "--cache-dir", str(store.root)]
    command += ["--output", str(context.output), "--memory", f"{memory / 1e9:.3f}"]
    for url, path in context.mirrors.items():
        command += ["--mirror", f"{url}={path}"]
    # /tmp inside is memory. Folders of killed runs go.
    for folder in store.folder("tmp").iterdir():
        if has_exited(folder.name.replace("+", "/")):
            shutil.rmtree(folder, ignore_errors=True)
    scratch = store.folder("tmp", owner_id().replace("/", "+"))
    github = {"GITHUB_ACTIONS": "true"} if console.github else {}
    lines: list[str] = []
    result = run(
        engine,
        builder.image,
        command,
        folders=_shared(context, store),
        variables={"TMPDIR": str(scratch), **github},
        memory=memory + OVERHEAD,
        on_out=lines.append if console.json else console.result,
    )
    if result.status != 3:
        # The log of an internal error stays, because its path has been printed.
        shutil.rmtree(scratch, ignore_errors=True)
    try:
        document = msgspec.json.decode("\n".join(lines), type=dict[str, Any]) if lines else {}
        if result.status <= 130 and (document or not console.json):
            return result.status, document
    except msgspec.DecodeError:
        pass
    reason = f"status {result.status}"
    if result.out_of_memory:
        reason = "the kernel killed a process for want of memory"
    what = "The program in the container was killed."
    raise ContainerError("container-killed", what, details=[*lines[-10:], reason])


def _shared(context: RunContext, store: Store) -> list[BindMount]:
    context.output.mkdir(parents=True, exist_ok=True)
    folders = [
        BindMount(context.project.root, context.project.root),
        BindMount(context.output, context.output, writable=True),
        BindMount(store.root, store.root, writable=True),
    ]
    for name in (*READ, *WRITTEN):
        # The engine would create a missing mount point as root.
        target = store.folder(name)
        folders.append(BindMount(context.store.folder(name), target, writable=name in WRITTEN))
    return folders
