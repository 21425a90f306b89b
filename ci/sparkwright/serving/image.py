"""
Images that serve a release.

An image is a base that is pinned by digest, the system packages of ``build/serve.Dockerfile``, this
program, and the release, which the client installs in a container whose layer is kept. Downloads
lie in a volume of the engine, and so in no layer and no build context.
"""

from __future__ import annotations

import os
import shlex
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from docker import DockerClient
from docker.types import Mount

from sparkwright.builder import container
from sparkwright.builder.container import ContainerError
from sparkwright.client.errors import ClientError
from sparkwright.client.index import Index
from sparkwright.client.install import select_release
from sparkwright.client.records import Channel, Release
from sparkwright.core.console import console
from sparkwright.core.files import content_key, read_bytes, sha256_bytes, sha256_file
from sparkwright.forks.context import RunContext

#: Platforms of images, as engines name them → their machine, as Python does.
PLATFORMS = {"linux/arm64": "aarch64", "linux/amd64": "x86_64"}
DOCKERFILE, ENTRYPOINT = "serve.Dockerfile", "entrypoint.sh"
#: The name that the engine has for images with a release installed.
INSTALLED = "sparkwright-serve-release"

#: Mount points of the container that installs. ``/tmp`` is memory there, so that they leave nothing
#: in the layer.
_INPUTS, _CACHE, _INDEX = "/tmp/inputs", "/tmp/cache", "/tmp/index"  # noqa: S108
#: The container's arguments: index, fingerprint, channel, release.
_SCRIPT = f"""\
set -eu
umask 022
export HOME=/tmp TMPDIR=/tmp LC_ALL=C.UTF-8 XDG_CACHE_HOME={_CACHE}
. {_INPUTS}/proxies
prefix=/opt/sparkwright
python3 -m venv $prefix/program
python=$prefix/program/bin/python
$python -I -m pip install --quiet --disable-pip-version-check --no-cache-dir --no-index \\
    --find-links {_INPUTS} sparkwright
$python -I -m pip uninstall --quiet --yes pip setuptools
$python -I -m sparkwright.client.main install --prefix $prefix --index "$1" --trust "$2" \\
    --channel "$3" --version "$4"
$python -I -m compileall -qq -j 0 --invalidation-mode unchecked-hash $prefix >&2 || :
"""
#: Options of the container that installs: root writes to its own file system, which becomes the
#: layer, and reads an index that only its owner may. No variable of it may stay in the image.
_OPTIONS: Mapping[str, Any] = {
    "user": "0:0",
    "read_only": False,
    "cap_add": ["DAC_READ_SEARCH"],
    "entrypoint": ["/bin/sh"],
}


def select(index: Index, name: str, *, channel: Channel, stack: str, platform: str) -> str:
    """
    Return the name of the release for an image of *platform*: *name*, or the newest of *channel*,
    which is announced.

    Raises:
        release-unknown, release-unproved, release-yanked: There is none.
    """
    machine = PLATFORMS[platform]
    selected = select_release(index, "", machine, channel=channel, stack=stack, version=name)
    if reason := index.states[selected].yanked:
        raise ClientError("release-yanked", f"{selected} was yanked.", details=[reason])
    if not name:
        console.note(f"no release is named; the newest of {channel} is {selected}")
    return selected


def labels(index: Index, release: Release, platform: str, base: str) -> dict[str, str]:
    """Return the labels of an image of *release* on *base*, sorted; none of them holds a date."""
    state, machine = index.states[release.name], PLATFORMS[platform]
    name, _, digest = base.rpartition("@")
    address = str(index)
    values = {
        "org.opencontainers.image.title": f"vLLM for DGX Spark, sparkwright {release.stack}",
        "org.opencontainers.image.version": release.name,
        "org.opencontainers.image.base.name": name,
        "org.opencontainers.image.base.digest": digest,
        "sparkwright.stack": release.stack,
        "sparkwright.release": release.name,
        "sparkwright.release.sha256": index.sha256(release.name),
        "sparkwright.channel": state.channel,
        "sparkwright.missing": "; ".join(state.missing),
        "sparkwright.index": address if address.startswith("http") else "",
        "sparkwright.index.fingerprint": index.fingerprint,
    }
    locks = {str(lock.machine): lock.sha256 for lock in release.locks}
    values["sparkwright.lock.sha256"] = locks.get(machine) or locks.get("any", "")
    for wheel in release.wheels:
        if wheel.machine in (machine, "any"):
            values[f"sparkwright.wheel.{wheel.project}"] = wheel.sha256
    return {label: text for label, text in sorted(values.items()) if text}


def build(
    context: RunContext, index: Index, release: Release, *, platform: str, base: str
) -> dict[str, Any]:
    """
    Return the image of *release* on *base*, built if the engine does not have it (*present*): its
    *id*, as the engine knows it, its local *name*, *release* and *platform*.

    Raises:
        engine-missing, engine-forbidden, engine-unreachable: As `container.connected`.
        offline, source-unreachable, image-mismatch, emulation-missing, image-build-failed,
            disk-full: As `container.system_image` and `container.program_wheels`.
    """
    folder = context.project.root / "build"
    files = {
        "Dockerfile": read_bytes(folder / DOCKERFILE),
        ENTRYPOINT: read_bytes(folder / ENTRYPOINT),
    }
    values = labels(index, release, platform, base)
    with (
        container.connected() as engine,
        console.step(f"serving image of {release.name} for {platform}"),
        tempfile.TemporaryDirectory(prefix="sparkwright-") as temporary,
    ):
        # Writing a layer of gigabytes takes minutes; requests takes None for no limit.
        engine.api.timeout = None  # type: ignore[assignment]
        system, python = container.system_image(
            context, engine, base, platform, "serve-system", files
        )
        if python.machine != PLATFORMS[platform]:
            raise ContainerError(
                "image-mismatch",
                f"{base} states {platform}, and its programs are for {python.machine}.",
            )
        inputs = Path(temporary)
        program = container.program_wheels(context, python, inputs, extra="")
        record = {
            "base": base,
            "platform": platform,
            "dockerfile": sha256_bytes(files["Dockerfile"]),
            "program": {path.name: sha256_file(path) for path in program},
            "script": _SCRIPT,
            "release": index.sha256(release.name),
        }
        installed = content_key("serve-release", record)
        key = content_key("serve", (installed, sha256_bytes(files[ENTRYPOINT]), values))
        name, release_image = f"sparkwright-serve:{key[:16]}", f"{INSTALLED}:{installed[:16]}"
        present = container.find_image(engine, name) is not None
        if not present and container.find_image(engine, release_image) is None:
            _write_inputs(inputs, program)
            _install(context, engine, system, release_image, index, release.name, inputs)
        arguments = {"BASE": base, "RELEASE": release_image, "NAME": release.name}
        identity = container.build_image(
            context, engine, "serve", key, arguments, platform, files, values
        )
    image = {"id": identity, "name": name, "release": release.name, "platform": platform}
    return {**image, "present": present}


def _write_inputs(folder: Path, program: Sequence[Path]) -> None:
    """Complete *folder*, which the container that installs reads: wheels, and the proxies."""
    # With a rootless engine, root of the container is another user here.
    folder.chmod(0o755)
    for path in program:
        if path.parent != folder:
            shutil.copy(path, folder)
    proxies = {name: text for name, text in os.environ.items() if name.lower().endswith("_proxy")}
    lines = [f"export {name}={shlex.quote(text)}\n" for name, text in proxies.items()]
    (folder / "proxies").write_text("".join(lines))


def _install(
    context: RunContext,
    engine: DockerClient,
    system: str,
    image: str,
    index: Index,
    name: str,
    inputs: Path,
) -> None:
    """Install the release *name* in a container of *system*, and keep that as *image*."""
    address = index.url
    mounts = [
        Mount(_INPUTS, str(inputs.resolve()), "bind", read_only=True),
        Mount(_CACHE, "sparkwright-downloads", "volume", no_copy=True),
    ]
    if address.startswith("file:"):
        folder = Path(unquote(urlsplit(address).path)).resolve()
        mounts.append(Mount(_INDEX, str(folder), "bind", read_only=True))
        address = _INDEX
    words = [address, index.fingerprint, index.states[name].channel, name]
    network = "none" if context.offline else "host"
    with console.step(f"install {name} in a container"):
        status, _, messages = container.run(
            engine,
            system,
            ["-c", _SCRIPT, "sh", *words],
            commit=image,
            **{**_OPTIONS, "mounts": mounts, "network_mode": network},
        )
    if status:
        raise container.translate_error(
            f"{messages}\nstatus: {status}",
            partial(ContainerError, "image-build-failed"),
            "The release could not be installed in the image.",
        )
