"""``publish``, and the commands of ``release``, which change or check the index in a folder."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparkwright.cli import options
from sparkwright.client.records import CHANNELS
from sparkwright.core.console import console
from sparkwright.release import keys, policy, repository
from sparkwright.release.publisher import Changed, Publisher
from sparkwright.release.release_draft import missing_lines
from sparkwright.release.repository import IndexFolder

#: The options of the commands that read an index, that sign, that take wheels, and a release.
_INDEX: options.Options = {
    "--at": {"type": Path, "required": True, "metavar": "FOLDER", "help": "folder of the index"},
}
_SIGNING: options.Options = {
    **_INDEX,
    "--keys": {
        **options.REPEATED,
        "type": Path,
        "metavar": "FILE|DIR",
        "help": "private key, or a folder of them (`release key make`); may be repeated",
    },
    "--identity": {
        **options.FLAG,
        "help": "sign targets as the Sigstore identity of ci/release.yaml, with the credentials "
        "of this environment",
    },
}
_RELEASE: options.Options = {
    "release": {"metavar": "RELEASE", "help": "its name (2026.11.3)"},
}
#: The options of the commands that have some.
_OPTIONS: Mapping[str, options.Options] = {
    "publish": {
        **_SIGNING,
        "wheels": {"nargs": "+", "type": Path, "metavar": "WHEEL", "help": "wheels of the release"},
        "--files": {
            "default": "",
            "metavar": "URL",
            "help": "address below which you put new wheels, such as the downloads of a release "
            "on GitHub (default: the folder of the index)",
        },
        "--channel": {
            "choices": CHANNELS,
            "help": "candidate accepts incomplete verdicts, and says so (default: verified, or "
            "refuse)",
        },
        "--verdicts": {
            "type": Path,
            "metavar": "DIR",
            "help": "folder of the verdicts (default: beside each wheel)",
        },
        "--url": {
            "default": "",
            "metavar": "URL",
            "help": "address of a new index (default: `url` in ci/release.yaml)",
        },
        "--dry-run": {**options.FLAG, "help": "show what would be published, and write nothing"},
    },
    "release promote": {
        **_SIGNING,
        **_RELEASE,
        "--verdicts": {
            "type": Path,
            "required": True,
            "metavar": "DIR",
            "help": "folder of the new verdicts about its wheels",
        },
    },
    "release yank": {
        **_SIGNING,
        **_RELEASE,
        "--reason": {
            "default": "",
            "metavar": "TEXT",
            "help": "why, in a line that people and pip show",
        },
    },
    "release prune": {
        **_SIGNING,
        "--keep": {
            "type": options.number(int, 1),
            "default": 0,
            "metavar": "N",
            "help": "candidates to keep of each stack (default: ci/release.yaml)",
        },
    },
    "release refresh": {
        **_SIGNING,
    },
    "release key": {
        **_SIGNING,
        "--at": {**_INDEX["--at"], "required": False},
        "action": {"choices": ("make", "show", "rotate"), "help": "what to do"},
        "path": {
            "nargs": "?",
            "type": Path,
            "metavar": "PATH",
            "help": "make: folder of the new keys",
        },
        "--name": {
            **options.REPEATED,
            "metavar": "NAME",
            "help": "make only NAME.pem, which begins with root, targets or online; may be "
            "repeated",
        },
        "--role": {"choices": tuple(keys.KEY_ROLES), "help": "rotate: which keys to replace"},
        "--new": {
            **options.REPEATED,
            "type": Path,
            "metavar": "FILE|DIR",
            "help": "rotate: the keys that replace them; may be repeated",
        },
    },
    "release verify": {
        **_INDEX,
    },
}


def add_arguments(parsers: Mapping[str, argparse.ArgumentParser]) -> None:
    """Add the arguments of ``publish`` and of the commands of ``release``."""
    options.define(
        parsers,
        {
            "publish": publish,
            "release promote": promote,
            "release yank": yank,
            "release prune": prune,
            "release refresh": refresh,
            "release key": key,
            "release verify": verify,
        },
        _OPTIONS,
    )


def publish(arguments: argparse.Namespace) -> dict[str, Any]:
    """Publish the wheels as a release if their verdicts allow it."""
    wheels, host = list(map(Path.absolute, arguments.wheels)), arguments.files
    options.refuse(
        (
            host and not host.startswith(("https://", "http://127.0.0.1:")),
            f"--files {host} is no address of https.",
        ),
        *((not path.is_file(), f"There is no wheel {path}.") for path in wheels),
    )
    done = _publisher(arguments, signs=not arguments.dry_run).publish(
        wheels,
        arguments.channel,
        verdicts=arguments.verdicts,
        host=f"{host.rstrip('/')}/" if host else "",
        url=arguments.url,
        dry_run=arguments.dry_run,
    )
    state = f"published, version {done.version} of the index"
    if done.already or arguments.dry_run:
        state = "would be published" if arguments.dry_run else "was published before"
    console.result(f"{done.release} in {done.channel}: {state}")
    for text in missing_lines(done.missing):
        console.result(f"  {text}")
    if done.fingerprint and done.version == 1:
        console.note(
            f"The fingerprint of the new index is {done.fingerprint}. Publish it elsewhere, and "
            "write it into ci/release.yaml as `root`."
        )
    return {"published": done, "dry_run": arguments.dry_run}


def promote(arguments: argparse.Namespace) -> dict[str, Any]:
    """Move a candidate to verified."""
    return _show(_publisher(arguments).promote(arguments.release, arguments.verdicts), "promoted")


def yank(arguments: argparse.Namespace) -> dict[str, Any]:
    """Stop offering a release."""
    return _show(_publisher(arguments).yank(arguments.release, arguments.reason), "yanked")


def prune(arguments: argparse.Namespace) -> dict[str, Any]:
    """Remove old releases."""
    publisher = _publisher(arguments)
    keep = arguments.keep or publisher.policy.file.retain
    return _show(publisher.prune(keep), "removed", "no release")


def refresh(arguments: argparse.Namespace) -> dict[str, Any]:
    """Sign the index again."""
    return _show(_publisher(arguments).refresh(), "signed again")


def key(arguments: argparse.Namespace) -> dict[str, Any]:
    """Make, show or rotate keys."""
    action, path, names = arguments.action, arguments.path, arguments.name
    options.refuse(
        (action == "make" and path is None, "`release key make` needs a folder."),
        (action == "show" and not arguments.at, "`release key show` needs --at."),
        (
            action == "rotate"
            and not (arguments.at and arguments.role and (arguments.new or arguments.identity)),
            "`release key rotate` needs --at, --role, and --new or --identity.",
        ),
        *(
            (
                not name.startswith(tuple(keys.KEY_ROLES)) or Path(name).name != name,
                f"--name {name} is no file name that begins with a role.",
            )
            for name in names
        ),
    )
    if action == "make":
        pairs = keys.make(path, names or tuple(keys.KEY_ROLES))
        fingerprints = {str(file): public.keyid for file, public in pairs.items()}
        columns = ["private key", "fingerprint"]
        console.table("keys", columns, list(fingerprints.items()), result=True)
        if not keys.passphrase():
            console.note(f"They have no passphrase; {keys.PASSPHRASE} gives one.")
        console.note("Keep the root key offline: only the first publication and rotations need it.")
        return {"keys": fingerprints}
    if action == "show":
        return _show_keys(IndexFolder(arguments.at).require())
    publisher = _publisher(arguments)
    identity = publisher.policy.file.identity if arguments.identity else None
    changed = publisher.rotate(keys.KEY_ROLES[arguments.role], keys.load(arguments.new, identity))
    return _show(changed, f"keys of {arguments.role} replaced")


def _show_keys(index: IndexFolder) -> dict[str, Any]:
    assert index.root
    rows, roles = list[list[str]](), dict[str, list[str]]()
    for role, holder in index.root.signed.roles.items():
        threshold, expires = f"{holder.threshold} of {len(holder.keyids)}", index.expires[role]
        rows.append([role, threshold, f"{expires:%Y-%m-%d}", "\n".join(holder.keyids)])
        roles[role] = list(holder.keyids)
    console.table(
        f"root {index.root.signed.version}; fingerprint of the index: {index.fingerprint}",
        ["role", "threshold", "expires", "key"],
        rows,
        result=True,
    )
    return {"fingerprint": index.fingerprint, "roles": roles}


def verify(arguments: argparse.Namespace) -> dict[str, Any]:
    """Check every file of the index."""
    index = IndexFolder(arguments.at).require()
    with console.step("every file by its hash"):
        faults = repository.damaged_files(index.folder, index.files)
    if faults:
        raise repository.damaged(f"{len(faults)} files of the index are not sound.", faults)
    count = f"{len(index.entries)} releases, {len(index.files)} files"
    console.result(f"version {index.version} of the index: {count}, none damaged")
    return {"version": index.version, "files": len(index.files)}


def _publisher(arguments: argparse.Namespace, *, signs: bool = True) -> Publisher:
    """
    Return the publisher of the index ``--at``, with the keys that sign it if it *signs*.

    Raises:
        UsageError: It *signs*, and no key is named.
        key-invalid, identity-unusable: A key or the identity cannot sign.
    """
    context = options.checkout(arguments)
    rules = policy.load(context.project.root, context.project.spec.arch)
    named = arguments.keys if signs else []
    identity = rules.file.identity if signs and arguments.identity else None
    options.refuse(
        (
            signs and not named,
            "--keys names no key; `sparkwright release key make DIR` makes some.",
        ),
        (
            signs and arguments.identity and identity is None,
            "ci/release.yaml names no `identity`.",
        ),
    )
    return Publisher(context, arguments.at.absolute(), keys.load(named, identity), rules)


def _show(done: Changed, action: str, nothing: str = "the whole index") -> dict[str, Any]:
    console.result(f"{action}: {', '.join(done.releases) or nothing}")
    if done.removed:
        console.result(f"  deleted: {len(done.removed)} files or folders")
    console.result(f"  version {done.version} of the index, valid until {done.expires}")
    return {"changed": done}
