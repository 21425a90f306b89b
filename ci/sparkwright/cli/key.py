"""``sparkwright key``: a key that signs an index, or the fingerprint of one that is there."""

from __future__ import annotations

import argparse

from sparkwright.core.console import console
from sparkwright.forks.context import StandaloneContext
from sparkwright.release.signing import keys


def run(session: StandaloneContext, arguments: argparse.Namespace) -> int:
    """Make the key, or with ``--show`` look at one, and say by which fingerprint people know it."""
    path, passphrase = arguments.file, keys.passphrase()
    if arguments.show:
        public = keys.shown(path, passphrase)
    else:
        keys.make(path, passphrase)
        public = keys.PublicKey.load(keys.public_path(path))
        if not passphrase:
            console.note(f"{path} has no passphrase; set {keys.PASSPHRASE} to make one that has")
        console.note(
            f"keep {path} to yourself; give {keys.public_path(path)} away, and its fingerprint "
            f"by another way than the index"
        )
    console.result(
        f"fingerprint {public.fingerprint}\nsigns as    {public.by}\npublic key  {public.text}"
    )
    console.document(
        {
            "file": str(path),
            "fingerprint": public.fingerprint,
            "by": public.by,
            "public": public.text,
        }
    )
    return 0
