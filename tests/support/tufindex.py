"""
Small indexes made by the publisher's own code, and the client that reads them over HTTP.

    tufindex.publish(tmp_path / "index", keys, "2026.11.1")
    with tufindex.serve(tmp_path / "index") as url:
        tufindex.read(url, tmp_path / "client", root)
"""

from pathlib import Path

from tests.support import loopback

from sparkwright.client.index import open_index
from sparkwright.client.records import (
    Proof,
    Release,
    ReleaseState,
    ReleaseWheel,
)
from sparkwright.core.files import sha256_bytes
from sparkwright.release import keys, policy, repository

#: Serves a folder until the block ends, and yields its address.
serve = loopback.files
ROLES = policy.Roles(policy.RoleRule(365), policy.RoleRule(180), policy.RoleRule(30), policy.RoleRule(30))


def make_keys(folder: Path, *names: str) -> keys.Keys:
    """Return keys in *folder*: one of each kind, or those of *names*."""
    keys.make(folder, names or tuple(keys.KEY_ROLES))
    return keys.load([folder])


def release(name: str) -> tuple[Release, bytes]:
    """Return a release with one wheel, and what that holds."""
    stack, _, number = name.rpartition(".")
    data = name.encode()
    wheel = ReleaseWheel(
        name=f"demo-{number}-py3-none-any.whl", size=len(data), sha256=sha256_bytes(data), fork="vllm", project="demo",
        version=number, machine="any", metadata="0" * 64, uploaded="2026-11-22T07:30:00Z", proof=Proof(policy="0" * 64),
    )  # fmt: skip
    made = f"2026-11-22T07:30:{int(number) % 60:02}Z"
    return Release(name=name, stack=stack, made=made, wheels=(wheel,), locks=()), data


def state(release: Release) -> ReleaseState:
    """Return how *release* stands, a candidate."""
    return ReleaseState(
        stack=release.stack,
        made=release.made,
        channel="candidate",
        machines=("any",),
        pythons=("3.12",),
    )


def publish(folder: Path, held: keys.Keys, name: str) -> Release:
    """Add the release *name* to the index in *folder*."""
    made, data = release(name)
    with repository.IndexFolder(folder).changing(held, ROLES) as change:
        change.put(made.wheels[0], data)
        change.set_release(made, state(made))
    return made


def read(url: str, folder: Path, root: bytes) -> dict[str, tuple[Release, ReleaseState]]:
    """Return the releases that the client sees at *url*, by name; it trusts *root*, and keeps what it has seen in *folder*."""
    index = open_index(folder, url, sha256_bytes(root))
    return {name: (index.release(name), state) for name, state in index.states.items()}
