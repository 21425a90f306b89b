"""The generator of the index, on real files: what it makes, what it refuses, and that an old page never survives a change."""

from __future__ import annotations

import os
import re
import shutil
import signal
import tempfile
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.refusals import refusal
from tests.support import forked, indexdata, wheels
from tests.support.indexdata import LACK, Made

from sparkwright.core.errors import SparkwrightError
from sparkwright.release import index
from sparkwright.release.index import live, simple
from sparkwright.release.index.simple import Line
from sparkwright.release.manifest import places
from sparkwright.release.signing.keys import PublicKey
from sparkwright.release.signing.trust import Trust

VLLM, KERNELS, TOOL = "vllm", "flashinfer-python", "sparkwright"


@pytest.fixture(name="made")
def _made(tmp_path: Path) -> Made:
    return Made(tmp_path / "index")


def wheel(folder: Path, project: str, number: int) -> Path:
    """Return a small wheel, made where it is missing."""
    path = folder / f"{project.replace('-', '_')}-1.0+spark.{number}-py3-none-any.whl"
    return path if path.exists() else wheels.plain(folder, project, f"1.0+spark.{number}")


def files(root: Path, channel: str, project: str = VLLM) -> dict[str, dict[str, object]]:
    """Return the files of *project*, by name, from the page for programs; the one for people has the same."""
    folder = root / channel / "simple" / project
    page = msgspec.json.decode((folder / "index.json").read_bytes())
    text = (folder / "index.html").read_text()
    names = re.findall(r">([^<]+)</a><br>\n", text)
    assert names == [one["filename"] for one in page["files"]]
    assert [unquote(one) for one in re.findall(r'<a href="([^"#]+)#', text)] == [unquote(one["url"]) for one in page["files"]]
    return {one["filename"]: one for one in page["files"]}


def copied(made: Made, folder: Path) -> Path:
    """Return a copy of the index without anything that was generated."""
    generated = shutil.ignore_patterns("g", "current", "pages*", "index.html", "notes.md", "simple", "verified", "candidate", "manifest*")
    shutil.copytree(made.root, folder, symlinks=True, ignore=generated)
    return folder


def served(root: Path) -> dict[str, bytes]:
    """Return what a client can reach by the names that it is told, without what only the generator reads."""
    inside = re.compile(r"^(g|current)/|^b/\w+/pages")
    return {name: data for name, data in indexdata.tree(root).items() if not inside.match(name)}


def assert_as_from_nothing(made: Made, folder: Path) -> None:
    """The live index is, byte for byte, what is made from the records alone."""
    root = copied(made, folder)
    index.generate(root, made.manifest, made.sealed)
    index.flip(root, made.manifest.serial)
    assert served(made.root) == served(root)
    mine, other = live.place(made.root, made.manifest.serial), live.place(root, made.manifest.serial)
    assert indexdata.tree(mine) == indexdata.tree(other)
    shutil.rmtree(root)


def test_a_file_of_a_candidate_is_in_its_root_alone(made: Made, tmp_path: Path) -> None:
    """Candidates stand in ``candidate``; what is promoted stands in both roots, and says so."""
    for number in (1, 2):
        made.publish(f"s.{number}", [wheel(tmp_path, VLLM, number)], missing=[LACK])
    made.promote("s.1")
    root = made.live()

    assert list(files(root, "verified")) == ["vllm-1.0+spark.1-py3-none-any.whl"]
    both = files(root, "candidate")
    about = [one["_sparkwright"] for one in both.values()]
    assert [one["channel"] for one in about] == ["verified", "candidate"]  # type: ignore[index]
    assert about[1]["missing"] == [{"gate": "G8", "state": "not-run", "reference": "gate-not-run"}]  # type: ignore[index]


def test_the_pages_say_what_the_records_say(made: Made, tmp_path: Path) -> None:
    """Hash, size, time, Python, metadata and provenance of a file are those of its record, on both pages (PEP 503, 691, 700, 714, 740)."""
    made.publish("s.1", [wheel(tmp_path, VLLM, 1)], kinds=[*indexdata.KINDS, "pep740"])
    root, record = made.live(), made.releases["s.1"].wheels[0]
    page = msgspec.json.decode((root / "candidate/simple/vllm/index.json").read_bytes())
    text = (root / "candidate/simple/vllm/index.html").read_text()
    one = page["files"][0]

    assert page["meta"] == {"api-version": "1.4"}
    assert '<meta name="pypi:repository-version" content="1.4">' in text
    assert (page["name"], page["versions"]) == ("vllm", ["1.0+spark.1"])
    assert (one["hashes"], one["size"], one["upload-time"]) == ({"sha256": record.sha256}, record.size, record.uploaded)
    assert (one["requires-python"], one["core-metadata"]) == (">=3.9", {"sha256": record.metadata})
    assert one["yanked"] is False
    assert one["provenance"].startswith(indexdata.URL + "evidence/")
    for words in (
        f"#sha256={record.sha256}", 'data-requires-python="&gt;=3.9"', f'data-core-metadata="sha256={record.metadata}"',
        f'data-dist-info-metadata="sha256={record.metadata}"', f'data-provenance="{one["provenance"]}"',
    ):  # fmt: skip
        assert words in text


def test_without_an_identity_there_is_no_provenance(made: Made, tmp_path: Path) -> None:
    """``data-provenance`` stands only where there is an object of PEP 740."""
    made.publish("s.1", [wheel(tmp_path, VLLM, 1)])
    root = made.live()

    assert "data-provenance" not in (root / "candidate/simple/vllm/index.html").read_text()
    assert files(root, "candidate")["vllm-1.0+spark.1-py3-none-any.whl"]["provenance"] is None


def test_a_file_is_yanked_where_every_release_with_it_is(made: Made, tmp_path: Path) -> None:
    """A file of two releases appears once; it is yanked in a root only if every release there that has it is."""
    tool = wheel(tmp_path, TOOL, 0)
    for number in (1, 2, 3):
        made.publish(f"s.{number}", [wheel(tmp_path, VLLM, number), tool], missing=[LACK])
    made.promote("s.1")
    made.yank("s.1", "wrong answers")
    made.yank("s.3", "slow")
    root = made.live()

    assert [one["yanked"] for one in files(root, "candidate").values()] == ["wrong answers", False, "slow"]
    assert [one["yanked"] for one in files(root, "candidate", TOOL).values()] == [False]
    assert [one["yanked"] for one in files(root, "verified", TOOL).values()] == ["wrong answers"]
    assert 'data-yanked="wrong answers"' in (root / "verified/simple/sparkwright/index.html").read_text()


def test_each_release_has_a_root_of_its_own(made: Made, tmp_path: Path) -> None:
    """``b/<release>/simple`` offers that release alone, four steps below the root."""
    entry = made.publish("s.1", [wheel(tmp_path, VLLM, 1), wheel(tmp_path, KERNELS, 1)])
    made.publish("s.2", [wheel(tmp_path, VLLM, 2)])
    root = made.live()
    one = files(root, f"b/{entry.release}")

    assert [unquote(str(file["url"])) for file in one.values()] == [f"../../../../{made.releases['s.1'].wheels[0].url}"]
    projects = msgspec.json.decode((root / "b" / entry.release / "simple/index.json").read_bytes())["projects"]
    assert projects == [{"name": "flashinfer-python"}, {"name": "vllm"}]


def test_a_wheel_on_another_host_keeps_its_address(made: Made, tmp_path: Path) -> None:
    """An absolute address stands as it is, and nothing is looked for here."""
    there = "https://files.example/releases/vllm-1.0%2Bspark.1-py3-none-any.whl"
    made.publish("s.1", [wheel(tmp_path, VLLM, 1)], edit=lambda one: replace(one, url=there))
    shutil.rmtree(made.root / "files")
    root = made.live()

    assert [one["url"] for one in files(root, "candidate").values()] == [there]


def test_an_empty_index_has_both_roots(made: Made) -> None:
    """A root without releases is an empty list, not a missing page."""
    made.manifest = replace(made.manifest, serial=1)
    root = made.live()

    for channel in ("candidate", "verified"):
        assert msgspec.json.decode((root / channel / "simple/index.json").read_bytes())["projects"] == []
    assert "None yet." in (root / "index.html").read_text()


#: One step of a publisher, and which of the releases it is about.
STEPS = st.tuples(st.sampled_from(["publish", "shared", "promote", "yank", "retain", "nothing"]), st.integers(0, 5), st.booleans())


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(STEPS, min_size=2, max_size=9))
def test_a_changed_index_is_the_one_from_nothing(tmp_path: Path, steps: list[tuple[str, int, bool]]) -> None:
    """Whatever is published, promoted, yanked and retained, and however often that is put live, the result is that from nothing."""
    folder = Path(tempfile.mkdtemp(dir=tmp_path))
    made, count = Made(folder / "index"), 0
    for action, which, flip in steps:
        entries = made.manifest.entries
        some = entries[which % len(entries)] if entries else None
        if action in ("publish", "shared") or some is None:
            count += 1
            own = [wheel(tmp_path, VLLM, count), *([wheel(tmp_path, KERNELS, count)] if which % 2 else [])]
            shared = [wheel(tmp_path, TOOL, which // 3)] if action == "shared" else []
            made.publish(f"{'st'[which % 2]}.{count}", [*own, *shared], missing=[LACK] if which % 3 else [])
        elif action == "retain":
            made.retain(which + 1)
        elif action == "promote" and some.channel == "candidate" and not some.yanked:
            made.promote(some.name)
        elif action == "yank" and not some.yanked:
            made.yank(some.name, f"reason {which}")
        if flip:
            made.live()
    if made.manifest.serial:
        made.live()
        assert_as_from_nothing(made, folder / "other")
        assert index.check(made.root, None, deep=True) == []
    shutil.rmtree(folder)


NAMES = st.builds("{}-{}-py3-none-any.whl".format, st.just("vllm"), st.from_regex(r"[0-9]\.[0-9]{1,2}(\+spark\.[0-9])?", fullmatch=True))


@settings(max_examples=60)
@given(st.lists(st.dictionaries(NAMES, st.none() | st.integers(0, 9), max_size=12), max_size=5))
def test_a_page_changed_line_by_line_is_the_one_from_nothing(steps: list[dict[str, int | None]]) -> None:
    """However lines come, change and go, in whatever order, the page is the one of the lines that are left."""
    html = json = b""
    there: dict[str, Line] = {}
    for step in steps:
        changes = {
            name: None
            if text is None
            else Line(b"<a href=%d>%b</a><br>" % (text, name.encode()), msgspec.json.encode({"filename": name, "n": text}))
            for name, text in step.items()
        }
        html, json = simple.html_page("vllm", html, changes), simple.json_page("vllm", json, changes)
        there = {name: one for name, one in {**there, **changes}.items() if one}
        assert html == simple.html_page("vllm", b"", there)
        assert json == simple.json_page("vllm", b"", there)
        page = msgspec.json.decode(json)
        assert [one["filename"] for one in page["files"]] == sorted(there)
        assert page["versions"] == sorted({name.split("-")[1] for name in there})


def test_what_did_not_change_is_not_written_again(made: Made, tmp_path: Path) -> None:
    """A page without a change is a hard link to the one before, and the pages of other releases stay where they are."""
    first = made.publish("s.1", [wheel(tmp_path, VLLM, 1)])
    made.live()
    page, own = made.root / "candidate/simple/vllm/index.html", made.root / "b" / first.release / "index.html"
    before = page.stat().st_ino, own.stat().st_ino
    made.publish("t.1", [wheel(tmp_path, KERNELS, 1)])
    made.live()

    assert (page.stat().st_ino, own.stat().st_ino) == before
    assert_as_from_nothing(made, tmp_path / "other")


@pytest.mark.parametrize("name", ["candidate/simple/vllm/index.html", "candidate/simple/vllm/index.json", "state.json"])
@pytest.mark.parametrize("change", [b"", b"<html>please log in</html>"])
def test_a_damaged_page_is_not_copied_on(made: Made, tmp_path: Path, name: str, change: bytes) -> None:
    """What a disk did to the live generation ends with the next one, changed or not."""
    made.publish("s.1", [wheel(tmp_path, VLLM, 1)])
    made.live()
    (made.root / "current" / name).write_bytes(change)
    made.publish("t.1", [wheel(tmp_path, KERNELS, 1)])
    made.live()

    assert_as_from_nothing(made, tmp_path / "other")


def test_fresh_mends_the_pages_of_releases(made: Made, tmp_path: Path) -> None:
    """`fresh` builds on nothing: the next serial has every page as it should be."""
    entry = made.publish("s.1", [wheel(tmp_path, VLLM, 1)])
    made.live()
    (made.root / "b" / entry.release / "index.html").write_text("gone")
    (made.root / "b" / entry.release / "simple/vllm/index.html").unlink()
    made.publish("s.2", [wheel(tmp_path, VLLM, 2)])
    made.live(fresh=True)

    assert_as_from_nothing(made, tmp_path / "other")


def _bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


#: What can be wrong with a file, and with which files the generator sees it: it reads records, and asks of others only their size.
DAMAGE: dict[str, tuple[str, Callable[[Path], object]]] = {
    "wheel missing": ("files/*/*.whl", Path.unlink),
    "wheel cut off": ("files/*/*.whl", lambda path: os.truncate(path, 100)),
    "metadata missing": ("files/*/*.metadata", Path.unlink),
    "metadata empty": ("files/*/*.metadata", lambda path: os.truncate(path, 0)),
    "lock missing": ("b/*/pylock.aarch64.toml", Path.unlink),
    "requirements missing": ("b/*/requirements.x86_64.txt", Path.unlink),
    "release missing": ("b/*/release.json", Path.unlink),
    "release changed": ("b/*/release.json", _bit),
    "proof changed": ("b/*/proof-*.json", _bit),
    "proof is a page": ("b/*/proof-*.json", lambda path: path.write_text("<html>")),
    "evidence missing": ("evidence/*.json", Path.unlink),
    "evidence cut off": ("evidence/*.json", lambda path: os.truncate(path, 10)),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_nothing_points_at_what_is_not_there(made: Made, tmp_path: Path, what: str) -> None:
    """A generation is made only when all that it points to is there; else the live one stays as it is."""
    made.publish("s.1", [wheel(tmp_path, VLLM, 1)])
    made.live()
    before, known = served(made.root), set(made.root.rglob("*"))
    made.publish("s.2", [wheel(tmp_path, VLLM, 2)])
    pattern, damage = DAMAGE[what]
    damage(next(path for path in sorted(made.root.glob(pattern)) if path not in known))

    with refusal("index-damaged"):
        made.generate()
    assert index.current(made.root) is not None
    assert {name: data for name, data in served(made.root).items() if name in before} == before
    assert sorted(path.name for path in (made.root / "g").iterdir()) == ["1"]


@pytest.mark.parametrize("what", [name for name in DAMAGE if name != "metadata empty"])
def test_check_names_what_is_wrong(made: Made, tmp_path: Path, what: str) -> None:
    """`check` says which file is damaged, with the reference of the failure."""
    made.publish("s.1", [wheel(tmp_path, VLLM, 1)])
    made.live()
    pattern, damage = DAMAGE[what]
    path = min(made.root.glob(pattern))
    damage(path)
    found = index.check(made.root, None)

    assert found
    assert found[0].startswith("index-damaged: ")
    assert path.name in found[0]


@pytest.mark.parametrize(
    "pattern",
    ["files/*/*.whl", "files/*/*.metadata", "evidence/*.json", "b/*/pylock.x86_64.toml", "b/*/requirements.aarch64.txt",
     "current/index.html", "current/verified/simple/index.json", "current/candidate/simple/vllm/index.json", "b/*/pages/notes.md"],
)  # fmt: skip
def test_a_deep_check_sees_one_bit(made: Made, tmp_path: Path, pattern: str) -> None:
    """One bit, in any file of the index, is found by its hash, or because the page is another than the manifest gives."""
    made.publish("s.1", [wheel(tmp_path, VLLM, 1)])
    made.live()
    _bit(min(made.root.glob(pattern)))

    assert index.check(made.root, None) == []
    assert [one.split(":")[0] for one in index.check(made.root, None, deep=True)] == ["index-damaged"]


def test_check_asks_who_signed(made: Made, tmp_path: Path) -> None:
    """With a key the signature counts; a stranger's manifest, or one that is none, is all that is reported."""
    made.publish("s.1", [wheel(tmp_path, VLLM, 1)])
    made.live()

    assert index.check(made.root, Trust(keys=(indexdata.SIGNER.public,)), deep=True) == []
    assert [one.split(":")[0] for one in index.check(made.root, Trust(keys=(PublicKey(b"1" * 32),)))] == ["signer-unknown"]
    (made.root / "current/manifest.dsse.json").write_text("<html>please log in</html>")
    assert len(index.check(made.root, None)) == 1


def test_check_sees_names_that_lead_elsewhere(made: Made, tmp_path: Path) -> None:
    """A name at the root, or of a release, that is no link to the live generation is a fault: it would stay behind at the next flip."""
    entry = made.publish("s.1", [wheel(tmp_path, VLLM, 1)])
    made.live()
    for name in ("index.html", f"b/{entry.release}/notes.md"):
        (made.root / name).unlink()
        (made.root / name).write_text("by hand")

    assert len(index.check(made.root, None)) == 2
    with refusal("index-missing"):
        index.check(tmp_path / "nowhere", None)


def _refused(made: Made, kind: str) -> SparkwrightError:
    with refusal(kind) as caught:
        made.generate()
    return caught.value


def test_verified_takes_only_what_lacks_nothing(made: Made, tmp_path: Path) -> None:
    """The generator reads the proof itself: a manifest that says more than it is refused, whoever signed it."""
    made.publish("s.1", [wheel(tmp_path, VLLM, 1)], missing=[LACK])
    made.manifest = replace(made.manifest, entries=(replace(made.manifest.entries[0], channel="verified"),))

    assert "G8 not-run" in _refused(made, "verified-refused").details[0]


def test_a_file_name_stands_for_one_wheel(made: Made, tmp_path: Path) -> None:
    """Two wheels with one name are refused, and so is a name that was retired with other bytes."""
    made.publish("s.1", [wheel(tmp_path / "a", VLLM, 1)])
    other = wheels.plain(tmp_path / "b", VLLM, "1.0+spark.1", size=10)
    made.publish("s.2", [other])
    _refused(made, "wheel-name-taken")

    made.manifest = replace(made.manifest, entries=made.manifest.entries[1:], retired={other.name: "0" * 64})
    _refused(made, "wheel-name-taken")


@pytest.mark.parametrize("change", [{"version": "1.0+spark.2"}, {"project": "vllm-x"}])
def test_a_wheel_is_what_its_name_says(made: Made, tmp_path: Path, change: dict[str, str]) -> None:
    """A record that gives a wheel another project or version than its file name is refused."""
    made.publish("s.1", [wheel(tmp_path, VLLM, 1)], edit=lambda one: replace(one, **change))
    _refused(made, "wheel-mismatch")


@pytest.mark.parametrize("url", ["../../etc/passwd", "javascript:alert(1)", "file:///etc/passwd", "files/0/vllm.whl", "//elsewhere/x.whl"])
def test_an_address_is_here_or_on_a_web_host(made: Made, tmp_path: Path, url: str) -> None:
    """An address that leaves the folder, or is no web address, never reaches a page."""
    made.publish("s.1", [wheel(tmp_path, VLLM, 1)], edit=lambda one: replace(one, url=url))
    _refused(made, "index-damaged")


def test_records_of_another_release_are_refused(made: Made, tmp_path: Path) -> None:
    """An entry whose name is not that of its record, or whose proof is another release's, is refused."""
    for number in (1, 2):
        made.publish(f"s.{number}", [wheel(tmp_path, VLLM, number)])
    one, two = made.manifest.entries
    shutil.copy(made.root / places.proof(two.release, two.proof), made.root / places.proof(one.release, two.proof))
    for entry in (replace(one, name="s.9"), replace(one, proof=two.proof)):
        made.manifest = replace(made.manifest, entries=(entry, two))
        _refused(made, "index-damaged")


def test_nothing_is_live_before_the_flip(made: Made, tmp_path: Path) -> None:
    """A generation alone changes nothing that a client of the live index sees."""
    first = made.publish("s.1", [wheel(tmp_path, VLLM, 1)])
    made.live()
    before = served(made.root)
    made.publish("s.2", [wheel(tmp_path, VLLM, 2)])
    made.yank("s.1", "wrong")
    made.generate()
    here = served(made.root)

    assert {name: here[name] for name in before} == before
    index.flip(made.root, made.manifest.serial)
    assert "wrong" in (made.root / "b" / first.release / "index.html").read_text()
    assert index.current(made.root) == (3, made.sealed)


def test_a_generation_that_was_left_is_made_again(made: Made, tmp_path: Path) -> None:
    """What a killed run left under the same serial, whole or not, is replaced; what is live under it is kept, or refused."""
    made.publish("s.1", [wheel(tmp_path, VLLM, 1)])
    (made.root / "g/1/verified").mkdir(parents=True)
    (made.root / "g/.1.killed").mkdir()
    place = made.generate()
    assert sorted(path.name for path in place.parent.iterdir()) == ["1"]
    index.flip(made.root, 1)

    assert made.generate() == place
    made.manifest = replace(made.manifest, expires="2027-01-01T00:00:00Z")
    with refusal("index-moved"):
        made.generate()


def test_half_a_generation_cannot_go_live(made: Made, tmp_path: Path) -> None:
    """`flip` refuses a generation that lacks one of its names, and one that is not there."""
    made.publish("s.1", [wheel(tmp_path, VLLM, 1)])
    made.live()
    made.publish("s.2", [wheel(tmp_path, VLLM, 2)])
    place = made.generate()
    (place / "manifest.dsse.json").unlink()
    for serial in (2, 7):
        with refusal("index-damaged"):
            index.flip(made.root, serial)
    assert index.current(made.root) is not None


def test_three_generations_stay(made: Made, tmp_path: Path) -> None:
    """A client may still read an older page: the live generation and two before it are kept, and no more."""
    made.publish("s.1", [wheel(tmp_path, VLLM, 1)])
    for number in range(2, 6):
        made.live()
        made.publish(f"s.{number}", [wheel(tmp_path, VLLM, number)])
    made.live()

    assert sorted(path.name for path in (made.root / "g").iterdir()) == ["3", "4", "5"]


def test_what_current_leads_to_is_read_with_care(made: Made, tmp_path: Path) -> None:
    """No index is none; a link that leads anywhere but to a generation is a fault."""
    assert index.current(made.root) is None
    for target in ("/etc", "g/../..", "g/1", "g/x"):
        (made.root / "current").unlink(missing_ok=True)
        (made.root / "current").symlink_to(target)
        with refusal("index-damaged"):
            index.current(made.root)
    (made.root / "current").unlink()
    (made.root / "current").mkdir()
    with refusal("index-damaged"):
        index.current(made.root)


def generate_killed(made: Made, root: Path, step: int) -> int:
    """Make and flip the generation in another process, which ends before its rename number *step*; return its exit code."""

    def run() -> None:
        forked.Killer(step).watch(os, "rename", "replace")
        index.generate(root, made.manifest, made.sealed)
        index.flip(root, made.manifest.serial)

    return forked.exit_code(run)


def test_killed_anywhere_the_index_is_whole(made: Made, tmp_path: Path) -> None:
    """Killed before any rename, what is live is the old index or the new one, whole; and the next run ends with the new one."""
    made.publish("s.1", [wheel(tmp_path, VLLM, 1)])
    made.live()
    old = index.current(made.root)
    made.publish("s.2", [wheel(tmp_path, VLLM, 2)])
    made.yank("s.1", "wrong")
    new, seen = (3, made.sealed), []
    for step in range(1, 50):
        root = tmp_path / f"killed-{step}"
        shutil.copytree(made.root, root, symlinks=True)
        status = generate_killed(made, root, step)
        assert status in (-signal.SIGKILL, 0)
        seen.append(index.current(root))
        manifest = indexdata.manifest_of(root)
        numbers = range(1, len(manifest.entries) + 1)
        assert set(files(root, "candidate")) == {f"vllm-1.0+spark.{number}-py3-none-any.whl" for number in numbers}
        assert all((root / "b" / entry.release / "index.html").is_file() for entry in manifest.entries)
        index.generate(root, made.manifest, made.sealed)
        index.flip(root, 3)
        assert index.check(root, None, deep=True) == []
        if status == 0:
            break

    assert set(seen) == {old, new}
    assert seen == sorted(seen, key=lambda one: one == new)
    assert len(seen) > 6


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value or "" for name, value in attrs if name in ("href", "src")]


@pytest.mark.parametrize("links", [True, False], ids=["links kept", "links followed"])
def test_a_copy_of_the_folder_is_a_mirror(made: Made, tmp_path: Path, links: bool) -> None:
    """Every link on every page leads to a file of the same copy, whether the copy keeps symbolic links or not."""
    for number in (1, 2):
        made.publish(f"s.{number}", [wheel(tmp_path, VLLM, number), wheel(tmp_path, TOOL, 0)], missing=[LACK] if number == 1 else [])
    made.promote("s.2")
    made.yank("s.1", "wrong")
    copy = tmp_path / "mirror"
    shutil.copytree(made.live(), copy, symlinks=links)
    shutil.rmtree(made.root)
    pages = [copy / name for name in served(copy) if name.endswith(".html")]
    assert len(pages) > 10
    for page in pages:
        parser = _Links()
        parser.feed(page.read_text())
        for link in parser.found:
            where = unquote(link.partition("#")[0])
            target = Path(os.path.normpath(page.parent / where)) if where else page
            assert (target / "index.html" if link.endswith("/") else target).is_file(), f"{page}: {link}"
            assert target.is_relative_to(copy)
