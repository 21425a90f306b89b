"""`model check`: what vLLM chooses, asked in a child; here with a script in the place of vLLM, which `ci/bench/oracle.py` runs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.refusals import refusal
from tests.support import checkpoints, standin

from sparkwright.serving import environment, selection, selection_probe

CHOSEN = {"versions": {"vllm": "0.33.0"}, "rows": {"attention": {"FLASHINFER": 4}, "linear": {"Fp4": 8}}, "questions": ["_C::supports"]}
PLAIN = {**CHOSEN, "rows": {**CHOSEN["rows"], "linear": {"Marlin": 8}}}  # type: ignore[dict-item]


@pytest.fixture(name="ask")
def _ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[selection.Selection, list[Any]]]:
    """Return a function that asks a script for its answers, and what the script was started with."""
    spoken = tmp_path / "spoken"
    served = environment.examine(standin.environment(tmp_path / "env"))

    def run(answers: dict[str, Any], *words: str) -> tuple[selection.Selection, list[Any]]:
        script = tmp_path / "probe.py"
        script.write_text(
            "import json, os, pathlib, sys\n"
            "model = next(word for word in sys.argv if word.startswith('--model=')).partition('=')[2]\n"
            "given = [sys.argv[2:], json.loads(pathlib.Path(model, 'config.json').read_text()), os.environ.get('HF_HUB_OFFLINE')]\n"
            f"with open({str(spoken)!r}, 'a') as file: file.write(json.dumps(given) + '\\n')\n"
            f"print('noise'); print(json.dumps({answers!r}[sys.argv[1]]))\n"
        )
        monkeypatch.setattr(selection, "PROBE", script)
        result = selection.select(served, {"model_type": "m"}, words, {})
        return result, [json.loads(line) for line in spoken.read_text().splitlines()]

    return run


def test_a_kind_that_compiled_libraries_decide_is_unresolved(ask: Callable[..., Any]) -> None:
    result, starts = ask({"yes": CHOSEN, "no": PLAIN}, "--max-model-len=64")
    assert result.rows["linear"] == {"Fp4": 8}
    assert result.otherwise == {"linear": {"Marlin": 8}}
    assert [start[1:] for start in starts] == [[{"model_type": "m"}, "1"]] * 2


@pytest.mark.parametrize("field", ["refused", "unresolved"])
def test_refusal_names_the_line_of_vllm(ask: Callable[..., Any], field: str) -> None:
    result, _ = ask({answer: {"versions": {}, field: "ValueError: no", "line": "config/model.py:7", "questions": ["x"]} for answer in ("yes", "no")})
    assert (getattr(result, field), result.line, result.rows) == ("ValueError: no", "config/model.py:7", {})


def test_code_of_the_model_and_another_drafter_are_left_out(ask: Callable[..., Any]) -> None:
    words = ("--trust-remote-code", "--max-model-len", "64", '--speculative-config={"method":"dflash","model":"a/b"}')
    _, starts = ask({"yes": {**CHOSEN, "questions": []}}, *words)
    (given,) = (start[0] for start in starts)
    assert given[1:] == ["--skip-tokenizer-init", "--max-model-len", "64"]


def test_a_child_that_does_not_answer_is_an_error(ask: Callable[..., Any]) -> None:
    with refusal("environment-unusable"):
        ask({})


def raised(tmp_path: Path, source: str) -> BaseException:
    """Return what *source* raises as a file of vLLM."""
    path = tmp_path / "vllm" / "config" / "model.py"
    try:
        exec(compile(source, str(path), "exec"), {})
    except Exception as error:
        return error
    raise AssertionError(source)


class _Validation(ValueError):
    """As pydantic raises: what the program raised is in it."""

    def __init__(self, inner: BaseException) -> None:
        self.inner = inner

    def errors(self) -> list[dict[str, Any]]:
        return [{"ctx": {"error": self.inner}}]


def test_only_what_vllm_itself_raises_is_a_refusal(tmp_path: Path) -> None:
    refused = raised(tmp_path, "\n\nraise ValueError('too long')")
    assert selection_probe.refusal(refused) == {"refused": "ValueError: too long", "line": "config/model.py:3"}
    assert selection_probe.refusal(_Validation(refused)) == {"refused": "ValueError: too long", "line": "config/model.py:3"}
    for source in ("import json\njson.loads('')", "import no_such_package", "None.shape"):
        assert "unresolved" in selection_probe.refusal(raised(tmp_path, source)), source


@pytest.mark.parametrize("end", ["raise ValueError('not valid') from error", "raise ValueError('not valid')", "raise ValueError('not valid') from None"])
def test_a_refusal_for_a_package_that_cannot_be_imported_is_unresolved_whatever_it_says(tmp_path: Path, end: str) -> None:
    """The exceptions behind it decide, and no word of its text."""
    source = f"try:\n    import no_such_package\nexcept ImportError as error:\n    {end}"
    assert selection_probe.refusal(raised(tmp_path, source)) == {"unresolved": "ValueError: not valid", "line": "config/model.py:4"}
    named = raised(tmp_path, "raise ValueError('Reason: [ImportError] ModuleNotFoundError')")
    assert "refused" in selection_probe.refusal(named)


#: As vLLM chooses: a backend that cannot be imported is passed over, and the error is raised behind that.
CHOICE = """
class Backend:
    def get_class(self):
        import no_such_package
def choose(backend, fits):
    try:
        backend.get_class()
    except ImportError:
        pass
    if not fits:
        raise ValueError('no backend')
    return 'other'
"""


def test_no_backend_is_no_refusal_if_one_could_not_be_imported(tmp_path: Path) -> None:
    path, names = tmp_path / "vllm" / "choice.py", dict[str, Any]()
    exec(compile(CHOICE, str(path), "exec"), names)
    backend, choose = names["Backend"], selection_probe.choosing(names["choose"])
    with pytest.raises(ValueError, match="no backend") as caught:
        choose(backend(), fits=False)
    assert "refused" in selection_probe.refusal(caught.value)
    backend.get_class = selection_probe.importing(backend.get_class)
    with pytest.raises(ValueError, match="no backend") as caught:
        choose(backend(), fits=False)
    assert "unresolved" in selection_probe.refusal(caught.value)
    assert choose(backend(), fits=True) == "other"


def test_compiled_operators_answer_what_they_support_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    operator = selection_probe.Operator("_C")
    for answer in ("yes", "no"):
        monkeypatch.setattr("sys.argv", ["probe", answer])
        assert operator.cutlass_supports_fp8(121) == (answer == "yes")
    with pytest.raises(LookupError, match="_C::gemm is compiled"):
        operator.gemm()


def test_verb_refuses_an_environment_without_the_stacks_vllm(cli: Callable[..., Any], tmp_path: Path) -> None:
    folder = checkpoints.write(tmp_path / "m", {"model_type": "m", "num_hidden_layers": 1}, [("lm_head.weight", "BF16", [8, 8])])
    other = standin.environment(tmp_path / "env", "0.9.0")
    for python, reason in ((other, "has vLLM 0.9.0, and stack 2026.06 0.23.0"), (Path("/bin/false"), "is no Python of an environment")):
        done = cli("model", "check", folder, "--stack", "2026.06", "--python", python, "--root", Path(__file__).parents[2])
        assert (done.returncode, "environment-unusable" in done.stderr) == (1, True)
        assert reason in " ".join(done.stderr.split())
