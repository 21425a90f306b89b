"""Failures of release, with their references."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from sparkwright.core.errors import Advice, SparkwrightError


class ReleaseError(SparkwrightError):
    """An index or a release cannot be used or changed."""

    references: ClassVar[Mapping[str, Advice]] = {
        "clock-wrong": Advice(
            "The index was signed more than a day after this machine's present time; by that clock nothing would ever expire.",
            "Set the clock (timedatectl), and run again.",
        ),
        "index-busy": Advice(
            "Another publisher works on this index right now.",
            "Wait for it to end and run again; nothing was changed.",
        ),
        "index-damaged": Advice(
            "A file of the index is missing, or not the one that its manifest names: a faulty disk, a half-copied folder, a wrong hand.",
            "Restore it from a copy, or publish it again from the same wheels. Clients refuse it until then.",
        ),
        "index-missing": Advice(
            "There is no index of sparkwright at this place, or nothing says where it is.",
            "Name it with --index URL (or --at FOLDER for its publisher); `publish` makes one where there is none.",
        ),
        "index-moved": Advice(
            "The index changed while this publication was prepared, so that what was decided may no longer hold.",
            "Run the same command again; files that are there already are not sent twice.",
        ),
        "index-unpinned": Advice(
            "Somebody else signed the index last, and ci/release.yaml does not name its root; anybody who can write to the folder could have replaced it.",
            "Compare the fingerprint above with the one that was published elsewhere, and write it into ci/release.yaml as `root`.",
        ),
        "index-unwritable": Advice(
            "The folder of the index, or something in it, cannot be written by this user.",
            "Mend its permissions or choose another folder; clients read the index as it was.",
        ),
        "lock-invalid": Advice(
            "The lock of a set is no pylock.toml of wheels with sha256 hashes, or it names a file that would leave its folder.",
            "Do not install from it. Use the index's own address; if that serves the same, tell its publisher.",
        ),
        "manifest-elsewhere": Advice(
            "The manifest was signed for another address than the one it was asked from.",
            "If this is a mirror that you trust to be reachable (it needs no other trust), name the signed address with --signed-for.",
        ),
        "manifest-expired": Advice(
            "Nobody has signed this index for too long: its publisher stopped, or somebody keeps you from newer manifests.",
            "Compare with the index at its own address. What is installed keeps working; "
            "install nothing from here until it is signed anew.",
        ),
        "manifest-forked": Advice(
            "Two manifests with the same serial differ: two publishers worked at once, or the key is in other hands.",
            "Install nothing from here. Tell the publisher both digests above.",
        ),
        "manifest-invalid": Advice(
            "What the index serves as its manifest is no manifest: a login page, an error page, a cut-off or hand-edited file.",
            "Open the address above in a browser. If the index itself is damaged, its publisher makes it again: `sparkwright release refresh`.",
        ),
        "manifest-replayed": Advice(
            "This machine has seen a newer manifest of the same index: a mirror lags behind, or somebody serves you an old one.",
            "Use the index's own address, or wait for the mirror. Do not delete the record "
            "of what was seen unless you know why it is wrong.",
        ),
        "publish-failed": Advice(
            "The host did not keep what it was sent: another size, other bytes, a draft that changed, or a file above its limit.",
            "Run the same command again; what arrived whole is kept. The index does not point at any of it yet.",
        ),
        "release-mutable": Advice(
            "The host would let somebody replace published files: releases of this repository are not immutable.",
            "Switch on immutable releases in the repository's settings, and run again.",
        ),
        "release-name-taken": Advice(
            "The index holds this very release already, or once held another under its name; both stay as they are.",
            "Publish under the next number; see `sparkwright list` for what there is.",
        ),
        "release-unknown": Advice(
            "The index has no release of that name, stack, channel or machine.",
            "See `sparkwright list` for what there is.",
        ),
        "release-unproved": Advice(
            "The release is a candidate: not everything that `verified` asks for was shown. The lines above say what is missing.",
            "Take it knowingly with `--channel candidate`, or choose a release of the channel verified.",
        ),
        "release-yanked": Advice(
            "All that fits was yanked: its publisher says that it should not be installed, and why.",
            "Choose another; to have this one nevertheless, name it whole (`--version NAME`).",
        ),
        "set-mixed": Advice(
            "The lock names another wheel, another index or another version than the release it belongs to: two releases were mixed.",
            "Do not install it. Use the index's own address; if that serves the same, tell its publisher.",
        ),
        "set-unresolved": Advice(
            "No set of versions satisfies all requirements of these wheels on the package index that was asked.",
            "Read uv's explanation above. A version that the index lacks is replaced under `overrides` in ci/release.yaml.",
        ),
        "verdict-foreign": Advice(
            "The verdicts are about other bytes than the wheel: an earlier build, or files that were mixed up.",
            "Run `sparkwright gate` with this very wheel.",
        ),
        "verdict-hollow": Advice(
            "A pass has nothing behind it: checks are missing that the gate makes, or no figure, sample or leg was recorded.",
            "Run the gate again, whole; do not edit what it wrote. The lines above name what is missing.",
        ),
        "verified-refused": Advice(
            "Not every required verdict about these bytes is a pass; the lines above say which, and why.",
            "Run what is missing on a Spark (`sparkwright gate`), or publish to the channel candidate, where all of this is shown.",
        ),
        "version-order": Advice(
            "pip and uv take the highest version, and this one sorts before one that is offered already, so nobody would get it.",
            "Raise `label` in stack.yaml (spark.2026.11 to spark.2026.11.1) and build again, or yank the other release.",
        ),
        "wheel-name-taken": Advice(
            "The index holds, or once held, other bytes under this file name. Names are never used twice: caches and locks rely on it.",
            "Raise `label` in the stack's stack.yaml and build again; a fix is a new version.",
        ),
    }


class TrustError(SparkwrightError):
    """A signature, a key or evidence cannot be trusted."""

    references: ClassVar[Mapping[str, Advice]] = {
        "evidence-invalid": Advice(
            "A statement about a wheel is missing, of another kind, about other bytes, or does not agree with the statements beside it.",
            "Do not install the wheel. Tell the publisher which statement it was; `sparkwright release verify` shows them one by one.",
        ),
        "identity-unusable": Advice(
            "There is no identity token to sign with, it has run out, or the services that vouch for it and log it did not answer.",
            "In a workflow, give it the right to ask for a token (id-token: write) and run again; elsewhere sign with a key.",
        ),
        "key-invalid": Advice(
            "The file is no Ed25519 key of the kind needed here, others may read it, or its passphrase is wrong.",
            "Make one with `sparkwright release key FILE`; a private key belongs to its owner alone (chmod 600).",
        ),
        "key-missing": Advice(
            "A role of the index needs the signatures of keys that were not given.",
            "Name their files or folder with --keys; `sparkwright release key show --at FOLDER` lists the keys of each role.",
        ),
        "signature-invalid": Advice(
            "The bytes are not the ones that were signed: changed, mixed up or cut off on the way.",
            "Try the index's own address. If it serves the same, tell its publisher, and install nothing from it.",
        ),
        "signer-unknown": Advice(
            "Somebody signed this, but no key or identity that this machine trusts for the index.",
            "Compare the signer above with what the publisher says elsewhere; name the right key with --key, or do not install.",
        ),
        "trust-missing": Advice(
            "Nothing says whose signature counts for this index, so nothing of it can be believed.",
            "Name the publisher's key with --key FILE, having compared its fingerprint with what the publisher says elsewhere.",
        ),
    }


class InstallError(SparkwrightError):
    """An environment cannot be installed or used."""

    references: ClassVar[Mapping[str, Advice]] = {
        "download-invalid": Advice(
            "The bytes that arrived are not those that the signed manifest names: a proxy that truncates, a damaged mirror, or tampering.",
            "Try again, or use the index's own address. What arrived was not kept and nothing was installed.",
        ),
        "environment-broken": Advice(
            "Something else changed the installed set: pip or uv replaced, removed or edited a package of it.",
            "Run the same `sparkwright install` again with --repair; it puts back exactly what is listed above.",
        ),
        "environment-foreign": Advice(
            "The environment holds another build of a package of the matched set (torch, most often), which something else may rely on.",
            "Install into a new environment (python3 -m venv), or let it be replaced with --replace.",
        ),
        "nothing-installed": Advice(
            "The environment holds no set that sparkwright installed, or none before the present one.",
            "See `sparkwright list`, and name an environment with --into.",
        ),
        "onsite-mismatch": Advice(
            "A file was changed by hand or by another tool, so an edit made for the pinned wheel would be a guess. Nothing was changed.",
            "Look at the files named above. `sparkwright install --restore` puts the originals back; then install again without it.",
        ),
    }
