"""The commands of ``lab`` but ``runner``: ``image``, ``record`` and ``status``."""

from __future__ import annotations

import argparse
import datetime
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from sparkwright.cli import options
from sparkwright.cli import release as releases
from sparkwright.core import github_summary
from sparkwright.core.console import console, size
from sparkwright.core.errors import UsageError
from sparkwright.operate.errors import LabError
from sparkwright.operate.image import picked
from sparkwright.operate.site import making, night
from sparkwright.operate.site.records import Night
from sparkwright.release.client.install import Wish
from sparkwright.release.manifest import times
from sparkwright.release.signing.keys import public_path


def add_arguments(parsers: Mapping[str, argparse.ArgumentParser]) -> None:
    """Add the arguments of ``image``, ``record`` and ``status``."""
    _add_image(parsers["lab image"])
    _add_record(parsers["lab record"])
    _add_status(parsers["lab status"])


def _add_image(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=image)
    options.add_index(parser)
    options.add_channel(parser)
    add = parser.add_argument
    add(
        "release",
        nargs="?",
        default="",
        metavar="RELEASE",
        help="full name of a release (default: the newest of its channel)",
    )
    add(
        "--platform",
        choices=tuple(picked.PLATFORMS),
        default="linux/arm64",
        help="platform of the image (default: linux/arm64)",
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
        help="push the image there as RELEASE-PLATFORM, and record its digest",
    )
    add(
        "--output",
        type=Path,
        metavar="DIR",
        help="with --push: folder for the record of the digest (default: dist)",
    )
    add(
        "--at",
        type=Path,
        metavar="FOLDER",
        help="with --push: also sign the record, and add it to this index",
    )
    options.add_signer(parser, "--signing-key")
    add(
        "--dry-run",
        action="store_true",
        help="check the release and show what would be built, without an engine",
    )


def _add_record(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=record)
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
        default="",
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
    options.add_index(parser)
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
        help="folder for the pages; unchanged ones are not written again",
    )
    add(
        "--strict",
        action="store_true",
        help="fail if a record is damaged or missing; the pages are written anyway",
    )


def image(arguments: argparse.Namespace) -> dict[str, Any]:
    """Check a release, and build and push its image."""
    # These load docker.
    from sparkwright.builder import container
    from sparkwright.operate.image import made, recorded, registry

    context, publisher = options.checkout(arguments), None
    if arguments.at:
        if not arguments.push:
            raise UsageError("usage", "--at needs --push.")
        key, identity = arguments.signing_key, arguments.identity
        publisher = releases.publisher(context, arguments.at, key, identity=identity)
    elif arguments.signing_key or arguments.identity:
        raise UsageError("usage", "--signing-key and --identity belong to --at.")
    request = made.Asked(_wish(arguments), arguments.platform, arguments.base)
    repository = registry.checked(arguments.push) if arguments.push else ""
    base = container.pinned_base(context, request.base)
    candidate = picked.pick(context, request.wish, picked.PLATFORMS[request.platform])
    entry = candidate.entry
    if publisher:
        recorded.check(publisher, entry.release)
    if entry.yanked:
        console.warn(f"{entry.name} was yanked: {entry.yanked}")
    for missing in candidate.missing:
        console.warn(f"not proved: {missing.rung}: {missing.state}: {missing.says}")
    rows = [
        ["release", f"{entry.name} ({entry.channel}), {entry.release}"],
        ["base", base],
        ["platform", request.platform],
    ]
    rows += [
        [wheel.project, f"{wheel.version}, {size(wheel.size)}, {wheel.sha256}"]
        for wheel in candidate.wheels
    ]
    state, done, pushed = "would be built", None, None
    target = registry.tag_of(entry.name, request.platform)
    if not arguments.dry_run:
        if repository:
            recorded.ready(context.output)
        done = made.make(context, request, candidate, base)
        state = "was there already" if done.already else "built"
        rows.append(["image", f"{done.name}, {done.id}"])
    if done and repository:
        digest = registry.push(done, repository, target)
        pushed = recorded.record(done, candidate, repository, target, digest)
        console.note(f"recorded as {recorded.written(context.output, pushed)}")
        if publisher:
            console.note(f"signed as {publisher.root / recorded.published(publisher, pushed)}")
        rows.append(["pushed", f"{pushed.repository}:{pushed.tag}@sha256:{pushed.digest}"])
    console.table(f"serving image of {entry.name}: {state}", ["", ""], rows, result=True)
    return {
        "image": done,
        "state": state,
        "release": entry,
        "missing": candidate.missing,
        "base": base,
        "pushed": pushed,
    }


def _wish(arguments: argparse.Namespace) -> Wish:
    """Return the requested release; the default index is that of ``--at``."""
    index, keys = arguments.index, tuple(arguments.key)
    if arguments.at and not index:
        index = str(arguments.at)
        if not keys and arguments.signing_key:
            keys = (public_path(arguments.signing_key),)
    return Wish(
        index,
        keys,
        arguments.signed_for,
        arguments.channel,
        stack=arguments.stack or "",
        release=arguments.release,
    )


def record(arguments: argparse.Namespace) -> dict[str, Any]:
    """Write the record of a run, and show it."""
    run_record = _record(arguments)
    path = night.write(arguments.at, run_record)
    title = f"{run_record.workflow} of {run_record.day}: {run_record.state}"
    rows = [
        [stage.name, stage.state, stage.reference, stage.says[:80]] for stage in run_record.stages
    ]
    console.table(title, ["stage", "state", "reference", ""], rows, result=True)
    for file in run_record.files:
        if not file.sha256:
            console.warn(f"{file.name}: {file.says}")
    console.result(str(path))
    return {"file": str(path), "state": run_record.state, "night": run_record}


def _record(arguments: argparse.Namespace) -> Night:
    named = [night.stage(text) for text in arguments.stage]
    documents = {stage.name: stage for stage in map(night.documented, arguments.document)}
    names = {stage.name for stage in named}
    if len(names) < len(named) or len(documents) < len(arguments.document):
        raise UsageError("usage", "A stage is named twice.")
    stages = [night.together(stage, documents.pop(stage.name, None)) for stage in named]
    files, measured = night.files(arguments.file)
    number, attempt = (os.environ.get(f"GITHUB_RUN_{name}", "") for name in ("ID", "ATTEMPT"))
    if number and attempt not in ("", "1"):
        number = f"{number}.{attempt}"
    fields = {
        "workflow": arguments.workflow,
        "run": arguments.number or number,
        "stack": arguments.stack or "",
        "ended": arguments.ended or times.now(),
        "stages": [*stages, *documents.values()],
        "url": github_summary.run_url(),
        "commit": os.environ.get("GITHUB_SHA", ""),
        "began": arguments.began,
        "files": files,
        "measured": measured,
    }
    for name in ("workflow", "run", "stack"):
        if not fields[name]:
            raise UsageError("usage", f"There is no {name}.", todo=f"Name it with --{name}.")
    try:
        return msgspec.convert(msgspec.to_builtins(fields), Night)
    except (msgspec.ValidationError, ValueError) as error:
        raise UsageError("usage", "This is not a record of a run.", details=[str(error)]) from error


def status(arguments: argparse.Namespace) -> dict[str, Any]:
    """Make static pages from all records, and show the unreadable ones."""
    context = options.checkout(arguments)
    request = making.Asked(
        Wish(arguments.index, tuple(arguments.key), arguments.signed_for),
        bool(arguments.index),
        f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}",
        arguments.nights,
        tuple(arguments.drift),
        arguments.patches,
    )
    site = making.read(context, request)
    written = making.make(context, site, arguments.output)
    for problem in site.problems:
        console.warn(f"{problem.name}: {problem.reference}: {problem.says}")
    if site.books is None:
        console.note("no index was given, so the pages show no releases")
    counts = {
        "releases": len(site.releases),
        "nights": len(site.nights.nights),
        "histories": len(site.histories),
        "figures": sum(len(history.spots) for history in site.histories),
        "changes": sum(len(history.found.changes) for history in site.histories),
        "drift": len(site.drifted.reports),
    }
    console.note(", ".join(f"{count} {name}" for name, count in counts.items()))
    console.note(
        f"{written.files} files, {size(written.size)}; {written.written} written, "
        f"{written.removed} removed"
    )
    console.result(str(arguments.output / "index.html"))
    document = {
        "output": str(arguments.output),
        "day": request.day,
        "signature checked": site.books.checked if site.books else None,
        "problems": site.problems,
        **counts,
        "site": written,
    }
    if site.problems and arguments.strict:
        console.document(document)
        details = [f"{problem.name}: {problem.reference}" for problem in site.problems[:50]]
        raise LabError(
            "site-partial", f"{len(site.problems)} records could not be read.", details=details
        )
    return document
