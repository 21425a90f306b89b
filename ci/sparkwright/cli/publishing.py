"""
What the verbs that change an index share: who signs, by which policy, and what is shown afterwards.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from sparkwright.core.console import console
from sparkwright.core.errors import UsageError
from sparkwright.forks.context import RunContext
from sparkwright.release.decide import policy as policies
from sparkwright.release.decide.policy import ReleasePolicy
from sparkwright.release.errors import TrustError
from sparkwright.release.publish import changes
from sparkwright.release.publish.changes import Changed
from sparkwright.release.publish.prepare import Publisher
from sparkwright.release.signing import keys
from sparkwright.release.signing.keys import KeySigner, PublicKey
from sparkwright.release.signing.statement import Signer
from sparkwright.release.signing.trust import Identity, Trust

#: More names than this are told as a number.
SHOWN = 20


def publisher(session: RunContext, arguments: argparse.Namespace) -> Publisher:
    """
    Return who publishes where, as the command line says.

    Raises:
        UsageError: Neither a key nor an identity is named. key-invalid, identity-unusable: It
            cannot sign. signer-unknown: ci/release.yaml names others.
    """
    policy = policies.load(session.project.root)
    signer = _signer(arguments)
    passing = not arguments.key and not arguments.identity
    return Publisher(
        session,
        arguments.at.absolute(),
        signer,
        _trust(signer, policy, arguments.predecessor, passing=passing),
        policy,
    )


def _signer(arguments: argparse.Namespace) -> Signer:
    if getattr(arguments, "dry_run", False) and not arguments.key and not arguments.identity:
        # Whoever only decides signs nothing.
        return KeySigner.passing()
    if bool(arguments.key) == arguments.identity:
        raise UsageError(
            "usage",
            "Either --key FILE or --identity says who signs.",
            todo="Make a key with `sparkwright key FILE`.",
        )
    if arguments.identity:
        from sparkwright.release.signing.identity import IdentitySigner

        return IdentitySigner()
    return KeySigner.load(arguments.key, keys.passphrase())


def _trust(
    signer: Signer, policy: ReleasePolicy, predecessors: Sequence[Path], *, passing: bool
) -> Trust:
    """
    Return whose signature counts for what is there already: the signer's own, and those who are
    named as predecessors.
    """
    identities = tuple(Identity(one.identity, one.issuer) for one in policy.identities)
    own = signer.public if isinstance(signer, KeySigner) else None
    if own and not passing and policy.keys and own.fingerprint not in policy.keys:
        raise TrustError(
            "signer-unknown",
            "ci/release.yaml does not name this key as one that publishes.",
            details=[f"fingerprint: {own.fingerprint}"],
        )
    if own is None and signer.by not in [one.identity for one in identities]:
        raise TrustError(
            "signer-unknown",
            "ci/release.yaml does not name this identity as one that publishes.",
            details=[f"identity: {signer.by}"],
        )
    known = tuple(PublicKey.load(path) for path in predecessors)
    return Trust((*([own] if own else []), *known), identities, said="the publisher")


def show(done: Changed) -> int:
    """Show what was done."""
    rows = [[done.action, name] for name in done.releases] or [[done.action, "the whole index"]]
    rows += [["removed", place] for place in done.removed[:SHOWN]]
    rows += (
        [["removed", f"and {len(done.removed) - SHOWN} more"]] if len(done.removed) > SHOWN else []
    )
    rows += [["left where it is", address] for address in done.elsewhere]
    console.table(
        f"manifest {done.serial}, believed until {done.expires}", ["what", "of"], rows, result=True
    )
    console.document({"changed": done})
    return 0


def rollback(session: RunContext, arguments: argparse.Namespace) -> int:
    """
    Yank the newest release of the stack in the channel, so that clients get the one before it.
    """
    return show(
        changes.rollback(
            publisher(session, arguments),
            session.project.stack,
            arguments.channel,
            arguments.reason,
        )
    )
