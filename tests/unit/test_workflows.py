"""What the workflows promise, held against their files: who can start what where, with which rights, and what their steps run; and the lab's settings."""

import itertools
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tests.support import lab_github, loopback, processes, workflows
from tests.support.lab_github import REPOSITORY, TOKEN, Hub
from tests.unit.conftest import ROOT, Repository

from sparkwright.cli.main import parse

SCRIPTS = ROOT / ".github"
FLOWS: dict[str, dict[Any, Any]] = {
    path.stem: yaml.safe_load(path.read_text("utf-8")) for path in sorted((SCRIPTS / "workflows").glob("*.yml"))
}
PIPELINE = FLOWS["pipeline"]["jobs"]
JOBS = [(name, key, job) for name, flow in FLOWS.items() for key, job in flow["jobs"].items()]
#: Jobs that call a reusable workflow have no steps, and its jobs have the limits.
STEPPED = [(name, key, job) for name, key, job in JOBS if "steps" in job]
RUNS = [(f"{name}-{key}-{step.get('name', '')}", step["run"]) for name, key, job in STEPPED for step in job["steps"] if "run" in step]

programs = pytest.mark.skipif(
    not (shutil.which("jq") and shutil.which("curl")), reason="jq and curl, which GitHub's machines have, are not here: apt-get install jq curl"
)
each_run = pytest.mark.parametrize("text", [text for _, text in RUNS], ids=[name for name, _ in RUNS])


def test_no_stranger_reaches_a_spark() -> None:
    """A job that asks for a machine of the lab is started by the schedule or by a person, on main of the lab's own repository."""
    asking = [(name, key) for name, key, job in STEPPED if "self-hosted" in str(job["runs-on"])]
    assert asking == [("pipeline", "ready"), ("pipeline", "build"), ("pipeline", "gate")]
    # Any other has a machine of GitHub's.
    others = {str(job["runs-on"]) for name, key, job in STEPPED if (name, key) not in asking}
    assert others == {"ubuntu-24.04", "ubuntu-24.04-arm"}
    assert set(FLOWS["pipeline"][True]) == {"schedule", "workflow_dispatch"}
    guard = "github.repository == vars.LAB_REPOSITORY && github.ref == 'refs/heads/main'"
    assert (PIPELINE["gate"]["if"], PIPELINE["ready"]["if"]) == (guard, f"{guard} && inputs.channel == 'verified'")


@pytest.mark.parametrize("job", [job for _, _, job in STEPPED], ids=[f"{name}-{key}" for name, key, _ in STEPPED])
def test_a_job_ends_and_has_only_rights_that_people_approve(job: dict[str, Any]) -> None:
    """Whoever may sign is in an environment with keys, whoever writes packages was approved; a token that writes is in `public`."""
    # A recipe takes four hours at most, and a person may ask for some.
    assert 0 < job["timeout-minutes"] <= (1440 if job is PIPELINE["gate"] else 720)
    rights = {right for right, how in job["permissions"].items() if how == "write"}
    environments = [workflows.text(job.get("environment", ""), {"inputs": {"action": action}}) for action in ("publish", "yank", "refresh")]
    assert environments == ["release", "release", "refresh"] or "id-token" not in rights
    assert job.get("needs") == "approve" or "packages" not in rights
    assert job.get("environment") == "public" or "PUBLIC_TOKEN" not in str(job)
    # No job may write the lab's own contents.
    assert "contents" not in rights


def test_a_pull_request_reads_and_has_no_secrets() -> None:
    """The one workflow that a pull request starts may read the repository, and names no secret and no environment."""
    assert [name for name, flow in FLOWS.items() if {"pull_request", "pull_request_target"} & set(flow[True])] == ["check"]
    assert not re.search("pull_request_target|secrets[.]|environment", str(FLOWS["check"]))
    assert all(job["permissions"] == {"contents": "read"} for job in FLOWS["check"]["jobs"].values())


def test_no_run_that_waits_is_cancelled() -> None:
    """A run or job that waits for another is queued, and not replaced by the next; only checks of an older push are."""
    groups = [flow["concurrency"] for name, flow in FLOWS.items() if name not in ("sign", "check")]
    for group in [*groups, *(job["concurrency"] for _, _, job in JOBS if "concurrency" in job)]:
        assert (group["cancel-in-progress"], group["queue"]) == (False, "max")
    # Before a Spark, too: GitHub cancels a job that waits a day for its runner.
    assert PIPELINE["gate"]["concurrency"]["group"] == "spark"
    for builder, group in (("spark", "spark"), ("hosted", "build-7")):
        contexts = {"needs": {"request": {"outputs": {"builder": builder}}}, "github": {"run_id": "7"}}
        assert workflows.text(PIPELINE["build"]["concurrency"]["group"], contexts) == group


def test_one_workflow_signs_and_holds_no_token_that_writes() -> None:
    """Keys and identity are in one job of one workflow, which runs this checkout alone, installed by hash; what pushes has no key."""
    [(name, job)] = [(name, job) for name, _, job in STEPPED if "id-token" in job["permissions"] or "_KEY" in str(job)]
    assert name == "sign"
    assert not re.search(r"PUBLIC_TOKEN|user\.sh|pip install", str(job))
    assert {step["uses"].split("@")[0] for step in job["steps"] if "uses" in step} == {
        "actions/checkout", "actions/download-artifact", "actions/upload-artifact",
    }  # fmt: skip
    [setup] = [step for step in job["steps"] if "setup.sh" in step.get("run", "")]
    assert "env" not in setup
    installs = re.findall(r'^"\$\{install\[@\]\}" (.*) \S+$', (SCRIPTS / "setup.sh").read_text("utf-8"), re.MULTILINE)
    assert installs == ["--require-hashes --only-binary :all: --requirement", "--no-deps --no-build-isolation"]


def test_every_index_is_changed_under_one_lock() -> None:
    """Whoever calls `sign`, or pushes, holds the lock `published` from the first step to the last."""
    changing = [job for name, _, job in JOBS if "sign.yml" in job.get("uses", "") or (name != "sign" and "published.sh put" in str(job))]
    assert [job["concurrency"] for job in changing] == [{"group": "published", "cancel-in-progress": False, "queue": "max"}] * 2


def test_only_the_run_itself_waits_for_a_person() -> None:
    """A person approves before any lock is taken, in a job of its own, and every call of `sign` but a refresh follows it."""
    approving = [(flow, flow["jobs"]["approve"]) for flow in (FLOWS["pipeline"], FLOWS["release"])]
    assert [job for _, _, job in JOBS if job.get("environment") == "approve"] == [job for _, job in approving]
    assert not [flow for flow, job in approving if "concurrency" in job or "${{" not in flow["concurrency"]["group"]]
    assert all("approve" in job["needs"] for _, _, job in JOBS if "sign.yml" in job.get("uses", ""))
    jobs = FLOWS["release"]["jobs"]
    for action, following in (("refresh", "release"), ("yank", "release"), ("image", "image")):
        contexts: dict[str, Any] = {"inputs": {"action": action}}
        asked = workflows.holds(jobs["approve"]["if"], contexts, failed=False)
        assert asked == (action != "refresh")
        for result in ("success", "failure") if asked else ("skipped",):
            contexts["needs"] = {"approve": {"result": result}}
            runs = {key for key in ("release", "image") if workflows.holds(jobs[key]["if"], contexts, failed=result != "success")}
            assert runs == ({following} if result != "failure" else set()), (action, result)


def test_files_go_from_job_to_job_by_id_and_digest() -> None:
    """A job of the release takes an artifact by its id, and the next step holds every file of it against the job that made it."""
    for key, job in (PIPELINE | FLOWS["sign"]["jobs"]).items():
        for step, following in itertools.pairwise(job.get("steps", ())):
            if step.get("uses", "").startswith("actions/download-artifact@"):
                assert set(step["with"]) - {"run-id", "github-token"} == {"artifact-ids", "path"}
                assert f"digests.py check {step['with']['path']}" in following["run"], key


def test_requirements_with_hashes_are_those_of_the_program() -> None:
    """Every requirement of the program and its build backend is pinned in a version that it accepts."""
    lines = re.findall(r"^(\S+==[^\\]+)", (SCRIPTS / "requirements.txt").read_text("utf-8"), re.MULTILINE)
    pinned: dict[str, list[str]] = {}
    for pin in map(Requirement, lines):
        pinned.setdefault(canonicalize_name(pin.name), []).append(str(pin.specifier).removeprefix("=="))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    program = project["project"]
    full = program["optional-dependencies"]["full"]
    for wanted in map(Requirement, (*program["dependencies"], *full, *project["build-system"]["requires"])):
        assert all(wanted.specifier.contains(version) for version in pinned[canonicalize_name(wanted.name)]), wanted


def test_a_spark_has_the_packages_that_its_jobs_ask_for() -> None:
    """A job has no right to install any there, so the guide names them."""
    [line] = re.findall("^# apt-get install (.*)$", (ROOT / "docs" / "howto" / "set-up-a-runner.md").read_text("utf-8"), re.MULTILINE)
    asked = [name for key in ("build", "gate") for words in re.findall(r"setup\.sh ([^']*)", str(PIPELINE[key])) for name in words.split()]
    assert {"git", "g++", "ccache"} <= set(asked) <= set(line.split())


@each_run
def test_a_job_calls_verbs_that_exist(text: str) -> None:
    """Each line of a step that calls sparkwright is one that the program takes, options and all."""
    for line in re.sub(r"\\\n\s*", " ", text).splitlines():
        # In a case of a shell, the command stands behind its pattern.
        found = re.match(r"\s*(?:[a-z]+\) )?sparkwright (.*?)(?: ;;)?$", line.replace(" || status=$?", ""))
        if found:
            parse(_words(found[1]))


def _words(line: str) -> list[str]:
    """Return the words of a command line as bash would pass them, with something fitting in place of each variable."""
    values = {
        '"${index[@]}"': "--at index", '"$CHANNEL"': "candidate",
        '"$GITHUB_SERVER_URL/$PUBLIC_REPOSITORY/releases/download/$TAG"': "https://github.com/a/b/releases/download/t",
    }  # fmt: skip
    for name, value in values.items():
        line = line.replace(name, value)
    return [re.sub(r"\$\{?\w+\}?", "value", word) for word in shlex.split(line.partition(" >")[0])]


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="shellcheck is not here (the group test of pyproject.toml brings it)")
@each_run
def test_scripts_are_sound(text: str) -> None:
    """shellcheck finds nothing in any step."""
    command = ["shellcheck", "--shell=bash", "--severity=style", "-"]
    done = subprocess.run(command, input=f"set -eo pipefail\n{text}", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


# What the scripts do.

def script(folder: Path, name: str, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the script *name* of .github in *folder* with *variables* alone."""
    folder.mkdir(exist_ok=True)
    env = {"PATH": "/usr/local/bin:/usr/bin:/bin", **variables}
    return subprocess.run([str(SCRIPTS / name), *words], cwd=folder, env=env, capture_output=True, text=True, check=False)


def published(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the script that brings and keeps what is published, on a bare repository beside *folder*."""
    Repository(folder.parent / "server" / "acme" / "wheels", "--bare")
    env = {
        "HOME": str(folder.parent), "GIT_CONFIG_GLOBAL": "/dev/null", "GITHUB_SERVER_URL": f"file://{folder.parent}/server",
        "GITHUB_REPOSITORY": "acme/wheels", **variables,
    }  # fmt: skip
    return script(folder, "published.sh", *words, **env)


def test_what_is_published_is_kept_and_who_comes_too_late_overwrites_nothing(tmp_path: Path) -> None:
    """
    Where the repository cannot be asked, nothing is begun that could be pushed over what is there. The branch begins empty, takes what is
    put, and keeps its history; of two that change it at once, the second is refused.
    """
    one, two = tmp_path / "one", tmp_path / "two"
    done = published(one, "get", GITHUB_REPOSITORY="acme/gone")
    assert (done.returncode, "does not answer" in done.stderr) == (1, True)
    assert not (one / "published").exists()
    for folder in (one, two):
        assert published(folder, "get").returncode == 0
        (folder / "published" / "a").write_text(folder.name)
    assert published(one, "put", "first").returncode == 0
    assert published(two, "put", "second").returncode != 0
    assert published(two, "get").returncode == 0
    assert (two / "published" / "a").read_text() == "one"
    assert published(two, "put", "nothing").stdout.strip() == "nothing changed"


def test_the_token_is_on_no_command_line(tmp_path: Path) -> None:
    """git has the token from its environment; neither its arguments nor the repository's configuration hold it."""
    spy = processes.script(tmp_path / "bin" / "git", f'echo "$@" >>{tmp_path}/words\nexec {shutil.which("git")} "$@"')
    folder, variables = tmp_path / "one", {"PATH": f"{spy.parent}:/usr/bin:/bin", "TOKEN": "ghs_secret"}
    published(folder, "get", **variables)
    (folder / "published" / "a").touch()
    done = published(folder, "put", "one", **variables)
    held = (tmp_path / "words").read_text() + (folder / "published/.git/config").read_text() + done.stdout + done.stderr
    assert (done.returncode, re.findall("push|ghs_secret|eC1hY2Nlc3Mt", held)) == (0, ["push"])


def ran(folder: Path, flow: str, key: str, name: str, body: str, **contexts: dict[str, Any]) -> tuple[int, str, dict[str, str]]:
    """Return the status of the step *name* of a job, what it said, and the outputs; *body* is what the program does."""
    job = FLOWS[flow]["jobs"][key]
    [step] = [step for step in job["steps"] if step.get("name") == name]
    settings = {**FLOWS[flow].get("env", {}), **job.get("env", {}), **step.get("env", {})}
    env = {name: workflows.text(value, contexts) for name, value in settings.items()}
    env["PATH"] = f"{processes.script(folder / 'bin' / 'sparkwright', body).parent}:/usr/bin:/bin"
    (folder / "output").touch()
    done = subprocess.run(
        ["bash", "-eo", "pipefail", "-c", step["run"]], cwd=folder, env={**env, "HOME": str(folder), "GITHUB_OUTPUT": str(folder / "output"), "GITHUB_STEP_SUMMARY": str(folder / "summary")},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=60,
    )  # fmt: skip
    return done.returncode, done.stdout, workflows.pairs(folder / "output")


def requested(folder: Path, body: str, *, lab: bool = False, variables: dict[str, str] | None = None, **inputs: str) -> tuple[int, str, dict[str, str]]:
    """Return what `ran` does of the step that checks a request."""
    declared = FLOWS["pipeline"][True]["workflow_dispatch"]["inputs"]
    return ran(
        folder, "pipeline", "request", "The stack, its recipes, the channel and the builder fit each other", body,
        inputs={**{name: given["default"] for name, given in declared.items()}, **inputs}, vars={"LAB_REPOSITORY": "acme/lab", **(variables or {})},
        github={"repository": "acme/lab" if lab else "acme/other", "ref": "refs/heads/main"},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("chosen", "variable", "lab", "runner"),
    [
        ("default", "", True, "spark"), ("default", "hosted", True, "hosted"), ("hosted", "", True, "hosted"), ("spark", "hosted", True, "spark"),
        ("default", "", False, "hosted"), ("", "", True, "spark"), ("spark", "", False, ""), ("$(touch evil)", "", True, ""),
    ],
)  # fmt: skip
def test_the_builder_is_the_spark_where_a_lab_has_one(tmp_path: Path, chosen: str, variable: str, lab: bool, runner: str) -> None:
    """The input comes before the variable, and both before the default; only a lab builds on a Spark."""
    inputs = {"builder": chosen} if chosen else {}
    status, said, outputs = requested(tmp_path, "exit 0", lab=lab, variables={"BUILDER": variable}, **inputs)

    assert (status == 0, outputs.get("builder", "")) == (bool(runner), runner), said
    contexts = {"needs": {"request": {"outputs": outputs}}, "vars": {"LAB_REPOSITORY": "a"}, "github": {"repository": "a"}}
    labels = workflows.Expression(PIPELINE["build"]["runs-on"].strip()[3:-2], contexts).value()
    assert labels == (["self-hosted", "linux", "ARM64", "gb10"] if runner == "spark" else ["ubuntu-24.04-arm"])


RECIPE = "qwen3-30b-a3b-nvfp4"
#: Shell that somebody types into an input: refused as a name before anything is built, and nothing of it is run.
SHELL = ("$(touch evil)", "x\ntouch evil", '" && touch evil #', "--help", "../../x")


@programs
@pytest.mark.parametrize(
    ("stack", "recipes", "channel", "said", "chosen"),
    [
        ("2026.05", "qwen3.6-35b-a3b-nvfp4-mtp3", "candidate", "recipe-unfit", ""), ("2026.05", RECIPE, "candidate", "", RECIPE),
        ("2026.06", "toy-cpu", "candidate", "recipe-unfit", ""), ("2026.11", f"{RECIPE} toy-cpu", "candidate", "", f"{RECIPE} toy-cpu"),
        (SHELL[0], RECIPE, "candidate", "", ""), *(("2026.11", text, "candidate", "", "") for text in SHELL),
        ("2026.11", RECIPE, "verified", "speculative needs one of: qwen3.6-35b-a3b-nvfp4-mtp3", ""),
        ("2026.11", " ", "candidate", "", "qwen3-30b-a3b-nvfp4 qwen3.6-35b-a3b-nvfp4-mtp3"),
        ("2026.11", "", "verified", "", "qwen3-30b-a3b-nvfp4 qwen3.6-35b-a3b-nvfp4-mtp3"),
        ("2026.11", "", "verified elsewhere", "GPU of SM 12.1; the machine has none", ""),
        ("2026.05", "", "candidate", "", RECIPE), ("2026.06", "", "candidate", "", RECIPE),
        ("2026.05", "", "verified", "The official vLLM 0.20.1 does not serve", ""), ("2026.06", "", "verified", "vllm#46316", ""),
        ("2026.06", "qwen3-next-80b-nvfp4-marlin-mtp", "candidate", "recipe-unfit", ""),
        ("2026.11", f"{RECIPE} qwen3.6-35b-a3b-nvfp4-mtp3 gpt-oss-120b-mxfp4", "verified", "gpt-oss-120b-mxfp4 has no floor of gsm8k", ""),
    ],
)  # fmt: skip
def test_a_request_is_refused_before_anything_is_built(tmp_path: Path, stack: str, recipes: str, channel: str, said: str, chosen: str) -> None:
    """
    For vLLM 0.20.1 with a recipe that needs 0.28, with one that its official wheel does not serve, for an input that is no name, and for what
    could not be verified in the end: no recipe of each group, no floor, no Spark. Without recipes, they cover the groups as far as they can.
    """
    channel, _, elsewhere = channel.partition(" ")
    body = f'exec {shutil.which("python")} -m sparkwright "$@" --root {ROOT} --cache-dir {tmp_path}/cache'
    status, printed, outputs = requested(
        tmp_path, f"PYTHONPATH={ROOT}/ci {body}", lab=not elsewhere, stack=stack, recipes=recipes, channel=channel
    )

    assert (status == 0, outputs.get("recipes", "")) == (bool(chosen), chosen), printed
    assert said in printed
    assert not list(tmp_path.rglob("evil"))


@pytest.mark.parametrize(
    ("variable", "action", "identity"),
    [("true", "yank", True), ("false", "yank", False), ("", "yank", False), ("true", "refresh", False)],
)  # fmt: skip
def test_sigstore_signs_where_the_lab_says_true(tmp_path: Path, variable: str, action: str, identity: bool) -> None:
    """The identity signs if the variable is `true`, and never in a refresh, which nobody approves."""
    (tmp_path / "keys").mkdir()
    processes.script(tmp_path / ".github" / "verdicts.sh", "exit 0")
    inputs = {"action": action, "release": "2026.11.1", "reason": "x"}
    status, said, _ = ran(tmp_path, "sign", "sign", "Sign", 'echo "$@"', inputs=inputs, vars={"SIGN_WITH_SIGSTORE": variable})

    assert (status, said.split()[1], "--identity" in said.split()) == (0, action, identity), said


@programs
@pytest.mark.parametrize(
    ("state", "channel", "refused"),
    [
        ({"already": False, "channel": "candidate"}, "verified", False), ({"already": True, "channel": "verified"}, "verified", False),
        ({"already": True, "channel": "candidate"}, "candidate", False), ({"already": True, "channel": "candidate"}, "verified", True),
    ],
)  # fmt: skip
def test_a_published_candidate_is_not_gated_for_verified(tmp_path: Path, state: dict[str, Any], channel: str, refused: bool) -> None:
    """Wheels that are published are neither published again, nor gated to be refused afterwards."""
    processes.script(tmp_path / ".github" / "published.sh", "exit 0")
    document = json.dumps({"published": {"release": "2026.11.1", **state}})
    inputs = {"stack": "2026.11", "channel": channel}
    status, said, outputs = ran(tmp_path, "pipeline", "audit", "Are these wheels published", f"echo '{document}'", inputs=inputs)

    assert (status != 0, "the candidate 2026.11.1" in said) == (refused, refused), said
    assert outputs == ({"release": "2026.11.1"} if state["already"] else {})
    stated = {name: workflows.text(value, {"steps": {"published": {"outputs": outputs}}}) for name, value in PIPELINE["audit"]["outputs"].items()}
    contexts: dict[str, Any] = {"needs": {"audit": {"outputs": stated}, "decide": {"result": "success"}}, "vars": {"LAB_REPOSITORY": "a/b"}}
    assert workflows.holds(PIPELINE["approve"]["if"], contexts, failed=False) != state["already"]


@programs
def test_drift_fails_where_a_patch_is_of_no_use_on_the_newest_base(tmp_path: Path) -> None:
    for state, base, fails in (("conflict", "1.2", True), ("already-upstream", "1.2", True), ("moves", "1.2", False), ("conflict", "1.1", False)):
        trial = {"patch": "a.patch", "base": base, "state": state}
        document = {"drift": [{"bases": ["1.1", "1.2"], "trials": [trial]}, {"bases": [], "trials": []}]}
        (tmp_path / "drift-2026.11.json").write_text(json.dumps(document))
        status, said, _ = ran(
            tmp_path, "drift", "drift", "Every patch is still needed and applies", "exit 0", matrix={"stack": "2026.11"}
        )
        assert (status != 0, f"a.patch on 1.2: {state}" in said) == (fails, fails), said


@programs
@pytest.mark.parametrize(
    ("event", "same", "skipped"), [("schedule", True, True), ("schedule", False, False), ("workflow_dispatch", True, False)]
)
def test_a_night_gates_again_only_after_a_change(tmp_path: Path, event: str, same: bool, skipped: bool) -> None:
    """
    What was published with verdicts that are those of today on the machine that gates is not gated again; unless a person asks.

    The verdicts of earlier nights about these bytes, and no others, lie where the gates count attempts.
    """
    for name in ("vllm-1", "vllm-2"):
        (folder := tmp_path / "published" / "index" / "files" / name).mkdir(parents=True)
        (folder / f"{name}.verdicts.json").write_text(name)
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / "vllm-1.whl").touch()
    (tmp_path / "dist").mkdir()
    processes.script(tmp_path / ".github" / "published.sh", "exit 0")
    shutil.copy(SCRIPTS / "attempts.sh", tmp_path / ".github")
    contexts: dict[str, Any] = {"github": {"event_name": event}}
    body = f"""echo "$@" >said; echo '{json.dumps({"settled": same})}'"""
    status, said, outputs = ran(tmp_path, "pipeline", "gate", "Has anything changed since the last verdicts", body, **contexts)

    assert (status, outputs) == (0, {"settled": "true" if skipped else "false"}), said
    assert [path.read_text() for path in (tmp_path / "dist").iterdir()] == ["vllm-1"]
    assert "wheels/vllm-1.whl" in (tmp_path / "said").read_text()
    climbing = [step for step in PIPELINE["gate"]["steps"] if re.search("--keep-going|sparkwright apply", step.get("run", ""))]
    assert len(climbing) == 2
    contexts["steps"] = {"again": {"outputs": outputs}}
    assert {workflows.holds(step["if"], contexts, failed=False) for step in climbing} == {not skipped}


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
def test_a_folder_is_what_the_job_that_made_it_states(tmp_path: Path, change: Callable[[Path], object], refused: bool) -> None:
    """Another file of the same name, one too many, one too few, and what is no plain file are refused."""
    (folder := tmp_path / "wheels").mkdir()
    for name in ("vllm-1.whl", "cutlass-1.whl"):
        (folder / name).write_bytes(name.encode())
    assert not script(tmp_path, "digests.py", "write", "wheels", "*", GITHUB_OUTPUT=str(tmp_path / "output")).returncode
    change(folder)
    done = script(tmp_path, "digests.py", "check", "wheels", DIGESTS=workflows.pairs(tmp_path / "output")["digests"])

    assert (bool(done.returncode), "::error::" in done.stderr) == (refused, refused)
    assert not list(tmp_path.rglob("evil"))


#: Does what ``gh release`` does with the folder DOWNLOADS/REPOSITORY/releases/download/TAG; a draft has no address.
_GH = """
set -eu
action=$2 tag=$3
shift 3
files=() repository= draft=
while (($#)); do
    case $1 in
        --repo) repository=$2; shift ;;
        --title | --notes | --json | --jq) shift ;;
        --draft | --draft=true) draft=yes ;;
        --draft=false) draft=no ;;
        --clobber) ;;
        *) files+=("$1") ;;
    esac
    shift
done
[[ $GH_TOKEN == ghs_secret ]]
folder=DOWNLOADS/$repository/releases/download/$tag
case $action in
    view)
        if [[ -d $folder ]]; then echo "false $(cat DOWNLOADS/immutable)"; elif [[ -d $folder.draft ]]; then echo "true false"; else exit 1; fi ;;
    create) mkdir -p "$folder.draft" ;;
    upload) cp "${files[@]}" "$folder.draft/" ;;
    edit) if [[ $draft == no ]]; then mv "$folder.draft" "$folder"; else mv "$folder" "$folder.draft"; fi ;;
esac
"""


@pytest.mark.parametrize("immutable", [True, False])
def test_wheels_are_sent_to_a_release_that_cannot_change(tmp_path: Path, immutable: bool) -> None:
    """A second run goes on with the draft of a killed one; a release that could be changed becomes a draft again."""
    program = processes.script(tmp_path / "bin" / "gh", _GH.replace("DOWNLOADS", str(tmp_path)), "/bin/bash")
    env = {"PATH": f"{program.parent}:/usr/bin:/bin", "GH_TOKEN": "ghs_secret", "PUBLIC_REPOSITORY": "acme/wheels", "TAG": "2026.11-7"}
    (tmp_path / "immutable").write_text(str(immutable).lower())
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / "vllm-1.whl").write_text("whole")
    release = tmp_path / "acme" / "wheels" / "releases" / "download" / "2026.11-7"
    draft = release.with_name("2026.11-7.draft")
    draft.mkdir(parents=True)
    (draft / "vllm-1.whl").write_text("ha")
    for _ in range(2):
        done = script(tmp_path, "send.sh", **env)
        assert (done.returncode == 0, "could be changed" in done.stdout) == (immutable, not immutable), done
        assert ((release if immutable else draft) / "vllm-1.whl").read_text() == "whole"


@pytest.mark.parametrize(("version", "refused"), [("2", False), ("3", True)])
def test_an_index_that_changed_while_it_was_signed_is_not_replaced(tmp_path: Path, version: str, refused: bool) -> None:
    """Of two that change it at once the second pushes nothing."""
    (tmp_path / "index").mkdir()
    (tmp_path / "index" / "signed").touch()
    (tmp_path / "signed").mkdir()
    subprocess.run(["tar", "-cf", "signed/index.tar", "index"], cwd=tmp_path, check=True)
    processes.script(tmp_path / ".github" / "published.sh", f"mkdir -p published/index/old; [ $1 = get ] || echo {version}")
    before: dict[str, Any] = {"sign": {"outputs": {"before": "2"}}}
    status, said, _ = ran(tmp_path, "sign", "push", "The new index in place of the old one", "exit 0", needs=before)

    assert (status != 0, "The index changed while this one was signed" in said) == (refused, refused), said
    assert [path.name for path in (tmp_path / "published" / "index").iterdir()] == (["old"] if refused else ["signed"])


@programs
@pytest.mark.parametrize(
    ("run", "changes", "refused"),
    [
        ("7", {}, False), ("7", {"path": ".github/workflows/pipeline.yml@main", "event": "workflow_dispatch"}, False),
        ("7", {"path": ".github/workflows/drift.yml"}, True), ("7", {"head_branch": "topic"}, True), ("7", {"event": "pull_request"}, True),
        ("7", {"head_repository": {"full_name": "someone/lab"}}, True), ("7", {"status": "in_progress"}, True),
        ("7", {"head_branch": None, "head_repository": None}, True), ("8", {}, True), ("7/../7", {}, True),
    ],
)  # fmt: skip
def test_only_an_ended_run_of_the_pipeline_is_promoted(tmp_path: Path, run: str, changes: dict[str, Any], refused: bool) -> None:
    """Verdicts of another workflow, branch, repository or event, or of a run that goes on, are not signed."""
    record = {
        "path": ".github/workflows/pipeline.yml", "head_branch": "main", "event": "schedule", "status": "completed",
        "head_repository": {"full_name": "acme/lab"}, **changes,
    }  # fmt: skip

    class Api(loopback.Handler):
        def do_GET(self) -> None:  # noqa: N802  http.server calls it so
            known = (self.path, self.headers["Authorization"]) == ("/repos/acme/lab/actions/runs/7", "Bearer ghs_secret")
            self.answer(200 if known else 404, record)

    with loopback.Server(Api) as host:
        env = {"GITHUB_API_URL": host.url, "GITHUB_REPOSITORY": "acme/lab", "GITHUB_TOKEN": "ghs_secret", "RUN": run}
        done = script(tmp_path, "run.sh", **env)
    assert bool(done.returncode) == refused, done


@pytest.mark.parametrize(
    ("name", "refused"),
    [
        ("vllm-1.verdicts.json", False), ("mini_vllm-1.throughput.json", False), ("vllm-1.canary.json", False), ("vllm-1.whl", True),
        ("flashinfer_python-1.verdicts.json", True), ("x.sh", True),
    ],
)  # fmt: skip
def test_a_gate_speaks_of_the_wheel_that_serves_alone(tmp_path: Path, name: str, refused: bool) -> None:
    """A gate host that uploads a wheel, or verdicts about another one, is refused; the audit's verdicts stay."""
    for folder, file in (("audited", "flashinfer_python-1.verdicts.json"), ("gated", name)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / file).write_text(folder)
    assert bool(script(tmp_path, "verdicts.sh").returncode) == refused
    assert (tmp_path / "verdicts" / "flashinfer_python-1.verdicts.json").read_text() == "audited"


# Ways in for strangers: the settings of the lab's repository, and the machine that takes its jobs.


SCRIPT = ROOT / "ci" / "runner" / "check_settings.py"
REVIEWED = {"protection_rules": [{"type": "required_reviewers"}]}


@pytest.fixture(name="hub")
def _hub() -> Iterator[Hub]:
    with Hub() as hub:
        yield hub


def check(hub: Hub, *words: str, **variables: str) -> tuple[int, str]:
    """Return the status of the check, and what it said."""
    env = {"PATH": "/usr/bin:/bin", "SPARKWRIGHT_GITHUB_API": hub.url, "GITHUB_TOKEN": TOKEN, **variables}
    done = subprocess.run([sys.executable, "-I", str(SCRIPT), *words], env=env, capture_output=True, text=True, check=False)
    assert TOKEN not in done.stdout + done.stderr
    return done.returncode, done.stderr


def test_good_settings_pass_and_those_that_cannot_be_read_do_not(hub: Hub) -> None:
    assert check(hub, REPOSITORY) == (0, "")
    hub.settings[""]["private"] = True
    assert check(hub, REPOSITORY) == (0, "")
    hub.settings["/environments"] = 403
    assert check(hub, REPOSITORY) == (5, "runner-unregistered: 403 for /environments?per_page=100&page=1.\n")
    assert check(hub, REPOSITORY, GITHUB_TOKEN="wrong")[0] == 5
    assert check(hub, REPOSITORY, SPARKWRIGHT_GITHUB_API="http://192.0.2.1")[1].startswith("runner-unfit")
    assert check(hub, "unresolved")[1].startswith("runner-unresolved")


def environments(**approve: Any) -> dict[str, Any]:
    """Return the setting with *approve* as the environment of that name, which does not exist without any."""
    *others, _ = lab_github.good_settings()["/environments"]["environments"]
    return {"/environments": {"environments": [*others, *[{"name": "approve", **approve}] * bool(approve)]}}


def deploying(*policies: dict[str, str]) -> dict[str, Any]:
    """Return the setting with *policies* for the branches and tags that may deploy to `release`."""
    return {"/environments/release/deployment-branch-policies": {"branch_policies": list(policies)}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"/actions/permissions/fork-pr-contributor-approval": {"approval_policy": "first_time_contributors"}}, "approval is required of first"),
        (
            {
                "": {**lab_github.good_settings()[""], "private": True},
                "/actions/permissions/fork-pr-workflows-private-repos": {"run_workflows_from_fork_pull_requests": True},
            },
            "workflows of forks run",
        ),
        (environments(), "environment approve: it does not exist"),
        (environments(**lab_github.CHOSEN), "no required reviewers"),
        (environments(**REVIEWED), "others than the branch main may deploy"),
        (environments(**REVIEWED, deployment_branch_policy={"protected_branches": True, "custom_branch_policies": False}), "others than"),
        (deploying({"name": "*"}), "environment release: others than the branch main may deploy"),
        (deploying({"name": "main"}, {"name": "topic/*"}), "others than the branch main may deploy"),
        (deploying({"name": "main", "type": "tag"}), "others than the branch main may deploy"),
        ({"/actions/runners": {"runners": [*({"name": "x", "ephemeral": True},) * 150, {"name": "old"}]}}, "runner old is not for one job only"),
    ],
)  # fmt: skip
def test_bad_settings_are_refused(hub: Hub, changes: dict[str, Any], message: str) -> None:
    hub.settings |= changes
    status, said = check(hub, REPOSITORY)
    assert (status, said.count("\n"), said.startswith("runner-exposed: ")) == (1, 1, True)
    assert message in said


def test_machine_where_others_may_write_or_its_users_have_rights_is_refused(hub: Hub, tmp_path: Path) -> None:
    # Other fixtures have folders beside it.
    (folder := tmp_path / "machine").mkdir()
    assert "There is no runner.env or github-token" in check(hub, SPARKWRIGHT_CONFIG_FOLDER=str(folder))[1]
    script = runpy.run_path(str(SCRIPT))
    faults = script["machine_faults"]
    faults.__globals__.update(CONFIG=folder, HERE=folder, UNIT=folder / "none", SUDOERS=folder / "sudoers", USERS=("nobody",))
    assert [*faults()] == ([f"others than root can write {folder}"] if os.geteuid() else [])
    folder.chmod(0o777)
    (folder / "sudoers").write_text("nobody ALL=(ALL) NOPASSWD: ALL")
    faults.__globals__["USERS"] = ("nobody", "root", "no-such-user")
    said = "\n".join(faults())
    for fault in (f"write {folder}\n", "sudoers names the user nobody", "the user root is in", "no-such-user does not exist"):
        assert fault in said
