"""Set-up as data: what the policy may say, what follows from it, and what a folder looks like afterwards."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.refusals import refusal
from tests.support import runnerhub
from tests.support.runnerhub import GOOD, ROOT

from sparkwright.cli.main import main, run
from sparkwright.core import strict_yaml
from sparkwright.operate.runner import (
    admit,
    egress,
    fitness,
    labels,
    perform,
    plan,
    policy,
    registration,
    unit,
)
from sparkwright.operate.runner.labels import Machine
from sparkwright.operate.runner.place import Place
from sparkwright.operate.runner.policy import Policy, Settings
from sparkwright.operate.runner.steps import (
    AsApplied,
    Exists,
    File,
    Folder,
    Gone,
    Run,
    Step,
    printed,
)

SETTINGS = Settings("acme/lab", "spark-a", ("gb10",))
SPARK = Machine(("12.1",), 128_000)


@pytest.fixture
def reviewed() -> Policy:
    """Return the reviewed policy."""
    return policy.load(ROOT / "ci" / "runner.yaml")


def test_the_policy_stays_itself_when_it_is_written(reviewed: Policy, tmp_path: Path) -> None:
    """What set-up writes for the units reads as what was reviewed."""
    (tmp_path / "x.yaml").write_text(strict_yaml.dump(reviewed))

    assert policy.load(tmp_path / "x.yaml") == reviewed


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("user", "root; rm"), ("user", "a b"), ("folders.work", "/srv/models/x"), ("folders.state", "relative"), ("folders.config", "/a b"),
        ("folders.models", "/x\nExecStart=/bin/sh"), ("room.work_start", 1), ("room.memory_start", 1),
        ("room.work", 50000), ("egress.hosts", ["a b"]), ("egress.hosts", ["x } accept"]), ("egress.networks", ["300.0.0.0/8"]),
        ("egress.networks", ["10.0.0.1/8"]), ("egress.ports", [70000]), ("limits.memory_max", "lots"), ("typo", 1),
    ],
)  # fmt: skip
def test_a_policy_that_cannot_be_meant_is_refused(
    reviewed: Policy, tmp_path: Path, field: str, value: Any
) -> None:
    """Names that would be more than names in a unit or a rule, floors above starts, folders in folders: each is an error of the file."""
    record = msgspec.to_builtins(reviewed)
    place, _, name = field.rpartition(".")
    (record[place] if place else record)[name] = value
    (tmp_path / "runner.yaml").write_text(json.dumps(record))

    with refusal("file-invalid"):
        policy.load(tmp_path / "runner.yaml")


def test_every_step_says_why_and_how_it_goes_back(reviewed: Policy) -> None:
    """Each step has a reason, something to do and a check; its undo takes away whatever file it writes, and no model."""
    steps = plan.steps(reviewed, SETTINGS)

    assert len({step.name for step in steps}) == len(steps)
    for step in steps:
        assert step.why
        assert step.apply
        made = {act.path for act in step.apply if isinstance(act, File)}
        gone = {act.path for act in step.undo if isinstance(act, Gone)}
        assert made <= gone, step.name
        assert not any(
            act.path.startswith(reviewed.folders.models)
            for act in step.undo
            if isinstance(act, Gone)
        )
        assert all(printed(act) for act in (*step.apply, *step.undo))


def test_no_command_goes_through_a_shell(reviewed: Policy) -> None:
    """Programs are lists of words, and none of them is a shell."""
    words = [
        act.words
        for step in plan.steps(reviewed, SETTINGS)
        for act in (*step.apply, *step.undo)
        if isinstance(act, Run)
    ]

    assert words
    assert not [one for one in words if Path(one[0]).name in ("sh", "bash", "sudo") or "-c" in one]


def test_root_installs_nothing_by_its_bare_name(reviewed: Policy) -> None:
    """The program comes from a reviewed checkout and what it needs by hash: a name is anybody's."""
    actions = [str(action) for step in plan.steps(reviewed, SETTINGS) for action in step.apply]
    installs = [
        text for action in actions for text in re.findall(r"pip install ([^&'\"]*)", action)
    ]

    assert [text.split()[-1] for text in installs] == [".github/requirements.txt", "."]
    assert "--require-hashes" in installs[0]
    assert {"--no-deps", "--no-build-isolation"} <= set(installs[1].split())


def test_the_unit_holds_the_cage(reviewed: Policy) -> None:
    """The settings that keep a job in are there, with the policy's figures; the token goes by a credential alone."""
    text = unit.service(reviewed)

    for line in (
        "NoNewPrivileges=yes", "ProtectSystem=strict", "ProtectHome=yes", "PrivateTmp=yes", "DevicePolicy=closed", "KillMode=control-group",
        "DeviceAllow=char-nvidia* rw", "DeviceAllow=/dev/kmsg r", "ProtectKernelLogs=no", "ExecStartPre=+/usr/sbin/sysctl --quiet kernel.dmesg_restrict=0",
        f"BindReadOnlyPaths={reviewed.folders.models}", f"MemoryMax={reviewed.limits.memory_max}",
        f"TasksMax={reviewed.limits.tasks}", "LoadCredential=github-token:/etc/sparkwright/github-token",
    ):  # fmt: skip
        assert f"\n{line}\n" in text
    assert "-/run/docker.sock" in text
    assert "Environment" not in text
    assert int(re.findall(r"RuntimeMaxSec=(\d+)", text)[0]) > 60 * (
        reviewed.limits.job + reviewed.limits.idle
    )
    assert unit.escaped("/var/lib/sparkwright-runner/work") == r"var-lib-sparkwright\x2drunner-work"


def test_rules_hold_for_the_job_s_user_alone(reviewed: Policy) -> None:
    """One rule of the hook, by user; names of servers elsewhere only where they are given; what is added is renewed."""
    text = egress.ruleset(reviewed)

    assert text.count("meta skuid") == 1
    assert "policy accept" in text
    assert "dport 53" not in text
    more = msgspec.structs.replace(
        reviewed.egress, resolvers=("fd00::1",), networks=("10.1.0.0/16",)
    )
    named = msgspec.structs.replace(reviewed, egress=more)
    assert "ip6 daddr fd00::1 meta l4proto { tcp, udp } th dport 53 accept" in egress.ruleset(named)
    assert "elements = { 10.1.0.0/16 }" in egress.ruleset(named)
    lines = egress.refreshed(reviewed, ["1.2.3.4", "1.2.3.4", "2001:db8::1"]).splitlines()
    assert [line.split()[0] for line in lines] == ["add", "delete", "add"] * 2
    assert lines[2].endswith("hosts4 { 1.2.3.4 timeout 120m }")
    with pytest.raises(ValueError, match="does not appear"):
        egress.refreshed(reviewed, ["1.2.3.4 } ; flush ruleset"])


def test_names_become_addresses_one_by_one() -> None:
    """A name that leads nowhere is told and costs the others nothing; addresses of this machine are not believed."""

    def resolve(host: str) -> tuple[str, ...]:
        if host == "gone":
            raise OSError
        return ("2.2.2.2", "1.1.1.1") if host == "a" else ("1.1.1.1",)

    found = egress.resolved(["a", "gone", "b"], resolve)

    assert found == egress.Resolved(("1.1.1.1", "2.2.2.2"), ("gone",))
    assert egress.addresses("localhost") == ()


def test_the_package_index_is_on_the_list(reviewed: Policy) -> None:
    """Jobs may reach the index that was configured at set-up, beside the hosts of the policy."""
    assert egress.index() == "127.0.0.1"
    named = msgspec.structs.replace(SETTINGS, index="index.example")
    assert egress.names(reviewed, named) == (*reviewed.egress.hosts, "index.example")
    assert egress.names(reviewed, SETTINGS) == reviewed.egress.hosts


def test_units_and_hook_need_no_home(tmp_path: Path) -> None:
    """In the cage there is no home and no cache: what runs there works without, and the hook says yes and no by its exit status."""
    ground = runnerhub.ground(tmp_path)
    cage = {"HOME": "/proc/none", "PATH": "/usr/bin:/bin"}
    hook = ["bash", "-e", str(ground.config / plan.HOOK)]
    assert (
        subprocess.run(hook, env={**cage, **GOOD}, capture_output=True, check=False).returncode == 0
    )
    refused = subprocess.run(
        hook,
        env={**cage, **GOOD, "GITHUB_REF": "refs/pull/1/merge"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert refused.returncode == 1
    assert "runner-refused" in refused.stderr
    for action in ("once", "clean", "egress"):
        words = [
            sys.executable,
            "-m",
            "sparkwright",
            "lab",
            "runner",
            action,
            "--config",
            str(tmp_path / "none"),
        ]
        done = subprocess.run(words, env=cage, capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert re.search("error: (file-invalid|runner-setup)", done.stderr), done.stderr


def test_a_label_is_carried_where_it_is_true(reviewed: Policy) -> None:
    """gb10 needs a GPU of 12.1; a Spark has every label."""
    assert labels.true_of(reviewed, Machine((), 16_000)) == ()
    assert labels.true_of(reviewed, Machine(("9.0",), 2_000_000)) == ("spark-build",)
    everything = labels.true_of(reviewed, SPARK)
    assert set(everything) == {"gb10", "spark-gate", "spark-build"}
    settings = Settings("acme/lab", "a", everything)
    assert {"gb10", "spark-gate", "self-hosted"} <= set(labels.carried(reviewed, settings))
    assert list(labels.wrong(reviewed, settings, SPARK)) == []
    assert "12.1" in next(iter(labels.wrong(reviewed, SETTINGS, Machine(("8.9",), 128_000))))
    assert "does not know" in next(
        iter(labels.wrong(reviewed, Settings("a/b", "a", ("x", "gb10")), SPARK))
    )
    assert list(labels.wrong(reviewed, Settings("a/b", "a"), SPARK)) == [
        "no label of the policy, so no job comes here"
    ]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("GITHUB_EVENT_NAME", "pull_request"), ("GITHUB_EVENT_NAME", "pull_request_target"), ("GITHUB_EVENT_NAME", ""),
        ("GITHUB_REPOSITORY", "stranger/lab"), ("GITHUB_REPOSITORY", ""), ("GITHUB_REF", "refs/pull/7/merge"),
        ("GITHUB_REF", "refs/heads/x"), ("GITHUB_REF", "main"),
        ("GITHUB_WORKFLOW_REF", "stranger/lab/.github/workflows/x.yml@refs/heads/main"),
        ("GITHUB_WORKFLOW_REF", "acme/lab/.github/workflows/x.yml@refs/pull/7/merge"), ("GITHUB_WORKFLOW_REF", ""),
        ("GITHUB_WORKFLOW_REF", "acme/lab/.github/workflows/x.yml"),
    ],
)  # fmt: skip
def test_the_hook_refuses_what_a_stranger_causes(
    reviewed: Policy, tmp_path: Path, name: str, value: str
) -> None:
    """Another repository, event, branch or workflow ends a job before its first step."""
    assert admit.admitted(GOOD, reviewed, SETTINGS) == ""
    with refusal("runner-refused"):
        admit.admit({**GOOD, name: value}, reviewed, SETTINGS)


@given(told=st.dictionaries(st.sampled_from(admit.TOLD), st.text(max_size=60)))
def test_the_hook_takes_any_text(told: dict[str, str]) -> None:
    """Whatever GitHub might say, the answer is a line, and never yes by accident."""
    reason = admit.admitted(told, policy.load(ROOT / "ci" / "runner.yaml"), SETTINGS)

    assert reason
    assert reason.isprintable()


@given(patience=st.floats(0, 5000), chance=st.floats(0, 1))
def test_pauses_grow_and_end(patience: float, chance: float) -> None:
    """However long GitHub may be waited for, the pauses together are no longer, and none is longer than a minute."""
    waited = list(registration.pauses(patience, lambda: chance))

    assert sum(waited) <= patience
    assert all(pause <= registration.LONGEST for pause in waited)
    assert patience < 2 or waited


def here(folder: Path) -> Place:
    """Return a machine below *folder* whose root user is this one, so that no right is needed."""
    (folder / "etc").mkdir(parents=True, exist_ok=True)
    (folder / "etc" / "passwd").write_text(f"root:x:{os.getuid()}:{os.getgid()}::/:/bin/sh\n")
    return Place(folder)


FILE = File("/etc/x/file", "text\n", 0o640)
STEP = Step(
    name="a",
    what="b",
    why="c",
    check=AsApplied(),
    apply=(Folder("/etc/x", 0o750), FILE),
    undo=(Gone(FILE.path), Gone("/etc/x")),
)


def test_what_is_done_is_not_done_again(tmp_path: Path) -> None:
    """A second set-up does nothing; what somebody changed is put back; undone, nothing of it is left."""
    place = here(tmp_path)
    done: list[Step] = []
    assert perform.stand(STEP, place).state == "missing"
    assert perform.set_up((STEP,), place, done.append)[0].state == "there"
    perform.set_up((STEP,), place, done.append)
    assert done == [STEP]

    for change in (
        lambda: (tmp_path / "etc/x/file").write_text("other"), lambda: (tmp_path / "etc/x/file").chmod(0o666),
        lambda: (tmp_path / "etc/x").chmod(0o777), (tmp_path / "etc/x/file").unlink,
    ):  # fmt: skip
        change()
        assert perform.stand(STEP, place).state == "differs"
        assert perform.set_up((STEP,), place)[0].state == "there"
    assert perform.take_back((STEP,), place)[0].state == "missing"
    assert not (tmp_path / "etc" / "x").exists()
    perform.take_back((STEP,), place)


def test_a_link_in_the_place_of_a_file_is_replaced_and_not_followed(tmp_path: Path) -> None:
    """What a link points to stays as it is; in the place of a folder it is an error."""
    place = here(tmp_path)
    (tmp_path / "etc" / "x").mkdir()
    (tmp_path / "victim").write_text("kept")
    (tmp_path / "etc/x/file").symlink_to(tmp_path / "victim")
    perform.set_up((STEP,), place)
    assert (tmp_path / "victim").read_text() == "kept"
    assert not (tmp_path / "etc/x/file").is_symlink()

    (tmp_path / "etc/y").symlink_to("/nowhere")
    with refusal("runner-setup"):
        perform.set_up((msgspec.structs.replace(STEP, apply=(Folder("/etc/y"),)),), place)


def test_a_step_that_does_not_hold_is_an_error(tmp_path: Path) -> None:
    """A command that fails, a user who is not there, a check that does not hold: each ends set-up with the step's name."""
    place = here(tmp_path)
    for act in (File("/etc/x", "", owner="nobody-here"), Run(("false",))):
        with refusal("runner-setup", match="'a'"):
            perform._do(STEP, act, place)
    with refusal("runner-setup", match="does not hold"):
        perform.set_up(
            (msgspec.structs.replace(STEP, apply=(Folder("/etc/z"),), check=Exists("/etc/none")),),
            place,
        )
    with refusal("tool-missing", match="no-such-program"):
        perform.set_up((msgspec.structs.replace(STEP, apply=(Run(("no-such-program",)),)),), place)


def test_plan_says_everything_and_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """plan needs no rights and no network; with --json it gives the steps as they would be done."""
    command = [
        "lab",
        "runner",
        "plan",
        "--repository",
        "acme/lab",
        "--name",
        "spark-a",
        "--sysroot",
        str(tmp_path / "bare"),
        "--root",
        str(ROOT),
    ]
    assert main([*command, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [step["name"] for step in document["steps"]][:2] == ["user", "folders"]
    assert {one["state"] for one in document["stands"]} <= {"missing", "by-hand", "not-run"}
    assert not (tmp_path / "bare").exists()

    assert main(command) == 0
    said = capsys.readouterr().out
    assert "useradd --system" in said
    assert "NoNewPrivileges=yes" in said


@pytest.mark.parametrize(
    "words",
    [
        [], ["--repository", "no-slash"], ["--repository", "a/b", "--name", "Not A Name"], ["--repository", "a/b", "--labels", "unknown"],
        ["--repository", "a/b", "--labels", "gb10"], ["--repository", "a/../b"],
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_wrong_usage(words: list[str]) -> None:
    """A name that is none, a label that is not true here: usage, before anything is done."""
    if not labels.true_of(policy.load(ROOT / "ci" / "runner.yaml"), Machine.here()):
        with refusal("usage"):
            run(["lab", "runner", "plan", "--root", str(ROOT), *words])


def test_setup_of_an_exposed_checkout_is_refused(tmp_path: Path) -> None:
    """A checkout whose workflow lets a pull request onto our labels is not set up."""
    (tmp_path / "ci").mkdir()
    (tmp_path / "ci" / "runner.yaml").write_bytes((ROOT / "ci" / "runner.yaml").read_bytes())
    (tmp_path / "forks").symlink_to(ROOT / "forks")
    (tmp_path / ".github" / "workflows").mkdir(parents=True)
    (tmp_path / ".github" / "workflows" / "x.yml").write_text(
        "on: pull_request\njobs:\n  a:\n    runs-on: [self-hosted, gb10]\n"
    )

    with refusal("runner-exposed") as caught:
        run(
            ["lab", "runner", "plan", "--root", str(tmp_path), "--repository", "a/b", "--name", "a"]
        )
    assert "x.yml a: pull_request" in caught.value.details[0]


def test_setup_says_yes_first(tmp_path: Path) -> None:
    """Without --yes nothing is changed; without root neither."""
    with refusal("usage" if os.geteuid() == 0 else "runner-setup"):
        run(
            [
                "lab",
                "runner",
                "setup",
                "--root",
                str(ROOT),
                "--repository",
                "a/b",
                "--name",
                "a",
                "--sysroot",
                str(tmp_path / "bare"),
            ]
        )
    assert not (tmp_path / "bare").exists()


def test_a_machine_that_was_not_set_up_is_said(tmp_path: Path) -> None:
    """check, once and the rest name what is missing."""
    with refusal("file-invalid"):
        run(["lab", "runner", "check", "--config", str(tmp_path)])
    ground = runnerhub.ground(tmp_path)
    (tmp_path / "etc").mkdir()
    with refusal("runner-setup", match="no user"):
        run(["lab", "runner", "check", "--config", "/config", "--sysroot", str(tmp_path)])
    (tmp_path / "etc" / "passwd").write_text(f"{ground.policy.user}:x:0:0::/:/bin/sh\n")
    with refusal("runner-setup", match="is root"):
        run(["lab", "runner", "check", "--config", "/config", "--sysroot", str(tmp_path)])


def test_what_a_user_can_write_is_found_by_trying(tmp_path: Path) -> None:
    """A folder of ours can be written; a file in it, too; what is not there cannot."""
    (tmp_path / "file").write_text("")
    assert "make files" in fitness.writable(tmp_path)
    assert fitness.readable(str(tmp_path / "file"))
    assert not fitness.readable(str(tmp_path / "none"))
    assert not fitness.reachable([str(tmp_path / "file"), str(tmp_path / "none")])
    if os.geteuid() == 0:
        tmp_path.chmod(0o755)
        for parent in tmp_path.parents:
            if Path(tempfile.gettempdir()) in parent.parents:
                parent.chmod(0o755)
        assert fitness.as_user(65534, 65534, Place(), lambda: fitness.writable(tmp_path)) == ""
        (tmp_path / "file").chmod(0o666)
        assert "file" in fitness.as_user(65534, 65534, Place(), lambda: fitness.writable(tmp_path))


def test_the_verb_is_there(tmp_path: Path) -> None:
    """`sparkwright lab runner --help` names every action."""
    done = subprocess.run(
        [sys.executable, "-m", "sparkwright", "lab", "runner", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )

    from sparkwright.cli.lab import ACTIONS

    assert all(f"{name}:" in " ".join(done.stdout.split()) for name in ACTIONS)
