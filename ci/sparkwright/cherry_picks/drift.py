"""
Drift: the series on later revisions of its upstream, the status of a stack, the upstream commit at
which a patch stops applying or becomes upstream, and the bump of a fork to another release.

A bump changes the series, its picks and the lock, or nothing. Patches that the new base has are
dropped, with the evidence. What conflicts waits in a worktree; until the export nothing reviewed
changes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import email.utils
import itertools
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Literal

import msgspec

from sparkwright.cherry_picks import apply, series
from sparkwright.cherry_picks.ledger import (
    Ledger,
    PickRecord,
    load_ledger,
    render,
    today,
)
from sparkwright.cherry_picks.patch import Patch, PatchError, count_present_lines
from sparkwright.cherry_picks.upstream import (
    Base,
    Commit,
    Evidence,
    Upstream,
    base_of,
    evidence,
    log,
    still_there,
)
from sparkwright.core import strict_yaml
from sparkwright.core.console import console
from sparkwright.core.errors import FileError, SparkwrightError
from sparkwright.core.files import content_key
from sparkwright.forks import fetch, package_index, resolve
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import (
    UNRESOLVED,
    ForkLock,
    ForkSpec,
    Project,
    SourceError,
    StackSpec,
    WheelSpec,
    render_lock,
)

#: Share of its added lines that are in a base on which a patch conflicts, from which on the base
#: most likely has it.
LIKELY = 0.8

TrialState = Literal["applies", "moves", "already-upstream", "likely-upstream", "empty", "conflict"]

#: Each state in words.
MEANING = {
    "applies": "applies",
    "moves": "applies at other lines",
    "already-upstream": "is upstream",
    "likely-upstream": "is upstream most likely",
    "empty": "is empty",
    "conflict": "conflicts",
}


class Trial(msgspec.Struct, frozen=True):
    """
    One patch on one base.

    Attributes:
        sha256: Of the patch.
        state: ``moves``: a patch of ours applies at other lines than it names; ``likely-upstream``:
            a conflict, but most of the added lines are there, so that upstream took it and changed
            it since, which no test proves.
        present: Added lines that the base has, of how many.
        evidence: Results of the three tests; empty if the patch applies.
    """

    patch: str
    sha256: str
    base: str
    state: TrialState
    present: tuple[int, int]
    evidence: tuple[Evidence, ...]
    says: tuple[str, ...] = ()

    @property
    def applies(self) -> bool:
        """Whether the patch applies and has an effect."""
        return self.state in ("applies", "moves")

    @property
    def proof(self) -> str:
        """The reason why upstream counts as having the patch."""
        proved = [f"{test.test}: {test.says}" for test in self.evidence if test.holds]
        return (
            "; ".join(proved) or f"{self.present[0]} of its {self.present[1]} added lines are there"
        )


class Drift(msgspec.Struct, frozen=True):
    """The trials of a fork's series, on a *day* (UTC)."""

    fork: str
    stack: str
    day: str
    bases: tuple[str, ...]
    trials: tuple[Trial, ...]

    def trials_of(self, patch: str) -> list[Trial]:
        """Return the trials of the patch of that name, in the order of the bases."""
        return [trial for trial in self.trials if trial.patch == patch]

    @property
    def patches(self) -> list[str]:
        """The names of the patches."""
        return list(dict.fromkeys(trial.patch for trial in self.trials))

    def absorption(self, patch: str) -> dict[str, str]:
        """
        Return the end of the patch of that name, in the order of the bases: the *last* base in a
        row, from the first, to which it applies; the *first* that has it, so that it applies to no
        later one, and the *proof*; both empty if there is none; and its *state* on the newest.
        """
        trials, upstream = self.trials_of(patch), ("already-upstream", "likely-upstream")
        fitting = ["", *(t.base for t in itertools.takewhile(lambda trial: trial.applies, trials))]
        later = after_last_fit(trials)
        ends = [(trial.base, trial.proof) for trial in later if trial.state in upstream]
        first, proof = (*ends, ("", ""))[0]
        return {
            "patch": patch,
            "last": fitting[-1],
            "first": first,
            "state": trials[-1].state,
            "proof": proof,
        }


def after_last_fit(trials: Sequence[Trial]) -> Sequence[Trial]:
    """Return the *trials* of a patch that follow the last base to which it applies."""
    return trials[max((at for at, trial in enumerate(trials, 1) if trial.applies), default=0) :]


def trials(upstream: Upstream, patches: Sequence[Patch], base: Base) -> list[Trial]:
    """
    Return the trials of *patches* on *base*; each is tried without the earlier ones that do not
    apply.
    """
    objects, tried = upstream.context.objects, list[Trial]()
    files = apply.files_of(objects.paths(base.tree), patches)
    outcomes = _outcomes(upstream, files, patches)
    stuck = [patch for patch in patches if outcomes[patch.name].status != "applied"]
    tests = evidence(upstream, base, stuck, outcomes)
    contents = objects.blobs(blob for _, blob in files.values())
    texts = {path: data or b"" for path, (_, data) in zip(files, contents, strict=True)}
    for number, patch in enumerate(patches, 1):
        outcome, proofs = outcomes[patch.name], tests.get(patch.name, ())
        count, total = lines = count_present_lines(texts, patch.data)
        state: TrialState = "moves" if outcome.moved and not patch.pick else "applies"
        if outcome.status == "already-upstream" or any(test.holds for test in proofs):
            state = "already-upstream"
        elif outcome.status == "empty":
            state = "empty"
        elif outcome.status == "conflict":
            state = "likely-upstream" if total and count >= LIKELY * total else "conflict"
            if commit := _absorbing(upstream, patches[:number], base):
                says = f"{commit.line()} took it, and its lines changed since"
                proofs, state = (*proofs, Evidence("history", True, says)), "already-upstream"
        tried.append(Trial(patch.name, patch.sha256, base.name, state, lines, proofs, outcome.says))
    return tried


def _outcomes(
    upstream: Upstream, files: Mapping[str, apply.Entry], patches: Sequence[Patch]
) -> dict[str, apply.Outcome]:
    """
    Return the outcome of each of *patches* on a tree of *files*; see `apply.try_patches`. The
    outcomes are stored, and count for every tree in which the files of the patches are the same.
    """
    objects, store = upstream.context.objects, upstream.context.store
    pins = [(patch.name, patch.sha256, patch.pick) for patch in patches]
    key = content_key("outcomes", {"files": sorted(files.items()), "patches": pins})
    outcomes = store.get("outcomes", key, dict[str, apply.Outcome])
    if outcomes is None:
        outcomes = apply.try_patches(objects, files, patches)
        store.put("outcomes", key, outcomes)
    return outcomes


def _absorbing(upstream: Upstream, patches: Sequence[Patch], base: Base) -> Commit | None:
    """
    Return the commit that made the last of *patches*, which conflicts on *base*, upstream's; None
    if there is none, or it cannot be found out.
    """
    objects, patch = upstream.context.objects, patches[-1]
    start = upstream.start_of(patch)
    if not (upstream.mirror and start and base.commit):
        return None
    # The history may not be there, or the host may not answer: then it remains a conflict.
    with contextlib.suppress(SparkwrightError):
        _, commit = _first_change(upstream, patches, start, base.commit, applies=True)
        files = objects.paths(upstream.at_commit(commit, commit, [patch]).tree)
        reverts = _outcomes(upstream, apply.files_of(files, [patch]), [patch])[patch.name].reverts
        if reverts and still_there(upstream, base, patch, commit, "")[0]:
            return log(objects, "-1", commit)[0]
    return None


def measure(
    upstream: Upstream,
    patches: Sequence[Patch],
    bases: Iterable[Base],
    on_base: Callable[[Sequence[Trial]], None] = lambda _: None,
) -> Drift:
    """
    Return the drift of *patches* over *bases*, and keep it as the last one of its stack and fork.

    Args:
        on_base: Called with the trials on each base when they are there.
    """
    context, names, tried = upstream.context, list[str](), list[Trial]()
    for base in bases:
        done = trials(upstream, patches, base)
        on_base(done)
        tried += done
        names.append(base.name)
    drift = Drift(upstream.fork, context.project.stack, today(), tuple(names), tuple(tried))
    if tried:
        context.store.put("drift", _key(context, upstream.fork), drift)
    return drift


def _key(context: RunContext, fork: str) -> str:
    return content_key("drift", {"stack": context.project.stack, "fork": fork})


def last(context: RunContext, fork: str) -> Drift | None:
    """Return the last drift of *fork* in the store; None if there is none."""
    return context.store.get("drift", _key(context, fork), Drift)


class PatchStatus(msgspec.Struct, frozen=True):
    """
    A patch or pick of a stack.

    Attributes:
        age: Days since its author's date; for a pick, since the commit that has it; −1 if unknown.
        needed: Whether it is still needed, by the last drift.
        superseded: What took its place, with the evidence; empty if nothing did.
        page: The page of a pull request.
    """

    fork: str
    name: str
    subject: str
    age: int
    needed: str
    superseded: str
    reason: str
    drop_when: str
    page: str = ""


def status(context: RunContext, fork: str, today: datetime.date) -> list[PatchStatus]:
    """
    Return a line per pick and patch of *fork*, in the order of application, by the last drift in
    the store.
    """
    ledger, stack = load_ledger(context.project.root, fork), context.project.stack
    drift = last(context, fork)
    carried = [_stored(context, ledger, record) for record in ledger.carried(stack)]
    carried += series.load(context.project.series_folder(fork))
    return [
        PatchStatus(
            fork,
            patch.name,
            patch.subject,
            _days_since(patch.date, today),
            *_needed(drift, patch.name, patch.sha256),
            patch.reason,
            patch.drop_when,
            ledger.page(patch.pick) if patch.pick else "",
        )
        for patch in carried
    ]


def _stored(context: RunContext, ledger: Ledger, record: PickRecord) -> Patch:
    """Return the patch of *record*; without its diff if the store lacks the pinned one."""
    with contextlib.suppress(SourceError, PatchError):
        offline = dataclasses.replace(context, offline=True)
        return series.patch_of(offline, ledger, record, context.project.stack)
    return series.as_patch(record, b"")


def _days_since(date: str, today: datetime.date) -> int:
    try:
        return (today - email.utils.parsedate_to_datetime(date).date()).days
    except ValueError:
        return (today - datetime.date.fromisoformat(date[:10])).days if date[:1].isdigit() else -1


def _needed(drift: Drift | None, name: str, sha256: str) -> tuple[str, str]:
    """
    Return whether a patch is still needed, and what superseded it; a drift of another version of it
    does not count.
    """
    tried = [trial for trial in (drift.trials_of(name) if drift else ()) if trial.sha256 == sha256]
    if not drift or not tried:
        return "not looked at", ""
    end = drift.absorption(name)
    if end["first"]:
        return f"until {end['first']}", f"{end['first']}: {end['proof']}"
    return f"{MEANING[tried[-1].state]} on {tried[-1].base}", ""


def up_to(patches: Sequence[Patch], name: str) -> list[Patch]:
    """
    Return the patch *name* (a file, with or without its suffix, or a number) after those before it.

    Raises:
        not-provided: There is none of that name.
    """
    for number, entry in enumerate(patches, 1):
        if name in (entry.name, entry.name.removesuffix(".patch"), str(entry.pick or "")):
            return list(patches[:number])
    raise SourceError(
        "not-provided",
        f"The series has no patch {name!r}.",
        details=[patch.name for patch in patches],
    )


def _first_change(
    fork: Upstream, patches: Sequence[Patch], old: str, new: str, *, applies: bool
) -> tuple[str, str]:
    """
    Return two commits of the branch from *old* to *new*, neighbours among those that change what
    the last of *patches* depends on: it applies to the first like to *old*, and to the second like
    to *new*.

    Args:
        applies: Whether it applies to *old*; it does not to *new*, or the other way round.

    Raises:
        git-failed, offline, source-unreachable: The history or a file of it cannot be read.
    """
    related = apply.related(patches)
    paths, objects = {path for patch in related for path in patch.files}, fork.context.objects
    words = ("rev-list", "--first-parent", "--reverse", new, f"^{old}", "--")
    listed = objects.text(*words, *(f":(literal){path}" for path in sorted(paths))).split()
    commits = [old, *(listed or [new])]
    first, last = 0, len(commits) - 1
    with console.progress(f"search {len(commits)} commits for {patches[-1].name}", 0) as progress:
        while last - first > 1:
            middle = (first + last) // 2
            tree = fork.at_commit(commits[middle], commits[middle], related).tree
            tried = _outcomes(fork, apply.files_of(objects.paths(tree), related), related)
            if (tried[patches[-1].name].status == "applied") == applies:
                first = middle
            else:
                last = middle
            progress.update(last - first, "commits left")
    return commits[first], commits[last]


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
    before, locked, old = project.fork(fork), context.lock.forks[fork], _version(project, fork)
    if old == version:
        raise SourceError(
            "not-provided", f"{fork} is at {version} already.", todo="Name another with --to."
        )
    after = _bumped(before, old, version)
    # Refused before anything is fetched.
    _rewrite_stack(project, fork, old, version, after)
    patches = series.load_series(context, fork)
    drop = [up_to(patches, name)[-1].name for name in drop]
    resolved = resolve.resolve_fork(context, fork, after, locked)
    resolved, after = _with_commit(context, locked, resolved, before, after)
    stack_text = _rewrite_stack(project, fork, old, version, after)
    if locked.fetched:
        console.note("the sources that CMake downloads are those of before until the next lock")
    base = base_of(fetch.fetch(context, fork, resolved), version)
    tried = trials(upstream, [patch for patch in patches if patch.name not in drop], base)
    gone = dict.fromkeys(drop, "dropped with --drop")
    gone |= {
        trial.patch: trial.proof for trial in tried if trial.state in ("already-upstream", "empty")
    }
    lock = msgspec.structs.replace(context.lock, forks={**context.lock.forks, fork: resolved})
    files = {
        f"forks/{project.stack}/stack.yaml": stack_text,
        f"forks/{project.stack}/lock.yaml": render_lock(lock),
    }
    if (ledger := upstream.ledger.without(project.stack, gone)) != upstream.ledger:
        files[f"cherry_picks/{fork}.yaml"] = render(ledger)
    return Bump(fork, base, tuple(tried), gone, files)


def _tag(base: WheelSpec, version: str) -> str:
    """
    Return the tag of the official wheel of *version* in place of that of *base*; only the glibc
    version in it changes.
    """
    glibc = re.sub(r"_2_\d+_", r"_2_\\d+_", re.escape(base.tag))
    stem = re.escape(f"{base.name.replace('-', '_')}-{version}")
    name = re.compile(rf"{stem}-({glibc})\.whl")
    matches = (name.fullmatch(file.name) for file in package_index.files(base.name))
    tags = [match[1] for match in matches if match]
    return base.tag if base.tag in tags or len(tags) != 1 else tags[0]


def _bumped(fork: ForkSpec, old: str, version: str) -> ForkSpec:
    """Return *fork* at *version*: its release, and the wheels and the ref of the same version."""
    replace, sources = msgspec.structs.replace, fork.sources

    def wheel(spec: WheelSpec) -> WheelSpec:
        same = sources.sdist and spec.name == sources.sdist.name
        return replace(spec, version=version, tag=_tag(spec, version)) if same else spec

    git = sources.git and replace(sources.git, ref=sources.git.ref.replace(old, version), commit="")
    sdist = sources.sdist and replace(sources.sdist, version=version)
    own = replace(sources, git=git, sdist=sdist, wheel=sources.wheel and wheel(sources.wheel))
    bases = {machine: wheel(spec) for machine, spec in fork.bases.items()}
    return replace(fork, sources=own, bases=bases)


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


def _with_commit(
    context: RunContext, locked: ForkLock, resolved: ForkLock, before: ForkSpec, after: ForkSpec
) -> tuple[ForkLock, ForkSpec]:
    """
    Return the lock and the fork with the commit of the new release, if stack.yaml had one before:
    as the host has it, or, if it does not answer, as the release states it.

    Raises:
        source-unresolved: The host does not answer, and there is no archive of the release.
    """
    old, git = before.sources.git, resolved.git
    if git and git.commit == UNRESOLVED and not resolved.sdist:
        raise SourceError("source-unresolved", f"The commit of {git.ref} of {git.url} is unknown.")
    if not (git and old and old.commit and after.sources.git):
        return resolved, after
    if git.commit == UNRESOLVED:
        git = msgspec.structs.replace(git, commit=_stated_commit(context, locked, resolved, before))
    prefix = "" if git.commit == UNRESOLVED else git.commit[: len(old.commit)]
    spec = msgspec.structs.replace(after.sources.git, commit=prefix)
    sources = msgspec.structs.replace(after.sources, git=spec)
    resolved = msgspec.structs.replace(resolved, git=git)
    return resolved, msgspec.structs.replace(after, sources=sources)


def _stated_commit(
    context: RunContext, locked: ForkLock, resolved: ForkLock, before: ForkSpec
) -> str:
    """
    Return the commit that a generated file of the new source distribution states in the line in
    which that of the locked one states its commit; `UNRESOLVED` if there is no such line.
    """
    sdist, git = before.sources.sdist, before.sources.git
    if not (sdist and git and locked.sdist and resolved.sdist):
        return UNRESOLVED
    old, new = (
        dict(context.objects.files(package_index.import_file(context, file)))
        for file in (locked.sdist, resolved.sdist)
    )
    generated = [path for path in old if any(fnmatchcase(path, name) for name in sdist.generated)]
    lines, commit = [line for path in generated for line in old[path].splitlines()], git.commit
    for line in [line for line in lines if commit.encode() in line]:
        head, _, tail = map(re.escape, line.partition(commit.encode()))
        stated = re.compile(b"(?m)^" + head + b"([0-9a-f]{7,40})" + tail + b"\\r?$")
        for path in generated:
            if match := stated.search(new.get(path, b"")):
                return match[1].decode()
    return UNRESOLVED


def _rewrite_stack(project: Project, fork: str, old: str, version: str, after: ForkSpec) -> str:
    """
    Return stack.yaml with *version* in place of *old* wherever the block of the fork has it in
    quotes, with the commit of *after* and the tags of the new wheels, so that comments stay.

    Raises:
        file-invalid: It is written in another form, so that the fork would not be *after* then.
    """
    before, text = project.fork(fork), project.stack_file.read_text("utf-8")
    start, end = strict_yaml.span(text, "forks", fork)
    quoted = rf'"(v?){re.escape(old)}"'
    block = re.sub(quoted, lambda pin: f'"{pin[1]}{version}"', text[start:end])
    commit = after.sources.git.commit if after.sources.git else ""
    pin = rf', commit: "{commit}"' if commit else ""
    block = re.sub(r',\s*commit:\s*"[0-9a-f]+"', pin, block)
    for machine, base in before.bases.items():
        block = block.replace(f'"{base.tag}"', f'"{after.bases[machine].tag}"')
    for line in block.splitlines() if commit else ():
        comment = line.partition("#")[2]
        if old in comment:
            console.warn(f"stack.yaml still speaks of {old}:{comment}")
    text = text[:start] + block + text[end:]
    if strict_yaml.parse(text, StackSpec, str(project.stack_file)).forks[fork] != after:
        raise FileError(
            "file-invalid",
            f"{project.stack_file} is not written in the form that bump rewrites.",
            details=[f"expected: {fork} at {version} instead of {old}"],
            todo="Change the versions by hand, run `sparkwright lock`, then `sparkwright patch "
            "rebase`.",
        )
    return text
