"""The client of a release index: everything that a machine needs to install and check releases."""

from collections.abc import Mapping
from typing import ClassVar

from sparkwright.core.errors import Advice, SparkwrightError

#: Command → its summary.
COMMANDS = {
    "install": "install a release into an environment of its own",
    "list": "list the releases of an index, and those that are installed",
    "rollback": "switch back to the previous release",
    "uninstall": "remove a release",
    "doctor": "show whether the installed releases are as they were made",
    "run": "run a program of the current release",
}


class ClientError(SparkwrightError):
    """An index, a release or an installation cannot be used."""

    references: ClassVar[Mapping[str, Advice]] = {
        "download-invalid": Advice(
            "The bytes that arrived are not those that the signed index names: a proxy that"
            " truncates, a damaged mirror, or tampering.",
            "Try again, or use the index's own address. What arrived was not kept and nothing was"
            " installed.",
        ),
        "environment-broken": Advice(
            "The environment differs from its release: an interrupted installation, or "
            "changed files.",
            "Remove it with `sparkwright uninstall NAME`, and install it again with "
            "`sparkwright install --version NAME`.",
        ),
        "index-damaged": Advice(
            "A file of the index is missing, or not the one that its signed metadata names: "
            "a faulty disk, an incomplete copy, or a manual change.",
            "Users: use the index's own address, or tell its publisher. Publishers: restore "
            "the file, or publish it again from the same wheels.",
        ),
        "index-expired": Advice(
            "The signed metadata of the index has expired: its publisher stopped, or somebody"
            " keeps you from newer metadata.",
            "Check the clock, and use the index's own address. Install nothing until the "
            "index is signed again (`sparkwright release refresh`).",
        ),
        "index-invalid": Advice(
            "What the index serves is not TUF metadata: a login page, an error page, a cut-off or"
            " endless file.",
            "Open the address above in a browser. If the index itself is damaged, its publisher"
            " restores it.",
        ),
        "index-missing": Advice(
            "There is no index of sparkwright at this address, or no address is configured.",
            "Name it with --index URL (or --at FOLDER for its publisher); `publish` makes one if"
            " the folder is empty.",
        ),
        "index-rollback": Advice(
            "The index serves older metadata than this machine has seen, or parts of "
            "different versions: a stale or incomplete mirror, or an attack.",
            "Use the index's own address, or wait for the mirror. Do not delete the folder `trust`"
            " unless you know why it is wrong.",
        ),
        "index-unreachable": Advice(
            "The server of the index, or of a file that it names, cannot be reached, answers too"
            " slowly, or has a fault.",
            "Check the connection and the address, and try again; what arrived is kept.",
            exit_code=5,
        ),
        "index-unsigned": Advice(
            "The metadata does not have the signatures that the trusted root of this index asks"
            " for: changed bytes, a revoked key, or too few signers. Those of a Sigstore identity"
            " need the part `sigstore` of the client.",
            "Try the index's own address. If it serves the same, tell its publisher, and install"
            " nothing from it. If a Sigstore identity signs it, install"
            " 'sparkwright-install[sigstore]'.",
        ),
        "lock-invalid": Advice(
            "The lock of a set is no pylock.toml of wheels with sha256 hashes, or it names a file"
            " that would leave its folder.",
            "Do not install from it. Use the index's own address; if that serves the same, tell its"
            " publisher.",
        ),
        "nothing-installed": Advice(
            "No release of that name is installed here, or there is no earlier one.",
            "See `sparkwright list`, and name the folder of the installations with --prefix.",
        ),
        "pack-foreign": Advice(
            "A warm pack holds code that runs, so it is only taken from the index that the release"
            " came from, and for that release's wheels.",
            "Leave --index out. If it was left out, tell the publisher.",
        ),
        "pack-unknown": Advice(
            "The release has no warm pack for that recipe: none was made where it was gated.",
            "Serve without one; the second start is as fast.",
        ),
        "edit-mismatch": Advice(
            "A file that the release edits on the machine is not the file for which the edit was"
            " made.",
            "Do not install it. Tell the publisher which edit it was.",
        ),
        "release-in-use": Advice(
            "A program that runs has loaded files of the release, such as a server, which would"
            " fail when it needs another one of them.",
            "Stop it first; `sparkwright serve --list` shows the servers.",
        ),
        "release-unknown": Advice(
            "The index has no release of that name, stack, channel, machine or Python.",
            "See `sparkwright list` for what there is; --stack names another stack.",
        ),
        "release-unproved": Advice(
            "The release is a candidate: not everything that `verified` asks for was shown. The"
            " lines above say what is missing.",
            "Take it knowingly with `--channel candidate`, or choose a release of the channel"
            " verified.",
        ),
        "release-yanked": Advice(
            "Every release that fits was yanked: its publisher says that it should not be"
            " installed, and why.",
            "Choose another; to have this one nevertheless, name it (`--version NAME`).",
        ),
        "set-mixed": Advice(
            "The lock names another wheel or another version than the release it belongs to: two"
            " releases were mixed.",
            "Do not install it. Use the index's own address; if that serves the same, tell its"
            " publisher.",
        ),
        "trust-missing": Advice(
            "This machine trusts no root of this index, or its root is not the one you named.",
            "Compare the fingerprint above with the publisher's statement elsewhere; if they "
            "are equal, name it with --trust FINGERPRINT.",
        ),
    }
