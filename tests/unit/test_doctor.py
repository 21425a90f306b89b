"""The facts about this machine, and the advice for machines that are not here."""

from __future__ import annotations

import http.server
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from sparkwright.builder import host_info
from sparkwright.builder.host_info import Endpoint, GpuInfo, HostInfo, facts
from sparkwright.cli import doctor, main
from sparkwright.cli.doctor import CacheContents, VerbAdvice
from sparkwright.core.console import console
from sparkwright.forks.stack import Project

ROOT = Path(__file__).parents[2]

SPARK = HostInfo(
    processor="Cortex-X925 + Cortex-A725",
    cores=20,
    architecture="aarch64",
    memory=128 * 10**9,
    memory_available=120 * 10**9,
    disk_free=900 * 10**9,
    libc="glibc",
    libc_version="2.39",
    python="3.12.3",
    python_headers=True,
    gpus=(GpuInfo("NVIDIA GB10", "12.1", "580.95.05"),),
    tools={"git": "2.43.0", "gcc": "13.3.0", "g++": "13.3.0"},
    docker="28.2.2",
    container="",
    index=Endpoint("https://index.example/simple/", reachable=True),
    upstream=Endpoint("https://git.example/vllm.git", reachable=True),
)


FULL = CacheContents(sources=True, tools=True, bases=True, demo_tools=True)
EMPTY = CacheContents(sources=False, tools=False, bases=False, demo_tools=False)


def advice(machine: HostInfo, project: Project, cache: CacheContents = EMPTY) -> tuple[VerbAdvice, ...]:
    """Return the advice for *machine*, with an empty cache directory unless *cache* is given."""
    return doctor.advice(machine, project, cache)


@pytest.fixture(name="project")
def _project() -> Project:
    return Project(ROOT, "2026.11")


@pytest.fixture(name="index")
def _index(tmp_path: Path) -> Iterator[str]:
    """A real HTTP server with one project page."""
    (tmp_path / "packaging").mkdir()
    (tmp_path / "packaging" / "index.html").write_text("<!doctype html><title>packaging</title>")

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args: object) -> None:
            super().__init__(*args, directory=str(tmp_path))  # type: ignore[arg-type]  # the server passes what the base takes

        def log_message(self, *_: object) -> None:
            """Say nothing; the test's output is for the test."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def of(found: tuple[VerbAdvice, ...], verb: str) -> list[VerbAdvice]:
    """Return the advice about *verb*."""
    return [item for item in found if item.verb == verb]


def states(found: tuple[VerbAdvice, ...]) -> dict[str, set[str]]:
    """Return the states by verb."""
    return {item.verb: {other.state for other in of(found, item.verb)} for item in found}


def test_a_spark_with_its_network_is_ready(project: Project) -> None:
    """A DGX Spark with a connection can do everything; only its newer glibc and the absent gates need a look."""
    found = states(advice(SPARK, project))

    assert {"ready"} == found["lock"] == found["fetch"] == found["apply"] == found["plan"] == found["audit"] == found["demo"]
    assert {"ready", "look"} == found["build"]
    assert {"look"} == found["gate"]


def test_jobs_are_limited_by_memory_as_well_as_cores(project: Project) -> None:
    """Twenty of the largest units do not fit into a Spark, and one runs even where none should fit."""
    assert doctor.jobs(SPARK, project) == 13
    assert doctor.jobs(msgspec.structs.replace(SPARK, cores=2, memory=24 * 1024**3), project) == 2
    assert doctor.jobs(msgspec.structs.replace(SPARK, cores=8, memory=16 * 1024**3), project) == 1
    assert doctor.jobs(msgspec.structs.replace(SPARK, memory=4 * 1024**3), project) == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"memory": 8 * 1024**3}, "of memory is less than"),
        ({"disk_free": 20 * 10**9}, "of free disk is less than 25.00 GB"),
        ({"libc_version": "2.41"}, "as far as manylinux_2_41"),
    ],
)
def test_build_warns_about_a_tight_machine(project: Project, change: dict[str, object], words: str) -> None:
    """Little memory, little disk and a newer glibc do not forbid the build, and are said."""
    warnings = [item.says for item in of(advice(msgspec.structs.replace(SPARK, **change), project), "build") if item.state == "look"]

    assert any(words in says for says in warnings)


@pytest.mark.parametrize("missing", ["gcc", "g++"])
def test_a_missing_compiler_comes_with_its_command(project: Project, missing: str) -> None:
    """Whatever compiles is missing its compiler, and the command to install it is there; audit works all the same."""
    bare = msgspec.structs.replace(SPARK, tools={name: version for name, version in SPARK.tools.items() if name != missing})
    found = advice(bare, project)

    for verb in ("plan", "build", "demo"):
        assert [(item.state, item.install) for item in of(found, verb)] == [("missing", "sudo apt-get install -y g++")]
    assert {"ready"} == states(found)["audit"]


@pytest.mark.parametrize("change", [{"architecture": "riscv64"}, {"libc": "unknown", "libc_version": ""}])
def test_a_machine_without_a_base_wheel_cannot_graft(project: Project, change: dict[str, object]) -> None:
    """Other processors and other C libraries have no official wheel to graft onto."""
    found = states(advice(msgspec.structs.replace(SPARK, **change), project))

    assert {"missing"} == found["plan"] == found["build"]


@pytest.mark.parametrize(
    ("gpus", "state", "words"),
    [
        ((), "not-run", "no GPU here"),
        ((GpuInfo("NVIDIA H200", "9.0", "580.65.06"),), "not-run", "is SM 9.0"),
        ((GpuInfo("NVIDIA GB10", "12.1", "570.10"),), "look", "driver 580 or newer"),
        ((GpuInfo("NVIDIA GB10", "12.1", "580.95.05"),), "look", "the GPU that the wheels are for"),
    ],
)
def test_gates_run_only_on_the_right_gpu(project: Project, gpus: tuple[GpuInfo, ...], state: str, words: str) -> None:
    """Without a GPU, or with another one, gates are not-run, never passed."""
    (found,) = of(advice(msgspec.structs.replace(SPARK, gpus=gpus), project), "gate")

    assert (state, True) == (found.state, words in found.says)


def test_unreachable_hosts_change_what_lock_and_fetch_do(project: Project) -> None:
    """Without the upstream host the index is used; without the index only the cache directory is left."""
    no_git = msgspec.structs.replace(SPARK, upstream=Endpoint("https://git.example/vllm.git", reachable=False, note="no route"))
    alone = msgspec.structs.replace(no_git, index=Endpoint("https://index.example/", reachable=False, note="no route"))

    assert {"look"} == states(advice(no_git, project))["lock"] == states(advice(no_git, project))["fetch"]
    assert {"missing"} == states(advice(alone, project))["lock"]
    assert "no route" in of(advice(alone, project), "fetch")[0].says


def test_without_a_network_only_cached_downloads_make_a_verb_ready(project: Project) -> None:
    """With an empty cache every verb that downloads is missing; a filled one makes it ready again."""
    unreachable = Endpoint("https://index.example/", reachable=False, note="no route")
    alone = msgspec.structs.replace(SPARK, index=unreachable, upstream=unreachable)

    for verb in ("apply", "plan", "build", "audit", "demo"):
        (item,) = of(advice(alone, project), verb)
        assert (item.state, "cache directory lacks" in item.says) == ("missing", True)
        assert "ready" in states(advice(alone, project, FULL))[verb]
    no_bases = msgspec.structs.replace(FULL, bases=False)
    assert states(advice(alone, project, no_bases))["plan"] == {"ready"}
    assert of(advice(alone, project, no_bases), "build")[0].says.endswith("lacks official wheels")


def test_facts_of_this_machine_are_plausible(tmp_path: Path, index: str) -> None:
    """Real probes on the machine that runs the tests; an absent cache directory is judged by its parent."""
    machine = facts(tmp_path / "absent" / "cache", index, str(tmp_path / "no.git"))

    assert machine.cores >= 1
    assert machine.memory >= machine.memory_available > 0
    assert machine.disk_free > 0
    assert machine.tools["git"][0].isdigit()
    assert Endpoint(index, reachable=True) == machine.index
    assert not machine.upstream.reachable
    assert machine.upstream.note


def test_an_index_that_refuses_is_not_reached(index: str) -> None:
    """An answer other than the page is not an index."""
    assert host_info.reach_index(f"{index}nothing-here").note == "HTTP status 404"


def test_credentials_of_the_index_are_not_shown(tmp_path: Path) -> None:
    """A user's name and password stay out of the facts, whether the index answers or not."""
    address = "http://anna:geheim@127.0.0.1:9/simple/"

    assert "geheim" not in repr(facts(tmp_path, address, "", offline=True)) + repr(host_info.reach_index(address))


def test_a_host_that_never_answers_holds_up_nothing(tmp_path: Path) -> None:
    """A server that accepts and stays silent is taken for unreachable within the time limit."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}/"
        began = time.monotonic()
        machine = facts(tmp_path, address, f"{address}vllm.git")

        assert time.monotonic() - began < host_info.PATIENCE + 1
    assert not machine.index.reachable
    assert not machine.upstream.reachable


def test_a_probe_that_hangs_leaves_the_other_answers() -> None:
    """Only the answers that came in time are returned."""
    forever = threading.Event()

    assert host_info.run_probes({"slow": forever.wait, "quick": lambda: 1}, 0.2) == {"quick": 1}
    forever.set()


def test_doctor_prints_one_document_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Under --json standard output is one document with machine and advice."""
    monkeypatch.setattr(console, "json", True)
    main.run(["doctor", "--root", str(ROOT), "--cache-dir", str(tmp_path), "--offline", "--json"])
    console.finish()

    document = msgspec.json.decode(capsys.readouterr().out)
    assert document.keys() == {"schema", "machine", "stack", "advice"}
    assert msgspec.convert(document["machine"], HostInfo).cores >= 1
