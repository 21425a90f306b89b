"""
The command line: verbs to calls, failures to exit codes.

0: done. 1: an expected failure. 2: wrong usage. 3: a fault of ours, with a log. 130: interrupted. ``main`` wraps ``run``, so
that tests can call the inner one and see the exceptions.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import platform
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from sparkwright import __version__, reviewed
from sparkwright.cli import (
    clientoptions,
    evidenceoptions,
    gateoptions,
    imageoptions,
    notesoptions,
    numbers,
    publishoptions,
    runneroptions,
    serveoptions,
    siteoptions,
    upkeepoptions,
)
from sparkwright.console import OutputClosed, console, open_streams
from sparkwright.errors import NotProvided, SparkwrightError, UsageError
from sparkwright.forks.session import Outside, Session, mirror_map
from sparkwright.forks.spec import MACHINES, Project
from sparkwright.store import Store, room_guard

#: Verb → what it does; each is a module of this package with a function ``run(session, arguments) -> int``.
VERBS = {
    "doctor": "say what this machine has, what each verb would do with it, and what to install",
    "lock": "resolve the stack to hashes (network; its result is reviewed in git)",
    "fetch": "bring every locked source into the store, verified",
    "apply": "apply the patch series and the arch rules, in git's object database",
    "plan": "configure for real and show what every CUDA unit will be compiled for",
    "build": "make the wheels, and audit them",
    "audit": "say what a wheel really holds, against ci/audit.yaml",
    "modules": "say what of a model is quantised, what a token reads of it, and how fast memory lets it be",
    "gate": "climb the ladder of gates: machine code, numerics, the GPU, a served model, throughput",
    "bench": "measure how fast a model is served, or calibrate this machine for the throughput gate",
    "verify": "measure what others published of a recipe, and say whether it holds on this machine",
    "serve": "serve a model with an installed set, by its recipe: memory, flags and ports checked first, watched, stopped cleanly",
    "health": "tell whether the server answers, works, loads, hangs, is dead, or lost a machine of its cluster",
    "report": "show results of measurements as a page, as Markdown or here",
    "notes": "show the notes of a published release, and whether anybody still needs this fork",
    "rebuild": "build a finished wheel again, elsewhere, and say whether the same inputs gave the same wheel",
    "publish": "make wheels whose verdicts allow it a release of an index, signed; nothing is overwritten",
    "promote": "move a candidate to verified, where new verdicts show all that is asked for",
    "yank": "stop offering a release, with the reason; its files stay",
    "retain": "remove old candidates from an index, with the files that nothing else refers to",
    "refresh": "sign an index again, so that clients go on to believe it, and remove what killed runs left",
    "install": "install a release into a Python environment: signature, evidence and hashes first, then the whole matched set",
    "rollback": "go back: an environment to the set before the present one, or an index to the release before its newest",
    "uninstall": "remove from an environment exactly what `install` put there",
    "key": "make a key that signs an index, or show the fingerprint of one",
    "evidence": "check what is claimed of a wheel file, by whom, and whether it holds",
    "pick": "pin an upstream pull request in the ledger, verified, and let the stack carry it",
    "status": "show what each stack carries, how old it is, why, and whether it is still needed",
    "bisect": "find the commit or release at which a patch stops applying, or what changed the answer of a command",
    "rebase": "make a worktree with the series as commits, on the locked source or on another base",
    "export": "write the commits of the worktree back to patch files",
    "bump": "take a fork to another upstream release, with its picks and patches, or not at all",
    "drift": "try the series on later releases and on upstream's newest commit, writing nothing",
    "night": "write down what came of a run, whatever it was: a record that nothing ever changes",
    "site": "make static pages of releases, speeds, patch debt, drift and nights, from the evidence alone",
    "image": "make an image that serves a published release, and push it, with its digest recorded",
    "runner": "set up a Spark that takes jobs of a repository, check it, and do one job at a time",
    "demo": "take three miniature upstreams through every stage, in two minutes",
}

DEFAULT_STACK = "2026.11"

#: Verbs that work without a checkout, whatever their options; `needs_checkout` has those that do with some.
OUTSIDE = frozenset(("evidence", "health", "key", "night", "serve", "uninstall"))


def find_root() -> Path:
    """Return the checkout to work on: the nearest folder upwards that holds stacks, else the one this program lies in."""
    if found := reviewed.checkout():
        return found
    raise NotProvided(
        f"There is no forks/*/stack.yaml in {Path.cwd()} or above.", todo="Change to a checkout of sparkwright, or name it with --root."
    )


def default_cache() -> Path:
    """Return the cache directory: ``SPARKWRIGHT_CACHE_DIR``, else the platform's place for caches."""
    if folder := os.environ.get("SPARKWRIGHT_CACHE_DIR"):
        return Path(folder)
    import platformdirs

    return Path(platformdirs.user_cache_dir("sparkwright", appauthor=False))


def parser() -> argparse.ArgumentParser:
    """Return the parser of all verbs."""
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--stack", help=f"which stack (default: {DEFAULT_STACK})")
    shared.add_argument("--fork", action="append", default=[], metavar="FORK", help="only this fork; may be repeated")
    shared.add_argument("--source", choices=("auto", "git", "sdist", "wheel"), default="auto", help="which kind of source (default: auto)")
    shared.add_argument("--mirror", action="append", default=[], metavar="URL=REPLACEMENT", help="reach URLs that begin so elsewhere")
    shared.add_argument("--offline", action="store_true", help="use what is in the store, never the network")
    shared.add_argument(
        "--cache-dir", type=Path, metavar="DIR", help="where the store is (default: SPARKWRIGHT_CACHE_DIR, else the user's cache)"
    )
    shared.add_argument("--root", type=Path, metavar="DIR", help="the checkout to work on (default: found from here upwards)")
    shared.add_argument("--json", action="store_true", help="print one JSON document on standard output")
    shared.add_argument("-v", "--verbose", action="store_true", help="say more")
    top = argparse.ArgumentParser(prog="sparkwright", description="Patched, audited wheels for NVIDIA DGX Spark.")
    top.add_argument("--version", action="version", version=f"sparkwright {__version__}")
    verbs = top.add_subparsers(dest="verb", required=True, metavar="VERB")
    made = {
        verb: verbs.add_parser(verb, help=text, description=text[0].upper() + text[1:] + ".", parents=[shared])
        for verb, text in VERBS.items()
    }
    for verb in ("plan", "build"):
        made[verb].add_argument(
            "--without-rule", action="append", default=[], metavar="RULE", help="leave an arch rule out, to see what it does"
        )
        made[verb].add_argument("--full", action="store_true", help="from source and nothing else, by the project's own build backend")
    for verb in ("plan", "build", "audit"):
        made[verb].add_argument("--target", choices=MACHINES, default="", help="the machine that wheels are made for (default: this one)")
    for verb in ("build", "rebuild", "demo"):
        made[verb].add_argument("--jobs", type=numbers.positive, default=0, help="units compiled at once (default: one per core)")
        made[verb].add_argument(
            "--memory",
            type=numbers.gigabytes,
            default=0,
            metavar="GB",
            help="what compilers may hold together (default: 85 %% of what is available)",
        )
        made[verb].add_argument("--output", type=Path, metavar="DIR", help="where the wheels go (default: dist)")
    _build(made["build"])
    upkeepoptions.options(made)
    _audit(made["audit"])
    imageoptions.options(made["image"])
    gateoptions.options(made["gate"])
    gateoptions.bench(made["bench"])
    gateoptions.verify(made["verify"])
    made["gate"].add_argument("--output", type=Path, metavar="DIR", help="where the verdicts are kept (default: dist)")
    _rebuild(made["rebuild"])
    _modules(made["modules"])
    _report(made["report"])
    clientoptions.options(made)
    notesoptions.options(made["notes"])
    publishoptions.options(made)
    runneroptions.options(made["runner"])
    serveoptions.options(made)
    evidenceoptions.evidence(made["evidence"])
    siteoptions.options(made)
    made["key"].add_argument("file", type=Path, metavar="FILE", help="the private key; its public half lies beside it in FILE.pub")
    made["key"].add_argument("--show", action="store_true", help="make nothing; show what people know the key in FILE by")
    return top


def _build(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--only", default="", metavar="UNIT", help="compile this one source, whatever its state, and make no wheel")
    verb.add_argument(
        "--unit-timeout", type=numbers.positive, default=0, metavar="MINUTES", help="when a compiler that uses no CPU hangs (default: 30)"
    )
    verb.add_argument("--aot", action="store_true", help="make the wheel of FlashInfer's modules, compiled ahead of time, too")
    verb.add_argument("--container", action="store_true", help="build in a container without a network, rights or root")
    verb.add_argument(
        "--platform", choices=("linux/arm64", "linux/amd64"), default="", help="what the container is for (default: the engine's own)"
    )
    verb.add_argument(
        "--base", default="", metavar="IMAGE@sha256:HEX", help="base of the container's image (default: `image` in environment.yaml)"
    )


def _audit(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("wheels", nargs="*", type=Path, metavar="WHEEL", help="wheels to audit (default: those that build made)")
    verb.add_argument(
        "--judge", choices=("auto", "stack", "any"), default="auto",
        help="by the stack's policy, or by what every wheel must keep to (default: the latter for a wheel without our build record)",
    )  # fmt: skip
    verb.add_argument("--compare", action="store_true", help="show the wheels side by side, library by library")


def _rebuild(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("wheels", nargs="*", metavar="WHEEL|FORK", help="what to build again (default: each fork's last build)")
    verb.add_argument("--check", action="store_true", help="fail where a rebuild differs for no known reason")
    verb.add_argument("--cached", action="store_true", help="take compiled units from the compiler cache: quick, and no proof")
    verb.add_argument("--elsewhere", type=Path, metavar="DIR", help="build in this new folder, and keep it (default: a temporary one)")


def _modules(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("model", type=Path, metavar="MODEL_DIR", help="folder of the model; only the headers of its weights are read")
    verb.add_argument("--batch", type=numbers.positive, default=1, metavar="N", help="requests that a step writes a token for (default: 1)")
    verb.add_argument("--context", type=numbers.count, default=0, metavar="N", help="tokens that each of them has before it (default: 0)")
    verb.add_argument(
        "--bandwidth", type=numbers.bandwidth, default=0, metavar="GB/s", help="how fast memory is read (default: as measured here)"
    )
    verb.add_argument(
        "--kv-cache-dtype", choices=("auto", "bfloat16", "fp8"), default="auto", help="type of the cache (default: as the model asks for)"
    )
    verb.add_argument("--server", default="", metavar="URL", help="hold what this vLLM server says against the folder")
    verb.add_argument("--python", type=Path, metavar="PYTHON", help="load the model in this environment's vLLM, and list its modules")


def _report(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("files", nargs="+", type=Path, metavar="FILE", help="a result of a measurement; the first is held against the others")
    verb.add_argument("--html", type=Path, metavar="FILE", help="write a page that needs nothing else")
    verb.add_argument("--markdown", type=Path, metavar="FILE", help="write Markdown for the page of a release")


def default_stack(root: Path) -> str:
    """Return the stack that is meant where none is named: ours, or in a checkout that lacks it the last of its own by name."""
    names = sorted(path.parent.name for path in root.glob("forks/*/stack.yaml"))
    return DEFAULT_STACK if DEFAULT_STACK in names or not names else names[-1]


def needs_checkout(arguments: argparse.Namespace) -> bool:
    """Does the verb work on a checkout of sparkwright? Whoever installs wheels has only the program, without its part ``full``."""
    return {
        "install": any(getattr(arguments, name, None) for name in ("onsite", "built", "stock")),
        "rollback": bool(getattr(arguments, "at", None)),
        "doctor": getattr(arguments, "into", None) is None,
        "notes": bool(getattr(arguments, "stock", ())),
        "runner": getattr(arguments, "action", "") in runneroptions.REVIEWED,
    }.get(arguments.verb, arguments.verb not in OUTSIDE)


def ground_of(arguments: argparse.Namespace) -> Session | Outside | None:
    """Return what the verb works on: a checkout, a store alone, or neither, where a unit or a hook runs it in a cage without a home."""
    if needs_checkout(arguments):
        return session_of(arguments)
    return None if arguments.verb == "runner" else outside_of(arguments)


def outside_of(arguments: argparse.Namespace) -> Outside:
    """Return the run that the command line describes, for a verb that works without a checkout."""
    return Outside(Store(arguments.cache_dir or default_cache()), arguments.offline, mirror_map(arguments.mirror))


def session_of(arguments: argparse.Namespace) -> Session:
    """
    Return the run that the command line describes.

    Raises:
        NotProvided: No such checkout, stack or fork.
        UsageError: A mirror is not of the form URL=REPLACEMENT.
    """
    root = (arguments.root or find_root()).absolute()
    project = Project(root, arguments.stack or default_stack(root))
    for name in arguments.fork:
        project.fork(name)
    return Session(
        project=project,
        store=Store(arguments.cache_dir or default_cache()),
        forks=tuple(name for name in project.spec.forks if not arguments.fork or name in arguments.fork),
        output=(getattr(arguments, "output", None) or root / "dist").absolute(),
        source=arguments.source,
        offline=arguments.offline,
        mirrors=mirror_map(arguments.mirror),
        jobs=getattr(arguments, "jobs", 0),
        memory=getattr(arguments, "memory", 0),
        without=tuple(getattr(arguments, "without_rule", ())),
        full=getattr(arguments, "full", False),
        target=getattr(arguments, "target", ""),
        unit_timeout=60 * getattr(arguments, "unit_timeout", 0),
    )


def run(words: Sequence[str]) -> int:
    """Run the command line *words*; expected failures come out as exceptions."""
    # A build in a container repeats the words inside it.
    arguments = parser().parse_args(words, argparse.Namespace(words=tuple(words)))
    console.json, console.verbose = arguments.json, arguments.verbose
    module = importlib.import_module(f"sparkwright.cli.{arguments.verb}")
    return int(module.run(ground_of(arguments), arguments))


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line, print the one document of ``--json``, and return the exit code."""
    words = sys.argv[1:] if words is None else words
    open_streams()
    # The parser may end before it has said so, and a program that asked for JSON wants it then, too.
    console.json = "--json" in words
    try:
        try:
            return _ended(words)
        except SparkwrightError as error:  # the output itself
            console.json = False
            console.failure(error)
            return error.exit_code
    except (OutputClosed, SparkwrightError):  # nobody can be told
        return 1


def _ended(words: Sequence[str]) -> int:
    """Run the command line, say how it ended, and return the exit code; raises as `console.finish`."""
    try:
        with room_guard(Path(tempfile.gettempdir())):
            code = run(words)
        console.finish()
    except SparkwrightError as error:
        console.failure(error)
        console.finish(error.document())
        return error.exit_code
    except SystemExit as end:
        usage: dict[str, object] = {"reference": UsageError.reference, "what": "The command line cannot be read.", "todo": UsageError.todo}
        console.json = console.json and bool(end.code)  # a help text is no document
        console.finish(usage)
        return int(end.code or 0)
    except KeyboardInterrupt:
        console.note("interrupted; what is finished is kept, and the next run goes on from here")
        console.finish({"reference": "interrupted"})
        return 130
    except Exception:  # a fault of ours must say so and leave what is needed to find it
        return _fault(words)
    return code


def _fault(words: Sequence[str]) -> int:
    versions = f"sparkwright {__version__}\nPython {platform.python_version()}\n{platform.platform()}\n"
    text, log = f"{versions}verb: {words[0] if words else '-'}\n\n{traceback.format_exc()}", ""
    with contextlib.suppress(OSError):
        # Not in the cache directory, which may be what is wrong.
        handle, log = tempfile.mkstemp(prefix=f"sparkwright-fault-{time.strftime('%Y%m%d-%H%M%S')}-", suffix=".log")
        with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as stream:
            stream.write(text)
    report = log or f"this:\n{text}"
    console.note(f"error: fault: this is a fault of sparkwright, not yours. Nothing finished is lost.\n  please report it with {report}")
    console.finish({"reference": "fault", "log": log})
    return 3
