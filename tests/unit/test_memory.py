"""The memory of a server: what this machine has, what is refused, and that every remedy that is printed is admitted, here and by vLLM's rule."""

import math
import re
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given, strategies as st
from msgspec.structs import replace
from tests.support import processes

from sparkwright.bench.server import flags
from sparkwright.core import memory

SHAPE = memory.CacheShape(10240)

#: What nvidia-smi prints of a GB10, of two GPUs with memory of their own, and of the programs on them.
GB10 = "NVIDIA GB10, [N/A], [N/A]\n"
H200 = "NVIDIA H200, 143771, 120000\nNVIDIA H200, 143771, 1000\n"
APPS = "4242, 59392, /usr/bin/python3\n4343, [N/A], [Not Found]\n"


@pytest.fixture(name="driver")
def _driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder for a driver's tool, the first on the PATH, on a machine whose driver shows no GPU."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(memory, "DRIVER", tmp_path / "gpus")
    monkeypatch.setattr(memory, "PATIENCE", 1.0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


def printing(folder: Path, gpus: str) -> None:
    processes.script(folder / "nvidia-smi", f"case $1 in *compute-apps*) printf '{APPS}';; *) printf '{gpus}';; esac")


def test_memory_is_the_gpus_own_or_the_hosts(driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GB10 does not state its memory, since it has none of its own."""
    host = memory.MachineMemory.here()
    assert (host.gpus, host.shared, host.unified) == (0, True, False)
    assert 0.01 < host.free / host.total <= 1
    printing(driver, GB10)
    spark = memory.MachineMemory.here()
    assert (spark.gpus, spark.unified, spark.total, spark.failure) == (1, True, host.total, "")
    assert memory.Tenant(4242, "python3", 58.0) in spark.tenants
    printing(driver, H200)
    gpu = memory.MachineMemory.here()
    assert (gpu.gpus, gpu.shared, gpu.total, gpu.free, gpu.floor()) == (2, False, 143771 / 1024, 120000 / 1024, 0.0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert memory.MachineMemory.here().free == 1000 / 1024


def test_lines_of_nvidia_smi_that_are_no_rows_are_left_out(driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A warning is no second GPU, a comma in the name of a program is no column, and a driver without a device has none."""
    warning = "WARNING: infoROM is corrupted at gpu 000F:01:00.0\nWARNING: see the manual, page 3, and reboot\n"
    monkeypatch.setattr(psutil, "process_iter", lambda _: ())
    processes.script(driver / "nvidia-smi", f"case $1 in *compute-apps*) printf '{warning}4242, 59392, /opt/a,b/serve,x\n';; *) printf '{warning}{GB10}';; esac")
    here = memory.MachineMemory.here()
    assert (here.gpus, here.unified, here.tenants) == (1, True, (memory.Tenant(4242, "serve,x", 58.0),))
    processes.script(driver / "nvidia-smi", "echo No devices were found")
    assert memory.MachineMemory.here().gpus == 0


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18", "Failed to initialize NVML: Driver/library version mismatch"),
        ("exit 9", "nvidia-smi ended by 9"),
        ("sleep 60", "nvidia-smi did not end within 1 s"),
    ],
)
def test_unified_memory_stays_unified_when_nvidia_smi_fails(driver: Path, script: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the driver's own folder, or where nothing names the GPU, by the processor."""
    processes.script(driver / "nvidia-smi", script)
    information = driver / "gpus" / "000f:01:00.0" / "information"
    information.parent.mkdir(parents=True)
    for text, machine, unified in (("Model: \t NVIDIA GB10\n", "x86_64", True), ("", "aarch64", True), ("Model: NVIDIA RTX\n", "x86_64", False)):
        monkeypatch.setattr("platform.machine", lambda machine=machine: machine)
        information.write_text(text)
        here = memory.MachineMemory.here()
        assert (here.failure, here.gpus, here.unified) == (says, 1, unified)


def vllm_admits(server: memory.ServerMemory, machine: memory.MachineMemory) -> bool:
    """
    Return what vLLM 0.33 decides by its own two rules, written down from its sources; tests/server/test_admission.py asks the code itself.
    """
    settled = server.settled(machine)
    asked = math.ceil(machine.total * memory.GIB * (settled.share or 0.0))
    blocks = math.ceil(server.length / 16) + 1
    return machine.free * memory.GIB >= asked and (settled.cache or 0.0) * memory.GIB >= blocks * 16 * server.shape.token


HELD = (memory.Tenant(7, "python", 58.0), memory.Tenant(8, "gnome", 2.0))
#: Machines by name: both sizes, sound, with a tenant, and with memory that no process is seen to hold.
MACHINES = {
    **memory.SPARKS, "held": replace(memory.SPARKS["128 GB"], free=50.4, tenants=HELD), "lost": replace(memory.SPARKS["128 GB"], free=50.4),
    "small, held": replace(memory.SPARKS["64 GB"], free=9.0, tenants=(memory.Tenant(9, "ollama", 36.0),)), "GPU": memory.MachineMemory(140.4, 139.0, 1),
}  # fmt: skip
#: Servers that something is wrong with, on some of the machines.
SERVERS = {
    "share beyond the floor": memory.ServerMemory(20, cache=8, share=0.95, length=65536, shape=SHAPE),
    "vLLM's default share": memory.ServerMemory(20, cache=20, share=0.92, length=65536, shape=SHAPE),
    "share of a plain model": memory.ServerMemory(20, share=0.7, length=65536, shape=SHAPE),
    "cache too large": memory.ServerMemory(44.2, cache=200, length=65536, shape=SHAPE),
    "cache too short": memory.ServerMemory(22, cache=1, length=262144, shape=SHAPE),
    "length too long": memory.ServerMemory(30, length=1 << 24, shape=memory.CacheShape(160 << 10, 1 << 28)),
    "weights too large": memory.ServerMemory(130, length=65536, shape=SHAPE),
    "weights alone fit": memory.ServerMemory(95, cache=16, length=65536, shape=SHAPE),
    "of unknown shape": memory.ServerMemory(60, cache=70),
    "not downloaded": memory.ServerMemory(0, cache=300),
}


def applied(server: memory.ServerMemory, machine: memory.MachineMemory, text: str) -> tuple[memory.ServerMemory, memory.MachineMemory]:
    """Return what a user has who does what *text* says, by reading it as a user does."""
    words = re.findall(r"--flag=(\S+)", text)
    if cache := flags.number(words, "--kv-cache-memory-bytes"):
        server = replace(server, cache=cache / memory.GIB)
    if words:
        server = replace(server, share=flags.number(words, "--gpu-memory-utilization"))
    server = replace(server, length=int(flags.number(words, "--max-model-len") or server.length))
    for size in re.findall(r"\((?:[^()]*), (\d+\.\d) GiB\)", text):
        machine = replace(machine, free=min(machine.total, machine.free + float(size)))
    return server, machine


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("case", SERVERS)
def test_every_printed_remedy_is_admitted_here_and_by_vllm(case: str, name: str) -> None:
    """From each refusal: the user who applies a remedy starts; there is none only where the weights leave no room for a short request."""
    machine = MACHINES[name]
    server = replace(SERVERS[case], floor=machine.floor())
    broken = [*memory.refusals(server, machine)]
    remedies = memory.remedies(server, machine)
    assert bool(broken) or not remedies
    assert broken or vllm_admits(server, machine)
    if broken and not remedies:
        free = min(machine.total, machine.free + sum(tenant.gib for tenant in machine.tenants))
        assert free - server.floor - server.fixed < max(memory.LEAST_CACHE, server.shape.request(memory.SHORTEST))
    for remedy in remedies:
        changed, there = applied(server, machine, remedy.text)
        assert [*memory.refusals(changed, there)] == [], remedy.text
        assert vllm_admits(changed, there), remedy.text
        assert (changed.settled(there).needed + changed.floor) <= there.free


@given(
    weights=st.floats(0, 150), cache=st.none() | st.floats(0.01, 150), share=st.none() | st.floats(0.01, 1), length=st.integers(0, 1 << 21),
    token=st.sampled_from([0, 1000, 10240, 400_000]), total=st.floats(8, 256), part=st.floats(0.02, 1), held=st.floats(0, 100),
)  # fmt: skip
def test_what_is_admitted_starts_in_vllm_and_leaves_the_floor(
    weights: float, cache: float | None, share: float | None, length: int, token: int, total: float, part: float, held: float
) -> None:
    machine = memory.MachineMemory(total, total * part, 1, unified=True, tenants=(memory.Tenant(7, "python", held),))
    server = memory.ServerMemory(weights, cache, share, length=length, shape=memory.CacheShape(token), floor=machine.floor())
    for each, there in [(server, machine), *((r.server, r.machine) for r in memory.remedies(server, machine))]:
        if not any(memory.refusals(each, there)):
            assert vllm_admits(each, there) or not token
            assert each.settled(there).needed + each.floor <= there.free + 1e-9
    # Where a short request fits beside the weights, flags are a remedy.
    room = min(machine.free, total) - server.fixed - server.floor
    if any(memory.refusals(server, machine)) and room > 0.26 and server.shape.tokens(room - 0.01) > min(length, memory.SHORTEST) + 16:
        assert memory.remedies(server, machine)[0].text.startswith("give --flag=")


TEXT = {"num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "hidden_size": 2048}


#: 64 tokens of a window and 8192 that are read at a time, in bytes; a state of four bytes a number, and its copy.
WINDOW, STATE = (64 + 8192) * 2 * 2 * 256 * 2, 32 * 128 * 64 * 8


@pytest.mark.parametrize(
    ("config", "dtype", "parts", "drafts", "token", "fixed"),
    [
        (TEXT, "auto", 1, 1, 49 * 2048, 0), (TEXT, "auto", 2, 0, 48 * 1024, 0), (TEXT, "auto", 8, 0, 48 * 1024, 0), (TEXT, "nvfp4", 1, 0, 48 * 576, 0),
        ({**TEXT, "head_dim": None}, "auto", 1, 0, 48 * 2 * 2 * 128 * 2, 0),
        ({**TEXT, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64}, "auto", 1, 0, 2048, WINDOW),
        ({**TEXT, "layer_types": ["sliding_attention"] * 2, "sliding_window": 64, "global_head_dim": 512}, "auto", 1, 3, 3 * 4096, 2 * WINDOW),
        ({**TEXT, "num_global_key_value_heads": 4, "global_head_dim": 128}, "auto", 2, 0, 48 * 2 * 2 * 128 * 2, 0),
        ({**TEXT, "full_attention_interval": 4, "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 64}, "auto", 2, 0, 12 * 1024, 36 * STATE / 2),
        ({**TEXT, "hybrid_override_pattern": "M-M*E", "mamba_num_heads": 32, "mamba_head_dim": 128, "ssm_state_size": 64}, "auto", 1, 0, 2048, 2 * STATE),
        ({**TEXT, "kv_lora_rank": 512, "qk_rope_head_dim": 64}, "auto", 8, 0, 48 * 1152, 0),
        ({**TEXT, "num_hidden_layers": 10**9}, "auto", 1, 0, 4096 * 2048, 0), ({**TEXT, "torch_dtype": "float32"}, "auto", 1, 0, 48 * 2 * 2 * 256 * 4, 0),
        ({**TEXT, "full_attention_interval": 4}, "fp8_e4m3", 1, 0, 12 * 2 * 2 * 256, 0),
        # A field that is missing or wrong makes it unknown, and nothing is judged by it.
        ({}, "auto", 1, 0, 0, 0), ({**TEXT, "num_attention_heads": "x"}, "auto", 1, 0, 0, 0), ({**TEXT, "num_attention_heads": 0, "head_dim": None}, "auto", 1, 0, 0, 0),
    ],
)  # fmt: skip
def test_request_takes_windows_and_states_whatever_its_length(
    config: dict[str, Any], dtype: str, parts: int, drafts: int, token: int, fixed: float
) -> None:
    shape = memory.CacheShape.from_config(config, dtype, parts, drafts)
    assert (shape.token, shape.fixed) == (token, fixed)
    # Whole blocks of 16 tokens, and one that vLLM keeps empty.
    assert [shape.request(tokens) * memory.GIB for tokens in (0, 1, 16, 17)] == [fixed + blocks * 16 * token for blocks in (1, 2, 2, 3)]
    assert not token or [shape.tokens(shape.request(tokens)) for tokens in (0, 1, 32)] == [0, 16, 32]


#: What just fits into 64 GiB: its cache is one request of 16 tokens.
EXACT = memory.ServerMemory(40, cache=8, reserve=4, autotune=4, floor=8, length=16, shape=memory.CacheShape(1 << 28))


@pytest.mark.parametrize(("changes", "free", "refused"), [
    ({}, 64.0, []), ({"weights": 40.1}, 64.0, ["memory-short"]), ({}, 63.9, ["memory-held"]), ({"cache": 7.9}, 64.0, ["cache-short"]),
    ({"length": 17}, 64.0, ["cache-short"]), ({"share": 0.875}, 64.0, []), ({"share": 0.876}, 64.0, ["memory-utilization"]),
    # vLLM rounds a share up to a whole byte.
    ({"weights": 1, "share": 0.5}, 32.1, []), ({"weights": 1, "share": 0.5}, 32.0, ["memory-utilization"]),
])  # fmt: skip
def test_what_just_fits_is_admitted_and_no_more(changes: dict[str, float], free: float, refused: list[str]) -> None:
    found = [*memory.refusals(replace(EXACT, **changes), memory.MachineMemory(64.0, free, 1, unified=True))]
    assert [reference for reference, _ in found] == refused


SPARK, OWN = memory.SPARKS["128 GB"], memory.MachineMemory(80.0, 79.0, 1)
PLAIN = memory.ServerMemory(40, length=1024, shape=memory.CacheShape(10240), floor=SPARK.floor())


@pytest.mark.parametrize(("changes", "machine", "cache"), [
    ({}, SPARK, 0.75 * 121.7 - 48), ({}, replace(SPARK, free=70.0), 70 - SPARK.floor() - 48), ({"weights": 88}, SPARK, memory.LEAST_CACHE),
    ({"weights": 88, "length": 1 << 16}, SPARK, PLAIN.shape.request(1 << 16)), ({"share": 0.5}, SPARK, 0.5 * 121.7 - 48),
    ({"weights": 0}, SPARK, memory.UNKNOWN_CACHE), ({"weights": 0, "reserve": 112}, SPARK, 0), ({"floor": 0}, OWN, 0.92 * 80 - 48),
])  # fmt: skip
def test_plain_server_takes_its_share_of_what_is_there_and_free(changes: dict[str, float], machine: memory.MachineMemory, cache: float) -> None:
    """Three quarters of a shared memory, more if its weights need that, and never what others hold; of a GPU's own what vLLM takes by itself."""
    settled = replace(PLAIN, **changes).settled(machine)
    assert settled.cache == math.floor(cache * 1024) / 1024
    assert settled.flags(machine) == (f"--kv-cache-memory-bytes={round(settled.cache * memory.GIB)}", f"--gpu-memory-utilization={settled.share:g}")
    assert (settled.share or 0) * machine.total <= max(settled.needed, 0.5 * machine.total)


def test_who_holds_memory_is_named_from_the_largest_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a GPU's own memory only what it holds, and not what its program has in the host's."""
    sizes = {10: 0.1, 11: 3.0, 12: 1.0, **dict.fromkeys(range(20, 26), 0.2)}
    running = [type("P", (), {"pid": pid, "info": {"name": f"p{pid}", "memory_info": type("M", (), {"rss": gib * memory.GIB})}}) for pid, gib in sizes.items()]
    monkeypatch.setattr(psutil, "process_iter", lambda _: running)
    monkeypatch.setattr(memory, "query", lambda _: ([["12", "4096", "/usr/bin/python3"], ["x", "1", "y"], ["13", "[N/A]", "z"]], ""))
    shared = memory._tenants(gpus=True)
    assert [(t.pid, t.name, t.gib) for t in shared[:2]] == [(12, "python3", 5.0), (11, "p11", 3.0)]
    assert len(shared) == memory.SHOWN
    assert memory._tenants(gpus=True, resident=False) == (memory.Tenant(12, "python3", 4.0),)
