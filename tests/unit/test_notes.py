"""Release notes say what the records of a release prove, in Markdown and in HTML, and nothing else."""

from __future__ import annotations

import html.parser
import re
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from msgspec.structs import replace
from tests.refusals import refusal

from sparkwright.core.files import canonical, sha256_bytes
from sparkwright.release import notes
from sparkwright.release.manifest.records import (
    Evidence,
    Fork,
    Gate,
    Library,
    Lock,
    Machine,
    Missing,
    Need,
    Patch,
    Proof,
    Proved,
    Release,
    Speed,
    Wheel,
)
from sparkwright.release.notes import rendered, whole
from sparkwright.release.notes.blocks import Code, Says

MADE = "2026-11-22T07:30:00Z"


def sha(text: str) -> str:
    return sha256_bytes(text.encode())


BASE = sha("official wheel")
LARGEST = Patch("largest-scale.patch", sha("largest"), "Take the largest scale", "scales of experts enter uninitialised")
MARLIN = Patch("#40923", sha("marlin"), "Marlin MoE: include SM 12.x", "PTX of 8.0 gave gibberish", 40923)
MTP = Patch("#46316", sha("mtp"), "Force unquantized mtp.fc", "the server ends with an error", 46316)
OPTION = Patch("option.patch", sha("option"), "Let projects be left out", "a graft needs no download")


def wheel(fork: str, project: str, version: str, size: int, libraries: tuple[Library, ...] = ()) -> Wheel:
    machine: Machine = "aarch64" if libraries else "any"
    filename = f"{project.replace('-', '_')}-{version}-{'cp38-abi3-manylinux_2_28_aarch64' if libraries else 'py3-none-any'}.whl"
    return Wheel(
        filename, sha(filename), size, fork, project, version, machine, f"files/{sha(filename)}/{filename}", sha("metadata"), MADE,
        device_code=sha("code") if libraries else "", libraries=libraries,
    )  # fmt: skip


def lock(**packages: str) -> Lock:
    return Lock("aarch64", sha(f"{packages}"), sha(f"requirements {packages}"), {name.replace("_", "-"): v for name, v in packages.items()})


BEFORE = Release(
    "2026.11.1", "2026.11", "2026-11-20T10:00:00Z",
    wheels=(
        wheel("vllm", "vllm", "0.32.1+spark.2026.10", 400_000_000, (
            Library("vllm/_C.abi3.so", 90_000_000, "compiled", {"sm_121f": 70}),
            Library("vllm/_flash.so", 200_000_000, "base", {"sm_90": 5}),
        )),
    ),
    forks=(
        Fork("vllm", "0.32.1", "git", "https://upstream.example/vllm.git", "1" * 40, "a" * 40, True, "graft", "b" * 40, sha("older wheel"),
             (MARLIN, MTP, LARGEST, OPTION), 6, "cu130", "bubblewrap"),
        Fork("flashinfer", "0.7.2", "git", "https://upstream.example/flashinfer.git", "2" * 40, "c" * 40, True, "backend", "c" * 40),
    ),
    locks=(lock(torch="2.13.0", numpy="2.4.0", nvidia_cublas="13.0.1", triton="3.6.0", gone="1.0", vllm="0.32.1+spark.2026.10"),),
    needs=(Need("vllm", "#46316", "upstream", "0.33.0 has it: reverse: 0.33.0 holds the whole change"),),
)  # fmt: skip

RELEASE = Release(
    "2026.11.2", "2026.11", MADE,
    wheels=(
        wheel("vllm", "vllm", "0.33.0+spark.2026.11", 410_000_000, (
            Library("vllm/_C.abi3.so", 99_000_000, "compiled", {"sm_121f": 76, "sm_80": 1}),
            Library("vllm/_flash.so", 200_000_000, "base", {"sm_90": 5}),
        )),
        wheel("flashinfer", "flashinfer-python", "0.7.2+spark.2026.11", 9_000_000),
    ),
    forks=(
        Fork("vllm", "0.33.0", "git", "https://upstream.example/vllm.git", "3" * 40, "d" * 40, True, "graft", "e" * 40, BASE,
             (MARLIN, replace(LARGEST, sha256=sha("largest again")), Patch("new.patch", sha("new"), "Do the new", "it was not done")), 7,
             "cu130", "bubblewrap"),
        Fork("flashinfer", "0.7.2", "sdist", "flashinfer-python 0.7.2", "4ba787ec9", "c" * 40, False, "backend", "c" * 40),
    ),
    locks=(lock(torch="2.14.0", numpy="2.4.0", nvidia_cublas="13.1.0", triton="3.6.0", come="2.0", vllm="0.33.0+spark.2026.11"),),
    needs=(
        Need("vllm", "#40923", "needed", "0.33.1 lacks it and takes it; tried on 2026-11-21"),
        Need("vllm", "largest-scale.patch", "unknown", "nobody tried it on anything later than its own source"),
    ),
    before=sha256_bytes(canonical(BEFORE)),
)  # fmt: skip

PROVED = Proved(
    RELEASE.wheels[0].sha256, sha("policy"),
    missing=(Missing("G7", "not-run", "gpu-missing", "no GB10 is here"),),
    gates=(
        Gate("G0", "the bytes in the wheel", "pass"),
        Gate("G7", "hours of mixed load", "not-run", "no GB10 is here"),
        Gate("G8", "throughput, against a baseline", "inconclusive", "12 blocks decide neither way"),
    ),
    speeds=(
        Speed("1024/1024 C=1", "tpot", "pass", 0.95, 0.93, 0.97, 250.0, 0.01),
        Speed("1024/1024 C=8", "rate", "inconclusive", 1.01, 0.98, 1.04, 3.0, 0.2),
        Speed("8192/1024 C=1", "ttft", "not-run"),
        Speed("1024/1024 C=32", "tpot", "not-run", 1.2),
    ),
    baseline=f"vllm 0.33.0, the official wheel ({BASE[:16]})", margin=0.02, host={"GPU": "NVIDIA GB10", "driver": "595.10"},
    evidence=(Evidence("provenance", sha("provenance"), 900), Evidence("summary", sha("summary"), 700)),
)  # fmt: skip


def proof(release: Release = RELEASE, *proved: Proved) -> Proof:
    return Proof(
        sha256_bytes(canonical(release)), MADE, proved or (PROVED, Proved(release.wheels[-1].sha256, sha("policy"), ()))
    )


def markdown(release: Release = RELEASE, *proved: Proved, before: Release | None = BEFORE) -> str:
    return notes.markdown(release, proof(release, *proved), before)


def section(text: str, title: str) -> str:
    """Return what stands under the heading *title*, up to the next one of its level or above."""
    level, rest = re.split(rf"^(#+) {re.escape(title)}$", text, flags=re.M)[1:]
    return re.split(rf"^#{{1,{len(level)}}} ", rest, flags=re.M)[0]


def row(text: str, *cells: str) -> str:
    """Return the one row of a table that has all of *cells*."""
    (found,) = [line for line in text.splitlines() if line.startswith("|") and all(cell in line for cell in cells)]
    return found


def test_equal_records_give_equal_notes() -> None:
    """The text is a function of the records: a decoded copy gives the same bytes, in both forms."""
    again = msgspec.json.decode(msgspec.json.encode(RELEASE), type=Release)
    old = msgspec.json.decode(msgspec.json.encode(BEFORE), type=Release)
    assert again == RELEASE
    assert notes.markdown(again, proof(again), old) == markdown()
    assert notes.html(again, proof(again), old) == notes.html(RELEASE, proof(), BEFORE)


def test_the_first_line_says_what_it_is() -> None:
    """Name, stack, forks, torch, number and size of the wheels."""
    first = markdown().splitlines()[0]
    assert first.startswith(
        "**2026.11.2** of the stack 2026.11: vllm 0.33.0, flashinfer 0.7.2, torch 2.14.0. 2 wheels for aarch64, 419.0 MB"
    )


def test_what_is_missing_for_verified_comes_next() -> None:
    """Each reason with its reference; and where nothing is missing, that is said."""
    assert row(markdown().partition("## Changes")[0], "G7", "not run", "`gpu-missing`", "no GB10 is here")
    whole_ = markdown(RELEASE, replace(PROVED, missing=()), Proved(RELEASE.wheels[1].sha256, sha("policy"), ()))
    assert "Nothing is missing: every verdict" in whole_


def test_a_wheel_that_the_proof_does_not_name_is_not_proved() -> None:
    """No record is no pass."""
    text = markdown(RELEASE, replace(PROVED, missing=()))
    assert "Nothing is missing" not in text
    assert row(text, "flashinfer-python", "everything", "the proof does not name this wheel")


def test_the_stack_is_held_against_the_release_before() -> None:
    """Version, pin, official wheel and patch set of each fork that changed, and no line for what did not."""
    said = section(markdown(), "Changes since 2026.11.1")
    assert row(said, "vllm", "version", "0.32.1", "0.33.0")
    assert row(said, "vllm", "source", f"`{'1' * 16}`", f"`{'3' * 16}`")
    assert row(said, "vllm", "patch set", "4 patches", "3 patches (2 new, 3 gone)")
    assert row(said, "flashinfer", "source", "git", "sdist `4ba787ec9`")
    assert "compiler" not in said


def test_torch_and_cuda_come_first_among_packages() -> None:
    """Changed, added and removed packages are named, torch at the top; the rest is counted."""
    said = section(markdown(), "Packages of the set for aarch64")
    names = [line.split("|")[1].strip() for line in said.splitlines() if line.startswith("|")][2:]
    assert names == ["torch", "nvidia-cublas", "come", "gone", "vllm"]
    assert row(said, "come", "added")
    assert row(said, "gone", "removed")
    assert "2 packages have the version that they had." in said


def test_every_patch_says_what_became_of_it() -> None:
    """Kept, changed, added; gone patches are absorbed only where a record says that upstream has them."""
    said = section(markdown(), "Patches")
    assert "| kept " in row(said, "\\#\u200b40923")
    assert "| changed " in row(said, "`largest-scale.patch`")
    assert "| added " in row(said, "`new.patch`")
    assert "absorbed upstream: 0.33.0 has it" in row(said, "\\#\u200b46316")
    assert "| dropped " in row(said, "`option.patch`")
    assert "Without a patch: flashinfer." in said


@pytest.mark.parametrize("named", [True, False])
def test_without_the_release_before_nothing_is_compared(named: bool) -> None:
    """A first release says that it is one; where the other record is not at hand, that is said instead."""
    release = RELEASE if named else replace(RELEASE, before="")
    text = markdown(release, before=None)
    assert ("whose record was not at hand" in text) == named
    assert ("It is the first release of the stack" in text) != named
    assert "| carried " in row(section(text, "Patches"), "`new.patch`")


def test_a_comparison_with_another_release_says_so() -> None:
    """Held against a release that is not the one before, the notes say that."""
    other = replace(BEFORE, name="2026.11.0")
    assert "2026.11.0 is not the release that this one names as the one before it" in markdown(before=other)


def test_the_gate_report_has_every_gate_and_reason() -> None:
    """State and reason of each gate, with sign and word; what did not run is listed once more."""
    said = section(markdown(), "What the gates say")
    assert row(said, "G0", "✓ pass")
    assert row(said, "G8", "? inconclusive", "12 blocks decide neither way")
    assert "- G7 (hours of mixed load), for vllm: no GB10 is here" in said
    assert "On: GPU NVIDIA GB10, driver 595.10." in said
    assert "No gate ran on this wheel." in said


def test_speeds_have_interval_margin_and_evidence() -> None:
    """A ratio is written as the change of the metric; what nobody measured is written so."""
    said = section(markdown(), "What the gates say")
    assert "slowdowns of 2.0 %" in said
    assert row(said, "time per token (less is better)", "−5.00 %", "−7.00 % to −3.00 %", "×250", "×0.0100")
    assert row(said, "time to first token", "*not measured*")
    assert row(said, "1024/1024 C=32", "reported", "+20.00 %", "too few blocks")
    none = markdown(RELEASE, replace(PROVED, speeds=()))
    assert "Speed against a baseline: *not measured*." in none


def test_sizes_and_architectures_are_tables() -> None:
    """Each wheel and library with its size, the change, and what it holds machine code for."""
    said = section(markdown(), "Sizes and architectures")
    assert row(said, RELEASE.wheels[0].filename, "410.0 MB", "400.0 MB", "+2.50 %")
    assert row(said, "`vllm/_C.abi3.so`", "compiled here", r"sm\_80 (1), sm\_121f (76)", "99.0 MB", "90.0 MB", "+10.00 %")
    assert row(said, "`vllm/_flash.so`", "from the official wheel", r"sm\_90 (5)")


def test_provenance_names_what_is_not_resolved() -> None:
    """A short commit is not passed off as a whole one, and no isolation is not left empty."""
    said = section(markdown(), "Where it comes from")
    assert row(said, "vllm", "`" + "3" * 40 + "`", "whole", "graft on the official wheel", "bubblewrap")
    assert row(said, "flashinfer", "`4ba787ec9`", "*not resolved", "*nothing that is recorded*")


def test_verify_names_every_hash() -> None:
    """Wheels, locks and evidence by their whole sha256, and the release's own address."""
    said = section(markdown(), "Verify")
    named = [
        *(one.sha256 for one in RELEASE.wheels),
        RELEASE.locks[0].sha256,
        *(one.sha256 for one in PROVED.evidence),
        whole.address(RELEASE),
    ]
    assert [one for one in named if one not in said] == []


def test_a_proof_of_another_release_is_refused() -> None:
    """Notes never join two releases."""
    with refusal("index-damaged", match="of another release"):
        notes.markdown(RELEASE, proof(BEFORE), None)


def test_need_goes_patch_by_patch() -> None:
    """Needed and unknown with the reason; a patch of which the record says nothing is unknown."""
    said = section(markdown(), "Do you still need this fork?")
    assert row(said, "\\#\u200b40923", "**needed**", "0.33.1 lacks it")
    assert row(said, "`largest-scale.patch`", "**unknown**", "nobody tried it")
    assert row(said, "`new.patch`", "**unknown**", "nobody looked")
    assert "- Of 3 patches: 1 needed, 2 unknown." in said


def test_need_says_what_an_interval_supports() -> None:
    """Faster only where the whole interval is; the baseline counts as the stock wheel because its hash is named."""
    said = section(markdown(), "Do you still need this fork?")
    assert "at least 3.1 % faster" in row(said, "1024/1024 C=1", "time per token")
    assert "no difference shown: 2.0 % slower to 4.0 % faster" in row(said, "1024/1024 C=8", "throughput")
    assert "vllm against the stock wheel: faster in 1, slower in 0 of 3 figures that were measured" in said
    assert "Nobody has measured" not in said


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"speeds": ()}, "**Nobody has measured that this release is faster than the stock wheel.**"),
        ({"speeds": PROVED.speeds[2:3]}, "**Nobody has measured that this release is faster than the stock wheel.**"),
        ({"speeds": PROVED.speeds[1:3]}, "**Nobody has measured that this release is faster than the stock wheel.**"),
        ({"baseline": "vllm 0.33.0"}, "does not say by hash that this baseline (vllm 0.33.0) is the stock wheel"),
    ],
)
def test_need_claims_no_speed_that_nobody_measured(change: dict[str, Any], says: str) -> None:
    """No figure, no difference, or a baseline that may be another wheel: the sentence says so."""
    assert says in section(markdown(RELEASE, replace(PROVED, **change)), "Do you still need this fork?")


def test_need_says_when_upstream_has_everything() -> None:
    """The plain sentence follows from the table."""
    (vllm, *_) = RELEASE.forks
    one = replace(RELEASE, forks=(replace(vllm, patches=(MARLIN,)),), needs=(Need("vllm", "#40923", "upstream", "0.34.0 has it"),))
    assert "Upstream has every patch that this release carries." in markdown(one)
    none = replace(RELEASE, forks=(replace(vllm, patches=()),), needs=())
    assert "- It carries no patch." in markdown(none)


HOSTILE = "</td><script>alert(1)</script>|`x`[a](http://evil.example)<img src=x onerror=y>**@all** #7\n# Title\n\x1b[2J\u202e&amp;"


def poisoned(record: Any) -> Any:
    """Return *record* with the hostile text in every string that is free text (no literal, no key of a table of ours)."""
    kept = {"machine", "origin", "state", "kind", "format", "made", "before", "release", "wheel", "sha256", "metric"}
    if isinstance(record, msgspec.Struct):
        return type(record)(**{
            field: getattr(record, field) if field in kept else poisoned(getattr(record, field)) for field in record.__struct_fields__
        })  # fmt: skip
    if isinstance(record, tuple):
        return tuple(poisoned(one) for one in record)
    if isinstance(record, dict):
        return {poisoned(key) + key if isinstance(key, str) else key: poisoned(value) for key, value in record.items()}
    return HOSTILE + record if isinstance(record, str) else record


class Seen(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: dict[str, set[str]] = {}
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.setdefault(tag, set()).update(name for name, _ in attrs)
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


ALLOWED = {
    "h2": set(), "h3": set(), "p": set(), "ul": set(), "li": set(), "div": {"class", "tabindex"}, "table": set(), "thead": set(),
    "tbody": set(), "tr": set(), "th": {"scope", "class"}, "td": {"class"}, "code": set(), "strong": set(), "em": set(),
    "span": {"class"}, "pre": set(),
}  # fmt: skip


def test_no_string_of_a_record_becomes_markup_in_html() -> None:
    """Poison in every free field leaves the elements as they are, balanced, and no control character."""
    bad, old = poisoned(RELEASE), poisoned(BEFORE)
    fragment = notes.html(bad, proof(bad, poisoned(PROVED)), old)
    seen = Seen()
    seen.feed(fragment)
    assert seen.open == []
    assert {tag: found - ALLOWED[tag] for tag, found in seen.tags.items() if found - ALLOWED[tag]} == {}
    assert set(seen.tags) <= set(ALLOWED)
    assert not re.search(r"[\x00-\x09\x0b-\x1f\u202e]", fragment)
    seen = Seen()
    seen.feed(notes.html(RELEASE, proof(), BEFORE))
    assert {"h1", "script", "a", "img"}.isdisjoint(seen.tags)


def test_no_string_of_a_record_becomes_markup_in_markdown() -> None:
    """A real Markdown renderer makes no element of the poison, and every row of a table keeps its cells."""
    bad, old = poisoned(RELEASE), poisoned(BEFORE)
    text = notes.markdown(bad, proof(bad, poisoned(PROVED)), old)
    good, found = parsed(markdown()), parsed(text)
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert {kind for kind, _ in found} == {kind for kind, _ in good}
    ragged = re.findall(r"^\|.*\|$", text, flags=re.M)
    assert sum(kind == "tr_open" for kind, _ in found) == sum(not re.match(r"\| -{3}", line) for line in ragged)
    outside = "".join(said for kind, said in found if kind == "text")
    assert not re.search(r"(@|://|#(?=\d))(?!\u200b)", outside)
    assert HOSTILE.partition("|")[0] in outside


def parsed(text: str) -> list[tuple[str, str]]:
    """Return the kinds of the elements that a real parser finds, and their text."""
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    return [(one.type, one.content) for token in tokens for one in (token.children or [token])]


@given(st.text(max_size=60))
def test_code_shows_any_text_and_ends_where_it_ends(said: str) -> None:
    """Whatever stands in a name, the fence around it is longer than any run of its own."""
    made = rendered.as_markdown([Says(Code(said))]).rstrip("\n")
    fence = re.match("`+", made)
    assert fence
    inner = made[len(fence[0]) : len(made) - len(fence[0])]
    assert fence[0] not in inner or not said
    assert "\n" not in made
