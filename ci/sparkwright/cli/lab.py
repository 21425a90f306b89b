"""The commands of ``lab``: ``runner``, ``image``, ``record``, ``status`` and ``report``."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from sparkwright.bench import results
from sparkwright.bench.report import page, terminal
from sparkwright.cli import options
from sparkwright.client.environment import Prefix, default_prefix
from sparkwright.client.index import open_index
from sparkwright.client.main import add_index, nonempty
from sparkwright.client.records import CHANNELS
from sparkwright.core.console import console
from sparkwright.core.errors import UsageError
from sparkwright.core.files import read_text
from sparkwright.core.github import ADDRESS, GitHub, Repository, run_url
from sparkwright.core.http import redact_credentials
from sparkwright.lab import runner as runners
from sparkwright.operate.site import outcome, pages, records
from sparkwright.operate.site.records import Measured, RunRecord
from sparkwright.operate.site.speeds import Source


def runner(arguments: argparse.Namespace) -> dict[str, Any]:
    """
    Check that no stranger can start a job on a runner of the lab.

    Raises:
        runner-exposed: A setting or a workflow lets a stranger in.
        runner-unfit: This machine is not set up as docs/runner.md says.
        not-provided: There is no checkout.
        UsageError: The repository is not named.
    """
    context = options.checkout(arguments)
    installed = runners.CONFIG / "runner.env"
    shipped = context.project.root / "ci" / "runner" / installed.name
    settings = runners.variables(installed if installed.is_file() else shipped)
    name = arguments.repository or settings.get("REPOSITORY", "unresolved")
    options.refuse((name == "unresolved", "lab runner check needs --repository OWNER/NAME."))
    # A file, because variables of this process are inherited by the programs that it starts.
    token = read_text(arguments.token, limit=4096).strip() if arguments.token else ""
    github = GitHub.from_environment(context.mirrored(ADDRESS), token=token)
    with console.step("check"):
        outside = list(runners.settings_findings(Repository(github, name), settings))
        inside = list(runners.machine_findings(context.project.root))
    rows = [(finding.name, finding.state, finding.message) for finding in (*outside, *inside)]
    console.table(f"Runners of {name}", ("", "state", ""), rows, result=True)
    document = {"repository": name, "findings": [*outside, *inside]}
    for reference, findings in (("runner-exposed", outside), ("runner-unfit", inside)):
        if bad := [finding for finding in findings if finding.state == "bad"]:
            raise runners.RunnerError(
                reference,
                f"{len(bad)} of {len(findings)} checks of {name} failed.",
                details=[f"{finding.name}: {finding.message}" for finding in bad],
                data=document,
            )
    return document


def add_arguments(parsers: Mapping[str, argparse.ArgumentParser]) -> None:
    """Add the arguments of the commands of ``lab``."""
    _add_runner(parsers["lab runner"])
    _add_image(parsers["lab image"])
    _add_record(parsers["lab record"])
    _add_status(parsers["lab status"])
    parser = parsers["lab report"]
    parser.set_defaults(run=report)
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write a self-contained page instead"
    )
    parser.add_argument(
        "files",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="result of a measurement; the first is compared with the others",
    )


def _add_image(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=image)
    add_index(parser)
    add = parser.add_argument
    add(
        "release",
        nargs="?",
        type=nonempty,
        metavar="RELEASE",
        help="full name of a release (default: the newest of the channel, which is shown)",
    )
    add(
        "--built",
        type=Path,
        metavar="DIR",
        help="the unpublished wheels of this folder, as a candidate, instead of a release",
    )
    add(
        "--channel",
        choices=CHANNELS,
        default="verified",
        help="channel of the release (default: %(default)s)",
    )
    add(
        "--platform",
        choices=("linux/arm64", "linux/amd64"),
        default="linux/arm64",
        help="platform of the image (default: %(default)s)",
    )
    add(
        "--base",
        default="",
        metavar="IMAGE",
        help="base image, as NAME@sha256:… or an id (default: `image` in environment.yaml)",
    )
    add(
        "--push",
        default="",
        metavar="REPOSITORY",
        help="push the image there as RELEASE-ARCHITECTURE, and show its digest",
    )
    add(
        "--dry-run",
        action="store_true",
        help="check the release and show what would be built, without an engine",
    )


def _add_record(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=record)
    number, attempt = (os.environ.get(f"GITHUB_RUN_{name}", "") for name in ("ID", "ATTEMPT"))
    add = parser.add_argument
    add("--at", type=Path, required=True, metavar="FOLDER", help="folder of the records")
    add(
        "--stage",
        action="append",
        default=[],
        metavar="NAME=OUTCOME[:REFERENCE]",
        help="outcome of a stage: a verdict, or success, failure, cancelled, skipped; may be "
        "repeated",
    )
    add(
        "--document",
        action="append",
        default=[],
        metavar="NAME=FILE",
        help="outcome of a stage, from the document of its --json; takes precedence over a "
        "--stage of that name",
    )
    add(
        "--file",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="verdicts or a measurement; may be repeated",
    )
    add(
        "--workflow",
        default=os.environ.get("GITHUB_WORKFLOW", ""),
        metavar="NAME",
        help="name of the workflow (default: GITHUB_WORKFLOW)",
    )
    add(
        "--run",
        dest="number",
        default=f"{number}.{attempt}" if attempt not in ("", "1") else number,
        metavar="ID",
        help="number of the run (default: GITHUB_RUN_ID and its attempt)",
    )
    add(
        "--began",
        default="",
        metavar="TIME",
        help="start of the run, as printed by `date -u +%%FT%%TZ`",
    )
    add("--ended", default="", metavar="TIME", help="end of the run (default: now)")


def _add_status(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=status)
    add_index(parser)
    add = parser.add_argument
    add("--nights", type=Path, metavar="FOLDER", help="folder of the records of `lab record`")
    add(
        "--drift",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="output of `patch drift --json`; may be repeated",
    )
    add(
        "--patches",
        type=Path,
        metavar="FILE",
        help="output of `patch status --json` (default: computed here)",
    )
    add(
        "--output",
        type=Path,
        required=True,
        metavar="DIR",
        help="folder for the pages",
    )


def _add_runner(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=runner)
    add = parser.add_argument
    add(
        "action",
        choices=("check",),
        help="check: read the repository's settings and workflows, and the machine's configuration",
    )
    add(
        "--repository",
        default="",
        metavar="OWNER/NAME",
        help="repository whose jobs run on the lab's machines (default: that of runner.env)",
    )
    add(
        "--token",
        type=Path,
        metavar="FILE",
        help="file of a token that may read Administration, Actions and Contents (default: "
        "GITHUB_TOKEN)",
    )


def image(arguments: argparse.Namespace) -> dict[str, Any]:
    """Check a release, and build and push its image."""
    # These load docker.
    from sparkwright.builder import container_build
    from sparkwright.release import policy, staging
    from sparkwright.serving import image as images

    context = options.checkout(arguments)
    repository = images.check_repository(arguments.push) if arguments.push else ""
    base = container_build.pinned_base(context, arguments.base)
    address = arguments.index or ""
    options.refuse(
        (context.offline and address.startswith("http"), "--offline needs an index in a folder."),
        (redact_credentials(address) != address, "The image would show the password of --index."),
        (
            arguments.built and (arguments.release or address or arguments.push),
            "--built takes no release, and no --index; what was not published is not pushed.",
        ),
    )
    with contextlib.ExitStack() as stack:
        name, channel = arguments.release or "", arguments.channel
        if arguments.built:
            index, name = stack.enter_context(staging.staged_index(context, arguments.built))
            channel = "candidate"
        else:
            rules = policy.load(context.project.root, context.project.spec.arch)
            root = arguments.trust or rules.file.root
            index = open_index(Prefix(default_prefix()).root / "trust", address, root)
        platform, stack_name = arguments.platform, arguments.stack or ""
        name = images.select(index, name, channel=channel, stack=stack_name, platform=platform)
        release, state = index.release(name), index.states[name]
        labels = images.labels(index, release, platform, base)
        for gate in state.missing:
            console.warn(f"not shown: {gate}")
        condition, built, pushed = "would be built", None, ""
        if not arguments.dry_run:
            built = images.build(context, index, release, platform=platform, base=base)
            condition = "was there already" if built.present else "built"
        if built and repository:
            pushed = images.push(built, repository)
    rows = [["base", base], ["platform", platform], *map(list, labels.items())]
    rows += [["image", f"{built.name}, {built.id}"]] if built else []
    rows += [["pushed", pushed]] if pushed else []
    console.table(f"serving image of {name}: {condition}", ["", ""], rows, result=True)
    return {
        "image": built,
        "state": condition,
        "release": name,
        "channel": state.channel,
        "labels": labels,
        "base": base,
        "pushed": pushed,
    }


def record(arguments: argparse.Namespace) -> dict[str, Any]:
    """Write the record of a run, and show it."""
    files, measured = outcome.files(arguments.file)
    fields = {
        "workflow": arguments.workflow or None,
        "run": arguments.number,
        "stack": arguments.stack or "",
        "ended": arguments.ended or f"{datetime.datetime.now(datetime.UTC):%Y-%m-%dT%H:%M:%SZ}",
        "stages": outcome.stages(arguments.stage, arguments.document),
        "url": run_url(),
        "commit": os.environ.get("GITHUB_SHA", ""),
        "began": arguments.began,
        "files": files,
        "measured": measured,
    }
    try:
        run_record = msgspec.convert(msgspec.to_builtins(fields), RunRecord)
    except (msgspec.ValidationError, ValueError) as error:
        raise UsageError("usage", "This is not a record of a run.", details=[str(error)]) from error
    path = records.write(arguments.at, run_record)
    title = f"{run_record.workflow} of {run_record.day}: {run_record.state}"
    rows = [
        [stage.name, stage.state, stage.reference, stage.message[:80]]
        for stage in run_record.stages
    ]
    rows += [[file.name, "missing", "", file.message] for file in files if not file.sha256]
    console.table(f"{title}\n{path}", ["stage", "state", "reference", ""], rows, result=True)
    return {"file": str(path), "state": run_record.state, "night": run_record}


def status(arguments: argparse.Namespace) -> dict[str, Any]:
    """Make static pages from all records, and show the unreadable ones."""
    context, day = options.checkout(arguments), f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}"
    runs, problems = records.read(arguments.nights) if arguments.nights else ([], [])
    releases, link = None, ""
    figures: list[tuple[Source, Measured]] = []
    if arguments.index:
        trusted = Prefix(default_prefix()).root / "trust"
        index = open_index(trusted, arguments.index, arguments.trust or "")
        releases, figures = pages.read_releases(index, context.store, problems)
        # A folder is published with the site below it.
        link = index.location.url if index.location.url.startswith("http") else "../"
    else:
        console.note("no index was named, so the pages show no releases")
    drifts = pages.read_drifts(arguments.drift, problems)
    patches = pages.read_patches(context, arguments.patches, day, problems)
    site = pages.SiteContent(
        day, link, releases, runs[::-1], patches, drifts, figures, problems
    )  # fmt: skip
    for name, data in pages.render(site).items():
        context.store.write(arguments.output.absolute() / name, data)
    for problem in problems:
        console.warn(f"{problem.name}: {problem.reference}: {problem.message}")
    counts = {"releases": len(releases or ()), "runs": len(runs), "figures": len(figures)}
    console.note(", ".join(f"{count} {name}" for name, count in counts.items()))
    console.result(str(arguments.output / "index.html"))
    return {"output": str(arguments.output), "day": day, "problems": problems, **counts}


def report(arguments: argparse.Namespace) -> dict[str, Any]:
    """Show results of measurements, or write a page of them."""
    context, target = options.checkout(arguments), arguments.html
    measured = [results.read(path) for path in arguments.files]
    if target and target.resolve() in map(Path.resolve, arguments.files):
        raise UsageError("usage", f"{target} is one of the results and would be overwritten.")
    if target:
        context.store.write(target.absolute(), page.render(measured).encode())
        console.result(str(target.absolute()))
    else:
        for result in measured:
            terminal.show(result)
    names = ("kind", "state", "says", "culprits")
    shown = [
        {"file": str(path), **{name: getattr(result, name) for name in names}}
        for path, result in zip(arguments.files, measured, strict=True)
    ]
    return {"results": shown, "html": target and str(target)}
