"""
Installing a set: the first time, a further release that shares all but one wheel, and with nothing to do, against uv with the same wheels.

The set is made up in the size of a real one: files in many packages, and one wheel that cannot be compressed. Ours also verifies the
metadata of the index, every member of every wheel before anything is created, and every installed file.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from uv import find_uv_bin

import measure
from sparkwright.core.files import sha256_file

sys.path.insert(0, str(measure.ROOT))

from tests.client.world import SITE, User, Wheel, World, wheel

#: Promised: seconds with nothing to do, and seconds of a second release beyond those of `uv pip sync`.
NOTHING, SECOND = 0.5, 2.0
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
    compiled = {
        "PYTHONDONTWRITEBYTECODE": "",
        "PYTHONPYCACHEPREFIX": str(user.world.folder / "compiled"),
    }
    environment = {**user.environment, **compiled, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "sparkwright.client.main", *words]
    subprocess.run(command, env=environment, check=True, capture_output=True)


def uv(folder: Path, cache: Path, lock: Path) -> None:
    """Make an environment from *lock* with uv alone."""
    environment = {**os.environ, "UV_CACHE_DIR": str(cache), "UV_NO_CONFIG": "1"}
    subprocess.run(
        [find_uv_bin(), "venv", "-q", "--python", sys.executable, folder],
        env=environment,
        check=True,
    )
    sync = [
        find_uv_bin(),
        "pip",
        "sync",
        "-q",
        "--python",
        str(folder),
        "--require-hashes",
        str(lock),
    ]
    subprocess.run(sync, env=environment, check=True, capture_output=True)


options = measure.arguments(__doc__ or "")
with tempfile.TemporaryDirectory() as name, World(Path(name)).served() as world:
    shared, locks, folder = others(), {}, Path(name)
    cache = folder / "uv-cache"
    # Each run installs a release that no run before it has installed; the first one warms up.
    for number in range(1, options.runs + 3):
        ours = wheel("demo", f"1.{number}")
        world.publish(f"2026.11.{number}", [ours], shared)
        locks[number] = folder / f"pylock.{number}.toml"
        locks[number].write_bytes(world.lock([ours], shared))

    def first() -> None:
        """Install from an empty cache."""
        user = world.user()
        client(user, "install", "--trust", world.fingerprint, "--version", "2026.11.1")
        shutil.rmtree(user.folder)

    def first_uv() -> None:
        """The same by uv."""
        uv(folder / "uv", folder / "uv-cache", locks[1])
        shutil.rmtree(cache)
        shutil.rmtree(folder / "uv")

    measure.compare("the first release", {"sparkwright": first, "uv pip sync": first_uv}, options)
    user = world.user()
    client(user, "install", "--trust", world.fingerprint, "--version", "2026.11.1")
    assert len(list((user.prefix / "current" / SITE).rglob("*.py"))) > PACKAGES * FILES
    uv(folder / "uv-1", cache, locks[1])
    numbers, numbers_uv = itertools.count(2), itertools.count(2)

    def second() -> None:
        """Install a further release, beside the others."""
        client(user, "install", "--version", f"2026.11.{next(numbers)}")

    def second_uv() -> None:
        """The same by uv."""
        number = next(numbers_uv)
        uv(folder / f"uv-{number}", cache, locks[number])

    measure.compare(
        "a further release",
        {"sparkwright": second, "uv pip sync": second_uv},
        options,
        SECOND,
        above=True,
    )
    measure.compare(
        "nothing to do", {"sparkwright": lambda: client(user, "install")}, options, NOTHING
    )
    large = next(user.cache.rglob("torch-*.whl"))
    measure.compare(
        f"the hash of {MEGABYTES} MB",
        {
            "sparkwright": lambda: sha256_file(large),
            "sha256sum": lambda: subprocess.run(
                ["sha256sum", large], check=True, capture_output=True
            ),
        },
        options,
    )
