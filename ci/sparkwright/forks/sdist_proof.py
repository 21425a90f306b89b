"""
Proof that a git commit is a release: every file of the locked source distribution, apart from a
short list of generated ones, is byte for byte the file of the commit.
"""

from __future__ import annotations

from collections.abc import Collection
from fnmatch import fnmatchcase

from sparkwright.core.console import console
from sparkwright.core.git import SUBMODULE
from sparkwright.forks import package_index
from sparkwright.forks.context import RunContext
from sparkwright.forks.errors import SourceError
from sparkwright.forks.lock import ForkLock, SdistProof

#: Files that an error names at most.
SHOWN = 20


def prove(
    context: RunContext, fork: str, locked: ForkLock, generated: Collection[str]
) -> SdistProof | None:
    """
    Compare the locked source distribution with the locked commit, and say so; None if the lock has
    no source distribution. The files themselves need not be in the store: their ids are compared.

    Args:
        generated: Patterns (`fnmatch`) of files that the release process writes.

    Raises:
        sdist-differs: A file of the source distribution is not the commit's or a submodule's, and
            not generated.
        source-mismatch, source-unreachable, offline, archive-unsafe: The file cannot be had.
    """
    objects, git, file = context.objects, locked.git, locked.sdist
    if not git or not file:
        return None
    trees = {
        f"{path}/": objects.resolve(f"{entry.commit}^{{tree}}")
        for path, entry in locked.vendored.items()
        if entry.kind == "submodule" and objects.has(f"{entry.commit}^{{commit}}")
    }
    commit = {
        folder + path: blob
        for folder, tree in {"": git.tree, **trees}.items()
        for path, (mode, blob) in objects.paths(tree).items()
        if mode != SUBMODULE
    }
    whole = objects.has(file.tree)
    released = objects.paths(file.tree if whole else package_index.import_file(context, file))
    differing = {
        path: "differs" if path in commit else "is not in the commit"
        for path, (_, blob) in released.items()
        if commit.get(path) != blob
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
    proof = SdistProof(
        equal=len(released) - len(differing),
        generated=tuple(sorted(differing)),
        absent=len(commit.keys() - released.keys()),
    )
    console.note(proof.describe(file.filename))
    return proof
