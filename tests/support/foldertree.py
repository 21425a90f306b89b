"""Compare folders with what they were, by name and content."""

from pathlib import Path

from sparkwright.core.files import sha256_file

#: Files that hold no part of an index or an installation.
LOCKS = frozenset((".lock", ".switch.lock"))


def tree(folder: Path, besides: frozenset[str] = LOCKS) -> dict[str, str]:
    """Return what lies below *folder*, by path; names in *besides* are left out."""
    state = {}
    for path in sorted(folder.rglob("*")):
        if not besides.isdisjoint(path.relative_to(folder).parts):
            continue
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            state[name] = f"link to {path.readlink()}"
        elif path.is_file():
            state[name] = sha256_file(path)
        else:
            state[name] = "folder" if path.is_dir() else "pipe"
    return state


def files(folder: Path, besides: frozenset[str] = LOCKS) -> dict[str, str]:
    """Return the files and links below *folder*, as `tree` does."""
    return {path: state for path, state in tree(folder, besides).items() if state != "folder"}
