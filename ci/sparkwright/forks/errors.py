"""The errors of sources and mirrors, with their references."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from sparkwright.core.errors import Advice, SparkwrightError


class SourceError(SparkwrightError):
    """A source is unreachable, differs from the lock, or is not locked."""

    references: ClassVar[Mapping[str, Advice]] = {
        "declaration-unsafe": Advice(
            "A file of the tree names a source in a way that no project needs: an option or a "
            "program as its address, or two at once.",
            "Do not fetch it by other means. Look at the file, and at who changed it, with the "
            "upstream project.",
        ),
        "mirror-damaged": Advice(
            "A file of the upstream's copy in the cache directory was lost or changed: a disk "
            "with faults, or somebody's clearing up.",
            "Remove the mirror's folder; the next run fetches it again.",
        ),
        "not-provided": Advice(
            "Something that the command names or needs does not exist: a stack, a fork, a source "
            "or base for this machine, a record, a wheel, a worktree or a release.",
            "Compare the name with what the message lists, or with forks/<stack>/stack.yaml.",
        ),
        "offline": Advice(
            "The step needs something that is not in the store, and --offline forbids fetching it.",
            "Run `sparkwright fetch` once with a connection.",
            exit_code=5,
        ),
        "sdist-differs": Advice(
            "A file of the locked source distribution is not the file of the commit: a tag that "
            "was moved, a commit of another branch, a replaced file, or a release that was not "
            "made from this commit.",
            "Do not build from it. Compare the files with the upstream project; a file that the "
            "release process writes goes under `generated` in stack.yaml.",
        ),
        "source-mismatch": Advice(
            "The bytes that arrived are not the bytes that the lock names: a replaced release, a "
            "broken mirror, or tampering.",
            "Do not build from it. Compare both values with the upstream project; change the "
            "lock only by `sparkwright lock`.",
        ),
        "source-unlocked": Advice(
            "The build would download something whose bytes the lock does not pin, or another "
            "state of it than the lock names.",
            "Run `sparkwright lock`; what the build does not reach goes under `ignored` in "
            "stack.yaml, with the reason.",
        ),
        "source-unreachable": Advice(
            "The network, the index or the mirror does not offer what the lock names.",
            "Check the connection with `sparkwright doctor`, or give a mirror with --mirror "
            "URL=REPLACEMENT. What arrived so far is kept.",
            exit_code=5,
        ),
        "source-unresolved": Advice(
            "The lock holds no full commit for this source, because the host could not be "
            "reached when it was written.",
            "Run `sparkwright lock` where the upstream host is reachable, or build from another "
            "kind of source with --source.",
        ),
    }
