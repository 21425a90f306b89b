"""``publish``, and the commands of ``release`` that change an index."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparkwright.cli import argtypes, context
from sparkwright.core.console import console, size
from sparkwright.core.errors import UsageError
from sparkwright.forks.context import RunContext
from sparkwright.release.decide import policy as policies
from sparkwright.release.errors import TrustError
from sparkwright.release.publish import changes, sequence
from sparkwright.release.publish.prepare import Publisher
from sparkwright.release.signing import keys, statement, trust

#: Number of removed files that are shown by name.
SHOWN = 20


def add_arguments(parsers: Mapping[str, argparse.ArgumentParser]) -> None:
    """Add the arguments of the commands that change an index."""
    functions = {
        "publish": publish,
        "release promote": promote,
        "release yank": yank,
        "release rollback": rollback,
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
    argtypes.add_channel(parsers["release rollback"])
    parsers["release prune"].add_argument(
        "--keep",
        type=argtypes.whole(1),
        default=0,
        metavar="N",
        help="candidates to keep of each stack (default: ci/release.yaml)",
    )
    parsers["release prune"].add_argument(
        "--verified", action="store_true", help="also remove old releases of verified"
    )


def _add_publisher(parser: argparse.ArgumentParser) -> None:
    """Add the options for the index and its signer."""
    add = parser.add_argument
    add("--at", type=Path, required=True, metavar="FOLDER", help="folder of the index")
    argtypes.add_signer(parser, "--key")
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
        choices=argtypes.CHANNELS,
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
    session: RunContext,
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
    policy = policies.load(session.project.root)
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
    return Publisher(session, at.absolute(), signer, trusted, policy)


def _publisher(arguments: argparse.Namespace) -> Publisher:
    return publisher(
        context.checkout(arguments),
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


def rollback(arguments: argparse.Namespace) -> dict[str, Any]:
    """Yank the newest release of the stack in a channel; clients then get the one before it."""
    who, reason = _publisher(arguments), arguments.reason
    return _show(changes.rollback(who, who.session.project.stack, arguments.channel, reason))


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
