"""A shell that may mount file systems of its own: as root in a mount namespace, else in a user namespace."""

import functools
import os
import subprocess
import tempfile

import pytest


@functools.cache
def mounting_shell() -> list[str]:
    """
    Return the command whose next argument is a shell script that may mount.

    Systems that give ordinary users no namespaces (a chroot, Ubuntu 24.04 as installed) skip the test; as root it fails.
    """
    own = [] if os.geteuid() == 0 else ["--map-root-user"]
    # In a plain chroot the root folder is no mount, so its propagation cannot be changed.
    for propagation in ("private", "unchanged"):
        command = ["unshare", *own, "--mount", "--propagation", propagation, "sh", "-c"]
        with tempfile.TemporaryDirectory() as folder:
            trial = f'mount -t tmpfs none "{folder}" && umount "{folder}"'
            run = subprocess.run([*command, trial], capture_output=True, text=True, check=False)
        if not run.returncode:
            return command
    reason = f"no file system can be mounted here: {run.stderr.strip() or run.returncode}"
    raise (pytest.skip.Exception if own else pytest.fail.Exception)(reason)
