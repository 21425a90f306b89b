"""``publish``, and the commands of ``release``: those that change an index, and its evidence."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sparkwright.cli import options
from sparkwright.core.console import console, size
from sparkwright.core.errors import SparkwrightError, UsageError
from sparkwright.gates.core.ladder import GATES
from sparkwright.release.client import install
from sparkwright.release.client.catalogue import Catalogue
from sparkwright.release.decide import policy as policies
from sparkwright.release.errors import TrustError
from sparkwright.release.evidence import check, inside
from sparkwright.release.manifest.records import Entry, Fork, Proved, Wheel
from sparkwright.release.notes import published, rendered, whole
from sparkwright.release.publish import changes, sequence
from sparkwright.release.publish.prepare import Publisher
from sparkwright.release.signing import keys, statement, trust

#: Command → the change of an index that it makes, with the parsed arguments.
CHANGES: dict[str, Callable[[Publisher, argparse.Namespace], changes.Changed]] = {
    "release promote": lambda publisher, arguments: changes.promote(
        publisher, arguments.release, arguments.verdicts, arguments.reason
    ),
    "release yank": lambda publisher, arguments: changes.yank(
        publisher, arguments.release, arguments.reason
    ),
    "release prune": lambda publisher, arguments: changes.retain(
        publisher,
        arguments.keep or publisher.policy.retain,
        verified=arguments.verified,
        reason=arguments.reason,
    ),
    "release refresh": lambda publisher, arguments: changes.refresh(publisher, arguments.reason),
}


def add_arguments(parsers: Mapping[str, argparse.ArgumentParser]) -> None:
    """Add the arguments of ``publish`` and of the commands of ``release``."""
    for name in ("publish", *CHANGES):
        parsers[name].set_defaults(run=publish if name == "publish" else change)
        _add_publisher(parsers[name])
    for name in ("release promote", "release yank"):
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
    for name, run in (("release verify", verify), ("release notes", notes)):
        parsers[name].set_defaults(run=run)
        options.add_index(parsers[name])
    parsers["release verify"].add_argument(
        "wheels", nargs="+", type=Path, metavar="WHEEL", help="the wheel file"
    )
    parsers["release notes"].add_argument(
        "release",
        nargs="?",
        default="",
        metavar="RELEASE",
        help="name or address (default: the newest)",
    )
    parsers["release key"].set_defaults(run=key)
    parsers["release key"].add_argument(
        "file",
        type=Path,
        metavar="FILE",
        help="the private key; the public key is FILE.pub",
    )
    parsers["release key"].add_argument(
        "--show", action="store_true", help="only show the fingerprint of the key in FILE"
    )


def _add_publisher(parser: argparse.ArgumentParser) -> None:
    """Add the options for the index and its signer."""
    add = parser.add_argument
    add("--at", type=Path, required=True, metavar="FOLDER", help="folder of the index")
    signer = parser.add_mutually_exclusive_group()
    signer.add_argument(
        "--key",
        type=Path,
        metavar="FILE",
        help="the private key that signs (made by `sparkwright release key`)",
    )
    signer.add_argument(
        "--identity",
        action="store_true",
        help="sign with Sigstore, as the identity of the workflow that runs this",
    )
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


def _publisher(arguments: argparse.Namespace) -> Publisher:
    """
    Return the publisher of the index ``--at``, which signs by a key or by this machine's identity.

    Raises:
        UsageError: Neither a key nor an identity is given; a dry run needs none.
        key-invalid, identity-unusable: It cannot sign.
        signer-unknown: ci/release.yaml does not name it.
    """
    context = options.checkout(arguments)
    policy = policies.load(context.project.root)
    signer: statement.Signer
    if arguments.identity:
        from sparkwright.release.signing.identity import IdentitySigner

        signer = IdentitySigner()
    elif arguments.key:
        signer = keys.KeySigner.load(arguments.key, keys.passphrase())
    elif getattr(arguments, "dry_run", False):
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
    if name not in names and (not own or (arguments.key and policy.keys)):
        raise TrustError(
            "signer-unknown",
            f"ci/release.yaml does not name this {'key' if own else 'identity'} as one that "
            "publishes.",
            details=[f"{'fingerprint' if own else 'identity'}: {name}"],
        )
    earlier = map(keys.PublicKey.load, arguments.predecessor)
    trusted = trust.Trust((*own, *earlier), identities, said="the publisher")
    return Publisher(context, arguments.at.absolute(), signer, trusted, policy)


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
    moved = (("sent", done.sent), ("was there", done.there), ("removed", done.removed))
    rows = [[what, path.rpartition("/")[2]] for what, paths in moved for path in paths]
    rows += [
        ["missing", f"{name}: {verdict.gate}: {verdict.state} ({verdict.reference})"]
        for name, lacks in done.missing.items()
        for verdict in lacks
    ]
    state = f"published, {size(done.size)} sent; manifest {done.serial} of {done.url}"
    if done.already or arguments.dry_run:
        state = "would be published" if arguments.dry_run else "was published before"
    console.table(f"{done.release} in {done.channel}: {state}", ["what", "of"], rows, result=True)
    return {"published": done, "dry_run": arguments.dry_run}


def change(arguments: argparse.Namespace) -> dict[str, Any]:
    """Change how releases of an index stand: promote, yank, prune or refresh."""
    done = CHANGES[arguments.command](_publisher(arguments), arguments)
    rows = [[done.action, name] for name in done.releases or ("the whole index",)]
    rows.append(["removed", f"{len(done.removed)} files"])
    rows += [["left where it is", address] for address in done.elsewhere]
    title = f"manifest {done.serial}, valid until {done.expires}"
    console.table(title, ["what", "of"], rows, result=True)
    return {"changed": done}


def verify(arguments: argparse.Namespace) -> None:
    """Check each wheel, show its evidence, and raise the first failure."""
    wish = install.Wish(arguments.index, tuple(arguments.key), arguments.signed_for)
    index = install.opened(options.standalone(arguments), wish)
    verified: list[dict[str, Any]] = []
    failures = []
    for path in arguments.wheels:
        try:
            verified.append(_verify(index, path))
        except SparkwrightError as error:
            failures.append(error)
            console.result(f"{path.name}: {error.reference}")
    failed = {error.what: error.reference for error in failures}
    console.document({"wheels": verified, "failed": failed})
    if failures:
        raise failures[0]


def _verify(index: Catalogue, path: Path) -> dict[str, Any]:
    """Check the wheel at *path* by its evidence in *index*, show the evidence, and return it."""
    with console.step(f"check {path.name}"):
        entry, wheel, fork, proved = _claim(index, inside.wheel_at(path))
        checked = check.checked(wheel, fork, proved, index.evidence, index.trust)
        inside.check(path, checked)
    rows = [[kind, "holds", signer] for kind, signer in checked.signers.items()]
    rows += [[name, state, GATES.get(name, "")] for name, state in checked.gates.items()]
    rows += [
        [f"missing: {item.gate}", f"{item.state} ({item.reference})", item.says]
        for item in proved.missing
    ]
    yanked = f", yanked: {entry.yanked}" if entry.yanked else ""
    title = f"{wheel.filename}  sha256 {wheel.sha256}\n{entry.name}, {entry.channel}{yanked}"
    console.table(title, ["item", "state", "signer or text"], rows, result=True)
    return {
        "file": wheel.filename,
        "sha256": wheel.sha256,
        "signers": checked.signers,
        "gates": dict(checked.gates),
        "missing": proved.missing,
        "speeds": proved.speeds,
        "release": entry.name,
        "channel": entry.channel,
        "yanked": entry.yanked,
    }


def _claim(index: Catalogue, file: Wheel) -> tuple[Entry, Wheel, Fork | None, Proved]:
    """
    Return what *index* claims of a wheel file: entry, wheel, fork and proof.

    Raises:
        evidence-invalid: It does not hold the file, or under another name, or without one proof.
    """
    # A promoted release has two entries; the last one counts.
    for entry in reversed(index.manifest.entries):
        release = index.release(entry)
        for wheel in release.wheels:
            if wheel.sha256 != file.sha256:
                continue
            proofs = [proof for proof in index.proof(entry).wheels if proof.wheel == file.sha256]
            if wheel.filename != file.filename or len(proofs) != 1:
                raise TrustError(
                    "evidence-invalid",
                    f"{entry.name} does not prove {file.filename} under that name.",
                    details=[f"name: {wheel.filename}", f"proofs: {len(proofs)}"],
                )
            fork = next((item for item in release.forks if item.name == wheel.fork), None)
            return entry, wheel, fork, proofs[0]
    raise TrustError(
        "evidence-invalid",
        f"The index {index.manifest.url} does not hold {file.filename}.",
        details=[f"sha256 {file.sha256}"],
        todo="Name the index that it came from, or treat it as a file without evidence.",
    )


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
