"""What the workflows promise, held against their files: who can start what where, with which rights, and what their steps run."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tests.support import workflows
from tests.support.workflows import Expression, World
from tests.unit.conftest import Repository

from sparkwright.cli.main import parse
from sparkwright.operate.runner import exposure, policy

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".github" / "workflows"
FILES = sorted(FOLDER.glob("*.yml"))
MADE: dict[str, dict[Any, Any]] = {
    path.stem: yaml.safe_load(path.read_text("utf-8")) for path in FILES
}
JOBS = [(name, key, job) for name, made in MADE.items() for key, job in made["jobs"].items()]
RUNS = [(path.stem, *script) for path in FILES for script in workflows.scripts(path)]
#: Labels of the lab's machines.
OURS = policy.load(ROOT / "ci" / "runner.yaml").all_labels()

each_job = pytest.mark.parametrize(
    ("name", "key", "job"), JOBS, ids=[f"{name}-{key}" for name, key, _ in JOBS]
)
each_run = pytest.mark.parametrize(
    ("name", "job", "step", "text"), RUNS, ids=[f"{one[0]}-{one[1]}-{one[2]}" for one in RUNS]
)


def test_no_stranger_reaches_a_spark() -> None:
    """No event that somebody without write access can cause starts a job that could run on a machine of the lab."""
    assert exposure.exposed(FOLDER, OURS) == ()


def test_workflows_ask_for_labels_that_machines_have() -> None:
    """What jobs and actionlint take for a machine's label, ci/runner.yaml gives to machines."""
    named = yaml.safe_load((ROOT / ".github" / "actionlint.yaml").read_text("utf-8"))[
        "self-hosted-runner"
    ]["labels"]
    own = {label.lower() for label in OURS}

    assert {label.lower() for label in named} <= own
    assert {label.lower() for label in MADE["pipeline"]["jobs"]["gate"]["runs-on"]} <= own


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
    assert "concurrency" in MADE[name]


@each_job
def test_every_job_ends(name: str, key: str, job: dict[str, Any]) -> None:
    """Each job has a time limit, and what it may do is written out."""
    # Gating a recipe takes most of a day, and two are gated.
    assert 0 < job["timeout-minutes"] <= (2880 if key == "gate" else 720)
    assert "permissions" in job


@each_job
def test_what_writes_is_approved_by_people(name: str, key: str, job: dict[str, Any]) -> None:
    """Whoever may sign, or write packages or releases, runs in an environment, where people approve; what is left writes text alone."""
    if {"id-token", "packages"} & {
        right for right, how in job["permissions"].items() if how == "write"
    }:
        assert job["environment"] in ("release", "github-pages")


def test_a_gate_is_never_cancelled() -> None:
    """A cancelled measurement is hours lost and may leave a server behind; so no group that holds a gate cancels."""
    gate = MADE["pipeline"]["jobs"]["gate"]
    assert gate["concurrency"] == {"group": "spark-gate", "cancel-in-progress": False}
    assert MADE["pipeline"]["concurrency"]["cancel-in-progress"] is False
    assert gate["runs-on"] == ["self-hosted", "linux", "ARM64", "gb10", "spark-gate"]
    assert "github.repository == vars.LAB_REPOSITORY" in gate["if"]


def _env(name: str, value: str, variables: dict[str, str]) -> dict[str, str]:
    """Return what the job *name* of the pipeline has in its environment variable *value* with the repository's *variables*."""
    return {
        value: workflows.text(MADE["pipeline"]["jobs"][name]["env"][value], {"vars": variables})
    }


@pytest.mark.parametrize("targets", ["", "all"])
def test_the_default_build_compiles_the_targets_that_the_locks_are_for(targets: str) -> None:
    """Targets that need vendored sources are built only where the lab's variable names them."""
    assert _env("build", "TARGETS", {"TARGETS": targets} if targets else {}) == {"TARGETS": targets}
    [build] = [
        text
        for name, job, step, text in RUNS
        if (name, job, step) == ("pipeline", "build", "Build")
    ]
    words = ["bash", "-c", f"sparkwright() {{ printf '%s\\n' \"$@\"; }}\n{build}"]
    done = subprocess.run(
        words,
        env={"PATH": "/usr/bin:/bin", "TARGETS": targets},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ("--targets" in done.stdout.splitlines()) == bool(targets)


def test_a_plan_for_another_machine_has_its_compiler() -> None:
    """A job that plans or builds for aarch64 on a machine of another kind installs the cross compiler first."""
    cross = [(name, job) for name, job, _, text in RUNS if "--target aarch64" in text]
    assert ("pipeline", "plan") in cross
    for name, job in cross:
        assert MADE[name]["jobs"][job]["runs-on"] == "ubuntu-24.04"
        texts = [text for *where, _, text in RUNS if tuple(where) == (name, job)]
        place = next(number for number, text in enumerate(texts) if "--target aarch64" in text)
        assert any(
            text.startswith(".github/setup.sh") and "g++-aarch64-linux-gnu" in text.split()
            for text in texts[:place]
        )


def test_jobs_with_keys_install_by_hash() -> None:
    """What runs beside a key or an identity is named by hash; no package's own build script runs."""
    for name, key, job in JOBS:
        texts = [step.get("run", "") for step in job["steps"]]
        if "secrets." in str(job) or job["permissions"].get("id-token") == "write":
            assert not [text for text in texts if "pip install" in text], (name, key)
    setup = (ROOT / ".github" / "setup.sh").read_text("utf-8").splitlines()
    assert [line.split()[1:-1] for line in setup if line.startswith('"${install[@]}"')] == [
        ["--require-hashes", "--only-binary", ":all:", "--requirement"],
        ["--no-deps", "--no-build-isolation"],
    ]


def test_requirements_with_hashes_are_those_of_the_program() -> None:
    """Every requirement of the program and its build backend is pinned in a version that it accepts, with hashes."""
    text = (ROOT / ".github" / "requirements.txt").read_text("utf-8").replace("\\\n", " ")
    pinned: dict[str, list[Requirement]] = {}
    for line in text.splitlines():
        words, *hashes = line.split(" --hash=")
        assert hashes, line
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", digest.strip()) for digest in hashes), line
        requirement = Requirement(words)
        pinned.setdefault(canonicalize_name(requirement.name), []).append(requirement)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    program = project["project"]
    for line in (
        *program["dependencies"],
        *program["optional-dependencies"]["full"],
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


def test_all_that_changes_what_is_published_waits_for_its_turn() -> None:
    """Jobs that push to the branch `published` share one group that never cancels."""
    for name, key, job in JOBS:
        if any("published.sh put" in step.get("run", "") for step in job["steps"]):
            group = job.get("concurrency") or MADE[name]["concurrency"]
            assert group == {"group": "published", "cancel-in-progress": False}, (name, key)


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
        plain = line.replace('${TARGETS:+--targets "$TARGETS"}', "--targets all")
        found = re.match(r"\s*(?:user/bin/)?sparkwright (.*)", plain)
        if found:
            parse(_words(found[1]))


def _words(line: str) -> list[str]:
    """Return the words of a command line as bash would pass them, with something fitting in place of each variable."""
    filled = {
        "${IDENTITY:+--identity}": "--identity",
        '"${stages[@]}"': "--stage a=pass",
        '"$BEGAN"': "2026-11-22T00:00:00Z",
    }
    for name, value in filled.items():
        line = line.replace(name, value)
    line = line.replace('"${index[@]}"', "--index=i")
    line = re.sub(r'"\$\{given\[@\]\}"', "--given f", line)
    line = re.sub(r'"\$\{\w+\[@\]/#/(--\w+=)\}"', r"\1f", line)
    line = line.replace('"$CHANNEL"', "candidate")
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


@pytest.mark.parametrize(
    "text",
    [
        "$(touch evil)",
        "2026.11; touch evil",
        "`touch evil`",
        "x\ntouch evil",
        '" && touch evil #',
        "--help",
    ],
)
def test_an_input_with_shell_in_it_is_text(world: World, tmp_path: Path, text: str) -> None:
    """Whoever types shell into an input gets it refused as a name; nothing of it is run."""
    step = next(
        text_
        for name, job, _, text_ in RUNS
        if (name, job) == ("pipeline", "plan") and "sparkwright plan" in text_
    )
    flow = tmp_path / "one.yml"
    started = {"workflow_dispatch": {"inputs": {"stack": {"default": ""}}}}
    jobs = {"plan": {"steps": [{"run": step}]}}
    flow.write_text(
        yaml.safe_dump(
            {"name": "one", True: started, "jobs": jobs, "env": {"STACK": "${{ inputs.stack }}"}}
        )
    )
    world.environment["PATH"] = (
        f"{Path(shutil.which('python3') or '').parent}:{world.environment['PATH']}"
    )
    program = tmp_path / "bin" / "sparkwright"
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/sh\nexec {shutil.which("python")} -m sparkwright "$@" --root {ROOT} --cache-dir {tmp_path}/cache\n'
    )
    program.chmod(0o755)
    world.environment["PATH"] = f"{program.parent}:{world.environment['PATH']}"
    world.run(flow, inputs={"stack": text})

    assert world.steps[-1].ended in (1, 2)
    assert not list(tmp_path.rglob("evil"))
    assert not Path("evil").exists()
