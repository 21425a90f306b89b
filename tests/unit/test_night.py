"""The night of `gate --recipe`: what lacks is named first, the plan has every step, time that is spent is said, a kill costs the step alone, only what is still true is finished, and the page answers first."""

import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from tests.refusals import refusal
from tests.support import (
    checkpoints,
    chromium,
    converters,
    fake_openai_server,
    refserved,
    standin,
    verdicts,
    wheels,
)
from tests.unit.conftest import ROOT, Cli

from sparkwright.bench.model import slim
from sparkwright.bench.recipes import preflight
from sparkwright.builder import pylock, toolchain
from sparkwright.cherry_picks.patch import DeclaredChange
from sparkwright.cli import main, options
from sparkwright.client import environment, records
from sparkwright.core import files, memory, store, strict_yaml
from sparkwright.core.states import State
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import Project
from sparkwright.gates import accuracy
from sparkwright.gates.core import builder, ladder, night, server_under_test
from sparkwright.gates.core.verdict import (
    Attempt,
    Check,
    Figure,
    Ladder,
    Sample,
    Verdict,
    failed,
    invalid,
    not_run,
    passed,
)
from sparkwright.gates.soak import SoakPolicy
from sparkwright.release import decision

#: In the place of lm-eval: asks the server, and writes each answer as a right one.
HARNESS = """
import argparse, hashlib, json, pathlib
from urllib.request import Request, urlopen
parser = argparse.ArgumentParser()
for name in ("--model_args", "--output_path", "--limit"):
    parser.add_argument(name)
known, _ = parser.parse_known_args()
server, lines = json.loads(known.model_args), []
for number in range(int(known.limit)):
    body = {"model": server["model"], "prompt": f"{number:03d}>", "max_tokens": 4}
    text = json.load(urlopen(Request(server["base_url"], json.dumps(body).encode())))["choices"][0]["text"]
    digest = hashlib.sha256(b"%d" % number).hexdigest()
    lines.append({"doc_id": number, "doc_hash": digest, "prompt_hash": digest, "filter": "digit", "resps": [[text]], "exact_match": 1.0})
folder = pathlib.Path(known.output_path)
folder.mkdir()
(folder / "samples_largest.jsonl").write_text("".join(json.dumps(line) + "\\n" for line in lines))
"""


@pytest.fixture(name="words")
def _words(tmp_path: Path) -> list[str]:
    """Return a night of a small wheel, in environments whose vLLM is the reference server; its soak lasts for three seconds."""
    project = refserved.project(tmp_path / "project")
    gates = project / "ci" / "gates"
    refserved.edit(gates / "soak.yaml", seconds=3, interval=1, sample=0.5)
    # Fewer questions.
    refserved.edit(gates / "accuracy.yaml", margin=0.05)
    (gates / "numerics.yaml").write_text(strict_yaml.dump(converters.POLICY).replace("fork: mini", "fork: vllm"), "utf-8")
    # What the real vLLM holds, which the machine of the tests need not have free.
    refserved.edit(project / "ci" / "recipes" / "rehearsal" / "toy-cpu.yaml", cache=0.1, reserve=0.2, floor=0)
    model = standin.model(tmp_path / "model")
    ours, stock = (
        str(refserved.environment(tmp_path / name, fake_openai_server.Behaviour()))
        for name in ("ours", "stock")
    )
    wheel, baseline = (str(wheels.plain(tmp_path, "tiny", version)) for version in ("1.0", "0.9"))
    for name, path in (("ours", wheel), ("stock", baseline)):
        (site,) = (tmp_path / name).glob("lib/python3.*/site-packages")
        with zipfile.ZipFile(path) as archive:
            archive.extractall(site)
    words = [
        "gate", wheel, "--root", str(project), "--cache-dir", str(tmp_path / "cache"), "--output", str(tmp_path / "out"), "--offline",
        "--recipe", "toy-cpu", "--model-folder", str(model), "--python", ours, "--baseline", baseline, "--baseline-python", stock, "--keep-going",
    ]  # fmt: skip
    context = options.checkout(main.parse(words))
    tree = context.objects.store_files((name, "100644", text.encode()) for name, text in converters.FILES.items())
    context.store.put("source-tree", context.source_inputs("vllm"), tree)
    harness = toolchain.environment_folder(context, accuracy.TITLE, pylock.select(project / accuracy.LOCK))
    standin.write_environment(harness, "0", {"lm_eval/__main__.py": HARNESS})
    # The small tree includes no header of the toolkit.
    tools = toolchain._tools(context).root
    (tools / "lib" / "python3.x" / "site-packages" / "nvidia" / "cu13").mkdir(parents=True)
    (tools / "complete").touch()
    (harness / "complete").touch()
    return words


def written(folder: Path) -> str:
    """Return the page in the output folder of *folder*, as text."""
    (path,) = (folder / "out").glob("*.toy-cpu.html")
    return re.sub(r"\s+", " ", re.sub("<[^>]*>", " ", path.read_text("utf-8")))


def test_everything_that_a_night_lacks_is_named_at_once(cli: Cli, tmp_path: Path) -> None:
    """The wheel, the model, the sources of G1, the harness and the load generator, in one error, before anything starts."""
    done = cli(
        "gate",
        "--root",
        str(ROOT),
        "--cache-dir",
        str(tmp_path / "cache"),
        "--output",
        str(tmp_path / "out"),
        "--offline",
        "--recipe",
        "toy-cpu",
    )
    assert (done.returncode, "gate-unprepared" in done.stderr) == (1, True)
    named = re.findall(
        r"^ +(wheel|model|patched sources|accuracy harness|load generator): ", done.stderr, flags=re.MULTILINE
    )
    assert named == ["wheel", "model", "patched sources", "accuracy harness", "load generator"]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("minutes", "states"), [(0.6, {"G1": "pass", **dict.fromkeys(("G4", "G6", "G7"), "not-run")}), (10, {"G4": "invalid", "G6": "pass", "G7": "not-run"})]
)
def test_a_budget_that_is_too_short_ends_in_a_page_of_rows_that_did_not_run(
    minutes: float, states: dict[str, str], words: list[str], tmp_path: Path
) -> None:
    """Thirty-six seconds are less than any start of the stock wheel, and no server starts; ten minutes are less than the shortest soak alone."""
    refserved.edit(tmp_path / "project" / "ci" / "gates" / "soak.yaml", seconds=7200, stock=0.1)
    with refusal("gate-not-run" if minutes < 1 else "measurement-invalid"):
        main.run([*words, *(f"--only={gate}" for gate in states), "--hours", str(minutes / 60)])
    (document,) = (tmp_path / "out").glob("*.verdicts.json")
    verdicts = ladder.read_verdicts(document.read_bytes()).verdicts
    assert {verdict.gate: verdict.state for verdict in verdicts} == states
    assert {verdict.checks[0].reason for verdict in verdicts if not verdict.measured} == {"budget-spent"}
    text = written(tmp_path)
    assert text.count("budget-spent") >= list(states.values()).count("not-run")
    assert text.index("Not verified for toy-cpu") < text.index("against stock")
    assert (tmp_path / "stock" / "launches").exists() == (minutes > 1)


def test_what_passed_of_the_sources_needs_neither_them_nor_another_run(words: list[str], tmp_path: Path) -> None:
    """A night elsewhere, with nothing but the wheel and its verdicts; another policy's pass does not count."""
    main.run([*words, "--only", "G1"])
    (document,) = (tmp_path / "out").glob("*.verdicts.json")
    before = ladder.read_verdicts(document.read_bytes()).attempts
    context = options.checkout(main.parse(words))
    shutil.rmtree(context.store.root / "records" / "source-tree")
    with refusal("gate-not-run"):
        main.run([*words, "--profile", "fluent", "--only", "G1", "--only", "G4", "--hours", "0.01"])
    assert ladder.read_verdicts(document.read_bytes()).attempts == before
    refserved.edit(tmp_path / "project" / "ci" / "gates" / "numerics.yaml", memory=4097)
    with refusal("gate-unprepared"):
        main.run([*words, "--only", "G1", "--only", "G4", "--hours", "0.01"])


def test_a_stock_wheel_that_does_not_start_costs_only_what_compares_with_it(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its death is the first line of the page; a gate that needs no reference has its verdict. G8 has no pace of it, and does not begin."""
    (tmp_path / "stock" / "behaviour.json").unlink()
    monkeypatch.setattr("sparkwright.bench.vllm_bench.obtain", lambda *_, **__: None)
    with refusal("gate-failed"):
        main.run([*words, "--only", "G4", "--only", "G5", "--only", "G8"])
    (document,) = (tmp_path / "out").glob("*.verdicts.json")
    first, *others = ladder.read_verdicts(document.read_bytes()).verdicts
    assert (first.gate, first.measured) == ("G4", True)
    assert [(each.gate, each.state, each.checks[0].reason) for each in others] == [("G5", "not-run", "step-failed"), ("G8", "not-run", "step-failed")]
    assert all("it ended by itself" in each.checks[0].message for each in others)
    assert "reference could not be made" in written(tmp_path)


def test_memory_that_is_taken_when_ours_starts_costs_its_gates_alone(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another program took it while the stock wheel was recorded: the gate is not-run, with verdict and page."""
    here, asked = memory.MachineMemory.here, list[bool]()

    def less_later(*, empty: bool = False) -> memory.MachineMemory:
        asked.append(empty)
        return here(empty=empty) if asked.count(False) < 2 else replace(here(empty=empty), free=0.0)

    monkeypatch.setattr(memory.MachineMemory, "here", less_later)
    with refusal("gate-not-run"):
        main.run([*words, "--only", "G5"])
    (document,) = (tmp_path / "out").glob("*.verdicts.json")
    (verdict,) = ladder.read_verdicts(document.read_bytes()).verdicts
    assert (verdict.state, verdict.checks[0].reason) == ("not-run", "step-failed")
    assert "toy-cpu cannot be served here as it is" in written(tmp_path)


def test_night_names_the_folder_in_which_a_repair_needs_a_precise_reference(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A night cannot make it, as its model is another; the folder is that of the night's own reference."""
    (tmp_path / "stock" / "behaviour.json").unlink()
    repair = DeclaredChange("distributions", "toy-*", "", "scales")
    monkeypatch.setattr(builder.GateBuilder, "_declared", (repair,))
    with refusal("gate-not-run"):
        main.run([*words, "--only", "G5"])
    named = re.search(r"--record\s+(\S+)/precise", capsys.readouterr().err)
    assert named
    assert Path(named[1]).parent == tmp_path / "cache" / "references"


@pytest.mark.parametrize("other", ["other", "begun", "plain"])
def test_a_model_that_is_no_slimmer_copy_of_the_one_it_is_compared_with_is_refused_before_anything_starts(
    words: list[str], tmp_path: Path, other: str
) -> None:
    """Another model's copy, one that was not finished, and the model itself."""
    original, copy = tmp_path / "original", tmp_path / "copy"
    config = {"model_type": "x", "num_hidden_layers": 1}
    for folder, size in ((original, 64), (tmp_path / "other", 32)):
        checkpoints.write(folder, config, [("model.layers.0.o_proj.weight", "BF16", [64, 64]), ("model.norm.weight", "BF16", [size])])
    slim.Slimming(tmp_path / "other" if other == "other" else original, "fp8").write(copy)
    if other == "begun":
        (copy / "config.json").unlink()
    model = original if other == "plain" else copy
    with refusal("slim-other-source"):
        slim.read_record(model, original)
    words = [str(model) if word == str(tmp_path / "model") else word for word in words]
    with refusal("gate-unprepared"):
        main.run([*words, "--only", "G5", "--against", str(original)])
    assert not (tmp_path / "stock" / "launches").exists()


def test_a_lost_session_ends_a_night_as_ctrl_c_does(words: list[str], tmp_path: Path) -> None:
    """The terminal is gone, and nothing more can be written to it; the gate is not-run, and no attempt that counts."""
    command = [sys.executable, "-m", "sparkwright", *words, "--only", "G7"]
    pid, terminal = pty.fork()
    if not pid:
        # Tests that were started by nohup ignore it, and so would the gate.
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        os.execv(command[0], command)
    seen = b""
    while b"G7: " not in seen:
        seen += os.read(terminal, 4096)
    while not any("G7" in log.read_text() for log in (tmp_path / "out").glob("*.attempts.jsonl")):
        time.sleep(0.05)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130
    (document,) = (tmp_path / "out").glob("*.verdicts.json")
    stored = ladder.read_verdicts(document.read_bytes())
    assert stored.outcomes("G7") == {"toy-cpu": ["not-run"]}
    assert stored.verdicts[0].checks[0].reason == "interrupted"


#: Lines that a night prints while it is in a step, in their order; of the files that it records, the first and the last.
STEPS = ("audit tiny", "G1: numerics", "record pace.json", "record load.json", "G4: the text", "G6: accuracy", "G7: hours")


def test_a_killed_night_continues_behind_its_last_finished_step(words: list[str], tmp_path: Path) -> None:
    """
    Ended in each step, the same command begins with that one; after the end of the night, what did not pass is tried again. A kill counts as
    an attempt, and an end that was asked for does not. G3, G5 and their files are killed with the real server (tests/server/test_night.py),
    what makes environments and packs where those are tested; G2 begins only on a GPU, and G8 on a machine with its load generator.
    """
    only = ["--only", "G0", "--only", "G1", "--only", "G4", "--only", "G6", "--only", "G7"]
    command = [sys.executable, "-m", "sparkwright", *words, *only]
    for step, ending, status in (*((step, signal.SIGKILL, -9) for step in STEPS), (STEPS[-1], signal.SIGTERM, 130)):
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as killed:
            assert killed.stderr
            assert any(line.startswith(step) for line in killed.stderr), step
            killed.send_signal(ending)
            assert killed.wait() == status, step

    def run() -> str:
        return subprocess.run(command, capture_output=True, text=True, check=False).stderr

    resumed = run()
    assert re.search(r"^G4: invalid, not repeated", resumed, flags=re.MULTILINE)
    assert "G7: hours of mixed load" in resumed
    assert not re.search(r"record (pace|largest|answers|load)\.json", resumed)
    assert "G4: the text that the server generates" in run()
    (document,) = (tmp_path / "out").glob("*.verdicts.json")
    stored = ladder.read_verdicts(document.read_bytes())
    attempts = stored.outcomes("G7")["toy-cpu"]
    assert (len(attempts), attempts[:2]) == (4, ["interrupted", "not-run"])
    assert [*stored.outcomes("G1").values(), *stored.outcomes("G6").values()] == 2 * [["interrupted", "pass"]]
    # What is published of it is read as it lies there.
    wheel = Path(words[1])
    assert decision.read_results(wheel, document.parent).ladder == stored
    decision.require_logged(wheel, document.parent, stored)


def test_one_gate_starts_without_caches_and_the_others_from_what_it_left(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Servers of our wheel; a night that was interrupted takes the same pack. It lies beside the verdicts once every gate of the ladder
    passed, and the page says what was compiled nevertheless.
    """
    release = tmp_path / "releases" / "spark.1"
    release.parent.mkdir()
    (tmp_path / "ours").rename(release)
    words = [str(release / "bin" / "python") if word == str(tmp_path / "ours" / "bin" / "python") else word for word in words]
    marker = environment.Marker(name="spark.1", folder=str(release), index="", python="3.11.2", key="c" * 64, packages={}, channel="verified", wheels={"vllm": "a" * 64})
    store.write_file(release / environment.MARKER, msgspec.json.encode(marker))
    caches, ending, judge = list[str](), {"G4": KeyboardInterrupt}, builder.GateBuilder._result

    def result(made: builder.GateBuilder, name: str) -> ladder.GateFindings:
        return ladder.GateFindings((passed("x", "y"),)) if name in ("G0", "G1", "G2", "G8") else judge(made, name)

    def run(made: builder.GateBuilder, name: str) -> tuple[Check, ...]:
        root = Path(made.server.started.plan.environment()["TRITON_CACHE_DIR"])
        caches.append(f"{name} {root.parent.parent.name}")
        if name in ending:
            raise ending[name]
        if name == "G7":
            store.write_file(root / "B" / "kernel.cubin", b"")
        return (passed("x", "y"),)

    monkeypatch.setattr(builder.GateBuilder, "_run", run)
    for nothing in ("sparkwright.bench.vllm_bench.obtain", "sparkwright.cli.climb.canary.write"):
        monkeypatch.setattr(nothing, lambda *_, **__: None)
    monkeypatch.setattr(builder.GateBuilder, "_result", result)
    for needs in builder.GATE_NEEDS.values():
        name = needs.required.replace(builder.TASK, "largest")
        store.write_file(tmp_path / "reference" / (name or "x"), msgspec.json.encode(server_under_test.Pace(1, 1e6, 1e6, 1e6)))
    whole = [*words, f"--against={tmp_path / 'reference'}"]
    words = [*whole, "--only=G3"]
    main.run(words)
    words += ["--only=G4", "--only=G7"]
    with pytest.raises(KeyboardInterrupt):
        main.run(words)
    assert not list((tmp_path / "out").glob("*.pack.*"))
    ending.clear()
    main.run(words)
    assert caches == ["G3 cold", "G4 pack", "G4 pack", "G7 pack"]
    assert not list((tmp_path / "out").glob("*.pack.*"))
    main.run(whole)
    (record,) = (tmp_path / "out").glob("*.toy-cpu.pack.json")
    pack = msgspec.json.decode(record.read_bytes(), type=records.WarmPack)
    assert pack.sha256 == files.sha256_file(record.with_name(pack.name))
    assert (pack.key.wheels, pack.unpacked, pack.compiled) == (marker.wheels, len("compiled"), 1)
    assert min(pack.cold_s, pack.warm_s) > 0
    text = written(tmp_path)
    assert [text.count(f"with the warm pack: {count} compiled, 0 tuned") for count in (0, 1)] == [4, 1]
    main.run([*words, "--profile=fluent"])
    assert not record.exists()


def rendered(path: Path, answer: str = "", made: Sequence[night.NightStep] = (), wheel: str = "tiny.whl", logged: Sequence[Attempt] = ()) -> str:
    """Return the page of a night that measured the wheel at *path*."""
    return night.render_page(
        attempts=Ladder("2026.11", None, (), attempts=tuple(logged)),
        state="fail", answer=answer, recipe="toy-cpu", model="Toy", stack="2026.11", wheel=wheel, sha256="a" * 64, stock="b" * 64, steps=made,
        requested=("G4", "G7"), result=verdicts.result(path), machine={}, hours=0.2, seconds=9.0,
    )  # fmt: skip


def test_the_answer_comes_first_and_ratios_before_figures(tmp_path: Path) -> None:
    """One file without scripts or addresses; gates of one cause are one text, and what failed before is not concealed."""
    late = not_run("ladder", "G7 takes about 2 h, and 9 min are left", "budget-spent")
    made = [night.NightStep(name, check.state, "", verdict=Verdict(name, "", "", "", (check,))) for name, check in (("G4", passed("prompts", "")), ("G7", late))]
    answer = night.answer("toy-cpu", made, ("G4", "G5", "G7"), {})
    assert answer == (
        "Not verified for toy-cpu: G7 not-run (G7 takes about 2 h, and 9 min are left: budget-spent); "
        "G0, G1, G2, G3, G6, G8 not asked for; G5 not run yet."
    )
    logged = [Attempt(number, "", "G4", began=number, state=state) for number, end in enumerate[State](("fail", "pass")) for state in (None, end)]
    html = rendered(wheels.plain(tmp_path, "tiny", "1.0"), answer, made, logged=logged)
    assert "attempts: fail, pass" in html
    assert html.index(answer) < html.index("Candidate against baseline") < html.index("Absolute figures")
    assert not re.search(r"<script|https?://", html)
    for text in ("Toy, stack 2026.11", "<title>Not verified: toy-cpu</title>"):
        assert text in html


def test_a_pass_says_on_which_machine_and_after_how_many_attempts() -> None:
    """A release may name another GPU, or admit fewer attempts."""
    made = [
        night.NightStep(name, "pass", "", verdict=Verdict(name, "", "", "", (passed("prompts", ""),), attempt=4 if name == "G5" else 3))
        for name in ladder.GATES
    ]
    answer = night.answer("toy-cpu", made, [*ladder.GATES], {"gpu": "NVIDIA H200 (SM 9.0)"})
    assert answer == "Verified on NVIDIA H200 (SM 9.0), attempt 4: every gate passed for toy-cpu."


@pytest.mark.skipif(chromium.PROGRAM is None, reason="chromium is not installed")
def test_no_table_of_the_page_is_wider_than_a_screen(tmp_path: Path) -> None:
    """With long names, messages and figures, as a night of every gate has them."""
    check = Check(
        "kernels-launches-" + "x" * 60, "fail", "of 9,999 tokens " * 60, "kernels-unknown",
        figures=(Figure("a long name of a figure " * 4, 123456.789, "tok/s", bound=1e9),), samples=(Sample("void cutlass::" + "Kernel" * 60, "e" * 200, "f" * 200),),
    )  # fmt: skip
    steps = tuple(
        night.NightStep(name, "fail", f"{name}: {check.message}", 86400.0, 86400.0, Verdict(name, "", "", "", (check,) * 30, "qwen3-next-80b-nvfp4-flashinfer-cutlass"))
        for name in ladder.GATES
    )
    folder = tmp_path / "site"
    folder.mkdir()
    html = rendered(wheels.plain(tmp_path, "tiny", "1.0"), made=steps, wheel="vllm-" + "x" * 120 + ".whl")
    (folder / "night.html").write_text(html, "utf-8")
    assert chromium.faults_of_pages(folder, ("night.html",), (1400, 390)) == []


#: A Spark with 23 GB of weights.
SPARK = night.assumed_pace(23)
RECIPE = "qwen3-30b-a3b-nvfp4"

Tonight = Callable[..., night.Night]


@pytest.fixture(name="tonight")
def _tonight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tonight:
    """Return a function that makes the night of a small wheel by changes of its options."""
    monkeypatch.setattr(preflight, "both_fit", lambda *_: True)
    wheel, model = wheels.plain(tmp_path, "tiny", "1.0"), standin.model(tmp_path / "model")
    pythons = tuple(refserved.environment(tmp_path / name, fake_openai_server.Behaviour()) for name in ("ours", "stock"))

    def make(output: str = "dist", hours: float | None = None, **changes: object) -> night.Night:
        context = RunContext(Project(ROOT, "2026.11"), store.Store(tmp_path / "store"), (), tmp_path / output, offline=True)
        options = replace(server_under_test.GateOptions(wheel=wheel, serve=model, recipe=RECIPE, task="gsm8k"), **changes)
        return night.Night(context, options, "0" * 64, (pythons[0], pythons[1]), hours=hours)

    return make


@pytest.mark.parametrize(("hours", "start", "slower"), [(4, 98, 1.0), (4, 98, 1.1), (4.5, 900, 1.0), (5, 98, 1.3)])
def test_a_budget_reaches_throughput(hours: float, start: float, slower: float, tonight: Tonight, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our server starts within G3, and as late or answers as slowly as it may: the soak takes what is left, and G8 still begins."""
    clock = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: clock)
    monkeypatch.setattr(night.Night, "_measured_pace", SPARK)
    ours = server_under_test.Pace(start, SPARK.prefill_tokens_s / slower, SPARK.decode_tokens_s / slower, SPARK.requests_s / slower)
    made = tonight(hours=hours)
    soak = made._policies.soak
    for name in made._order:
        assert made._reason_not_to_begin(name) is None, name
        expected = made.estimate(name)[0]
        if name not in ladder.SERVED:
            seconds = expected
        elif name == "G7":
            load = min(soak.seconds, made.left_s(name))
            assert load >= soak.shortest
            seconds = load + slower * (expected - soak.shortest)
        else:
            pace = made._own_pace or SPARK
            seconds = expected if pace == ours else slower * made._gate_seconds(name) + start
        clock += seconds
        made._steps[name] = night.NightStep(name, "pass", "", seconds, expected)
        if name == "G3":
            made._own_pace = ours
    assert clock <= hours * 3600


def test_the_first_plan_is_of_a_spark_and_has_every_step(tonight: Tonight, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was measured: the model's bytes and a stated pace, with the answers of the stock wheel, and a start for each turn without room for two."""
    plan = {name: (seconds, source) for name, _, seconds, source in tonight().plan()}
    assert [*plan] == [night.ENVIRONMENTS, "G0", "G1", "G2", night.REFERENCE, *ladder.SERVED]
    assert plan[night.ENVIRONMENTS] == (0.0, "done")
    # The first gate of our server waits for its start, too.
    policy = strict_yaml.load(ROOT / "ci" / "gates" / "soak.yaml", SoakPolicy)
    load = policy.stock * len(policy.load.concurrencies)
    assert plan[night.REFERENCE][0] == pytest.approx(load + sum(plan[gate][0] for gate in ("G3", "G4", "G5", "G6")))
    assert {source for name, (_, source) in plan.items() if name in ladder.SERVED} == {"a Spark, assumed"}
    with (tmp_path / "model" / "more.safetensors").open("wb") as file:
        file.truncate(50 * 10**9)
    assert tonight().estimate(night.REFERENCE)[0] == pytest.approx(plan[night.REFERENCE][0] + 50, abs=1)
    assert tonight(workload=("1024/256 c1",)).estimate("G8")[0] < 0.6 * plan["G8"][0]
    # Where a quarter of the requests has a seat, the others wait.
    few = tonight(recipe="qwen3-coder-next-nvfp4")
    assert few.estimate("G6")[0] > 1.5 * plan["G6"][0]
    assert few.estimate(night.REFERENCE)[0] > plan[night.REFERENCE][0] + 0.5 * plan["G6"][0]
    monkeypatch.setattr(preflight, "both_fit", lambda *_: False)
    assert tonight().estimate("G8")[0] > plan["G8"][0] + 4 * 3 * SPARK.start_s
    for profile, most in (("random", 0.05), ("learnt", 0.05), ("fluent", 1.0)):
        assert tonight(profile=profile).estimate("G4")[0] < most * plan["G4"][0], profile
        assert tonight(profile=profile).estimate(night.REFERENCE)[0] < plan[night.REFERENCE][0]
    (tmp_path / "stock" / "bin" / "python").unlink()
    assert tonight().estimate(night.ENVIRONMENTS)[0] > 0


def judge(made: night.Night, name: str, *checks: Check, recipe: str = RECIPE, finished: bool = True) -> None:
    """Store a verdict of the gate *name* about the wheel of a night, which has it as a finished step unless another run made it."""
    subject, served = made._subject, recipe if name in ladder.SERVED else ""
    verdict = Verdict(name, ladder.GATES[name], subject.sha256, "", checks or (passed("check", ""),), served, model="m" if served else "")
    ladder.VerdictFile(made._context.store, made._context.output, subject, "2026.11").store(Ladder("2026.11", subject, (verdict,)))
    if finished:
        made._finish(night.NightStep(name, verdict.state, "", 60.0, 60.0, verdict))


@pytest.mark.parametrize("reason", ["machine-busy", "gpu-shared", "machine-unsteady", "step-unreachable", "disk-full", "program-fault"])
def test_what_the_machine_spoiled_is_tried_again_also_after_a_kill(reason: str, tonight: Tonight) -> None:
    """A kill leaves a night that has not ended, in which a failure of the wheel is finished."""
    made = tonight()
    for name, cause in (("G4", "reply-empty"), ("G5", reason)):
        judge(made, name, passed("legs", ""), invalid("measured", "", cause))
    again = tonight()
    assert [again.estimate(name)[1] == "done" for name in ("G4", "G5")] == [True, False]


def test_gates_that_ran_one_by_one_count_together(tonight: Tonight) -> None:
    """Those of the same night do; a verdict of other settings or of another machine beside them says nothing here, and a part alone has no warm pack."""
    for name in ladder.GATES:
        part = tonight(only=(name,))
        if name == "G6":
            judge(part, name, finished=False)
        elif name != "G8":
            judge(part, name)
            assert part.ladder.state == "pass"
            assert part.make_pack() is None
    made = tonight(only=("G8",))
    judge(made, "G8")
    assert made.answer == f"Not verified for {RECIPE}: G6 not asked for."
    judge(tonight(only=("G6",)), "G6")
    made = tonight(only=("G8",))
    assert made.reference != tonight(profile="chatml").reference
    assert made.answer.endswith(f"every gate passed for {RECIPE}.")
    assert [step.name for step in made._done] == [*ladder.GATES]


def test_a_night_of_which_only_a_gate_of_the_wheel_is_left_has_a_plan(tonight: Tonight) -> None:
    """Nothing stops behind a G2 that could not run, so that all others may have passed."""
    made = tonight()
    for name in ladder.SERVED:
        judge(made, name)
    plan = {name: source for name, _, _, source in tonight().plan()}
    assert {plan[name] for name in ladder.SERVED} == {"done"}
    assert plan["G2"] != "done"


@pytest.mark.parametrize("change", ["nothing", "ours", "stock", "output", "later", "workload", "texts", "server_user"])
def test_a_finished_gate_counts_as_long_as_it_is_true(change: str, tonight: Tonight, tmp_path: Path) -> None:
    """Of the same packages on both sides, and with its verdict beside the wheel; a later one of a single gate replaces it."""
    made = tonight()
    judge(made, "G4", passed("replies", "12 of 12"))
    if change in ("ours", "stock"):
        (site,) = (tmp_path / change).glob("lib/python3.*/site-packages")
        (site / "torch-2.14.1.dist-info").mkdir()
        (site / "torch-2.14.1.dist-info" / "METADATA").write_text("Name: torch\nVersion: 2.14.1\n")
    if change == "later":
        judge(made, "G4", failed("replies", "11 of 12", "reply-empty"), finished=False)
    (texts := tmp_path / "texts.jsonl").write_text("{}")
    asked = {"workload": ("rehearsal",), "texts": texts, "server_user": "nobody", "output": "other"}
    again = tonight(**{name: value for name, value in asked.items() if name == change})
    assert (again.estimate("G4")[1] == "done") is (change == "nothing")


def test_without_a_reference_no_soak_begins_and_the_plan_knows_the_task(tonight: Tonight) -> None:
    """Hours of load could end in nothing but not-run; G3 and G4 show at least what a server alone can."""
    made = tonight()
    made._unrecorded = ladder.stopped("the stock wheel does not start", "step-failed")
    assert [name for name in ladder.SERVED if made._reason_not_to_begin(name) is made._unrecorded] == ["G5", "G6", "G7", "G8"]
    assert tonight(task="largest").estimate("G6")[0] < made.estimate("G6")[0] / 2
