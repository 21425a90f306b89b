"""Bump: to another release of a real package index, with everything that hangs on it, or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from typing import TYPE_CHECKING

import pytest
from tests.refusals import refusal
from tests.support.texts import TEXT, edited

from sparkwright.cherry_picks import series
from sparkwright.cli import main
from sparkwright.forks import lock, resolve

if TYPE_CHECKING:
    from tests.unit.conftest import Host, Index

STACK = """# What people wrote here stays.
stack: "test"
arch: "12.1f"
label: "spark.test"
forks:
  widget:
    build: graft
    sources:
      # The commit stands in the release.
      git: {{url: "https://github.com/acme/widget.git", ref: "v{version}"}}
      sdist: {{name: "widget-kit", version: "{version}"}}  # the release
    bases:
      x86_64: {{name: "widget-kit", version: "{version}", tag: "{tag}"}}
"""
#: Of the official wheels; a release may name another glibc.
TAG, OTHER_TAG = "cp38-abi3-manylinux_2_28_x86_64", "cp38-abi3-manylinux_2_35_x86_64"
OLD = STACK.format(version="1.0.0", tag=TAG)


class Upstream:
    """An upstream whose releases are tags at its host and sdists on the index, and the stack that takes it."""

    def __init__(self, host: Host, offered: Index) -> None:
        self.host, self.offered = host, offered
        self.stack = host.root / "forks" / host.stack / "stack.yaml"

    def release(self, version: str, files: Mapping[str, bytes | None], tag: str = TAG) -> str:
        """Commit *files*, tag them, and offer the sdist and a wheel."""
        commit = self.host.work.commit(files, f"Release {version}")
        self.host.work.git("tag", f"v{version}")
        self.host.push("main", f"v{version}")
        tree = {path: (self.host.work.path / path).read_bytes() for path in self.host.work.git("ls-files").splitlines()}
        self.offered.release(version, tree)
        self.offered.add(f"widget_kit-{version}-{tag}.whl", b"PK\x05\x06" + bytes(18))
        return commit

    def write(self, version: str) -> None:
        """Write the stack, and lock it."""
        self.stack.write_text(STACK.format(version=version, tag=TAG))
        context = self.host.context()
        context.project.lock_file.write_text(lock.render(resolve.resolve(context)))

    def bump(self, version: str, *words: str) -> int:
        return main.run(["patch", "bump", *self.host.words, "--to", version, *words])


@pytest.fixture(name="upstream")
def _upstream(host: Host, offered: Index) -> Upstream:
    """Return an upstream with the release 1.0.0, a stack on it, a pick, and two patches of ours."""
    made = Upstream(host, offered)
    host.work.commit({"a.txt": TEXT, "b.txt": TEXT}, "Begin")
    host.lock()
    made.release("1.0.0", {"version": b"1.0.0\n"})
    host.work.git("tag", "--force", "v1", "v1.0.0")
    made.write("1.0.0")
    host.carry(7, host.pull(7, {"c.txt": b"picked\n"}, start="v1.0.0"), stacks=("other",))
    host.ours("first.patch", {"a.txt": edited((10, "first\n"))}, "Do the first")
    host.ours("second.patch", {"b.txt": edited((30, "second\n"))}, "Do the second")
    return made


def test_a_bump_to_a_release_that_changed_nothing_of_ours(upstream: Upstream, capsys: pytest.CaptureFixture[str]) -> None:
    """stack.yaml, with the tag of the official wheel, and lock.yaml name the release; people's comments stay, and no patch changes a byte."""
    commit, before = upstream.release("1.1.0", {"version": b"1.1.0\n"}, OTHER_TAG), upstream.host.files()
    assert upstream.bump("1.1.0") == 0
    after, locked = upstream.host.files(), upstream.host.context().project.lock_file.read_text()

    assert {path for path in after if after[path] != before.get(path)} == {"forks/test/stack.yaml", "forks/test/lock.yaml"}
    assert upstream.stack.read_text() == STACK.format(version="1.1.0", tag=OTHER_TAG)
    assert f"ref: v1.1.0\n      commit: {commit}\n" in locked
    assert f"filename: widget_kit-1.1.0-{OTHER_TAG}.whl" in locked
    assert "1:  " in capsys.readouterr().out.partition("range-diff of both series:")[2]


def test_a_bump_drops_what_upstream_took(upstream: Upstream, capsys: pytest.CaptureFixture[str]) -> None:
    """A pick and a patch that the release holds go, each with its evidence; the ledger keeps the record, less this stack."""
    upstream.release("1.1.0", {"c.txt": b"picked\n", "a.txt": b"new\n" + edited((10, "first\n"))})
    assert upstream.bump("1.1.0") == 0
    told = capsys.readouterr()

    assert series.names(upstream.host.series) == ["second.patch"]
    assert [dict(record.stacks) for record in upstream.host.ledger.records] == [{"other": {}}]
    assert "dropped: first.patch, " in told.err
    assert "reverse: 1.1.0 holds the whole change" in told.err.partition("dropped: #7, ")[2].partition("\n")[0]
    assert "written: cherry_picks/widget.yaml" in told.out
    assert "removed: forks/test/widget/first.patch" in told.out


def test_a_pick_that_conflicts_stops_before_anything_is_written(upstream: Upstream) -> None:
    """A pull request cannot be mended here: the error names it and what can be done, and the checkout is as it was."""
    upstream.release("1.1.0", {"c.txt": b"theirs\n"})
    before = upstream.host.files()

    with refusal("patch-conflict", match=r"#7 of widget do not apply to 1\.1\.0") as caught:
        upstream.bump("1.1.0")
    assert "`patch bump --drop '#NUMBER'`" in caught.value.todo
    assert upstream.host.files() == before
    assert not list(upstream.host.root.glob(".rebase/test/*"))
    with refusal("not-provided", match="no patch #9 to drop"):
        upstream.bump("1.1.0", "--drop", "#9")
    upstream.bump("1.1.0", "--drop", "#7")
    assert not upstream.host.ledger.carried("test")


def test_a_killed_export_of_a_bump_is_finished_by_the_next(upstream: Upstream) -> None:
    """Stack, lock, ledger and series change together: what a killed export leaves is the old, the new, or refused by every reader."""
    upstream.release("1.1.0", {"c.txt": b"picked\n", "b.txt": edited((30, "theirs\n"))})
    with refusal("patch-conflict", match=r"second\.patch does not apply to widget"):
        upstream.bump("1.1.0")
    root, old = upstream.host.root, upstream.host.files()
    folder, backup, seen = root / ".rebase" / "test" / "widget", root.parent / "backup", set()
    (folder / "b.txt").write_bytes(edited((30, "theirs, and ours\n")))
    for words in (["add", "b.txt"], ["am", "--continue"]):
        upstream.host.work.git("-C", str(folder), *words)
    shutil.copytree(root, backup, symlinks=True)
    main.run(["patch", "export", *upstream.host.words])
    new = upstream.host.files()
    for after in range(1, 40):
        shutil.rmtree(root)
        shutil.copytree(backup, root, symlinks=True)
        if not upstream.host.killed(str(root), after, "patch export"):
            break
        state = {name: data for name, data in upstream.host.files().items() if not name.endswith(".new")}
        seen.add("old" if state == old else "new" if state == new else "refused")
        if state not in (old, new):
            with refusal("patch-invalid", match="disagree"):
                main.run(["patch", "status", *upstream.host.words])
        if folder.exists():
            main.run(["patch", "export", *upstream.host.words])
        assert upstream.host.files() == new
    assert seen == {"old", "refused", "new"}


ONE_LINE = """stack: test
arch: 12.1f
label: spark.test
forks: {widget: {build: backend, sources: {git: {url: "https://github.com/acme/widget.git", ref: "v1.0.0"},
  sdist: {name: "widget-kit", version: "1.0.0"}}}}
"""


@pytest.mark.parametrize(
    "text",
    [
        OLD.replace('version: "1.0.0"}', "version: 1.0.0}"),
        OLD.replace("  widget:", '  "widget":'),
        OLD.replace('ref: "v1.0.0"', "ref: v1.0.0"),
        OLD + '      wheel: {name: "widget-kit", version: 1.0.0, tag: "py3-none-any"}\n',
        OLD + '      wheel: {name: "other", version: "1.0.0", tag: "py3-none-any", folder: "x"}\n',
        OLD.replace("build: backend", 'build: backend\n    vendored: {x: {ignored: "1.0.0"}}'),
        ONE_LINE,
    ],
    ids=["no quotes", "a quoted key", "a ref without quotes", "a wheel without quotes", "another project of that version", "the version in another field", "one line"],
)
def test_an_unusual_form_is_refused_with_advice(upstream: Upstream, text: str) -> None:
    """What the program cannot rewrite without doubt it leaves alone, and says what to do by hand."""
    upstream.release("1.1.0", {"version": b"1.1.0\n"})
    upstream.stack.write_text(text)
    before = upstream.host.files()

    with refusal("file-invalid", match="not written in the form that bump rewrites") as caught:
        upstream.bump("1.1.0")
    assert "sparkwright lock" in caught.value.todo
    assert upstream.host.files() == before
