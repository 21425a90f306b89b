"""``publish``, and the commands of ``release``: those that change an index, and its evidence."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from sparkwright.cli import options
from sparkwright.core.console import console, size
from sparkwright.core.errors import SparkwrightError, UsageError
from sparkwright.forks.context import RunContext
from sparkwright.gates.ladder import RUNGS
from sparkwright.release.client import install
from sparkwright.release.client.catalogue import Catalogue
from sparkwright.release.decide import policy as policies
from sparkwright.release.errors import TrustError
from sparkwright.release.evidence import check, gathered, inside
from sparkwright.release.manifest.records import Entry, Evidence, Fork, Proved, Wheel
from sparkwright.release.notes import published, rendered, whole
from sparkwright.release.publish import changes, sequence
from sparkwright.release.publish.prepare import Publisher
from sparkwright.release.signing import keys, statement, trust

#: Number of removed files that are shown by name.
SHOWN = 20


#: A wheel as its publisher describes it, its fork, its proof, and its entry in the index.
Claim = tuple[Wheel, Fork | None, Proved, Entry | None]
#: Returns the claims about a wheel file; how their evidence is read, and whose signatures count.
Source = tuple[Callable[[Wheel], list[Claim]], Callable[[Evidence], bytes], trust.Trust]


def add_arguments(parsers: Mapping[str, argparse.ArgumentParser]) -> None:
    """Add the arguments of ``publish`` and of the commands of ``release``."""
    functions = {
        "publish": publish,
        "release promote": promote,
        "release yank": yank,
        "release prune": prune,
        "release refresh": refresh,
    }
    for name, run in functions.items():
        parsers[name].set_defaults(run=run)
        _add_publisher(parsers[name])
        if name in ("release promote", "release yank"):
            parsers[name].add_argument(
                "release", metavar="RELEASE", help="name of the release (2026.11.3)"
            )
    _add_publish(parsers["publish"])
    parsers["release promote"].add_argument(
        "--verdicts",
        type=Path,
        required=True,
        metavar="DIR",
        help="folder of the new verdicts about its wheels",
    )
    parsers["release prune"].add_argument(
        "--keep",
        type=options.number(int, 1),
        default=0,
        metavar="N",
        help="candidates to keep of each stack (default: ci/release.yaml)",
    )
    parsers["release prune"].add_argument(
        "--verified", action="store_true", help="also remove old releases of verified"
    )
    _add_evidence(parsers)


def _add_evidence(parsers: Mapping[str, argparse.ArgumentParser]) -> None:
    """Add the arguments of the commands that need no checkout."""
    parser = parsers["release verify"]
    parser.set_defaults(run=verify)
    options.add_index(parser)
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
    options.add_index(parser)
    parser.add_argument(
        "release",
        nargs="?",
        default="",
        metavar="RELEASE",
        help="name or address (default: the newest)",
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


def _add_publisher(parser: argparse.ArgumentParser) -> None:
    """Add the options for the index and its signer."""
    add = parser.add_argument
    add("--at", type=Path, required=True, metavar="FOLDER", help="folder of the index")
    options.add_signer(parser, "--key")
    add(
        "--predecessor",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="earlier public key of the index, if the key changes; may be repeated",
    )
    add("--reason", default="", metavar="TEXT", help="reason, published in the manifest")


def _add_publish(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "wheels",
        nargs="+",
        type=Path,
        metavar="WHEEL",
        help="wheels of the release",
    )
    add(
        "--channel",
        choices=options.CHANNELS,
        help="candidate accepts incomplete verdicts, and says so (default: verified, or refuse)",
    )
    add(
        "--verdicts",
        type=Path,
        metavar="DIR",
        help="folder of the verdicts (default: beside each wheel)",
    )
    add(
        "--files",
        default="folder",
        metavar="folder|github:OWNER/REPO",
        help="where the wheels are stored (default: folder, that of the index)",
    )
    add(
        "--url",
        default="",
        metavar="URL",
        help="address of a new index (default: `url` in ci/release.yaml)",
    )
    add(
        "--dry-run",
        action="store_true",
        help="show what would be published, and write nothing",
    )


def publisher(
    context: RunContext,
    at: Path,
    key: Path | None,
    *,
    identity: bool,
    predecessors: tuple[Path, ...] = (),
    dry_run: bool = False,
) -> Publisher:
    """
    Return the publisher of the index *at*, which signs by *key* or by this machine's *identity*.

    Args:
        predecessors: Public keys that signed the index before.
        dry_run: Do not require a key or an identity.

    Raises:
        UsageError: Neither a key nor an identity is given.
        key-invalid, identity-unusable: It cannot sign.
        signer-unknown: ci/release.yaml does not name it.
    """
    policy = policies.load(context.project.root)
    signer: statement.Signer
    if identity:
        from sparkwright.release.signing.identity import IdentitySigner

        signer = IdentitySigner()
    elif key:
        signer = keys.KeySigner.load(key, keys.passphrase())
    elif dry_run:
        signer = keys.KeySigner.passing()
    else:
        raise UsageError(
            "usage",
            "Neither --key FILE nor --identity is given.",
            todo="Make a key with `sparkwright release key FILE`.",
        )
    identities = tuple(trust.Identity(entry.identity, entry.issuer) for entry in policy.identities)
    own = (signer.public,) if isinstance(signer, keys.KeySigner) else ()
    name = own[0].fingerprint if own else signer.by
    names = policy.keys if own else [entry.identity for entry in policy.identities]
    # Without keys in the policy, any key publishes; one of a dry run is passing.
    if name not in names and (not own or (key and policy.keys)):
        raise TrustError(
            "signer-unknown",
            f"ci/release.yaml does not name this {'key' if own else 'identity'} as one that "
            "publishes.",
            details=[f"{'fingerprint' if own else 'identity'}: {name}"],
        )
    earlier = tuple(keys.PublicKey.load(path) for path in predecessors)
    trusted = trust.Trust((*own, *earlier), identities, said="the publisher")
    return Publisher(context, at.absolute(), signer, trusted, policy)


def _publisher(arguments: argparse.Namespace) -> Publisher:
    return publisher(
        options.checkout(arguments),
        arguments.at,
        arguments.key,
        identity=arguments.identity,
        predecessors=tuple(arguments.predecessor),
        dry_run=getattr(arguments, "dry_run", False),
    )


def publish(arguments: argparse.Namespace) -> dict[str, Any]:
    """Publish the wheels as a release if their verdicts allow it."""
    kind, _, repository = arguments.files.partition(":")
    if (kind, bool(repository)) not in (("folder", False), ("github", True)):
        raise UsageError(
            "usage", f"--files {arguments.files!r} is neither folder nor github:OWNER/REPO."
        )
    wheels = tuple(path.absolute() for path in arguments.wheels)
    if missing := [str(path) for path in wheels if not path.is_file()]:
        raise UsageError("usage", "There is no such wheel.", details=missing)
    request = sequence.Asked(
        wheels,
        arguments.channel,
        arguments.verdicts,
        repository,
        arguments.url,
        arguments.reason,
        arguments.dry_run,
    )
    done = sequence.publish(_publisher(arguments), request)
    rows = [["sent", path.rpartition("/")[2]] for path in done.sent]
    rows += [["was there", path.rpartition("/")[2]] for path in done.there]
    rows += [["removed", path] for path in done.removed]
    rows += [
        ["missing", f"{name}: {verdict.rung}: {verdict.state} ({verdict.reference})"]
        for name, lacks in done.missing.items()
        for verdict in lacks
    ]
    state = "was published before" if done.already else f"published, {size(done.size)} sent"
    if arguments.dry_run:
        state = "would be published"
    else:
        console.note(f"manifest {done.serial} of {done.url}")
    console.table(f"{done.release} in {done.channel}: {state}", ["what", "of"], rows, result=True)
    return {"published": done, "dry_run": arguments.dry_run}


def promote(arguments: argparse.Namespace) -> dict[str, Any]:
    """Move a candidate to verified if new verdicts meet the policy."""
    return _show(
        changes.promote(
            _publisher(arguments), arguments.release, arguments.verdicts, arguments.reason
        )
    )


def yank(arguments: argparse.Namespace) -> dict[str, Any]:
    """Stop offering a release; its files stay."""
    return _show(changes.yank(_publisher(arguments), arguments.release, arguments.reason))


def prune(arguments: argparse.Namespace) -> dict[str, Any]:
    """Remove all but the newest candidates of each stack; file names are never reused."""
    who = _publisher(arguments)
    keep, reason = arguments.keep or who.policy.retain, arguments.reason
    return _show(changes.retain(who, keep, verified=arguments.verified, reason=reason))


def refresh(arguments: argparse.Namespace) -> dict[str, Any]:
    """Sign the manifest again before it expires, and remove the files of killed runs."""
    return _show(changes.refresh(_publisher(arguments), arguments.reason))


def _show(done: changes.Changed) -> dict[str, Any]:
    rows = [[done.action, name] for name in done.releases] or [[done.action, "the whole index"]]
    rows += [["removed", path] for path in done.removed[:SHOWN]]
    if len(done.removed) > SHOWN:
        rows.append(["removed", f"and {len(done.removed) - SHOWN} more"])
    rows += [["left where it is", address] for address in done.elsewhere]
    title = f"manifest {done.serial}, valid until {done.expires}"
    console.table(title, ["what", "of"], rows, result=True)
    return {"changed": done}


def verify(arguments: argparse.Namespace) -> None:
    """Check each wheel, show its evidence, and raise the first failure."""
    if arguments.folder and (arguments.index or arguments.signed_for):
        raise UsageError("usage", "--from excludes --index and --signed-for.")
    find, read, trusted = (_from_folder if arguments.folder else _from_index)(arguments)
    verified: list[dict[str, Any]] = []
    failures = []
    for path in arguments.wheels:
        try:
            with console.step(f"check {path.name}"):
                claims = find(inside.wheel_at(path))
                evidence = [
                    check.checked(wheel, fork, proved, read, trusted)
                    for wheel, fork, proved, _ in claims
                ]
                for checked in evidence:
                    inside.check(path, checked)
            verified += map(_show_evidence, claims, evidence)
        except SparkwrightError as error:
            failures.append(error)
            console.result(f"{path.name}: {error.reference}")
    failed = {error.what: error.reference for error in failures}
    console.document({"wheels": verified, "failed": failed})
    if failures:
        raise failures[0]


def _from_index(arguments: argparse.Namespace) -> Source:
    wish = install.Wish(arguments.index, tuple(arguments.key), arguments.signed_for)
    index = install.opened(options.standalone(arguments), wish)
    return partial(_claims, index), index.evidence, index.trust


def _from_folder(arguments: argparse.Namespace) -> Source:
    carried = trust.carried()
    address = carried.index if carried else arguments.folder.absolute().as_uri()
    trusted = trust.find(address, arguments.key)
    folder = gathered.Folder(arguments.folder, trusted)

    def claims(file: Wheel) -> list[Claim]:
        return [(wheel, None, proved, None) for wheel, proved in folder.proofs(file)]

    return claims, folder.read, trusted


def _claims(index: Catalogue, file: Wheel) -> list[Claim]:
    """
    Return what *index* claims of a wheel file.

    Raises:
        evidence-invalid: It does not hold the file, or under another name, or without one proof.
    """
    # A promoted release has two entries; the last one counts.
    for entry in reversed(index.manifest.entries):
        release = index.release(entry)
        for wheel in release.wheels:
            if wheel.sha256 == file.sha256:
                proofs = [
                    proof for proof in index.proof(entry).wheels if proof.wheel == file.sha256
                ]
                if wheel.filename != file.filename or len(proofs) != 1:
                    raise TrustError(
                        "evidence-invalid",
                        f"{entry.name} does not prove {file.filename} under that name.",
                        details=[f"name: {wheel.filename}", f"proofs: {len(proofs)}"],
                    )
                fork = next((item for item in release.forks if item.name == wheel.fork), None)
                return [(wheel, fork, proofs[0], entry)]
    raise TrustError(
        "evidence-invalid",
        f"The index {index.manifest.url} does not hold {file.filename}.",
        details=[f"sha256 {file.sha256}"],
        todo="Name the index that it came from, or treat it as a file without evidence.",
    )


def _show_evidence(claim: Claim, checked: check.Checked) -> dict[str, Any]:
    """Show the evidence of a wheel, and return its record."""
    wheel, _, proved, entry = claim
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
    """Print the notes of a release."""
    wish = install.Wish(
        arguments.index,
        tuple(arguments.key),
        arguments.signed_for,
        "candidate",
        arguments.stack or "",
        arguments.release,
    )
    record = published.of_index(options.standalone(arguments), wish)
    release = record.release
    if record.yanked:
        console.warn(f"{release.name} was yanked: {record.yanked}")
    markdown = rendered.markdown(release, record.proof, record.before)
    console.result(markdown)
    return {
        "name": release.name,
        "release": whole.address(release),
        "channel": record.channel,
        "yanked": record.yanked,
        "signature checked": record.checked,
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
