"""Verdicts and the ladder: how states combine, where it stops, and what its files promise; and ``sparkwright gate``, as people and programs meet it: what was not named did not run, failures stop it, and verdicts are kept."""

import dataclasses
import errno
import json
import os
import re
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from msgspec.structs import replace
from tests.refusals import refusal
from tests.support import fake_openai_server, refserved, verdicts, wheels
from tests.unit.conftest import ROOT, Cli

import write_pages as pages
from sparkwright.audit.report import AuditedWheel
from sparkwright.bench.recipes import recipe as recipes
from sparkwright.bench.records import METRICS
from sparkwright.bench.server import wheel_identity
from sparkwright.cli import climb as gate_work, main
from sparkwright.cli.options import checkout
from sparkwright.core import errors, strict_yaml
from sparkwright.core.files import sha256_file
from sparkwright.core.states import State
from sparkwright.core.store import Store
from sparkwright.forks.stack import Project
from sparkwright.gates import throughput
from sparkwright.gates.core import policy
from sparkwright.gates.core.builder import GateBuilder
from sparkwright.gates.core.ladder import (
    GATES,
    Gate,
    GateFindings,
    VerdictFile,
    attempts,
    climb,
    document,
    read_attempts,
)
from sparkwright.gates.core.server_under_test import REASONS, GateOptions
from sparkwright.gates.core.verdict import (
    ORDER,
    Attempt,
    Check,
    Figure,
    Ladder,
    Verdict,
    failed,
    invalid,
    merge,
    not_run,
    passed,
    worst,
)
from sparkwright.gates.throughput import Experiment
from sparkwright.release import policy as release_policy

FOLDER = Path(policy.__file__).parents[1]
WHEEL = AuditedWheel("vllm-0.33.0-cp38-abi3-linux_aarch64.whl", "0" * 64, 1, "vllm", "0.33.0", ("linux_aarch64",))
CHECKS = {
    "pass": passed("one", "it holds", figures=[Figure("mismatches", 0, bound=0)]),
    "fail": failed("one", "it does not hold", "broken"),
    "invalid": invalid("one", "half of it is missing", "stream-truncated"),
    "inconclusive": Check("one", "inconclusive", "too few", "too-few"),
    "not-run": not_run("one", "no GPU is here", "gpu-missing"),
}
Opened = Callable[..., VerdictFile]


def gate(name: str, state: str = "pass", recipe: str = "") -> Gate:
    return Gate(name, "", lambda: GateFindings((CHECKS[state],)), recipe)


class Killed(BaseException):
    """Stands for a kill, behind which nothing of the program runs."""


def breaks() -> GateFindings:
    raise Killed


def run(*gates: Gate, **options: Any) -> Ladder:
    return climb(gates, **{"stack": "2026.11", "wheel": WHEEL, **options})


@pytest.mark.parametrize("state", ORDER)
def test_the_worst_state_of_the_required_checks_decides(state: State) -> None:
    """No check at all is not a pass."""
    required = [CHECKS["pass"], CHECKS[state], CHECKS["pass"]]
    informing = [msgspec.structs.replace(check, required=False) for check in CHECKS.values()]
    assert Verdict("G1", "", "", "", (*required, *informing)).state == worst([state, "pass"]) == state
    assert Verdict("G1", "", "", "", tuple(informing)).state != "pass"


@pytest.mark.parametrize("state", ORDER)
def test_ladder_stops_at_the_first_failure(state: str) -> None:
    """Later gates are listed as not run and are not tried; with keep_going they run, and the failure stays; not-run stops nothing and is no pass."""
    stops = state in ("fail", "invalid")
    result = run(gate("G0"), gate("G1", state), *([Gate("G2", "", breaks)] if stops else [gate("G2")]))
    assert result.states == {"G0": "pass", "G1": state, "G2": "not-run" if stops else "pass"}
    assert (result.verdicts[2].checks[0].reason == "earlier-failed") is stops
    going = run(gate("G0"), gate("G1", state), gate("G2"), keep_going=True)
    assert going.states["G2"] == "pass"
    assert going.state == result.state == state


def test_a_gate_measured_again_replaces_its_own_verdict_only() -> None:
    """Verdicts are merged by gate and recipe; a gate that could not run replaces nothing; order is that of the gates."""
    audited = Gate("G0", "", lambda: GateFindings((CHECKS["pass"],), "d" * 64))
    before = run(gate("G8", "inconclusive", "a"), audited, gate("G4", recipe="a"))
    now = run(gate("G8", "pass", "a"), gate("G4", "fail", "b"), gate("G0", "not-run"), keep_going=True)
    merged = merge(before, now)
    assert [(one.label, one.state) for one in merged.verdicts] == [("G0", "pass"), ("G4 a", "pass"), ("G4 b", "fail"), ("G8 a", "pass")]
    assert merged.device_code == "d" * 64
    assert merged.states == {"G0": "pass", "G4": "fail", "G8": "pass"}


def test_facts_are_stated_where_all_gates_of_the_installed_wheel_agree() -> None:
    one = run(gate("G0"), host={"gpu": "none"})
    two = run(gate("G4"), host={"gpu": "GB10", "content flashinfer": "a"})
    assert merge(one, two).host == two.host
    for other in ({"content flashinfer": "b"}, {}):
        changed = run(gate("G5"), host={"gpu": "GB10", **other})
        assert merge(merge(one, two), changed).host == {"gpu": "GB10"}


@pytest.fixture(name="opened")
def _opened(store: Store, tmp_path: Path) -> Opened:
    """Return what opens the verdicts about a wheel, as each run of the gates does."""
    return lambda sha256="0" * 64, stack="2026.11": VerdictFile(store, tmp_path / "out", msgspec.structs.replace(WHEEL, sha256=sha256), stack)


def states(file: VerdictFile) -> dict[str, str]:
    """Return the state of each gate in *file*."""
    ladder = file.load()
    return dict(ladder.states) if ladder else {}


def test_every_attempt_is_logged_and_the_file_holds_the_newest(opened: Opened) -> None:
    """A gate that was killed counts as interrupted, one that Ctrl-C ended is not-run, and one that was blocked is no attempt; another wheel of the same name begins at 1, and replaces the verdicts."""
    for attempt, state in enumerate(("fail", "pass"), 1):
        blocked = Gate("G8", "", breaks, "a", CHECKS["not-run"])
        stored = run(gate("G4", state, "a"), gate("G4", recipe="b"), blocked, file=opened(), keep_going=True)
        assert {one.attempt for one in stored.verdicts} == {attempt}
    with pytest.raises(Killed):
        run(Gate("G4", "", breaks, "a"), file=(file := opened()))
    counts = [attempts(file.log.parent, WHEEL.sha256, name, recipe) for name, recipe in (("G4", "a"), ("G4", "b"), ("G8", "a"))]
    assert counts == [3, 2, 0]

    def ctrl_c() -> GateFindings:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(Gate("G4", "", ctrl_c, "b"), file=(file := opened()))
    document = file.load()
    assert document
    outcomes = document.outcomes("G4")
    assert (outcomes["a"], outcomes["b"]) == (["fail", "pass", "interrupted"], ["pass", "pass", "not-run"])
    other = opened("1" * 64)
    assert (states(other), other.attempt) == ({}, 1)
    run(gate("G0"), wheel=msgspec.structs.replace(WHEEL, sha256="1" * 64), file=other)
    assert states(other) == {"G0": "pass"}
    file.log.write_text("[]\n")
    with refusal("file-invalid"):
        opened()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/srv/me/x"), "disk-full"), (errors.StoreError("disk-full", "There is no room left."), "disk-full"),
        (KeyError("/srv/me"), "program-fault"), (PermissionError(errno.EACCES, "no", "/srv/me/x"), "program-fault"),
    ],
)  # fmt: skip
def test_a_full_disk_and_a_fault_of_ours_are_rows_and_charge_no_attempt(
    error: Exception, reason: str, opened: Opened, capsys: pytest.CaptureFixture[str]
) -> None:
    """The next gate runs; the row names no path, and the log of a fault does."""

    def fails() -> GateFindings:
        raise error

    result = run(Gate("G4", "", fails, "a"), gate("G5", recipe="a"), file=(file := opened()))
    first, second = result.verdicts
    assert (first.state, first.checks[0].reason, second.state) == ("not-run", reason, "pass")
    assert "/home" not in first.checks[0].message
    stored = file.load()
    assert stored
    assert stored.outcomes("G4") == {"a": ["not-run"]}
    logs = [Path(log) for log in re.findall(r"\S+/sparkwright-fault-\S+\.log", capsys.readouterr().err)]
    assert (reason == "program-fault") == any(type(error).__name__ in log.read_text() for log in logs)
    for log in logs:
        log.unlink()


def test_verdicts_of_a_recipe_are_of_one_model() -> None:
    """With other files, those of before do not add up to a pass; a gate that did not run takes none away."""
    def served(name: str, model: str, recipe: str = "a", state: State = "pass") -> Gate:
        return msgspec.structs.replace(gate(name, state, recipe), model=model)

    known, other = "0" * 64, "1" * 64
    before = run(gate("G0"), *(served(name, known, recipe) for name, recipe in (("G4", "a"), ("G5", "a"), ("G5", "b"))))
    merged = merge(before, run(served("G4", other)))
    assert [(each.label, each.model) for each in merged.verdicts] == [("G0", ""), ("G4 a", other), ("G5 b", known)]
    assert merge(before, run(served("G4", other, state="not-run"))).verdicts == before.verdicts


def test_verdicts_survive_a_crash_of_the_next_gate_and_a_cut_write(opened: Opened) -> None:
    """Interrupted in the middle of writing, the file holds what it held, and the next write adds to it."""
    with pytest.raises(Killed):
        run(gate("G0"), Gate("G1", "", breaks), file=(file := opened()))
    assert states(file) == {"G0": "pass"}
    with patch("os.replace", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        run(gate("G1"), file=opened())
    assert states(file) == {"G0": "pass"}
    with file.log.open("ab") as log:
        log.write(b'{"number": 7')
    run(gate("G1"), file=opened())
    assert states(file) == {"G0": "pass", "G1": "pass"}
    ended = [(one.gate, one.state) for one in read_attempts([file.log.parent], WHEEL.sha256) if one.state]
    assert ended == [("G0", "pass"), ("G1", "pass"), ("G1", "pass")]


def test_attempts_of_another_machine_travel_in_its_document(opened: Opened, store: Store, tmp_path: Path) -> None:
    """A document without its log, beside the wheel or in the output folder, is counted, and the next attempt continues the number; each line once."""
    with pytest.raises(Killed):
        run(Gate("G4", "", breaks, "a"), file=opened())
    run(gate("G4", "fail", "a"), gate("G8", recipe="a"), file=(file := opened()), keep_going=True)
    (beside := tmp_path / "wheel").mkdir()
    for carried in (beside / file.path.name, tmp_path / "new" / "other.verdicts.json"):
        carried.parent.mkdir(exist_ok=True)
        carried.write_bytes(file.path.read_bytes())
        there = VerdictFile(store, tmp_path / "new", WHEEL, "2026.11", beside)
        assert there.attempt == 3
    run(gate("G4", recipe="a"), file=there)
    ladder = there.load()
    assert ladder
    assert (ladder.outcomes("G4"), ladder.outcomes("G8")) == ({"a": ["interrupted", "fail", "pass"]}, {"a": ["pass"]})
    assert [one.reason for one in ladder.attempts if one.state == "fail"] == ["one (broken): it does not hold"]
    assert attempts(tmp_path / "new", WHEEL.sha256, "G8", "a") == 1
    assert attempts(tmp_path / "new", WHEEL.sha256, "G4", "a") == 3


EDITS: dict[str, tuple[tuple[str | int, ...], object]] = {
    "the state of the ladder": (("state",), "pass"),
    "the state of a verdict": (("verdicts", 1, "state"), "pass"),
    "a check": (("verdicts", 1, "checks", 0), msgspec.to_builtins(CHECKS["pass"])),
    "the wheel": (("wheel", "sha256"), "1" * 64),
    "the attempt": (("verdicts", 0, "attempt"), 2),
    "the format": (("format",), 1),
    "a field": (("verdicts", 0, "note"), "approved"),
}


@pytest.mark.parametrize(("place", "value"), EDITS.values(), ids=EDITS)
def test_verdicts_edited_by_hand_are_refused(opened: Opened, place: tuple[str | int, ...], value: object) -> None:
    """The document carries a digest of itself, and its states follow from its checks; the file stays as it is."""
    run(gate("G0"), gate("G1", "fail"), file=(file := opened()))
    edited = inner = json.loads(file.path.read_text())
    for step in place[:-1]:
        inner = inner[step]
    inner[place[-1]] = value
    file.path.write_text(text := json.dumps(edited))
    for action in (opened, partial(run, gate("G0"), file=file)):
        with refusal("file-invalid"):
            action()
    assert file.path.read_text() == text


@pytest.mark.parametrize("text", ["", "null", "[]", "{}", '{"format": 2}', "[" * 100_000, "{", "of another stack"])
def test_a_file_without_verdicts_is_refused(opened: Opened, text: str) -> None:
    run(gate("G0"), file=(file := opened()))
    if "stack" not in text:
        file.path.write_text(text)
    with refusal("file-invalid"):
        opened(stack="2026.05")


def test_a_document_has_the_fields_of_the_schema() -> None:
    ran = run(msgspec.structs.replace(gate("G0", "fail"), model="2" * 64), gate("G1"))
    ladder = document(msgspec.structs.replace(ran, attempts=(Attempt(1, WHEEL.sha256, "G0"),)))
    for name, record in (("Ladder", ladder), ("Verdict", ladder["verdicts"][0])):
        assert set(record) == set(pages.schema()["$defs"][name]["properties"])


@pytest.mark.parametrize("name", GATES)
def test_every_declared_check_is_emitted_and_named_once(name: str) -> None:
    """Each name, or a pattern that gives it, stands in the code of its gate, and the repository's policies give each pattern a name."""
    declared = policy.declared(name)
    assert len({one.name for one in declared}) == len(declared)
    module = policy.PACKAGES.get(name, "wheel_audit")
    # The questions of G4 and the operators of G2 are modules of their own.
    further = {"generation": ("dirty_text", "text_checks"), "device": ("operators",)}.get(module, ())
    files = [*(FOLDER / f"{part}.py" for part in (module, *further)), *(FOLDER / "core").glob("*.py")]
    declarations = r"(?ms)^[A-Z_]+ = (?:\(\n(?=\s+\*declare).*?^\)|[^\n]*declare\([^\n]*$)"
    code = "".join(re.sub(declarations, "", path.read_text("utf-8")) for path in files)
    texts = {text: re.escape(text.removeprefix("*-")).replace(r"\*", r"\{\w+(\(\w+\))?\}") for text in (one.name for one in declared)}
    stale = [text for text, pattern in texts.items() if not re.search(f"[\"}}-]{pattern}[\"{{]", code)]
    # Declared from the tables that the emitting code itself runs through.
    computed = {"G8": ("effect-*", *(f"{metric}-*" for metric in METRICS))}
    assert [check for check in stale if check not in computed.get(name, ())] == []
    # Promises of changes name effects, and not every stack has one.
    assert [one.name for one in declared if one.role != "reports" and one.name != "effect-*" and not verdicts.names(name, one.name)] == []


@pytest.mark.parametrize(("name", "before", "after", "message"), [
    *(("generation", *mistake) for mistake in (
        ("tokens: 200", "tokens: 0", "tokens"), ("  fact-water:", "  fact-capital:", "fact-capital"),
        ("answer: Canberra", 'answer: "("', "not a regular expression"),
        ("depth: 0.1", "depth: 3.5", "depth"),
        ('line: "Entry {number}', 'line: "Entry {count}', "line"), ("  every: 512", "  every: 0", "every"),
        ("context: [600]", "context: [most]", "context"), ("kl_max: 0.5", "kl_most: 0.5", "kl_most"), ("ability: tools", "ability: magic", "ability"),
    )),
    *(("soak", *mistake) for mistake in (
        ("seconds: 7200", "seconds: 0", "seconds"), ("warm: 0.25", "warm: 1.5", "warm"), ("concurrencies: [1,", "concurrencies: [0,", "concurrencies"),
        ("shared: 0.3", "shared: 3", "shared"), ("Entry {number}", "Entry", "line"), ("growth: 256", "growth: -1", "growth"),
        ("drain: 600", "drain: 0", "drain"), ("least: 20", "lest: 20", "lest"),
    )),
    *(("numerics", *mistake) for mistake in (
        ("{seconds: 60", "{seconds: 0", "seconds"), ("[csrc/quantization", "[../quantization", "files"),
        ("folders: [csrc/", "folders: [a/../../", "folders"), ("headers: [cuda", "headers: [/etc", "headers"),
        ("name: vllm-vec8\n", "name: A b\n", "name"),
    )),
    *(("accuracy", *mistake) for mistake in (
        ("margin: 0.028", "margin: 0", "margin"), ("confidence: 0.99", "confidence: 1", "confidence"), ("informative: 0.2", "informative: 1.5", "informative"),
        ("file: largest.yaml", "file: ../a.yaml", "file"),
        ("questions: 1000", "questions: 399", "questions"), ("tokens: 4\n", "tokens: 0\n", "tokens"), ("filter: digit", "floors: 1", "floors"),
    )),
    # Every measurement was usage-mismatch, by the one token of the generator's own trial.
    ("throughput", "warmups: 1", "warmups: 0", "warmups"),
    *(("device", *mistake) for mistake in (
        ("repeats: 2", "repeats: 1", "repeats"), ("seconds: 300", "seconds: 0", "seconds"),
    )),
])  # fmt: skip
def test_a_mistake_in_a_policy_is_named(name: str, before: str, after: str, message: str) -> None:
    text = (FOLDER.parents[1] / "gates" / f"{name}.yaml").read_text("utf-8")
    assert before in text
    kinds = {field.name: field.type for field in msgspec.structs.fields(policy.GatePolicies)}
    with refusal("file-invalid") as refused:
        strict_yaml.parse(text.replace(before, after, 1), kinds[name], "policy.yaml")
    assert message in "\n".join(refused.value.details).lower()


Built = Callable[[GateOptions], GateBuilder]


@pytest.fixture(name="common")
def _common(tmp_path: Path) -> list[str]:
    """Return the options for this checkout with a store and an output folder of its own."""
    return ["--root", str(ROOT), "--cache-dir", str(tmp_path / "cache"), "--output", str(tmp_path / "out"), "--json"]


@pytest.fixture(name="built")
def _built(common: list[str]) -> Built:
    """Return what builds the gates of some options, offline."""
    return lambda options: GateBuilder(checkout(main.parse(["gate", "--offline", *common])), options, {})


@pytest.fixture(name="wheel")
def _wheel(tmp_path: Path) -> Path:
    """Return a wheel with next to nothing in it."""
    return wheels.plain(tmp_path, "tiny", "1.0")


def test_gates_without_their_options_did_not_run(cli: Cli, common: list[str]) -> None:
    """Gates without their server are listed with the option that names it, and are no pass."""
    served = [word for gate in ("G0", "G3", "G4", "G5", "G6", "G7", "G8") for word in ("--only", gate)]
    done = cli("gate", *served, *common)
    document = json.loads(done.stdout)

    assert (done.returncode, document["error"]["reference"], document["ladder"]["state"]) == (4, "gate-not-run", "not-run")
    assert {verdict["state"] for verdict in document["ladder"]["verdicts"]} == {"not-run"}
    checks = [check for verdict in document["ladder"]["verdicts"] for check in verdict["checks"]]
    assert {check["reason"] for check in checks} == {"not-asked"}
    assert all("name" in check["message"] for check in checks)


def test_the_newest_wheel_is_of_the_stack_the_architecture_and_the_machine(tmp_path: Path) -> None:
    """Others that lie in the output folder, and were built later, are not taken."""
    (out := tmp_path / "out").mkdir()
    names = (
        "vllm-0.33.0+spark.2026.11.p00000000.cu130-cp38-abi3-linux_aarch64.whl", "vllm-0.33.0+spark.2026.11.p11111111.cu130-cp38-abi3-linux_aarch64.whl",
        "vllm-0.33.0+spark.2026.11.sm90a.p22222222.cu130-cp38-abi3-linux_aarch64.whl", "vllm-0.33.0+spark.2026.11.p33333333.cu130-cp38-abi3-linux_x86_64.whl",
        "vllm-0.23.0+spark.r202606.p44444444.cu130-cp38-abi3-linux_aarch64.whl", "vllm-0.33.0-cp38-abi3-linux_aarch64.whl",
    )  # fmt: skip
    for second, name in enumerate(names):
        (out / name).touch()
        os.utime(out / name, (second, second))
    context = checkout(main.parse(["gate", "--root", str(ROOT), "--cache-dir", str(tmp_path / "cache"), "--output", str(out)]))
    newest = {}
    for stack, arch, machine in (("2026.11", "", "aarch64"), ("2026.11", "9.0a", "aarch64"), ("2026.11", "", "x86_64"), ("2026.06", "", "x86_64")):
        path = gate_work._newest_wheel(dataclasses.replace(context, project=Project(ROOT, stack, arch), target=machine))
        newest[stack, arch, machine] = path and names.index(path.name)
    assert [*newest.values()] == [1, 2, 3, None]


def test_policies_of_the_gates_that_the_soak_runs_again_are_part_of_its_digest() -> None:
    policies = policy.load(ROOT)
    weaker = {
        "generation": replace(policies.generation, tokens=9),
        "logprobs": replace(policies.logprobs, perplexity_max=9.0),
        "soak": replace(policies.soak, least=9),
    }
    digests = {replace(policies, **{name: one}).digest("G7") for name, one in weaker.items()}
    assert len(digests - {policies.digest("G7")}) == 3


def test_two_runs_of_a_recipe_do_not_share_a_server_log(built: Built, served: GateOptions, tmp_path: Path) -> None:
    """The second run of a recipe is refused; other gates are not."""
    options = replace(served, recipe="toy-cpu")
    with built(options):
        with refusal("store-busy", match="toy-cpu"):
            built(options)
        with built(replace(options, only=("G7",))):
            pass
    assert not list((tmp_path / "cache" / "work").glob("gate-*"))


@pytest.fixture(name="served")
def _served(tmp_path: Path) -> GateOptions:
    """Return an environment that says it has vLLM, and a model to serve from it."""
    model = tmp_path / "Toy-1M"
    model.mkdir()
    (model / "config.json").write_text("{}")
    return GateOptions(python=refserved.environment(tmp_path / "environment", fake_openai_server.Behaviour()), serve=model)


def test_a_model_without_a_floor_stops_no_other_gate(built: Built, served: GateOptions, tmp_path: Path) -> None:
    """G6 is not run, and says why before hours are spent; the gates around it are, and a model that has a floor is asked."""
    options = replace(served, recipe="toy-cpu", against=tmp_path)
    for file in ("logprobs.json", "gsm8k.json"):
        (tmp_path / file).touch()
    with built(options) as builder:
        blocked = [(name, gate.blocked and gate.blocked.reason) for name in ("G4", "G5", "G6", "G7") if (gate := builder.gate(name))]
        assert blocked == [("G4", None), ("G5", None), ("G6", "floor-missing"), ("G7", None)]
        assert {len(builder.gate(name).model) for name in ("G1", "G6")} == {0, 64}
        assert builder.gate("G6").policy
    with built(replace(options, recipe="qwen3-30b-a3b-nvfp4")) as builder, refusal("model-missing"):
        builder.gate("G6")


def test_an_environment_that_cannot_serve_is_refused_before_any_gate(built: Built, served: GateOptions, wheel: Path, tmp_path: Path) -> None:
    """Neither the gates before it nor, for G8, the probe of the machine run."""
    old = refserved.environment(tmp_path / "old", fake_openai_server.Behaviour(), "0.16.0")
    for python, reference in ((tmp_path / "python", "environment-unusable"), (old, "recipe-unfit")):
        options = replace(served, recipe="toy-cpu", wheel=wheel, baseline=wheel, baseline_python=python)
        with built(options) as builder, refusal(reference):
            builder.gate("G8")
        with built(replace(served, recipe="toy-cpu", python=python)) as builder, refusal(reference):
            builder.gate("G4")


def test_a_verdict_counts_only_for_the_wheel_that_the_server_was_installed_from(
    built: Built, served: GateOptions, wheel: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """
    An environment with other files fails each served gate, and cannot be recorded as that wheel.

    A server that does not start says so at each gate and leaves its log, and nothing is recorded of it.
    """
    (wheel.parent / "logprobs.json").touch()
    options = replace(served, wheel=wheel, against=wheel.parent, recipe="toy-cpu", variable=(("REFERENCE", "starts-never"),))
    with built(options) as builder:
        for name in ("G4", "G5", "G7"):
            rows = {check.name: check for check in builder.gate(name).run().checks}
            assert (rows["wheel-served"].state, rows["wheel-served"].reason, rows["wheel-served"].required) == ("fail", "wheel-not-served", True)
            assert (rows["ladder"].state, rows["ladder"].reason in REASONS) == ("invalid", True)
        with refusal("measurement-invalid", match="would name a wheel that did not answer"):
            list(builder.record(wheel.parent / "reference"))
    (log,) = (tmp_path / "cache").rglob("server.log")
    assert str(log) in capsys.readouterr().err.replace("\n", "")


def test_a_server_that_dies_at_one_file_of_the_reference_is_started_again_for_the_next(built: Built, served: GateOptions, wheel: Path, tmp_path: Path) -> None:
    """The error names wheel, file and what was seen, and the log of the death stays."""
    (site,) = (tmp_path / "environment").glob("lib/python3.*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    # The first five requests are those of the pace. The text is not answered by a server that states no prefix cache.
    behaviour = fake_openai_server.Behaviour(faults={"dies": 6})
    (tmp_path / "environment" / "behaviour.json").write_bytes(msgspec.json.encode(behaviour))
    options, folder = replace(served, recipe="toy-cpu", wheel=wheel, only=("G4", "G5")), tmp_path / "reference"
    with built(options) as builder, refusal("measurement-invalid", match=wheel.name) as error:
        list(builder.record(folder))
    assert [detail.rsplit(": ")[:2] for detail in error.value.details] == [
        ["logprobs.json", "server-unreachable"],
        ["text.json", "answer-unreadable"],
        ["answers.json", "server-unreachable"],
    ]
    assert [path.name for path in folder.iterdir()] == ["pace.json"]
    assert list((tmp_path / "cache").rglob("logprobs.json.server.log"))


def test_hours_of_measuring_outlive_verdicts_that_cannot_be_stored(
    built: Built, served: GateOptions, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    G8's result is on the disk before its checks are judged, and its verdict names the policy that a release asks for. Environments
    that hold other wheels are not measured.
    """
    monkeypatch.setattr("sparkwright.bench.vllm_bench.obtain", lambda *_, **__: None)
    stock = tmp_path / "stock" / wheel.name
    stock.parent.mkdir()
    stock.write_bytes(wheel.read_bytes())
    with built(replace(served, recipe="toy-cpu", wheel=wheel, baseline=stock, baseline_python=served.python, workload=("quick",))) as builder:
        states = {check.name: check.state for check in builder.gate("G8").run().checks}
        assert states == {"candidate-wheel": "fail", "baseline-wheel": "invalid"}
    monkeypatch.setattr(wheel_identity, "mismatches", lambda *_: {})
    measured = [verdicts.result(wheel), replace(verdicts.result(wheel), state="not-run", legs=())]
    monkeypatch.setattr(Experiment, "result", lambda *_: measured.pop(0))
    with built(replace(served, recipe="toy-cpu", wheel=wheel, baseline=wheel, baseline_python=served.python, workload=("quick",))) as builder:
        evidence = builder.gate("G8").run().evidence
        assert not builder.gate("G8").run().evidence
    file = replace(release_policy.load(ROOT).file, recipes={"toy": ("toy-cpu",)})
    with built(replace(served, wheel=wheel, baseline=wheel, baseline_python=served.python, recipe="toy-cpu")) as builder:
        assert builder.gate("G8").policy == release_policy._gate_digests(ROOT, file)["G8 toy-cpu"]
    # Of a run without a launch of the candidate, nothing is said of its kernels.
    result = verdicts.result(wheel)
    alone = replace(result, legs=tuple(leg for leg in result.legs if leg.side != "candidate"))
    kernels = [{check.name: check.state for check in throughput.checks(one)}["contract"] for one in (result, alone)]
    assert kernels == ["pass", "not-run"]
    # A run that had no time for a block leaves the file of the earlier verdict.
    assert sha256_file(tmp_path / "out" / f"tiny-1.0-py3-none-any.{verdicts.RECIPE}.throughput.json") == evidence


@pytest.mark.parametrize(
    ("changed", "same"),
    [
        ({}, True), ({"profile": "chatml"}, True), ({"profile": "learnt"}, False), ({"flag": ("--enforce-eager",)}, False),
        ({"variable": (("VLLM_USE_V1", "1"),)}, False),
    ],
)  # fmt: skip
def test_a_gate_that_asks_less_or_serves_otherwise_is_judged_by_another_policy(built: Built, served: GateOptions, changed: dict[str, Any], same: bool) -> None:
    """`verified` counts the digests of the reviewed policy and recipe alone."""
    plan = recipes.load(ROOT, "toy-cpu")
    with built(replace(served, recipe="toy-cpu", **changed)) as builder:
        for name in ("G4", "G7"):
            assert (builder.gate(name).policy == policy.load(ROOT).digest(name, plan)) is same


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (["--serve", "model"], "--python"),
        (["--recipe", "no-such"], "There is no recipe"),
        (["--profile", "no-such"], "default"),
        (["--against", "folder", "--task", "no-such"], "gsm8k"),
        (["--record", "folder"], "WHEEL"),
        (["--model-folder", "no-folder"], "no-folder"),
        (["no-wheel-1-py3-none-any.whl"], "no-wheel"),
    ],
)
def test_options_that_do_not_go_together_are_wrong_usage(common: list[str], options: list[str], names: str) -> None:
    """Nothing is started, and the message names what there is."""
    gates = [word for name in ("G3", "G4", "G6") for word in ("--only", name)]
    with pytest.raises(errors.UsageError) as refused:
        gate_work.gate(main.parse(["gate", *gates, *options, *common]))
    assert names in f"{refused.value.what} {refused.value.todo}"
