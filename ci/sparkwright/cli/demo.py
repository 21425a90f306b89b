"""
``sparkwright demo``: every stage on three miniature upstreams, with the real git, CMake and nvcc.

Only the downloaded tools are reused. Three stages must fail, or the demo fails: the plan without
the rule for 12.1, the audit of the official wheel, and publishing as verified without a GB10. The
release is served on loopback; the installer knows nothing of its publisher but the public key.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from sparkwright import demo as package
from sparkwright.audit import report, wheel
from sparkwright.builder import pipeline, pylock, toolchain
from sparkwright.builder.arch import plan
from sparkwright.builder.workspace import source_tree
from sparkwright.cli import gate as gate_command
from sparkwright.cli import options
from sparkwright.core import process
from sparkwright.core.console import console
from sparkwright.core.errors import CommandError, SparkwrightError
from sparkwright.core.store import Store
from sparkwright.demo import upstreams
from sparkwright.forks import fetch, lock, resolve
from sparkwright.forks.context import RunContext, StandaloneContext
from sparkwright.forks.stack import Project, SourceError
from sparkwright.gates import host, ladder
from sparkwright.gates.athand import Inputs
from sparkwright.gates.ready import Ready
from sparkwright.release.client import back, install
from sparkwright.release.decide import policy as policies
from sparkwright.release.manifest.records import Channel
from sparkwright.release.publish import sequence
from sparkwright.release.publish.prepare import Publisher
from sparkwright.release.signing import keys, trust

#: Where the index says that it is served; nobody answers there, so that the demo leans on nothing
#: but what it serves itself.
URL = "https://releases.example/"
#: Folders of the store that the demo shares: they hold only files of the package index.
SHARED = ("downloads", "environments", "cache")


def add_arguments(parsers: Mapping[str, argparse.ArgumentParser]) -> None:
    """Add the arguments of ``demo``."""
    parsers["demo"].set_defaults(run=demo)
    options.add_compiling(parsers["demo"])


def demo(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run every stage and print a line for each."""
    context = options.checkout(arguments)
    with context.store.lock("demo"):
        done = list(_run(prepare(context, arguments.output)))
    rows = [[name, says, f"{seconds:.1f}"] for name, says, seconds in done]
    console.table("demo", ["stage", "result", ">seconds"], rows, result=True)
    fields = ("name", "says", "seconds")
    return {"stages": [dict(zip(fields, stage, strict=True)) for stage in done]}


def prepare(context: RunContext, output: Path | None) -> RunContext:
    """
    Return a context with a fresh demo project, and a store that shares the downloaded tools.

    Raises:
        not-provided: There is no checkout with gate policies, of which the demo has none.
    """
    folder = context.store.root / "demo"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(Path(package.__file__).parent / "project", folder / "project")
    gates = context.project.root / "ci" / "gates"
    if not gates.is_dir():
        gates = options.find_root() / "ci" / "gates"
    if not gates.is_dir():
        raise SourceError("not-provided", f"There are no gate policies in {gates}.")
    shutil.copytree(gates, folder / "project" / "ci" / "gates")
    store = folder / "store"
    store.mkdir()
    for name in SHARED:
        (store / name).symlink_to(context.store.folder(name), target_is_directory=True)
    project = Project(folder / "project", "demo")
    write_policy(project)
    return dataclasses.replace(
        context,
        project=project,
        store=Store(store),
        forks=tuple(project.spec.forks),
        mirrors=upstreams.write_repositories(folder / "upstreams"),
        source="git",
        output=output.absolute() if output else folder / "dist",
    )


def _run(context: RunContext) -> Iterator[tuple[str, str, float]]:
    """Run every stage, and yield its name, its result in one line, and its seconds."""
    began = time.monotonic()
    tools = toolchain.obtain(context)
    says = f"{len(pylock.wheels(context.project))} wheels by hash, nvcc among them"
    yield "tools", says, time.monotonic() - began
    with official(context, tools) as wheel_path:
        for name, work in _stages(context, tools, wheel_path).items():
            began = time.monotonic()
            says = work()
            yield name, says, time.monotonic() - began


def _stages(
    context: RunContext, tools: toolchain.Toolchain, official_wheel: Path
) -> dict[str, Callable[[], str]]:
    """Return the stages after the tools."""
    return {
        "lock": lambda: f"{len(lock_all(context).forks)} commits and a base wheel, by hash",
        "fetch": lambda: _fetch(context),
        "apply": lambda: _apply(context),
        "plan without the rules": lambda: _must_fail(
            "arch-mismatch", lambda: plan.check(_bare(_planned(context)))
        ),
        "plan": lambda: _plan(context),
        "build": lambda: _build(context),
        "audit of the official wheel": lambda: _must_fail(
            "audit-failed",
            lambda: report.raise_for_findings(wheel.cached_audit(context, official_wheel)),
        ),
        "audit": lambda: _audit(context),
        "build again": lambda: _build(context),
        "libraries load": lambda: _load(context, tools),
        "gate": lambda: run_gates(context),
        "publish as verified": lambda: _must_fail(
            "verified-refused", lambda: publish(context, None)
        ),
        "publish": lambda: publish_candidate(context),
        "install": lambda: install_release(context, tools),
        "serve": lambda: serve_model(context),
        "uninstall": lambda: uninstall_release(context),
    }


@contextlib.contextmanager
def official(context: RunContext, tools: toolchain.Toolchain) -> Iterator[Path]:
    """
    Make the official wheel of the mini vLLM, and serve it in the block on a loopback index, which
    is then the package index of this process.
    """
    folder = context.project.root.parent
    with console.step("the mini upstream releases its official wheel"):
        target = toolchain.target(context, tools)
        wheel_path = upstreams.write_base_wheel(
            folder / "index" / "files",
            nvcc=target.cuda / "bin" / "nvcc",
            env=target.environment(),
            scratch=folder / "scratch",
            machine=context.machine,
            compiler=toolchain.compilers(context)[0][0] if context.cross else "",
        )
        upstreams.write_index(folder / "index", wheel_path)
    with upstreams.serve(folder / "index") as address:
        os.environ["SPARKWRIGHT_INDEX_URL"] = f"{address}/simple/"
        yield wheel_path


def lock_all(context: RunContext) -> lock.Lock:
    """Lock the demo's stack against its repositories and its index."""
    locked = resolve.resolve(context)
    context.project.lock_file.write_text(lock.render(locked), "utf-8")
    return locked


def _fetch(context: RunContext) -> str:
    return ", ".join(f"{fork} {fetch.fetch(context, fork).tree[:10]}" for fork in context.forks)


def _apply(context: RunContext) -> str:
    trees = [source_tree(context, fork) for fork in context.forks]
    patches, sites = sum(len(tree.steps) for tree in trees), sum(len(tree.sites) for tree in trees)
    return f"{patches} patches, {sites} rule sites"


def _planned(context: RunContext) -> plan.PlanComparison:
    tree = source_tree(context, "vllm")
    return plan.obtain(context, toolchain.obtain(context), tree)


def _bare(plans: plan.PlanComparison) -> plan.PlanComparison:
    return plan.PlanComparison(plans.key, plans.before, plans.before)


def _plan(context: RunContext) -> str:
    planned = _planned(context)
    plan.show(planned)
    plan.check(planned)
    counts = planned.after.counts.items()
    return ", ".join(f"{count} {state}" for state, count in counts if count)


def _build(context: RunContext) -> str:
    return ", ".join(pipeline.build(context, fork).filename.split("-")[0] for fork in context.forks)


def _audit(context: RunContext) -> str:
    for path in wheels(context):
        audited = wheel.cached_audit(context, path)
        report.show(audited)
        report.raise_for_findings(audited)
    return f"{len(context.forks)} wheels pass the audit"


def _must_fail(reference: str, work: Callable[[], object]) -> str:
    try:
        work()
    except SparkwrightError as error:
        if error.reference != reference:
            raise
        return f"fails as expected: {error.reference}: {error.what}"
    raise CommandError(
        "command-failed",
        f"A stage of the demo that must fail with {reference} did not fail.",
        todo="Please report this; a check no longer works.",
    )


_LOAD = """\
import ctypes, importlib, importlib.metadata, pathlib, sys
package = importlib.import_module("mini_vllm")
for library in sorted(pathlib.Path(package.__file__).parent.glob("*.so")):
    ctypes.CDLL(str(library))
    print("loaded", library.name)
import mini_flashinfer, mini_cutlass
print(importlib.metadata.version("mini-vllm"), package.__version__)
assert importlib.metadata.version("mini-vllm") == package.__version__
"""


def _load(context: RunContext, tools: toolchain.Toolchain) -> str:
    """Install the wheels into an empty environment and load their libraries."""
    folder = context.project.root.parent / "environment"
    make_environment(context, tools, folder)
    uv(
        context,
        "pip",
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
        "--python",
        folder / "bin" / "python",
        *wheels(context),
    )
    loaded = process.output([folder / "bin" / "python", "-c", _LOAD]).splitlines()
    count = sum(line.startswith("loaded") for line in loaded)
    return f"{count} libraries load; version {loaded[-1].split()[0]}"


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
        with Ready(context, inputs, lambda path: wheel.cached_audit(context, path), facts) as ready:
            verdicts = ladder.climb(
                [ready.rung(name) for name in ("G0", "G2")],
                stack=context.project.stack,
                wheel=wheel.read_subject(path),
                device_code=ready.device_code,
                host=facts,
            )
        gate_command.keep(context, verdicts)
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
    publisher = Publisher(
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


def make_environment(context: RunContext, tools: toolchain.Toolchain, folder: Path) -> None:
    """Make an empty virtual environment at *folder*."""
    uv(context, "venv", "--quiet", "--clear", "--python", tools.python, folder)


def install_release(context: RunContext, tools: toolchain.Toolchain) -> str:
    """Install from the served index into an empty environment, twice."""
    folder = demo_folder(context) / "user"
    make_environment(context, tools, folder)
    with upstreams.serve(demo_folder(context) / "releases") as address:
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
    model = upstreams.write_model(demo_folder(context) / "toy")
    log = context.store.folder("logs") / "toy.log"
    with upstreams.serving(
        [demo_folder(context) / "user" / "bin" / "mini-vllm"], model, log
    ) as url:
        answer = upstreams.ask(url, upstreams.PROMPT)
    if answer != upstreams.ANSWER:
        raise CommandError(
            "command-failed",
            "The installed wheel serves other words than its weights have learnt.",
            details=[answer, upstreams.ANSWER],
        )
    return f"{upstreams.PROMPT!r} → {answer[:40]!r}…"


def uninstall_release(context: RunContext) -> str:
    """Uninstall everything that the release installed."""
    folder = demo_folder(context) / "user"
    removed = back.uninstall(StandaloneContext(context.store), folder).removed
    return f"{len(removed)} packages removed"
