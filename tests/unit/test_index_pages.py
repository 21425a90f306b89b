"""The pages of the index for people: what they say, that they run nothing, and that no string of a record becomes markup."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.support import wheels
from tests.support.indexdata import FORK, LACK, Made

from sparkwright.release.manifest.records import Missing, Need, Patch, Release

#: What markup and terminals would take for their own, and no control character, which records refuse.
HOSTILE = '<script>alert("x")</script><img src=x onerror=alert(1)>{{ 7*7 }}{% raw %}</style>&lt;b&gt;\'"`|[a](http://x.invalid)\u202eevil\u2028'
#: Elements that pages are made of; anything else came out of a record.
ELEMENTS = frozenset(
    {"html", "head", "meta", "title", "style", "body", "main", "p", "h1", "h2", "h3", "h4", "div", "span", "a", "dl", "dt", "dd", "pre"}
    | {"table", "caption", "thead", "tbody", "tr", "th", "td", "small", "code", "strong", "em", "ul", "li", "footer"}
)
ATTRIBUTES = frozenset(
    {"lang", "charset", "http-equiv", "content", "name", "class", "href", "id", "role", "aria-label", "tabindex", "scope", "title"}
)


class Page(HTMLParser):
    """
    A page as a browser sees it.

    Attributes:
        text: Everything that is shown.
        odd: Elements and attributes that no template of ours has, and links that leave the index.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.text, self.odd, self._quiet = "", list[str](), False
        self.source = path.read_text("utf-8")
        self.feed(self.source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._quiet = tag == "style"
        self.odd += [tag] if tag not in ELEMENTS else []
        for name, value in attrs:
            if name not in ATTRIBUTES or (name == "href" and re.match(r"[a-z]+:|//", value or "")):
                self.odd.append(f"{tag} {name}={value}")

    def handle_data(self, data: str) -> None:
        self.text += "" if self._quiet else data

    def handle_endtag(self, tag: str) -> None:
        self._quiet = False

    @property
    def words(self) -> str:
        return " ".join(self.text.split())


@pytest.fixture(name="made")
def _made(tmp_path: Path) -> Made:
    return Made(tmp_path / "index")


def vllm(folder: Path, number: int) -> Path:
    return wheels.plain(folder, "vllm", f"0.33.0+spark.{number}", tag="cp38-abi3-manylinux_2_34_aarch64", size=5000)


def front(made: Made) -> Page:
    return Page(made.root / "index.html")


def page(made: Made, name: str) -> Page:
    return Page(made.root / "b" / next(one.release for one in made.manifest.entries if one.name == name) / "index.html")


def test_the_front_page_says_how_everything_stands(made: Made, tmp_path: Path) -> None:
    """Releases newest first with their state, sizes and what is missing; who signed; and commands for the newest verified one."""
    tool = wheels.plain(tmp_path, "sparkwright", "0.1.0")
    for number in (1, 2, 3):
        made.publish(f"s.{number}", [vllm(tmp_path, number), tool], missing=[LACK])
    made.promote("s.1")
    made.promote("s.2")
    made.yank("s.2", "wrong answers")
    made.live()
    seen, size, root = front(made), made.releases["s.1"].wheels[0].size, "https://wheels.example/spark/verified/simple/"

    places = [seen.words.index(f"s.{number}{sign}") for number, sign in ((3, "? candidate"), (2, "✗ yanked"), (1, "✓ verified"))]
    assert places == sorted(places)
    for words in (
        "Signed by", made.manifest.log[-1].by, "G8 not-run", f"{size / 1000:.1f} kB", "Its publisher no longer offers it: wrong answers",
        "The newest verified release is s.1", f"pip install --extra-index-url {root} sparkwright==0.1.0",
        f"uv pip install --index {root} vllm==0.33.0+spark.1", "requirements.aarch64.txt",
        "--into VENV --version s.1",
    ):  # fmt: skip
        assert words in seen.words, words


def test_old_releases_keep_a_line(made: Made, tmp_path: Path) -> None:
    """Of more than twenty releases each is still listed, with a link to its page."""
    own = vllm(tmp_path, 1)
    for number in range(1, 24):
        made.publish(f"s.{number}", [own])
    made.live()
    seen = front(made)

    assert "Older releases" in seen.text
    for entry in made.manifest.entries:
        assert f'href="b/{entry.release}/"' in seen.source


def test_the_page_of_a_release_shows_verdicts_and_notes(made: Made, tmp_path: Path) -> None:
    """A gate in each column with its state, what is missing with its reference, hashes, evidence, and the notes."""
    made.publish("s.1", [vllm(tmp_path, 1)], missing=[LACK])
    made.live()
    seen, wheel = page(made, "s.1"), made.releases["s.1"].wheels[0]

    shown = ("? candidate", "G8 (gate-not-run)", "– not run", "✓ pass", wheel.sha256, "test-result", LACK.says, "clamp.patch", "sm_121f")
    for words in shown:
        assert words in seen.words, words
    assert (made.root / "b" / made.manifest.entries[0].release / "notes.md").read_text().strip()


def test_a_promotion_and_a_yank_change_the_page(made: Made, tmp_path: Path) -> None:
    """The page shows how the release stands now: a yanked one has a banner with the reason."""
    made.publish("s.1", [vllm(tmp_path, 1)], missing=[LACK])
    made.live()
    made.promote("s.1")
    made.live()
    assert "✓ verified" in page(made, "s.1").words
    made.yank("s.1", "wrong answers")
    made.live()
    seen = page(made, "s.1")

    assert "✗ Yanked: wrong answers" in seen.words
    assert "✓ verified" not in seen.words


def test_nothing_offered_is_said(made: Made, tmp_path: Path) -> None:
    """Without a release that is offered there is no command to install one."""
    made.publish("s.1", [vllm(tmp_path, 1)])
    made.yank("s.1", "wrong")
    made.live()

    assert "No release is offered." in front(made).words
    assert "pip install" not in front(made).words


def test_no_installer_is_named_that_the_index_lacks(made: Made, tmp_path: Path) -> None:
    """A name alone would be looked up on another index, where it may be anybody's."""
    made.publish("s.1", [vllm(tmp_path, 1)])
    made.live()

    for seen in (front(made), page(made, "s.1")):
        assert "pip install sparkwright" not in seen.words


def hostile(release: Release) -> Release:
    """Return *release* with hostile text wherever a record takes any text."""
    patch = Patch(HOSTILE, "f" * 64, HOSTILE, HOSTILE, 1)
    fork = replace(FORK, kind=HOSTILE, origin=HOSTILE, pin=HOSTILE, tree=HOSTILE, patches=(patch,), cuda=HOSTILE, isolation=HOSTILE)
    found = tuple(
        replace(one, requires_python=HOSTILE, libraries=tuple(replace(lib, name=HOSTILE, code={HOSTILE: 1}) for lib in one.libraries))
        for one in release.wheels
    )
    return replace(release, forks=(fork,), wheels=found, needs=(Need("vllm", HOSTILE, "unknown", HOSTILE),))


def test_no_string_of_a_record_becomes_markup(made: Made, tmp_path: Path) -> None:
    """Hostile text in every field that takes text is shown as text, on every page, the simple ones included."""
    made.publish("s.1", [vllm(tmp_path, 1)], missing=[Missing(HOSTILE, "fail", HOSTILE, HOSTILE)], told=hostile)
    made.yank("s.1", HOSTILE)
    log = made.manifest.log
    made.manifest = replace(made.manifest, log=(*log[:-1], replace(log[-1], by=HOSTILE)))
    made.live()
    pages = [front(made), page(made, "s.1")]

    for seen in pages:
        assert seen.odd == []
        assert "<script>" not in seen.source
        assert '<script>alert("x")</script>' in seen.text
        assert "{{ 7*7 }}" in seen.text
        assert "\u202e" not in seen.source
    simple = (made.root / "candidate/simple/vllm/index.html").read_text()
    assert "<script>" not in simple
    assert simple.count("<a ") == simple.count("\n<a ") == 1


def test_a_page_needs_nothing_and_runs_nothing(made: Made, tmp_path: Path) -> None:
    """One file: no script, no address that is fetched, and a policy of its own that forbids both."""
    made.publish("s.1", [vllm(tmp_path, 1)])
    made.live()

    for seen in (front(made), page(made, "s.1")):
        assert seen.odd == []
        assert "default-src 'none'; style-src 'unsafe-inline'" in seen.source
        assert not re.search(r"<script|@import|url\(|javascript:", seen.source)
        assert "prefers-color-scheme: dark" in seen.source
        assert "width=device-width" in seen.source
