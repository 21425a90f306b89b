"""One job on a runner: done, died, filled, lost, refused; each ends clean. GitHub and its runner are stand-ins that really run."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests.refusals import refusal
from tests.support import runnerhub
from tests.support.runnerhub import Hub

from sparkwright.operate.runner import holding, once, processes, registration
from sparkwright.operate.runner.ground import Ground
from sparkwright.operate.runner.journal import Entry, Journal, now

PATIENCE = 60.0


@pytest.fixture
def hub() -> Iterator[Hub]:
    """Return a hub that answers while the test runs."""
    with runnerhub.hub() as server:
        yield server


@pytest.fixture
def here(tmp_path: Path, hub: Hub) -> Iterator[Ground]:
    """Return a machine; whatever a test left running on it is killed."""
    ground = runnerhub.ground(tmp_path, hub.url)
    yield ground
    processes.end(ground.whose)


def done(ground: Ground, hub: Hub) -> Entry:
    """Do one job to its end."""
    entry = once.once(ground, runnerhub.github(hub.url))
    assert entry is not None
    return entry


def clean(ground: Ground) -> bool:
    """Is nothing left of any job?"""
    return not list(ground.work.iterdir()) and not ground.whose()


def until(condition: object, seconds: float = PATIENCE) -> None:
    """Wait for a condition."""
    assert callable(condition)
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def changed(ground: Ground, **changes: dict[str, object]) -> Ground:
    """Return the machine with another policy, unchecked: limits that `policy.load` would refuse make a fault come at once."""
    rules = ground.policy
    for name, values in changes.items():
        rules = msgspec.structs.replace(rules, **{name: msgspec.structs.replace(getattr(rules, name), **values)})
    return msgspec.structs.replace(ground, policy=rules)


def test_a_job_is_done_and_nothing_of_it_is_left(here: Ground, hub: Hub) -> None:
    """The job runs once with a fresh copy of the runner, and files, folders and processes that it leaves are gone afterwards."""
    left = "setsid sh -c 'trap \"\" TERM; sleep 600' >/dev/null 2>&1 & mkdir -p a/b; chmod 0 a/b; ln -s / root; touch ../../home/x"
    hub.job(left)

    entry = done(here, hub)

    assert (entry.event, entry.job, entry.result, entry.reference) == ("ended", "gate", "Succeeded", "")
    assert entry.ended >= 0
    assert entry.cleaned > 0
    assert clean(here)
    assert [one.event for one in here.journal().entries()] == ["began", "job", "ended"]
    assert hub.registered[0]["work_folder"] == "_work"
    assert "self-hosted" in hub.registered[0]["labels"]
    assert Path("/etc").exists()


def test_secrets_stay_secret(here: Ground, hub: Hub, tmp_path: Path) -> None:
    """Neither token nor configuration is on a command line, in the log or the journal, and the token is in no environment of the job's."""
    seen = tmp_path / "seen"
    hub.job(f"cat /proc/[0-9]*/cmdline > {seen} 2>/dev/null || true; env > {seen}.env; echo $ACTIONS_RUNNER_INPUT_JITCONFIG")
    # A runner that shows its configuration.
    runner = tmp_path / "runner" / "run.sh"
    runner.write_text(runner.read_text().replace("told = json", "print(os.environ['ACTIONS_RUNNER_INPUT_JITCONFIG']); told = json", 1))

    done(here, hub)

    kept = b"".join(file.read_bytes() for file in (tmp_path / "state").rglob("*") if file.is_file())
    assert b"***" in kept
    for secret in (runnerhub.TOKEN.encode(), hub.configs[0].encode()):
        assert secret not in seen.read_bytes() + Path(f"{seen}.env").read_bytes() + kept
    assert repr(registration.Registered(1, "a", "SECRET")) == "Registered(number=1, name='a')"


def test_a_stranger_s_job_ends_at_the_hook(here: Ground, hub: Hub, tmp_path: Path) -> None:
    """A job of a pull request ends before its first step, whatever it puts into the environment; one of the schedule goes on."""
    hub.job(f"touch {tmp_path}/ran", hook=True, GITHUB_EVENT_NAME="pull_request", PYTHONPATH="/nowhere", PYTHONSTARTUP="/nowhere")
    assert done(here, hub).result == "Failed"
    assert not (tmp_path / "ran").exists()

    hub.job(f"touch {tmp_path}/ran", hook=True)
    assert done(here, hub).result == "Succeeded"
    assert (tmp_path / "ran").exists()


def test_a_runner_that_dies_in_a_job_is_said_and_cleaned(here: Ground, hub: Hub) -> None:
    """Killed by the kernel or by itself, the run ends with its reference, and the journal has it."""
    hub.job("touch x; setsid sleep 600 & kill -9 $PPID", hook=False)

    with refusal("runner-died", match="in the middle of 'gate'"):
        done(here, hub)

    assert clean(here)
    assert here.journal().entries()[-1].reference == "runner-died"


def test_a_run_that_is_killed_is_cleaned_by_the_next(here: Ground, hub: Hub, tmp_path: Path) -> None:
    """kill -9 in the middle of a job: the next run ends what the job left running, empties what it wrote, and says that the other died."""
    hub.job("touch big; setsid sh -c 'trap \"\" TERM INT HUP; sleep 600' & sleep 600")
    child = subprocess.Popen([sys.executable, "-m", "tests.support.runnerhub", "once", str(tmp_path)], cwd=runnerhub.ROOT, stderr=subprocess.PIPE)
    try:
        until(lambda: any(entry.event == "job" for entry in here.journal().entries()))
        with refusal("runner-busy"):
            done(here, hub)
    finally:
        child.kill()
        child.communicate()
    until(lambda: list(here.work.iterdir()))
    hub.job("true", name="next")

    assert done(here, hub).job == "next"

    died = next(entry for entry in here.journal().entries() if entry.event == "died")
    assert died.reference == "runner-died"
    assert died.cleaned > 0
    assert here.journal().unfinished() is None
    assert clean(here)


def test_a_run_that_is_told_to_end_ends_clean(here: Ground, hub: Hub, tmp_path: Path) -> None:
    """SIGTERM in the middle of a job ends the job, cleans, and is written down."""
    hub.job("trap '' TERM; sleep 600")
    child = subprocess.Popen([sys.executable, "-m", "tests.support.runnerhub", "once", str(tmp_path)], cwd=runnerhub.ROOT, stderr=subprocess.PIPE)
    try:
        until(lambda: any(entry.event == "job" for entry in here.journal().entries()))
        child.terminate()
        child.communicate(timeout=PATIENCE)
    finally:
        child.kill()
        child.wait()

    assert here.journal().entries()[-1].reference == "interrupted"
    assert clean(here)


def test_a_network_that_is_gone_is_said_within_bounds(tmp_path: Path) -> None:
    """Without GitHub there is an end with its reference, no journal entry of a job, and the next run works when GitHub is back."""
    with runnerhub.hub() as server:
        port = server.server_port
    ground = runnerhub.ground(tmp_path, f"http://127.0.0.1:{port}", registration=0.001)
    settings, client = ground.settings, runnerhub.github(ground.settings.api, seconds=0.2)
    waited: list[float] = []
    with refusal("runner-unregistered"):
        registration.register(client, settings, ("self-hosted",), 20, waited.append)
    assert len(waited) >= 3
    assert sum(waited) <= 20
    assert not ground.journal().entries()

    with runnerhub.hub(port) as server:
        server.job("true")
        assert done(ground, server).result == "Succeeded"


def test_a_question_without_an_answer_is_asked_again_by_another_name(here: Ground, hub: Hub) -> None:
    """GitHub's passing faults and a name that is taken cost a pause; a refusal ends the run, with GitHub's own words."""
    hub.faults = [502, 409]
    waited: list[float] = []

    registered = registration.register(runnerhub.github(hub.url), here.settings, ("self-hosted",), 60, waited.append)

    assert len(waited) == 2
    assert len({asked["name"] for asked in hub.registered}) == 3
    assert registered.name == hub.registered[2]["name"]

    hub.faults = [403]
    with refusal("github-refused") as caught:
        registration.register(runnerhub.github(hub.url), here.settings, ("self-hosted",), 60, waited.append)
    assert "as the test asked" in " ".join(caught.value.details)


def test_a_public_repository_is_refused(here: Ground, hub: Hub) -> None:
    """A public repository gets no runner, unless the policy says so and every outsider needs approval."""
    hub.private = False
    with refusal("runner-exposed"):
        done(here, hub)

    approved = msgspec.structs.replace(here, policy=msgspec.structs.replace(here.policy, public="approved"))
    with refusal("runner-exposed", match="some outsiders"):
        done(approved, hub)

    hub.approval = "all_external_contributors"
    hub.job("true")
    assert done(approved, hub).result == "Succeeded"
    assert len(hub.registered) == 1


@pytest.mark.parametrize(
    ("change", "reference"),
    [
        ({"room": {"work_floor": 1 << 30}}, "runner-disk"),
        ({"room": {"memory_floor": 1 << 30}}, "runner-memory"),
        ({"limits": {"job": 0.005}}, "runner-overtime"),
    ],
)
def test_a_job_that_takes_too_much_is_ended(here: Ground, hub: Hub, change: dict[str, dict[str, object]], reference: str) -> None:
    """Disk, memory and time end a job, with their reference; the machine is clean."""
    hub.job("trap '' TERM; sleep 600")

    with refusal(reference):
        done(changed(here, **change), hub)

    assert here.journal().entries()[-1].reference == reference
    assert clean(here)


def test_no_job_begins_without_room(here: Ground, hub: Hub) -> None:
    """Too little disk or memory: GitHub is not even asked."""
    with refusal("runner-unready") as caught:
        done(changed(here, room={"work_start": 1 << 30, "memory_start": 1 << 30}), hub)

    assert len(caught.value.details) == 2
    assert not hub.registered


def test_models_that_changed_are_noticed(here: Ground, hub: Hub) -> None:
    """A job that got at the models does not end well."""
    hub.job(f"echo 4567 > {here.models}/weights")

    with refusal("runner-unfit", match="not what they were"):
        done(here, hub)

    assert here.journal().entries()[-1].reference == "runner-unfit"


def test_a_runner_that_others_can_change_is_refused(here: Ground, hub: Hub, tmp_path: Path) -> None:
    """The program that gets the configuration is root's alone."""
    (tmp_path / "runner" / "run.sh").chmod(0o777)

    with refusal("runner-unfit", match=r"can change .*run\.sh"):
        done(here, hub)

    assert hub.removed == [1]


def test_a_runner_without_a_job_makes_room(here: Ground, hub: Hub) -> None:
    """Where somebody waits for the machine, a runner that waits for a job is taken back from GitHub, unless GitHub has given it one."""
    found: list[Entry | None] = []
    thread = threading.Thread(target=lambda: found.append(once.once(here, runnerhub.github(hub.url))))
    thread.start()
    until(lambda: here.journal().entries())
    with holding.wanting(here), holding.machine(here, PATIENCE):
        assert clean(here)
    thread.join()

    assert found[0] is not None
    assert (found[0].job, found[0].result, found[0].reference) == ("", "none", "")
    assert hub.removed == [1]


def test_a_drained_machine_takes_no_job(here: Ground, hub: Hub) -> None:
    """While it is drained or waited for, a run ends at once and registers nothing."""
    here.draining.touch()
    assert once.once(here, runnerhub.github(hub.url)) is None

    here.draining.unlink()
    with holding.wanting(here):
        assert once.once(here, runnerhub.github(hub.url)) is None
    assert not hub.registered


def test_a_busy_runner_is_not_taken_back(here: Ground, hub: Hub) -> None:
    """GitHub decides who was first: what it calls busy stays registered."""
    hub.busy = {7}
    client = runnerhub.github(hub.url)

    assert not registration.unregister(client, here.settings, registration.Registered(7, "a", "b"))
    assert registration.unregister(client, here.settings, registration.Registered(8, "a", "b"))


def test_the_token_is_read_from_where_only_root_reads(tmp_path: Path) -> None:
    """systemd's credential comes first; a file that others can read is refused."""
    (tmp_path / "github-token").write_text("one\n")
    (tmp_path / "github-token").chmod(0o600)
    (tmp_path / "given").mkdir()
    (tmp_path / "given" / "github-token").write_text("two")
    (tmp_path / "given" / "github-token").chmod(0o400)

    assert registration.token({}, tmp_path) == "one"
    assert registration.token({"CREDENTIALS_DIRECTORY": str(tmp_path / "given")}, tmp_path) == "two"

    (tmp_path / "github-token").chmod(0o640)
    with refusal("runner-unfit", match="Others can read"):
        registration.token({}, tmp_path)
    (tmp_path / "github-token").unlink()
    with refusal("runner-unfit"):
        registration.token({}, tmp_path)


def test_a_journal_survives_a_torn_line(tmp_path: Path) -> None:
    """A line that a crash tore swallows none that comes after it."""
    journal = Journal(tmp_path / "journal.jsonl")
    journal.write(Entry(now(), "a", "began"))
    with journal.path.open("ab") as stream:
        stream.write(b'{"at":1,"run":"a","ev')
    journal.write(Entry(now(), "b", "began"))

    assert [entry.run for entry in journal.entries()] == ["a", "b"]
    unfinished = journal.unfinished()
    assert unfinished is not None
    assert unfinished.run == "b"
