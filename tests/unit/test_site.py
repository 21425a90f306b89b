"""The site says what the evidence says, shows what is damaged as damaged, and writes only what changed."""

from __future__ import annotations

import html.parser
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import msgspec
import pytest
from msgspec.structs import replace
from tests.refusals import refusal
from tests.support import sitedata
from tests.support.sitedata import HOSTILE, Made
from tests.support.wheels import ROOT, STACK

from sparkwright.cli import main
from sparkwright.core.console import console
from sparkwright.operate.site import making, pages, trends
from sparkwright.operate.site.found import Found
from sparkwright.release.client.install import Wish
from sparkwright.release.manifest import places
from sparkwright.release.manifest.records import Proof
from sparkwright.release.signing import keys


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARKWRIGHT_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("SPARKWRIGHT_CONFIG", str(tmp_path / "config.yaml"))
    (tmp_path / "config.yaml").write_text("mirrors: {}\n")
    monkeypatch.delenv("SPARKWRIGHT_RELEASES", raising=False)
    monkeypatch.setattr(console, "json", False)


@pytest.fixture(scope="module", name="template")
def _template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("story")
    sitedata.story(folder / "made", releases=10, nights=16)
    return folder / "made"


@pytest.fixture(name="small")
def _small(tmp_path: Path) -> Made:
    made = Made(tmp_path / "small")
    made.release(speeds=False)
    made.release(speeds=False)
    made.sign()
    return made


@pytest.fixture(name="made")
def _made(template: Path, tmp_path: Path) -> Made:
    shutil.copytree(template, tmp_path / "made")
    return sitedata.again(tmp_path / "made")


def _site(made: Made, out: Path, **changed: Any) -> tuple[dict[str, str], Found]:
    """Make the site; return its files and what was found."""
    found = making.read(made.context, made.asked(**changed))
    making.make(made.context, found, out)
    return {str(path.relative_to(out)): path.read_text("utf-8") for path in sorted(out.rglob("*")) if path.is_file()}, found


class Page(html.parser.HTMLParser):
    """A page taken apart."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.links: list[str] = []
        self.ids: list[str] = []
        self.said = ""
        self.attributes: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attrs}
        self.links += [value for name, value in attrs if name in ("href", "src", "xlink:href") and value]
        self.ids += [value for name, value in attrs if name == "id" and value]

    def handle_data(self, data: str) -> None:
        self.said += data


def _pages(files: dict[str, str]) -> Iterator[tuple[str, Page]]:
    for name, text in files.items():
        if name.endswith(".html"):
            yield name, Page(text)


def test_every_link_leads_somewhere(made: Made, tmp_path: Path) -> None:
    """Each link of each page leads to a page and a place there, to the index, or to a run; ids are there once."""
    files, _ = _site(made, tmp_path / "out")
    parsed = dict(_pages(files))
    for name, page in parsed.items():
        assert len(set(page.ids)) == len(page.ids), name
        for link in page.links:
            if urlsplit(link).scheme:
                assert link.startswith((sitedata.URL, "https://ci.example/runs/", "data:,")), link
                continue
            path, _, part = link.partition("#")
            target = os.path.normpath(os.path.join(os.path.dirname(name), unquote(path))) if path else name  # noqa: PTH118, PTH120
            assert target in files, f"{name}: {link}"
            assert not part or part in parsed[target].ids, f"{name}: {link}"


def test_the_same_evidence_gives_the_same_bytes(made: Made, tmp_path: Path) -> None:
    """Made twice, from two stores, the site is the same; made again in place, nothing is written."""
    first, found = _site(made, tmp_path / "one")
    made.context = sitedata.context(tmp_path / "other")
    second, _ = _site(made, tmp_path / "two")
    assert first == second
    times_before = {path: path.stat().st_mtime_ns for path in (tmp_path / "one").rglob("*.html")}
    written = making.make(made.context, found, tmp_path / "one")
    assert (written.written, written.removed, written.files) == (0, 0, len(first) - 1)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "one").rglob("*.html")} == times_before


def test_only_what_changed_is_written(made: Made, tmp_path: Path) -> None:
    """Another day changes the pages of the day; one more release its own page, the lists and the figures; the others stay."""
    before, _ = _site(made, tmp_path / "out")
    after, _ = _site(made, tmp_path / "out", day="2026-11-23")
    assert {name for name in after if before.get(name) != after[name]} == {"index.html", "debt/index.html", "nights/index.html"}
    made.release()
    made.sign()
    more, _ = _site(made, tmp_path / "out", day="2026-11-23")
    recipe = "speeds/qwen3-next-80b-nvfp4.html"
    changed = {name for name in more if after.get(name) != more[name]}
    assert changed == {"index.html", "releases/index.html", f"releases/{STACK}.11.html", "speeds/index.html", recipe, "site.json"}


def test_a_page_that_is_no_longer_made_goes_and_what_is_not_ours_stays(small: Made, tmp_path: Path) -> None:
    """A release that the manifest no longer names loses its page; a file that somebody put there keeps its place."""
    _site(small, tmp_path / "out")
    (tmp_path / "out" / "CNAME").write_text("wheels.example\n")
    gone = small.manifest.entries[0]
    small.manifest = replace(small.manifest, entries=small.manifest.entries[1:], serial=small.manifest.serial + 1)
    small.sign()
    files, _ = _site(small, tmp_path / "out")
    assert f"releases/{gone.name}.html" not in files
    assert "CNAME" in files


def test_a_folder_of_somebody_else_is_left_alone(small: Made, tmp_path: Path) -> None:
    """A folder with files that are none of a site is refused; a listing that leads out of the folder removes nothing there."""
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "thesis.tex").write_text("")
    found = making.read(small.context, small.asked())
    with refusal("usage"):
        making.make(small.context, found, tmp_path / "theirs")
    making.make(small.context, found, tmp_path / "out")
    (tmp_path / "precious").write_text("")
    listed = {"files": ["../precious", str(tmp_path / "precious"), "gone.html"]}
    (tmp_path / "out" / "site.json").write_text(json.dumps(listed))
    making.make(small.context, found, tmp_path / "out")
    assert (tmp_path / "precious").exists()


def test_a_release_is_told_as_its_proof_tells_it(made: Made, tmp_path: Path) -> None:
    """Verdicts with reasons, evidence by its address, speeds with interval, launches, host and wheel; a yanked one with its reason."""
    files, found = _site(made, tmp_path / "out")
    page = Page(files[f"releases/{STACK}.3.html"])
    release = found.releases[2]
    assert "it writes garbage" in page.said
    assert "no-gpu" in page.said
    assert "no GPU is here" in page.said
    for wheel, proved in release.wheels:
        assert wheel.sha256 in page.said
        linked = {one.sha256 for one in proved.evidence if one.kind in pages.LINKED}
        assert {sitedata.URL + places.evidence(sha256) for sha256 in linked} <= set(page.links)
        assert all(one.kind in page.said for one in proved.evidence)
    (figures,) = release.measured.values()
    for figure in figures:
        assert pages.bare(figure) in page.said
    assert "NVIDIA GB10" in page.said
    assert f"{sitedata.URL}b/{release.entry.release}/notes.md" in page.links
    assert "Not measured." in Page(files["releases/2026.05.1.html"]).said


def test_the_first_page_says_how_things_stand(made: Made, tmp_path: Path) -> None:
    """Newest verified and candidate of each stack, the last nights, the open drift; and that nothing is verified where that is so."""
    files, _ = _site(made, tmp_path / "out")
    said = " ".join(Page(files["index.html"]).said.split())
    assert "nothing verified yet" in said
    assert f"✓ verified {STACK}.8" in said
    assert f"? candidate {STACK}.10" in said
    assert "gate: patch-conflict" in said
    assert "clamp.patch" in said


def test_a_change_names_the_release_and_the_wheel_that_brought_it(made: Made, tmp_path: Path) -> None:
    """The level that moved with the sixth release is found there, by name and wheel, and the quiet metric has none."""
    _, found = _site(made, tmp_path / "out")
    changed = {(one.cell, one.metric): [one.between(change)[1].place.name for change in one.found.changes] for one in found.histories}
    assert {names[0] for (_, metric), names in changed.items() if metric != "ttft"} == {f"{STACK}.6"}
    assert not any(names for (_, metric), names in changed.items() if metric == "ttft")
    page = Page((tmp_path / "out" / "speeds" / "qwen3-next-80b-nvfp4.html").read_text())
    wheel = next(wheel for wheel, _ in found.releases[5].wheels if wheel.project == "vllm")
    assert wheel.sha256[:12] in page.said


def test_a_night_without_a_record_is_shown_as_such(made: Made, tmp_path: Path) -> None:
    """Every run is on its month's page, whatever came of it; a day without one says so in the calendar."""
    files, found = _site(made, tmp_path / "out")
    calendar = files["nights/index.html"]
    assert f"{made.day(29)}: no record" in calendar
    assert f"{made.day(28)}: no record" not in calendar
    told = "".join(text for name, text in files.items() if name.startswith("nights/2"))
    assert all(f'id="{one.filename[:-5]}"' in told for one in found.nights.nights)
    assert {one.state for one in found.nights.nights} >= {"pass", "fail", "inconclusive", "invalid", "not-run"}


def _bytes(path: Path, data: bytes) -> None:
    path.unlink()
    path.write_bytes(data)


def _entry(made: Made, number: int) -> Any:
    return next(one for one in made.manifest.entries if one.name == f"{STACK}.{number}")


def _throughput(made: Made, number: int) -> Path:
    entry = _entry(made, number)
    proof = msgspec.json.decode((made.root / places.proof(entry.release, entry.proof)).read_bytes(), type=Proof)
    sha256 = next(one.sha256 for wheel in proof.wheels for one in wheel.evidence if one.kind == "throughput")
    return made.root / places.evidence(sha256)


def _link(path: Path) -> None:
    path.symlink_to("/etc/passwd")


DAMAGES: dict[str, tuple[Callable[[Made], object], str, str]] = {
    "release": (lambda made: _bytes(made.root / places.release(_entry(made, 4).release), b"{}"), f"{STACK}.4", "index-damaged"),
    "release gone": (lambda made: (made.root / places.release(_entry(made, 4).release)).unlink(), f"{STACK}.4", "index-damaged"),
    "proof": (
        lambda made: _bytes(made.root / places.proof(_entry(made, 4).release, _entry(made, 4).proof), b"[]"), f"{STACK}.4", "index-damaged",
    ),
    "measurement": (lambda made: _bytes(_throughput(made, 4), b"{}"), f"{STACK}.4: vllm", "evidence-invalid"),
    "measurement gone": (lambda made: _throughput(made, 4).unlink(), f"{STACK}.4: vllm", "evidence-invalid"),
    "night cut off": (lambda made: (made.nights / "2026-11-01-x-1.json").write_text('{"workflow'), "2026-11-01-x-1", "record-damaged"),
    "night renamed": (
        lambda made: shutil.copy(next(made.nights.glob("*.json")), made.nights / "2026-12-24-x.json"), "2026-12-24", "record-damaged",
    ),
    "night a link": (lambda made: _link(made.nights / "link.json"), "link.json", "record-damaged"),
    "night a pipe": (lambda made: os.mkfifo(made.nights / "pipe.json"), "pipe.json", "record-damaged"),
    "night a folder": (lambda made: (made.nights / "folder.json").mkdir(), "folder.json", "record-damaged"),
    "night a flood": (lambda made: (made.nights / "flood.json").write_bytes(b"[" * (5 << 20)), "flood.json", "record-damaged"),
    "night nested": (lambda made: (made.nights / "deep.json").write_bytes(b"[" * 100_000), "deep.json", "record-damaged"),
    "drift": (lambda made: made.documents[0].write_text("{}"), "drift-40.json", "record-damaged"),
    "drift gone": (lambda made: made.documents[0].unlink(), "drift-40.json", "record-damaged"),
    "status": (lambda made: (made.folder / "status.json").write_text("[1]"), "status.json", "record-damaged"),
}  # fmt: skip


@pytest.mark.parametrize("which", DAMAGES)
def test_what_is_damaged_is_named_and_the_site_is_made(made: Made, which: str) -> None:
    """Whatever is wrong with one record, it is named on the first page with the reference of why, and all others are shown."""
    damage, name, reference = DAMAGES[which]
    damage(made)
    found = making.read(made.context, made.asked())
    (problem,) = found.problems
    assert problem.name.startswith(name)
    assert problem.reference == reference
    said = Page(pages.overview(found).decode()).said
    assert problem.name in said
    assert reference in said
    told = dict(pages.releases(found))
    assert len(told) == 12
    assert ("damaged" in Page(told[f"releases/{STACK}.4.html"].decode()).said) == (reference == "index-damaged")
    assert len(found.histories) == 3


def test_a_damaged_release_says_nothing_else(made: Made) -> None:
    """Of a release whose record is damaged no version, no verdict and no wheel is shown."""
    (made.root / places.release(_entry(made, 4).release)).write_bytes(b"{}")
    told = dict(pages.releases(making.read(made.context, made.asked())))
    page = Page(told[f"releases/{STACK}.4.html"].decode())
    assert "This release is damaged" in page.said
    assert "table" not in page.tags


def test_a_damaged_record_is_a_warning_and_in_the_document(made: Made, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The verb ends with 0 and names it."""
    (made.nights / "x.json").write_text("")
    words = ["lab", "status", "--root", str(ROOT), "--cache-dir", str(tmp_path / "cache"), "--index", str(made.root), "--key", str(made.key)]
    words += ["--signed-for", sitedata.URL, "--nights", str(made.nights), "--patches", str(made.folder / "status.json"), "--offline"]
    words += [word for path in made.documents for word in ("--drift", str(path))]
    assert main.main([*words, "--output", str(tmp_path / "out"), "--json"]) == 0
    told = json.loads(capfd.readouterr().out)
    assert (told["releases"], told["nights"], told["histories"], told["signature checked"]) == (11, 18, 3, True)
    assert told["site"]["files"] == told["site"]["written"]
    assert [one["name"] for one in told["problems"]] == ["x.json"]


def test_a_manifest_that_is_not_to_be_believed_makes_no_site(small: Made, tmp_path: Path) -> None:
    """Signed by somebody else, or not there: the run ends, and the site that is there stays."""
    before, _ = _site(small, tmp_path / "out")
    keys.make(tmp_path / "other.key")
    wish = Wish(str(small.root), (keys.public_path(tmp_path / "other.key"),), sitedata.URL)
    with refusal("signer-unknown"):
        _site(small, tmp_path / "out", index=wish)
    with refusal("index-missing"):
        _site(small, tmp_path / "out", index=replace(wish, index=str(tmp_path / "nowhere")))
    assert {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()} == set(before)


def test_without_a_key_it_is_said_that_nobody_was_asked(made: Made) -> None:
    """A folder may be read without a key; then the first page and each release say that no signature was checked."""
    found = making.read(made.context, made.asked(index=Wish(str(made.root))))
    assert found.books
    assert not found.books.checked
    told = {"index.html": pages.overview(found), **dict(pages.releases(found))}
    assert "signature was checked" in Page(told["index.html"].decode()).said
    assert "signature was checked" in Page(told[f"releases/{STACK}.1.html"].decode()).said
    signed = making.read(made.context, made.asked())
    assert "signature was checked" not in Page(pages.overview(signed).decode()).said


def test_a_measurement_of_another_wheel_is_not_shown(tmp_path: Path) -> None:
    """A measurement that is about other bytes than the wheel that it came with gives no figure, and is named."""
    made = Made(tmp_path / "made")
    made.release(about="f" * 64)
    made.sign()
    files, found = _site(made, tmp_path / "out")
    assert [one.reference for one in found.problems] == ["verdict-foreign"]
    assert not found.histories
    assert "Not measured" in Page(files["speeds/index.html"]).said


def test_what_stands_in_verified_and_lacks_something_is_damaged(tmp_path: Path) -> None:
    """An entry that says verified, whose proof says that something is missing, is shown as damaged and not as verified."""
    made = Made(tmp_path / "made")
    made.release()
    made.manifest = replace(made.manifest, entries=tuple(replace(one, channel="verified") for one in made.manifest.entries))
    made.sign()
    _, found = _site(made, tmp_path / "out")
    assert [one.reference for one in found.problems] == ["verified-refused"]


def test_nothing_is_never_an_empty_success(tmp_path: Path) -> None:
    """Without releases, nights, drift or status each page says that there is nothing, or that nobody asked."""
    made = Made(tmp_path / "made")
    made.release()
    # An index whose releases were all retired.
    made.manifest = replace(made.manifest, entries=())
    made.sign()
    files, _ = _site(made, tmp_path / "out", nights=None)
    said = {name: " ".join(page.said.split()) for name, page in _pages(files)}
    assert "nothing verified yet" in said["index.html"]
    assert "No night is recorded" in said["index.html"]
    assert "Not measured" in said["index.html"]
    assert "Nothing was published yet" in said["releases/index.html"]
    assert "Not measured" in said["speeds/index.html"]
    assert "No drift was looked at" in said["drift/index.html"]
    assert "No night is recorded" in said["nights/index.html"]
    alone = making.read(made.context, replace(made.asked(), index=Wish(""), wanted=False))
    assert alone.books is None
    said_alone = Page(pages.overview(alone).decode()).said
    assert "No index was given" in said_alone
    assert "not known" in said_alone
    assert "nothing verified yet" not in said_alone


def test_a_measurement_counts_once(tmp_path: Path) -> None:
    """A night's measurement that was published, too, is one point, and the signed one."""
    made = Made(tmp_path / "made")
    made.release()
    figures = next(iter(making.read(_signed(made).context, made.asked()).releases[0].measured.values()))
    path = made.night(1, slower=0.0)
    night = json.loads(path.read_text())
    night["measured"] = json.loads(msgspec.json.encode(figures))
    path.write_text(json.dumps(night))
    found = making.read(made.context, made.asked())
    assert [len(one.spots) for one in found.histories] == [1] * 3
    assert {one.spots[0].place.kind for one in found.histories} == {"release"}


def _signed(made: Made) -> Made:
    made.sign()
    return made


def test_no_word_of_anybody_becomes_markup(tmp_path: Path) -> None:
    """Whatever stands in records, documents and names, the pages hold no script, no handler, no turned text, and no address of theirs."""
    made = Made(tmp_path / "made")
    made.release(text=HOSTILE)
    made.release(yanked=HOSTILE, text=HOSTILE)
    path = made.night(2, "fail")
    night = json.loads(path.read_text())
    night |= {"workflow": HOSTILE, "stages": [{"name": "a", "state": "fail", "reference": HOSTILE, "says": HOSTILE}]}
    night["files"] = [{"name": "f", "kind": "other", "sha256": "", "size": 0, "wheel": HOSTILE, "says": HOSTILE}]
    night["measured"] = [
        {"recipe": HOSTILE, "gpu": HOSTILE, "cell": HOSTILE, "metric": "tpot", "value": 1e-3, "low": 5e-4, "high": 1e8, "blocks": 4,
         "launches": 4, "wheel": HOSTILE, "source": "0" * 64}
    ]  # fmt: skip
    path.write_text(json.dumps(night))
    made.drift(conflict=HOSTILE, says=HOSTILE)
    made.status(HOSTILE)
    made.sign()
    files, found = _site(made, tmp_path / "out")
    assert not found.problems
    assert sum("alert(1)" in page.said for _, page in _pages(files)) >= 6, "it is shown"
    for name, page in _pages(files):
        assert "script" not in page.tags, name
        assert not [one for one in page.attributes if one.startswith("on")], name
        assert not {"\u202e", "\u2066"} & set(files[name]), name
        assert all(link.startswith(("https://", "data:,")) or not urlsplit(link).scheme for link in page.links), name
    assert not [name for name in files if "<" in name or ".." in name.split("/")]


def test_many_releases_are_paged(tmp_path: Path) -> None:
    """A page lists a hundred releases, each is on one page, newest first, and no page is heavy."""
    made = Made(tmp_path / "made")
    for _ in range(pages.RELEASES + 5):
        made.release(speeds=False)
    made.sign()
    files = dict(pages.releases(making.read(made.context, made.asked())))
    first, second = (Page(files[name].decode()) for name in ("releases/index.html", "releases/page-2.html"))
    listed = [link for page in (first, second) for link in page.links if link.startswith("../releases/2026.11.")]
    assert listed == [f"../releases/{STACK}.{number}.html" for number in range(pages.RELEASES + 5, 0, -1)]
    assert max(map(len, files.values())) < 100_000


def test_names_of_recipes_never_meet() -> None:
    """Two recipes have two pages, whatever they are called, and none takes the place of the list."""
    names = ["a b", "a-b", "a/b", "A-B", "index", "", "..", "é", "x" * 100, "x" * 101]
    found = [trends.slug(name) for name in names]
    assert len(set(found)) == len(names)
    assert "index" not in found
    assert not [one for one in found if "/" in one or one.startswith(".")]
