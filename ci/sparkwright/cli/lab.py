"""The command ``lab image``."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from sparkwright.cli import options
from sparkwright.client.environment import Prefix, default_prefix
from sparkwright.client.index import open_index
from sparkwright.client.main import add_index, nonempty
from sparkwright.client.records import CHANNELS
from sparkwright.core.console import console
from sparkwright.core.http import redact_credentials

#: The options of the commands that have some.
_OPTIONS: Mapping[str, options.Options] = {
    "lab image": {
        "release": {
            "nargs": "?",
            "type": nonempty,
            "metavar": "RELEASE",
            "help": "full name of a release (default: the newest of the channel, which is shown)",
        },
        "--channel": {
            "choices": CHANNELS,
            "default": "verified",
            "help": "channel of the release (default: %(default)s)",
        },
        "--platform": {
            "choices": ("linux/arm64", "linux/amd64"),
            "default": "linux/arm64",
            "help": "platform of the image (default: %(default)s)",
        },
        "--base": {
            "default": "",
            "metavar": "IMAGE",
            "help": "base image, as NAME@sha256:… or an id (default: `image` in environment.yaml)",
        },
        "--dry-run": {
            **options.FLAG,
            "help": "check the release and show what would be built, without an engine",
        },
    },
}


def add_arguments(parsers: Mapping[str, argparse.ArgumentParser]) -> None:
    """Add the arguments of the commands of ``lab``."""
    add_index(parsers["lab image"])
    functions = {
        "lab image": image,
    }
    options.define(parsers, functions, _OPTIONS)


def image(arguments: argparse.Namespace) -> dict[str, Any]:
    """Check a release, and build its image."""
    # These load docker.
    from sparkwright.builder import container
    from sparkwright.release import policy
    from sparkwright.serving import image as images

    context = options.checkout(arguments)
    base = container.pinned_base(context, arguments.base)
    address = arguments.index or ""
    options.refuse(
        (context.offline and address.startswith("http"), "--offline needs an index in a folder."),
        (redact_credentials(address) != address, "The image would show the password of --index."),
    )
    root = arguments.trust or policy.load(context.project.root, context.project.spec.arch).file.root
    index = open_index(Prefix(default_prefix()).root / "trust", address, root)
    platform, channel = arguments.platform, arguments.channel
    name = images.select(
        index,
        arguments.release or "",
        channel=channel,
        stack=arguments.stack or "",
        platform=platform,
    )
    release, state = index.release(name), index.states[name]
    labels = images.labels(index, release, platform, base)
    for gate in state.missing:
        console.warn(f"not shown: {gate}")
    condition, built = "would be built", None
    if not arguments.dry_run:
        built = images.build(context, index, release, platform=platform, base=base)
        condition = "was there already" if built["present"] else "built"
    rows = [["base", base], *map(list, labels.items())]
    rows += [["image", f"{built['name']}, {built['id']}"]] if built else []
    console.table(f"serving image of {name}: {condition}", ["", ""], rows, result=True)
    return {
        "image": built,
        "state": condition,
        "release": name,
        "channel": state.channel,
        "labels": labels,
        "base": base,
    }
