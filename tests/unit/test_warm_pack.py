"""Starts: what each part took, and warm packs, which are made of a start, refused unless signed for this machine, and given as a copy."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tarfile
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.refusals import refusal
from tests.support import packs, processes, standin, tars, wheels

from sparkwright.bench.model.checkpoint import model_digest
from sparkwright.bench.server import server_log, warm_pack
from sparkwright.bench.server.launch import LaunchPlan
from sparkwright.builder import host_info
from sparkwright.client.environment import MARKER as MARKER_FILE, PACKS, Marker
from sparkwright.client.records import WarmPack
from sparkwright.core import process, store
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import Project
from sparkwright.gates.core.night import Night
from sparkwright.gates.core.server_under_test import GateOptions
from sparkwright.serving import launch

ROOT = Path(__file__).parents[2]
MARKER = Marker(
    name="spark.1", folder="", index="", python="3.11.2", key="c" * 64, packages={}, channel="verified", wheels={"vllm": "a" * 64, "rich": "b" * 64}
)


def tree(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.fixture(name="packed")
def _packed(tmp_path: Path) -> WarmPack:
    """Return a pack that is installed in the environment ``tmp_path/release``."""
    return packs.install(tmp_path / "release", *packs.pack(tmp_path))


def test_a_pack_holds_what_another_machine_needs_and_equal_starts_give_equal_bytes(tmp_path: Path) -> None:
    archive, pack = packs.pack(tmp_path)
    warm_pack.unpack(archive, pack.unpacked, tmp_path / "out")
    assert sorted(tree(tmp_path / "out")) == sorted((packs.GRAPH, packs.KERNEL, packs.TABLE))
    assert pack.tables == 1
    os.utime(tmp_path / "cold" / process.CACHES / packs.KERNEL, (1, 1))
    (tmp_path / "cold" / process.CACHES / packs.GRAPH).chmod(0o600)
    warm_pack.collect(tmp_path / "cold", tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == archive.read_bytes()


def test_a_pack_that_is_not_whole_does_not_replace_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive, _ = packs.pack(tmp_path)
    before = archive.read_bytes()
    monkeypatch.setattr(warm_pack, "pack_files", lambda root: [root / process.CACHES / packs.GRAPH, root / process.CACHES / "gone"])
    with pytest.raises(FileNotFoundError):
        warm_pack.collect(tmp_path / "cold", archive)
    assert archive.read_bytes() == before


@pytest.mark.parametrize(
    "members",
    [
        [tars.member("../out", b"x" * 8)],
        [tars.member("/etc/out", b"x" * 8)],
        [tars.member("a", type=tarfile.SYMTYPE, linkname="/etc/passwd")],
        [tars.member("a", type=tarfile.LNKTYPE, linkname="b")],
        [tars.member("a", type=tarfile.CHRTYPE)],
        [tars.member("a", b"x" * 4), tars.member("a", b"x" * 4)],
        [tars.member("a", b"x" * 4), tars.member("a/b", b"x" * 4)],
        [tars.member("a", b"x" * 9)],
        [tars.member("a", b"x" * 7)],
        # 256 MiB in 8 kB, behind a file that is written.
        [tars.member("a", b"x" * 8), tars.member("b", b"\0" * (1 << 28))],
        [tars.member("a", b"9" * (2 << 20), type=tarfile.XHDTYPE), tars.member("a", b"x" * 8)],
    ],
    ids=["climbs", "absolute", "link", "hard link", "device", "twice", "file as folder", "larger", "smaller", "bomb", "endless header"],
)
def test_an_archive_of_anything_but_the_stated_files_is_refused(tmp_path: Path, members: list[Any]) -> None:
    archive = packs.archive(tmp_path / "bad", *members)
    with pytest.raises(warm_pack.PackInvalid):
        warm_pack.unpack(archive, 8, tmp_path / "folder")
    assert sum(map(len, tree(tmp_path / "folder").values())) <= 8
    assert not (tmp_path / "out").exists()
    assert not Path("/etc/out").exists()


def test_the_key_has_what_may_change_a_graph_and_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_info, "gpus", lambda: (host_info.GpuInfo("NVIDIA GB10", "12.1", "580.95.05"),))
    flags = ("--kv-cache-memory-bytes=1", "--dtype", "float32", "--tool-call-parser=hermes", "--hf-token=geheim")
    variables = {"VLLM_USE_X": "1", "VLLM_API_KEY": "geheim", "VLLM_MEMORY_RESERVE_GIB": "12.2", "VLLM_CACHE_ROOT": "/x", "OMP_NUM_THREADS": "1"}
    key = warm_pack.pack_key(LaunchPlan(Path("python"), tmp_path, flags, variables), "toy-cpu", "d" * 64, MARKER)
    assert key.settings == ("--dtype=float32", "--hf-token=***", "VLLM_USE_X=1")
    assert key.wheels == {"vllm": "a" * 64}
    assert (key.gpu, key.driver) == (packs.KEY.gpu, packs.KEY.driver)


def test_what_a_server_makes_beside_its_pack_is_counted_and_never_reaches_the_pack(tmp_path: Path, packed: WarmPack) -> None:
    release = tmp_path / "release"
    warm_pack.prepare(release, packed)
    overlay = warm_pack.overlay(release, packed)
    before = tree(release / process.CACHES / PACKS)
    assert warm_pack.additions(overlay) == ([], [])
    # The graph is written again, and a kernel and a table are new; a lock counts for nothing.
    kernel, table = "triton/CD/new.cubin", ".cache/flashinfer/autotune/v2/y.json"
    packs.start(overlay, packs.GRAPH, kernel, table, "vllm/b.lock")
    warm_pack.prepare(release, packed)
    assert warm_pack.additions(overlay) == ([kernel, packs.GRAPH], [table])
    assert tree(release / process.CACHES / PACKS) == before


def test_a_kill_at_any_step_leaves_no_half_overlay_and_the_next_start_makes_it(tmp_path: Path, packed: WarmPack) -> None:
    release, step = tmp_path / "release", 1
    folder = warm_pack.overlay(release, packed)
    while processes.kill_at(step, partial(warm_pack.prepare, release, packed), "/warm"):
        whole = [path for path in folder.parent.glob("[!.]*") if path.is_dir()]
        assert all(len(tree(path)) == 3 for path in whole)
        step += 1
    assert step > 8
    assert len(tree(folder)) == 3
    assert not list(folder.parent.glob(".unfinished-*"))


def test_servers_that_start_at_once_share_one_whole_overlay(tmp_path: Path, packed: WarmPack) -> None:
    release = tmp_path / "release"
    with ProcessPoolExecutor(4, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(warm_pack.prepare, [release] * 4, [packed] * 4))
    assert len(tree(warm_pack.overlay(release, packed))) == 3


def test_a_full_disk_leaves_no_half_overlay(tmp_path: Path) -> None:
    """The disk is small from the beginning, or fills while the pack is unpacked."""
    big = packs.start(tmp_path / "cold", "a")
    (big / process.CACHES / "a").write_bytes(os.urandom(3 << 20))
    archive = tmp_path / "x.tar.zst"
    packed = packs.record(archive, warm_pack.collect(big, archive)[0])
    release = tmp_path / "release"
    packs.install(release, archive, packed)
    warm = release / process.CACHES / "warm"
    warm.mkdir()
    code = "import sys; from pathlib import Path; from sparkwright.bench.server import warm_pack as w; w.check_room = lambda *_: None\nw.prepare(Path(sys.argv[1]), *w.installed(Path(sys.argv[1]), 'toy-cpu'))"
    script = f'mount -t tmpfs -o size=2m,mode=700 none "{warm}" && ! "{sys.executable}" -c "$CODE" "{release}" && ls -A "{warm}"'
    done = subprocess.run([*processes.mounting_shell(), script], env={**os.environ, "CODE": code}, capture_output=True, text=True, check=False)
    assert "disk-full" in done.stderr or "no room" in done.stderr, done.stderr
    assert [line for line in done.stdout.split() if line != ".lock"] == []


def test_the_pack_of_a_night_is_for_what_serve_starts(tmp_path: Path) -> None:
    """A night that is killed while it writes the pack has none, or a whole one."""
    environment, model = tmp_path / "prefix" / "releases" / "spark.1", standin.model(tmp_path / "toy")
    python, wheel = standin.environment(environment), wheels.plain(tmp_path, "tiny", "1.0")
    store.write_file(environment / MARKER_FILE, msgspec.json.encode(msgspec.structs.replace(MARKER, folder=str(environment))))
    context = RunContext(Project(ROOT, "2026.11"), store.Store(tmp_path / "store"), (), tmp_path / "out", offline=True)
    night = Night(context, GateOptions(wheel=wheel, serve=model, recipe="toy-cpu"), "b" * 64, (python, python))
    cold, step = packs.start(tmp_path / "cold"), 1
    while processes.kill_at(step, partial(night._collect, cold, MARKER, 279.04), "/store/"):
        night._find_pack()
        if night._pack:
            warm_pack.unpack(night._archive, night._pack.unpacked, tmp_path / f"unpacked {step}")
        step += 1
    assert step > 6
    night._collect(cold, MARKER, 279.04)
    served = launch.plan(launch.ServeRequest(recipe="toy-cpu", model=str(model)), python, ROOT)
    assert night._pack
    assert night._pack.key == warm_pack.pack_key(served.launch, "toy-cpu", model_digest(model), MARKER)


#: Lines of 0.33.0: two workers, a graph that is found and one that is not, and two tunings, one over the turn of the year.
LOG = """\
(APIServer pid=1) INFO 12-31 23:59:30 [api_utils.py:286] non-default args: {'model': 'x'}
(EngineCore pid=2) INFO 12-31 23:59:40 [core.py:133] Initializing a V1 LLM engine (v0.33.0) with config: x
(Worker_TP0 pid=3) INFO 12-31 23:59:41 [model_runner.py:428] Model loading took 3.2 GiB memory and 20.500000 seconds
(Worker_TP1 pid=4) INFO 12-31 23:59:41 [model_runner.py:428] Model loading took 3.2 GiB memory and 21.500000 seconds
(Worker_TP0 pid=3) INFO 12-31 23:59:42 [decorators.py:326] [backbone] Directly load AOT compilation from path /a/model
(Worker_TP0 pid=3) INFO 12-31 23:59:42 [monitor.py:80] [backbone] torch.compile took 0.40 s in total
(Worker_TP0 pid=3) WARNING 12-31 23:59:43 [decorators.py:340] [eagle_head] Compiling model again due to a load failure from /a/model, reason: x
(Worker_TP0 pid=3) INFO 12-31 23:59:50 [decorators.py:752] [eagle_head] saved AOT compiled function to /a/model
(Worker_TP0 pid=3) INFO 12-31 23:59:50 [monitor.py:80] [eagle_head] torch.compile took 7.00 s in total
(Worker_TP0 pid=3) INFO 12-31 23:59:51 [autotuner.py:1048] [Autotuner]: Autotuning process starts ...
(Worker_TP0 pid=3) INFO 12-31 23:59:52 [autotuner.py:2064] [Autotuner]: Config cache hit for fp4_gemm (runner=x, source=managed cache)
(Worker_TP0 pid=3) INFO 12-31 23:59:56 [autotuner.py:1071] [Autotuner]: Autotuning process ends
(Worker_TP0 pid=3) INFO 12-31 23:59:56 [autotuner.py:1048] [Autotuner]: Autotuning process starts ...
(Worker_TP0 pid=3) INFO 01-01 00:00:06 [autotuner.py:1071] [Autotuner]: Autotuning process ends
(Worker_TP0 pid=3) INFO 01-01 00:00:07 [kernel_warmup.py:190] JIT kernel warmup finished in 1.25s.
(Worker_TP0 pid=3) INFO 01-01 00:00:09 [model_runner.py:1163] Graph capturing finished in 12 secs, took 0.70 GiB
(EngineCore pid=2) INFO 01-01 00:00:09 [core.py:402] init engine (profile, create kv cache, warmup model) took 30.10 s (compilation: 7.40 s)
INFO:     Application startup complete.
(Worker_TP0 pid=3) INFO 01-01 00:10:00 [monitor.py:80] [x] torch.compile took 999.00 s in total
"""


def test_parts_of_a_start_are_those_of_the_slowest_process_with_what_was_cached(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(LOG)
    parts = {part.name: (part.seconds, part.counts) for part in server_log.read_start(tmp_path / "log").parts()}
    assert parts == {
        "engine's imports": (10, {}),
        "weights": (21.5, {}),
        "torch.compile": (7.4, {"loaded": 1, "compiled": 1, "that could not be loaded": 1}),
        "tuning": (15, {"found": 1}),
        "JIT warm-up": (1.25, {}),
        "graph capture": (12, {}),
        "engine": (30.1, {}),
        "from the first line to the last": (39, {}),
    }


def test_a_log_without_a_line_of_vllm_is_refused(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"\0\xff" * 100_000)
    for name in ("log", "none"):
        with refusal("file-invalid"):
            server_log.read_start(tmp_path / name)


def test_a_start_is_explained_when_it_answers_with_what_its_pack_did_not_hold(machine: standin.Machine, tmp_path: Path) -> None:
    """The server still has the pid that was started, and gets its signals; what it prints behind the table is seen, too."""
    release = tmp_path / "releases" / "spark.1"
    machine.python = standin.environment(release)
    marker = msgspec.structs.replace(MARKER, folder=str(release))
    store.write_file(release / MARKER_FILE, msgspec.json.encode(marker))
    plan = launch.plan(launch.ServeRequest(recipe="toy-cpu", model=str(machine.model), floor=0.0), machine.python, ROOT).launch
    archive = tmp_path / "toy.pack.tar.zst"
    size, _ = warm_pack.collect(packs.start(tmp_path / "cold", packs.KERNEL), archive)
    key = warm_pack.pack_key(plan, "toy-cpu", model_digest(machine.model), marker)
    packs.install(release, archive, packs.record(archive, size, key=key))
    child = machine.start("toy-cpu", "--explain-start")
    machine.until_healthy()
    assert machine.told()["pids"][0] == child.pid
    child.send_signal(signal.SIGTERM)
    printed, warnings = child.communicate(timeout=60)
    assert child.returncode == -signal.SIGTERM
    ready, table = printed.index(server_log.READY), printed.index("part of the start")
    assert printed.index("Initializing a V1 LLM engine") < ready < table
    assert "imports" in printed[table:]
    # The graph, which the stand-in writes where it finds none.
    assert f"with the warm pack: 1 compiled, 0 tuned\n  {packs.GRAPH}" in printed[table:], warnings


def test_a_stored_log_is_explained_as_a_table_and_as_a_document(machine: standin.Machine) -> None:
    log = machine.folder / "server.log"
    log.write_text(LOG)
    assert "21.5" in machine.verb("serve", f"--explain-start={log}").stdout
    parts = json.loads(machine.verb("serve", f"--explain-start={log}", "--json").stdout)["parts"]
    assert {"name": "graph capture", "seconds": 12.0, "counts": {}} in parts
