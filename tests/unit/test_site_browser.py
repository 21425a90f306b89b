"""The site in a real Chromium: nothing complains, nothing overflows, nothing is heavy, and everything can be read, by day and by night."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support import browser, sitedata
from tests.support.browser import Tab

from sparkwright.operate.site import making
from sparkwright.release.manifest import places

pytestmark = pytest.mark.skipif(browser.PROGRAM is None, reason=browser.WHY)

#: One page of each kind, and a release that is damaged.
KINDS = (
    "index.html", "releases/index.html", "releases/2026.11.3.html", "releases/2026.11.5.html", "speeds/index.html",
    "speeds/qwen3-next-80b-nvfp4.html", "debt/index.html", "drift/index.html", "nights/index.html", "nights/2026-11.html",
)  # fmt: skip
#: Bytes of one view of a page, with all that it loads.
HEAVIEST = 1_000_000

#: Elements whose text has less contrast to what is behind it than WCAG 2.1 asks of text (4.5, or 3 for large or bold text).
CONTRAST = """
(() => {
  const parse = text => { const c = text.match(/[\\d.]+/g).map(Number); return c.length < 4 ? [...c, 1] : c; };
  const linear = v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = c => { const [r, g, b] = c.slice(0, 3).map(v => linear(v / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const behind = node => { for (let at = node; at; at = at.parentElement) {
    const c = parse(getComputedStyle(at).backgroundColor); if (c[3] > 0.99) return c; } return [255, 255, 255, 1]; };
  const bad = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode, at = node.parentElement;
    if (!node.data.trim() || ['TITLE', 'DESC', 'STYLE'].includes(at.tagName.toUpperCase())) continue;
    const style = getComputedStyle(at), colour = parse(at.closest('svg') ? style.fill : style.color);
    const [one, two] = [light(colour), light(behind(at))].sort((a, b) => b - a);
    const size = parseFloat(style.fontSize), large = size >= 24 || (size >= 18.66 && +style.fontWeight >= 700);
    const ratio = (one + 0.05) / (two + 0.05);
    if (ratio < (large ? 3 : 4.5)) bad.push(`${ratio.toFixed(2)} ${at.tagName} ${node.data.trim().slice(0, 40)}`);
  }
  return bad;
})()
"""

#: What reaches beyond the right edge of the window, and lies in nothing that scrolls by itself.
OVERFLOW = """
(() => {
  if (document.documentElement.scrollWidth <= innerWidth) return [];
  const inside = node => { for (let at = node.parentElement; at; at = at.parentElement)
    if (['auto', 'scroll', 'hidden'].includes(getComputedStyle(at).overflowX)) return true; return false; };
  return [...document.body.querySelectorAll('*')].filter(one => one.getBoundingClientRect().right > innerWidth + 0.5 && !inside(one))
    .map(one => `${one.tagName}.${one.className}`).concat(['the page']);
})()
"""


@pytest.fixture(scope="module", name="site")
def _site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARKWRIGHT_STATE_DIR", str(folder / "state"))
        made = sitedata.story(folder / "made")
        damaged = next(one for one in made.manifest.entries if one.name == "2026.11.5")
        (made.root / places.release(damaged.release)).write_bytes(b"{}")
        (made.nights / "2026-11-01-2026.11-broken.json").write_text('{"workflow": ')
        making.make(made.context, making.read(made.context, made.asked()), folder / "out")
    with browser.served(folder / "out") as url:
        yield url


@pytest.fixture(scope="module", name="tab")
def _tab() -> Iterator[Tab]:
    with browser.chromium() as tab:
        yield tab


@pytest.mark.parametrize("page", KINDS)
def test_a_page_loads_without_a_complaint_and_is_light(site: str, tab: Tab, page: str) -> None:
    """The console stays empty, the page's own policy is kept, all that it loads is its style, and it weighs less than a megabyte."""
    seen = tab.load(site + page)
    assert seen.complaints == []
    assert {address.rpartition("/")[2] for address in seen.asked if address.startswith("http")} == {Path(page).name, "style.css"}
    assert 0 < seen.weight < HEAVIEST
    assert tab.run("document.scripts.length") == 0
    assert tab.run("getComputedStyle(document.querySelector('nav')).position") == "sticky", "the style is in force"


@pytest.mark.parametrize("page", KINDS)
def test_nothing_reaches_beyond_the_window(site: str, tab: Tab, page: str) -> None:
    """At the width of two desks and of a telephone no page scrolls sideways; wide tables scroll in a box of their own."""
    tab.load(site + page)
    for width in (1400, 1200, 390):
        tab.look(width=width)
        assert tab.run("innerWidth") == width
        assert tab.run(OVERFLOW) == []


@pytest.mark.parametrize("page", KINDS)
def test_all_text_has_contrast(site: str, tab: Tab, page: str) -> None:
    """By day and by night each text, those in figures included, has the contrast that WCAG 2.1 (AA) asks for."""
    tab.load(site + page)
    tab.run("document.querySelectorAll('details').forEach(one => one.open = true)")
    for dark, ground in ((False, "rgb(245, 246, 247)"), (True, "rgb(15, 18, 21)")):
        tab.look(dark=dark)
        assert tab.run("getComputedStyle(document.body).backgroundColor") == ground
        assert tab.run(CONTRAST) == []


def test_what_looks_for_faults_finds_them(site: str, tab: Tab) -> None:
    """A page that is too wide, one with pale text, and one that loads what it may not, are found: the other tests can fail."""
    tab.load(site + "index.html", width=390)
    tab.run("document.querySelector('h1').style.width = '900px'")
    assert "H1." in tab.run(OVERFLOW)
    tab.run("document.querySelector('h1').style.color = '#ccc'")
    assert [one for one in tab.run(CONTRAST) if " H1 " in one]
    assert tab.load(site + "nowhere.html").complaints
    tab.load(site + "index.html")
    tab.run("document.body.appendChild(Object.assign(new Image(), {src: '/style.css'})); new Promise(done => setTimeout(done, 100))")
    assert tab.run("document.images[0].naturalWidth") == 0, "the page's own policy lets nothing be loaded but its style"


def test_figures_are_drawn_and_told(site: str, tab: Tab) -> None:
    """Each figure of a recipe takes room, has lines in the colours of the page, and says in words what it shows."""
    tab.load(site + "speeds/qwen3-next-80b-nvfp4.html")
    boxes = tab.run("[...document.querySelectorAll('svg.plot')].map(one => one.getBoundingClientRect().height)")
    assert len(boxes) == 3
    assert min(boxes) > 100
    assert all(tab.run("[...document.querySelectorAll('svg.plot')].map(one => one.querySelector('desc').textContent.length > 40)"))
    assert tab.run("new Set([...document.querySelectorAll('svg.plot path')].map(one => getComputedStyle(one).stroke)).size") > 3


def test_a_link_leads_to_its_night(site: str, tab: Tab) -> None:
    """A day of the calendar leads to the record of that night, which is then in view."""
    tab.load(site + "nights/index.html")
    target = tab.run("document.querySelector('.calendar li.fail a').href")
    assert tab.load(target).complaints == []
    assert tab.run("document.querySelector(':target').className") == "card night fail"


def test_the_damaged_is_in_sight(site: str, tab: Tab) -> None:
    """A damaged release and a damaged night are named on the first page, and the release says so on its own."""
    tab.load(site + "index.html")
    told = tab.run("document.querySelector('.culprits').innerText")
    assert "2026.11.5" in told
    assert "2026-11-01-2026.11-broken.json" in told
    tab.load(site + "releases/2026.11.5.html")
    assert "damaged" in tab.run("document.querySelector('[role=alert]').innerText")
