"""
Environments to gate in: the set around unpublished wheels, and the official wheel as a baseline.

What is gated is installed as users will have it: the wheels go through a publication and an
installation, in an index of their own whose keys are thrown away.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace
from packaging.utils import canonicalize_name

from sparkwright.bench.server import wheel_identity
from sparkwright.builder import pylock, toolchain
from sparkwright.client import install as client
from sparkwright.client.environment import Prefix
from sparkwright.client.index import Index, open_index
from sparkwright.client.locked_wheels import LockedWheel
from sparkwright.client.records import Machine
from sparkwright.core.console import console
from sparkwright.core.errors import PythonError, UsageError
from sparkwright.core.files import content_key, list_folder, sha256_file
from sparkwright.forks import package_index
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import FileLock, SourceError
from sparkwright.release import keys, locked_set, policy
from sparkwright.release.publisher import Publisher

#: The address of the index; no server answers there (RFC 2606).
URL = "https://staging.invalid/"


class GateEnvironment(msgspec.Struct, frozen=True):
    """The Python of an environment, and the wheel of vLLM that it was installed from."""

    python: Path
    wheel: Path


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


def environment(context: RunContext, side: str, wheel: Path) -> GateEnvironment:
    """
    Return the environment ``ours``, of the set around the wheels beside *wheel*, or ``stock``,
    of the official wheel and the other packages of that set. It is made unless one with the same
    digest is whole, and again if a file of its wheel is missing or differs.

    Raises:
        not-provided: The stack has no official wheel for this machine.
        UsageError, set-unresolved, command-failed, offline, source-unreachable, disk-full: It
            cannot be made.
    """
    root, result = location(context, side, wheel)
    python, path = result.python, result.wheel
    complete = root / "complete"
    if complete.exists() and (not path.exists() or wheel_identity.mismatches(python, path)):
        console.note(f"{root.name} was changed, and is made again")
        complete.unlink()
    with toolchain.fill_once(context.store, root) as lacking:
        if lacking:
            shutil.rmtree(root, ignore_errors=True)
            if side == "ours":
                install_built(context, wheel.parent, root)
            else:
                ours = environment(context, "ours", wheel)
                install_stock(context, root, wheel_identity.site_packages(ours.python))
    return result


def location(context: RunContext, side: str, wheel: Path) -> tuple[Path, GateEnvironment]:
    """
    Return the folder of `environment`, and what it returns once that is made; raise `not-provided`.
    """
    wheels = sorted(sha256_file(path) for path in list_folder(wheel.parent, "*.whl"))
    base = official_wheel(context) if side == "stock" else None
    digest, rule = base.sha256 if base else "", _set_rule(context)
    inputs = (side, wheels, digest, context.machine, sys.version, rule)
    root = context.store.root / "environments" / f"{side}-{content_key('gate', inputs)[:16]}"
    if base:
        return root, GateEnvironment(root / "bin" / "python", root / "wheel" / base.filename)
    return root, GateEnvironment(root / "current" / "bin" / "python", wheel)


def official_wheel(context: RunContext) -> FileLock:
    """
    Return the official wheel under the stack's graft.

    Raises:
        not-provided: The stack has none for this machine.
    """
    locked = [context.lock.forks[fork].bases.get(context.machine) for fork in context.forks]
    bases = [base for base in locked if base]
    if len(bases) != 1:
        raise SourceError(
            "not-provided",
            f"Stack {context.project.stack} has no official wheel for {context.machine}.",
        )
    return bases[0]


def install_stock(context: RunContext, environment: Path, like: Path | None = None) -> Path:
    """
    Install the official wheel under the stack's graft into *environment*, which is made anew, with
    a set that is locked by hash.

    Args:
        like: The site-packages of our environment, whose other packages are taken.

    Returns:
        The wheel, in the folder ``wheel`` of the environment.

    Raises:
        not-provided: The stack has no official wheel for this machine.
        offline, source-unreachable, source-mismatch, set-unresolved, command-failed: It cannot be
            fetched or installed.
    """
    base = official_wheel(context)
    path = package_index.obtain(
        context.store, base.name, base.filename, base.sha256, offline=context.offline
    )
    installed = metadata.distributions(path=[str(like)]) if like else ()
    pins = [f"{each.name}=={each.version}" for each in installed if "+spark." not in each.version]
    rule = _set_rule(context)
    rule = replace(
        rule,
        pythons=(f"{sys.version_info.major}.{sys.version_info.minor}",),
        requires=(*rule.requires, *sorted(pins)),
    )
    project = canonicalize_name(base.name)
    address = path.as_uri()
    own = {LockedWheel(project, base.version, base.filename, address, base.sha256): path}
    machine: Machine = "x86_64" if context.machine == "x86_64" else "aarch64"
    locked = locked_set.resolve(own, machine, rule, index_url=package_index.index_url())
    with tempfile.TemporaryDirectory(prefix="stock-") as folder:
        lock = Path(folder, "pylock.toml")
        lock.write_bytes(locked.lock)
        toolchain.install(context, environment, pylock.select(lock), f"the stock {base.name}")
    copy = environment / "wheel" / base.filename
    copy.parent.mkdir(exist_ok=True)
    shutil.copy2(path, copy)
    return copy


def _set_rule(context: RunContext) -> policy.SetRule:
    file = policy.load(context.project.root, context.project.spec.arch).file
    return file.sets.get(context.project.stack, policy.SetRule())
