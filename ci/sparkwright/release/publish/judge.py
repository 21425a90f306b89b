"""What the decision says of the wheels at hand, and whether that is enough for the channel."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from sparkwright.audit import policy as audit
from sparkwright.core.errors import UsageError
from sparkwright.release.decide import decision, facts, verdicts
from sparkwright.release.decide.facts import Inspected
from sparkwright.release.errors import ReleaseError
from sparkwright.release.manifest.records import Channel, Proved
from sparkwright.release.publish import ground, installer
from sparkwright.release.publish.offers import Offers
from sparkwright.release.publish.prepare import Decided, Publisher
from sparkwright.release.signing import trust
from sparkwright.release.signing.keys import KeySigner
from sparkwright.release.signing.trust import Identity


def decided(publisher: Publisher, wheels: Sequence[Path], folder: Path | None, channel: Channel | None) -> tuple[Decided, Channel]:
    """
    Return what is decided of *wheels*, and the channel that they go to.

    Args:
        folder: Where the verdicts lie; None for beside each wheel.
        channel: None for ``verified`` or nothing.

    Raises:
        verified-refused: Something is missing, and ``candidate`` was not asked for.
        UsageError: They are of another stack. Others: as `facts.inspect`, `verdicts.beside` and `decision.decide`.
    """
    project = publisher.context.project
    policy = audit.load(project.audit_file, project.spec.arch) if project.audit_file.exists() else None
    inspected = facts.inspect_all(wheels, policy)
    if others := sorted({one.stack for one in inspected} - {"", project.stack}):
        raise UsageError(
            "usage", f"These are wheels of stack {', '.join(others)}, not of {project.stack}.", todo=f"Give --stack {others[0]}."
        )
    judged = {one.wheel.filename: verdicts.beside(one.path, folder) for one in inspected}
    proved = decision.decide_all(inspected, judged, publisher.policy)
    if channel != "candidate":
        refuse(inspected, proved)
    raw = {one.wheel.sha256: _raw(judged[one.wheel.filename], one) for one in inspected}
    return Decided(inspected, proved, raw), channel or "verified"


def _raw(judged: verdicts.Judged, one: Inspected) -> dict[str, bytes]:
    """Return the files that statements about the wheel name by hash: those that there are."""
    found = {"sbom": one.sbom, "verdicts": judged.verdicts, "throughput": judged.throughput}
    return {kind: data for kind, data in found.items() if data}


def refuse(inspected: Sequence[Inspected], proved: Sequence[Proved]) -> None:
    """
    Do nothing where all of it may stand in ``verified``.

    Raises:
        verified-refused: Something is missing; the details say what, wheel by wheel.
    """
    lacking = [(one.wheel, what.missing) for one, what in zip(inspected, proved, strict=True) if what.missing]
    if lacking:
        told = [(wheel, one) for wheel, missing in lacking for one in missing]
        details = [f"{wheel.project}: {one.gate}: {one.state} ({one.reference}): {one.says}" for wheel, one in told]
        data = {"missing": {wheel.filename: list(missing) for wheel, missing in lacking}}
        raise ReleaseError(
            "verified-refused", f"{len(lacking)} of {len(inspected)} wheels may not stand in verified.", details=details, data=data
        )


@contextlib.contextmanager
def with_installer(publisher: Publisher, offers: Offers, known: Decided, url: str) -> Iterator[Decided]:
    """Yield *known* and the installer: a new one in a temporary folder, or the last one where nothing in it would change."""
    said = trust.document(url, [publisher.signer.public] if isinstance(publisher.signer, KeySigner) else [], identities(publisher))
    with tempfile.TemporaryDirectory(dir=publisher.root / ground.WORK, prefix="installer-") as folder:
        made = installer.wheel(Path(folder), said, offers.manifest.serial + 1, offers.installer())
        yield besides(publisher, known, [made])


def besides(publisher: Publisher, known: Decided, installers: Sequence[Path]) -> Decided:
    """Return *known* and what is decided of *installers*, which need no verdicts."""
    more = facts.inspect_all(installers)
    raw = {one.wheel.sha256: _raw(verdicts.Judged(), one) for one in more}
    return Decided((*known.inspected, *more), (*known.proved, *decision.decide_all(more, {}, publisher.policy)), {**known.raw, **raw})


def identities(publisher: Publisher) -> list[Identity]:
    """Return the identities that may sign for the index, as the policy has them."""
    return [Identity(one.identity, one.issuer) for one in publisher.policy.identities]
