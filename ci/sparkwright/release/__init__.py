"""Releases: what is published and proved, and the failures of publishing."""

from collections.abc import Mapping
from typing import ClassVar

from sparkwright.core.errors import Advice, SparkwrightError


class ReleaseError(SparkwrightError):
    """
    A release cannot be published or changed, or a key, an identity or a file of the gates cannot be
    trusted.
    """

    references: ClassVar[Mapping[str, Advice]] = {
        "evidence-invalid": Advice(
            "A file beside the wheel is not what `sparkwright gate` writes: cut off, edited, or of"
            " another version.",
            "Run the gate again with this very wheel; do not edit what it writes.",
        ),
        "identity-unusable": Advice(
            "The identity token is missing, expired or another identity's, or the services "
            "that certify and log it did not answer.",
            "In a workflow, give the job the right to ask for a token (id-token: write) and run"
            " again; elsewhere sign with a key.",
        ),
        "index-moved": Advice(
            "The index changed while this change was prepared, so what was decided may no longer"
            " hold.",
            "Run the same command again; files that are there already are not sent twice.",
        ),
        "index-unpinned": Advice(
            "None of your keys signed the index as it is, and ci/release.yaml does not name "
            "its root, so anybody who can write to the folder could have replaced it.",
            "Compare the fingerprint above with the one that was published elsewhere, and write it"
            " into ci/release.yaml as `root`.",
        ),
        "index-unwritable": Advice(
            "The folder of the index, or something in it, cannot be written by this user.",
            "Correct its permissions or choose another folder, and run again. Pages that a change"
            " could not write are written by `sparkwright release refresh`.",
        ),
        "key-invalid": Advice(
            "The file is no Ed25519 key of the kind needed here, others may read it, its passphrase"
            " is wrong, or a key would overwrite it.",
            "Make keys with `sparkwright release key make DIR`. A private key has mode 600, "
            "and SPARKWRIGHT_KEY_PASSPHRASE holds its passphrase.",
        ),
        "key-missing": Advice(
            "A role of the index needs the signatures of keys that are not here.",
            "Name their files or folder with --keys; `sparkwright release key show --at FOLDER`"
            " lists the keys of each role.",
        ),
        "publish-failed": Advice(
            "A file changed while it was read, or cannot be read any more.",
            "Run the same command again; the index does not name any of it yet.",
        ),
        "release-gpu-foreign": Advice(
            "The wheels or the index are for another GPU than the release policy. An index holds"
            " releases for one GPU only.",
            "Name the architecture of the wheels with --arch, and an index of their own with --at.",
        ),
        "release-name-taken": Advice(
            "The index holds these wheels already.",
            "See `sparkwright list --channel candidate` for what there is; a candidate becomes"
            " verified by `sparkwright release promote`.",
        ),
        "release-unreadable": Advice(
            "What would be signed is no record that clients read: a field of a build record or of a"
            " verdict is odd, or too long.",
            "Correct what the line above names, and build or gate again.",
        ),
        "request-unfit": Advice(
            "What is asked for cannot end in that channel, whatever the gates find; nothing was "
            "started.",
            "Change what the lines above name, name other recipes, or ask for the channel "
            "candidate.",
        ),
        "set-unresolved": Advice(
            "No set of versions on the package index satisfies these wheels, or a package "
            "has no wheel with a sha256.",
            "Read uv's explanation above. A version that the index lacks is replaced under"
            " `overrides` in ci/release.yaml.",
        ),
        "verdict-foreign": Advice(
            "The verdicts are about other bytes than the wheel: an earlier build, or files that"
            " were mixed up.",
            "Run `sparkwright gate` with this very wheel.",
        ),
        "verdict-hollow": Advice(
            "A pass has no evidence: checks of the gate are missing, or no figure, sample or "
            "measurement was recorded.",
            "Run the whole gate again, and do not edit its files. The lines above name what is "
            "missing.",
        ),
        "verdict-unlogged": Advice(
            "The attempt log does not know the verdicts: one was edited, an attempt was taken out, "
            "a clock was wrong, or the log was not copied with them.",
            "Copy NAME.attempts.jsonl with NAME.verdicts.json, both as `sparkwright gate` wrote "
            "them; or run the gates again.",
        ),
        "verified-refused": Advice(
            "Not every required verdict about these bytes is a pass; the lines above say which, and"
            " why.",
            "Run what is missing on a Spark (`sparkwright gate`), or publish to the channel"
            " candidate, where all of this is shown.",
        ),
        "version-order": Advice(
            "pip and uv take the highest version, and this one sorts before one that is offered"
            " already, so they would not install it. Builds of one label differ by a digest, which"
            " sorts by chance.",
            "Raise `label` in stack.yaml (spark.2026.11 to spark.2026.11.1) and build again, or"
            " yank the other release.",
        ),
        "wheel-name-taken": Advice(
            "The index holds, or once held, other bytes under this file name. Names are never used"
            " twice: caches and locks rely on it.",
            "Raise `label` in the stack's stack.yaml and build again; a fix is a new version.",
        ),
    }
