"""Around the compiling: which unit a name means, what a change recompiles, what the report says."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import msgspec
import pytest
from tests.refusals import refusal

from sparkwright.builder.compile import ninja as compiling
from sparkwright.builder.compile import predict_rebuild, single_unit
from sparkwright.builder.compile import report as compilereport
from sparkwright.builder.compile.calls import Limits, Outcome, Sample
from sparkwright.builder.compile.costs import Expected
from sparkwright.builder.compile.ninja import Command
from sparkwright.builder.environment import ccache
from sparkwright.forks import context as sessions
from sparkwright.forks.context import CompilerCache, Session

if TYPE_CHECKING:
    from tests.unit.conftest import Mini

ROOT = "/usr/local/src/vllm/src/"
COMMANDS = [
    Command("/b", f"nvcc -c {ROOT}{path} -o {target}/{path}.o", f"{ROOT}{path}", f"{target}/{path}.o")
    for target, path in (("_C", "csrc/topk.cu"), ("_C", "csrc/moe/topk.cu"), ("_moe", "csrc/moe/topk.cu"), ("_C", "csrc/bindings.cpp"))
]


@pytest.mark.parametrize(
    ("name", "outputs"),
    [
        ("csrc/topk.cu", ["_C/csrc/topk.cu.o"]),
        ("moe/topk.cu", ["_C/csrc/moe/topk.cu.o", "_moe/csrc/moe/topk.cu.o"]),
        ("./bindings.cpp", ["_C/csrc/bindings.cpp.o"]),
        (f"{ROOT}csrc/topk.cu", ["_C/csrc/topk.cu.o"]),
    ],
)
def test_a_unit_is_named_by_the_end_of_its_path(name: str, outputs: list[str]) -> None:
    """The whole path always means that source; a source that two targets compile has two objects."""
    assert [command.output for command in single_unit.matching(COMMANDS, ROOT, name)] == outputs


@pytest.mark.parametrize(
    ("name", "detail"),
    [("topk.cu", "csrc/moe/topk.cu"), ("tpk.cu", "close to it: csrc/topk.cu"), ("opk.cu", "close to it"), ("zzz", "3 units, such as")],
)
def test_a_name_that_means_no_unit_or_several_is_refused_with_help(name: str, detail: str) -> None:
    """The error lists what could be meant."""
    with refusal("usage") as raised:
        single_unit.matching(COMMANDS, ROOT, name)

    assert any(detail in line for line in raised.value.details)


def test_a_build_folder_without_commands_has_no_units(tmp_path: Path) -> None:
    """Generators other than CMake's write none down."""
    assert compiling.commands(tmp_path) == []
    with refusal("usage"):
        single_unit.matching([], ROOT, "a.cu")


def test_what_units_read_is_taken_from_ninja() -> None:
    """Relative names are those of the build folder, as a compiler cache writes them; what is no record is passed over."""
    lines = [
        "ninja: Entering directory `/b'",
        "_C/a.cu.o: #deps 3, deps mtime 1795290000000000000 (VALID)",
        "    /s/csrc/a.cu",
        "    ../s/csrc/b.cuh",
        "    gen/c.h",
        "",
        "_C/d.cu.o: #deps 1, deps mtime 1 (STALE)",
        "    /s/csrc/d.cu",
        "",
    ]

    assert predict_rebuild.included(lines, "/b") == {
        "/b/_C/a.cu.o": {"/s/csrc/a.cu", "/s/csrc/b.cuh", "/b/gen/c.h"},
        "/b/_C/d.cu.o": {"/s/csrc/d.cu"},
    }


def outcome(unit: str, began: float, ended: float, megabytes: int, *, hit: bool = False, status: int = 0) -> Outcome:
    return Outcome(unit, status, hit, 10.0, began, ended, ended - began, megabytes, Expected(5, 100, "shipped"))


OUTCOMES = [
    outcome("a.cu", 10, 30, 900), outcome("<b>.cu", 10, 20, 400), outcome("hit.cu", 10, 10.1, 9, hit=True),
    outcome("bad.cu", 20, 21, 1, status=1),
]  # fmt: skip
SAMPLES = [Sample(10 + second, 1300 if second < 10 else 900, 1000, 5000) for second in range(20)]


def test_a_report_holds_a_build_against_its_bounds() -> None:
    """Peak, overruns, makespan and the lower bound of what was compiled; hits cost nothing, and what failed is not counted."""
    report = compilereport.of("vllm", "2026.11", Limits(2, 1200), OUTCOMES, SAMPLES)

    assert (report.peak, report.overruns, report.work, report.makespan, report.lower_bound) == (1300, 10, 30, 20, 20)
    assert [unit.unit for unit in report.units] == ["<b>.cu", "a.cu", "hit.cu"]
    assert report.units[1].expected_megabytes == 100
    assert msgspec.json.decode(msgspec.json.encode(report), type=compilereport.CompileReport) == report


def test_a_report_of_a_long_build_keeps_the_peaks() -> None:
    """Samples are thinned, and the largest of those that are left out stays."""
    many = [Sample(second, 5000 if second == 7777 else 10, 10, 10) for second in range(10_000)]
    report = compilereport.of("vllm", "s", Limits(2, 1200), OUTCOMES, many)

    assert len(report.samples) <= compilereport.SAMPLES
    assert max(sample.used for sample in report.samples) == report.peak == 5000


@pytest.mark.parametrize("outcomes", [OUTCOMES, []])
def test_the_plot_is_an_image_with_a_bar_for_each_compiled_unit(outcomes: list[Outcome]) -> None:
    """Names are text, whatever they hold; nothing lies outside of the picture."""
    report = compilereport.of("vllm", "2026.11", Limits(2, 1200), outcomes, SAMPLES if outcomes else [])
    image = ElementTree.fromstring(compilereport.plot(report))
    width, height = map(float, (image.get("viewBox") or "").split()[2:])
    bars = [bar for bar in image.iter("{http://www.w3.org/2000/svg}rect") if len(bar)]

    assert len(bars) == (2 if outcomes else 0)
    for bar in bars:
        assert 0 <= float(bar.get("x") or -1) <= float(bar.get("x") or 0) + float(bar.get("width") or 0) <= width
        assert float(bar.get("y") or 0) + float(bar.get("height") or 0) <= height
    texts = [text for text in image.iter("{http://www.w3.org/2000/svg}text") if text.text]
    for text in texts:
        # A letter of these fonts is on average not wider than six tenths of its height.
        wide = 0.6 * float(text.get("font-size") or 12) * len(text.text or "")
        behind = {None: wide, "middle": wide / 2, "end": 0.0}[text.get("text-anchor")]
        assert float(text.get("x") or 0) + behind <= width, text.text


def test_names_in_the_plot_do_not_overlap() -> None:
    """Units with much memory that stand one below the other have rows that are higher than their names."""
    outcomes = [outcome(f"a/long_name_of_a_unit_{number}.cu", 10 + number, 400, 900) for number in range(6)]
    image = ElementTree.fromstring(compilereport.plot(compilereport.of("vllm", "s", Limits(2, 1200), outcomes, SAMPLES)))
    lines = [float(text.get("y") or 0) for text in image.iter("{http://www.w3.org/2000/svg}text") if "long_name" in (text.text or "")]

    assert len(lines) == 6
    assert all(after - before >= 9 for before, after in itertools.pairwise(lines))


@pytest.fixture(name="session")
def _session(mini: Mini) -> Session:
    return mini.session()


def test_without_ccache_a_build_works_and_says_what_to_install(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is cached then; who asked for ccache gets an error."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert ccache.of(session, CompilerCache(), None) is None
    assert "apt-get install ccache" in capsys.readouterr().err
    with refusal("tool-missing", match="ccache"):
        ccache.of(session, CompilerCache(tool="ccache"), None)
    assert ccache.of(session, CompilerCache(tool="none"), None) is None


def test_an_old_ccache_is_not_used(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ubuntu 22.04 has 4.5, which would preprocess every unit before it looks."""
    program = tmp_path / "ccache"
    program.write_text("#!/bin/sh\necho ccache version 4.5.1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    assert ccache.of(session, CompilerCache(), None) is None
    assert "4.5 is too old" in capsys.readouterr().err


def test_the_users_own_cache_settings_do_not_reach_a_build() -> None:
    """Where results come from is what sparkwright says, and nothing else."""
    own = {"CCACHE_DIR": "/mine", "CCACHE_DISABLE": "1", "SCCACHE_BUCKET": "b", "PATH": "/bin"}

    assert ccache.without_settings(own) == {"PATH": "/bin"}


def test_the_users_file_configures_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tool, remote and size; anything else is a typing error and refused."""
    file = tmp_path / "config.yaml"
    file.write_text("compiler_cache: {remote: 'redis://cache.example', size: 20G}\n")
    monkeypatch.setenv("SPARKWRIGHT_CONFIG", str(file))
    assert sessions.config().compiler_cache == CompilerCache("auto", "redis://cache.example", "20G")
    file.write_text("compiler_cache: {tool: distcc}\n")
    with refusal("file-invalid"):
        sessions.config()
