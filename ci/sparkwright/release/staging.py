"""
Environments to gate in: the set around unpublished wheels, and the official wheel as a baseline.

Both are installed as users will have it: by the client, from a set that is locked by hash with the
rules of the release policy.
"""

import shutil
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import msgspec
from packaging.utils import canonicalize_name, parse_wheel_filename

from sparkwright.bench.server import wheel_identity
from sparkwright.builder import toolchain
from sparkwright.client import install as client
from sparkwright.client.environment import PYTHON, SHORT, Marker, Prefix
from sparkwright.client.folders import locked_folder
from sparkwright.client.locked_wheels import LockedWheel
from sparkwright.core.console import console
from sparkwright.core.files import content_key, list_folder, sha256_bytes, sha256_file
from sparkwright.forks import package_index
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import FileLock, SourceError, is_ours
from sparkwright.release import locked_set, policy


class GateEnvironment(msgspec.Struct, frozen=True):
    """The Python of an environment, and the wheel of vLLM that it was installed from."""

    python: Path
    wheel: Path


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
                _install(context, root, _built(context, wheel.parent), _set_rule(context))
            else:
                ours = environment(context, "ours", wheel)
                _install_stock(context, root, path, wheel_identity.site_packages(ours.python))
    return result


def location(context: RunContext, side: str, wheel: Path) -> tuple[Path, GateEnvironment]:
    """
    Return the folder of `environment`, and what it returns once that is made; raise `not-provided`.
    """
    wheels = sorted(map(sha256_file, list_folder(wheel.parent, "*.whl")))
    base = official_wheel(context) if side == "stock" else None
    digest, rule = base.sha256 if base else "", _set_rule(context)
    inputs = (side, wheels, digest, context.machine, sys.version, rule)
    root = context.store.root / "environments" / f"{side}-{content_key('gate', inputs)[:16]}"
    path = root / "wheel" / base.filename if base else wheel
    return root, GateEnvironment(root / "current" / "bin" / "python", path)


def official_wheel(context: RunContext) -> FileLock:
    """
    Return the official wheel under the stack's graft.

    Raises:
        not-provided: The stack has none for this machine.
    """
    locked = (context.lock.forks[fork].bases.get(context.machine) for fork in context.forks)
    bases = list(filter(None, locked))
    if len(bases) != 1:
        raise SourceError(
            "not-provided",
            f"Stack {context.project.stack} has no official wheel for {context.machine}.",
        )
    return bases[0]


def _built(context: RunContext, folder: Path) -> dict[LockedWheel, Path]:
    """Return the wheels in *folder* that are for this machine."""
    own: dict[LockedWheel, Path] = {}
    for path in list_folder(folder, "*.whl"):
        project, version, _, tags = parse_wheel_filename(path.name)
        if any(tag.platform.endswith((context.machine, "any")) for tag in tags):
            sha256 = sha256_file(path)
            own[LockedWheel(project, str(version), path.name, path.as_uri(), sha256)] = path
    return own


def _install_stock(context: RunContext, root: Path, path: Path, like: Path) -> None:
    """
    Install the official wheel under the stack's graft below *root*, with a set that is locked by
    hash and has no edits of ours.

    Args:
        path: Where the wheel is put.
        like: The site-packages of our environment, whose other packages are taken.
    """
    base, rule = official_wheel(context), _set_rule(context)
    path.parent.mkdir(parents=True)
    shutil.copy2(package_index.obtain_locked(context, base), path)
    installed = metadata.distributions(path=[str(like)])
    pins = [f"{each.name}=={each.version}" for each in installed if not is_ours(each.version)]
    rule = msgspec.structs.replace(rule, requires=(*rule.requires, *sorted(pins)), edits=())
    locked = LockedWheel(
        canonicalize_name(base.name), base.version, base.filename, path.as_uri(), base.sha256
    )
    _install(context, root, {locked: path}, rule)


def _install(
    context: RunContext, root: Path, own: Mapping[LockedWheel, Path], rule: policy.SetRule
) -> None:
    """Install the set around the wheels *own* as the current release below *root*."""
    prefix = Prefix(root)
    locked = locked_set.resolve(
        own,
        context.machine,
        msgspec.structs.replace(rule, pythons=(SHORT,)),
        index_url=package_index.index_url(),
    )
    name = f"{context.project.stack}.1"
    marker = Marker(
        name=name,
        folder=str(prefix.environment_folder(name)),
        index="",
        python=PYTHON,
        key=sha256_bytes(locked.lock),
        packages=locked.packages,
        channel="candidate",
        wheels={wheel.project: wheel.sha256 for wheel in locked.wheels},
    )
    cache = context.store.folder("downloads", "staging")
    with prefix.locked(), locked_folder(cache):
        checked, replaced = client.prepare_wheels(
            prefix,
            cache,
            locked.wheels,
            edits=rule.edits,
            overlays=rule.overlays,
            inexact=rule.inexact_records,
        )
        client.make_current(prefix, cache, marker, checked, replaced)


def _set_rule(context: RunContext) -> policy.SetRule:
    rules = policy.load(context.project.root, context.project.spec.arch)
    return rules.file.sets.get(context.project.stack, policy.SetRule())
