"""
Drift: the series on later revisions of its upstream, and the bump of a fork to another release.

A bump changes the series, its picks and the lock, or nothing. Patches that the new base has are
dropped, with the evidence. What conflicts waits in a worktree; until the export nothing reviewed
changes.
"""

import re
from collections.abc import Collection, Sequence
from typing import Literal

import msgspec

from sparkwright.cherry_picks import apply, series
from sparkwright.cherry_picks.ledger import render
from sparkwright.cherry_picks.patch import Patch
from sparkwright.cherry_picks.upstream import Base, Evidence, Upstream, base_of, evidence
from sparkwright.core import strict_yaml
from sparkwright.core.console import console
from sparkwright.core.errors import FileError
from sparkwright.forks import fetch, package_index, resolve
from sparkwright.forks.stack import (
    UNRESOLVED,
    ForkSpec,
    Project,
    SourceError,
    StackSpec,
    WheelSpec,
    render_lock,
)

TrialState = Literal["applies", "moves", "already-upstream", "empty", "conflict"]

#: Each state in words.
MEANING = {
    "applies": "applies",
    "moves": "applies at other lines",
    "already-upstream": "is upstream",
    "empty": "is empty",
    "conflict": "conflicts",
}


class Trial(msgspec.Struct, frozen=True):
    """
    One patch on one base.

    Attributes:
        state: ``moves``: a patch of ours applies at other lines than it names.
        evidence: Results of the three tests; empty if the patch applies.
    """

    patch: str
    base: str
    state: TrialState
    evidence: tuple[Evidence, ...]
    says: tuple[str, ...] = ()

    @property
    def proof(self) -> str:
        """The reason why upstream counts as having the patch; empty if it does not."""
        return "; ".join(f"{test.test}: {test.says}" for test in self.evidence if test.holds)


def trials(upstream: Upstream, patches: Sequence[Patch], base: Base) -> list[Trial]:
    """
    Return the trials of *patches* on *base*; each is tried without the earlier ones that do not
    apply.
    """
    tried = list[Trial]()
    outcomes = apply.try_patches(upstream.context.objects, base.tree, patches)
    for patch in patches:
        outcome, proofs = outcomes[patch.name], tuple[Evidence, ...]()
        if outcome.status != "applied":
            proofs = evidence(upstream, base, patch, outcome)
        state: TrialState = "moves" if outcome.moved and not patch.pick else "applies"
        if outcome.status == "already-upstream" or any(test.holds for test in proofs):
            state = "already-upstream"
        elif outcome.status in ("empty", "conflict"):
            state = outcome.status
        tried.append(Trial(patch.name, base.name, state, proofs, outcome.says))
    return tried


class Bump(msgspec.Struct, frozen=True):
    """
    The changes of a bump.

    Attributes:
        trials: Every patch on the new base, without the dropped ones.
        gone: Patches that are left out, each with the evidence or the option that says so.
        files: The reviewed files that change besides the series: path below the checkout → text.
    """

    fork: str
    base: Base
    trials: tuple[Trial, ...]
    gone: dict[str, str]
    files: dict[str, str]


def plan_bump(upstream: Upstream, version: str, drop: Collection[str] = ()) -> Bump:
    """
    Return the changes of a bump to the release *version*.

    Args:
        drop: Patches and picks to leave out; the series is tried on the new base without them.

    Raises:
        not-provided: The fork is at that version already, its version is not known, or *drop* names
            no patch.
        file-invalid: stack.yaml names the version in a form that is not rewritten.
        source-unreachable, source-unresolved, offline: The release cannot be fetched.
    """
    context, fork, project = upstream.context, upstream.fork, upstream.context.project
    locked, old = context.lock.forks[fork], _version(project, fork)
    if old == version:
        raise SourceError(
            "not-provided", f"{fork} is at {version} already.", todo="Name another with --to."
        )
    # Refused before anything is fetched.
    stack_text, after = _rewrite_stack(project, fork, old, version)
    patches = {patch.name: patch for patch in series.load_series(context, fork)}
    for name in drop:
        if name not in patches:
            raise SourceError(
                "not-provided", f"The series has no patch {name!r}.", details=list(patches)
            )
    resolved = resolve.resolve_fork(context, fork, after, locked)
    git = resolved.git
    if git and git.commit == UNRESOLVED and not resolved.sdist:
        raise SourceError("source-unresolved", f"The commit of {git.ref} of {git.url} is unknown.")
    if locked.fetched:
        console.note("the sources that CMake downloads are those of before until the next lock")
    base = base_of(fetch.fetch(context, fork, resolved), version)
    gone = dict.fromkeys(drop, "dropped with --drop")
    for name in gone:
        del patches[name]
    tried = trials(upstream, list(patches.values()), base)
    gone |= {
        trial.patch: trial.proof for trial in tried if trial.state in ("already-upstream", "empty")
    }
    lock = msgspec.structs.replace(context.lock, forks={**context.lock.forks, fork: resolved})
    files = {
        f"forks/{project.stack}/stack.yaml": stack_text,
        f"forks/{project.stack}/lock.yaml": render_lock(lock),
    }
    ledger = upstream.ledger
    for record in ledger.carried(project.stack):
        if record.name in gone:
            ledger = ledger.with_record(record.dropped_by(project.stack))
    if ledger != upstream.ledger:
        files[f"cherry_picks/{fork}.yaml"] = render(ledger)
    return Bump(fork, base, tuple(tried), gone, files)


def _tag(base: WheelSpec, version: str) -> str:
    """
    Return the tag of the official wheel of *version* in place of that of *base*; only the glibc
    version in it changes.
    """
    glibc = re.sub(r"_2_\d+_", r"_2_\\d+_", re.escape(base.tag))
    stem, tags = re.escape(f"{base.name.replace('-', '_')}-{version}"), list[str]()
    for file in package_index.files(base.name):
        if match := re.fullmatch(rf"{stem}-({glibc})\.whl", file.name):
            tags.append(match[1])
    return base.tag if base.tag in tags or len(tags) != 1 else tags[0]


def _version(project: Project, fork: str) -> str:
    """
    Return the release of *fork* in stack.yaml: of its source distribution, or by its tag.

    Raises:
        not-provided: It has no source distribution, and its git ref names no release.
    """
    sources = project.fork(fork).sources
    if sources.sdist:
        return sources.sdist.version
    match = re.fullmatch(r"v?(\d[\w.]*)", sources.git.ref) if sources.git else None
    if not match:
        raise SourceError(
            "not-provided",
            f"{fork} has no release on the package index, and no tag of one.",
            todo="Edit stack.yaml and run `sparkwright lock`.",
        )
    return match[1]


def _rewrite_stack(project: Project, fork: str, old: str, version: str) -> tuple[str, ForkSpec]:
    """
    Return stack.yaml with *version* in place of *old* wherever the block of the fork has it in
    quotes, with the tags of the new wheels and without the commit of *old*, so that comments stay;
    and the fork that it then states.

    Raises:
        file-invalid: The block has the old version or its commit in another form, too.
    """
    before, text = project.fork(fork), project.stack_file.read_text("utf-8")
    # A fork's block ends where a line has no deeper indentation.
    match = re.search(rf"(?ms)^  {re.escape(fork)}:.*?(?=^ {{0,2}}\S|\Z)", text)
    start, end = match.span() if match else (0, 0)
    block, quoted = text[start:end], re.compile(rf'"(v?){re.escape(old)}"')
    stated = re.sub(r"#.*", "", block)
    usual = 0 < stated.count(old) == len(quoted.findall(stated))
    block = quoted.sub(lambda pin: f'"{pin[1]}{version}"', block)
    block = re.sub(r',\s*commit:\s*"[0-9a-f]+"', "", block)
    git = _fork_in(text[:start] + block + text[end:], project, fork).sources.git
    if not usual or (git and git.commit):
        raise FileError(
            "file-invalid",
            f"{project.stack_file} is not written in the form that bump rewrites.",
            details=[
                f"expected: {fork} at {old}, in quotes wherever it stands",
                'expected: a commit behind its ref, as in {url: …, ref: "…", commit: "…"}',
            ],
            todo="Change the versions by hand, run `sparkwright lock`, then `sparkwright patch "
            "rebase`.",
        )
    sdist = before.sources.sdist
    for base in (before.sources.wheel, *before.bases.values()):
        if base and sdist and base.name == sdist.name:
            block = block.replace(f'"{base.tag}"', f'"{_tag(base, version)}"')
    text = text[:start] + block + text[end:]
    return text, _fork_in(text, project, fork)


def _fork_in(text: str, project: Project, fork: str) -> ForkSpec:
    return strict_yaml.parse(text, StackSpec, str(project.stack_file)).forks[fork]
