"""
Which jobs of a repository's workflows a stranger could start on a machine with certain labels.

Read statically, and closed by default: a trigger that is not known to need write access, a ``runs-on`` that is computed, a workflow that
cannot be read, each counts against the file. An ``if:`` is not believed: it is one edit away from being wrong. What this cannot see is a
pull request that *adds* a workflow; against that stand the hook before each job (`admit`) and the repository's own settings.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from sparkwright.core import strict_yaml
from sparkwright.core.errors import FileError

#: Events that only somebody with write access to the repository causes (GitHub: "Events that trigger workflows").
TRUSTED = frozenset(("push", "schedule", "workflow_dispatch", "repository_dispatch", "release"))
#: Events that stand for whatever started another workflow; they are as good as those.
INDIRECT = frozenset(("workflow_call", "workflow_run"))
_MATRIX = re.compile(r"\$\{\{\s*matrix\.([A-Za-z_][\w-]*)\s*\}\}")


class Exposure(msgspec.Struct, frozen=True, order=True):
    """
    A way in.

    Attributes:
        workflow: Name of the file; *job*: its key there, empty where the whole file counts.
        trigger: The event that a stranger can cause; empty where the file cannot be read.
        reason: One sentence.
    """

    workflow: str
    job: str
    trigger: str
    reason: str


class Workflow(msgspec.Struct, frozen=True):
    """A workflow file, as far as it matters here: the parameters of each trigger, and its jobs."""

    file: str
    name: str
    triggers: dict[str, Any]
    jobs: dict[str, dict[str, Any]]


def exposed(workflow_folder: Path, labels: Collection[str]) -> tuple[Exposure, ...]:
    """
    Return each way in which somebody without write access gets a job onto a machine that has any of *labels*.

    Args:
        workflow_folder: ``.github/workflows`` of a checkout; a folder that is not there holds no workflow.
        labels: Of the machine, in any case, ``self-hosted`` among them where the runner has it.
    """
    workflows, found = [], []
    for file in sorted(one for one in workflow_folder.glob("*") if one.suffix in (".yml", ".yaml")):
        try:
            workflows.append(_read(file))
        except FileError as error:
            if error.reference != "file-invalid":
                raise
            reason = " ".join((error.what.replace(str(file), file.name), *error.details))
            found.append(Exposure(file.name, "", "", f"it cannot be read, so nothing is known of it: {reason}"))
    ours = frozenset(label.lower() for label in labels)
    for workflow in workflows:
        triggers = _strangers(workflow, workflows)
        for job, reason in _reaching(workflow, ours) if triggers else ():
            found += [Exposure(workflow.file, job, trigger, reason) for trigger in sorted(triggers)]
    return tuple(sorted(found))


def _read(file: Path) -> Workflow:
    """Return *file* as a workflow; YAML 1.1 reads the key ``on`` as a truth value."""
    data = strict_yaml.load(file, dict[Any, Any])
    events = data.get("on", data.get(True))
    match events:
        case str():
            triggers: dict[str, Any] = {events: None}
        case list() if all(isinstance(event, str) for event in events):
            triggers = dict.fromkeys(events)
        case dict() if all(isinstance(event, str) for event in events):
            triggers = dict(events)
        case _:
            raise FileError("file-invalid", f"{file} has no readable `on`.")
    jobs = data.get("jobs")
    if not isinstance(jobs, dict) or not all(isinstance(key, str) and isinstance(job, dict) for key, job in jobs.items()):
        raise FileError("file-invalid", f"{file} has no readable `jobs`.")
    return Workflow(file.name, str(data.get("name") or f".github/workflows/{file.name}"), triggers, jobs)


def _strangers(workflow: Workflow, others: Collection[Workflow], seen: frozenset[str] = frozenset()) -> frozenset[str]:
    """Return the triggers by which a stranger starts *workflow*, those of workflows that start it included."""
    if workflow.file in seen:
        return frozenset()
    seen |= {workflow.file}
    found = {event for event in workflow.triggers if event not in TRUSTED | INDIRECT}
    if "workflow_call" in workflow.triggers:
        for caller in (one for one in others if workflow.file in _called(one)):
            found |= _strangers(caller, others, seen)
    if "workflow_run" in workflow.triggers:
        for name in _followed(workflow.triggers["workflow_run"]):
            starters = [one for one in others if one.name == name]
            # A name that fits no file may be that of a file that a branch adds.
            if not starters or any(_strangers(one, others, seen) for one in starters):
                found.add("workflow_run")
    return frozenset(found)


def _called(workflow: Workflow) -> frozenset[str]:
    """Return the files of this repository that *workflow* calls."""
    uses = (job.get("uses") for job in workflow.jobs.values())
    return frozenset(Path(one).name for one in uses if isinstance(one, str) and one.startswith("./"))


def _followed(parameters: Any) -> tuple[str, ...]:
    names = parameters.get("workflows") if isinstance(parameters, dict) else None
    names = [names] if isinstance(names, str) else names
    # Without names it follows nothing that is known, so it counts as following what is unknown.
    return tuple(map(str, names)) if isinstance(names, list) and names else ("",)


def _reaching(workflow: Workflow, ours: frozenset[str]) -> Iterator[tuple[str, str]]:
    """Yield each job of *workflow* that may run on a machine of *ours*, with the reason."""
    for key, job in workflow.jobs.items():
        uses = job.get("uses")
        if isinstance(uses, str):
            if not uses.startswith("./"):
                yield key, "it calls a workflow of another repository, which chooses where it runs"
            continue
        wanted = _labels(job.get("runs-on"), job)
        if wanted is None:
            yield key, "where it runs is computed, or left to a group, so it may run here"
        elif common := sorted(wanted & ours):
            yield key, f"it asks for {', '.join(common)}"


def _labels(wanted: Any, job: Mapping[str, Any]) -> frozenset[str] | None:
    """Return the labels that ``runs-on`` may ask for, in lower case; None where that cannot be read off."""
    match wanted:
        case str() if found := _MATRIX.fullmatch(wanted.strip()):
            return _of_matrix(found[1], job)
        case str():
            return None if "${{" in wanted else frozenset((wanted.strip().lower(),))
        case list() if wanted and all(isinstance(one, str) for one in wanted):
            parts = [_labels(one, job) for one in wanted]
            known = [one for one in parts if one is not None]
            return frozenset().union(*known) if len(known) == len(parts) else None
        case dict() if wanted.get("labels"):
            return _labels(wanted["labels"], job)
    return None


def _of_matrix(name: str, job: Mapping[str, Any]) -> frozenset[str] | None:
    """Return every value that the matrix gives to *name*, where all are written out."""
    strategy = job.get("strategy")
    matrix = strategy.get("matrix") if isinstance(strategy, dict) else None
    if not isinstance(matrix, dict) or not isinstance(matrix.get("include", []), list):
        return None
    values = list(matrix[name]) if isinstance(matrix.get(name), list) else []
    if name in matrix and not isinstance(matrix[name], list):
        return None
    values += [entry[name] for entry in matrix.get("include", []) if isinstance(entry, dict) and name in entry]
    found: frozenset[str] = frozenset()
    for value in values:
        one = None if isinstance(value, str) and _MATRIX.search(value) else _labels(value, {})
        if one is None:
            return None
        found |= one
    return found or None
