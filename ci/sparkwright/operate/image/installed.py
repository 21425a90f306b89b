"""
The release, installed into an image by its own installer: in a container without a network, whose layer then is the set and nothing else.

`docker build` would carry the wheels (4 to 9 GB) through a context and a layer of their own; here they are lent to the container, and what
they unpack to is written once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from docker import DockerClient
from docker.models.containers import Container

from sparkwright.builder import container
from sparkwright.builder.container import ContainerError
from sparkwright.core.console import console
from sparkwright.core.errors import SparkwrightError, by_reference
from sparkwright.forks.context import RunContext
from sparkwright.operate.image import lent
from sparkwright.operate.image.picked import Picked

#: Where the set and the program lie in the image (build/serve.Dockerfile, build/entrypoint.sh).
PLACE = "/opt/sparkwright"
VENV = f"{PLACE}/set"
REPOSITORY = "sparkwright-serve-set"

#: Differs from other containers: root writes to the image, and nothing of the container is kept beside that.
_OPTIONS: dict[str, Any] = {
    "environment": {},
    "user": "0:0",
    "init": False,
    "read_only": False,
    # The store may be readable by its owner alone.
    "cap_add": ["DAC_READ_SEARCH"],
    "entrypoint": ["/bin/sh"],
}

#: Run with the address of the index, channel and release; `install` prints the one JSON document.
SCRIPT = f"""\
set -eu
umask 022
export HOME=/tmp TMPDIR=/tmp LC_ALL=C.UTF-8 PYTHONDONTWRITEBYTECODE=1
export SPARKWRIGHT_CONFIG={lent.LENT}/{lent.CONFIG} SPARKWRIGHT_STATE_DIR=/tmp/state SPARKWRIGHT_CACHE_DIR={lent.STORE}
python3 -m venv {PLACE}/program
python={PLACE}/program/bin/python
$python -I -m pip install --quiet --disable-pip-version-check --no-cache-dir --no-compile --no-index --no-deps --require-hashes \\
    -r {lent.LENT}/{lent.PROGRAM}
$python -I -m pip uninstall --quiet --yes pip setuptools
python3 -m venv --without-pip {VENV}
$python -I -m sparkwright install --json --offline --into {VENV} --index {lent.LENT}/{lent.INDEX} \\
    --signed-for "$1" --channel "$2" --version "$3"
$python -I -m sparkwright.operate.image.settled {PLACE}
"""


def obtain(context: RunContext, engine: DockerClient, system: str, key: str, picked: Picked, installer: Sequence[Path]) -> str:
    """
    Return the id of the image *system* with the release installed, made when the engine has none of that *key*.

    Args:
        installer: Files of the program and what it requires; the set's are in the store.

    Raises:
        image-build-failed, container-killed, emulation-missing, disk-full: See there. Others: what `install` inside refused.
    """
    tag = f"{REPOSITORY}:{key[:16]}"
    if found := container.find_image(engine, tag):
        return str(found.id)
    said: list[str] = []
    heard: list[str] = []

    def keep(made: Container, status: int) -> None:
        if status == 0:
            with console.step("write the layer"), patient(engine):
                made.commit(REPOSITORY, key[:16], changes=[f"LABEL {container.IMAGE_LABEL}={key}"])

    with console.step(f"install {picked.entry.name} in a container"), lent.folders(context, picked, installer) as folders:
        words = ["-c", SCRIPT, "sh", picked.index.manifest.url, picked.entry.channel, picked.entry.name]
        status = container.run(
            engine, system, words, folders=folders, further=_OPTIONS, after=keep,
            on_out=said.append, on_err=lambda line: _hear(heard, line),
        )  # fmt: skip
    if status:
        raise _failure(status, said, heard)
    made = container.find_image(engine, tag)
    if made is None:
        raise ContainerError("image-build-failed", "The engine did not keep what was installed.", details=[tag])
    return str(made.id)


def _hear(heard: list[str], line: str) -> None:
    heard.append(line)
    del heard[:-40]
    console.detail(line)


@contextlib.contextmanager
def patient(engine: DockerClient) -> Iterator[None]:
    """Wait for the engine's answers as long as they take: writing or sending a layer of gigabytes takes minutes."""
    api = engine.api
    before = api.timeout
    # Types of the SDK know numbers alone; requests takes None for no limit.
    api.timeout = None  # type: ignore[assignment]
    try:
        yield
    finally:
        api.timeout = before


def _failure(status: int, said: Sequence[str], heard: Sequence[str]) -> SparkwrightError:
    """Return what ended the container: the words of the program inside, where it had any."""
    with contextlib.suppress(msgspec.DecodeError):
        told = msgspec.json.decode("\n".join(said), type=dict[str, Any]).get("error") or {}
        if kind := by_reference(str(told.get("reference"))):
            return kind(told["what"], details=told["details"], todo=told["todo"])
    lines = "\n".join([*heard[-25:], f"status: {status}"])
    return container.translate_error(lines, partial(ContainerError, "image-build-failed"), "The release could not be installed in the image.")
