"""
The demo's second half: gate, publish, install as a user would, and serve from what was installed.

The index lies in a folder and is served on loopback; the installer reads it over HTTP, and has
nothing of the publisher but the public key.
"""

from __future__ import annotations

import sys
from pathlib import Path

from sparkwright.audit import wheel_reader
from sparkwright.builder import pipeline
from sparkwright.builder.environment.toolchain import Toolchain
from sparkwright.cli import audit, gate
from sparkwright.core import process
from sparkwright.core.errors import CommandError
from sparkwright.demo import base, toy
from sparkwright.forks.context import RunContext, StandaloneContext
from sparkwright.gates import host, ladder
from sparkwright.gates.athand import Inputs
from sparkwright.gates.ready import Ready
from sparkwright.release.client import back, install
from sparkwright.release.client.install import Wish
from sparkwright.release.decide import policy as policies
from sparkwright.release.errors import InstallError
from sparkwright.release.manifest.records import Channel
from sparkwright.release.publish import sequence
from sparkwright.release.publish.prepare import Publisher
from sparkwright.release.publish.sequence import Asked, Published
from sparkwright.release.signing import keys
from sparkwright.release.signing.keys import KeySigner
from sparkwright.release.signing.trust import Trust

#: Where the index says that it is served; nobody answers there, so that the demo leans on nothing
#: but what it serves itself.
URL = "https://releases.example/"


def place(session: RunContext) -> Path:
    """Return the folder that everything of the demo lies in."""
    return session.project.root.parent


def write_policy(session: RunContext) -> None:
    """State the Python of this machine in the release policy: a matched set holds for one."""
    path = session.project.root / "ci" / "release.yaml"
    path.write_text(
        path.read_text("utf-8").replace("PYTHON", f"{sys.version_info[0]}.{sys.version_info[1]}"),
        "utf-8",
    )


def wheels(session: RunContext) -> tuple[Path, ...]:
    """Return the wheels in ``dist``, beside which verdicts lie."""
    return tuple(
        session.output / pipeline.wheel_path(session, pipeline.build(session, fork)).name
        for fork in session.forks
    )


def gated(session: RunContext) -> str:
    """Climb what can be climbed without a GPU, and keep the verdicts."""
    facts, said = host.facts(), []
    for path in wheels(session):
        inputs = Inputs(wheel=path)
        with Ready(session, inputs, lambda one: audit.audited(session, one), facts) as ready:
            made = ladder.climb(
                [ready.rung(name) for name in ("G0", "G2")],
                stack=session.project.stack,
                wheel=wheel_reader.subject(path),
                device_code=ready.device_code, host=facts,
            )  # fmt: skip
        gate.keep(session, made)
        said.append(made.verdicts[0].state)
    if set(said) != {"pass"}:
        raise CommandError(
            "command-failed",
            "G0 does not pass for every wheel of the demo.",
            details=said,
            todo="Please report this.",
        )
    return f"G0 passes for {len(said)} wheels; G2 is {made.verdicts[1].state} without a GB10"


def publish(session: RunContext, channel: Channel | None) -> Published:
    """Publish the demo's wheels with a key of its own."""
    secret = place(session) / "release.key"
    if not secret.exists():
        keys.make(secret)
    signer = KeySigner.load(secret)
    policy = policies.load(session.project.root)
    who = Publisher(
        session,
        place(session) / "releases",
        signer,
        Trust((signer.public,), said="the demo"),
        policy,
    )
    return sequence.publish(who, Asked(wheels(session), channel, url=URL, reason="the demo"))


def published(session: RunContext) -> str:
    """Publish as a candidate, and say what is missing."""
    done = publish(session, "candidate")
    missing = sorted(
        {f"{one.rung} {one.state}" for lacks in done.missing.values() for one in lacks}
    )
    return f"{done.release} with {len(done.sent)} files, labelled: {', '.join(missing)}"


def installed(session: RunContext, tools: Toolchain) -> str:
    """Install from the served index into an empty environment, twice."""
    from uv import find_uv_bin

    folder, log = place(session) / "user", session.store.folder("logs") / "install.log"
    env = process.clean_environment(
        UV_NO_CONFIG="1", UV_OFFLINE="1", UV_CACHE_DIR=str(place(session) / "uv")
    )
    process.run(
        [find_uv_bin(), "venv", "--quiet", "--clear", "--python", tools.python, folder],
        log=log,
        env=env,
    )
    with base.serve(place(session) / "releases") as address:
        wish = Wish(
            index=f"{address}/",
            keys=(place(session) / "release.key.pub",),
            signed_for=URL,
            channel="candidate",
        )
        # The demo's indexes have one address and new keys each time, which a machine that remembers
        # would rightly refuse.
        outside = StandaloneContext(session.store, state=place(session) / "state")
        first, again = (install.install(outside, folder, wish) for _ in range(2))
    if (first.state, again.state) != ("installed", "there already"):
        raise CommandError(
            "command-failed",
            "The demo's installation is not what it should be.",
            details=[first.state, again.state],
        )
    return f"{len(first.came)} packages, verified; again: {again.state}"


def served(session: RunContext) -> str:
    """Serve the model through the installed wheel, and compare its words with the learnt text."""
    model = toy.write(place(session) / "toy")
    log = session.store.folder("logs") / "toy.log"
    with toy.serving([place(session) / "user" / "bin" / "mini-vllm"], model, log) as url:
        answer = toy.ask(url, toy.PROMPT)
    if answer != toy.ANSWER:
        raise CommandError(
            "command-failed",
            "The installed wheel serves other words than its weights have learnt.",
            details=[answer, toy.ANSWER],
        )
    return f"{toy.PROMPT!r} → {answer[:40]!r}…"


def removed(session: RunContext) -> str:
    """Take it all out again: nothing of the set is left, and there is no way further back."""
    folder = place(session) / "user"
    gone = back.uninstall(StandaloneContext(session.store), folder)
    try:
        back.rollback(StandaloneContext(session.store), folder)
    except InstallError as error:
        if error.reference != "nothing-installed":
            raise
        return f"{len(gone.removed)} packages removed"
    raise CommandError(
        "command-failed",
        "An environment with nothing installed has something to go back to.",
        todo="Please report this.",
    )
