"""
A new stack: a copy of the nearest one, with the releases that a release of vLLM requires.

It is written and locked below ``.rebase``, tried there, and moved into the checkout as a whole: its
stack.yaml comes last, so a killed run leaves no stack.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import re
import shutil
import textwrap
from collections.abc import Mapping
from pathlib import Path

import msgspec
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from sparkwright.builder import BuildError, pins, pylock, toolchain
from sparkwright.builder.arch import rules as archs
from sparkwright.cherry_picks import drift, ledger, series
from sparkwright.cherry_picks.patch import Patch
from sparkwright.cherry_picks.upstream import Upstream, base_of
from sparkwright.core import strict_yaml
from sparkwright.core.console import console
from sparkwright.core.errors import FileError, SparkwrightError, UsageError
from sparkwright.forks import fetch, resolve
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import (
    ForkSpec,
    GitSpec,
    Lock,
    Project,
    SourceError,
    SourceSpecs,
    StackSpec,
    read_lock,
    render_lock,
    stack_names,
)

#: The fork whose official wheel says what the others have to be.
FORK = "vllm"


class Finding(msgspec.Struct, frozen=True):
    """What became of a pin, patch, pick or rule of the nearest stack, and what to do about it."""

    fork: str
    name: str
    state: str
    todo: str = ""


def create(context: RunContext, name: str, version: str) -> list[Finding]:
    """
    Write the stack *name* for the release *version* of vLLM, and return what was found.

    Raises:
        usage: There is such a stack or a folder of it already, or it is no name of a stack, or no
            version.
        not-provided: No stack of the checkout has a release of vLLM.
        file-invalid: A file of the nearest stack is written in a form that is not rewritten.
        source-unreachable: The index does not offer the release, or one that it requires.
    """
    root = context.project.root
    try:
        label, wanted = Version(f"0+spark.{name}").local, Version(version)
    except InvalidVersion as error:
        raise UsageError("usage", f"{error}") from error
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise UsageError("usage", f"{name!r} is no name of a stack.")
    near_first = list[tuple[list[int], Project]]()
    for stack in (Project(root, stack) for stack in stack_names(root)):
        # One of a branch is near to no release.
        with contextlib.suppress(InvalidVersion):
            if FORK in stack.spec.forks:
                release = Version(pins.release(stack.fork(FORK)))
                near_first.append((_distance(release, wanted), stack))
    if not near_first:
        raise SourceError("not-provided", f"No stack of {root} has a release of {FORK}.")
    stacks = [stack for _, stack in sorted(near_first, key=lambda pair: pair[0])]
    near, scratch = stacks[0], root / ".rebase" / f".new-{name}"
    console.note(f"the nearest stack is {near.stack}, of {FORK} {pins.release(near.fork(FORK))}")
    with context.project.editing():
        folders = [scratch / "build" / name, scratch / "forks" / name]
        # A run that was killed between the two moves of `_place` left the first one.
        if name not in stack_names(root) and [*map(Path.exists, folders)] == [False, True]:
            shutil.rmtree(root / "build" / name, ignore_errors=True)
        for folder in (root / "forks" / name, root / "build" / name):
            if folder.exists():
                raise UsageError("usage", f"There is a stack {name!r} already, in {folder}.")
        shutil.rmtree(scratch, ignore_errors=True)
        try:
            _copy(context, stacks, scratch, name, str(label), version)
            new = dataclasses.replace(
                context, project=Project(scratch, name), forks=tuple(near.spec.forks)
            )
            findings = _lock(new, stacks)
            for fork in new.forks:
                findings += _try(new, near, fork)
            _place(new, root, near)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return findings


def _distance(version: Version, wanted: Version) -> list[int]:
    """Return how far *version* is from *wanted*, part by part."""
    pairs = itertools.zip_longest(version.release, wanted.release, fillvalue=0)
    return [abs(ours - theirs) for ours, theirs in pairs]


def _copy(
    context: RunContext, stacks: list[Project], scratch: Path, stack: str, label: str, version: str
) -> None:
    """
    Copy the first of *stacks* to *scratch* as *stack*, with *version* of vLLM and the releases that
    it requires exactly. A fork without releases on the index comes from a stack that has the tag
    which vLLM's sources name, if there is one.
    """
    near, root = stacks[0], context.project.root
    for folder in ("build", "forks"):
        left_out = shutil.ignore_patterns("lock.yaml", "pylock.toml", "costs.yaml")
        shutil.copytree(root / folder / near.stack, scratch / folder / stack, ignore=left_out)
    (scratch / "cherry_picks").mkdir()
    for path in (root / "cherry_picks").glob("*.yaml"):
        shutil.copy(path, scratch / "cherry_picks")
    near_context = dataclasses.replace(context, project=near)
    required = {
        canonicalize_name(requirement.name): requirement
        for _, requirement in pins.requirements(near_context, FORK, version, {})
    }
    exact: dict[str, str] = {
        name: clause.version
        for name, requirement in required.items()
        for clause in requirement.specifier
        if clause.operator == "==" and not clause.version.endswith("*")
    }
    settings, releases = toolchain.spec(near).forks, {FORK: version}
    for fork in near.spec.forks:
        releases.setdefault(fork, exact.get(canonicalize_name(settings[fork].distribution), ""))

    origin = f"# Made by `sparkwright lock --new` from {near.stack} for vLLM {version}."
    stack_file, forks = scratch / "forks" / stack / "stack.yaml", dict(near.spec.forks)
    text = stack_file.read_text("utf-8")
    for key, value in {"stack": stack, "label": label}.items():
        text = _with_entry(text, key, value=value)
    text = f"{origin}\n{text[strict_yaml.span(text)[0] :]}"
    for fork, spec in near.spec.forks.items():
        stack_file.write_text(text, "utf-8")
        if spec.sources.sdist and releases[fork] not in ("", pins.release(spec)):
            text = drift.rewrite_stack(Project(scratch, stack), fork, releases[fork])
            forks[fork] = strict_yaml.parse(text, StackSpec, str(stack_file)).forks[fork]
        elif releases[fork] and not spec.sources.sdist:
            forks[fork], block = _at_release(stacks, fork, releases[fork])
            start, end = strict_yaml.span(text, "forks", fork)
            text = text[:start] + block + text[end:]
    stack_file.write_text(text, "utf-8")
    expected = msgspec.structs.replace(near.spec, stack=stack, label=label, forks=forks)
    if strict_yaml.load(stack_file, StackSpec) != expected:
        raise FileError(
            "file-invalid",
            f"{near.stack_file} is not written in the form that lock --new rewrites.",
            todo="Indent its forks as the other stacks do.",
        )

    environment = scratch / "build" / stack / "environment.yaml"
    requires = {
        name: text
        for name, text in settings[FORK].requires.items()
        # What was changed for another release does not hold for this one.
        if not text and name in required
    }
    if requires != settings[FORK].requires:
        text = environment.read_text("utf-8")
        environment.write_text(
            _with_entry(text, "forks", FORK, "requires", value=requires), "utf-8"
        )
    tools = environment.with_name("requirements.in")
    head, *lines = tools.read_text("utf-8").splitlines() or [""]
    lines = lines if head.startswith("#") else [head, *lines]
    tools.write_text("\n".join([origin, *(_fitting(line, exact) for line in lines), ""]), "utf-8")


def _with_entry(text: str, *keys: str, value: object) -> str:
    """Return YAML *text* with *value* at the path *keys*."""
    start, end = strict_yaml.span(text, *keys)
    # JSON is YAML in one line.
    return f"{text[:start]}{keys[-1]}: {msgspec.json.encode(value).decode()}{text[end:]}"


def _at_release(stacks: list[Project], fork: str, release: str) -> tuple[ForkSpec, str]:
    """Return *fork* as one of *stacks* has it at *release*, else from git alone, and its YAML."""
    donors = [stack for stack in stacks if fork in stack.spec.forks]
    donors = [stack for stack in donors if pins.release(stack.spec.forks[fork]) == release]
    donors.sort(key=lambda stack: not stack.spec.forks[fork].sources.wheel)
    if donors:
        text = donors[0].stack_file.read_text("utf-8")
        start, end = strict_yaml.span(text, "forks", fork)
        return donors[0].spec.forks[fork], text[start:end]
    spec = stacks[0].spec.forks[fork]
    git = spec.sources.git or GitSpec("", "")
    git = msgspec.structs.replace(git, ref=git.ref[:1].strip("0123456789") + release, commit="")
    spec = msgspec.structs.replace(spec, sources=SourceSpecs(git=git))
    return spec, textwrap.indent(strict_yaml.dump({fork: spec}), "  ").strip()


def _fitting(line: str, exact: Mapping[str, str]) -> str:
    """Return the *line* of requirements.in at the release that is required, if it is another."""
    try:
        ours = Requirement(line.partition("#")[0])
    except InvalidRequirement:
        return line
    release = exact.get(canonicalize_name(ours.name), "")
    fits = not release or ours.specifier.contains(release, prereleases=True)
    ours.specifier = ours.specifier if fits else SpecifierSet(f"=={release}")
    return line if fits else str(ours)


def _lock(context: RunContext, stacks: list[Project]) -> list[Finding]:
    """Lock the stack of *context*, with what *stacks* know of the same sources."""
    project, earlier = context.project, {}
    for stack in reversed([stack for stack in stacks if stack.lock_file.exists()]):
        lock = read_lock(stack)
        for fork, spec in project.spec.forks.items():
            if fork in lock.forks and stack.spec.forks[fork].sources == spec.sources:
                earlier[fork] = lock.forks[fork]
    resolved = resolve.resolve(context, Lock(1, project.stack, earlier) if earlier else None)
    project.lock_file.write_text(render_lock(resolved), "utf-8")
    pylock.lock(context.store, project.build_folder)
    findings = [Finding("", line, "unresolved") for line in resolve.unresolved(project, resolved)]
    return findings + [
        Finding("", line, "do not fit together", f"choose in forks/{project.stack}/stack.yaml")
        for line in pins.disagreements(context, every=True)
    ]


def _try(context: RunContext, near: Project, fork: str) -> list[Finding]:
    """
    Try the picks, patches and arch rules that *fork* has in *near* on its new source; those that
    upstream has are taken out of the new series, and a pick that applies is carried.
    """
    stack, findings, picks = context.project.stack, list[Finding](), list[Patch]()
    records, carried = ledger.load_ledger(near.root, fork), list[ledger.PickRecord]()
    try:
        base = base_of(fetch.fetch(context, fork))
    except SparkwrightError as error:
        todo = f"sparkwright fetch --stack {stack} --fork {fork}, where the host answers"
        return [Finding(fork, "source", f"{error.reference}: {error.what}", todo)]
    untried = list[str]()
    for record in records.carried(near.stack):
        try:
            picks.append(series.patch_of(context, records, record, near.stack))
        except SparkwrightError as error:
            untried.append(f"{fork}{record.name}")
            findings.append(Finding(fork, record.name, f"not tried: {error.reference}"))
    if untried:
        todo = f"sparkwright patch pick --stack {stack} --carry {' '.join(untried)}"
        findings.append(Finding(fork, "picks", "not carried", todo))
    folder = context.project.series_folder(fork)
    patches = [*(pick for pick in picks if pick.data), *series.load(folder)]
    gone = set[str]()
    for trial in drift.trials(Upstream(context, fork), patches, base):
        state, todo = drift.MEANING[trial.state], ""
        if trial.state in ("already-upstream", "empty"):
            gone.add(trial.patch)
            state += f": {trial.proof}"
        elif trial.state != "applies":
            words = f"--stack {stack} --fork {fork}"
            todo = f"sparkwright patch rebase {words}, then sparkwright patch export {words}"
            state += "".join(f": {line}" for line in trial.says[:1])
        if trial.applies and trial.patch.startswith("#"):
            carried.append(records.by_number[int(trial.patch[1:])])
        findings.append(Finding(fork, trial.patch, state, todo))
    names = series.names(folder)
    for name in gone.intersection(names):
        (folder / name).unlink()
    if folder.exists():
        text = "".join(f"{name}\n" for name in names if name not in gone)
        (folder / "series").write_text(text, "utf-8")
    for record in carried:
        stacks = {**record.stacks, stack: record.stacks[near.stack]}
        records = records.with_record(msgspec.structs.replace(record, stacks=stacks))
    if carried:
        ledger.path_of(context.project.root, fork).write_text(ledger.render(records), "utf-8")
    return findings + _try_rules(context, fork, base.tree)


def _try_rules(context: RunContext, fork: str, tree: str) -> list[Finding]:
    """Try the arch rules and guards of *fork* on *tree*, each after the rules that match."""
    project, objects, findings = context.project, context.objects, list[Finding]()
    path = project.build_folder / f"archs{project.suffix}.yaml"
    entries, changed = strict_yaml.load(path, archs.ArchRules).of(fork), dict[str, bytes]()
    todo = f"correct it in build/{project.stack}/{path.name}, or remove it"

    def read(name: str) -> bytes | None:
        return changed.get(name) or objects.blob(tree, name)

    for rule in entries.rules:
        if rule.source:
            findings.append(Finding(fork, rule.name, f"not tried: plan reads {rule.source}"))
            continue
        try:
            changed |= archs.rewrite(read, [rule])[0]
            findings.append(Finding(fork, rule.name, "matches"))
        except BuildError as error:
            state = f"no longer matches: {[*error.details, error.what][0]}"
            findings.append(Finding(fork, rule.name, state, todo))
    paths = objects.paths(tree)
    for entry in (*entries.kept, *entries.dropped):
        if not any(map(entry.covers, paths)):
            findings.append(Finding(fork, entry.unit, "no longer matches: no such unit", todo))
    for guard in entries.guards:
        idle = [text for text in guard.patterns if not guard.matches(objects, tree, text)]
        state = f"no longer matches: {idle[0]!r}" if idle else "matches"
        findings.append(Finding(fork, guard.name, state, todo if idle else ""))
    return findings


def _place(context: RunContext, root: Path, near: Project) -> None:
    """Move the stack of *context* into *root*; its folder below ``forks`` comes last."""
    scratch, stack = context.project.root, context.project.stack
    for path in (scratch / "cherry_picks").glob("*.yaml"):
        context.store.write(root / "cherry_picks" / path.name, path.read_bytes())
    for path in near.build_folder.glob("archs*.yaml"):
        suffix = path.stem.removeprefix("archs")
        audit_file = near.audit_file.with_name(f"{near.stack}{suffix}.yaml")
        target = audit_file.with_name(f"{stack}{suffix}.yaml")
        if audit_file.exists() and not target.exists():
            context.store.write(target, audit_file.read_bytes())
    for folder in ("build", "forks"):
        (scratch / folder / stack).rename(root / folder / stack)
