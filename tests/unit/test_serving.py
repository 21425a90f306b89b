"""What `serve` starts, and what it refuses before: a recipe, a plain model and a container by the same rules; also without a checkout."""

import contextlib
import itertools
import json
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from tests.conftest import NOWHERE
from tests.refusals import outcome, refusal
from tests.support import checkpoints, packs, processes, standin
from tests.support.badserver import MODELS, Listener, Say, completion, head, silent, whole

from sparkwright.bench.model.checkpoint import model_digest
from sparkwright.bench.recipes import recipe as recipes
from sparkwright.bench.server import flags, server_process, warm_pack
from sparkwright.bench.server.launch import LaunchPlan
from sparkwright.cli import main
from sparkwright.client import environment as client, records
from sparkwright.core import errors, process
from sparkwright.core.files import sha256_bytes
from sparkwright.core.memory import AUTOTUNE, GIB, RESERVE, MachineMemory, Tenant
from sparkwright.serving import health, launch, models
from sparkwright.serving.environment import examine

ROOT = Path(__file__).parents[2]
SPARK = MachineMemory(121.7, 110.4, gpus=1, unified=True)
DESKTOP = MachineMemory(64.0, 62.0, gpus=1)


class World:
    """An environment, a model, and reviewed data that may be edited."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.environment = folder, folder / "prefix" / "releases" / "spark.1"
        self.python = standin.environment(self.environment)
        self.model = standin.model(folder / "toy")
        shutil.copytree(ROOT / "ci" / "recipes", folder / "data" / "ci" / "recipes")

    @property
    def site(self) -> Path:
        return next(self.environment.glob("lib/python3.*/site-packages"))

    def plan(self, recipe: str = "", *, machine: MachineMemory | None = None, **values: Any) -> launch.ServingPlan:
        values.setdefault("model", str(self.model))
        return launch.plan(launch.ServeRequest(recipe=recipe, **values), self.python, self.folder / "data", machine=machine)

    def edit(self, recipe: str, **changes: object) -> None:
        """Change fields of a recipe's file."""
        path = recipes.files(self.folder / "data")[recipe]
        path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), **changes}))

    def install(self, channel: str = "verified", **fields: Any) -> None:
        """Mark the stand-in as a release that `install` made."""
        listing = msgspec.json.encode(client.describe(self.environment))
        marker = client.Marker(
            name="spark.1", folder=str(self.environment.resolve()), index="https://example.org/", python="3.11.2", key="c" * 64,
            packages={"vllm": standin.VERSION}, channel=channel,  # type: ignore[arg-type]
            wheels={"vllm": "a" * 64}, listing=sha256_bytes(listing), **fields,
        )  # fmt: skip
        (self.environment / client.LISTING).write_bytes(listing)
        (self.environment / client.MARKER).write_bytes(msgspec.json.encode(marker))


@pytest.fixture(name="world")
def _world(tmp_path: Path) -> World:
    return World(tmp_path)


def nemotron(folder: Path, *, drafts: bool = False) -> Path:
    """Write a checkpoint without weights of Nemotron's kind; one that drafts has the field and the layers of it."""
    shape = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 32}
    config = {"model_type": "nemotron_h", "architectures": ["NemotronHForCausalLM"], "vocab_size": 32, **shape}
    tensors: list[checkpoints.Told] = [("backbone.layers.0.mixer.weight", "BF16", [16]), ("mtp.layers.0.weight", "BF16", [16])]
    return checkpoints.write(folder, {**config, "num_nextn_predict_layers": int(drafts)}, tensors[: 1 + drafts])


# Preflight.

MTP = '--speculative-config={"method":"mtp","num_speculative_tokens":3}'
PINNED = "--kv-cache-memory-bytes=4G"


@pytest.mark.parametrize("recipe", ["", "toy-cpu"])
@pytest.mark.parametrize(
    ("given", "drafts", "reference"),
    [
        ([MTP, PINNED], False, "speculation-headless"),
        (["--speculative-config.method=mtp", PINNED], False, "speculation-headless"),
        ([MTP, PINNED, "--moe-backend", "flashinfer_b12x"], True, "draft-b12x"),
        ([PINNED, "--gpu-memory-utilization=0.999"], False, "memory-utilization"),
        (["--kv-cache-memory-bytes=200G"], False, "memory-short"),
        (["--kv-cache-memory-bytes=0"], False, "cache-unpinned"),
        (["--kv-cache-memory-bytes=20GiB"], False, "cache-unpinned: --kv-cache-memory-bytes=20GiB is no number of bytes"),
        (["--kv-cache-memory-bytes=20.5G"], False, "cache-unpinned"),  # vLLM takes no point before a capital suffix
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_rule_holds_whatever_gave_the_flags(world: World, recipe: str, given: list[str], drafts: bool, reference: str) -> None:
    """A plain model and a recipe are judged by their final arguments on the machine that they are for."""
    model = nemotron(world.folder / "nemotron", drafts=drafts)
    world.edit("toy-cpu", versions=[{"vllm": ">=0.20", "flags": ["--enforce-eager"]}])
    with refusal("serve-unfit") as caught:
        world.plan(recipe, model=str(model), flags=tuple(given), machine=SPARK)
    broken = [line for line in caught.value.details if line.startswith(reference)]
    assert len(broken) == 1, caught.value.details


def test_plain_model_gets_a_pinned_cache_on_unified_memory(world: World) -> None:
    """Three quarters of the memory less weights and reserves; the user's own figure, and another machine, stay as they are."""
    size = 0.75 * 121.7 - RESERVE - AUTOTUNE - 8 / GIB
    cache, share = world.plan(machine=SPARK).launch.flags
    assert share == "--gpu-memory-utilization=0.749"
    assert int(cache.removeprefix("--kv-cache-memory-bytes=")) / GIB == pytest.approx(size, abs=0.01)
    # What is given is needed, and vLLM asks whether that is free (gpu_worker.py), never whether its default of 0.92 is.
    assert world.plan(machine=SPARK, flags=(PINNED,)).launch.flags == ("--gpu-memory-utilization=0.131", PINNED)
    assert world.plan(machine=DESKTOP).launch.flags == ("--gpu-memory-utilization=0.919",)
    (world.model / "model.safetensors").rename(world.model / "model.bin")
    assert world.plan(machine=SPARK).memory.weights > 0


def test_drafter_of_its_own_is_counted_and_drafting_layers_only_where_they_draft(world: World) -> None:
    """A drafter that is missing is said before vLLM loads the target."""
    def weights(*words: str, model: Path | None = None) -> float:
        return world.plan(model=str(model or world.model), machine=DESKTOP, flags=words).memory.weights * GIB

    eagle = json.dumps({"method": "eagle", "model": str(nemotron(world.folder / "drafter")), "num_speculative_tokens": 2})
    assert weights("--speculative-config", eagle) == pytest.approx(weights() + 32)
    drafting = nemotron(world.folder / "drafting", drafts=True)
    assert weights(MTP, model=drafting) == pytest.approx(weights(model=drafting) + 32)
    with refusal("model-missing"):
        weights("--speculative-config", eagle.replace("drafter", "nowhere"))
    named = ("--speculative-config", '{"method":"eagle","model":"org/drafter"}')
    assert world.plan(machine=DESKTOP, flags=named, dry_run=True, variables={"HF_HUB_CACHE": str(world.folder), "HF_ENDPOINT": NOWHERE})


def test_memory_that_others_hold_is_not_given_and_they_are_named(world: World) -> None:
    """CUDA memory of a GB10 is in no resident size: nvidia-smi names who holds it."""
    held = MachineMemory(121.7, 22.0, 1, unified=True, tenants=(Tenant(77, "python", 58.0),))
    with refusal("memory-held", match="not enough free", says="end process 77 (python, 58.0 GiB)"):
        world.plan(machine=held, flags=(PINNED,))
    with refusal("serve-unfit", says="85.2, at its start; 83.4 are free"):
        world.plan(machine=msgspec.structs.replace(held, free=83.4), flags=("--gpu-memory-utilization=0.7",))


SHORT = [("-tp", "2"), ("-tp=2",), ("-pp", "2"), ("-n2", "-tp", "4"), ("-n", "2", "-pp=4"), ("-dp", "2"), ("--tensor_parallel_size", "2")]


@pytest.mark.parametrize("words", SHORT, ids=" ".join)
def test_short_flags_are_seen_by_admission(world: World, words: tuple[str, ...]) -> None:
    with refusal("usage", match="GPUs, and there"):
        world.plan(flags=words, machine=SPARK)


@pytest.mark.parametrize(
    ("given", "parts", "refused"),
    [
        ({"nodes": 2}, (2, 1), ""), ({"nodes": 3}, (1, 3), ""), ({"nodes": 4}, (2, 2), ""), ({"nodes": 2, "flags": ("--pipeline-parallel-size=2",)}, (1, 2), ""),
        ({"nodes": 2, "flags": ("--tensor-parallel-size=2", "--pipeline-parallel-size=2")}, (2, 2), "needs 4 GPUs, and there are 2"),
        ({"nodes": 2, "flags": ("--tensor-parallel-size=1", "--pipeline-parallel-size=1")}, (1, 1), "1 x 1 parts of .* do not divide over 2 machines"),
    ],
)  # fmt: skip
def test_machines_share_what_divides_and_no_more_gpus_than_there_are(world: World, given: dict[str, Any], parts: tuple[int, int], refused: str) -> None:
    """The toy has two heads: of three machines each takes layers."""
    with outcome("usage" if refused else "", match=refused):
        words = world.plan(**given, machine=SPARK, address="127.0.0.1").launch.flags
        assert tuple(int(flags.number(words, f"--{name}-parallel-size") or 0) for name in ("tensor", "pipeline")) == parts


def test_vllm_that_keeps_a_reserve_is_told_what_stays_free(world: World) -> None:
    """On unified memory, and if it reads the variable, which stock does not; the user's own value stays."""
    name, sleep = "VLLM_MEMORY_RESERVE_GIB", "VLLM_SHM_READER_SLEEP"
    assert name not in world.plan(machine=SPARK).launch.variables
    (world.site / "vllm" / "envs.py").write_text(f'environment_variables = {{"{sleep}": None}}\n')
    assert world.plan(machine=SPARK).launch.variables[sleep] == "1"
    assert world.plan(machine=SPARK, variables={sleep: "0"}).launch.variables[sleep] == "0"
    assert sleep not in world.plan(machine=DESKTOP).launch.variables
    (world.site / "vllm" / "envs.py").write_text(f'environment_variables = {{"{name}": None}}\n')
    assert world.plan(machine=SPARK).launch.variables[name] == "12.17"
    assert world.plan(machine=SPARK, floor=9.0).launch.variables[name] == "9"
    assert world.plan(machine=SPARK, variables={name: "20"}).launch.variables[name] == "20"
    assert name not in world.plan(machine=DESKTOP).launch.variables


@pytest.mark.parametrize(
    ("values", "reference"),
    [
        ({"recipe": "no-such-recipe"}, "usage"),
        ({"model": ""}, "usage"),
        ({"recipe": "toy-cpu", "model": ""}, "usage"),
        ({"recipe": "qwen3-vl-235b-nvfp4"}, "usage"),
        ({"nodes": 2}, "usage"),
        ({"nodes": 2, "address": "192.0.2.77"}, "address-missing"),
        ({"flags": ("--tensor-parallel-size=2",)}, "usage"),
        ({"recipe": "qwen3-next-80b-nvfp4-marlin"}, "serve-unfit"),
        ({"recipe": "qwen3-next-80b-nvfp4-marlin", "model": ""}, "model-missing"),
        ({"flags": ("--max-model-length=5",)}, "flag-unknown"),
        ({"flags": ("--port=5",)}, "flag-unknown"),
        ({"flags": ("--num-gpu-blocks-override=100000000",)}, "flag-unknown"),
        ({"flags": ("value",)}, "flag-unknown"),
        ({"flags": ("--nnodes=2", "--tensor-parallel-size=4")}, "usage"),
        ({"variables": {"VLLM_NVFP4_GEMM_BACKEND": "x"}}, "variable-refused"),
    ],
)
def test_refused_before_the_start(world: World, values: dict[str, Any], reference: str) -> None:
    with refusal(reference):
        world.plan(**values, machine=DESKTOP)


@pytest.mark.parametrize(
    ("config", "words", "tensor"),
    [
        ({"num_attention_heads": 32, "num_key_value_heads": 8}, (), ["2", "1", "4", "8"]),
        ({"num_attention_heads": 48, "num_key_value_heads": 8}, (), ["2", "1", "4", "8"]),
        ({"num_attention_heads": 24, "num_key_value_heads": 1, "intermediate_size": 48}, (), ["2", "3", "4", "8"]),
        ({"num_attention_heads": 32, "num_key_value_heads": 8, "moe_intermediate_size": 1026}, (), ["2", "1", "2", "2"]),
        ({"num_attention_heads": 32, "num_key_value_heads": 8, "linear_num_value_heads": 2}, (), ["2", "1", "2", "2"]),
        # Experts as a whole can be divided where their size cannot.
        ({"num_attention_heads": 32, "num_key_value_heads": 8, "num_experts": 6, "moe_intermediate_size": 1027}, (), ["1"] * 4),
        ({"num_attention_heads": 32, "num_key_value_heads": 8, "num_experts": 6, "moe_intermediate_size": 1027}, ("--enable-expert-parallel",), ["2", "1", "2", "2"]),
        ({"num_attention_heads": None, "num_key_value_heads": None, "intermediate_size": 48}, (), ["2", "3", "4", "8"]),
    ],
)
def test_layers_are_divided_by_what_divides_heads_and_experts(world: World, config: dict[str, Any], words: tuple[str, ...], tensor: list[str]) -> None:
    """Over 2, 3, 4 and 8 machines; what is left is the pipeline's."""
    path = world.model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    plans = [world.plan(nodes=nodes, flags=words, machine=SPARK, address="127.0.0.1") for nodes in (2, 3, 4, 8)]
    assert [flags.value(plan.launch.flags, "--tensor-parallel-size") for plan in plans] == tensor


def test_machines_of_one_server_have_vllms_own_arguments(world: World) -> None:
    """The first one serves, and the others compute for it; each speaks over the interface that has its address."""
    shared: dict[str, Any] = {"nodes": 3, "machine": SPARK, "address": "127.0.0.1"}
    first, third = world.plan(**shared), world.plan(**shared, join="10.0.0.1", rank=2, node_port=5)
    assert {"--node-rank=0", "--master-addr=127.0.0.1", "--nnodes=3", "--master-port=29502"} <= set(first.launch.flags)
    assert {"--node-rank=2", "--master-addr=10.0.0.1", "--nnodes=3", "--master-port=6", "--headless"} <= set(third.launch.flags)
    assert (flags.value(first.launch.flags, "--distributed-executor-backend"), bool(first.launch.machines)) == ("mp", True)
    assert "--headless" not in first.launch.flags
    names = ("VLLM_HOST_IP", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
    assert [third.launch.variables[name] for name in names] == ["127.0.0.1", "lo", "lo"]
    assert world.plan(**shared, variables={"NCCL_SOCKET_IFNAME": "eth7"}).launch.variables["NCCL_SOCKET_IFNAME"] == "eth7"
    assert world.plan(join="10.0.0.1", address="127.0.0.1", machine=SPARK).nodes == 2


def test_one_key_of_what_the_recipe_gives_as_a_whole_is_refused(world: World) -> None:
    """vLLM would drop all other keys, such as the method of the drafts."""
    words = ("--speculative-config={\"method\":\"mtp\",\"num_speculative_tokens\":3}", "--max-model-len=5")
    with refusal("flag-unknown", match="sets one key of --speculative-config", says=words[0]):
        flags.merge(words, ("-sc.num_speculative_tokens=2",))
    assert flags.merge(words[1:], ("-sc.num_speculative_tokens=2",)) == (words[1], "-sc.num_speculative_tokens=2")


@pytest.mark.parametrize("drafts", [("--speculative-config={}",), ("--speculative-config", "{}"), ("-sc", "{}"), ("-sc.method=mtp",), ("--spec-method=ngram", "--spec-tokens", "3")])
def test_a_server_without_drafts_has_none_of_their_arguments(drafts: tuple[str, ...]) -> None:
    assert flags.without_drafts(("--dtype", "half", *drafts, "--enforce-eager")) == ("--dtype", "half", "--enforce-eager")


def test_ray_stays_possible_by_flags(world: World) -> None:
    """The user's own cluster has the other machine, so none is waited for."""
    plan = world.plan("toy-cpu", nodes=2, flags=("--distributed-executor-backend=ray",), machine=SPARK)
    assert (bool(plan.launch.machines), flags.value(plan.launch.flags, "--tensor-parallel-size")) == (False, "2")
    assert flags.value(plan.launch.flags, "--distributed-executor-backend") == "ray"
    assert not flags.value(plan.launch.flags, "--nnodes")


@pytest.mark.parametrize("field", ["max_position_embeddings", "num_key_value_heads", "num_hidden_layers", "head_dim", "layer_types", "text_config", "quantization_config"])
@pytest.mark.parametrize("value", ["x", -1, 1.5, [], {"a": 1}, [["x"]], 10**30, True, None], ids=str)
def test_hostile_config_ends_in_a_named_refusal(world: World, field: str, value: object) -> None:
    """The first one of these ended the program with a fault of its own."""
    path = world.model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    with contextlib.suppress(errors.SparkwrightError):
        assert world.plan(nodes=2, address="127.0.0.1", machine=SPARK)


def test_refusals_name_the_successor(world: World) -> None:
    """Of a removed variable, and of a misspelt one."""
    with refusal("variable-refused") as variable:
        world.plan(variables={"VLLM_NVFP4_GEMM_BACKEND": "marlin", "VLLM_CPU_KVCACHE_SPCE": "1"})
    assert list(variable.value.details) == [
        "VLLM_CPU_KVCACHE_SPCE: unknown", "VLLM_NVFP4_GEMM_BACKEND: gone since 0.24.0; now --linear-backend",
    ]  # fmt: skip
    # A gate or a measurement starts its server so.
    with refusal("variable-refused"):
        server_process.Server(LaunchPlan(world.python, world.model, variables={"VLLM_ATTENTION_BACKEND": "FLASHINFER"}), world.folder / "log")
    with refusal("flag-unknown") as flag:
        world.plan(flags=("--max-model-length=5", "--api_key=x"))
    assert flag.value.details[0] == "--max-model-length: unknown; perhaps --max-model-len"
    assert "VLLM_API_KEY" in flag.value.details[1]
    with refusal("flag-unknown", match=r"max\\x00len"):
        flags.parse(("--dtype", "half", "--max\0len"))


def test_environment_without_the_recipes_vllm_is_refused(world: World) -> None:
    old = world.folder / "old"
    with refusal("recipe-unfit", match=r"does not know vLLM '0\.12\.0'"):
        launch.plan(launch.ServeRequest(recipe="toy-cpu", model=str(world.model)), standin.environment(old, "0.12.0"), world.folder / "data")
    shutil.rmtree(next(old.rglob("vllm-0.12.0.dist-info")))
    with refusal("environment-unusable", match="no vLLM"):
        examine(old / "bin" / "python")


def test_port_is_checked_now() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, refusal("port-taken"):
        launch.check_port("127.0.0.1", taken.getsockname()[1])
    with refusal("port-taken"):
        launch.check_port("a..b", 8000)


# The process.


def test_server_takes_the_place_of_the_program(machine: standin.Machine) -> None:
    """It has the pid that was started, gets signals itself, and the exit status is its own."""
    child = machine.start("--flag=--dtype", "--flag=float32")
    machine.until_healthy()
    seen = machine.told()
    assert (seen["pids"][0], seen["argv"][1:3], seen["argv"][-2:]) == (child.pid, ["serve", str(machine.model)], ["--dtype", "float32"])
    child.send_signal(signal.SIGTERM)
    assert child.wait(60) == -signal.SIGTERM


def test_dry_run_prints_a_command_that_a_shell_reads_as_it_is_started(machine: standin.Machine) -> None:
    """Without the user's secret, and without a start."""
    machine.environment |= {"VLLM_API_KEY": "geheim"}
    settings = '{"method":"ngram","num_speculative_tokens":3,"prompt_lookup_max":4,"prompt_lookup_min":2,"x":"it\'s a"}'
    # A share that is not given follows from what is free, which two runs may find different.
    words = ("--flag=--max-model-len", "--flag=16", f"--flag=--speculative-config={settings}", "--flag=--gpu-memory-utilization=0.5")
    command = json.loads(machine.run("--dry-run", "--json", *words).stdout)["command"]
    shown = machine.run("--dry-run", *words).stdout
    program = shown[shown.index(str(machine.python)) :].replace(str(machine.python), "printf '%s\\n'", 1)
    assert subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True).stdout.splitlines() == command[1:]
    assert f"--speculative-config={settings}" in command
    assert ("'VLLM_API_KEY=(set)' " in shown, "geheim" in shown, machine.record.exists()) == (True, False, False)
    assert max(len(line) for line in shown.splitlines() if str(machine.folder) not in line) <= 80


def test_argument_of_vllm_needs_no_option(machine: standin.Machine) -> None:
    """A misspelt option is no argument of vLLM, and the option is named."""
    words = ("--max-model-len", "32", "-tp", "1", "--enforce-eager")
    arguments = main.parse(["serve", "toy-cpu", *words[:2], "--port", "1", *words[2:], "--flag=--seed=1"])
    assert (arguments.recipe, arguments.port, arguments.flag) == ("toy-cpu", 1, ["--seed=1", *words])
    error = json.loads(machine.run("--json", "--dry-rn").stdout)["error"]
    assert (error["reference"], error["details"]) == ("flag-unknown", ["--dry-rn: unknown; perhaps --dry-run"])


def test_argument_of_vllm_is_refused_with_the_option_that_gives_it() -> None:
    with refusal("usage", match="bench has no option --max-model-len", says="is given as: --flag=--max-model-len --flag=32768 --flag=--hf-token ***"):
        main.run(["bench", "--recipe", "toy-cpu", "--max-model-len", "32768", "--hf-token", "geheim"])


#: Variables and flags of a kind, each of which held a secret that was shown once.
SECRET_WORDS = {
    "option": ["--hf-token=geheim"],
    "option, apart": ["--hf-token", "geheim"],
    "flag": ["--flag=--hf-token", "--flag=geheim"],
    "flags": [
        '--flag=--attention-config={"api_key": "geheim", "x": 1}', '--flag=--hf-overrides={"api_keys": ["geheim"], "headers": {"Authorization": "Bearer geheim"}}',
    ],
    "variables": ["--variable=HF_TOKEN=geheim", "--variable", "AWS_SECRET_ACCESS_KEY=geheim", "--variable=HTTPS_PROXY=http://user:geheim@proxy.invalid"],
    "parts": ["--variable", "HF_TOKEN=abc,geheim", "--variable=NCCL_AUTH=a,geheim"],
    "quotes": ['--variable=HF_TOKEN=a"b}c geheim'],
}  # fmt: skip


@pytest.mark.parametrize("words", SECRET_WORDS.values(), ids=SECRET_WORDS)
def test_secret_is_never_shown(machine: standin.Machine, words: list[str]) -> None:
    machine.environment["HUGGING_FACE_API_KEY"] = "geheim"
    for more in (("--dry-run",), ("--dry-run", "--json"), ("--unit",)):
        done = machine.run(*words, *more)
        assert "geheim" not in done.stdout + done.stderr
        if "flag-unknown" in done.stderr + done.stdout:
            continue
        assert (done.returncode == 0) is ("--unit" not in more)
        if "--unit" in more:
            assert "ExecStart" not in done.stdout
            assert "EnvironmentFile=" in done.stderr


def test_variables_of_the_shell_that_matter_reach_the_server_and_others_are_named(machine: standin.Machine) -> None:
    """A recipe's own count before them. Caches of another release are no wish of the user."""
    caches = Path(machine.environment.get("SPARKWRIGHT_PREFIX") or client.default_prefix()) / "releases" / "old" / "caches"
    machine.environment |= {
        "TRITON_PTXAS_PATH": "/opt/ptxas", "NCCL_SOCKET_IFNAME": "enp1s0", "HF_TOKEN": "geheim", "VLLM_USE_V1": "1", "LD_PRELOAD": "",
        "LD_LIBRARY_PATH": "/opt/lib", "TORCHDYNAMO_DISABLE": "0", "TRITON_CACHE_DIR": str(caches), "UNRELATED": "1",
    }  # fmt: skip
    done = machine.run("toy-cpu", "--dry-run", "--json")
    variables = json.loads(done.stdout)["variables"]
    assert (variables["TRITON_PTXAS_PATH"], variables["NCCL_SOCKET_IFNAME"], variables["HF_TOKEN"]) == ("/opt/ptxas", "enp1s0", "(set)")
    assert variables["TORCHDYNAMO_DISABLE"] == "1"
    assert not {"VLLM_USE_V1", "LD_LIBRARY_PATH", "TRITON_CACHE_DIR", "UNRELATED"} & variables.keys()
    warning = next(line for line in done.stderr.splitlines() if "not passed to the server" in line)
    assert "LD_LIBRARY_PATH" in warning
    assert "VLLM_USE_V1" in warning
    assert "LD_PRELOAD" not in warning


def test_without_a_release_the_way_to_one_is_named(machine: standin.Machine) -> None:
    machine.environment = {**machine.environment, "SPARKWRIGHT_PREFIX": str(machine.folder / "none"), "VIRTUAL_ENV": str(machine.folder)}
    done = machine.verb("serve", "toy-cpu", "--model", str(machine.model))
    assert (done.returncode, "nothing-installed" in done.stderr, "sparkwright install" in done.stderr) == (1, True, True)


def test_plan_shows_what_fits_and_what_decided_each_argument(machine: standin.Machine) -> None:
    done = machine.run("toy-cpu", "--dry-run", "--max-model-len", "512", "--dtype=float32")
    lines = [re.split(" {2,}", line.strip()) for line in done.stderr.splitlines()]
    rows = {line[0]: line[1:] for line in lines}
    decided = {line[-1]: line[0] for line in lines}
    assert rows["cache"][0] == "1.0"
    assert re.fullmatch(r"[\d,]+ tokens fit; a request has 512 tokens", rows["cache"][1])
    assert float(rows["sum"][0]) == sum(float(rows[name][0]) for name in ("weights", "cache", "reserve"))
    assert decided["--max-model-len 512 (recipe: 1024)"] == "you"
    assert decided["--dtype=float32"] == "you"
    assert decided["--enforce-eager"] == "recipe"
    assert decided["--gpu-memory-utilization=" + re.findall("utilization=([0-9.]+)", done.stdout)[0]] == "memory"


@pytest.mark.parametrize(
    ("text", "recipe"),
    [
        ("openai/gpt-oss-120b", "gpt-oss-120b-mxfp4"),
        ("OpenAI/GPT-OSS-120B", "gpt-oss-120b-mxfp4"),
        ("gemma-4-31b", "gemma-4-31b-nvfp4"),
        ("gpt-oss-120b", "gpt-oss-120b-mxfp4"),
        ("toy-cpu", "toy-cpu"),
    ],
)
def test_model_id_or_a_part_of_a_name_finds_its_recipe(text: str, recipe: str) -> None:
    assert launch.find_recipe(ROOT, text).name == recipe


@pytest.mark.parametrize(
    ("text", "details", "todo"),
    [
        ("unsloth/gpt-oss-120b", ["gpt-oss-120b-mxfp4"], "Without a recipe: sparkwright serve --model unsloth/gpt-oss-120b"),
        ("Qwen/Qwen3.6-35B-A3B", ["qwen3.6-35b-a3b-fp8-mtp2", "qwen3.6-35b-a3b-nvfp4-b12x", "qwen3.6-35b-a3b-nvfp4-mtp3"], "Name one of the recipes."),
        ("gema-4-31b-nvfp4", ["gemma-4-31b-nvfp4"], "Name one of the recipes."),
        ("org/zzz", [], "Without a recipe: sparkwright serve --model org/zzz"),
    ],
)
def test_name_of_no_single_recipe_lists_those_that_are_near(text: str, details: list[str], todo: str) -> None:
    with refusal("usage") as caught:
        launch.find_recipe(ROOT, text)
    assert {line.partition(",")[0] for line in caught.value.details} >= set(details)
    assert len(caught.value.details) <= 3
    assert todo in caught.value.todo


def test_before_a_download_its_size_and_time_are_shown(machine: standin.Machine, listen: Callable[[Say], Listener]) -> None:
    """The hub states the size of each file, and a model that is too large is refused before it comes. Without an answer the size is not known."""
    files = [("model-1.safetensors", 3 << 30), ("model-2.safetensors", 1 << 30), ("original/model.safetensors", 9 << 30), ("config.json", 100), ("x.bin", 5 << 30)]
    sizes = {"sha": "a" * 40, "siblings": [{"rfilename": name, "size": size, "lfs": None} for name, size in files]}
    hub = listen(lambda connection, path: connection.sendall(whole(sizes if "org/toy" in path else {"sha": "a" * 40, "siblings": [{"rfilename": "a.safetensors", "size": 1 << 60}]})))
    machine.environment |= {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(machine.folder / "hub"), "HF_TOKEN": "geheim"}
    done = machine.run("--model", "org/toy", "--dry-run", "--max-model-len=64", "--revision", "v1")
    assert done.returncode == 0, done.stderr
    assert hub.asked == ["/api/models/org/toy/revision/v1?blobs=true"]
    assert b"authorization: Bearer geheim" in hub.heads[0].replace(b"Authorization", b"authorization")
    shown = " ".join(done.stderr.split())
    assert "download 4.3 GB: 42.9 s at 100.0 MB/s, 7 min 09 s at 10.0 MB/s" in shown
    assert "weights 4.0 as the hub or the recipe states" in shown
    assert "--download lets vLLM fetch it" in shown
    done = machine.run("--model", "org/large", "--download", "--json")
    assert json.loads(done.stdout)["error"]["details"][0].startswith("memory-short: 1073741824.0 GiB of weights")
    hub.close()
    assert "download of unknown size" in " ".join(machine.run("--model", "org/toy", "--dry-run").stderr.split())


SSH = """\
while [ "$1" != far ]; do shift; done
shift
exec sh -c "$*"
"""


@pytest.mark.skipif(not shutil.which("rsync"), reason="there is no rsync")
@pytest.mark.parametrize("cached", [False, True])
def test_model_is_copied_to_another_machine_and_compared(machine: standin.Machine, cached: bool) -> None:
    """By rsync over what stands for ssh and runs its other half here: the folder is its own copy. A missing rsync is named."""
    processes.script(machine.folder / "ssh", SSH)
    machine.environment["PATH"] = f"{machine.folder}:{machine.environment['PATH']}"
    folder, words = machine.model, ["--copy-model", "far"]
    if cached:
        folder = machine.folder / "hub" / "models--org--toy"
        (folder / "snapshots").mkdir(parents=True)
        shutil.copytree(machine.model, folder / "snapshots" / COMMIT)
        words += ["--model", "org/toy", "--revision", COMMIT]
        machine.environment["HF_HUB_CACHE"] = str(folder.parent)
    done = machine.run(*words)
    assert done.returncode == 0, done.stderr
    assert f"far has the same {folder}" in done.stdout
    machine.environment["PATH"] = str(machine.folder)
    assert "tool-missing: rsync is not installed" in machine.run(*words).stderr


def test_copy_of_a_model_that_differs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what rsync lists as changed; a folder's time is no difference."""
    processes.script(tmp_path / "rsync", 'echo "$@" >>"$0.words"\n[ "$1" = -c ] && echo ".d..t...... ./" && echo "<fc........ model.safetensors" || :')
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with refusal("model-differs", says="<fc........ model.safetensors"):
        models.copy(tmp_path / "toy", "me@far")
    copied, compared = (tmp_path / "rsync.words").read_text().splitlines()
    assert copied == f"-aL --mkpath -s --exclude=*.incomplete -- {tmp_path}/toy/ me@far:{tmp_path}/toy/"
    assert compared == f"-c -n -i {copied}"


@pytest.mark.parametrize("host", ["-oProxyCommand=x", "me@-oProxyCommand=x", "far:/etc", "a b", "$(id)", "far/x", "::1"])
def test_host_that_is_none_is_refused(tmp_path: Path, host: str) -> None:
    with refusal("usage", match="no name of a host"):
        models.copy(tmp_path, host)


# Health.

USAGE = {"usage": {"prompt_tokens": 2, "completion_tokens": 8}}
GARBAGE = whole({**completion(text="!" * 8, token_ids=[0] * 8), **USAGE})
ERROR = whole({"error": {"message": "EngineDeadError"}}, "500 Internal Server Error")
Answers = dict[str, bytes | None]


def answering(answers: Answers) -> Say:
    """Return a server that answers each path with the given bytes, and with silence where they are None."""
    steps = itertools.count(5)

    def say(connection: socket.socket, path: str) -> None:
        answer = {"/v1/models": whole(MODELS), "/v1/completions": whole({**completion(token_ids=[5] * 8), **USAGE}), **answers}.get(path)
        if answer is None:
            silent(connection, path)
        else:
            connection.sendall(metrics(next(steps)) if answer == b"moving" else answer)

    return say


def metrics(tokens: float) -> bytes:
    data = f'vllm:generation_tokens_total{{model="toy"}} {tokens}\nvllm:num_requests_running 1\n'.encode()
    return head("text/plain", len(data)) + data


@pytest.mark.parametrize(
    ("answers", "state", "text"),
    [
        ({}, "serving", "an answer came"),
        ({"/metrics": ERROR}, "serving", "an answer came"),
        ({"/v1/completions": GARBAGE}, "garbage", "token 0 8 times"),
        ({"/v1/completions": ERROR, "/metrics": metrics(5)}, "dead", "EngineDeadError"),
        ({"/v1/completions": None, "/metrics": b"moving"}, "busy", "generation_tokens_total increases"),
        ({"/v1/completions": None, "/metrics": metrics(5)}, "stuck", "no counter increases"),
        ({"/v1/completions": None, "/metrics": None}, "stuck", "no counter increases"),
        ({"/v1/completions": whole(b"<html>"), "/metrics": metrics(5)}, "stuck", "no counter"),
        ({"/v1/models": whole({"data": []}), "/metrics": metrics(5)}, "stuck", "lists no model"),
    ],
)
def test_health_tells_slow_from_dead(answers: Answers, state: str, text: str, listen: Callable[[Say], Listener]) -> None:
    found = health.check(listen(answering(answers)).url, 1.5 if state in ("serving", "garbage", "dead") else 0.3)
    assert (found.state, text in found.message) == (state, True), found


@pytest.mark.parametrize(
    ("answers", "reference", "text"),
    [
        ({}, "", ""), ({"/v1/completions": None, "/metrics": metrics(5)}, "server-stuck", ""), ({"/v1/completions": GARBAGE}, "server-garbage", ""),
        ({"/v1/models": whole({}, "401 Unauthorized")}, "usage", "VLLM_API_KEY"), ({"/v1/models": whole({}, "404 Not Found")}, "usage", "address"),
    ],
)  # fmt: skip
def test_health_command_fails_unless_the_server_works(answers: Answers, reference: str, text: str, listen: Callable[[Say], Listener]) -> None:
    with outcome(reference, says=text):
        assert main.run(["serve", "--health", listen(answering(answers)).url, "--patience", "1"]) == 0


# Models.


NAME, COMMIT, ANOTHER = "org/Toy-1", "a" * 40, "b" * 40


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    """Return a cache of models with one, as the hub's client lays it out: links into blobs."""
    place = tmp_path / "hub" / f"models--{NAME.replace('/', '--')}"
    standin.model(place / "blobs")
    (place / "snapshots" / COMMIT).mkdir(parents=True)
    for file in (place / "blobs").iterdir():
        (place / "snapshots" / COMMIT / file.name).symlink_to(Path("../../blobs") / file.name)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(COMMIT)
    return tmp_path / "hub"


def resolved(hub: Path, revision: str = "", *, download: bool = False) -> models.LocalModel:
    return models.find(NAME, revision, {"HF_HUB_CACHE": str(hub), "HF_ENDPOINT": NOWHERE}, download=download)


def test_a_folder_is_served_as_it_is(tmp_path: Path) -> None:
    """Its weights are counted from the headers, and those in other forms by their files. With an index, partial files beside it are old."""
    one = models.find(str(standin.model(tmp_path / "toy")), "", {})
    assert (one.path, one.weights, one.commit) == (tmp_path / "toy", 8, "")
    for name, text in {"model.safetensors.index.json": '{"weight_map": {"weight": "model.safetensors"}}', "old.incomplete": ""}.items():
        (tmp_path / "toy" / name).write_text(text)
    assert models.find(str(tmp_path / "toy"), "", {}).weights == 8
    (tmp_path / "toy" / "model.safetensors.index.json").unlink()
    (tmp_path / "toy" / "old.incomplete").unlink()
    (tmp_path / "toy" / "model.safetensors").rename(tmp_path / "toy" / "pytorch_model.bin")
    assert models.find(str(tmp_path / "toy"), "", {}).weights == (tmp_path / "toy" / "pytorch_model.bin").stat().st_size


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"HF_HUB_CACHE": "/a", "HF_HOME": "/b"}, "/a"), ({"HF_HOME": "/b", "XDG_CACHE_HOME": "/c"}, "/b/hub"),
        ({"XDG_CACHE_HOME": "/c"}, "/c/huggingface/hub"), ({}, "~/.cache/huggingface/hub"),
    ],
)  # fmt: skip
def test_the_cache_is_where_the_hubs_client_keeps_it(variables: dict[str, str], folder: str) -> None:
    assert models.cache_folder(variables) == Path(folder).expanduser()


@pytest.mark.parametrize("revision", [ANOTHER, "other", "../../../etc/passwd", "refs/\0"])
def test_a_commit_that_is_not_there_is_missing(hub: Path, revision: str) -> None:
    """Nothing is fetched, unless somebody allows vLLM to."""
    with refusal("model-missing", match="not in the model cache"):
        resolved(hub, revision)
    assert resolved(hub, revision, download=True).path == Path(NAME)


@pytest.mark.parametrize("name", ["nowhere", "./nowhere", "~/nowhere", "a/b/c", "org/not-here", "x" * 300, "~nobody-here/x"])
def test_what_is_nowhere_is_missing(name: str, tmp_path: Path) -> None:
    """A path or a name."""
    with refusal("model-missing"):
        models.find(name, "", {"HF_HUB_CACHE": str(tmp_path)})


@pytest.mark.parametrize(
    ("file", "text", "match"),
    [
        ("config.json", None, r"no config\.json"), ("model.safetensors", None, "safetensors"),
        ("model-00002-of-00002.safetensors.part", "", "half downloaded"),
        (
            "model.safetensors.index.json",
            '{"weight_map": {"weight": "model.safetensors", "more": "model-00002-of-00002.safetensors"}}',
            "model-00002",
        ),
    ],
)  # fmt: skip
def test_a_folder_that_is_no_model_says_what_it_lacks(tmp_path: Path, file: str, text: str | None, match: str) -> None:
    folder = standin.model(tmp_path / "toy")
    (folder / file).unlink() if text is None else (folder / file).write_text(text)
    with refusal("model-missing", match=match):
        models.find(str(folder), "", {})


# The program's wheel, without a checkout.


#: What `pip install sparkwright` does not bring.
ABSENT = ("git", "numpy", "scipy", "jinja2", "pypi_simple", "elftools", "ml_dtypes",
          "cyclonedx", "auditwheel")  # fmt: skip
BARE = f"""
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {ABSENT!r}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Blocker())
from sparkwright.cli.main import main
sys.exit(main())
"""


@pytest.fixture(scope="module", name="unpacked")
def _unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the program as its wheel lays it down."""
    folder = tmp_path_factory.mktemp("site")
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    [package] = settings["packages"]
    for source, target in {package: Path(package).name, **settings["force-include"]}.items():
        (folder / target).parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if (ROOT / source).is_dir() else shutil.copy)(ROOT / source, folder / target)
    return folder


def bare(machine: standin.Machine, unpacked: Path, program: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a *program* with the unpacked one and nothing but what it requires, in a folder of no checkout."""
    environment = {**machine.environment, "PYTHONPATH": str(unpacked)}
    return subprocess.run(
        [sys.executable, "-P", "-c", program, *words], env=environment, cwd=machine.folder, capture_output=True, text=True, check=False, timeout=120
    )


def test_it_serves_without_a_checkout_and_without_the_rest_of_the_program(machine: standin.Machine, unpacked: Path) -> None:
    """From a recipe of its own data, which has the policies that a look at the server needs."""
    done = bare(machine, unpacked, BARE, *machine.words("toy-cpu", "--dry-run", "--json")[3:])
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["recipe"] == "toy-cpu"
    program = "from sparkwright.core import config; from sparkwright.gates.core import policy; policy.load(config.root()); print(config.root())"
    root = bare(machine, unpacked, program)
    assert root.stdout.strip() == str(unpacked / "sparkwright" / "data")


# Warm packs.


def pack_of(world: World, plan: launch.ServingPlan, folder: Path, **changes: Any) -> records.WarmPack:
    """Install a pack that is made for what *plan* serves here."""
    marker = plan.environment.marker
    assert marker
    assert plan.recipe
    key = warm_pack.pack_key(plan.launch, plan.recipe.name, model_digest(world.model), marker)
    folder.mkdir()
    archive, pack = packs.pack(folder, key=msgspec.structs.replace(key, **changes))
    return packs.install(world.environment, archive, pack)


@pytest.mark.parametrize(
    ("served", "other", "tuned"),
    [
        ({}, {"flags": ["--moe-backend=flashinfer_b12x"]}, 0.0),
        ({"flags": ["--moe-backend=flashinfer_b12x"]}, {}, AUTOTUNE),
    ],
)
def test_memory_for_tuning_is_that_of_the_release_that_serves(
    world: World, served: dict[str, Any], other: dict[str, Any], tuned: float
) -> None:
    """The flags of any release of the recipe decided."""
    variants = [{"vllm": "<0.20", **other}, {"vllm": ">=0.20", **served}]
    world.edit("toy-cpu", versions=variants)
    assert world.plan("toy-cpu", machine=SPARK, flags=(PINNED,)).memory.autotune == tuned


def test_a_server_starts_from_its_pack_and_needs_no_memory_for_tuning(world: World) -> None:
    world.edit("toy-cpu", versions=[{"vllm": ">=0.20", "flags": ["--moe-backend=flashinfer_b12x"]}])
    world.install()
    before = world.plan("toy-cpu", machine=SPARK, flags=(PINNED,))
    assert before.memory.autotune == AUTOTUNE
    pack = pack_of(world, before, world.folder / "own")
    # Its memory and its address are no part of the key.
    plan = world.plan("toy-cpu", machine=SPARK, flags=(PINNED,), floor=1.0, port=9000)
    assert plan.warm == warm_pack.overlay(world.environment.resolve(), pack)
    assert plan.launch.environment()["VLLM_CACHE_ROOT"].startswith(str(plan.warm))
    assert (plan.warm / process.CACHES / packs.GRAPH).exists()
    assert plan.memory.autotune == 0
    assert not any("warm pack" in text for text in plan.warnings)


@pytest.mark.parametrize(
    ("changes", "values", "said"),
    [
        ({"driver": "1.2"}, {}, "the warm pack is not used: driver: 1.2, here "),
        ({"gpu": "NVIDIA GB10 (SM 12.1)"}, {}, "the warm pack is not used: gpu: NVIDIA GB10 (SM 12.1), here "),
        ({"model": "e" * 64}, {}, f"the warm pack is not used: model: {'e' * 64}, here "),
        ({"wheels": {"vllm": "b" * 64}}, {}, "the warm pack is not used: wheel of vllm"),
        ({}, {"flags": ("--seed=3",)}, "the warm pack is not used: here: --seed=3"),
        ({}, {"variables": {"VLLM_CACHE_ROOT": "/elsewhere"}}, "the warm pack is not used, as caches are elsewhere: VLLM_CACHE_ROOT"),
        ({}, {}, "the warm pack is not used: its file is missing, or is not the one that was signed"),
    ],
    ids=["driver", "gpu", "model", "wheel", "flag", "root", "file"],
)
def test_a_pack_of_another_machine_or_command_or_with_other_bytes_is_left_and_the_part_is_named(
    world: World, changes: dict[str, str], values: dict[str, Any], said: str
) -> None:
    world.install()
    pack = pack_of(world, world.plan("toy-cpu", machine=DESKTOP), world.folder / "own", **changes)
    if not changes and not values:
        (world.environment / process.CACHES / client.PACKS / pack.sha256).write_bytes(bytes(pack.size))
    plan = world.plan("toy-cpu", machine=DESKTOP, **values)
    assert plan.warm is None
    assert [text for text in plan.warnings if said in text]
    assert [*(world.environment / process.CACHES / "warm").glob("[!.]*")] == []


def test_a_pack_that_the_release_offers_is_named_in_a_line_and_not_fetched(world: World) -> None:
    world.install(packs={"toy-cpu": 31_000_000})
    plan = world.plan("toy-cpu", machine=DESKTOP)
    assert plan.warm is None
    assert [text for text in plan.warnings if "`sparkwright install --warm toy-cpu` fetches 31 MB" in text]


# What an owner sees first fits into a terminal of 80 columns.

SPECULATION = '--speculative-config={"method":"ngram","num_speculative_tokens":3,"prompt_lookup_max":4,"prompt_lookup_min":2}'


@pytest.fixture(name="place", scope="module")
def _place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[standin.Machine]:
    """Return a machine with short paths, as an owner's are."""
    folder = Path("/tmp") / f"sw{tmp_path_factory.mktemp('width').stat().st_ino}"
    folder.mkdir()
    machine = standin.Machine(folder, standin.environment(folder / "venv"))
    machine.environment |= {"HF_HUB_CACHE": str(folder / "hub"), "SPARKWRIGHT_PREFIX": str(folder / "none"), "VLLM_USE_V1": "1"}
    yield machine
    machine.close()
    subprocess.run(["rm", "-r", str(folder)], check=True)


def screen(command: list[str], columns: int, place: standin.Machine) -> list[str]:
    """Return the lines that *command* writes to a terminal of so many *columns*, without colours."""
    typed = f"stty cols {columns}; {shlex.join(command)}"
    variables = {name: value for name, value in place.environment.items() if name not in ("COLUMNS", "LINES")}
    done = subprocess.run(
        ["script", "--quiet", "--command", typed, "/dev/null"], env={**variables, "TERM": "xterm"}, cwd=place.folder, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, check=True,
    )  # fmt: skip
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", done.stdout.decode("utf-8", "replace"))
    return [line.rpartition("\r")[2].rstrip() for line in text.replace("\r\n", "\n").split("\n")]


#: Where a word that is longer than a line is divided.
ENDS = (",", "/", "=", ":")
SHOWN = {
    "doctor": ["doctor", "--offline"],
    "dry-run": ["serve", "toy-cpu", "--model", "{model}", "--floor", "0", "--dry-run", "--max-model-len=64", SPECULATION, "--python", "{python}"],
    "not downloaded": ["serve", "toy-cpu", "--model", "org/toy", "--python", "{python}", "--variable", "HF_HUB_OFFLINE=1"],
    "no room": ["serve", "--model", "{model}", "--python", "{python}", "--kv-cache-memory-bytes=4000G"],
    "unknown flag": ["serve", "--model", "{model}", "--python", "{python}", "--max-model-length=5", "--hf-token=geheim"],
    "many recipes": ["serve", "qwen3.6"],
    "no recipe": ["serve", "org/zzz"],
    "no release": ["serve", "gpt-oss-120b"],
    "bench": ["bench", "--max-model-len", "5"],
    "help": ["serve", "--help"],
}


@pytest.mark.parametrize("words", SHOWN.values(), ids=SHOWN)
def test_no_word_is_broken_in_80_columns(words: list[str], place: standin.Machine) -> None:
    """A word that is longer than a line goes on behind a comma or the like; in a table, one that is longer than its column goes on anywhere."""
    values = {"model": str(place.model), "python": str(place.python)}
    own = [re.sub(r"\{(model|python)\}", lambda match: values[match[1]], word) for word in words]
    command = [sys.executable, "-m", "sparkwright", *own]
    narrow, wide = (screen(command, columns, place) for columns in (80, 400))
    assert [line for line in narrow if len(line) > 80] == []
    # Figures of the machine's memory differ between two runs.
    whole = {re.sub(r"\d+", "0", word) for line in wide for word in line.split()}
    long = [word for word in whole if len(word) > 40]
    for line in narrow:
        words = re.sub("─+", "", line).split()
        for word in words:
            part = re.sub(r"\d+", "0", word.strip("'\\"))
            divided = word.rstrip("'\\")[-1:] in ENDS or word == words[0] or len(word) > 60
            assert re.sub(r"\d+", "0", word) in whole or (divided and any(part in each for each in long)), (word, line)
