"""What the workflows promise, held against their files: who can start what where, with which rights, and what their steps run."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tests.support import githubapi, workflows
from tests.support.workflows import Expression, World
from tests.unit.conftest import Repository

from sparkwright.cli.main import parse

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".github" / "workflows"
FILES = sorted(FOLDER.glob("*.yml"))
MADE: dict[str, dict[Any, Any]] = {
    path.stem: yaml.safe_load(path.read_text("utf-8")) for path in FILES
}
JOBS = [(name, key, job) for name, made in MADE.items() for key, job in made["jobs"].items()]
RUNS = [(path.stem, *script) for path in FILES for script in workflows.scripts(path)]
#: What a machine of the lab is asked for by.
SPARK = ["self-hosted", "linux", "ARM64", "gb10"]
#: Jobs that call a reusable workflow have no steps, and its jobs have the limits.
STEPPED = [(name, key, job) for name, key, job in JOBS if "steps" in job]

each_job = pytest.mark.parametrize(
    ("name", "key", "job"), STEPPED, ids=[f"{name}-{key}" for name, key, _ in STEPPED]
)
each_run = pytest.mark.parametrize(
    ("name", "job", "step", "text"), RUNS, ids=[f"{one[0]}-{one[1]}-{one[2]}" for one in RUNS]
)


def test_no_stranger_reaches_a_spark() -> None:
    """A job that asks for a machine of the lab is started by the schedule or by a person, on main of the lab's own repository."""
    asking = [
        (name, key, job) for name, key, job in STEPPED if "self-hosted" in str(job["runs-on"])
    ]
    assert [(name, key) for name, key, _ in asking] == [("pipeline", "build"), ("pipeline", "gate")]
    assert set(MADE["pipeline"][True]) == {"schedule", "workflow_dispatch"}
    guard = "github.repository == vars.LAB_REPOSITORY"
    gate, build = MADE["pipeline"]["jobs"]["gate"], MADE["pipeline"]["jobs"]["build"]
    assert gate["runs-on"] == SPARK
    assert gate["if"].startswith(f"{guard} && github.ref == 'refs/heads/main'")
    assert "||" not in re.sub(r"\(.*\)", "", gate["if"])
    assert "needs.request.outputs.builder == 'spark' && " + guard in build["runs-on"]
    labels = yaml.safe_load((ROOT / ".github" / "actionlint.yaml").read_text("utf-8"))
    assert labels["self-hosted-runner"]["labels"] == [SPARK[-1]]


@pytest.mark.parametrize(
    ("chosen", "variable", "lab", "runner"),
    [
        ("default", "", True, "spark"), ("default", "hosted", True, "hosted"), ("hosted", "", True, "hosted"), ("spark", "hosted", True, "spark"),
        ("default", "", False, "hosted"), (None, "", True, "spark"), ("spark", "", False, "refused"), ("$(touch evil)", "", True, "refused"),
    ],
)  # fmt: skip
def test_the_builder_is_the_spark_where_a_lab_has_one(
    world: World, tmp_path: Path, chosen: str | None, variable: str, lab: bool, runner: str
) -> None:
    """The input comes before the variable, and both before the default; only a lab builds on a Spark."""
    world.variables = {"BUILDER": variable, "LAB_REPOSITORY": world.name if lab else ""}
    flow, check = only_step(
        "request", "The stack, its recipes, the channel and the builder fit each other"
    )
    world.environment["PATH"] = f"{_program(tmp_path, 'exit 0')}:{world.environment['PATH']}"
    inputs = {"stack": "2026.11", "recipes": "toy"} | ({"builder": chosen} if chosen else {})
    flow["jobs"]["request"]["outputs"] = {"builder": "${{ steps.check.outputs.builder }}"}
    result = _run(world, tmp_path, flow, inputs)

    assert result == ("failure" if runner == "refused" else "success"), check
    assert world.outputs["request"]["builder"] == ("" if runner == "refused" else runner)
    asked = MADE["pipeline"]["jobs"]["build"]["runs-on"]
    contexts = {
        "needs": {"request": {"outputs": world.outputs["request"]}}, "vars": world.variables, "github": {"repository": world.name}
    }  # fmt: skip
    labels = Expression(asked.strip()[3:-2], contexts).value()
    assert labels == (SPARK if runner == "spark" else ["ubuntu-24.04-arm"])


def only_step(job: str, name: str) -> tuple[dict[Any, Any], str]:
    """Return the pipeline with the job *job* alone, and of it the step *name* alone, and that step's text."""
    made = yaml.safe_load((FOLDER / "pipeline.yml").read_text("utf-8"))
    kept = made["jobs"][job]
    kept["steps"] = [step for step in kept["steps"] if step.get("name") == name]
    made["jobs"] = {job: kept}
    return made, kept["steps"][0]["run"]


def _run(world: World, folder: Path, flow: dict[Any, Any], inputs: dict[str, str]) -> str:
    """Run the only job of the workflow *flow*, and return its result."""
    (folder / "flow.yml").write_text(yaml.safe_dump(flow))
    (result,) = world.run(folder / "flow.yml", inputs=inputs).values()
    return result


def _program(folder: Path, body: str) -> Path:
    """Return a folder with a program `sparkwright` that runs *body*."""
    program = folder / "bin" / "sparkwright"
    program.parent.mkdir(exist_ok=True)
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(0o755)
    return program.parent


def test_a_pull_request_reads_and_has_no_secrets() -> None:
    """The one workflow that a pull request starts may read the repository, and names no secret and no environment."""
    started = [
        name
        for name, made in MADE.items()
        if {"pull_request", "pull_request_target"} & set(made[True])
    ]
    assert started == ["check"]
    text = (FOLDER / "check.yml").read_text("utf-8")
    assert "pull_request_target" not in text
    assert "secrets." not in text
    assert [job["permissions"] for job in MADE["check"]["jobs"].values()] == [
        {"contents": "read"}
    ] * 2
    assert not any("environment" in job for job in MADE["check"]["jobs"].values())


@pytest.mark.parametrize("name", MADE)
def test_nothing_is_permitted_at_the_top(name: str) -> None:
    """Rights are given to jobs, one by one; runs of the same kind wait for each other."""
    assert MADE[name]["permissions"] == {}
    # A workflow that others call waits with them.
    assert "concurrency" in MADE[name] or name == "sign"


def test_no_run_that_waits_is_cancelled() -> None:
    """A run or job that waits for another is queued, and not replaced by the next; only checks of an older push are."""
    groups = [made["concurrency"] for name, made in MADE.items() if name not in ("sign", "check")]
    groups += [job["concurrency"] for _, _, job in JOBS if "concurrency" in job]
    # Before a Spark, too: GitHub cancels a job that waits a day for its runner.
    built, gated = (MADE["pipeline"]["jobs"][key]["concurrency"] for key in ("build", "gate"))
    assert gated["group"] == "spark"
    for builder in ("spark", "hosted"):
        contexts = {
            "needs": {"request": {"outputs": {"builder": builder}}},
            "github": {"run_id": "7"},
        }
        group = workflows.text(built["group"], contexts)
        assert group == ("spark" if builder == "spark" else "build-7")
    for group in groups:
        assert (group["cancel-in-progress"], group["queue"]) == (False, "max")


@each_job
def test_every_job_ends(name: str, key: str, job: dict[str, Any]) -> None:
    """Each job has a time limit, and what it may do is written out."""
    # Gating a recipe takes most of a day, and two are gated.
    assert 0 < job["timeout-minutes"] <= (2880 if key == "gate" else 720)
    assert "permissions" in job


@each_job
def test_what_writes_is_approved_by_people(name: str, key: str, job: dict[str, Any]) -> None:
    """Whoever may sign is in an environment with keys, whoever writes packages was approved; a token that writes is in `public`."""
    rights = {right for right, how in job["permissions"].items() if how == "write"}
    if "id-token" in rights:
        asked = Expression(re.findall(r"\$\{\{(.*)\}\}", job["environment"])[0], {"inputs": {}})
        assert asked.value() == "release"
        assert "'refresh' && 'refresh'" in job["environment"]
    if "packages" in rights:
        assert job["needs"] == "approve"
    if "PUBLIC_TOKEN" in str(job):
        assert job["environment"] == "public"
    # No job may write the lab's own contents but the one that opens pull requests, which reads no upstream.
    assert "contents" not in rights or (name, key) == ("bump", "propose")
    if "contents" in rights:
        assert not [step for step in job["steps"] if "--to" in step.get("run", "")]


def test_one_workflow_signs_and_holds_no_token_that_writes() -> None:
    """Keys and identity are in one job of one workflow, which runs this checkout alone; what pushes has no key."""
    signing = [
        (name, key, job)
        for name, key, job in STEPPED
        if "id-token" in job["permissions"] or "_KEY" in str(job)
    ]
    assert [(name, key) for name, key, _ in signing] == [("sign", "sign")]
    [(_, _, job)] = signing
    assert "PUBLIC_TOKEN" not in str(job)
    assert {step["uses"].split("@")[0] for step in job["steps"] if "uses" in step} == {
        "actions/checkout", "actions/download-artifact", "actions/upload-artifact",
    }  # fmt: skip
    assert not [step for step in job["steps"] if "user.sh" in step.get("run", "")]


def test_every_index_is_changed_under_one_lock() -> None:
    """Whoever calls `sign`, or pushes, holds the lock `published` from the first step to the last."""
    for name, key, job in JOBS:
        texts = [step.get("run", "") for step in job.get("steps", ())]
        pushes = name != "sign" and any("published.sh put" in text for text in texts)
        if pushes or "sign.yml" in job.get("uses", ""):
            lock = {"group": "published", "cancel-in-progress": False, "queue": "max"}
            assert job["concurrency"] == lock, (name, key)


def test_only_the_run_itself_waits_for_a_person(world: World, tmp_path: Path) -> None:
    """A person approves before any lock is taken, in a job of its own, and every call of `sign` but a refresh follows it."""
    for name, key, job in JOBS:
        if job.get("environment") == "approve":
            assert "concurrency" not in job, (name, key)
            assert "${{" in MADE[name]["concurrency"]["group"]
        if "sign.yml" in job.get("uses", ""):
            assert "approve" in job["needs"], (name, key)
    for action in ("refresh", "yank", "image"):
        made = yaml.safe_load((FOLDER / "release.yml").read_text("utf-8"))
        made["jobs"]["release"] |= {"steps": [{"run": "true"}], "uses": None}
        made["jobs"]["image"]["steps"] = [{"run": "true"}]
        del made["jobs"]["release"]["uses"]
        (tmp_path / "flow.yml").write_text(yaml.safe_dump(made))
        result = world.run(tmp_path / "flow.yml", inputs={"action": action})
        assert result["approve"] == ("skipped" if action == "refresh" else "success")
        assert result["release"] == ("skipped" if action == "image" else "success")
        world.stub = {"approve": {"result": "failure", "outputs": {}}}
        result = world.run(tmp_path / "flow.yml", inputs={"action": action})
        assert set(result.values()) == {"failure", "skipped"}
        world.stub = {}


@pytest.mark.parametrize(
    ("variable", "action", "identity"),
    [("true", "yank", True), ("false", "yank", False), ("", "yank", False), ("true", "refresh", False)],
)  # fmt: skip
def test_sigstore_signs_where_the_lab_says_true(
    world: World, tmp_path: Path, variable: str, action: str, identity: bool
) -> None:
    """The identity signs if the variable is `true`, and never in a refresh, which nobody approves."""
    made = yaml.safe_load((FOLDER / "sign.yml").read_text("utf-8"))
    [step] = [step for step in made["jobs"]["sign"]["steps"] if step.get("name") == "Sign"]
    prepare = {
        "run": "mkdir keys && printf '#!/bin/sh\\n' >.github/verdicts.sh && chmod +x .github/verdicts.sh"
    }
    [checkout, *_] = made["jobs"]["sign"]["steps"]
    made["jobs"] = {
        "sign": {**made["jobs"]["sign"], "steps": [checkout, prepare, step], "outputs": {}}
    }
    made[True] = {"workflow_dispatch": {}}
    program = _program(tmp_path, f'echo "$@" >{tmp_path}/words')
    world.environment["PATH"] = f"{program}:{world.environment['PATH']}"
    world.variables = {"SIGN_WITH_SIGSTORE": variable}
    inputs = {"action": action, "release": "2026.11.1", "reason": "x"}
    assert _run(world, tmp_path, made, inputs) == "success", world.steps[-1].said
    assert ("--identity" in (tmp_path / "words").read_text().split()) == identity


def test_files_go_from_job_to_job_by_id_and_digest() -> None:
    """A job of the release takes an artifact by its id, and the next step holds every file of it against the job that made it."""
    for name, key, job in STEPPED:
        if name not in ("pipeline", "sign"):
            continue
        for step, following in itertools.pairwise(job["steps"]):
            if step.get("uses", "").startswith("actions/download-artifact@"):
                assert set(step["with"]) - {"run-id", "github-token"} == {"artifact-ids", "path"}
                folder = step["with"]["path"]
                checked = any(
                    f"digests.py check {folder}" in one.get("run", "") for one in job["steps"]
                )
                assert checked, (name, key, folder)
                if key != "record":
                    assert f"digests.py check {folder}" in following["run"]


def test_nothing_is_built_for_another_machine() -> None:
    """Plan and build run on the kind of machine that the wheels are for, with the targets that the stack names."""
    for _, _, step, text in RUNS:
        assert "--target" not in text, step


def test_jobs_with_keys_install_by_hash() -> None:
    """What runs beside a key or an identity is named by hash; no package's own build script runs."""
    for name, key, job in JOBS:
        texts = [step.get("run", "") for step in job.get("steps", ())]
        if "secrets." in str(job) or job["permissions"].get("id-token") == "write":
            assert not [text for text in texts if "pip install" in text], (name, key)
    [installing] = [
        step for step in MADE["sign"]["jobs"]["sign"]["steps"] if "setup.sh" in step.get("run", "")
    ]
    assert installing["env"] == {"REQUIREMENTS": "signing"}
    setup = (ROOT / ".github" / "setup.sh").read_text("utf-8").splitlines()
    assert [line.split()[1:-1] for line in setup if line.startswith('"${install[@]}"')] == [
        ["--require-hashes", "--only-binary", ":all:", "--requirement"],
        ["--no-deps", "--no-build-isolation"],
    ]


@pytest.mark.parametrize(("name", "extras"), [("requirements", ["full"]), ("signing", [])])
def test_requirements_with_hashes_are_those_of_the_program(name: str, extras: list[str]) -> None:
    """Every requirement of the program and its build backend is pinned in a version that it accepts, with hashes."""
    text = (ROOT / ".github" / f"{name}.txt").read_text("utf-8").replace("\\\n", " ")
    pinned: dict[str, list[Requirement]] = {}
    for line in text.splitlines():
        words, *hashes = line.split(" --hash=")
        assert hashes, line
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", digest.strip()) for digest in hashes), line
        requirement = Requirement(words)
        pinned.setdefault(canonicalize_name(requirement.name), []).append(requirement)
    # pip before 24 takes no pin without them for a requirement that names them.
    assert pinned["pydantic"][0].extras == {"email"}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    program = project["project"]
    for line in (
        *program["dependencies"],
        *(line for extra in extras for line in program["optional-dependencies"][extra]),
        *project["build-system"]["requires"],
    ):
        wanted = Requirement(line)
        versions = [
            str(one.specifier).removeprefix("==") for one in pinned[canonicalize_name(wanted.name)]
        ]
        assert all(wanted.specifier.contains(version) for version in versions), line


def test_setup_installs_the_packages_that_are_missing(tmp_path: Path) -> None:
    """What the job needs besides is installed once, and asked of the package manager only where it is not there."""
    said, tools = tmp_path / "said", tmp_path / "tools"
    tools.mkdir()
    for name, body in {
        "dpkg-query": "[[ ${!#} == here ]] && printf installed",
        "apt-get": f'echo "apt-get $*" >>{said}',
        "sudo": '"$@"',
        "python3": 'mkdir -p .venv/bin && printf "#!/bin/sh\\n" | tee .venv/bin/python >.venv/bin/sparkwright && chmod +x .venv/bin/*',
    }.items():
        (tools / name).write_text(f"#!/bin/bash\n{body}\n")
        (tools / name).chmod(0o755)
    env = {
        "PATH": f"{tools}:/usr/bin:/bin",
        "GITHUB_PATH": str(tmp_path / "path"),
        "RUNNER_TEMP": str(tmp_path),
    }
    command = [str(ROOT / ".github" / "setup.sh")]
    subprocess.run([*command, "here"], cwd=tmp_path, env=env, check=True)
    assert not said.exists()
    subprocess.run([*command, "here", "g++-aarch64-linux-gnu"], cwd=tmp_path, env=env, check=True)
    assert said.read_text().splitlines()[-1].split()[-1] == "g++-aarch64-linux-gnu"
    assert "here" not in said.read_text().split()


def test_a_spark_has_the_packages_that_its_jobs_ask_for() -> None:
    """A job has no right to install any there, so the guide names them."""
    [line] = re.findall(
        "^# apt-get install (.*)$",
        (ROOT / "docs" / "howto" / "set-up-a-runner.md").read_text("utf-8"),
        re.MULTILINE,
    )
    for key in ("build", "gate"):
        steps = MADE["pipeline"]["jobs"][key]["steps"]
        [setup] = [step["run"] for step in steps if "setup.sh" in step.get("run", "")]
        assert set(setup.split()[1:]) <= set(line.split()), key


@each_job
def test_actions_are_named_by_commit(name: str, key: str, job: dict[str, Any]) -> None:
    """An action is 40 hex digits of a commit; a checkout leaves no credentials; wheels are not compressed again."""
    for step in job["steps"]:
        if "uses" in step:
            assert re.fullmatch(r"actions/[a-z-]+@[0-9a-f]{40}", step["uses"])
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False
        if step.get("uses", "").startswith("actions/upload-artifact@"):
            assert step["with"]["compression-level"] == 0
            assert step["with"]["retention-days"] <= 90


@each_run
def test_no_text_of_others_becomes_part_of_a_script(
    name: str, job: str, step: str, text: str
) -> None:
    """Inputs and names reach a script by its environment, where a shell takes them for text; none is pasted into it."""
    assert "${{" not in text


@each_run
def test_a_job_calls_verbs_that_exist(name: str, job: str, step: str, text: str) -> None:
    """Each line of a step that calls sparkwright is one that the program takes, options and all."""
    for line in re.sub(r"\\\n\s*", " ", text).splitlines():
        # In a case of a shell, the command stands behind its pattern.
        found = re.match(
            r"\s*(?:[a-z]+\) )?sparkwright (.*?)(?: ;;)?$", line.replace(" || status=$?", "")
        )
        if found:
            parse(_words(found[1]))


def _words(line: str) -> list[str]:
    """Return the words of a command line as bash would pass them, with something fitting in place of each variable."""
    filled = {
        '"${index[@]}"': "--at index",
        '"${stages[@]}"': "--stage a=pass",
        '"$BEGAN"': "2026-11-22T00:00:00Z",
    }
    for name, value in filled.items():
        line = line.replace(name, value)
    line = re.sub(r'"\$\{reports\[@\]\}"', "--given f", line)
    line = re.sub(r'"\$\{\w+\[@\]/#/(--\w+=)\}"', r"\1f", line)
    line = line.replace('"$CHANNEL"', "candidate").replace(
        '"github:$PUBLIC_REPOSITORY"', "github:a/b"
    )
    return [re.sub(r"\$\{?\w+\}?", "value", word) for word in shlex.split(line.partition(" >")[0])]


@pytest.mark.skipif(
    not shutil.which("shellcheck"),
    reason="shellcheck is not here (the group test of pyproject.toml brings it)",
)
@each_run
def test_scripts_are_sound(name: str, job: str, step: str, text: str) -> None:
    """shellcheck finds nothing in any step."""
    command = ["shellcheck", "--shell=bash", "--severity=style", "-"]
    done = subprocess.run(
        command, input=f"set -eo pipefail\n{text}", capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


class TestExpressions:
    """The interpreter of the tests agrees with GitHub's documentation on what the workflows use."""

    @pytest.mark.parametrize(
        ("text", "value"),
        [
            ("inputs.stack || '2026.11'", "2026.11"), ("inputs.fork && 'a' || 'b'", "a"), ("a.b == 'C'", True), ("a.b != 'c'", False),
            ("!a.none", True), ("fromJSON('[\"x\"]')", ["x"]), ("format('github:{0}', a.b)", "github:c"), ("(a.n == 2) && true", True),
            ("'it''s'", "it's"), ("fromJSON(a.none == '1' && '[1]' || '[2]')", [2]),
        ],
    )  # fmt: skip
    def test_value(self, text: str, value: Any) -> None:
        assert (
            Expression(text, {"inputs": {"fork": "vllm"}, "a": {"b": "c", "n": 2}}).value() == value
        )

    @pytest.mark.parametrize(
        ("condition", "failed", "runs"),
        [
            (None, False, True),
            (None, True, False),
            ("always()", True, True),
            ("${{ !cancelled() }}", True, True),
            ("1 == 1", True, False),
        ],
    )
    def test_condition(self, condition: str | None, failed: bool, runs: bool) -> None:
        assert workflows.holds(condition, {}, failed=failed) is runs


@pytest.fixture(name="world")
def _world(tmp_path: Path) -> World:
    """Return GitHub's end of a repository that holds the scripts of the workflows."""
    work = Repository(tmp_path / "work")
    work.commit(
        {
            f".github/{name}": (ROOT / ".github" / name).read_bytes()
            for name in ("published.sh", "setup.sh")
        }
    )
    for one in (work.path / ".github").iterdir():
        one.chmod(0o755)
    work.git("add", "--all")
    work.git("commit", "--quiet", "-m", "modes")
    bare = tmp_path / "server" / "acme" / "wheels"
    work.git("clone", "--quiet", "--bare", ".", str(bare))
    environment = {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": str(tmp_path),
        "GIT_CONFIG_GLOBAL": "/dev/null",
    }
    return World(tmp_path / "world", bare, environment)


def published(world: World, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the script that brings and keeps what is published, in a workspace of its own."""
    place = world.folder / "workspace"
    place.mkdir(parents=True, exist_ok=True)
    env = {
        **world.environment,
        "GITHUB_SERVER_URL": f"file://{world.repository.parents[1]}",
        "GITHUB_REPOSITORY": world.name,
    }
    script = ROOT / ".github" / "published.sh"
    return subprocess.run(
        [str(script), *words], cwd=place, env=env, capture_output=True, text=True, check=False
    )


def test_what_is_published_is_brought_and_kept(world: World) -> None:
    """The branch begins empty, takes what is put, and is unchanged where nothing is new; its history stays."""
    assert published(world, "get").returncode == 0
    (world.folder / "workspace" / "published" / "a").write_text("1")
    assert published(world, "put", "one").returncode == 0
    assert published(world, "get").returncode == 0
    assert (world.folder / "workspace" / "published" / "a").read_text() == "1"
    assert published(world, "put", "two").stdout.strip() == "nothing changed"
    (world.folder / "workspace" / "published" / "a").write_text("2")
    assert published(world, "put", "three").returncode == 0

    log = subprocess.run(
        ["git", "log", "--format=%s", "published"],
        cwd=world.repository,
        capture_output=True,
        text=True,
        check=True,
    )
    assert log.stdout.split() == ["three", "one"]


def test_who_comes_too_late_overwrites_nothing(world: World, tmp_path: Path) -> None:
    """Of two that change what is published at the same time, the second is refused and the first one's work stays."""
    other = World(tmp_path / "other", world.repository, world.environment)
    for one in (world, other):
        assert published(one, "get").returncode == 0
        (one.folder / "workspace" / "published" / "a").write_text(str(one.folder))
    assert published(world, "put", "first").returncode == 0
    assert published(other, "put", "second").returncode != 0
    assert published(world, "get").returncode == 0
    assert (world.folder / "workspace" / "published" / "a").read_text() == str(world.folder)


def test_a_host_that_does_not_answer_is_no_empty_branch(world: World) -> None:
    """Where the repository cannot be asked, nothing is begun that could be pushed over what is there."""
    shutil.move(world.repository, world.repository.with_name("gone"))
    done = published(world, "get")
    assert done.returncode == 1
    assert "does not answer" in done.stderr
    assert not (world.folder / "workspace" / "published").exists()


def test_the_token_is_on_no_command_line(world: World, tmp_path: Path) -> None:
    """git has the token from its environment; neither its arguments nor the repository's configuration hold it."""
    spy = tmp_path / "bin" / "git"
    spy.parent.mkdir()
    spy.write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/words\nexec {shutil.which("git")} "$@"\n')
    spy.chmod(0o755)
    world.environment |= {
        "PATH": f"{spy.parent}:{world.environment['PATH']}",
        "TOKEN": "ghs_secret",
    }
    assert published(world, "get").returncode == 0
    (world.folder / "workspace" / "published" / "a").write_text("1")
    done = published(world, "put", "one")
    assert done.returncode == 0
    config = (world.folder / "workspace" / "published" / ".git" / "config").read_text()
    for held in ((tmp_path / "words").read_text(), config, done.stdout, done.stderr):
        assert "ghs_secret" not in held
        assert "eC1hY2Nlc3Mt" not in held


@pytest.mark.parametrize("field", ["stack", "recipes"])
@pytest.mark.parametrize(
    "text",
    [
        "$(touch evil)", "2026.11; touch evil", "`touch evil`", "x\ntouch evil", '" && touch evil #', "--help", "../../x", " ", "*",
    ],
)  # fmt: skip
def test_an_input_with_shell_in_it_is_text(
    world: World, tmp_path: Path, field: str, text: str
) -> None:
    """Whoever types shell into an input gets it refused as a name, before anything is built; nothing of it is run."""
    request = {"stack": "2026.11", "recipes": RECIPE, "channel": "candidate"}
    result = _request(world, tmp_path, request | {field: text})

    # Without a recipe, the release policy names some.
    assert result == ("success" if (field, text) == ("recipes", " ") else "failure")
    assert not list(tmp_path.rglob("evil"))
    assert not Path("evil").exists()


RECIPE = "qwen3-30b-a3b-nvfp4"


@pytest.mark.parametrize(
    ("stack", "recipe", "result"),
    [
        ("2026.05", "qwen3.6-35b-a3b-nvfp4-mtp3", "failure"), ("2026.05", RECIPE, "success"),
        ("2026.06", "toy-cpu", "failure"), ("2026.11", f"{RECIPE} toy-cpu", "success"),
    ],
)  # fmt: skip
def test_a_recipe_for_another_release_is_refused_before_anything_is_built(
    world: World, tmp_path: Path, stack: str, recipe: str, result: str
) -> None:
    """A dispatch for vLLM 0.20.1 with a recipe that needs 0.28 ends in the first job."""
    inputs = {"stack": stack, "recipes": recipe, "channel": "candidate"}
    assert _request(world, tmp_path, inputs) == result
    assert ("recipe-unfit" in world.steps[-1].said) == (result == "failure")


@pytest.mark.parametrize(
    ("stack", "recipes", "channel", "chosen"),
    [
        ("2026.11", "", "verified", "qwen3-30b-a3b-nvfp4 qwen3.6-35b-a3b-nvfp4-mtp3"),
        ("2026.05", "", "verified", "qwen3-30b-a3b-nvfp4 qwen3-next-80b-nvfp4-marlin-mtp"),
        ("2026.11", RECIPE, "verified", ""), ("2026.11", RECIPE, "candidate", RECIPE),
    ],
)  # fmt: skip
def test_verified_is_refused_without_a_recipe_of_each_group(
    world: World, tmp_path: Path, stack: str, recipes: str, channel: str, chosen: str
) -> None:
    """What could not be verified in the end is refused in the first job, and without recipes they cover the groups."""
    inputs = {"stack": stack, "recipes": recipes, "channel": channel}
    assert _request(world, tmp_path, inputs) == ("success" if chosen else "failure")
    assert world.outputs["request"]["recipes"] == chosen
    if not chosen:
        assert "speculative: qwen3.6-35b-a3b-nvfp4-mtp3" in world.steps[-1].said


def _request(world: World, folder: Path, inputs: dict[str, str]) -> str:
    """Return the result of the step that checks a request, with the real program."""
    flow, _ = only_step(
        "request", "The stack, its recipes, the channel and the builder fit each other"
    )
    python = shutil.which("python")
    body = f'PYTHONPATH={ROOT}/ci exec {python} -m sparkwright "$@" --root {ROOT} --cache-dir {folder}/cache'
    world.environment["PATH"] = f"{_program(folder, body)}:{world.environment['PATH']}"
    result = _run(world, folder, flow, inputs)
    assert world.steps[-1].seconds < 60
    return result


DIGESTS = ROOT / ".github" / "digests.py"


def _digests(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = ["/usr/bin/python3", str(DIGESTS), *words]
    return subprocess.run(
        command, cwd=folder, env=variables, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("change", "refused"),
    [
        (lambda folder: None, False),
        (lambda folder: (folder / "vllm-1.whl").write_bytes(b"other"), True),
        (lambda folder: (folder / "vllm-2.whl").write_bytes(b"more"), True),
        (lambda folder: (folder / ".hidden").write_bytes(b"more"), True),
        (lambda folder: (folder / "vllm-1.whl").unlink(), True),
        (lambda folder: (folder / "folder").mkdir(), True),
        (lambda folder: (folder / "link.whl").symlink_to("vllm-1.whl"), True),
        (lambda folder: (folder / "$(touch evil).whl").write_bytes(b"x"), True),
    ],
    ids=["same", "swapped", "added", "hidden", "missing", "folder", "link", "shell"],
)
def test_a_folder_is_what_the_job_that_made_it_states(
    tmp_path: Path, change: Callable[[Path], object], refused: bool
) -> None:
    """Another file of the same name, one too many, one too few, and what is no plain file are refused."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    for name in ("vllm-1.whl", "cutlass-1.whl"):
        (folder / name).write_bytes(name.encode())
    output = tmp_path / "output"
    assert not _digests(tmp_path, "write", "wheels", "*", GITHUB_OUTPUT=str(output)).returncode
    stated = output.read_text().removeprefix("digests=").strip()
    assert json.loads(stated)["vllm-1.whl"] == hashlib.sha256(b"vllm-1.whl").hexdigest()
    change(folder)
    done = _digests(tmp_path, "check", "wheels", DIGESTS=stated)

    assert bool(done.returncode) == refused
    assert ("::error::" in done.stderr) == refused
    assert not list(tmp_path.rglob("evil"))


@pytest.mark.parametrize(
    ("run", "changes", "refused"),
    [
        ("7", {}, False), ("7", {"path": ".github/workflows/pipeline.yml@main", "event": "workflow_dispatch"}, False),
        ("7", {"path": ".github/workflows/bump.yml"}, True), ("7", {"head_branch": "topic"}, True), ("7", {"event": "pull_request"}, True),
        ("7", {"head_repository": {"full_name": "someone/lab"}}, True), ("7", {"status": "in_progress"}, True),
        ("7", {"head_branch": None, "head_repository": None}, True), ("8", {}, True), ("7/../7", {}, True),
    ],
)  # fmt: skip
def test_only_an_ended_run_of_the_pipeline_is_promoted(
    tmp_path: Path, run: str, changes: dict[str, Any], refused: bool
) -> None:
    """Verdicts of another workflow, branch, repository or event, or of a run that goes on, are not signed."""
    with githubapi.serve() as host:
        host.runs[7] = githubapi.run(**changes)
        variables = {
            "PATH": "/usr/bin:/bin",
            "GITHUB_API_URL": host.api,
            "GITHUB_REPOSITORY": "acme/lab",
        }
        variables |= {"GITHUB_TOKEN": "ghs_secret", "RUN": run}
        script = str(ROOT / ".github" / "run.sh")
        done = subprocess.run(
            [script], cwd=tmp_path, env=variables, capture_output=True, text=True, check=False
        )
        assert bool(done.returncode) == refused, done
        assert set(host.authorizations) <= {"Bearer ghs_secret"}


@pytest.mark.parametrize(
    ("state", "channel", "refused"),
    [
        ({"already": False, "channel": "candidate"}, "verified", False), ({"already": True, "channel": "verified"}, "verified", False),
        ({"already": True, "channel": "candidate"}, "candidate", False), ({"already": True, "channel": "candidate"}, "verified", True),
    ],
)  # fmt: skip
def test_a_published_candidate_is_not_gated_for_verified(
    world: World, tmp_path: Path, state: dict[str, Any], channel: str, refused: bool
) -> None:
    """Wheels that are published are neither published again, nor gated to be refused afterwards."""
    flow, _ = only_step("audit", "Are these wheels published")
    [checkout, *_] = MADE["pipeline"]["jobs"]["audit"]["steps"]
    flow["jobs"]["audit"] |= {"needs": [], "steps": [checkout, *flow["jobs"]["audit"]["steps"]]}
    document = json.dumps({"published": {"release": "2026.11.1", "gated": True, **state}})
    program = _program(tmp_path, f"echo '{document}'")
    world.environment["PATH"] = f"{program}:{world.environment['PATH']}"
    result = _run(world, tmp_path, flow, {"stack": "2026.11", "channel": channel})

    assert result == ("failure" if refused else "success"), world.steps[-1].said
    assert ("the candidate 2026.11.1" in world.steps[-1].said) == refused
    outputs = world.outputs["audit"]
    assert (outputs["release"], outputs["gated"]) == (
        ("2026.11.1", "true") if state["already"] else ("", "")
    )
    approve = MADE["pipeline"]["jobs"]["approve"]["if"]
    needs = {"audit": {"outputs": outputs}, "decide": {"result": "success"}}
    assert workflows.holds(approve, {"needs": needs}, failed=False) != state["already"]
    for event, gated in (("schedule", not state["already"]), ("workflow_dispatch", True)):
        github = {"repository": "a/b", "ref": "refs/heads/main", "event_name": event}
        contexts = {"needs": needs, "vars": {"LAB_REPOSITORY": "a/b"}, "github": github}
        condition = MADE["pipeline"]["jobs"]["gate"]["if"]
        assert workflows.holds(condition, contexts, failed=False) == gated


@pytest.mark.parametrize(
    ("name", "refused"),
    [
        ("vllm-1.verdicts.json", False), ("mini_vllm-1.throughput.json", False), ("vllm-1.whl", True),
        ("flashinfer_python-1.verdicts.json", True), ("x.sh", True),
    ],
)  # fmt: skip
def test_a_gate_speaks_of_the_wheel_that_serves_alone(
    tmp_path: Path, name: str, refused: bool
) -> None:
    """A gate host that uploads a wheel, or verdicts about another one, is refused; the audit's verdicts stay."""
    for folder, file in (("audited", "flashinfer_python-1.verdicts.json"), ("gated", name)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / file).write_text(folder)
    script = str(ROOT / ".github" / "verdicts.sh")
    done = subprocess.run([script], cwd=tmp_path, capture_output=True, text=True, check=False)

    assert bool(done.returncode) == refused
    kept = tmp_path / "verdicts" / "flashinfer_python-1.verdicts.json"
    assert kept.read_text() == "audited"
