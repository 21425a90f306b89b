"""
Environments to gate in: the set around unpublished wheels, and the official wheel as a baseline.

What is gated is installed as users will have it: the wheels go through a publication and an
installation, in an index of their own whose keys are thrown away.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from uv import find_uv_bin

from sparkwright.client import install as client
from sparkwright.client.environment import Prefix
from sparkwright.client.index import Index, open_index
from sparkwright.core import process
from sparkwright.core.console import console
from sparkwright.core.errors import PythonError, UsageError
from sparkwright.core.files import list_folder
from sparkwright.forks import package_index
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import SourceError
from sparkwright.release import keys, policy
from sparkwright.release.publisher import Publisher

#: The address of the index; no server answers there (RFC 2606).
URL = "https://staging.invalid/"


@contextmanager
def staged_index(context: RunContext, folder: Path) -> Iterator[tuple[Index, str]]:
    """
    Yield an index whose keys are thrown away with the wheels in *folder* as a candidate, and the
    name of that release; the index is removed at the end of the block.

    Raises:
        UsageError: There is no wheel; and as `Publisher.publish`.
    """
    wheels = tuple(list_folder(folder.absolute(), "*.whl"))
    if not wheels:
        raise UsageError(
            "usage", f"There is no wheel in {folder}.", todo="Build first: sparkwright build."
        )
    rules = policy.load(context.project.root, context.project.spec.arch)
    rules = replace(rules, file=replace(rules.file, root=""))
    with tempfile.TemporaryDirectory(prefix="staging-") as name:
        scratch = Path(name)
        keys.make(scratch / "keys")
        publisher = Publisher(context, scratch / "index", keys.load([scratch / "keys"]), rules)
        published = publisher.publish(wheels, "candidate", url=URL)
        trust = scratch / "trust"
        yield open_index(trust, str(scratch / "index"), published.fingerprint), published.release


def install_built(context: RunContext, folder: Path, prefix: Path) -> dict[str, Any]:
    """
    Install the set around the wheels in *folder* as the current release of *prefix*.

    Returns:
        As `sparkwright.client.install.install`.

    Raises:
        UsageError: There is no wheel; and as `Publisher.publish` and the installation.
    """
    with staged_index(context, folder) as (index, name):
        install = partial(
            client.install,
            Prefix(prefix.absolute()),
            context.store.folder("downloads", "staging"),
            index,
            channel="candidate",
            version=name,
        )
        # Every set has the same name here: an earlier one is replaced.
        with suppress(PythonError):
            return install()
        return install(renew=True)


def install_stock(context: RunContext, environment: Path) -> Path:
    """
    Install the official wheel under the stack's graft, with what it requires, into *environment*.

    Returns:
        The wheel, in the folder ``wheel`` of the environment.

    Raises:
        not-provided: The stack has no official wheel for this machine.
        offline, source-unreachable, source-mismatch, command-failed: It cannot be fetched or
            installed.
    """
    locked = [context.lock.forks[fork].bases.get(context.machine) for fork in context.forks]
    bases = [base for base in locked if base]
    if len(bases) != 1:
        raise SourceError(
            "not-provided",
            f"Stack {context.project.stack} has no official wheel for {context.machine}.",
        )
    [base] = bases
    path = package_index.obtain(
        context.store, base.name, base.filename, base.sha256, offline=context.offline
    )
    variables = process.clean_environment(
        UV_NO_CONFIG="1",
        UV_INDEX_URL=package_index.index_url(),
        HOME=os.environ.get("HOME", ""),
    )
    with console.step(f"the stock {base.name} {base.version} in {environment}"):
        process.run(
            [
                *(find_uv_bin(), "pip", "install", "--quiet", "--only-binary", ":all:"),
                *("--python", environment / "bin" / "python", path),
            ],
            log=context.store.folder("logs") / "stock.log",
            env=variables,
        )
    copy = environment / "wheel" / base.filename
    copy.parent.mkdir(exist_ok=True)
    shutil.copy2(path, copy)
    return copy
