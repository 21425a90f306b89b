"""
Runs the workflows of ``.github/workflows`` without GitHub: jobs in the order of their needs, reusable workflows, conditions and expressions
evaluated, and each ``run:`` executed by bash as GitHub's runner does it, on this machine or in a fresh container for each job.

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
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.newcomer import CARRIED
from tests.support import githubwork
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
#: What the runs take for GitHub's own address; git is told to look on the disk for it.
SERVER = "https://git.example"


class Text(str):
    """A text of an expression: compared without regard to case; null is an empty one."""

    def __eq__(self, other: object) -> bool:
        return self.lower() == str(other).lower()

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


class Expression:
    """One expression, evaluated in *contexts*; a name that is not there is null, as GitHub has it."""

    def __init__(self, text: str, contexts: Mapping[str, Any], failed: bool = False) -> None:
        self._contexts, self._code = contexts, _TOKEN.sub(self._python, text.strip())
        self._names: dict[str, Callable[..., Any]] = {
            "always": lambda: True, "cancelled": lambda: False, "success": lambda: not failed, "failure": lambda: failed,
            "fromJSON": json.loads, "toJSON": json.dumps, "format": _format, "get": self._get, "text": Text,
            "contains": lambda whole, part: part in whole, "startsWith": lambda whole, part: whole.startswith(part),
        }  # fmt: skip

    def value(self) -> Any:
        return eval(self._code, {"__builtins__": {}}, self._names)

    def _python(self, match: re.Match[str]) -> str:
        if match["text"] is not None:
            return f"text({match['text'].replace(2 * chr(39), chr(39))!r})"
        if match["name"]:
            return f"get({match['name']!r})"
        return {"&&": " and ", "||": " or ", "!": " not "}.get(match[0], match[0])

    def _get(self, path: str) -> Any:
        found: Any = {"true": True, "false": False, **self._contexts}
        for name in path.split("."):
            found = found.get(name) if isinstance(found, Mapping) else None
        return Text(found or "") if isinstance(found, str | None) else found


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
        repository: The bare repository of the workflows, its name ending in ``OWNER/NAME``; others may lie beside it.
        environment: What the machine's own environment has. *variables*: of the repository.
        secrets: Of the repository; or of an environment, below its name.
        image: The container image that jobs run in; empty for this machine. *mounts*: folders of this machine, read-only there.
        keep: Names in a workspace that survive from job to job on this machine.
        tamper: Called before each step with its job, its name and the workspace, in the place of an attacker.
        steps: All that was run, in order. *summaries*: the page of each job. *uses*: every action that was asked for.
        artifacts: Folder of each artifact of this run by its name; its parent is named after its id.
        outputs: Of each job of the last run.
        stub: Results and outputs of jobs that are not run.
        api, api_url: GitHub's API, as a server of issues and pull requests, or any at that address.
    """

    folder: Path
    repository: Path
    environment: dict[str, str]
    variables: dict[str, str] = dataclasses.field(default_factory=dict)
    secrets: dict[str, Any] = dataclasses.field(default_factory=dict)
    image: str = ""
    mounts: tuple[Path, ...] = ()
    keep: tuple[str, ...] = (".venv",)
    tamper: Callable[[str, str, Path], None] = lambda *_: None
    steps: list[Step] = dataclasses.field(default_factory=list)
    summaries: dict[str, str] = dataclasses.field(default_factory=dict)
    uses: list[str] = dataclasses.field(default_factory=list)
    artifacts: dict[str, Path] = dataclasses.field(default_factory=dict)
    stub: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    outputs: dict[str, dict[str, str]] = dataclasses.field(default_factory=dict)
    run_id: int = 1
    api: githubwork.World | None = None
    api_url: str = ""
    _container: str = ""

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
        declared = ((made[True] or {}).get(event) or {}) if isinstance(made[True], dict) else {}
        given = (
            {name: one.get("default", "") for name, one in declared.get("inputs", {}).items()}
            if event == "workflow_dispatch"
            else {}
        )
        self.run_id += 1
        self.artifacts.clear()
        contexts: dict[str, Any] = {"inputs": {**given, **(inputs or {})}, "vars": self.variables}
        contexts["secrets"] = {
            name: value for name, value in self.secrets.items() if isinstance(value, str)
        }
        contexts["github"] = {
            "repository": self.name, "ref": "refs/heads/main", "event_name": event, "token": githubwork.TOKEN, "sha": self._head(),
            "run_id": str(self.run_id), "actor": ACTOR, "workflow": made["name"],
        }  # fmt: skip
        jobs = self._jobs(made, contexts, workflow.parent)
        self.outputs = {key: job["outputs"] for key, job in jobs.items()}
        return {key: job["result"] for key, job in jobs.items()}

    def _jobs(
        self, made: Mapping[str, Any], contexts: dict[str, Any], folder: Path, prefix: str = ""
    ) -> dict[str, dict[str, Any]]:
        results: dict[str, dict[str, Any]] = {}
        inner: dict[str, dict[str, Any]] = {}
        for key in _ordered(made["jobs"]):
            job = made["jobs"][key]
            needs = [job["needs"]] if isinstance(job.get("needs"), str) else job.get("needs", [])
            known = {**contexts, "needs": {one: results[one] for one in needs}}
            failed = any(results[one]["result"] != "success" for one in needs)
            if prefix + key in self.stub:
                results[key] = self.stub[prefix + key]
            elif not holds(job.get("if"), known, failed=failed):
                results[key] = {"result": "skipped", "outputs": {}}
            elif "uses" in job:
                called = self._called(folder / Path(job["uses"]).name, job, known, f"{key}/")
                inner |= called
                worst = {one["result"] for one in called.values()}
                results[key] = {
                    "result": "failure" if "failure" in worst else "success",
                    "outputs": {},
                }
            else:
                results[key] = self._job(prefix + key, job, known, {**made.get("env", {})})
        return {prefix + key: one for key, one in results.items()} | inner

    def _called(
        self, path: Path, job: Mapping[str, Any], known: dict[str, Any], prefix: str
    ) -> dict[str, dict[str, Any]]:
        made = yaml.safe_load(path.read_text("utf-8"))
        declared = made[True]["workflow_call"]
        inputs = {name: one.get("default", "") for name, one in declared["inputs"].items()}
        inputs |= {name: text(value, known) for name, value in job["with"].items()}
        assert set(inputs) == set(declared["inputs"])
        secrets = {name: text(value, known) for name, value in job["secrets"].items()}
        assert set(secrets) <= set(declared["secrets"])
        contexts = {name: known[name] for name in ("vars", "github")} | {
            "inputs": inputs,
            "secrets": secrets,
        }
        return self._jobs(made, contexts, path.parent, prefix)

    def _head(self) -> str:
        return subprocess.run(
            ["git", "rev-parse", "main"],
            cwd=self.repository,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()

    def _job(
        self, key: str, job: Mapping[str, Any], known: dict[str, Any], env: dict[str, Any]
    ) -> dict[str, Any]:
        outputs: dict[str, str] = {}
        worst = "success"
        known = {
            **known,
            "secrets": {
                **known["secrets"],
                **self.secrets.get(text(job.get("environment", ""), known), {}),
            },
        }
        for row in _rows(job.get("strategy", {}).get("matrix"), known):
            with self._machine():
                one, told = self._leg(key, job, {**known, "matrix": row}, env)
            worst = "failure" if one == "failure" else worst
            outputs |= told
        return {"result": worst, "outputs": outputs}

    @contextlib.contextmanager
    def _machine(self) -> Iterator[None]:
        """Give the job a workspace, and a container of its own where there is an image."""
        place = self.folder / "workspace"
        place.mkdir(parents=True, exist_ok=True)
        (self.folder / "files").mkdir(exist_ok=True)
        for one in place.iterdir():
            if self.image or one.name not in self.keep:
                shutil.rmtree(one) if one.is_dir() and not one.is_symlink() else one.unlink()
        if not self.image:
            yield
            return
        cache = hosted_cache()
        config = self.folder / "gitconfig"
        config.write_text(f'[url "file://{self.server}/"]\n\tinsteadOf = {SERVER}/\n')
        for path in (self.folder / "files", cache):
            os.chown(path, RUNNER, RUNNER)
        mounts = [
            f"{place}:{WORKSPACE}",
            f"{self.folder}/files:{FILES}",
            f"{self.server}:{self.server}",
            f"{cache}:{HOME}/.cache",
        ]
        mounts += [
            f"{config}:{HOME}/.gitconfig:ro",
            f"{CERTIFICATES}:{CERTIFICATES}:ro",
            *(f"{path}:{path}:ro" for path in self.mounts),
        ]
        # How this machine reaches its package index goes along; a hosted machine reaches it without.
        carried = [f"--env={name}" for name in os.environ if CARRIED.fullmatch(name)]
        words = [
            "--detach",
            "--init",
            "--network=host",
            # Hosted machines are virtual ones, where a user may make the namespaces of isolated builds.
            "--security-opt=seccomp=unconfined",
            "--security-opt=systempaths=unconfined",
            "--user=runner",
            f"--workdir={WORKSPACE}",
            *carried,
        ]
        words += [f"--volume={mount}" for mount in mounts]
        started = subprocess.run(
            ["docker", "run", *words, self.image, "sleep", "infinity"],
            capture_output=True,
            text=True,
            check=True,
        )
        self._container = started.stdout.strip()
        try:
            yield
        finally:
            subprocess.run(
                ["docker", "rm", "--force", self._container], capture_output=True, check=True
            )

    def _leg(
        self, key: str, job: Mapping[str, Any], known: dict[str, Any], env: dict[str, Any]
    ) -> tuple[str, dict[str, str]]:
        place = self.folder / "workspace"
        known = {**known, "runner": {"arch": "X64", "os": "Linux"}, "steps": {}}
        known["env"] = {name: text(value, known) for name, value in env.items()}
        known["env"] |= {name: text(value, known) for name, value in job.get("env", {}).items()}
        number = len(self.steps)
        files = {
            name: self.folder / "files" / f"{name}-{number}"
            for name in ("PATH", "ENV", "STEP_SUMMARY")
        }
        failed = False
        for step in job["steps"]:
            name = step.get("name") or step.get("uses", "").split("@")[0]
            if not holds(step.get("if"), known, failed=failed):
                self.steps.append(Step(key, name, None))
                known["steps"][step.get("id", "")] = {"outputs": {}, "outcome": "skipped"}
                continue
            self.tamper(key, name, place)
            files["OUTPUT"] = self.folder / "files" / f"OUTPUT-{len(self.steps)}"
            for path in files.values():
                path.touch()
                self._own(path)
            ended = self._step(key, name, step, known, files, place)
            failed = failed or (ended != 0 and not step.get("continue-on-error"))
            outputs = {**_pairs(files["OUTPUT"]), **self._uploaded}
            self._uploaded = {}
            known["steps"][step.get("id", "")] = {
                "outputs": outputs,
                "outcome": "failure" if ended else "success",
            }
        self.summaries[key] = self.summaries.get(key, "") + files["STEP_SUMMARY"].read_text("utf-8")
        outputs = {name: text(value, known) for name, value in job.get("outputs", {}).items()}
        return ("failure" if failed else "success"), outputs

    def _own(self, path: Path) -> None:
        """Give *path*, and what lies below it, to the user of the container."""
        if self.image:
            for one in [path, *(path.rglob("*") if path.is_dir() else ())]:
                os.chown(one, RUNNER, RUNNER, follow_symlinks=False)

    def _step(
        self,
        job: str,
        name: str,
        step: Mapping[str, Any],
        known: dict[str, Any],
        files: Mapping[str, Path],
        place: Path,
    ) -> int:
        if "uses" in step:
            self.uses.append(step["uses"])
            options = {key: text(value, known) for key, value in step.get("with", {}).items()}
            said = _ACTIONS[step["uses"].split("@")[0]](self, place, options)
            self._own(place)
            self.steps.append(Step(job, name, 1 if said else 0, said))
            return 1 if said else 0
        env = {**self._github(known, files, place), **known["env"], **_pairs(files["ENV"])}
        env |= {key: text(value, known) for key, value in step.get("env", {}).items()}
        added = files["PATH"].read_text("utf-8").split()
        base = BASE_PATH if self.image else self.environment["PATH"]
        env["PATH"] = os.pathsep.join([*reversed(added), base])
        script = self.folder / "files" / "step.sh"
        script.write_text(text(step["run"], known), "utf-8")
        words = ["bash", "--noprofile", "--norc", "-eo", "pipefail"]
        if self.image:
            variables = [word for key, value in env.items() for word in ("--env", f"{key}={value}")]
            words = ["docker", "exec", *variables, self._container, *words, f"{FILES}/step.sh"]
            env = dict(os.environ)
        else:
            words, env = [*words, str(script)], {**self.environment, **env}
        began = time.monotonic()
        done = subprocess.run(
            words, cwd=place, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False, timeout=PATIENCE,
        )  # fmt: skip
        said, took = done.stdout.decode("utf-8", "replace"), time.monotonic() - began
        self.steps.append(Step(job, name, done.returncode, said, took))
        return done.returncode

    def _github(
        self, known: Mapping[str, Any], files: Mapping[str, Path], place: Path
    ) -> dict[str, str]:
        one = known["github"]
        variables = {
            "GITHUB_API_URL": self.api.url if self.api else self.api_url, "GITHUB_ACTIONS": "true", "GITHUB_SERVER_URL": SERVER, "GITHUB_REPOSITORY": self.name, "GITHUB_SHA": one["sha"],
            "GITHUB_REF": one["ref"], "GITHUB_RUN_ID": one["run_id"], "GITHUB_RUN_ATTEMPT": "1", "GITHUB_WORKFLOW": one["workflow"], "CI": "true",
        }  # fmt: skip
        if self.image:
            here = {f"GITHUB_{name}": f"{FILES}/{path.name}" for name, path in files.items()}
            return {
                **variables,
                **here,
                "HOME": HOME,
                "GITHUB_WORKSPACE": WORKSPACE,
                "RUNNER_TEMP": FILES,
            }
        temporary = self.folder / "temporary"
        temporary.mkdir(exist_ok=True)
        config = self.folder / "gitconfig"
        config.write_text(f'[url "file://{self.server}/"]\n\tinsteadOf = {SERVER}/\n')
        here = {f"GITHUB_{name}": str(path) for name, path in files.items()}
        return {
            **variables,
            **here,
            "GIT_CONFIG_GLOBAL": str(config),
            "GITHUB_WORKSPACE": str(place),
            "RUNNER_TEMP": str(temporary),
        }

    _uploaded: dict[str, str] = dataclasses.field(default_factory=dict)


def hosted_cache() -> Path:
    """Return what the containers have for ``~/.cache``, so that not each of them downloads the compiler."""
    path = Path(tempfile.gettempdir(), "sparkwright-hosted-cache")
    path.mkdir(exist_ok=True)
    return path


def hosted_image() -> str:
    """
    Return the name of an image like GitHub's Ubuntu 24.04, made by debootstrap once: the tools of its list that a job could lean on, and its
    user ``runner`` with sudo; no compiler of CUDA or of another machine. The lab's Spark has the user of the servers besides.
    """
    name = "sparkwright-hosted:ubuntu-24.04"
    try:
        if (
            subprocess.run(
                ["docker", "image", "inspect", name], capture_output=True, check=False
            ).returncode
            == 0
        ):
            return name
        subprocess.run(["docker", "info"], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no container engine answers here")
    if not shutil.which("debootstrap") or os.geteuid():
        pytest.skip("needs root and debootstrap")
    packages = "sudo,git,python3,python3-venv,python3-dev,g++,make,cmake,curl,ca-certificates,jq,unzip,util-linux"
    with tempfile.TemporaryDirectory() as folder:
        root, base = (
            Path(folder, "root"),
            ["debootstrap", "--variant=minbase", "--no-check-gpg", "--components=main,universe"],
        )
        site = "http://archive.ubuntu.com/ubuntu"
        subprocess.run(
            [
                *base,
                f"--include={packages}",
                "noble",
                str(root),
                site,
                "/usr/share/debootstrap/scripts/jammy",
            ],
            check=True,
        )
        for words in (["-u", str(RUNNER), "-m", "runner"], ["-m", "sparkwright-server"]):
            subprocess.run(["chroot", str(root), "useradd", "-s", "/bin/bash", *words], check=True)
        (root / "etc" / "sudoers.d" / "runner").write_text("runner ALL=(ALL) NOPASSWD:ALL\n")
        subprocess.run(
            f"rm -f {root}/var/cache/apt/archives/*.deb; tar -C {root} -c . | docker import - {name}",
            shell=True,
            check=True,
        )
    return name


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
    return (
        dict(line.split("=", 1) for line in path.read_text("utf-8").splitlines() if "=" in line)
        if path.exists()
        else {}
    )


def _checkout(world: World, place: Path, options: Mapping[str, str]) -> str:
    assert options.get("persist-credentials") == "false"
    clone = world.folder / "clone"
    shutil.rmtree(clone, ignore_errors=True)
    # GitHub's machines have no configuration that changes line ends.
    env = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull}
    subprocess.run(
        ["git", "clone", "--quiet", "--branch", "main", str(world.repository), str(clone)],
        env=env,
        check=True,
    )
    for one in clone.iterdir():
        shutil.move(one, place / one.name)
    return ""


def _upload(world: World, place: Path, options: Mapping[str, str]) -> str:
    found = [path for pattern in options["path"].split() for path in sorted(place.glob(pattern))]
    files = [
        path
        for one in found
        for path in ([one] if one.is_file() else one.rglob("*"))
        if path.is_file() and not path.is_symlink()
    ]
    if not files:
        return "no files were found" if options.get("if-no-files-found") == "error" else ""
    # The least folder that holds all of them is left out of the names, as the real one does.
    root = (
        found[0]
        if len(found) == 1 and found[0].is_dir()
        else Path(os.path.commonpath([path.parent for path in files]))
    )
    number = f"{world.run_id}{len(world.artifacts):03}"
    target = world.folder / "artifacts" / number / options["name"]
    for path in files:
        (target / path.relative_to(root)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, target / path.relative_to(root))
    assert options["name"] not in world.artifacts, "a name is taken once"
    world.artifacts[options["name"]] = target
    world._uploaded = {"artifact-id": number}
    return ""


def _download(world: World, place: Path, options: Mapping[str, str]) -> str:
    every = {one.name: one for one in (world.folder / "artifacts").glob("*")}
    known = {
        number: path
        for number, path in every.items()
        if number.startswith(options.get("run-id") or str(world.run_id))
    }
    if ids := options.get("artifact-ids"):
        if ids not in known:
            return f"no artifact {ids}"
        [source] = known[ids].iterdir()
        shutil.copytree(source, place / options["path"], dirs_exist_ok=True)
        return ""
    for one in world.artifacts.values():
        if _fits(one.name, options["pattern"]):
            shutil.copytree(one, place / options["path"], dirs_exist_ok=True)
    return ""


def _fits(name: str, pattern: str) -> bool:
    """Match as the action does: braces hold alternatives."""
    match = re.fullmatch(r"\{(.*)\}(.*)", pattern)
    patterns = [f"{one}{match[2]}" for one in match[1].split(",")] if match else [pattern]
    return any(fnmatch.fnmatchcase(name, one) for one in patterns)


_ACTIONS: dict[str, Callable[[World, Path, Mapping[str, str]], str]] = {
    "actions/checkout": _checkout, "actions/upload-artifact": _upload, "actions/download-artifact": _download,
}  # fmt: skip


def git(folder: Path, *words: str) -> str:
    """Run git in *folder*, and return what it printed."""
    people = {
        f"GIT_{who}_{what}": "t@t.example"
        for who in ("AUTHOR", "COMMITTER")
        for what in ("NAME", "EMAIL")
    }
    env = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, **people}
    return subprocess.run(
        ["git", *words], cwd=folder, env=env, capture_output=True, text=True, check=True
    ).stdout.strip()


def checkout(folder: Path, project: Path | None = None, repository: str = "acme/wheels") -> Path:
    """Write this checkout to *folder* as a commit, with a *project*'s reviewed data where one is given; return its bare repository."""
    work = folder / "work"
    for path in tracked():
        name = path.relative_to(ROOT)
        data = name.parts[0] in ("forks", "build", "cherry_picks") or name.parts[:2] == (
            "ci",
            "audit",
        )
        if name.parts[0] in ("tests", "docs") or (project and data and len(name.parts) > 2):
            continue
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, work / name)
    if project:
        shutil.copytree(project, work, dirs_exist_ok=True)
    git(folder, "init", "--quiet", "--initial-branch=main", str(work))
    git(work, "add", "--all", "--force")
    git(work, "commit", "--quiet", "-m", "The lab's checkout")
    bare = folder / "server" / repository
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
    return "\n".join(
        f"== {one.job}: {one.name}: {one.ended}\n{one.said[-3000:]}" for one in steps if one.ended
    )
