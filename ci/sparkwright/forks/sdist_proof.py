"""
Proof that a git commit is a release: every file of the locked source distribution, apart from a
short list of generated ones, is byte for byte the file of the commit.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase

import msgspec

from sparkwright.core.git import SUBMODULE
from sparkwright.core.git_store import Objects
from sparkwright.forks.errors import SourceError

#: Files that an error names at most.
SHOWN = 20


class SdistProof(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """
    A source distribution compared with a commit.

    Attributes:
        equal: The number of its files that are the commit's.
        generated: The files that the release process wrote.
        absent: The number of files of the commit that it lacks.
    """

    equal: int
    generated: tuple[str, ...] = ()
    absent: int = 0

    def describe(self, sdist: str) -> str:
        """Return the proof as a line of text; *sdist* is the file's name."""
        total = self.equal + len(self.generated)
        return (
            f"{self.equal:,} of {total:,} files of {sdist} are the commit's, "
            f"{len(self.generated)} are generated, {self.absent:,} of the commit are not in it"
        )


def prove(
    objects: Objects,
    fork: str,
    tree: str,
    modules: Mapping[str, str],
    sdist: str,
    generated: Collection[str],
) -> SdistProof:
    """
    Compare the content of a source distribution with that of a commit. The files themselves need
    not be in the store: their ids are compared.

    Args:
        tree: The commit's tree.
        modules: The trees of its submodules, by path.
        sdist: The tree of the source distribution.
        generated: Patterns (`fnmatch`) of files that the release process writes.

    Raises:
        sdist-differs: A file of the source distribution is not the commit's, and not generated.
    """
    commit = {path: entry for path, entry in objects.paths(tree).items() if entry[0] != SUBMODULE}
    for folder, module in modules.items():
        entries = objects.paths(module).items()
        commit |= {f"{folder}/{path}": entry for path, entry in entries if entry[0] != SUBMODULE}
    released = objects.paths(sdist)
    differing = {
        path: "differs" if path in commit else "is not in the commit"
        for path, (_, blob) in released.items()
        if path not in commit or commit[path][1] != blob
    }
    wrong = [
        f"{path} {fault}"
        for path, fault in differing.items()
        if not any(fnmatchcase(path, pattern) for pattern in generated)
    ]
    if wrong:
        rest = [f"and {len(wrong) - SHOWN} more"] if len(wrong) > SHOWN else []
        raise SourceError(
            "sdist-differs",
            f"The commit of {fork} differs from the released source distribution.",
            details=[*wrong[:SHOWN], *rest],
        )
    return SdistProof(
        equal=len(released) - len(differing),
        generated=tuple(sorted(differing)),
        absent=len(commit.keys() - released.keys()),
    )
