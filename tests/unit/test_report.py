"""The page of a report: one file that needs nothing, runs nothing, says the verdict first, and leaves no number out."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.refusals import refusal
from tests.unit.reportdata import HOSTILE, MAKERS, POINTS, Maker, bench, large

from sparkwright.bench.records import METRICS
from sparkwright.bench.report import compare, page, raw, read, words
from sparkwright.bench.report.view import View
from sparkwright.bench.results import Result
from sparkwright.core.states import State
from sparkwright.gates.core.verdict import ORDER

#: Elements that have no end.
VOID = {"meta", "br", "hr", "img", "link", "input"}
#: Elements of a page that shows and does nothing else; those of SVG among them.
KNOWN = {
    *(
        "html",
        "head",
        "meta",
        "title",
        "style",
        "body",
        "nav",
        "main",
        "section",
        "footer",
        "div",
        "p",
        "a",
        "span",
        "strong",
        "small",
        "code",
    ),
    *("h1", "h2", "h3", "hr", "ul", "li", "dl", "dt", "dd", "figure", "figcaption", "details", "summary", "code"),
    *(
        "table",
        "caption",
        "thead",
        "tbody",
        "tr",
        "th",
        "td",
        "svg",
        "g",
        "path",
        "defs",
        "use",
        "text",
        "tspan",
        "desc",
        "clippath",
        "rect",
    ),
}
#: Attributes through which a page could load or send something.
LOADING = ("src", "srcset", "action", "formaction", "data", "xmlns")


class Page(HTMLParser):
    """A page taken apart: its elements with their attributes, its text, and whether each element ends where it should."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open, f"never ended: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> in {self.open}"

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.texts))


def small(**change: Any) -> Result:
    """Return a gate of two cells and three blocks, with something changed."""
    return msgspec.structs.replace(Maker(1, points=POINTS[:2]).gate(blocks=3), **change)


@pytest.fixture(name="gate", scope="module")
def _gate() -> tuple[Result, str]:
    """Return a small Result and its page."""
    return small(), page.render([small()])


@pytest.fixture(name="hostile", scope="module")
def _hostile() -> str:
    """Return the page of a Result each of whose strings tries to be something else."""
    return page.render([MAKERS["hostile"]()])


@pytest.mark.parametrize("which", ["gate", "hostile"])
def test_a_page_is_whole_html_of_known_elements(which: str, request: pytest.FixtureRequest) -> None:
    """Each element ends where it should, none is unknown, and no identifier is there twice or missing."""
    made = request.getfixturevalue(which)
    found = Page(made if which == "hostile" else made[1])
    ids = Counter(attributes["id"] for _, attributes in found.elements if attributes.get("id"))
    told = [name for _, attributes in found.elements for name in (attributes.get("aria-labelledby") or "").split()]
    linked = [str(attributes["href"]) for tag, attributes in found.elements if tag == "a"]

    assert {tag for tag, _ in found.elements} <= KNOWN
    assert [one for one, count in ids.items() if count > 1] == []
    assert told
    assert {*told, *(one.removeprefix("#") for one in linked)} <= set(ids)


@pytest.mark.parametrize("which", ["gate", "hostile"])
def test_a_page_asks_for_nothing_and_runs_nothing(which: str, request: pytest.FixtureRequest) -> None:
    """There is no script, no handler and no address in an attribute or the style; the page's own policy forbids them, too."""
    made = request.getfixturevalue(which)
    text = made if which == "hostile" else made[1]
    found = Page(text)
    attributes = [(name, value or "") for _, given in found.elements for name, value in given.items()]
    policy = next(given["content"] for tag, given in found.elements if tag == "meta" and "http-equiv" in given)
    style = text[text.index("<style>") : text.index("</style>")]

    assert policy == "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    assert not [
        name for name, _ in attributes if name.startswith("on") or name in ("src", "srcset", "action", "formaction", "data", "xmlns")
    ]
    assert all(value.startswith("#") for name, value in attributes if name.endswith("href"))
    assert all(one.startswith("#") for _, value in attributes for one in re.findall(r"url\(([^)]*)\)", value))
    assert "url(" not in style
    assert "@import" not in style


def test_strings_of_others_are_text_and_nothing_else(hostile: str) -> None:
    """What looks like markup, a template, a control character or a change of direction is shown as what it is."""
    text = Page(hostile).text

    assert words.clean(HOSTILE) in text
    assert "{{ 7*7 }}" in text
    assert "<script" not in hostile
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2066-\u2069]", hostile)


def test_the_same_result_gives_the_same_bytes(gate: tuple[Result, str]) -> None:
    """Nothing of the moment, the machine or the order of drawing is in a page."""
    assert page.render([small()]) == gate[1]


def test_no_number_is_left_out(gate: tuple[Result, str]) -> None:
    """Every number of the records stands on the page as it is written elsewhere, with the digits that were measured."""
    result, made = gate
    text = Page(made).text
    series = [(cell, one) for cell in result.cells for one in cell.series]
    numbers = [words.quantity(value, one.metric) for _, one in series for value in (one.baseline, one.candidate)]
    numbers += [words.span(one.low, one.high) for _, one in series]
    numbers += [words.signed(value) for _, one in series for value in one.differences]
    numbers += [
        words.evidence(value) for _, one in series for path in (one.pass_evidence, one.fail_evidence) for value in path
    ]
    numbers += [f"{words.number(cell.ceiling)} tok/s" for cell in result.cells]
    numbers += [words.signed(value) for blocks in result.calibration.values() for _, value in blocks]
    for leg in result.legs:
        assert leg.run
        numbers += [words.moment(leg.began), *(words.quantity(getattr(leg.run, metric), metric) for metric in METRICS)]
        numbers += [figure for one in leg.run.requests for figure in raw._request(one)]
        numbers += [figure for shot in (leg.before, leg.after) if shot for figure in raw._shot("", shot)]
    missing = [one for one in numbers if one not in text]

    assert len(numbers) > 500
    assert missing == []


@pytest.mark.parametrize("state", ORDER)
def test_the_verdict_comes_first_in_word_sign_and_colour(state: State) -> None:
    """Each state has a word, a sign and a colour of its own, above all else."""
    made = page.render([small(state=state, cells=(), legs=(), calibration={})])
    card = next(attributes for _, attributes in Page(made).elements if "verdict" in (attributes.get("class") or "").split())
    sign, word = words.STATES[state]

    assert (card["class"], card["data-state"]) == (f"card verdict {state}", state)
    assert f'<span class="pill">{sign} {word}</span>' in made
    assert made.index("data-state") < made.index("Not measured, or not well enough")


def contrast(one: str, other: str) -> float:
    """Return the contrast of two colours as WCAG 2 defines it."""

    def light(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((light(one), light(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_what_is_written_can_be_read(scheme: int) -> None:
    """In light and dark, text has a contrast of 4.5 and more, and the marks of figures of 3 and more."""
    colours = dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", page.render([small(cells=(), legs=(), calibration={})]).split("prefers-color-scheme: dark")[scheme].split("* { box")[0]))
    states = ("good", "bad", "unsure", "void", "idle", "plain")
    texts = [(ink, ground) for ink in ("ink", "muted", *states) for ground in ("surface", "page")] + [("on", state) for state in states]
    marks = [(name, "surface") for name in ("one", "two", "three", "four", "five", "six")]

    assert [pair for pair in texts if contrast(colours[pair[0]], colours[pair[1]]) < 4.5] == []
    assert [pair for pair in marks if contrast(colours[pair[0]], colours[pair[1]]) < 3] == []


@pytest.mark.parametrize("which", ["empty", "invalid"])
def test_what_was_not_measured_is_said_and_is_not_green(which: str) -> None:
    """A gate that measured nothing shows no pass anywhere, and says what is missing."""
    made = page.render([MAKERS[which]()])

    assert "Not measured, or not well enough" in made
    assert "✓" not in made
    assert ("Nothing was measured." in made) == (which == "empty")
    assert ("Not run, although they decide" in made) == (which == "invalid")


def test_a_bench_has_no_verdict() -> None:
    """What judges nothing says that it was measured, in a colour that is none of a verdict."""
    made = page.render([bench(1, 0.024, "NVFP4", points=POINTS[:1])])

    assert '<span class="pill">• measured</span>' in made
    assert 'class="card verdict measured"' in made
    assert "What was measured" in made


def test_a_large_page_is_bounded_and_says_what_it_leaves_out() -> None:
    """Twelve cells of 144 legs of 64 requests make less than 6 MB: beyond a bound, a leg has quantiles, and the page says so."""
    result = large()
    made = page.render([result])
    count = sum(len(leg.run.requests) for leg in result.legs if leg.run)

    assert count > 100_000
    assert len(made.encode()) < 6_000_000
    assert f"This page is about {count:,} requests." in made
    assert made.count('<summary class="line">') == len(result.legs)


def replaced(value: Any, number: float) -> Any:
    """Return *value* with *number* for every number in it; the format stays."""
    if isinstance(value, dict):
        return {key: one if key == "format" else replaced(one, number) for key, one in value.items()}
    if isinstance(value, list):
        return [replaced(one, number) for one in value]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    return int(number) if isinstance(value, int) else number


@pytest.mark.parametrize("number", [0.0, 1e-300, 1e308, -1e308])
def test_a_number_that_no_machine_measures_does_no_harm(number: float) -> None:
    """Zero, negative, vanishing and enormous numbers in place of every number of a Result still give a page."""
    plain = msgspec.to_builtins(Maker(1, points=POINTS[:1]).gate(blocks=1))
    made = read.decode(msgspec.json.encode(replaced(plain, number)), "made up")

    assert Page(page.render([made])).elements


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "no result"),
        (b"{", "no result"),
        (b"[]", "no result"),
        (b"{}", "format 0"),
        (b'{"format": 1, "kind": "gate"}', "format 1"),
        (b'{"format": 3, "kind": "gate"}', "missing required field"),
        (b'{"format": 3, "kind": "song"}', "Invalid enum value"),
        (b"\xff\xfe\x00", "no result"),
        (b'{"format": ' + b"[" * 100_000, "no result"),
    ],
)
def test_a_file_that_is_no_result_is_refused(tmp_path: Path, data: bytes, said: str) -> None:
    """What is cut off, of another kind or of another format is file-invalid, with the place."""
    path = tmp_path / "result.json"
    path.write_bytes(data)

    with refusal("file-invalid", match=said):
        read.read(path)


def test_a_file_that_is_not_there_or_too_large_is_refused(tmp_path: Path) -> None:
    """A missing file, a folder, and one that is larger than any result are not read."""
    great = tmp_path / "great.json"
    with great.open("wb") as stream:
        stream.truncate(read.LARGEST + 1)

    for path, said in ((tmp_path / "none.json", "No such file"), (tmp_path, "Is a directory"), (great, "at most")):
        with refusal("file-invalid", match=said):
            read.read(path)


def test_every_made_up_result_is_read_as_it_was_written() -> None:
    """A Result survives the file."""
    for maker in (MAKERS["fail"], MAKERS["verify-pass"], MAKERS["hostile"], MAKERS["calibration"]):
        made = maker()
        assert read.decode(msgspec.json.encode(made), "made up") == made


def test_columns_have_names_of_their_own() -> None:
    """Configurations are told apart by label, else by quantisation, else by number."""
    views = [View(MAKERS[name]()) for name in ("bench-nvfp4", "bench-awq")]
    names = [[column.name for column in compare.columns(list(some))] for some in ([views[0]], views, [views[0], views[0]])]

    assert names[0] == ["vllm 0.33.0+spark.202611"]
    assert names[1] == ["NVFP4", "AWQ"]
    assert len(set(names[2])) == 2
    assert all(one for one in itertools.chain(*names))
