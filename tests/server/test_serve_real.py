"""`serve` and `health` with the real vLLM, on the CPU: a request answered, an engine that hangs, works and dies, a clean end, and a warm start."""

import ast
import json
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.request import Request, urlopen

import psutil
import pytest
from msgspec.structs import replace
from tests.refusals import refusal
from tests.support import serving, standin

from sparkwright.bench.recipes import recipe as recipes
from sparkwright.bench.server import flags, launch, server_log, server_process, warm_pack
from sparkwright.core.process import CACHES
from sparkwright.serving.environment import ServingEnvironment, examine

pytestmark = pytest.mark.server

ROOT = Path(__file__).parents[2]


class Real(standin.Machine):
    """A machine on which the real vLLM serves."""

    def __init__(self, folder: Path, python: Path, toy: Path) -> None:
        super().__init__(folder, python)
        self.model = toy

    def ready(self, *words: str) -> None:
        """
        Start a `serve` on one processor, and wait until it serves.

        vLLM's processes spin while they wait for each other; on a machine of two, whoever asks them got no turn for minutes.
        """
        mine = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {max(mine)})
        try:
            one = self.start("toy-cpu", *words)
        finally:
            os.sched_setaffinity(0, mine)
        assert one.poll() is None
        self.until_healthy()

    def below(self) -> list[psutil.Process]:
        """Return the processes of the server."""
        return psutil.Process(self.started[-1].pid).children(recursive=True)

    def engine(self) -> psutil.Process:
        """Return the process that computes."""
        return next(one for one in self.below() if "EngineCore" in " ".join((one.name(), *one.cmdline())))

    def health(self, patience: int = 20) -> tuple[int, str]:
        done = self.verb("serve", "--health", "--json", "--patience", str(patience), "--port", str(self.port))
        return done.returncode, json.loads(done.stdout)["health"]["state"]

    def require_dead(self, processes: Sequence[psutil.Process]) -> str:
        """Return what the server printed, after it has ended with its *processes*."""
        printed = "".join(self.started[-1].communicate(timeout=180))
        _, running = psutil.wait_procs(processes, timeout=60)  # the resource tracker is the last to notice
        assert not any(standin.alive(one.pid) for one in running)
        assert self.health() == (1, "dead")
        return printed


@pytest.fixture(name="real")
def _real(tmp_path: Path, vllm_python: Path, toy: Path) -> Iterator[Real]:
    one = Real(tmp_path / "real", vllm_python, toy)
    yield one
    one.close()


def test_a_model_is_served_and_its_health_is_told(real: Real) -> None:
    """It answers; an engine that stands still is stuck although /health says 200; and nothing is left."""
    real.ready()
    question = {"model": "toy-cpu", "prompt": "a", "max_tokens": 4, "ignore_eos": True}
    sent = Request(f"http://127.0.0.1:{real.port}/v1/completions", json.dumps(question).encode(), {"content-type": "application/json"})
    with urlopen(sent, timeout=120) as reply:
        assert json.load(reply)["usage"]["completion_tokens"] == 4
    assert real.health() == (0, "serving")

    engine = real.engine()
    engine.send_signal(signal.SIGSTOP)
    with urlopen(f"http://127.0.0.1:{real.port}/health", timeout=20) as reply:
        assert reply.status == 200
    assert real.health(3) == (1, "stuck")
    engine.send_signal(signal.SIGCONT)
    assert real.health(60) == (0, "serving")

    left = real.below()
    real.started[-1].send_signal(signal.SIGTERM)
    real.require_dead(left)
    assert real.started[-1].returncode == 0


def test_an_engine_that_dies_ends_the_server_with_its_reason(real: Real) -> None:
    """With a key, too: the server that asks for one is told as ready, and its death as what it is."""
    real.environment |= {"VLLM_API_KEY": "geheim"}
    real.ready("--variable=VLLM_LOGGING_LEVEL=INFO")
    assert real.health() == (0, "serving")
    left = real.below()
    real.engine().kill()
    out = real.require_dead(left)
    # Not the status: vLLM 0.32 ends with 0 here, so that a service needs Restart=always (docs/howto/serve.md).
    assert "EngineDeadError" in out
    assert "geheim" not in out


def test_the_flags_and_variables_are_those_of_the_release(vllm_python: Path) -> None:
    """What recipes say for this release is known to it, what it does not know is not."""
    environment = examine(vllm_python)
    found = environment.flags()
    assert {"--max-model-len", "--kv-cache-memory-bytes", "--gpu-memory-utilization", "--tool-call-parser", "-tp", "--api-key"} <= found
    assert not {"--swap-space", "--no-such-flag"} & found
    for name in recipes.files(ROOT):
        recipe = recipes.load(ROOT, name)
        if variant := recipe.find_variant("0.32.0"):
            environment.check(recipe.flags("0.32.0"))
            launch.check_variables(variant.variables, environment.package)
    with refusal("variable-refused"):
        launch.check_variables({"VLLM_NVFP4_GEMM_BACKEND": "marlin"}, environment.package)


def names_in(package: Path, *files: str) -> set[str]:
    """Return the string constants of *files* of vLLM's *package*."""
    trees = [ast.parse((package / file).read_bytes()) for file in files]
    return {node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}


@pytest.mark.parametrize("name", recipes.names(ROOT))
def test_recipe_says_what_the_vllm_of_the_default_stack_knows(name: str, release: Path) -> None:
    """Flags, variables, parsers, ways to draft and kernels that are chosen; a recipe for that release is never refused for one of them."""
    package = release / "vllm"
    environment = ServingEnvironment(prefix=release, vllm="0.33.0", package=package)
    recipe = recipes.load(ROOT, name)
    variant = recipe.find_variant("0.33.0")
    assert variant, "a recipe that the newest release cannot serve is of no use to an owner"
    version = "0.33.0+spark.2026.11" if variant.lacks else "0.33.0"
    words = recipe.flags(version)
    environment.check(words)
    launch.check_variables(variant.variables, package)
    assert {recipe.tool_parser} - {""} <= names_in(package, "tool_parsers/__init__.py")
    assert {recipe.reasoning_parser} - {""} <= names_in(package, "reasoning/__init__.py")
    drafting = recipe.drafting(variant)
    assert not drafting or drafting["method"] in names_in(package, "config/speculative.py")
    kernels = {flags.value(words, "--moe-backend"), flags.value(words, "--linear-backend"), drafting.get("moe_backend", "")}
    assert kernels - {""} <= names_in(package, "config/kernel.py")


# A pack of the real vLLM, whose graphs Inductor compiles to C++.

FLAGS = ("--max-model-len=1024", "--max-num-seqs=16", "--max-num-batched-tokens=2048")


@pytest.mark.timeout(1800)
def test_a_pack_of_the_real_server_spares_its_compiler(vllm_python: Path, toy: Path, tmp_path: Path) -> None:
    """vLLM 0.32 on a CPU traces its one graph again and writes it anew; every kernel of the pack is found."""
    variables = {name: value for name, value in serving.VARIABLES.items() if name != "TORCHDYNAMO_DISABLE"}
    plan = launch.LaunchPlan(vllm_python, toy, FLAGS, variables, "toy", timeout=900, kept_free=1000)
    archive = tmp_path / "toy.pack.tar.zst"
    answers = list[tuple[int, ...]]()
    for name in ("cold", "warm"):
        warm_pack.give(root := tmp_path / name, "")
        if answers:
            size, _ = warm_pack.collect(tmp_path / "cold", archive)
            warm_pack.unpack(archive, size, root / CACHES)
        with server_process.Server(replace(plan, caches=root), tmp_path / "logs" / f"{name}.log") as server:
            assert not server.failure
            answers.append(server.client().complete("The capital of France is", max_tokens=32).tokens)
    assert answers[0] == answers[1]
    kernels = [path for path in warm_pack.pack_files(tmp_path / "cold") if path.suffix in warm_pack.KERNELS]
    assert len(kernels) > 5
    assert [len(made) for made in warm_pack.additions(tmp_path / "warm")] == [1, 0]
    cold, warm = (
        {part.name: part for part in server_log.read_start(tmp_path / "logs" / f"{name}.log").parts()} for name in ("cold", "warm")
    )
    seconds = [parts["CPU's warm-up"].seconds or 0.0 for parts in (cold, warm)]
    assert seconds[1] < 0.6 * seconds[0]
    assert warm["torch.compile"].counts["that could not be loaded"] == 1
