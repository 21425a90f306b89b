"""The environment of a container is taken whole or refused: each variable by type and range, each flag by what the release knows."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.refusals import refusal
from tests.support import standin

from sparkwright.serving import cluster, known, variables
from sparkwright.serving.errors import ServeError
from sparkwright.serving.wish import Wish

TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"))


@given(st.lists(TEXT))
def test_words_come_out_as_they_went_in(words: list[str]) -> None:
    """Whatever a shell would quote is one word again: blanks, quotes, line ends, dollars, nothing at all."""
    assert variables.words(shlex.join(words)) == tuple(words)


@given(st.dictionaries(st.from_regex(r"[A-Z_]{1,20}", fullmatch=True), TEXT), TEXT)
def test_any_environment_is_taken_or_refused(environment: dict[str, str], extra: str) -> None:
    """There is no third way, whatever stands in it, and nothing is expanded."""
    try:
        wish = variables.told({**environment, "VLLM_EXTRA_ARGS": extra})
    except ServeError as error:
        if error.reference != "variable-refused":
            raise
        return
    assert not any("$(" in flag and "$(" not in extra for flag in wish.flags)


def test_every_variable_reaches_its_place() -> None:
    """Each of the table's variables sets its field of the wish, and an empty one is not set."""
    told = {
        "RECIPE": "toy-cpu", "MODEL": "/models/a b", "REVISION": "main", "HOST": "::", "PORT": "8888", "SERVED_MODEL_NAME": "my model",
        "GPU_MEMORY_UTIL": "1", "MAX_MODEL_LEN": "131072", "MAX_NUM_SEQS": "128", "TENSOR_PARALLEL_SIZE": "2",
        "VLLM_EXTRA_ARGS": "--a 'b c'", "DOWNLOAD": "1", "PATIENCE": "60.5", "NODES": "2", "RAY_ADDRESS": "10.0.0.1:6379",
        "RAY_PORT": "6380",
        "NODE_ADDRESS": "10.0.0.2", "NCCL_SOCKET_IFNAME": "enp1s0", "HOME": "/x", "LD_PRELOAD": "x", "PYTHONPATH": "y",
    }  # fmt: skip
    assert {one.variable for one in variables.TABLE} <= told.keys()
    assert variables.told(told) == Wish(
        recipe="toy-cpu", model="/models/a b", revision="main", host="::", port=8888, name="my model", share=1.0, length=131072,
        requests=128, parallel=2, flags=("--a", "b c"), download=True, patience=60.5, nodes=2, head="10.0.0.1:6379", ray_port=6380,
        address="10.0.0.2",
        passed={"NCCL_SOCKET_IFNAME": "enp1s0"},
    )  # fmt: skip
    assert variables.told(dict.fromkeys(told, " \n")) == Wish()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PORT", "0"), ("PORT", "65536"), ("PORT", "80 80"), ("PORT", "٣"), ("PORT", "1e3"), ("GPU_MEMORY_UTIL", "0"),
        ("GPU_MEMORY_UTIL", "1.01"), ("GPU_MEMORY_UTIL", "75%"), ("GPU_MEMORY_UTIL", "nan"), ("MAX_MODEL_LEN", "128K"),
        ("MAX_NUM_SEQS", "-1"),
        ("DOWNLOAD", "yes"),
        ("RECIPE", "../../etc/passwd"), ("MODEL", "a\nb"), ("HOST", "a b"), ("VLLM_EXTRA_ARGS", "--a 'b"), ("NODES", "0"),
        ("SERVED_MODEL_NAME", "\x1b[31m"), ("MODEL", "--trust-remote-code"), ("HOST", "-x"),
    ],
)  # fmt: skip
def test_a_value_that_cannot_be_is_refused(name: str, value: str) -> None:
    """It is named with what it takes."""
    with refusal("variable-refused") as caught:
        variables.told({name: value})
    assert caught.value.details[0].startswith(f"{name}=")


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("MAX_MODEL_LENGTH", "MAX_MODEL_LEN"), ("GPU_MEM_UTIL", "GPU_MEMORY_UTIL"), ("GPU_MEMORY_UTILIZATION", "GPU_MEMORY_UTIL"),
        ("MAX_NUM_SEQ", "MAX_NUM_SEQS"), ("TP_SIZE", "TENSOR_PARALLEL_SIZE"), ("MODEL_NAME", "MODEL"), ("VLLM_ARGS", "VLLM_EXTRA_ARGS"),
        ("SERVED_MODEL_NAMES", "SERVED_MODEL_NAME"),
    ],
)  # fmt: skip
def test_a_variable_that_only_looks_like_ours_is_refused(name: str, near: str) -> None:
    """The nearest of ours is named."""
    with refusal("variable-refused") as caught:
        variables.told({name: "1"})
    assert list(caught.value.details) == [f"{name}: no such variable; perhaps {near}"]


@pytest.mark.parametrize(
    "name", ["HOSTNAME", "PATH", "HOME", "REPORT", "EXPORT", "MODELS", "SUPPORT", "POSTGRES_PORT", "NODE_ENV", "OLDPWD"]
)
def test_what_every_machine_has_is_no_mistake(name: str) -> None:
    """Variables of shells, containers and other programs pass by."""
    assert variables.told({name: "x"}) == Wish()


def test_vllms_own_variables_are_held_against_its_release(standin_package: Path) -> None:
    """One that the installed release does not read is refused, with what became of it."""
    assert variables.check({"VLLM_LOGGING_LEVEL": "DEBUG", "NCCL_DEBUG": "x"}, standin_package, "0.33.0") == ()
    with refusal("variable-refused") as caught:
        variables.check({"VLLM_NVFP4_GEMM_BACKEND": "marlin", "VLLM_LOGGING_LEVLE": "DEBUG"}, standin_package, "0.33.0")
    assert list(caught.value.details) == [
        "VLLM_LOGGING_LEVLE: perhaps VLLM_LOGGING_LEVEL", "VLLM_NVFP4_GEMM_BACKEND: gone since 0.24.0; now --linear-backend",
    ]  # fmt: skip


@pytest.fixture
def standin_package(tmp_path: Path) -> Path:
    """Return the sources of a small vLLM."""
    files = {"engine/arg_utils.py": standin.ENGINE, "entrypoints/common/cli_args.py": standin.FRONTEND, "envs.py": standin.ENVS}
    for name, text in files.items():
        (tmp_path / "vllm" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "vllm" / name).write_text(text)
    return tmp_path / "vllm"


def test_flags_are_read_in_the_release_itself(standin_package: Path) -> None:
    """Words of its sources and fields of its classes; sources that say it otherwise say nothing."""
    found = known.flags(standin_package)
    assert {"--max-model-len", "-q", "--api-key", "--chat-template", "--host"} <= found
    (standin_package / "entrypoints" / "common" / "cli_args.py").write_text("def (")
    assert known.flags(standin_package) == frozenset()
    known.check(("--anything",), frozenset(), "0.33.0")


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        (("--max-model-len", "5", "-q", "fp8", "--no-enable-prefix-caching", "--seed=-1", "-O3"), ""),
        (("--max_model_len=5", "--speculative-config.method=mtp"), ""),
        (("--max-modellen=5",), "--max-modellen: unknown; perhaps --max-model-len"),
        (("--port=5",), "--port: say --port (PORT)"),
        (("--api-key", "x"), "--api-key: say the variable VLLM_API_KEY, which no list of processes shows"),
        (("stray", "--seed=1"), "'stray' belongs to no flag"),
        (("--dtype", "a\0b"), "'a\\x00b' holds a byte 0"),
    ],
)
def test_a_flag_that_the_release_does_not_know_is_refused(words: tuple[str, ...], wrong: str, standin_package: Path) -> None:
    """So is one that `serve` says itself, and a word that belongs to none."""
    found: list[str] = []
    try:
        known.check(words, known.flags(standin_package), "0.33.0")
    except ServeError as error:
        if error.reference != "flag-unknown":
            raise
        found = list(error.details)
    assert found == ([wrong] if wrong else [])


_NAMES = st.sampled_from(["--a", "--b", "--no-b", "--c", "--d_e", "--d-e"])
_WORDS = st.lists(st.tuples(_NAMES, st.sampled_from(["", "=1", " 2"])).map("".join)).map(lambda found: " ".join(found).split())


@given(_WORDS, _WORDS)
def test_what_is_said_on_top_replaces_what_is_below(below: list[str], above: list[str]) -> None:
    """All of the upper words stay, in order and last; of the lower ones exactly those flags that are not said again, with their values."""
    found = known.merged(below, above)
    kept = found[: len(found) - len(above)]
    said = {known.name(word) for word in above if known.is_flag(word)}
    assert list(found[len(kept) :]) == above
    assert {known.name(word) for word in kept if known.is_flag(word)} == {known.name(word) for word in below if known.is_flag(word)} - said
    assert known.merged(below, ()) == tuple(below)


def test_a_flags_value_is_the_last_one_that_is_said() -> None:
    """Behind ``=`` or as the next word."""
    assert known.value(("--a=1", "--a", "2"), "--a") == "2"
    assert known.value(("--b", "--a"), "--a") == ""


def test_the_table_for_the_docs_names_every_variable() -> None:
    """One row each, in Markdown."""
    rows = variables.table().splitlines()
    assert len(rows) == len(variables.TABLE) + 2
    assert "| `GPU_MEMORY_UTIL` | `--gpu-memory-utilization` |" in variables.table()


@pytest.mark.parametrize("text", ["", "host", "host:", "host:0", "host:65536", "host:x", ":5"])
def test_an_address_is_host_and_port(text: str) -> None:
    """Nothing else is one."""
    assert cluster.parts("[::1]:6379") == ("::1", 6379)
    with refusal("usage"):
        cluster.parts(text)
