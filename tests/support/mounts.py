"""A shell that may mount file systems of its own: as root in a mount namespace, else in a user namespace."""

from __future__ import annotations

import functools
import os
import subprocess
import tempfile

import pytest


@functools.cache
def _refusal() -> str:
    """Return why no file system can be mounted here, in the words of the system; empty if one can."""
    with tempfile.TemporaryDirectory() as folder:
        trial = f'mount -t tmpfs none "{folder}" && umount "{folder}"'
        run = subprocess.run([*_command(), trial], capture_output=True, text=True, check=False)
    return run.stderr.strip() or f"status {run.returncode}" if run.returncode else ""


def _command() -> list[str]:
    # In a chroot the root folder is no mount, so its propagation cannot be changed; a script unmounts what it mounted.
    return ["unshare", *([] if os.geteuid() == 0 else ["--map-root-user"]), "--mount", "--propagation", "unchanged", "sh", "-c"]


def mounting_shell() -> list[str]:
    """
    Return the command whose next argument is a shell script that may mount.

    Systems that give ordinary users no namespaces (a chroot, Ubuntu 24.04 as installed) skip the test; as root it fails.
    """
    if refusal := _refusal():
        (pytest.fail if os.geteuid() == 0 else pytest.skip)(f"no file system can be mounted here: {refusal}")
    return _command()
