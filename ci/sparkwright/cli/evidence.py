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
        help="the private key; its public half lies beside it in FILE.pub",
    )
    parser.add_argument(
        "--show", action="store_true", help="make nothing; show the fingerprint of the key in FILE"
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
        help="a folder with files of evidence, in place of an index",
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
    parser.add_argument("--need", action="store_true", help="only: do you still need this fork?")
    parser.add_argument(
        "--stock",
        type=Path,
        action="append",
        default=[],
        metavar="WHEEL",
        help="the official wheel, to compare its libraries with ours (needs a checkout)",
    )


def verify(arguments: argparse.Namespace) -> int:
    """Check each wheel, show the evidence that holds, and fail with the first that does not."""
    if arguments.folder and (arguments.index or arguments.signed_for):
        raise UsageError("usage", "--from excludes --index and --signed-for.")
    find = _from_folder(arguments) if arguments.folder else _from_index(arguments)
    verified: list[dict[str, object]] = []
    failures: list[SparkwrightError] = []
    for path in arguments.wheels:
        try:
            with console.step(f"check {path.name}"):
                found = list(find(path))
        except SparkwrightError as error:
            failures.append(error)
            console.result(f"{path.name}: {error.reference}")
        else:
            for evidence in found:
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
        # Promoting gives a release another proof; the newest counts.
        for entry in reversed(index.manifest.entries):
            release = index.release(entry)
            wheel = next((one for one in release.wheels if one.sha256 == at_hand.sha256), None)
            if wheel is None:
                continue
            if wheel.filename != path.name:
                raise TrustError(
                    "evidence-invalid",
                    f"{path.name} is published under another name.",
                    details=[wheel.filename],
                )
            proofs = [one for one in index.proof(entry).wheels if one.wheel == wheel.sha256]
            if len(proofs) != 1:
                raise TrustError(
                    "evidence-invalid",
                    f"The proof of {entry.name} names {path.name} {len(proofs)} times.",
                )
            fork = next((one for one in release.forks if one.name == wheel.fork), None)
            checked = check.checked(wheel, fork, proofs[0], index.evidence, index.trust)
            inside.check(path, checked)
            yield WheelEvidence(wheel, proofs[0], checked, entry)
            return
        raise TrustError(
            "evidence-invalid",
            f"The index {index.manifest.url} does not hold {path.name}.",
            details=[f"sha256 {at_hand.sha256}"],
            todo="Ask the index that it came from, or treat it as a file without evidence.",
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
        [f"missing: {one.rung}", f"{one.state} ({one.reference})", one.says]
        for one in proved.missing
    ]
    console.table(
        f"{wheel.filename}  sha256 {wheel.sha256}",
        ["what", "state", "by whom, or what it is"],
        rows,
        result=True,
    )
    listed = f"{entry.name}, {entry.channel}" if entry else "not listed"
    yanked = f", yanked: {entry.yanked}" if entry and entry.yanked else ""
    count = len(proved.missing) or "none"
    console.result(f"{listed}{yanked}: {count} of the proofs for verified missing")


def notes(arguments: argparse.Namespace) -> int:
    """Write the notes of a release to the named files; without one, print Markdown."""
    pages = {"html": arguments.html, "markdown": arguments.markdown}
    files: dict[str, Path] = {kind: path for kind, path in pages.items() if path}
    if len({path.resolve() for path in files.values()}) < len(files):
        raise UsageError("usage", "--html and --markdown name the same file.")
    own: StandaloneContext = context.standalone(arguments)
    if arguments.release.endswith(".json"):
        found = published.of_file(Path(arguments.release))
    else:
        wish = Wish(
            arguments.index,
            tuple(arguments.key),
            arguments.signed_for,
            "candidate",
            arguments.stack or "",
            arguments.release,
        )
        found = published.of_index(own, wish)
    if found.yanked:
        console.warn(f"{found.release.name} was yanked: {found.yanked}")
    stock = {}
    if arguments.stock:
        from sparkwright.release.notes import official

        stock = official.of(context.checkout(arguments), found.release.forks, arguments.stock)
    if arguments.need:
        blocks = whole.need(found.release, found.proof, stock)
    else:
        blocks = whole.blocks(found.release, found.proof, found.before, stock)
    texts = {"markdown": rendered.as_markdown(blocks)}
    if "html" in files:
        texts["html"] = rendered.page(found.release.name, blocks)
    for kind, path in files.items():
        with own.store.replacing(path) as unfinished:
            unfinished.write_text(texts[kind], "utf-8")
        console.result(str(path))
    if not files:
        console.result(texts["markdown"])
    console.document(
        {
            "name": found.release.name,
            "release": whole.address(found.release),
            "channel": found.channel,
            "yanked": found.yanked,
            "signature checked": found.checked,
            "written": {kind: str(path) for kind, path in files.items()},
            "markdown": texts["markdown"],
        }
    )
    return 0


def key(arguments: argparse.Namespace) -> int:
    """Make the key, or with ``--show`` read one, and show its fingerprint."""
    path, passphrase = arguments.file, keys.passphrase()
    if arguments.show:
        public = keys.shown(path, passphrase)
    else:
        keys.make(path, passphrase)
        public = keys.PublicKey.load(keys.public_path(path))
        if not passphrase:
            console.note(f"{path} has no passphrase; set {keys.PASSPHRASE} to make one that has")
        console.note(
            f"keep {path} to yourself; give {keys.public_path(path)} away, and its fingerprint "
            f"by another way than the index"
        )
    console.result(
        f"fingerprint {public.fingerprint}\nsigns as    {public.by}\npublic key  {public.text}"
    )
    document = {"fingerprint": public.fingerprint, "by": public.by, "public": public.text}
    console.document({"file": str(path), **document})
    return 0
