"""
Installing a set: the first time, a second release that shares all but one wheel, and with nothing to do, against uv with the same wheels.

The set is made up in the size of a real one: files in many packages, and one wheel that cannot be compressed. Ours also verifies the
metadata of the index, every member of every wheel before anything is created, and every installed file.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from uv import find_uv_bin

import measure

sys.path.insert(0, str(measure.ROOT))

from tests.client.world import SITE, User, Wheel, World, wheel

#: Promised seconds with nothing to do; a second release may take 2 s more than `uv pip sync`.
NOTHING = 0.5
PACKAGES, FILES, MEGABYTES = 150, 200, 200


def others() -> list[Wheel]:
    """Return the wheels of the set that are not ours."""
    text = b"value = 1\n" * 40
    made = [wheel("torch", "2.14.0", {"torch/data.bin": os.urandom(MEGABYTES * 1_000_000)})]
    for number in range(PACKAGES):
        members = {f"package_{number}/part/module{place}.py": text for place in range(FILES)}
        made.append(wheel(f"package-{number}", files=members))
    return made


def client(user: User, *words: str) -> None:
    """Run the client as its user does."""
    compiled = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(user.world.folder / "compiled")}
    environment = {**user.environment, **compiled, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "sparkwright.client.main", *words]
    subprocess.run(command, env=environment, check=True, capture_output=True)


def uv(folder: Path, cache: Path, lock: Path) -> None:
    """Make an environment from *lock* with uv alone."""
    shutil.rmtree(folder, ignore_errors=True)
    environment = {**os.environ, "UV_CACHE_DIR": str(cache), "UV_NO_CONFIG": "1"}
    subprocess.run([find_uv_bin(), "venv", "-q", "--python", sys.executable, folder], env=environment, check=True)
    sync = [find_uv_bin(), "pip", "sync", "-q", "--python", str(folder), "--require-hashes", str(lock)]
    subprocess.run(sync, env=environment, check=True, capture_output=True)


options = measure.arguments(__doc__ or "")
with tempfile.TemporaryDirectory() as name, World(Path(name)).served() as world:
    shared = others()
    locks = {}
    for number in (1, 2):
        ours = wheel("demo", f"1.{number}")
        release = world.publish(f"2026.11.{number}", [ours], shared)
        locks[number] = Path(name) / f"pylock.{number}.toml"
        locks[number].write_bytes(world.lock([ours], shared))

    def first() -> None:
        """Install from an empty cache."""
        user = world.user()
        client(user, "install", "--trust", world.fingerprint, "--version", "2026.11.1")
        shutil.rmtree(user.folder)

    def first_uv() -> None:
        """The same by uv."""
        uv(Path(name) / "uv", Path(name) / "uv-cache", locks[1])
        shutil.rmtree(Path(name) / "uv-cache")

    measure.compare("the first release", {"sparkwright": first, "uv pip sync": first_uv}, options)
    user = world.user()
    client(user, "install", "--trust", world.fingerprint, "--version", "2026.11.1")
    assert len(list((user.prefix / "current" / SITE).rglob("*.py"))) > PACKAGES * FILES
    uv(Path(name) / "uv", Path(name) / "uv-cache", locks[1])

    def second() -> None:
        """Install the second release anew, beside the first."""
        if (user.prefix / "releases/2026.11.2").exists():
            client(user, "uninstall", "2026.11.2")
        client(user, "install")

    measure.compare(
        "a second release (uninstalling it included)",
        {"sparkwright": second, "uv pip sync": lambda: uv(Path(name) / "uv", Path(name) / "uv-cache", locks[2])},
        options,
    )
    measure.compare("nothing to do", {"sparkwright": lambda: client(user, "install")}, options, NOTHING)
