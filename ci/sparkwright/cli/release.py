"""``publish``, and the commands of ``release``, which change or check the index in a folder."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkwright.cli import options
from sparkwright.client.records import CHANNELS
from sparkwright.core.console import console
from sparkwright.core.errors import UsageError
from sparkwright.release.keys import ROLES

if TYPE_CHECKING:
    from sparkwright.release.publisher import Changed, Publisher


def add_arguments(parsers: Mapping[str, argparse.ArgumentParser]) -> None:
    """Add the arguments of ``publish`` and of the commands of ``release``."""
    runs = {
        "publish": publish,
        "release upload": upload,
        "release promote": promote,
        "release yank": yank,
        "release prune": prune,
        "release refresh": refresh,
        "release key": key,
        "release notes": notes,
        "release verify": verify,
    }
    for name, run in runs.items():
        parsers[name].set_defaults(run=run)
        add = parsers[name].add_argument
        add(
            "--at",
            type=Path,
            required=name != "release key",
            metavar="FOLDER",
            help="folder of the index",
        )
        if name not in ("release notes", "release verify", "release upload"):
            add(
                "--keys",
                type=Path,
                action="append",
                default=[],
                metavar="FILE|DIR",
                help="private key, or a folder of them (`release key make`); may be repeated",
            )
            add(
                "--identity",
                action="store_true",
                help="sign targets as the Sigstore identity of ci/release.yaml, with the "
                "credentials of this environment",
            )
    _add_stage(parsers["release stage"])
    _add_bundle(parsers["release bundle"])
    for name in ("release promote", "release yank"):
        parsers[name].add_argument("release", metavar="RELEASE", help="its name (2026.11.3)")
    parsers["release notes"].add_argument(
        "release", nargs="?", metavar="RELEASE", help="its name (default: the newest)"
    )
    for name in ("publish", "release upload"):
        parsers[name].add_argument(
            "wheels", nargs="+", type=Path, metavar="WHEEL", help="wheels of the release"
        )
        parsers[name].add_argument(
            "--files",
            default="folder",
            metavar="folder|github:OWNER/REPO",
            help="where the wheels are stored (default: folder, that of the index)",
        )
    _add_publish(parsers["publish"])
    _add_key(parsers["release key"])
    parsers["release promote"].add_argument(
        "--verdicts",
        type=Path,
        required=True,
        metavar="DIR",
        help="folder of the new verdicts about its wheels",
    )
    parsers["release yank"].add_argument(
        "--reason", default="", metavar="TEXT", help="why, in a line that people and pip show"
    )
    add = parsers["release prune"].add_argument
    add(
        "--keep",
        type=options.number(int, 1),
        default=0,
        metavar="N",
        help="candidates to keep of each stack (default: ci/release.yaml)",
    )


def _add_stage(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=stage)
    add = parser.add_argument
    add(
        "--built",
        type=Path,
        metavar="DIR",
        help="the locked set around the wheels of this folder, into --prefix",
    )
    add("--prefix", type=Path, metavar="DIR", help="folder of the installations")
    add(
        "--stock",
        type=Path,
        metavar="VENV",
        help="the official wheel under the graft, and what it requires, into this environment",
    )


def _add_bundle(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=bundle)
    add = parser.add_argument
    add("spec", type=Path, metavar="SPEC", help="file that states host, environments and commands")
    add("--output", type=Path, required=True, metavar="DIR", help="folder for the parts")
    add(
        "--part",
        type=options.number(float, 0.001, 1e5, "megabytes"),
        default=55,
        metavar="MB",
        help="size of a part in megabytes (default: 55)",
    )
    add(
        "--add",
        type=_inside,
        action="append",
        default=[],
        metavar="NAME=PATH",
        help="file or folder to pack, and its path in the bundle; may be repeated",
    )


def _inside(text: str) -> tuple[str, Path]:
    """Return name and path of ``NAME=PATH``."""
    name, _, path = text.partition("=")
    parts = Path(name).parts
    if not path or not parts or Path(name).is_absolute() or ".." in parts:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=PATH, or NAME leaves the bundle")
    return name, Path(path)


def _add_publish(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--channel",
        choices=CHANNELS,
        help="candidate accepts incomplete verdicts, and says so (default: verified, or refuse)",
    )
    add(
        "--verdicts",
        type=Path,
        metavar="DIR",
        help="folder of the verdicts (default: beside each wheel)",
    )
    add("--unsent", action="store_true", help="leave new wheels to `release upload`")
    add(
        "--url",
        default="",
        metavar="URL",
        help="address of a new index (default: `url` in ci/release.yaml)",
    )
    add("--dry-run", action="store_true", help="show what would be published, and write nothing")


def _add_key(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("action", choices=("make", "show", "rotate"), help="what to do")
    add(
        "path",
        nargs="?",
        type=Path,
        metavar="PATH",
        help="make: folder of the new keys",
    )
    add(
        "--name",
        action="append",
        default=[],
        metavar="NAME",
        help="make only NAME.pem, which begins with root, targets or online; may be repeated",
    )
    add("--role", choices=tuple(ROLES), help="rotate: which keys to replace")
    add(
        "--new",
        type=Path,
        action="append",
        default=[],
        metavar="FILE|DIR",
        help="rotate: the keys that replace them, those of others as .pub; may be repeated",
    )


def stage(arguments: argparse.Namespace) -> dict[str, Any]:
    """Install unpublished wheels, or the official wheel as a baseline, for the gates."""
    from sparkwright.release import staging

    built, prefix, stock = arguments.built, arguments.prefix, arguments.stock
    options.refuse(
        (bool(built) == bool(stock), "`release stage` needs either --built or --stock."),
        (bool(built) != bool(prefix), "--built and --prefix belong together."),
    )
    context = options.checkout(arguments)
    if built:
        release = staging.install_built(context, built, prefix)
        console.result(f"{release['name']} of {built}: {release['folder']}")
        return {"release": release}
    wheel = staging.install_stock(context, stock.absolute())
    console.result(f"{wheel.name}: {stock}")
    return {"stock": {"environment": str(stock.absolute()), "wheel": str(wheel)}}


def bundle(arguments: argparse.Namespace) -> dict[str, Any]:
    """Pack wheels, folders and the commands to run for a host without a network."""
    from sparkwright.core import strict_yaml
    from sparkwright.core.console import size
    from sparkwright.release import bundle as packer

    spec = strict_yaml.load(arguments.spec, packer.BundleSpec)
    part = round(arguments.part * 1e6)
    records = packer.pack(spec, dict(arguments.add), arguments.output, part)
    rows = [[name, sha256, size(count)] for name, sha256, count in records]
    console.table("bundle", ["name", "sha256", ">size"], rows, result=True)
    return {"bundle": [dict(zip(("name", "sha256", "size"), row, strict=True)) for row in records]}


def publish(arguments: argparse.Namespace) -> dict[str, Any]:
    """Publish the wheels as a release if their verdicts allow it."""
    from sparkwright.release.release_draft import missing_lines

    wheels, repository = _wheels(arguments)
    done = _publisher(arguments).publish(
        wheels,
        arguments.channel,
        verdicts=arguments.verdicts,
        github=repository,
        url=arguments.url,
        dry_run=arguments.dry_run,
        send=not arguments.unsent,
    )
    state = f"published, version {done.version} of the index"
    if done.already or arguments.dry_run:
        state = "would be published" if arguments.dry_run else "was published before"
    console.result(f"{done.release} in {done.channel}: {state}")
    for text in (*done.sent, *missing_lines(done.missing)):
        console.result(f"  {text}")
    if done.fingerprint and done.version == 1 and not done.already:
        console.note(
            f"The fingerprint of the new index is {done.fingerprint}. Publish it elsewhere, and "
            "write it into ci/release.yaml as `root`."
        )
    return {"published": done, "dry_run": arguments.dry_run}


def upload(arguments: argparse.Namespace) -> dict[str, Any]:
    """Send the wheels of a release that was signed with --unsent."""
    wheels, repository = _wheels(arguments)
    options.refuse((not repository, "`release upload` needs --files github:OWNER/REPO."))
    sent = _publisher(arguments).upload(wheels, repository)
    console.result(f"sent to {repository}: {', '.join(sent) or 'nothing, all was there'}")
    return {"sent": sent}


def _wheels(arguments: argparse.Namespace) -> tuple[tuple[Path, ...], str]:
    """Return the named wheels, and ``OWNER/REPO`` on GitHub; empty for the folder of the index."""
    kind, _, repository = arguments.files.partition(":")
    options.refuse(
        (
            (kind, bool(repository)) not in (("folder", False), ("github", True)),
            f"--files {arguments.files!r} is neither folder nor github:OWNER/REPO.",
        )
    )
    wheels = tuple(path.absolute() for path in arguments.wheels)
    if missing := [str(path) for path in wheels if not path.is_file()]:
        raise UsageError("usage", "There is no such wheel.", details=missing)
    return wheels, repository


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
    action, path = arguments.action, arguments.path
    options.refuse(
        (action == "make" and path is None, "`release key make` needs a folder."),
        (action == "show" and not arguments.at, "`release key show` needs --at."),
        (
            action == "rotate"
            and not (arguments.at and arguments.role and (arguments.new or arguments.identity)),
            "`release key rotate` needs --at, --role, and --new or --identity.",
        ),
    )
    if action == "make":
        return _make_keys(arguments)
    if action == "show":
        return _show_keys(arguments)
    from sparkwright.release import keys

    publisher = _publisher(arguments)
    identity = publisher.policy.file.identity if arguments.identity else None
    changed = publisher.rotate(ROLES[arguments.role], keys.load(arguments.new, identity))
    return _show(changed, f"keys of {arguments.role} replaced")


def _make_keys(arguments: argparse.Namespace) -> dict[str, Any]:
    from sparkwright.release import keys

    options.refuse(
        *(
            (
                not name.startswith(tuple(ROLES)) or Path(name).name != name,
                f"--name {name} is no file name that begins with a role.",
            )
            for name in arguments.name
        )
    )
    pairs = keys.make(arguments.path, arguments.name or tuple(ROLES))
    rows = [[str(path), public.keyid] for path, public in pairs.items()]
    console.table("keys", ["private key", "fingerprint"], rows, result=True)
    if not keys.passphrase():
        console.note(f"They have no passphrase; {keys.PASSPHRASE} gives one.")
    console.note("Keep the root key offline: it is needed for the first publication and rotations.")
    return {"keys": {str(path): public.keyid for path, public in pairs.items()}}


def _show_keys(arguments: argparse.Namespace) -> dict[str, Any]:
    from sparkwright.release.repository import IndexFolder

    index = IndexFolder(arguments.at).require()
    assert index.root
    root = index.root.signed
    rows = [
        [
            role,
            f"{holder.threshold} of {len(holder.keyids)}",
            f"{index.expires[role]:%Y-%m-%d}",
            keyid,
        ]
        for role, holder in root.roles.items()
        for keyid in holder.keyids
    ]
    title = f"root {root.version}; fingerprint of the index: {index.fingerprint}"
    console.table(title, ["role", "threshold", "expires", "key"], rows, result=True)
    roles = {role: list(holder.keyids) for role, holder in root.roles.items()}
    return {"fingerprint": index.fingerprint, "roles": roles}


def notes(arguments: argparse.Namespace) -> dict[str, Any]:
    """Print the notes of a release."""
    from sparkwright.release import pages, repository

    index = repository.IndexFolder(arguments.at).require()
    entry = index.entry(arguments.release or ["yet", *index.entries][-1])
    if entry.state.yanked:
        console.warn(f"{entry.release.name} was yanked: {entry.state.yanked}")
    markdown = pages.notes(entry.release, index.before(entry.release))
    console.result(markdown)
    return {"name": entry.release.name, "state": entry.state, "markdown": markdown}


def verify(arguments: argparse.Namespace) -> dict[str, Any]:
    """Check every file of the index."""
    from sparkwright.release import repository

    index = repository.IndexFolder(arguments.at).require()
    with console.step("every file by its hash"):
        faults = repository.damaged_files(index.folder, index.files)
    if faults:
        raise repository.damaged(f"{len(faults)} files of the index are not sound.", faults)
    count = f"{len(index.entries)} releases, {len(index.files)} files"
    console.result(f"version {index.version} of the index: {count}, none damaged")
    return {"version": index.version, "files": len(index.files)}


def _publisher(arguments: argparse.Namespace) -> Publisher:
    """
    Return the publisher of the index ``--at``.

    Raises:
        UsageError: No key is named; a dry run and an upload need none.
        key-invalid, identity-unusable: A key or the identity cannot sign.
    """
    from sparkwright.release import keys, policy
    from sparkwright.release.publisher import Publisher

    context = options.checkout(arguments)
    rules = policy.load(context.project.root, context.project.spec.arch)
    keyless = getattr(arguments, "dry_run", not hasattr(arguments, "keys"))
    named = getattr(arguments, "keys", [])
    if not named and not keyless:
        raise UsageError(
            "usage",
            "--keys names no key.",
            todo="Make keys with `sparkwright release key make DIR`.",
        )
    wanted = getattr(arguments, "identity", False)
    identity = rules.file.identity if wanted else None
    options.refuse((wanted and identity is None, "ci/release.yaml names no `identity`."))
    held = keys.load(named, identity)
    return Publisher(context, arguments.at.absolute(), held, rules)


def _show(done: Changed, action: str, nothing: str = "the whole index") -> dict[str, Any]:
    console.result(f"{action}: {', '.join(done.releases) or nothing}")
    if done.removed:
        console.result(f"  deleted: {len(done.removed)} files or folders")
    for address in done.elsewhere:
        console.result(f"  left where it is: {address}")
    console.result(f"  version {done.version} of the index, valid until {done.expires}")
    return {"changed": done}
