"""G3 on logs and traces: sound ones, and the same with one thing changed."""

import contextlib
import gzip
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch as mock

import msgspec
import pytest
from msgspec.structs import replace
from tests.refusals import refusal
from tests.support.byte_model_server import ByteModelServer

from sparkwright.bench.recipes import recipe as recipes
from sparkwright.cherry_picks import patch
from sparkwright.core import files, strict_yaml
from sparkwright.core.states import State
from sparkwright.gates import contract
from sparkwright.gates.core import server_under_test, verdict

ROOT = Path(__file__).parents[2]
POLICY = strict_yaml.load(ROOT / "ci" / "gates" / "contract.yaml", contract.ContractPolicy)

#: The lines that vLLM 0.33.0 prints with an NVFP4 model, put together from its sources; no GB10 printed them.
#: The words of the compilation are those of a log in community-scripts/ProxmoxVED#2047.
LOG = """\
(EngineCore pid=2) INFO 11-21 22:31:50 [core.py:133] Initializing a V1 LLM engine (v0.33.0) with config: model='/m', \
dtype=torch.bfloat16, max_seq_len=4096, enable_prefix_caching=True, quantization=modelopt_fp4, quantization_config=None, enforce_eager=False, kv_cache_dtype=fp8, device_config=cuda, s=0, \
compilation_config={'mode': <CompilationMode.VLLM_COMPILE: 3>, 'debug_dump_path': None, 'splitting_ops': ['vllm::unified_attention'], \
'cudagraph_mode': <CUDAGraphMode.FULL_AND_PIECEWISE: (2, 1)>, 'cudagraph_num_of_warmups': 1, 'cudagraph_capture_sizes': [1, 2, 4, 8]}
(Worker pid=3) INFO 11-21 22:31:51 [cuda.py:509] Using FLASHINFER attention backend out of potential backends: ['FLASHINFER', 'TRITON'].
(Worker pid=3) INFO 11-21 22:31:51 [__init__.py:1303] Using CutlassNvFp4LinearKernel for NVFP4 GEMM
(Worker pid=3) INFO 11-21 22:31:52 [nvfp4.py:250] Using 'VLLM_CUTLASS' NvFp4 MoE backend out of potential backends: ['VLLM_CUTLASS'].
(Worker pid=3) INFO 11-21 22:32:18 [gpu_model_runner.py:6409] Estimated CUDA graph memory: 1.25 GiB total
(Worker pid=3) INFO 11-21 22:32:31 [gpu_model_runner.py:6516] Graph capturing finished in 8 secs, took 0.31 GiB
(Worker pid=3) INFO 11-21 22:32:18 [gpu_worker.py:664] Initial free memory 115.3 GiB, reserved 24.0 GiB memory for KV Cache as specified by kv_c
(EngineCore pid=2) INFO 11-21 22:32:18 [kv_cache_utils.py:1147] GPU KV cache size: 811,008 tokens, Maximum concurrency for 32,768 tokens \
per request: 24.75x
"""

ATTENTION = "void flashinfer::BatchPrefillWithPagedKVCacheKernel<KernelTraits<(int)0>>(Params)"
LINEAR = "_ZN7cutlass13device_kernelINS_42MainloopSm120TmaWarpSpecializedBlockScaledILi3ELi3ENS5_IJNS_12float_e2m1_tENS_13float_ue4m3_tEEEE"
MOE = "_ZN7cutlass13device_kernelINS1_17GroupProblemShapeINS1_47MainloopSm120ArrayTmaWarpSpecializedBlockScaledILi4ENS_12float_e2m1_tEEE"
TRITON_EXPERTS, EMULATED = "fused_moe_kernel", "fused_moe_nvfp4_emulation_kernel"
MARLIN = "void marlin_moe_wna16::Marlin<1125899906909960l, 256>(int4 const*)"
UNPACKING = "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda>(int)"
BF16 = "nvjet_sm120_tst_16x64_64x16_4x2_h_bz_TNT"
SERVING = (ATTENTION, LINEAR, MOE, "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0")

_PLAIN = recipes.load(ROOT, "qwen3-30b-a3b-nvfp4")
#: With all layers but the experts' in FP4 alone, and the backend of the attention.
RECIPE = replace(
    _PLAIN,
    contract=replace(
        _PLAIN.contract,
        serves={**_PLAIN.contract.serves, "linear": "native-fp4"},
    ),
)
OWN = server_under_test.ServerIdentity(wheel="b" * 64, model="m")


def trace(
    path: Path,
    prefill: tuple[str, ...] = SERVING,
    decode: tuple[str, ...] = SERVING,
    *,
    graphs: bool = True,
    batch: dict[str, tuple[str, ...]] | None = None,
    duration: int = 20,
) -> Path:
    """
    Write what torch's profiler writes of a prefill step and a decode step, whose kernels one CUDA graph may launch.

    Those of a batch have the kernels of *batch*, by phase, or the same.
    """
    labels = {
        "execute_context_1(512)_generation_0(0)": prefill, "execute_context_0(0)_generation_1(1)": decode,
        "execute_context_3(900)_generation_5(5)": (batch or {}).get("prefill", prefill), "execute_context_0(0)_generation_16(16)": (batch or {}).get("decode", decode),
    }  # fmt: skip
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "args": {"name": "python"}}]
    for step, (label, kernels) in enumerate(labels.items()):
        events.append({"ph": "X", "cat": "user_annotation", "name": label, "ts": 1000 * step, "dur": 500})
        for place, kernel in enumerate(kernels):
            launch = 100 * step + (0 if graphs else place)
            events.append({"ph": "X", "cat": "cuda_runtime", "name": "cudaGraphLaunch" if graphs else "cudaLaunchKernel", "ts": 1000 * step + 10, "dur": 1,
                           "args": {"correlation": launch}})  # fmt: skip
            # Kernels run long after the step that launched them, in the time of the next one.
            events.append({"ph": "X", "cat": "kernel", "name": kernel, "ts": 1000 * step + 990.5, "dur": duration, "args": {"correlation": launch}})
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    return path


@pytest.fixture(scope="module", name="server", autouse=True)
def _server() -> Iterator[ByteModelServer]:
    """Return the server that answers, of the release that wrote the log."""
    with ByteModelServer() as server:
        server.version = "0.33.0"
        SERVERS.append(server)
        yield server
        SERVERS.remove(server)


SERVERS: list[ByteModelServer] = []


def served(log: Path, **ended: str) -> Any:
    """Return the server with that log; *ended* is why the gate ended it."""
    return SimpleNamespace(log=log, client=lambda: SERVERS[0].client, **{"failure": "", "reason": "", **ended})


def judged(
    folder: Path,
    text: str = LOG,
    recipe: recipes.Recipe = RECIPE,
    baseline: Path | None = None,
    profile: Path | None = None,
    declared: tuple[patch.DeclaredChange, ...] = (),
    **ended: str,
) -> dict[str, verdict.Check]:
    """Return the checks of a log and a trace by name."""
    log = folder / "server.log"
    log.write_text(text)
    server = served(log, **ended)
    checks = contract.run(POLICY, recipe, server, profiled(server, profile or trace(folder / "trace.json.gz")), OWN, baseline, declared)
    assert len({check.name for check in checks}) == len(checks)
    assert all(check.reason in contract.REASONS or check.reason == "not-asked" for check in checks if check.state != "pass")
    return {check.name: check for check in checks}


def profiled(server: Any, path: Path) -> contract.KernelTrace | verdict.Check:
    """Return what the gate reads of a profile that *server* wrote to *path*."""
    with mock.object(contract, "record_traces", lambda *_: [path]):
        return contract.profile(POLICY, RECIPE, server, path.parent)


def states(checks: dict[str, verdict.Check], *wanted: State) -> set[str]:
    return {name for name, check in checks.items() if check.required and check.state in wanted}


def test_sound_server_passes_beside_the_stock_wheel(tmp_path: Path) -> None:
    """Without the facts of that one, nothing shows what is served otherwise, and the gate is no pass."""
    checks = judged(tmp_path, baseline=recorded(tmp_path))
    assert states(checks, "fail", "invalid", "not-run") == set()
    assert states(judged(tmp_path), "fail", "invalid", "not-run") == {"backends"}
    assert {"observed", "kernels-unknown", "kernels-moe", "log", "no-fallback-kernel", "profile-graphs", "profile-compile"} <= states(checks, "pass")


LOG_FAULTS: dict[str, tuple[str, str, str, str]] = {
    "emulated experts": ("Using 'VLLM_CUTLASS'", "Using 'EMULATION'", "log", "emulation"),
    "emulation": ("CutlassNvFp4LinearKernel for", "EmulationNvFp4LinearKernel for", "log", "emulation"),
    "an ignored flag": ("Using 'V", "--linear-backend=cutlass has no kernel for this\n Using 'V", "log", "backend-refused"),
    "the negative estimate of a GB10": ("memory: 1.25", "memory: -35.17", "log", "graph-memory-negative"),
    "a log of two releases": (
        "(EngineCore pid=2) INFO 11-21 22:31:50", "Initializing a V1 LLM engine (v0.32.0) with config: \n(EngineCore pid=2) INFO", "observed", "facts-disagree",
    ),
    "another release": ("v0.33.0", "v0.32.0", "observed", "facts-disagree"),
    "another program": ("Initializing", "Starting", "observed", "facts-disagree"),
}


@pytest.mark.parametrize(("old", "new", "name", "reason"), LOG_FAULTS.values(), ids=LOG_FAULTS)
def test_fault_of_the_log_has_its_check_and_reason(old: str, new: str, name: str, reason: str, tmp_path: Path) -> None:
    assert old in LOG
    check = judged(tmp_path, LOG.replace(old, new))[name]
    assert (check.state in ("fail", "invalid"), check.reason) == (True, reason)


_PLAIN_KERNELS = (ATTENTION, LINEAR, MOE)
#: What is wrong → the kernels of prefill and of decode, whether CUDA graphs launch them, the checks that fail, and a reason among theirs.
TRACE_FAULTS: dict[str, tuple[tuple[str, ...], tuple[str, ...], bool, set[str], str]] = {
    "silent Marlin": ((*SERVING, MARLIN), (*SERVING, MARLIN), True, {"no-fallback-kernel", "kernels-moe"}, "kernel-forbidden"),
    # 1 µs of the promised kernel beside a foreign one's time passed before.
    "another class in 60 % of the experts' time": (
        (*SERVING, MOE), (ATTENTION, LINEAR, SERVING[3], *[MOE] * 4, *[TRITON_EXPERTS] * 6), True, {"kernels-moe"}, "kernel-class",
    ),
    "emulated experts": (SERVING, (*SERVING, EMULATED), True, {"no-fallback-kernel", "kernels-moe"}, "kernel-forbidden"),
    "kernels that no pattern knows": (SERVING, (*SERVING, "xyzzy_forward_v2"), True, {"kernels-unknown"}, "kernels-unknown"),
    "layers that the recipe does not state": (SERVING, (*SERVING, "chunk_gated_delta_rule_fwd_kernel_h"), True, {"kernels-unknown"}, "kernels-unknown"),
    "weights that are unpacked in each step": (SERVING, (*SERVING, *[UNPACKING] * 99), True, {"kernels-helpers"}, "kernels-helpers"),
    "Marlin in decode alone": (
        SERVING, (ATTENTION, LINEAR, MARLIN), True, {"no-fallback-kernel", "kernels-moe", "profile-compile"}, "kernel-class",
    ),
    "no FP4 experts in prefill": ((ATTENTION, LINEAR), SERVING, True, {"kernels-moe"}, "kernel-unseen"),
    "nothing in decode": (
        SERVING, (), True, {"kernels-moe", "kernels-attention", "kernels-linear", "profile-graphs", "profile-compile"}, "kernel-unseen",
    ),
    "an idle server": (
        (), (), True, {"kernels-moe", "kernels-attention", "kernels-linear", "profile-graphs", "profile-compile"}, "kernel-unseen",
    ),
    "no graphs": (SERVING, SERVING, False, {"profile-graphs"}, "graphs-unseen"),
    # vLLM compiles some helpers of its own in any mode.
    "not compiled": ((*_PLAIN_KERNELS, "triton_poi_fused_topk_0"), _PLAIN_KERNELS, True, {"profile-compile"}, "compile-unseen"),
}  # fmt: skip


@pytest.mark.parametrize(("prefill", "decode", "graphs", "failing", "reason"), TRACE_FAULTS.values(), ids=TRACE_FAULTS)
def test_kernels_decide_although_the_log_is_clean(prefill: tuple[str, ...], decode: tuple[str, ...], graphs: bool, failing: set[str], reason: str, tmp_path: Path) -> None:
    checks = judged(tmp_path, profile=trace(tmp_path / "t.gz", prefill, decode, graphs=graphs))
    assert states(checks, "fail") == failing
    assert reason in {checks[name].reason for name in failing}


#: What serves in batches alone → the kernels of its phases, and the checks that fail.
BATCH_FAULTS: dict[str, tuple[dict[str, tuple[str, ...]], set[str]]] = {
    "Marlin in decode": ({"decode": (*SERVING, MARLIN)}, {"no-fallback-kernel", "kernels-moe", "backends"}),
    "Marlin in prefill": ({"prefill": (*SERVING, MARLIN)}, {"no-fallback-kernel", "kernels-moe", "backends"}),
    "another class in 60 % of the experts' time": ({"decode": (*SERVING, *[MOE] * 3, *[TRITON_EXPERTS] * 6)}, {"kernels-moe", "backends"}),
    "kernels that no pattern knows": ({"decode": (*SERVING, "xyzzy_forward_v2")}, {"kernels-unknown"}),
    "no step": ({"decode": ()}, {"kernels-attention", "kernels-linear", "kernels-moe", "backends"}),
}


@pytest.mark.parametrize(("kernels", "failing"), BATCH_FAULTS.values(), ids=BATCH_FAULTS)
def test_fallback_in_batches_alone_fails(kernels: dict[str, tuple[str, ...]], failing: set[str], tmp_path: Path) -> None:
    """Requests that are served one at a time show none of it."""
    checks = judged(tmp_path, baseline=recorded(tmp_path), profile=trace(tmp_path / "t.gz", batch=kernels))
    assert states(checks, "fail") == failing
    assert judged(tmp_path, baseline=recorded(tmp_path), profile=trace(tmp_path / "t.gz"))["backends"].state == "pass"


@pytest.mark.parametrize("slow", ["prefill", "decode"])
def test_a_step_that_another_process_delays_is_no_change(slow: contract.Phase, tmp_path: Path) -> None:
    """Helpers count as in their quickest step; the shares of a phase are those of all steps."""
    events = json.loads(gzip.decompress(trace(tmp_path / "t.gz", (*SERVING, UNPACKING), (*SERVING, UNPACKING)).read_bytes()))["traceEvents"]
    steps = {"prefill": SERVING, "decode": SERVING, slow: (*SERVING, UNPACKING, MARLIN)}
    delayed = json.loads(gzip.decompress(trace(tmp_path / "s.gz", steps["prefill"], steps["decode"], duration=9000).read_bytes()))["traceEvents"]
    for event in delayed[1:]:
        event["ts"] += 100_000
        event.setdefault("args", {"correlation": 0})["correlation"] += 100_000
    (tmp_path / "both.gz").write_bytes(gzip.compress(json.dumps({"traceEvents": events + delayed}).encode()))
    found = contract.read_trace(tmp_path / "both.gz")
    assert found.quickest[slow] == Counter(dict.fromkeys((*SERVING, UNPACKING), 20) | {MARLIN: 9000})
    assert found[slow] == Counter(dict.fromkeys((*SERVING, UNPACKING), 9020) | {MARLIN: 9000})
    (tmp_path / "both.gz").write_bytes(gzip.compress(json.dumps({"traceEvents": [event for event in events + delayed if event["name"] != MARLIN]}).encode()))
    assert judged(tmp_path, baseline=recorded(tmp_path), profile=tmp_path / "both.gz")["backends"].state == "pass"


def writing(*write: Callable[[], object], complete: Callable[..., None] = lambda *_, **__: None) -> Any:
    """Return a server whose profile writes traces."""

    @contextlib.contextmanager
    def profile() -> Iterator[None]:
        yield
        for each in write:
            each()

    return SimpleNamespace(client=lambda: SimpleNamespace(complete=complete, profile=profile))


@pytest.mark.parametrize(("served_at_once", "batch"), [(64, 16), (4, 4)])
def test_profile_is_of_single_requests_and_then_of_a_batch(served_at_once: int, batch: int, tmp_path: Path) -> None:
    """Prompts differ, or the prefix cache would have them."""
    prompts, together = list[str](), threading.Barrier(batch, timeout=20)

    def complete(prompt: str, **_: object) -> None:
        prompts.append(prompt)
        if len(prompts) > contract.ALONE:
            together.wait()

    recipe = replace(RECIPE, plan=replace(RECIPE.plan, max_num_seqs=served_at_once))
    found = contract.profile(POLICY, recipe, writing(lambda: trace(tmp_path / "trace.json.gz"), complete=complete), tmp_path)

    assert isinstance(found, contract.KernelTrace)
    assert len(set(prompts)) == len(prompts) == contract.ALONE + batch


@pytest.mark.parametrize("wrong", [0, 1])
def test_each_rank_is_judged(wrong: int, tmp_path: Path) -> None:
    """vLLM writes a trace of each; one with a fallback kernel, and without graphs, is seen whatever its file's name."""
    kernels = [(*SERVING, MARLIN) if rank == wrong else SERVING for rank in (0, 1)]
    traces = (partial(trace, tmp_path / f"rank{rank}.json.gz", kernels[rank], graphs=rank != wrong) for rank in (0, 1))
    found = contract.profile(POLICY, RECIPE, writing(*traces), tmp_path)
    (tmp_path / "server.log").write_text(LOG)
    assert not isinstance(found, verdict.Check)
    failing = {check.name for check in contract.check_contract(POLICY, RECIPE.contract, tmp_path / "server.log", found) if check.state == "fail"}
    assert {"no-fallback-kernel", "profile-graphs"} <= failing


#: What the server answers → the fact that then contradicts the log.
DISAGREEING: dict[str, tuple[dict[str, Any], str]] = {
    "another release": ({"version": "0.32.0"}, "version"),
    "another context": ({"limit": 2048}, "context"),
    "no cache": ({"caches": False}, "prefix-cache"),
}


@pytest.mark.parametrize(("change", "fact"), DISAGREEING.values(), ids=DISAGREEING)
def test_server_whose_log_and_replies_disagree_is_no_evidence(change: dict[str, Any], fact: str, server: ByteModelServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in change.items():
        monkeypatch.setattr(server, name, value)
    check = judged(tmp_path)["observed"]
    assert (check.state, check.reason, [sample.case for sample in check.samples]) == ("invalid", "facts-disagree", [fact])


def test_facts_are_observed_and_not_typed(server: ByteModelServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The block of the log, the hits, the served name and the backends stand in the verdict; a prompt of three blocks and a half is repeated."""
    line = "INFO [interface.py:1109] Setting attention block size to 16 tokens to ensure that\n"
    check = judged(tmp_path, LOG + line)["observed"]
    figures = {figure.name: figure.value for figure in check.figures}
    assert (check.state, figures["block of the prefix cache"], figures["prompt that was repeated"], figures["tokens found of it"]) == ("pass", 16, 56, 48)
    assert {("served name", "bytes"), ("attention", "FLASHINFER"), ("moe", "VLLM_CUTLASS")} <= {(sample.case, sample.actual) for sample in check.samples}
    assert judged(tmp_path, LOG + line.replace("16", "544"))["observed"].reason == "facts-disagree"
    sound = server.reuse
    monkeypatch.setattr(server, "reuse", lambda salt, prompt: [sound(salt, prompt), server.counts.update({"vllm:prefix_cache_hits_total": 5})][0])
    assert [sample.case for sample in judged(tmp_path)["observed"].samples] == ["hits"]


def test_names_narrow_the_class(tmp_path: Path) -> None:
    narrow = replace(RECIPE, contract=replace(RECIPE.contract, names={"attention": "TrtllmGen"}))
    assert judged(tmp_path, recipe=narrow)["kernels-attention"].reason == "kernel-class"


@pytest.mark.parametrize(
    ("wanted", "others", "state"),
    [
        ("native-fp4", 1, "fail"), ("native-fp4+bf16", 1, "pass"), ("weight-only|native-fp4+bf16", 1, "pass"), ("weight-only+native-fp4+bf16", 1, "fail"),
        ("bf16", 1, "fail"), ("native-fp4+bf16", 8, "pass"), ("native-fp4+bf16", 32, "fail"),
    ],
)  # fmt: skip
def test_first_class_of_a_sum_takes_a_part_beside_what_a_checkpoint_leaves(wanted: str, others: int, state: str, tmp_path: Path) -> None:
    """A part is a tenth: with 97 % of the time in 16 bits, FP4 does not serve."""
    recipe = replace(RECIPE, contract=replace(RECIPE.contract, serves={**RECIPE.contract.serves, "linear": wanted}))
    kernels = (*SERVING, *[BF16] * others)
    check = judged(tmp_path, recipe=recipe, profile=trace(tmp_path / "t.gz", kernels, kernels))["kernels-linear"]
    assert check.state == state


@pytest.mark.parametrize(
    ("kernel", "quantising", "classes"),
    [
        (TRITON_EXPERTS, "per_token_group_quant_8bit_kernel", ("bf16", "native-fp8")), ("_matmul_ogs_NNT", "_downcast_to_mxfp", ("weight-only", "native-mxfp4")),
    ],
)  # fmt: skip
def test_name_of_two_classes_is_told_apart_by_what_quantises_its_input(kernel: str, quantising: str, classes: tuple[str, str], tmp_path: Path) -> None:
    for beside in ((), (quantising,)):
        kernels = (ATTENTION, LINEAR, SERVING[3], kernel, *beside)
        for label in classes:
            recipe = replace(RECIPE, contract=replace(RECIPE.contract, serves={**RECIPE.contract.serves, "moe": label}))
            check = judged(tmp_path, recipe=recipe, profile=trace(tmp_path / "t.gz", kernels, kernels))["kernels-moe"]
            assert (check.state == "pass") == (label == classes[len(beside)]), (label, beside)


def test_sampling_is_judged_if_the_recipe_states_it(tmp_path: Path) -> None:
    kernels = (*SERVING, "void flashinfer::sampling::TopKTopPSamplingFromProbKernel<1024u>(float*)")
    profile = trace(tmp_path / "t.gz", kernels, kernels)
    stated = replace(RECIPE, contract=replace(RECIPE.contract, serves={**RECIPE.contract.serves, "sampling": "fp32"}))
    assert judged(tmp_path, profile=profile)["kernels-unknown"].state == "pass"
    assert judged(tmp_path, recipe=stated, profile=profile)["kernels-sampling"].state == "pass"
    assert judged(tmp_path, recipe=stated)["kernels-sampling"].reason == "kernel-unseen"


def _annotated(label: str, dur: float) -> bytes:
    """Return a trace of one step and two kernels."""
    step = {"cat": "user_annotation", "name": label, "ts": 0, "dur": 10}
    kernel = {"cat": "kernel", "name": ATTENTION, "ts": 1, "dur": dur}
    return json.dumps({"traceEvents": [step, kernel, kernel]}).encode()


@pytest.mark.parametrize(("data", "reason"), [
    *((data, "profile-unreadable") for data in (
        b"", b"{", b"[" * 100_000, b'{"traceEvents": 7}', b'{"traceEvents": [{"ts": "now"}]}', b'{"traceEvents": [{"cat": "kernel", "name": "x"}]}',
        _annotated("execute_context_" + "9" * 5000 + "(1)_generation_0(0)", 1.0),
    )),
    (_annotated("execute_context_1(9)_generation_0(0)", 1.7e308), ""),
])  # fmt: skip
def test_file_that_is_no_annotated_trace_is_invalid(data: bytes, reason: str, tmp_path: Path) -> None:
    """Nor do numbers without end, or a file that is not there, end the gate."""
    path = tmp_path / "t"
    path.write_bytes(data)
    assert judged(tmp_path, profile=path)["no-fallback-kernel"].reason == reason
    assert judged(tmp_path, profile=tmp_path)["no-fallback-kernel"].reason == "profile-unreadable"


@pytest.mark.parametrize("bound", ["MOST_OBJECTS", "LARGEST"])
def test_trace_is_bounded(bound: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract, bound, 10)
    assert "more than" in judged(tmp_path)["no-fallback-kernel"].message


def recorded(folder: Path, **changes: Any) -> Path:
    """Write the facts of the sound stock server, with *changes*, as a baseline."""
    log, stock = folder / "stock.log", server_under_test.ServerIdentity(wheel="a" * 64, model="m")
    log.write_text(LOG)
    server = served(log)
    facts = contract.observe(POLICY, server, profiled(server, trace(folder / "sound.gz")), stock, RECIPE.name)
    (folder / "observed.json").write_bytes(msgspec.json.encode(replace(facts, **changes)))
    return folder / "observed.json"


WEAK = {"prefill linear": {"weight-only": 1.0}}
LONG = {"prefill": (8000, 2000), "decode": (8000, 800)}
WHY = "FP4 in place of Marlin"


@pytest.mark.parametrize(("classes", "times", "changes", "declared", "differing"), [
    ({}, {}, {}, (), []), (WEAK, {}, {}, (), ["prefill linear"]), ({}, {"decode": (80, 8)}, {}, (), []), ({}, LONG, {}, (), ["decode helper"]),
    (WEAK, {}, {"prefill linear": WHY}, (), []),
    (WEAK, {}, {}, ("qwen3-*", "prefill linear"), []), (WEAK, {}, {}, ("qwen3-*", ""), []),
    (WEAK, {}, {}, ("qwen3-*", "decode linear"), ["prefill linear"]), (WEAK, {}, {}, ("gemma*", ""), ["prefill linear"]),
])  # fmt: skip
def test_changed_class_fails_unless_the_recipe_or_a_patch_explains_it(
    classes: dict[str, Any], times: dict[str, Any], changes: dict[str, str], declared: tuple[str, str] | tuple[()], differing: list[str], tmp_path: Path
) -> None:
    """Each kind of layer has a class in each phase; the stock wheel had another in one of them, or helped less."""
    facts = files.read_json(recorded(tmp_path), server_under_test.ObservedServer)
    layers = {f"{phase} {kind}" for phase in contract.PHASES for kind in ("attention", "linear", "moe")}
    assert (set(facts.classes), set(facts.kernels), facts.classes["decode moe"]) == (layers, layers, {"native-fp4": 1.0})
    baseline = recorded(tmp_path, classes={**facts.classes, **classes}, times={**facts.times, **times})
    recipe = replace(RECIPE, contract=replace(RECIPE.contract, changes=changes))
    patches = (patch.DeclaredChange("kernels", *declared, WHY),) if declared else ()
    # A few microseconds more of helpers are no change.
    profile = trace(tmp_path / "trace.json.gz", duration=2000 if times == LONG else 20)
    check = judged(tmp_path, recipe=recipe, baseline=baseline, profile=profile, declared=patches)["backends"]
    assert (check.state, check.reason) == (("fail", "backend-changed") if differing else ("pass", ""))
    assert not differing or [sample.case for sample in check.samples] == differing


def test_launches_with_other_classes_do_not_agree() -> None:
    sound = {"decode moe": {"native-fp4": 1.0}}
    assert contract.same_launches(POLICY, sound, {"decode moe": {"native-fp4": 0.95, "weight-only": 0.05}}).state == "pass"
    assert contract.same_launches(POLICY, sound, {"decode moe": {"native-fp4": 0.4, "weight-only": 0.6}}).reason == "launches-differ"


#: A patch that declares a change, as its trailer has it.
PATCH = """\
From: A <a@b.invalid>
Date: Sun, 29 Nov 2026 12:00:00 +0000
Subject: [PATCH] Read the scales

Upstream-Status: Pending
Reason: they are wrong
Drop-When: upstream reads them
{line}
---
diff --git a/x b/x
index 7694e6f8bc46e17e25a5357913fb9a370fb92042..a3c3f6f16176e33c3df34eaa8bd799cabfa51083 100644
--- a/x
+++ b/x
@@ -1 +1 @@
-a
+b
"""


def test_patch_declares_what_it_changes_or_is_refused() -> None:
    """What, which recipes, perhaps of which layers, and why; nothing is guessed of another form."""
    good = patch.parse("p", PATCH.format(line="Changes: kernels / nemotron-*: decode moe / b12x in place of Marlin").encode())
    assert good.changes == (patch.DeclaredChange("kernels", "nemotron-*", "decode moe", "b12x in place of Marlin"),)
    assert (good.changes[0].concerns("kernels", "nemotron-3"), good.changes[0].concerns("distributions", "nemotron-3")) == (True, False)
    for line in ("Changes: everything / * / because", "Changes: kernels / nemotron-*", "Changes: kernels"):
        with refusal("patch-invalid"):
            patch.parse("p", PATCH.format(line=line).encode())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"served": OWN}, "reference-is-candidate"),
        ({"served": server_under_test.ServerIdentity(model="m")}, "reference-unnamed"),
        ({"served": server_under_test.ServerIdentity("a" * 64, "other")}, "reference-other-model"),
        ({"shape": "toy-cpu"}, "reference-other-policy"),
        ({"format": 2}, "reference-damaged"),
        ({"classes": {}}, "reference-damaged"),
    ],
)
def test_baseline_that_flatters_is_refused(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    check = judged(tmp_path, baseline=recorded(tmp_path, **changes))["backends"]
    assert (check.reason, str(tmp_path) in check.message) == (reason, False)


def test_a_log_that_cannot_be_read_says_nothing_of_the_wheel(tmp_path: Path) -> None:
    """A file that was not named rightly is no failure of what serves; of a launch that is measured, the profile counts."""
    profile = trace(tmp_path / "trace.json.gz")
    for log in (tmp_path / "absent", tmp_path):
        read = profiled(served(log), profile)
        (check,) = contract.run(POLICY, RECIPE, served(log), read, OWN)
        assert (check.state, check.reason) == ("invalid", "log-unreadable")
        checks = {check.name: check for check in contract.check_contract(POLICY, RECIPE.contract, log, read)}
        assert checks["log"].reason == "log-unreadable"
        assert (states(checks, "fail"), checks["kernels-moe"].state) == (set(), "pass")


@pytest.mark.parametrize(("reason", "state"), [("graph-memory-negative", "fail"), ("server-died", "fail"), ("memory-low", "invalid")])
def test_server_that_was_ended_fails_with_its_reason_unless_the_machine_is_it(reason: str, state: str, tmp_path: Path) -> None:
    check = judged(tmp_path, failure="the estimate is -35 GiB", reason=reason)["observed"]
    assert (check.state, check.reason) == (state, reason)
