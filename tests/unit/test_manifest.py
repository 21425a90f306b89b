"""What may happen to a manifest, as an algebra, and what it takes to be believed."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.refusals import refusal

from sparkwright.core.errors import SparkwrightError
from sparkwright.core.files import canonical, sha256_bytes
from sparkwright.release.manifest import change, signed, times
from sparkwright.release.manifest.records import Channel, Entry, Manifest, Release, Wheel
from sparkwright.release.signing import Statement, Subject
from sparkwright.release.signing.keys import KeySigner
from sparkwright.release.signing.trust import Trust

URL = "https://wheels.example/spark/"
BY = "ed25519:0123456789abcdef"
SIGNER = KeySigner(Ed25519PrivateKey.generate())
TRUST = Trust((SIGNER.public,))
STACKS = ("2026.05", "2026.11")


def at(day: int) -> str:
    return times.after("2026-11-01T00:00:00Z", day)


def release(number: int, stack: str = "2026.11") -> Release:
    """Return a release with one wheel of its own and one that it shares with all of its stack."""
    own, shared = f"vllm-{number}.0-py3-none-any.whl", f"cutlass-{stack}-py3-none-any.whl"
    wheels = tuple(
        Wheel(name, sha256_bytes(name.encode()), 1, "vllm", "vllm", "1", "any", f"files/{name}", "0" * 64, at(number))
        for name in (own, shared)
    )
    return Release(f"{stack}.{number}", stack, at(number), wheels, (), ())


def entry(made: Release, channel: Channel = "candidate") -> Entry:
    address = sha256_bytes(canonical(made))
    return Entry(address, sha256_bytes(address.encode()), made.name, made.stack, made.made, channel)


def published(*channels: Channel, stack: str = "2026.11") -> Manifest:
    """Return a manifest with one release per channel given, oldest first."""
    manifest = change.first(URL, at=at(0))
    for number, channel in enumerate(channels, 1):
        manifest = change.publish(manifest, entry(release(number, stack), channel), at=at(number), by=BY)
    return manifest


Step = Callable[[Manifest], Manifest]


def releases(manifest: Manifest) -> dict[str, Release]:
    return {one.release: release(int(one.name.rpartition(".")[2]), one.stack) for one in manifest.entries}


#: Every transition, with arguments that often fit and sometimes do not.
STEPS: st.SearchStrategy[Step] = st.one_of(
    st.builds(
        lambda number, stack, channel: lambda one: change.publish(one, entry(release(number, stack), channel), at=at(1), by=BY),
        st.integers(1, 9), st.sampled_from(STACKS), st.sampled_from(("candidate", "verified")),
    ),
    st.builds(
        lambda number, stack: lambda one: change.promote(one, f"{stack}.{number}", "ff" * 32, at=at(1), by=BY),
        st.integers(1, 9), st.sampled_from(STACKS),
    ),
    st.builds(
        lambda number, stack, reason: lambda one: change.yank(one, f"{stack}.{number}", at=at(1), by=BY, reason=reason),
        st.integers(1, 9), st.sampled_from(STACKS), st.sampled_from(("", "  ", "it is slow")),
    ),
    st.builds(
        lambda keep, verified: lambda one: change.retain(one, releases(one), keep=keep, verified=verified, at=at(1), by=BY),
        st.integers(0, 3), st.booleans(),
    ),
    st.builds(lambda days: lambda one: change.refresh(one, at=at(1), by=BY, days=days), st.integers(1, 60)),
)  # fmt: skip


@given(st.lists(STEPS, max_size=25))
def test_whatever_is_done_the_manifest_stays_true_to_its_log(steps: Sequence[Step]) -> None:
    """
    Each step adds one to the serial and one record to the log, or is refused and changes nothing; of an entry only channel, proof and yank
    change, and these only forwards; what went away is retired by name; and a client can always read the result.
    """
    manifest = change.first(URL, at=at(0))
    for step in steps:
        try:
            after = step(manifest)
        except SparkwrightError:
            continue
        assert (after.serial, after.log[:-1], after.log[-1].serial) == (manifest.serial + 1, manifest.log, after.serial)
        assert after.made < after.expires
        assert after.url == manifest.url
        now = {one.release: one for one in after.entries}
        for old in manifest.entries:
            if old.release not in now:
                assert after.log[-1].action == "retain"
                assert {wheel.filename for wheel in releases(manifest)[old.release].wheels} <= set(after.retired)
                continue
            new = now[old.release]
            assert replace(new, channel=old.channel, proof=old.proof, yanked=old.yanked) == old
            assert (old.channel, new.channel) != ("verified", "candidate")
            assert not old.yanked or new.yanked == old.yanked
        assert manifest.retired.items() <= after.retired.items()
        order = [one.release for one in after.entries]
        kept = [one.release for one in manifest.entries if one.release in now]
        assert order[: len(kept)] == kept
        assert signed.read(signed.seal(after, SIGNER), TRUST, what="it") == after
        manifest = after


def test_a_release_and_its_name_are_published_once() -> None:
    """The same release, another under its name, and one under a name that was removed long ago are refused."""
    manifest = published("candidate", "candidate")
    for again in (entry(release(1)), replace(entry(release(7)), name="2026.11.1"), replace(entry(release(1)), name="2026.11.9")):
        with refusal("release-name-taken"):
            change.publish(manifest, again, at=at(9), by=BY)
    left = change.retain(manifest, releases(manifest), keep=1, at=at(9), by=BY)
    assert [one.name for one in left.entries] == ["2026.11.2"]
    with refusal("release-name-taken"):
        change.publish(left, replace(entry(release(7)), name="2026.11.1"), at=at(9), by=BY)


def test_the_name_of_a_removed_wheel_is_never_used_for_other_bytes() -> None:
    """What `retain` removed can be published again as it was, and not as anything else."""
    manifest = published("candidate", "candidate")
    left = change.retain(manifest, releases(manifest), keep=1, at=at(9), by=BY, kept={release(2).wheels[1].sha256})
    gone, shared = release(1).wheels
    assert left.retired == {gone.filename: gone.sha256}
    assert shared.filename not in left.retired
    assert change.publish(left, entry(release(3)), at=at(9), by=BY, files={gone.filename: gone.sha256})
    with refusal("wheel-name-taken") as error:
        change.publish(left, entry(release(3)), at=at(9), by=BY, files={gone.filename: "ab" * 32})
    assert gone.sha256 in error.value.details[0]


def test_what_was_retired_once_stays_retired() -> None:
    """A second removal adds its names to those of the first."""
    manifest = published("candidate", "candidate", "candidate")
    for keep in (2, 1):
        manifest = change.retain(manifest, releases(manifest), keep=keep, at=at(9), by=BY)
    assert {"vllm-1.0-py3-none-any.whl", "vllm-2.0-py3-none-any.whl"} <= set(manifest.retired)


def test_only_a_candidate_that_is_offered_is_promoted() -> None:
    """A verified one, a yanked one and one that does not exist are not; the others stay as they were."""
    manifest = published("candidate", "verified", "candidate")
    after = change.promote(manifest, "2026.11.1", "ab" * 32, at=at(9), by=BY)
    assert (after.entries[0].channel, after.entries[0].proof) == ("verified", "ab" * 32)
    assert after.entries[1:] == manifest.entries[1:]
    for name, reference in (("2026.11.2", "release-unknown"), ("2026.11.9", "release-unknown")):
        with refusal(reference):
            change.promote(manifest, name, "ab" * 32, at=at(9), by=BY)
    yanked = change.yank(manifest, "2026.11.3", at=at(9), by=BY, reason="slow")
    with refusal("release-yanked"):
        change.promote(yanked, "2026.11.3", "ab" * 32, at=at(9), by=BY)


def test_a_yank_has_a_reason_and_happens_once() -> None:
    """Without a reason it is refused; the reason is in the entry and in the log; a release is found by its address, too."""
    manifest = published("verified")
    for reason in ("", " ", "two\nlines", "a" * 1001, "\x1b[2J"):
        with refusal("usage"):
            change.yank(manifest, "2026.11.1", at=at(9), by=BY, reason=reason)
    after = change.yank(manifest, manifest.entries[0].release, at=at(9), by=BY, reason="wrong numbers")
    assert (after.entries[0].yanked, after.log[-1].reason, after.log[-1].release) == ("wrong numbers", "wrong numbers", "2026.11.1")
    with refusal("release-yanked"):
        change.yank(after, "2026.11.1", at=at(9), by=BY, reason="again")


def test_retaining_removes_old_candidates_and_leaves_what_can_be_installed() -> None:
    """The newest that are offered stay, as many as asked; yanked ones do not count; verified ones stay unless they are asked for."""
    manifest = published("candidate", "verified", "candidate", "candidate", "verified")
    assert [one.name for one in change.surplus(manifest, 1)] == ["2026.11.1", "2026.11.3"]
    assert [one.name for one in change.surplus(manifest, 1, verified=True)] == ["2026.11.1", "2026.11.2", "2026.11.3"]
    assert change.surplus(manifest, 3) == []
    yanked = change.yank(manifest, "2026.11.4", at=at(9), by=BY, reason="slow")
    assert [one.name for one in change.surplus(yanked, 1)] == ["2026.11.1"]
    with refusal("usage"):
        change.surplus(manifest, 0)
    after = change.retain(manifest, releases(manifest), keep=1, at=at(9), by=BY)
    assert "2026.11.1, 2026.11.3" in after.log[-1].reason


def test_stacks_do_not_count_against_each_other() -> None:
    """Each stack keeps its own newest candidates."""
    manifest = published("candidate", "candidate")
    for number in (1, 2):
        manifest = change.publish(manifest, entry(release(number, "2026.05")), at=at(9), by=BY)
    assert [one.name for one in change.surplus(manifest, 1)] == ["2026.11.1", "2026.05.1"]


def test_a_manifest_expires_after_thirty_days_or_as_asked() -> None:
    """Signing it again moves both times and nothing else."""
    manifest = published("verified")
    assert times.days(manifest.made, manifest.expires) == 30
    after = change.refresh(manifest, at=at(40), by=BY, days=7)
    assert (after.made, after.expires, after.entries) == (at(40), at(47), manifest.entries)


@given(st.datetimes(), st.integers(0, 5000))
def test_times_sort_as_their_texts_do(moment: Any, days: int) -> None:
    """A later time has a later text."""
    if 1000 <= moment.year < 9900:
        early = moment.strftime("%Y-%m-%dT%H:%M:%SZ")
        assert (times.after(early, days) > early) == (days > 0)
        assert times.days(early, times.after(early, days)) == days


def sealed(predicate: dict[str, Any], subject: str = "", kind: str = signed.PREDICATE) -> bytes:
    """Return any predicate signed as a manifest, with the trusted key."""
    address = subject or sha256_bytes(canonical(predicate))
    return SIGNER.sign(Statement((Subject("manifest", address),), kind, predicate))


def test_a_manifest_is_read_as_it_was_signed_and_the_same_one_gives_the_same_bytes() -> None:
    """Signing is repeatable with a key, and reading is its inverse."""
    manifest = published("verified", "candidate")
    data = signed.seal(manifest, SIGNER)
    assert data == signed.seal(manifest, SIGNER)
    assert signed.read(data, TRUST, what="it", asked="HTTPS://wheels.example:443/spark") == manifest


def test_a_manifest_of_a_newer_program_is_read_as_far_as_it_is_known() -> None:
    """A field that this program does not know is passed over, as long as the format is the same."""
    manifest = published("verified")
    assert signed.read(sealed(msgspec.to_builtins(manifest) | {"new": [1]}), TRUST, what="it") == manifest


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda one: one.update(format=2), "newer sparkwright"),
        (lambda one: one.update(serial=0), "serial 0"),
        (lambda one: one.update(serial="3"), "serial"),
        (lambda one: one.update(expires=one["made"]), "expires"),
        (lambda one: one.update(made="2026-13-01T00:00:00Z"), "2026-13-01"),
        (lambda one: one.update(made="yesterday"), "made"),
        (lambda one: one.update(url="https://me:secret@x/"), "URL"),
        (lambda one: one["entries"].append(one["entries"][0]), "same name"),
        (lambda one: one["entries"].append(one["entries"][0] | {"name": "x"}), "same address"),
        (lambda one: one["entries"][0].update(channel="stable"), "channel"),
        (lambda one: one["entries"][0].update(name="../../etc"), "name"),
        (lambda one: one["entries"][0].update(release="AB" * 32), "release"),
        (lambda one: one["entries"][0].update(yanked="a\x1b[2Jb"), "yanked"),
        (lambda one: one["log"].reverse(), "out of order"),
        (lambda one: one["log"][-1].update(serial=99), "out of order"),
        (lambda one: one.pop("url"), "url"),
    ],
)
def test_a_signed_manifest_that_makes_no_sense_is_refused(spoil: Callable[[dict[str, Any]], object], says: str) -> None:
    """Even the right key cannot sign impossible times, names that leave the folder, terminal codes, or a log out of order."""
    predicate = json.loads(canonical(published("verified", "candidate", "candidate")))
    spoil(predicate)
    with refusal("manifest-invalid") as error:
        signed.read(sealed(predicate), TRUST, what="it")
    assert says in " ".join([error.value.what, *error.value.details])


def test_each_way_in_which_a_manifest_is_none_has_its_reference() -> None:
    """Pages, statements of other things, other signers, changed bytes and other indexes are told apart."""
    manifest = published("verified")
    data, predicate = signed.seal(manifest, SIGNER), msgspec.to_builtins(manifest)
    stranger = KeySigner(Ed25519PrivateKey.generate())
    for bad in (b"", b"<html>log in</html>", data[:-20], sealed(predicate, kind="urn:toy:v1"), sealed(predicate, subject="ab" * 32)):
        with refusal("manifest-invalid"):
            signed.read(bad, TRUST, what="it")
    with refusal("signer-unknown"):
        signed.read(signed.seal(manifest, stranger), TRUST, what="it")
    changed = json.loads(data) | {"payload": json.loads(signed.seal(replace(manifest, serial=9), SIGNER))["payload"]}
    with refusal("signature-invalid"):
        signed.read(json.dumps(changed).encode(), TRUST, what="it")
    with refusal("manifest-elsewhere") as error:
        signed.read(data, TRUST, what="it", asked="https://mirror.example/spark/")
    assert URL in error.value.details[1]


def test_what_no_client_would_read_is_not_signed() -> None:
    """The state before the first publication, a release that is named twice, and a name that is none are refused before they are signed."""
    manifest = published("verified")
    bare = change.publish(manifest, replace(entry(release(2)), name="a name with blanks"), at=at(2), by=BY)
    for bad in (change.first(URL, at=at(0)), replace(manifest, entries=manifest.entries * 2), bare):
        with refusal("manifest-invalid"):
            signed.seal(bad, SIGNER)
