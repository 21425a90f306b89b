"""
Runs the workflows of ``.github/workflows`` without GitHub: jobs in the order of their needs, reusable workflows, conditions and expressions
evaluated, and each ``run:`` executed by bash as GitHub's runner does it, in a fresh container for each job.

GitHub's own actions have stand-ins here that do the same with folders (a checkout is a clone of the repository, an artifact is a folder with
an id); nothing else is replaced. A secret of an environment reaches the jobs of that environment alone. What only GitHub enforces is not
shown by this: permissions, approvals, concurrency, time limits.

The expression language is that of https://docs.github.com/actions/reference/evaluate-expressions-in-workflows-and-actions.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import itertools
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.newcomer import CARRIED
from tests.support import githubapi
from tests.unit.test_repository import tracked

#: A text, a path of names that calls nothing, or a mark that Python has in other words.
_TOKEN = re.compile(r"'(?P<text>(?:[^']|'')*)'|(?P<name>[A-Za-z_][\w-]*(?:\.[\w-]+)*)(?![\w.-]*\()|&&|\|\||!(?!=)|[A-Za-z_]\w*\(")
_INSIDE = re.compile(r"\$\{\{(.*?)\}\}", re.DOTALL)
#: Seconds after which a step hangs.
PATIENCE = 1500
ROOT = Path(__file__).parents[2]
#: The user of the container, and what it is told of itself.
RUNNER, HOME = 1001, str(Path("/", "home", "runner"))
WORKSPACE, FILES = f"{HOME}/work/wheels/wheels", f"{HOME}/work/_temp"
BASE_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
#: Who starts them.
ACTOR = "maintainer"


class Expression:
    """One expression, evaluated in *contexts*; a name that is not there is null, as GitHub has it."""

    def __init__(self, text: str, contexts: Mapping[str, Any], failed: bool = False) -> None:
        self._contexts, self._code = contexts, _TOKEN.sub(self._python, text.strip())
        self._names: dict[str, Callable[..., Any]] = {
            "always": lambda: True, "cancelled": lambda: False, "success": lambda: not failed, "failure": lambda: failed,
            "fromJSON": json.loads, "toJSON": json.dumps, "format": _format, "get": self._get,
            "contains": lambda whole, part: part in whole, "startsWith": lambda whole, part: whole.startswith(part),
        }  # fmt: skip

    def value(self) -> Any:
        return eval(self._code, {"__builtins__": {}}, self._names)

    def _python(self, match: re.Match[str]) -> str:
        if match["text"] is not None:
            return repr(match["text"].replace("''", "'"))
        if match["name"]:
            return f"get({match['name']!r})"
        return {"&&": " and ", "||": " or ", "!": " not "}.get(match[0], match[0])

    def _get(self, path: str) -> Any:
        found: Any = {"true": True, "false": False, **self._contexts}
        for name in path.split("."):
            found = found.get(name) if isinstance(found, Mapping) else None
        return "" if found is None else found


def _format(form: str, *words: Any) -> str:
    """Fill *words* in; a doubled brace stands for one."""
    return re.sub(
        r"\{\{|\}\}|\{(\d+)\}",
        lambda match: _said(words[int(match[1])]) if match[1] else match[0][0],
        form,
    )


def text(value: Any, contexts: Mapping[str, Any]) -> str:
    """Return *value* with its expressions filled in."""
    said = str(value).lower() if isinstance(value, bool) else str(value)
    return _INSIDE.sub(lambda match: _said(Expression(match[1], contexts).value()), said)


def _said(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value is None else str(value)


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
    """A step as it was run: *ended* is its exit status, None for one that was left out; *said* what it printed."""

    job: str
    name: str
    ended: int | None
    said: str = ""


@dataclasses.dataclass
class World:
    """
    Where workflows run.

    Attributes:
        folder: Everything lies there: workspaces, artifacts, pages.
        repository: The bare repository of the workflows, its name ending in ``OWNER/NAME``; others may lie beside it.
        variables: Of the repository.
        secrets: Of each environment.
        mounts: Folders of this machine, read-only in the containers.
        url: Of GitHub and its API; git is told to look on the disk for it. *gh*: its program.
        tamper: Called before each step with its job, its name and the workspace, in the place of an attacker.
        steps: All that was run, in order. *summaries*: the page of each job.
        artifacts: Folder of each artifact of this run by its name; its parent is named after its id.
    """

    folder: Path
    repository: Path
    variables: dict[str, str]
    secrets: dict[str, dict[str, str]]
    mounts: tuple[Path, ...] = ()
    url: str = ""
    gh: Path = Path("/usr/bin/false")
    tamper: Callable[[str, str, Path], None] = lambda *_: None
    steps: list[Step] = dataclasses.field(default_factory=list)
    summaries: dict[str, str] = dataclasses.field(default_factory=dict)
    artifacts: dict[str, Path] = dataclasses.field(default_factory=dict)
    run_id: int = 1
    _container: str = ""
    stub: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    _uploaded: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def workspace(self) -> Path:
        return self.folder / "workspace"

    @property
    def name(self) -> str:
        return "/".join(self.repository.parts[-2:])

    @property
    def server(self) -> Path:
        return self.repository.parents[1]

    def run(
        self,
        workflow: Path,
        *,
        event: str = "workflow_dispatch",
        inputs: Mapping[str, str] | None = None,
    ) -> dict[str, str]:
        """Run *workflow*, and return what came of each job; jobs of a reusable one are named ``CALLER/JOB``."""
        made = yaml.safe_load(workflow.read_text("utf-8"))
        # YAML 1.1 reads the key `on` as a truth value.
        declared = made[True].get(event) if event == "workflow_dispatch" else {}
        given = {name: one.get("default", "") for name, one in (declared or {}).get("inputs", {}).items()}
        self.run_id += 1
        self.artifacts.clear()
        contexts: dict[str, Any] = {"inputs": {**given, **(inputs or {})}, "vars": self.variables, "secrets": {}}
        contexts["github"] = {
            "repository": self.name, "ref": "refs/heads/main", "event_name": event, "token": githubapi.TOKEN, "run_id": str(self.run_id),
            "sha": git(self.repository, "rev-parse", "main"), "actor": ACTOR, "workflow": made["name"],
        }  # fmt: skip
        jobs = self._jobs(made, contexts, workflow.parent)
        return {key: job["result"] for key, job in jobs.items()}

    def _jobs(
        self, made: Mapping[str, Any], contexts: dict[str, Any], folder: Path, prefix: str = ""
    ) -> dict[str, dict[str, Any]]:
        results: dict[str, dict[str, Any]] = {}
        inner: dict[str, dict[str, Any]] = {}
        for key in _ordered(made["jobs"]):
            job = made["jobs"][key]
            known = {**contexts, "needs": {one: results[one] for one in _needs(job)}}
            failed = any(needed["result"] != "success" for needed in known["needs"].values())
            if prefix + key in self.stub:
                results[key] = self.stub[prefix + key]
            elif not holds(job.get("if"), known, failed=failed):
                results[key] = {"result": "skipped", "outputs": {}}
            elif "uses" in job:
                called = self._called(folder / Path(job["uses"]).name, job, known, f"{key}/")
                inner |= called
                failures = [one for one in called.values() if one["result"] == "failure"]
                results[key] = {"result": "failure" if failures else "success", "outputs": {}}
            else:
                results[key] = self._job(prefix + key, job, known, {**made.get("env", {})})
        return {prefix + key: one for key, one in results.items()} | inner

    def _called(self, path: Path, job: Mapping[str, Any], known: dict[str, Any], prefix: str) -> dict[str, dict[str, Any]]:
        made = yaml.safe_load(path.read_text("utf-8"))
        declared = made[True]["workflow_call"]
        inputs = {name: one.get("default", "") for name, one in declared["inputs"].items()}
        inputs |= {name: text(value, known) for name, value in job["with"].items()}
        assert set(inputs) == set(declared["inputs"])
        # A called workflow has the secrets of its own jobs' environments.
        assert set(job["secrets"]) <= set(declared["secrets"])
        return self._jobs(made, {**known, "inputs": inputs}, path.parent, prefix)

    def _job(self, key: str, job: Mapping[str, Any], known: dict[str, Any], env: dict[str, Any]) -> dict[str, Any]:
        results, outputs = [], dict[str, str]()
        known = {**known, "secrets": self.secrets.get(text(job.get("environment", ""), known), {})}
        for row in _rows(job.get("strategy", {}).get("matrix"), known):
            with self._machine():
                result, given = self._leg(key, job, {**known, "matrix": row}, env)
            results.append(result)
            outputs |= given
        return {"result": "failure" if "failure" in results else "success", "outputs": outputs}

    @contextlib.contextmanager
    def _machine(self) -> Iterator[None]:
        """Give the job an empty workspace, and a container of its own."""
        shutil.rmtree(self.workspace, ignore_errors=True)
        (files := self.folder / "files").mkdir(parents=True, exist_ok=True)
        (config := self.folder / "gitconfig").write_text(f'[safe]\n\tdirectory = *\n[url "file://{self.server}/"]\n\tinsteadOf = {self.url}/\n')
        self.workspace.mkdir()
        for path in (files, hosted_cache()):
            os.chown(path, RUNNER, RUNNER)
        mounts = [
            f"{self.workspace}:{WORKSPACE}", f"{files}:{FILES}", f"{self.server}:{self.server}", f"{hosted_cache()}:{HOME}/.cache",
            f"{self.gh}:/usr/local/bin/gh:ro", f"{self.gh.parent}:{self.gh.parent}",
            f"{config}:{HOME}/.gitconfig:ro", f"{CERTIFICATES}:{CERTIFICATES}:ro", *(f"{path}:{path}:ro" for path in self.mounts),
        ]  # fmt: skip
        # How this machine reaches its package index goes along; a hosted machine reaches it without. Hosted machines are virtual
        # ones, where a user may make the namespaces of isolated builds.
        words = [
            "--detach", "--init", "--network=host", "--user=runner", f"--workdir={WORKSPACE}",
            "--security-opt=seccomp=unconfined", "--security-opt=systempaths=unconfined",
            *(f"--env={name}" for name in os.environ if CARRIED.fullmatch(name)), *(f"--volume={mount}" for mount in mounts),
        ]  # fmt: skip
        self._container = _output("docker", "run", *words, hosted_image(), "sleep", "infinity")
        try:
            yield
        finally:
            _output("docker", "rm", "--force", self._container)

    def _leg(self, key: str, job: Mapping[str, Any], known: dict[str, Any], env: dict[str, Any]) -> tuple[str, dict[str, str]]:
        known = {**known, "runner": {"arch": "X64", "os": "Linux"}, "steps": {}, "env": {}}
        for settings in (env, job.get("env", {})):
            known["env"] |= {name: text(value, known) for name, value in settings.items()}
        files = {name: self.folder / "files" / f"{name}-{len(self.steps)}" for name in ("PATH", "ENV", "STEP_SUMMARY")}
        failed = False
        for step in job["steps"]:
            name, outputs, outcome = step.get("name") or step["uses"].split("@")[0], dict[str, str](), "skipped"
            if holds(step.get("if"), known, failed=failed):
                self.tamper(key, name, self.workspace)
                files["OUTPUT"] = self.folder / "files" / f"OUTPUT-{len(self.steps)}"
                for path in files.values():
                    path.touch()
                    own(path)
                self._uploaded = {}
                self.steps.append(self._step(key, name, step, known, files))
                outcome = "failure" if self.steps[-1].ended else "success"
                failed = failed or outcome == "failure"
                outputs = {**pairs(files["OUTPUT"]), **self._uploaded}
            else:
                self.steps.append(Step(key, name, None))
            known["steps"][step.get("id", "")] = {"outputs": outputs, "outcome": outcome}
        self.summaries[key] = self.summaries.get(key, "") + files["STEP_SUMMARY"].read_text("utf-8")
        outputs = {name: text(value, known) for name, value in job.get("outputs", {}).items()}
        return ("failure" if failed else "success"), outputs

    def _step(self, job: str, name: str, step: Mapping[str, Any], known: dict[str, Any], files: Mapping[str, Path]) -> Step:
        if "uses" in step:
            options = {key: text(value, known) for key, value in step.get("with", {}).items()}
            said = _ACTIONS[step["uses"].split("@")[0]](self, self.workspace, options)
            own(self.workspace)
            return Step(job, name, int(bool(said)), said)
        github = known["github"]
        env = {
            "GITHUB_ACTIONS": "true", "GITHUB_SERVER_URL": self.url, "GITHUB_API_URL": self.url, "GITHUB_REPOSITORY": self.name,
            "GITHUB_SHA": github["sha"], "GITHUB_REF": github["ref"], "GITHUB_RUN_ID": github["run_id"], "GITHUB_RUN_ATTEMPT": "1",
            "GITHUB_WORKFLOW": github["workflow"], "CI": "true", "HOME": HOME, "GITHUB_WORKSPACE": WORKSPACE, "RUNNER_TEMP": FILES,
            **{f"GITHUB_{name}": f"{FILES}/{path.name}" for name, path in files.items()}, **known["env"], **pairs(files["ENV"]),
            **{key: text(value, known) for key, value in step.get("env", {}).items()},
            "PATH": os.pathsep.join([*reversed(files["PATH"].read_text("utf-8").split()), BASE_PATH]),
        }  # fmt: skip
        (self.folder / "files" / "step.sh").write_text(text(step["run"], known), "utf-8")
        words = ["docker", "exec", *(word for key, value in env.items() for word in ("--env", f"{key}={value}")), self._container]
        words += ["bash", "--noprofile", "--norc", "-eo", "pipefail", f"{FILES}/step.sh"]
        done = subprocess.run(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False, timeout=PATIENCE)
        return Step(job, name, done.returncode, done.stdout.decode("utf-8", "replace"))


def own(path: Path) -> None:
    """Give *path*, and what lies below it, to the user of the containers."""
    _output("chown", "--recursive", "--no-dereference", f"{RUNNER}:{RUNNER}", str(path))


def share(path: Path) -> None:
    """Let the user of the containers write to *path* too; git on this machine reads repositories of its own user alone."""
    _output("chmod", "--recursive", "a+rwX", str(path))


def hosted_cache() -> Path:
    """Return what the containers have for ``~/.cache``, so that not each of them downloads the compiler."""
    path = Path(tempfile.gettempdir(), "sparkwright-hosted-cache")
    path.joinpath("sparkwright").mkdir(parents=True, exist_ok=True)
    return path


def hosted_image() -> str:
    """
    Return the name of an image like GitHub's Ubuntu 24.04, made by debootstrap once: the tools of its list that a job could lean on, and its
    user ``runner`` with sudo; no compiler of CUDA or of another machine. The lab's Spark has the user of the servers besides.
    """
    name = "sparkwright-hosted:ubuntu-24.04"
    if not shutil.which("debootstrap") or os.geteuid() or subprocess.run(["docker", "info"], capture_output=True, check=False).returncode:
        pytest.skip("needs root, debootstrap and a container engine that answers")
    if subprocess.run(["docker", "image", "inspect", name], capture_output=True, check=False).returncode:
        subprocess.run(["bash", "-euc", _HOSTED, name, str(RUNNER)], check=True)
    return name


#: Makes the image NAME, with the user RUNNER.
_HOSTED = """
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
packages=sudo,git,python3,python3-venv,python3-dev,g++,make,cmake,curl,ca-certificates,jq,unzip,util-linux
debootstrap --variant=minbase --no-check-gpg --components=main,universe --include=$packages noble "$folder/root" \\
    http://archive.ubuntu.com/ubuntu /usr/share/debootstrap/scripts/jammy
chroot "$folder/root" useradd -s /bin/bash -u "$1" -m runner
chroot "$folder/root" useradd -s /bin/bash -m sparkwright-server
echo 'runner ALL=(ALL) NOPASSWD:ALL' >"$folder/root/etc/sudoers.d/runner"
find "$folder" -name "*.deb" -delete
tar -C "$folder/root" -c . | docker import - "$0"
"""


def _output(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


def _needs(job: Mapping[str, Any]) -> list[str]:
    needs = job.get("needs", [])
    return [needs] if isinstance(needs, str) else needs


def _ordered(jobs: Mapping[str, Any]) -> list[str]:
    found: list[str] = []
    while left := [key for key in jobs if key not in found]:
        found.append(next(key for key in left if set(_needs(jobs[key])) <= set(found)))
    return found


def _rows(matrix: Mapping[str, Any] | None, contexts: Mapping[str, Any]) -> list[dict[str, Any]]:
    if not matrix:
        return [{}]
    values = {}
    for name, given in matrix.items():
        inner = _INSIDE.fullmatch(given.strip()) if isinstance(given, str) else None
        values[name] = Expression(inner[1], contexts).value() if inner else given
    return [dict(zip(values, row, strict=True)) for row in itertools.product(*values.values())]


def pairs(path: Path) -> dict[str, str]:
    """Return what a step wrote to the file of its outputs or variables."""
    return dict(line.split("=", 1) for line in path.read_text("utf-8").splitlines() if "=" in line)


def _checkout(world: World, place: Path, options: Mapping[str, str]) -> str:
    assert options.get("persist-credentials") == "false"
    git(place, "clone", "--quiet", "--branch", "main", str(world.repository), ".")
    return ""


def _upload(world: World, place: Path, options: Mapping[str, str]) -> str:
    found = [path for path in sorted(place.glob(options["path"])) if not path.is_symlink()]
    if not any(path.is_file() or any(path.iterdir()) for path in found):
        return "no files were found" if options.get("if-no-files-found") == "error" else ""
    number = f"{world.run_id}{len(world.artifacts):03}"
    target = world.folder / "artifacts" / number / options["name"]
    target.mkdir(parents=True)
    for path in found:
        # A folder's own name is left out, as the real one does.
        shutil.copytree(path, target, dirs_exist_ok=True) if path.is_dir() else shutil.copy2(path, target)
    assert options["name"] not in world.artifacts, "a name is taken once"
    world.artifacts[options["name"]] = target
    world._uploaded = {"artifact-id": number}
    return ""


def _download(world: World, place: Path, options: Mapping[str, str]) -> str:
    sources = [path for name, path in world.artifacts.items() if fnmatch.fnmatchcase(name, options.get("pattern", ""))]
    if ids := options.get("artifact-ids"):
        sources = list((world.folder / "artifacts" / ids).glob("*"))
        if not sources or not ids.startswith(options.get("run-id") or str(world.run_id)):
            return f"no artifact {ids}"
    for source in sources:
        shutil.copytree(source, place / options["path"], dirs_exist_ok=True)
    return ""


_ACTIONS: dict[str, Callable[[World, Path, Mapping[str, str]], str]] = {
    "actions/checkout": _checkout, "actions/upload-artifact": _upload, "actions/download-artifact": _download,
}  # fmt: skip


def git(folder: Path, *words: str) -> str:
    """Run git in *folder*, without configuration, and return what it printed."""
    people = {f"GIT_{who}_{what}": "t@t.example" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    env = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, **people}
    return subprocess.run(["git", *words], cwd=folder, env=env, capture_output=True, text=True, check=True).stdout.strip()


def checkout(folder: Path, project: Path, repository: str = "acme/wheels") -> Path:
    """Write this checkout with *project*'s reviewed data to *folder* as a commit; return its bare repository."""
    work, bare = folder / "work", folder / "server" / repository
    for path in tracked():
        name = path.relative_to(ROOT)
        reviewed = name.parts[0] in ("forks", "build", "cherry_picks") or name.parts[:2] == ("ci", "audit")
        if name.parts[0] not in ("tests", "docs") and not (reviewed and len(name.parts) > 2):
            (work / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, work / name)
    shutil.copytree(project, work, dirs_exist_ok=True)
    git(work, "init", "--quiet", "--initial-branch=main")
    git(work, "add", "--all", "--force")
    git(work, "commit", "--quiet", "-m", "The lab's checkout")
    git(work, "clone", "--quiet", "--bare", ".", str(bare))
    return bare


def told(steps: Sequence[Step]) -> str:
    """Return what went wrong, for the message of a failing test."""
    return "\n".join(f"== {one.job}: {one.name}: {one.ended}\n{one.said[-3000:]}" for one in steps if one.ended)
