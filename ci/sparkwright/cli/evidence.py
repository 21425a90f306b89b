"""The commands of ``release`` that need no checkout: ``verify``, ``notes`` and ``key``."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from sparkwright.cli import argtypes, context
from sparkwright.core.console import console
from sparkwright.core.errors import SparkwrightError, UsageError
from sparkwright.forks.context import StandaloneContext
from sparkwright.gates.ladder import RUNGS
from sparkwright.release.client import install
from sparkwright.release.client.install import Wish
from sparkwright.release.errors import TrustError
from sparkwright.release.evidence import check, inside
from sparkwright.release.evidence.check import Checked
from sparkwright.release.evidence.gathered import Folder
from sparkwright.release.manifest.records import Entry, Proved, Wheel
from sparkwright.release.notes import published, rendered, whole
from sparkwright.release.signing import keys, trust


class WheelEvidence(NamedTuple):
    """The evidence of a wheel, and its entry in the index, if it comes from one."""

    wheel: Wheel
    proved: Proved
    checked: Checked
    entry: Entry | None = None

    def document(self) -> dict[str, object]:
        """Return the record that ``--json`` prints."""
        return {
            "file": self.wheel.filename,
            "sha256": self.wheel.sha256,
            "signers": self.checked.signers,
            "rungs": dict(self.checked.rungs),
            "missing": self.proved.missing,
            "speeds": self.proved.speeds,
            "release": self.entry.name if self.entry else "",
            "channel": self.entry.channel if self.entry else "",
            "yanked": self.entry.yanked if self.entry else "",
        }


def add_arguments(parsers: Mapping[str, argparse.ArgumentParser]) -> None:
    """Add the arguments of ``verify``, ``notes`` and ``key``."""
    _add_verify(parsers["release verify"])
    _add_notes(parsers["release notes"])
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


def _add_verify(parser: argparse.ArgumentParser) -> None:
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


def _add_notes(parser: argparse.ArgumentParser) -> None:
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
    parser.add_argument(
        "--need", action="store_true", help="only the part about whether you still need this fork"
    )
    parser.add_argument(
        "--stock",
        type=Path,
        action="append",
        default=[],
        metavar="WHEEL",
        help="the official wheel, to compare its libraries with ours (needs a checkout)",
    )


def verify(arguments: argparse.Namespace) -> int:
    """Check each wheel, show its evidence, and raise the first failure."""
    if arguments.folder and (arguments.index or arguments.signed_for):
        raise UsageError("usage", "--from excludes --index and --signed-for.")
    find = _from_folder(arguments) if arguments.folder else _from_index(arguments)
    verified: list[dict[str, object]] = []
    failures: list[SparkwrightError] = []
    for path in arguments.wheels:
        try:
            with console.step(f"check {path.name}"):
                evidence_records = list(find(path))
        except SparkwrightError as error:
            failures.append(error)
            console.result(f"{path.name}: {error.reference}")
        else:
            for evidence in evidence_records:
                _show(evidence)
                verified.append(evidence.document())
    failed = {error.what: error.reference for error in failures}
    console.document({"wheels": verified, "failed": failed})
    if failures:
        raise failures[0]
    return 0


def _from_index(arguments: argparse.Namespace) -> Callable[[Path], Iterator[WheelEvidence]]:
    wish = Wish(arguments.index, tuple(arguments.key), arguments.signed_for)
    index = install.opened(context.standalone(arguments), wish)

    def find(path: Path) -> Iterator[WheelEvidence]:
        at_hand = inside.wheel_at(path)
        # A promoted release has two entries; the last one counts.
        for entry in reversed(index.manifest.entries):
            release = index.release(entry)
            wheel = next(
                (candidate for candidate in release.wheels if candidate.sha256 == at_hand.sha256),
                None,
            )
            if wheel is None:
                continue
            if wheel.filename != path.name:
                raise TrustError(
                    "evidence-invalid",
                    f"{path.name} is published under another name.",
                    details=[wheel.filename],
                )
            proofs = [proof for proof in index.proof(entry).wheels if proof.wheel == wheel.sha256]
            if len(proofs) != 1:
                raise TrustError(
                    "evidence-invalid",
                    f"The proof of {entry.name} names {path.name} {len(proofs)} times.",
                )
            fork = next((item for item in release.forks if item.name == wheel.fork), None)
            checked = check.checked(wheel, fork, proofs[0], index.evidence, index.trust)
            inside.check(path, checked)
            yield WheelEvidence(wheel, proofs[0], checked, entry)
            return
        raise TrustError(
            "evidence-invalid",
            f"The index {index.manifest.url} does not hold {path.name}.",
            details=[f"sha256 {at_hand.sha256}"],
            todo="Name the index that it came from, or treat it as a file without evidence.",
        )

    return find


def _from_folder(arguments: argparse.Namespace) -> Callable[[Path], Iterator[WheelEvidence]]:
    carried = trust.carried()
    address = carried.index if carried else arguments.folder.absolute().as_uri()
    trusted = trust.find(address, arguments.key)
    folder = Folder(arguments.folder, trusted)

    def find(path: Path) -> Iterator[WheelEvidence]:
        for wheel, proved in folder.proofs(inside.wheel_at(path)):
            checked = check.checked(wheel, None, proved, folder.read, trusted)
            inside.check(path, checked)
            yield WheelEvidence(wheel, proved, checked)

    return find


def _show(evidence: WheelEvidence) -> None:
    wheel, proved, checked, entry = evidence
    rows = [[kind, "holds", signer] for kind, signer in checked.signers.items()]
    rows += [[name, state, RUNGS.get(name, "")] for name, state in checked.rungs.items()]
    rows += [
        [f"missing: {item.rung}", f"{item.state} ({item.reference})", item.says]
        for item in proved.missing
    ]
    console.table(
        f"{wheel.filename}  sha256 {wheel.sha256}",
        ["item", "state", "signer or description"],
        rows,
        result=True,
    )
    listed = f"{entry.name}, {entry.channel}" if entry else "not listed"
    yanked = f", yanked: {entry.yanked}" if entry and entry.yanked else ""
    count = len(proved.missing) or "none"
    console.result(f"{listed}{yanked}: {count} of the proofs for verified missing")


def notes(arguments: argparse.Namespace) -> int:
    """Write the notes of a release to the named files, or print them if there are none."""
    files = argtypes.page_files(arguments)
    own: StandaloneContext = context.standalone(arguments)
    if arguments.release.endswith(".json"):
        release_notes = published.of_file(Path(arguments.release))
    else:
        wish = Wish(
            arguments.index,
            tuple(arguments.key),
            arguments.signed_for,
            "candidate",
            arguments.stack or "",
            arguments.release,
        )
        release_notes = published.of_index(own, wish)
    if release_notes.yanked:
        console.warn(f"{release_notes.release.name} was yanked: {release_notes.yanked}")
    stock = {}
    if arguments.stock:
        from sparkwright.release.notes import official

        stock = official.of(
            context.checkout(arguments), release_notes.release.forks, arguments.stock
        )
    if arguments.need:
        blocks = whole.need(release_notes.release, release_notes.proof, stock)
    else:
        blocks = whole.blocks(
            release_notes.release, release_notes.proof, release_notes.before, stock
        )
    texts = {"markdown": rendered.as_markdown(blocks)}
    if "html" in files:
        texts["html"] = rendered.page(release_notes.release.name, blocks)
    for kind, path in files.items():
        with own.store.replacing(path) as unfinished:
            unfinished.write_text(texts[kind], "utf-8")
        console.result(str(path))
    if not files:
        console.result(texts["markdown"])
    console.document(
        {
            "name": release_notes.release.name,
            "release": whole.address(release_notes.release),
            "channel": release_notes.channel,
            "yanked": release_notes.yanked,
            "signature checked": release_notes.checked,
            "written": {kind: str(path) for kind, path in files.items()},
            "markdown": texts["markdown"],
        }
    )
    return 0


def key(arguments: argparse.Namespace) -> int:
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
    console.document({"file": str(path), **document})
    return 0
