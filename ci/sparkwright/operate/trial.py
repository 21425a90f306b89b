"""
Environments to gate in: the whole matched set around wheels that were just built, and the stock wheel beside which they are measured.

What is gated has to be installed as users will have it. So the wheels go through a publication and an installation like any others, in an
index of their own that nobody else sees, signed with a key that is thrown away.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from sparkwright.core import process
from sparkwright.core.console import console
from sparkwright.core.errors import UsageError
from sparkwright.forks import package_index
from sparkwright.forks.context import RunContext, StandaloneContext
from sparkwright.forks.stack import SourceError
from sparkwright.release.client import install
from sparkwright.release.client.install import Done, Wish
from sparkwright.release.decide import policy as policies
from sparkwright.release.publish import sequence
from sparkwright.release.publish.prepare import Publisher
from sparkwright.release.publish.sequence import Asked
from sparkwright.release.signing.keys import KeySigner
from sparkwright.release.signing.trust import Trust

#: Where the index says that it is served; nobody ever answers there (RFC 2606).
URL = "https://trial.invalid/"


def built(context: RunContext, folder: Path, into: Path) -> Done:
    """
    Install the set around the wheels in *folder* into the environment *into*; verdicts are not asked for.

    Raises:
        UsageError: There is no wheel; and what publishing and installing raise.
    """
    wheels = tuple(sorted(folder.absolute().glob("*.whl")))
    if not wheels:
        raise UsageError("usage", f"There is no wheel in {folder}.", todo="Build first: sparkwright build.")
    # Kept beside the wheels: `install --repair` takes files from there.
    place = folder.absolute() / "trial"
    shutil.rmtree(place, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="sparkwright-trial-") as scratch:
        signer, public = KeySigner.passing(), Path(scratch) / "key.pub"
        public.write_text(signer.public.pem, "utf-8")
        who = Publisher(context, place, signer, Trust((signer.public,), said="this trial"), policies.load(context.project.root))
        sequence.publish(who, Asked(wheels, "candidate", url=URL, reason="to be gated"))
        wish = Wish(index=str(place), keys=(public,), signed_for=URL, channel="candidate")
        outside = StandaloneContext(context.store, context.offline, context.mirrors, state=Path(scratch) / "state")
        return install.install(outside, into, wish)


def stock(context: RunContext, into: Path) -> Path:
    """
    Install the official wheel that the stack is grafted onto, with what it requires, into *into*; return the wheel.

    Raises:
        not-provided: The stack has none for this machine.
        offline, source-unreachable, source-mismatch, command-failed: It cannot be had or installed.
    """
    from uv import find_uv_bin

    found = [one for fork in context.forks if (one := context.lock.forks[fork].bases.get(context.machine))]
    if len(found) != 1:
        raise SourceError("not-provided", f"Stack {context.project.stack} has no official wheel for {context.machine}.")
    path = package_index.obtain(context.store, found[0].name, found[0].filename, found[0].sha256, offline=context.offline)
    env = process.clean_environment(UV_NO_CONFIG="1", UV_INDEX_URL=package_index.index_url(), HOME=os.environ.get("HOME", ""))
    log = context.store.folder("logs") / "stock.log"
    with console.step(f"the stock {found[0].filename.split('-')[0]} {found[0].version} in {into}"):
        process.run([find_uv_bin(), "pip", "install", "--quiet", "--python", into / "bin" / "python", path], log=log, env=env)
    kept = into / "wheel" / found[0].filename
    kept.parent.mkdir(exist_ok=True)
    kept.unlink(missing_ok=True)
    os.link(path, kept) if path.stat().st_dev == into.stat().st_dev else shutil.copy2(path, kept)
    return kept

