"""
Runs the workflows of ``.github/workflows`` without GitHub: jobs in the order of their needs, conditions and expressions evaluated, and
each ``run:`` executed by bash as GitHub's runner does it, in a workspace of its own with GitHub's variables and files.

GitHub's own actions have stand-ins here that do the same with folders (a checkout is a clone of the repository, an artifact is a folder);
nothing else is replaced. What only GitHub enforces is not shown by this: permissions, approvals, concurrency, time limits.

The expression language is that of https://docs.github.com/actions/reference/evaluate-expressions-in-workflows-and-actions.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import itertools
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from tests.support import githubwork
from tests.unit.test_repository import tracked

_TOKEN = re.compile(
    r"\s*(?:(?P<number>-?\d+(?:\.\d+)?)|'(?P<text>(?:[^']|'')*)'|(?P<name>[A-Za-z_][\w-]*)|(?P<mark>==|!=|&&|\|\||[!().,\[\]]))"
)
_INSIDE = re.compile(r"\$\{\{(.*?)\}\}", re.DOTALL)
#: Seconds after which a step hangs.
PATIENCE = 1500
ROOT = Path(__file__).parents[2]
#: Who starts them.
ACTOR = "maintainer"
#: What the runs take for GitHub's own address; git is told to look on the disk for it.
SERVER = "https://git.example"


class Expression:
    """One expression, evaluated in *contexts*; a name that is not there is null, as GitHub has it."""

    def __init__(self, text: str, contexts: Mapping[str, Any], failed: bool = False) -> None:
        self._tokens: list[tuple[str, str]] = []
        place, text = 0, text.strip()
        while place < len(text):
            match = _TOKEN.match(text, place)
            assert match, f"not understood: {text[place:]!r}"
            kind = match.lastgroup or ""
            self._tokens.append((kind, match[kind]))
            place = match.end()
        self._contexts, self._failed = contexts, failed

    def value(self) -> Any:
        found = self._or()
        assert not self._tokens, f"left over: {self._tokens}"
        return found

    def _next(self, *marks: str) -> bool:
        if self._tokens and self._tokens[0][0] == "mark" and self._tokens[0][1] in marks:
            self._last = self._tokens.pop(0)[1]
            return True
        return False

    def _or(self) -> Any:
        found = self._and()
        while self._next("||"):
            right = self._and()
            found = found or right
        return found

    def _and(self) -> Any:
        found = self._compared()
        while self._next("&&"):
            right = self._compared()
            found = found and right
        return found

    def _compared(self) -> Any:
        found = self._unary()
        while self._next("==", "!="):
            same, right = self._last == "==", self._unary()
            found = _same(found, right) is same
        return found

    def _unary(self) -> Any:
        if self._next("!"):
            return not self._unary()
        if self._next("("):
            found = self._or()
            assert self._next(")")
            return found
        kind, text = self._tokens.pop(0)
        if kind == "number":
            return float(text)
        if kind == "text":
            return text.replace("''", "'")
        return self._call(text) if self._next("(") else self._member(text)

    def _member(self, name: str) -> Any:
        found = {"true": True, "false": False, "null": None}.get(name, self._contexts.get(name))
        while self._next("."):
            key = self._tokens.pop(0)[1]
            found = found.get(key) if isinstance(found, Mapping) else None
        return found

    def _call(self, name: str) -> Any:
        words = []
        while not self._next(")"):
            words.append(self._or())
            self._next(",")
        calls: dict[str, Callable[..., Any]] = {
            "always": lambda: True, "cancelled": lambda: False, "success": lambda: not self._failed, "failure": lambda: self._failed,
            "fromJSON": json.loads, "toJSON": json.dumps,
            "format": lambda form, *given: re.sub(r"\{(\d+)\}", lambda match: given[int(match[1])], form),
            "contains": lambda whole, part: part in (whole or ""), "startsWith": lambda whole, part: (whole or "").startswith(part),
        }  # fmt: skip
        return calls[name](*words)


def _same(one: Any, other: Any) -> bool:
    """Texts are compared without regard to case, and null equals the empty text (both are 0 as numbers)."""
    fold = [value.lower() if isinstance(value, str) else "" if value is None else value for value in (one, other)]
    return bool(fold[0] == fold[1])


def text(value: Any, contexts: Mapping[str, Any]) -> str:
    """Return *value* with its expressions filled in."""
    said = str(value).lower() if isinstance(value, bool) else str(value)
    return _INSIDE.sub(lambda match: _said(Expression(match[1], contexts).value()), said)


def _said(value: Any) -> str:
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(int(value)) if isinstance(value, float) else str(value)


def holds(condition: Any, contexts: Mapping[str, Any], *, failed: bool) -> bool:
    """Whether a job or step runs: without a word about the state, only where nothing failed before."""
    said = str(condition if condition is not None else "success()").strip()
    inner = _INSIDE.fullmatch(said)
    said = inner[1] if inner else said
    if not re.search(r"\b(always|cancelled|success|failure)\(", said):
        said = f"success() && ({said})"
    return bool(Expression(said, contexts, failed).value())


@dataclasses.dataclass
class Step:
    """A step as it was run: *ended* is its exit status, None for one that was left out; *said* what it printed; *seconds* that it took."""

    job: str
    name: str
    ended: int | None
    said: str = ""
    seconds: float = 0.0


@dataclasses.dataclass
class World:
    """
    Where workflows run.

    Attributes:
        folder: Everything lies there: workspaces, artifacts, pages.
        repository: The bare repository that ``$GITHUB_SERVER_URL/$GITHUB_REPOSITORY`` names, its name ending in ``OWNER/NAME``.
        environment: What the machine's own environment has. *variables*, *secrets*: of the repository.
        api: GitHub's API for it, where somebody answers.
        keep: Names in a workspace that survive a checkout; the environment of the last job, so that pip finds all there.
        steps: All that was run, in order. *summaries*: the page of each job. *uses*: every action that was asked for.
    """

    folder: Path
    repository: Path
    environment: dict[str, str]
    variables: dict[str, str] = dataclasses.field(default_factory=dict)
    secrets: dict[str, str] = dataclasses.field(default_factory=dict)
    keep: tuple[str, ...] = (".venv",)
    steps: list[Step] = dataclasses.field(default_factory=list)
    summaries: dict[str, str] = dataclasses.field(default_factory=dict)
    uses: list[str] = dataclasses.field(default_factory=list)
    artifacts: dict[str, Path] = dataclasses.field(default_factory=dict)
    run_id: int = 1
    api: githubwork.World | None = None

    @property
    def name(self) -> str:
        return "/".join(self.repository.parts[-2:])

    def run(self, workflow: Path, *, event: str = "workflow_dispatch", inputs: Mapping[str, str] | None = None) -> dict[str, str]:
        """Run *workflow*, and return what came of each job."""
        made = yaml.safe_load(workflow.read_text("utf-8"))
        # YAML 1.1 reads the key `on` as a truth value.
        declared = ((made[True] or {}).get(event) or {}) if isinstance(made[True], dict) else {}
        given = {name: one.get("default", "") for name, one in declared.get("inputs", {}).items()} if event == "workflow_dispatch" else {}
        self.run_id += 1
        self.artifacts.clear()
        contexts: dict[str, Any] = {"inputs": {**given, **(inputs or {})}, "vars": self.variables, "secrets": self.secrets}
        contexts["github"] = {
            "repository": self.name, "ref": "refs/heads/main", "event_name": event, "token": githubwork.TOKEN, "sha": self._head(),
            "run_id": str(self.run_id), "actor": ACTOR, "workspace": str(self.folder / "workspace"), "workflow": made["name"],
        }  # fmt: skip
        results: dict[str, dict[str, Any]] = {}
        for job in _ordered(made["jobs"]):
            results[job] = self._job(job, made, contexts, results)
        return {job: one["result"] for job, one in results.items()}

    def _head(self) -> str:
        return subprocess.run(["git", "rev-parse", "main"], cwd=self.repository, capture_output=True, text=True, check=True).stdout.strip()

    def _job(self, key: str, made: Mapping[str, Any], contexts: dict[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
        job = made["jobs"][key]
        needs = [job["needs"]] if isinstance(job.get("needs"), str) else job.get("needs", [])
        known = {**contexts, "needs": {one: before[one] for one in needs}}
        failed = any(before[one]["result"] != "success" for one in needs)
        if not holds(job.get("if"), known, failed=failed):
            return {"result": "skipped", "outputs": {}}
        outputs: dict[str, str] = {}
        worst = "success"
        for row in _rows(job.get("strategy", {}).get("matrix"), known):
            one, told = self._leg(key, job, {**known, "matrix": row}, {**made.get("env", {})})
            worst = "failure" if one == "failure" else worst
            outputs |= told
        return {"result": worst, "outputs": outputs}

    def _leg(self, key: str, job: Mapping[str, Any], known: dict[str, Any], env: dict[str, Any]) -> tuple[str, dict[str, str]]:
        place = self.folder / "workspace"
        place.mkdir(parents=True, exist_ok=True)
        self._clean(place)
        known = {**known, "runner": {"arch": "X64", "os": "Linux"}, "steps": {}}
        known["env"] = {name: text(value, known) for name, value in env.items()}
        known["env"] |= {name: text(value, known) for name, value in job.get("env", {}).items()}
        files = {name: self.folder / "files" / f"{name}-{len(self.steps)}" for name in ("PATH", "ENV", "OUTPUT", "STEP_SUMMARY")}
        (self.folder / "files").mkdir(exist_ok=True)
        failed = False
        for step in job["steps"]:
            if not holds(step.get("if"), known, failed=failed):
                self.steps.append(Step(key, step.get("name", step.get("uses", "")), None))
                continue
            for path in files.values():
                path.touch()
            ended = self._step(key, step, known, files, place)
            failed = failed or (ended != 0 and not step.get("continue-on-error"))
            if "id" in step:
                known["steps"][step["id"]] = {"outputs": _pairs(files["OUTPUT"])}
        self.summaries[key] = self.summaries.get(key, "") + files["STEP_SUMMARY"].read_text("utf-8")
        outputs = {name: text(value, known) for name, value in job.get("outputs", {}).items()}
        return ("failure" if failed else "success"), outputs

    def _clean(self, place: Path) -> None:
        for one in place.iterdir():
            if one.name not in self.keep:
                shutil.rmtree(one) if one.is_dir() and not one.is_symlink() else one.unlink()

    def _step(self, job: str, step: Mapping[str, Any], known: dict[str, Any], files: Mapping[str, Path], place: Path) -> int:
        if "uses" in step:
            self.uses.append(step["uses"])
            options = {name: text(value, known) for name, value in step.get("with", {}).items()}
            said = _ACTIONS[step["uses"].split("@")[0]](self, place, options)
            self.steps.append(Step(job, step.get("name", step["uses"].split("@")[0]), 1 if said else 0, said))
            return 1 if said else 0
        env = {**self.environment, **self._github(known, files, place), **known["env"], **_pairs(files["ENV"])}
        env |= {name: text(value, known) for name, value in step.get("env", {}).items()}
        added = files["PATH"].read_text("utf-8").split()
        env["PATH"] = os.pathsep.join([*reversed(added), env["PATH"]])
        script = self.folder / "files" / "step.sh"
        script.write_text(text(step["run"], known), "utf-8")
        began = time.monotonic()
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", str(script)], cwd=place, env=env, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False, timeout=PATIENCE,
        )  # fmt: skip
        said, took = done.stdout.decode("utf-8", "replace"), time.monotonic() - began
        self.steps.append(Step(job, step.get("name", step["run"]), done.returncode, said, took))
        return done.returncode

    def _github(self, known: Mapping[str, Any], files: Mapping[str, Path], place: Path) -> dict[str, str]:
        temporary = self.folder / "temporary"
        temporary.mkdir(exist_ok=True)
        config = self.folder / "gitconfig"
        config.write_text(f'[url "file://{self.repository.parents[1]}/"]\n\tinsteadOf = {SERVER}/\n')
        one = known["github"]
        return {
            "GITHUB_ACTIONS": "true", "GITHUB_SERVER_URL": SERVER, "GIT_CONFIG_GLOBAL": str(config), "GITHUB_REPOSITORY": self.name,
            "GITHUB_SHA": one["sha"], "GITHUB_REF": one["ref"], "GITHUB_RUN_ID": one["run_id"], "GITHUB_RUN_ATTEMPT": "1",
            "GITHUB_WORKFLOW": one["workflow"], "GITHUB_WORKSPACE": str(place), "RUNNER_TEMP": str(temporary), "CI": "true",
            **{f"GITHUB_{name}": str(path) for name, path in files.items()},
        }  # fmt: skip


def _ordered(jobs: Mapping[str, Any]) -> list[str]:
    found: list[str] = []
    while len(found) < len(jobs):
        for key, job in jobs.items():
            needs = [job["needs"]] if isinstance(job.get("needs"), str) else job.get("needs", [])
            if key not in found and set(needs) <= set(found):
                found.append(key)
    return found


def _rows(matrix: Mapping[str, Any] | None, contexts: Mapping[str, Any]) -> list[dict[str, Any]]:
    if not matrix:
        return [{}]
    values = {}
    for name, given in matrix.items():
        inner = _INSIDE.fullmatch(given.strip()) if isinstance(given, str) else None
        values[name] = Expression(inner[1], contexts).value() if inner else given
    return [dict(zip(values, row, strict=True)) for row in itertools.product(*values.values())]


def _pairs(path: Path) -> dict[str, str]:
    return dict(line.split("=", 1) for line in path.read_text("utf-8").splitlines() if "=" in line) if path.exists() else {}


def _checkout(world: World, place: Path, options: Mapping[str, str]) -> str:
    assert options.get("persist-credentials") == "false"
    clone = world.folder / "clone"
    shutil.rmtree(clone, ignore_errors=True)
    # GitHub's machines have no configuration that changes line ends.
    env = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull}
    subprocess.run(["git", "clone", "--quiet", "--branch", "main", str(world.repository), str(clone)], env=env, check=True)
    for one in clone.iterdir():
        shutil.move(one, place / one.name)
    return ""


def _upload(world: World, place: Path, options: Mapping[str, str]) -> str:
    found = [path for pattern in options["path"].split() for path in sorted(place.glob(pattern))]
    files = [path for one in found for path in ([one] if one.is_file() else one.rglob("*")) if path.is_file() and not path.is_symlink()]
    if not files:
        return "no files were found" if options.get("if-no-files-found") == "error" else ""
    # The least folder that holds all of them is left out of the names, as the real one does.
    root = found[0] if len(found) == 1 and found[0].is_dir() else Path(os.path.commonpath([path.parent for path in files]))
    target = world.folder / "artifacts" / f"{world.run_id}" / options["name"]
    for path in files:
        (target / path.relative_to(root)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, target / path.relative_to(root))
    world.artifacts[options["name"]] = target
    return ""


def _download(world: World, place: Path, options: Mapping[str, str]) -> str:
    where = world.folder / "artifacts" / options["run-id"] if options.get("run-id") else None
    known = {one.name: one for one in where.iterdir()} if where else world.artifacts
    if "name" in options and options["name"] not in known:
        return f"no artifact {options['name']}"
    wanted = [options["name"]] if "name" in options else [name for name in known if _fits(name, options["pattern"])]
    for name in wanted:
        whole = "name" in options or options.get("merge-multiple") == "true"
        target = place / options.get("path", ".") / ("" if whole else name)
        shutil.copytree(known[name], target, dirs_exist_ok=True)
    return ""


def _fits(name: str, pattern: str) -> bool:
    """Match as the action does: braces hold alternatives."""
    match = re.fullmatch(r"\{(.*)\}(.*)", pattern)
    patterns = [f"{one}{match[2]}" for one in match[1].split(",")] if match else [pattern]
    return any(fnmatch.fnmatchcase(name, one) for one in patterns)


def _pages(world: World, place: Path, options: Mapping[str, str]) -> str:
    shutil.rmtree(world.folder / "pages", ignore_errors=True)
    assert not [path for path in (place / options["path"]).rglob("*") if path.is_symlink()], "Pages takes no links"
    shutil.copytree(place / options["path"], world.folder / "pages")
    return ""


_ACTIONS: dict[str, Callable[[World, Path, Mapping[str, str]], str]] = {
    "actions/checkout": _checkout, "actions/upload-artifact": _upload, "actions/download-artifact": _download,
    "actions/cache": lambda *_: "", "actions/upload-pages-artifact": _pages, "actions/deploy-pages": lambda *_: "",
}  # fmt: skip


def git(folder: Path, *words: str) -> str:
    """Run git in *folder*, and return what it printed."""
    people = {f"GIT_{who}_{what}": "t@t.example" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    env = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, **people}
    return subprocess.run(["git", *words], cwd=folder, env=env, capture_output=True, text=True, check=True).stdout.strip()


def checkout(folder: Path, project: Path | None = None) -> Path:
    """Write this checkout to *folder* as a commit, with a *project*'s reviewed data where one is given; return its bare repository."""
    work = folder / "work"
    for path in tracked():
        name = path.relative_to(ROOT)
        data = name.parts[0] in ("forks", "build", "cherry_picks") or name.parts[:2] == ("ci", "audit")
        if name.parts[0] in ("tests", "docs") or (project and data and len(name.parts) > 2):
            continue
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, work / name)
    if project:
        shutil.copytree(project, work, dirs_exist_ok=True)
    git(folder, "init", "--quiet", "--initial-branch=main", str(work))
    git(work, "add", "--all", "--force")
    git(work, "commit", "--quiet", "-m", "The lab's checkout")
    bare = folder / "server" / "acme" / "wheels"
    git(folder, "clone", "--quiet", "--bare", str(work), str(bare))
    return bare


def scripts(workflow: Path) -> list[tuple[str, str, str]]:
    """Return every ``run:`` of *workflow*: job, name of the step, and text."""
    made = yaml.safe_load(workflow.read_text("utf-8"))
    return [
        (key, step.get("name", ""), step["run"])
        for key, job in made["jobs"].items()
        for step in job.get("steps", [])
        if "run" in step
    ]  # fmt: skip


def told(steps: Sequence[Step]) -> str:
    """Return what went wrong, for the message of a failing test."""
    return "\n".join(f"== {one.job}: {one.name}: {one.ended}\n{one.said[-3000:]}" for one in steps if one.ended)
