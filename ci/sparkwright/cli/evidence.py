"""The commands of ``release`` that need no checkout: ``verify``, ``notes`` and ``key``."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from sparkwright.cli import argtypes, context
from sparkwright.core.console import console
from sparkwright.core.errors import SparkwrightError, UsageError
from sparkwright.gates.ladder import RUNGS
from sparkwright.release.client import install
from sparkwright.release.errors import TrustError
from sparkwright.release.evidence import check, gathered, inside
from sparkwright.release.manifest.records import Entry, Proved, Wheel
from sparkwright.release.notes import published, rendered, whole
from sparkwright.release.signing import keys, trust


class WheelEvidence(NamedTuple):
    """The evidence of a wheel, and its entry in the index, if it comes from one."""

    wheel: Wheel
    proved: Proved
    checked: check.Checked
    entry: Entry | None = None


def add_arguments(parsers: Mapping[str, argparse.ArgumentParser]) -> None:
    """Add the arguments of ``verify``, ``notes`` and ``key``."""
    parser = parsers["release verify"]
    parser.set_defaults(run=verify)
    argtypes.add_index(parser)
    parser.add_argument("wheels", nargs="+", type=Path, metavar="WHEEL", help="the wheel file")
    parser.add_argument(
        "--from",
        dest="folder",
        type=Path,
        metavar="FOLDER",
        help="folder with the files of evidence, instead of an index",
    )
    parser = parsers["release notes"]
    parser.set_defaults(run=notes)
    argtypes.add_index(parser)
    argtypes.add_pages(parser)
    parser.add_argument(
        "release",
        nargs="?",
        default="",
        metavar="RELEASE",
        help="name, address or release.json (default: the newest)",
    )
    parser = parsers["release key"]
    parser.set_defaults(run=key)
    parser.add_argument(
        "file",
        type=Path,
        metavar="FILE",
        help="the private key; the public key is FILE.pub",
    )
    parser.add_argument(
        "--show", action="store_true", help="only show the fingerprint of the key in FILE"
    )


def verify(arguments: argparse.Namespace) -> dict[str, Any] | None:
    """Check each wheel, show its evidence, and raise the first failure."""
    if arguments.folder and (arguments.index or arguments.signed_for):
        raise UsageError("usage", "--from excludes --index and --signed-for.")
    find = _from_folder(arguments) if arguments.folder else _from_index(arguments)
    verified, failures = [], []
    for path in arguments.wheels:
        try:
            with console.step(f"check {path.name}"):
                evidence_records = list(find(path))
            verified += [_show(evidence) for evidence in evidence_records]
        except SparkwrightError as error:
            failures.append(error)
            console.result(f"{path.name}: {error.reference}")
    failed = {error.what: error.reference for error in failures}
    console.document({"wheels": verified, "failed": failed})
    if failures:
        raise failures[0]
    return None


def _from_index(arguments: argparse.Namespace) -> Callable[[Path], Iterator[WheelEvidence]]:
    wish = install.Wish(arguments.index, tuple(arguments.key), arguments.signed_for)
    index = install.opened(context.standalone(arguments), wish)

    def find(path: Path) -> Iterator[WheelEvidence]:
        sha256 = inside.wheel_at(path).sha256
        # A promoted release has two entries; the last one counts.
        for entry in reversed(index.manifest.entries):
            release = index.release(entry)
            for wheel in release.wheels:
                if wheel.sha256 != sha256:
                    continue
                proofs = [proof for proof in index.proof(entry).wheels if proof.wheel == sha256]
                if wheel.filename != path.name or len(proofs) != 1:
                    raise TrustError(
                        "evidence-invalid",
                        f"{entry.name} does not prove {path.name} under that name.",
                        details=[f"name: {wheel.filename}", f"proofs: {len(proofs)}"],
                    )
                fork = next((item for item in release.forks if item.name == wheel.fork), None)
                checked = check.checked(wheel, fork, proofs[0], index.evidence, index.trust)
                inside.check(path, checked)
                yield WheelEvidence(wheel, proofs[0], checked, entry)
                return
        raise TrustError(
            "evidence-invalid",
            f"The index {index.manifest.url} does not hold {path.name}.",
            details=[f"sha256 {sha256}"],
            todo="Name the index that it came from, or treat it as a file without evidence.",
        )

    return find


def _from_folder(arguments: argparse.Namespace) -> Callable[[Path], Iterator[WheelEvidence]]:
    carried = trust.carried()
    address = carried.index if carried else arguments.folder.absolute().as_uri()
    trusted = trust.find(address, arguments.key)
    folder = gathered.Folder(arguments.folder, trusted)

    def find(path: Path) -> Iterator[WheelEvidence]:
        for wheel, proved in folder.proofs(inside.wheel_at(path)):
            checked = check.checked(wheel, None, proved, folder.read, trusted)
            inside.check(path, checked)
            yield WheelEvidence(wheel, proved, checked)

    return find


def _show(evidence: WheelEvidence) -> dict[str, Any]:
    """Show the evidence of a wheel, and return its record."""
    wheel, proved, checked, entry = evidence
    rows = [[kind, "holds", signer] for kind, signer in checked.signers.items()]
    rows += [[name, state, RUNGS.get(name, "")] for name, state in checked.rungs.items()]
    rows += [
        [f"missing: {item.rung}", f"{item.state} ({item.reference})", item.says]
        for item in proved.missing
    ]
    title, columns = f"{wheel.filename}  sha256 {wheel.sha256}", ["item", "state", "signer or text"]
    console.table(title, columns, rows, result=True)
    listed = f"{entry.name}, {entry.channel}" if entry else "not listed"
    yanked = f", yanked: {entry.yanked}" if entry and entry.yanked else ""
    count = len(proved.missing) or "none"
    console.result(f"{listed}{yanked}: {count} of the proofs for verified missing")
    return {
        "file": wheel.filename,
        "sha256": wheel.sha256,
        "signers": checked.signers,
        "rungs": dict(checked.rungs),
        "missing": proved.missing,
        "speeds": proved.speeds,
        "release": entry.name if entry else "",
        "channel": entry.channel if entry else "",
        "yanked": entry.yanked if entry else "",
    }


def notes(arguments: argparse.Namespace) -> dict[str, Any]:
    """Write the notes of a release to the named files, or print them if there are none."""
    files, own = argtypes.page_files(arguments), context.standalone(arguments)
    if arguments.release.endswith(".json"):
        record = published.of_file(Path(arguments.release))
    else:
        wish = install.Wish(
            arguments.index,
            tuple(arguments.key),
            arguments.signed_for,
            "candidate",
            arguments.stack or "",
            arguments.release,
        )
        record = published.of_index(own, wish)
    release = record.release
    if record.yanked:
        console.warn(f"{release.name} was yanked: {record.yanked}")
    blocks = whole.blocks(release, record.proof, record.before)
    markdown = rendered.as_markdown(blocks)
    for kind, path in files.items():
        text = markdown if kind == "markdown" else rendered.page(release.name, blocks)
        console.result(str(own.store.write(path.absolute(), text.encode())))
    if not files:
        console.result(markdown)
    return {
        "name": release.name,
        "release": whole.address(release),
        "channel": record.channel,
        "yanked": record.yanked,
        "signature checked": record.checked,
        "written": {kind: str(path) for kind, path in files.items()},
        "markdown": markdown,
    }


def key(arguments: argparse.Namespace) -> dict[str, Any]:
    """Make a key, or with ``--show`` read it, and show its fingerprint."""
    path, passphrase = arguments.file, keys.passphrase()
    if arguments.show:
        public = keys.shown(path, passphrase)
    else:
        keys.make(path, passphrase)
        public = keys.PublicKey.load(keys.public_path(path))
        if not passphrase:
            console.note(f"{path} has no passphrase; set {keys.PASSPHRASE} to make a key with one")
        console.note(
            f"keep {path} secret; publish {keys.public_path(path)}, and its fingerprint through "
            f"another channel than the index"
        )
    console.result(
        f"fingerprint {public.fingerprint}\nsigns as    {public.by}\npublic key  {public.text}"
    )
    document = {"fingerprint": public.fingerprint, "by": public.by, "public": public.text}
    return {"file": str(path), **document}
