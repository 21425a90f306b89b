"""
The second half of the demo: gate, publish, install as a user would, and serve what was installed.

The index lies in a folder and is served on loopback; the installer reads it over HTTP, and knows
nothing of the publisher but the public key.
"""

from __future__ import annotations

import sys
from pathlib import Path

from sparkwright.audit import wheel_reader
from sparkwright.builder import pipeline
from sparkwright.builder.environment.toolchain import Toolchain
from sparkwright.cli import gate, stages
from sparkwright.core import process
from sparkwright.core.errors import CommandError
from sparkwright.demo import base, toy
from sparkwright.forks.context import RunContext, StandaloneContext
from sparkwright.forks.stack import Project
from sparkwright.gates import host, ladder
from sparkwright.gates.athand import Inputs
from sparkwright.gates.ready import Ready
from sparkwright.release.client import back, install
from sparkwright.release.decide import policy as policies
from sparkwright.release.manifest.records import Channel
from sparkwright.release.publish import prepare, sequence
from sparkwright.release.signing import keys, trust

#: Where the index says that it is served; nobody answers there, so that the demo leans on nothing
#: but what it serves itself.
URL = "https://releases.example/"


def demo_folder(context: RunContext) -> Path:
    """Return the folder that everything of the demo lies in."""
    return context.project.root.parent


def write_policy(project: Project) -> None:
    """State the Python of this machine in the release policy: a matched set holds for one."""
    path, python = project.root / "ci" / "release.yaml", "{}.{}".format(*sys.version_info)
    path.write_text(path.read_text("utf-8").replace("PYTHON", python), "utf-8")


def wheels(context: RunContext) -> tuple[Path, ...]:
    """Return the wheels in ``dist``; their verdicts are stored there, too."""
    return tuple(
        pipeline.wheel_path(context, pipeline.build(context, fork)) for fork in context.forks
    )


def run_gates(context: RunContext) -> str:
    """Run the gates that need no GPU, and store the verdicts."""
    facts, states = host.facts(), []
    for path in wheels(context):
        inputs = Inputs(wheel=path)
        with Ready(context, inputs, lambda path: stages.audited(context, path), facts) as ready:
            verdicts = ladder.climb(
                [ready.rung(name) for name in ("G0", "G2")],
                stack=context.project.stack,
                wheel=wheel_reader.subject(path),
                device_code=ready.device_code,
                host=facts,
            )
        gate.keep(context, verdicts)
        states.append(verdicts.verdicts[0].state)
    if set(states) != {"pass"}:
        what = "G0 does not pass for every wheel of the demo."
        raise CommandError("command-failed", what, details=states, todo="Please report this.")
    return f"G0 passes for {len(states)} wheels; G2 is {verdicts.verdicts[1].state} without a GB10"


def publish(context: RunContext, channel: Channel | None) -> sequence.Published:
    """Publish the demo's wheels with a key of its own."""
    secret = demo_folder(context) / "release.key"
    if not secret.exists():
        keys.make(secret)
    signer = keys.KeySigner.load(secret)
    publisher = prepare.Publisher(
        context,
        demo_folder(context) / "releases",
        signer,
        trust.Trust((signer.public,), said="the demo"),
        policies.load(context.project.root),
    )
    return sequence.publish(
        publisher, sequence.Asked(wheels(context), channel, url=URL, reason="the demo")
    )


def publish_candidate(context: RunContext) -> str:
    """Publish as a candidate, and say what is missing."""
    release = publish(context, "candidate")
    missing = sorted(
        {f"{lack.rung} {lack.state}" for lacks in release.missing.values() for lack in lacks}
    )
    return f"{release.release} with {len(release.sent)} files, labelled: {', '.join(missing)}"


def uv(context: RunContext, *arguments: str | Path) -> None:
    """Run uv offline, with a cache of the demo's own."""
    from uv import find_uv_bin

    cache = str(demo_folder(context) / "uv")
    process.run(
        [find_uv_bin(), *arguments],
        log=context.store.folder("logs") / "install.log",
        env=process.clean_environment(UV_NO_CONFIG="1", UV_OFFLINE="1", UV_CACHE_DIR=cache),
    )


def make_environment(context: RunContext, tools: Toolchain, folder: Path) -> None:
    """Make an empty virtual environment at *folder*."""
    uv(context, "venv", "--quiet", "--clear", "--python", tools.python, folder)


def install_release(context: RunContext, tools: Toolchain) -> str:
    """Install from the served index into an empty environment, twice."""
    folder = demo_folder(context) / "user"
    make_environment(context, tools, folder)
    with base.serve(demo_folder(context) / "releases") as address:
        wish = install.Wish(
            index=f"{address}/",
            keys=(demo_folder(context) / "release.key.pub",),
            signed_for=URL,
            channel="candidate",
        )
        # The demo's indexes have one address and new keys each time, which a machine that remembers
        # would rightly refuse.
        client = StandaloneContext(context.store, state=demo_folder(context) / "state")
        first, again = (install.install(client, folder, wish) for _ in range(2))
    if (first.state, again.state) != ("installed", "there already"):
        raise CommandError(
            "command-failed",
            "The demo's installation is not what it should be.",
            details=[first.state, again.state],
        )
    return f"{len(first.came)} packages, verified; again: {again.state}"


def serve_model(context: RunContext) -> str:
    """Serve the model through the installed wheel, and compare its words with the learnt text."""
    model = toy.write(demo_folder(context) / "toy")
    log = context.store.folder("logs") / "toy.log"
    with toy.serving([demo_folder(context) / "user" / "bin" / "mini-vllm"], model, log) as url:
        answer = toy.ask(url, toy.PROMPT)
    if answer != toy.ANSWER:
        raise CommandError(
            "command-failed",
            "The installed wheel serves other words than its weights have learnt.",
            details=[answer, toy.ANSWER],
        )
    return f"{toy.PROMPT!r} → {answer[:40]!r}…"


def uninstall_release(context: RunContext) -> str:
    """Uninstall everything that the release installed."""
    folder = demo_folder(context) / "user"
    removed = back.uninstall(StandaloneContext(context.store), folder).removed
    return f"{len(removed)} packages removed"
