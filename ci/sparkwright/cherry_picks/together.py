"""
The usual case of a series, fast: every patch fits at the very lines it names.

The contents after each patch are made here, and git makes all trees at once; then git applies the whole series by itself, strictly, and
must come to the same files. Whatever is unusual (a binary file, a rename, another line, a change that may be there already) is not
decided here: the answer is then that git has to take the patches one by one.
"""

from __future__ import annotations

import itertools
import re
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path, PurePosixPath

from sparkwright.cherry_picks import diff
from sparkwright.cherry_picks.diff import Hunk, Section
from sparkwright.cherry_picks.errors import PatchError
from sparkwright.cherry_picks.patch import Patch
from sparkwright.core.git import EXECUTABLE, REGULAR
from sparkwright.core.git_store import Objects, blob_id, quoted

_MODE = re.compile(rb"^new file mode (\d{6})$", re.MULTILINE)

#: A file at some point of the series: its mode and its bytes; None where there is none.
File = tuple[str, bytes] | None


def trees(objects: Objects, base: str, patches: Sequence[Patch]) -> list[str] | None:
    """Return the tree after each of *patches*, or None when they have to be taken one by one."""
    if not patches:
        return []
    try:
        parts = [one.sections() for one in patches]
    except PatchError as error:
        if error.reference != "patch-invalid":
            raise
        return None
    touched = {path for part in parts for one in part for path in (one.old, one.new) if path}
    new = {one.new for part in parts for one in part if not one.old}
    if _in_the_way(objects, base, {str(folder) for path in new for folder in PurePosixPath(path).parents} - {"."}):
        return None
    before = _read(objects, base, touched)
    files: dict[str, File] = dict(before)
    steps: list[Mapping[str, File]] = []
    for part in parts:
        changed: dict[str, File] = {}
        for one in part:
            after = _applied(one, files.get(one.path))
            if after is None or one.path in changed:
                return None
            changed[one.path] = after[0]
        if not changed:
            return None
        files |= changed
        steps.append(changed)
    made = _import(objects, base, steps)
    expected = {path: blob_id(file[1]) for path, file in files.items() if file is not None}
    return made if _all_differ(base, made) and _by_git(objects, before, patches) == expected else None


def _all_differ(base: str, made: Sequence[str]) -> bool:
    return all(one != other for one, other in itertools.pairwise([base, *made]))


def _in_the_way(objects: Objects, base: str, folders: Collection[str]) -> bool:
    """Is one of the *folders* of new files a file or a link in *base*?"""
    asked = "".join(f"{base}:{folder}\n" for folder in sorted(folders)).encode("utf-8", "surrogateescape")
    out = objects.run(["cat-file", "--batch-check=%(objecttype)"], stdin=asked)[1].decode("utf-8", "surrogateescape") if folders else ""
    return any(line != "tree" and not line.endswith(" missing") for line in out.splitlines())


def _read(objects: Objects, base: str, paths: Collection[str]) -> Mapping[str, File]:
    """Return the files at *paths* of *base*; what is no file there makes the first patch that names it an unusual one."""
    out = objects.run(["ls-tree", "-z", "--full-tree", base, "--", *sorted(paths)])[1].decode("utf-8", "surrogateescape")
    rows = {row.split("\t", 1)[1]: row.split() for row in out.split("\0") if row}
    contents = dict(objects.contents({path: row[2] for path, row in rows.items() if row[1] == "blob"}))
    return {path: (row[0], contents.get(path, b"")) for path, row in rows.items()}


def _applied(part: Section, file: File) -> tuple[File] | None:
    """Return what *part* makes of *file*, or None when that is not for here to say."""
    head = part.data.partition(b"\n@@ ")[0]
    if part.binary or not part.hunks or b"\nold mode " in head or (part.old and part.new and part.old != part.new):
        return None
    if not part.old:
        mode = _MODE.search(head)
        return ((mode[1].decode(), b"".join(part.hunks[0].after)),) if file is None and mode and len(part.hunks) == 1 else None
    if file is None or file[0] not in (REGULAR, EXECUTABLE):
        return None
    lines = diff.lines_of(file[1])
    if not part.new:
        return (None,) if len(part.hunks) == 1 and tuple(lines) == part.hunks[0].before else None
    if all(_stands(lines, hunk, hunk.new_start, hunk.after) for hunk in part.hunks):
        return None
    made: list[bytes] = []
    done = 0
    for hunk in part.hunks:
        if not hunk.before or hunk.start - 1 < done or not _stands(lines, hunk, hunk.start, hunk.before):
            return None
        made += [*lines[done : hunk.start - 1], *hunk.after]
        done = hunk.start - 1 + len(hunk.before)
    return ((file[0], b"".join([*made, *lines[done:]])),)


def _stands(lines: Sequence[bytes], hunk: Hunk, start: int, wanted: Sequence[bytes]) -> bool:
    end = start - 1 + len(wanted)
    return tuple(lines[start - 1 : end]) == tuple(wanted) and (not hunk.last or end == len(lines))


def _import(objects: Objects, base: str, steps: Sequence[Mapping[str, File]]) -> list[str]:
    """Return the tree after each step, by one call of git for all of them."""
    with tempfile.TemporaryDirectory(dir=objects.path, prefix="series-") as scratch, tempfile.TemporaryFile(dir=scratch) as stream:
        for number, changed in enumerate(steps, 1):
            stream.write(f"commit refs/series/{Path(scratch).name}\nmark :{number}\ncommitter sparkwright <> 0 +0000\ndata 0\n".encode())
            stream.write(f'M 040000 {base} ""\n'.encode() if number == 1 else b"")
            for path, file in changed.items():
                what = b"D" if file is None else b"M %b inline" % file[0].encode()
                stream.write(b"%b %b\n" % (what, quoted(path)))
                stream.write(b"data %d\n%b\n" % (len(file[1]), file[1]) if file is not None else b"")
        stream.write(b"reset refs/series/%b\nfrom %b\n\ndone\n" % (Path(scratch).name.encode(), b"0" * 40))
        stream.seek(0)
        marks = Path(scratch) / "marks"
        words = ["fast-import", "--quiet", "--done", "--force", "--depth=0", f"--export-marks={marks}"]
        objects.run(["-c", "core.compression=1", *words], stdin=stream)
        commits = dict(line.split() for line in marks.read_text().splitlines())
    names = "".join(f"{commits[f':{number}']}^{{tree}}\n" for number in range(1, len(steps) + 1))
    return [line.split()[0] for line in objects.run(["cat-file", "--batch-check"], stdin=names.encode())[1].decode().splitlines()]


def _by_git(objects: Objects, files: Mapping[str, File], patches: Sequence[Patch]) -> dict[str, str]:
    """
    Return what git makes of *files* with all *patches* in their order, path → blob id; nothing when it refuses one, or moves a hunk.

    The index holds no other file: a series is about those alone, and an index of thousands costs more than all the patches.
    """
    with tempfile.TemporaryDirectory(dir=objects.path, prefix="series-") as scratch, objects.empty_index() as index:
        names = []
        for number, one in enumerate(patches):
            names.append(str(Path(scratch) / f"{number:04}.diff"))
            Path(names[-1]).write_bytes(one.data)
        index.add({path: (file[0], blob_id(file[1])) for path, file in files.items() if file is not None})
        fits, said = index.apply_files(names)
        return index.blobs() if fits and "offset" not in said else {}
