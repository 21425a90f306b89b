"""
Builds in a container: the builder image, and the command line of a build run in it.

The builder image is a base that is pinned by digest, the system packages that it lacks, and this
program. A build fetches outside, then runs the same command inside without a network. The container
has a store of its own for everything that depends on its Python and compilers, at the same path
inside and outside, so that every path it prints can be opened. Downloads and mirrors are shared
read-only; objects, locks, cost records and the compiler cache are shared for writing.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import docker
import msgspec

from sparkwright.builder import configure, ninja, preflight, pylock, toolchain
from sparkwright.builder.container import (
    BindMount,
    ContainerError,
    build_image,
    connected,
    image_python,
    prepare_base,
    run,
)
from sparkwright.builder.pylock import Interpreter, LockedWheel
from sparkwright.builder.wheel import source_wheel
from sparkwright.core.console import console
from sparkwright.core.files import content_key, read_bytes, sha256_bytes
from sparkwright.core.store import Store
from sparkwright.forks import fetch
from sparkwright.forks.context import RunContext

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


def pinned_base(context: RunContext, name: str) -> str:
    """
    Return the base image *name*, by default the one of ``environment.yaml``.

    Raises:
        base-unresolved: The name is a tag, not a digest, or there is none.
    """
    base = name or toolchain.spec(context.project).image
    if not PINNED.fullmatch(base):
        origin = "--base" if name else f"build/{context.project.stack}/environment.yaml"
        raise ContainerError(
            "base-unresolved", f"{origin} names the base image {base!r}, which is no digest."
        )
    return base


def builder_image(
    context: RunContext, engine: docker.DockerClient, base: str
) -> tuple[str, str, Interpreter]:
    """
    Return the ids of the images with compilers and Python, and with this program besides, both
    built when the engine has none; and the description of their Python.

    Raises:
        offline, source-unreachable: The base or a requirement of the program cannot be had.
        image-mismatch, emulation-missing, image-build-failed, disk-full, engine-unreachable: As
            `prepare_base` and `build_image`.
    """
    target = f"linux/{engine.version()['Arch']}"
    files = {"Dockerfile": read_bytes(context.project.root / "build" / "builder.Dockerfile")}
    with console.step(f"builder image for {target}"):
        system, python = system_image(context, engine, base, target, "system", files)
        with tempfile.TemporaryDirectory() as folder:
            wheels = program_wheels(context, python, Path(folder), extra="full")
            files |= {f"wheels/{path.name}": path.read_bytes() for path in wheels}
        hashes = {name: sha256_bytes(data) for name, data in files.items()}
        key = content_key("image", {"system": system, "files": hashes})
        image = build_image(context, engine, "builder", key, {"BASE": base}, target, files)
    return system, image, python


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
        offline, source-unreachable, image-mismatch, emulation-missing, image-build-failed,
            disk-full: As `prepare_base` and `build_image`.
    """
    base_id = prepare_base(context, engine, base, target)
    # By its id, which a second tag on the same image does not change.
    inputs = {
        "base": base_id,
        "dockerfile": sha256_bytes(files["Dockerfile"]),
        "platform": target,
    }
    key = content_key("image", inputs)
    system = build_image(context, engine, stage, key, {"BASE": base}, target, files)
    return system, image_python(engine, system)


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


def build(
    context: RunContext, words: Sequence[str], *, base: str = ""
) -> tuple[int, dict[str, Any]]:
    """
    Run the command line *words* in the builder image; return its exit status and the document that
    it printed.

    Args:
        base: Base image instead of the one of ``environment.yaml``.

    Raises:
        engine-missing, engine-forbidden, engine-unreachable, engine-refused: As `connected`.
        base-unresolved: As `pinned_base`.
        container-killed: A signal ended the program.
        early-check-failed: As `preflight.check_output`.
    """
    preflight.check_output(context)
    with connected() as engine:
        base = pinned_base(context, base)
        needs = {need for fork in context.forks for need in context.project.fork(fork).needs}
        for fork in dict.fromkeys([*context.forks, *sorted(needs)]):
            fetch.fetch(context, fork)
        for fork in context.forks:
            if toolchain.settings(context, fork).needs_vendored:
                configure.fetch_vendored(context, fork)
        system, image, python = builder_image(context, engine, base)
        pylock.download(context.store, needed(context, python), offline=context.offline)
        with console.step(f"build in a container of {base}, Python {python.version}"):
            return run_program(context, engine, system, image, words)


def needed(context: RunContext, python: Interpreter) -> tuple[LockedWheel, ...]:
    """Return the files of the package index that a build by *python* reads, sorted."""
    files = set(pylock.wheels(context.project, python))
    for fork in context.forks:
        if base := context.lock.forks[fork].bases.get(python.machine):
            files.add((base.name, base.filename, base.sha256))
    return tuple(sorted(files))


def run_program(
    context: RunContext, engine: docker.DockerClient, system: str, image: str, words: Sequence[str]
) -> tuple[int, dict[str, Any]]:
    """
    Run sparkwright in *image* with the command line *words*; return its status and the JSON
    document that it printed, if any. It runs the build itself, since `VARIABLE` is set there.

    Args:
        system: The image below; environments and build folders depend on its compilers and Python.
    """
    name = system.removeprefix("sha256:")[:16]
    store = Store(context.store.root / "containers" / name)
    memory = ninja.memory_budget(context.memory) * 10**6
    command = [
        *(PROGRAM, "-m", "sparkwright", *words),
        # The last of two options counts.
        *("--offline", "--root", str(context.project.root), "--cache-dir", str(store.root)),
        *("--output", str(context.output), "--memory", f"{memory / 1e9:.3f}"),
        *(f"--mirror={url}={path}" for url, path in context.mirrors.items()),
    ]
    # /tmp inside is memory.
    variables = {"TMPDIR": str(store.folder("tmp"))}
    if console.github:
        variables["GITHUB_ACTIONS"] = "true"
    folders = [
        BindMount(context.project.root, context.project.root),
        BindMount(context.output, context.output, writable=True),
        BindMount(store.root, store.root, writable=True),
        # The engine would create a missing mount point as root.
        *(BindMount(context.store.folder(name), store.folder(name)) for name in READ),
        *(
            BindMount(context.store.folder(name), store.folder(name), writable=True)
            for name in WRITTEN
        ),
    ]
    lines: list[str] = []
    status = run(
        engine,
        image,
        command,
        folders=folders,
        variables=variables,
        memory=memory + OVERHEAD,
        on_out=lines.append if console.json else console.result,
    )
    return status, msgspec.json.decode("\n".join(lines)) if lines else {}
