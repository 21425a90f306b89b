"""Publishing as a whole: what an index admits, promotion, yank, pruning, and what pip, uv, a TUF client, a stranger's script and clients of earlier days then see."""

import dataclasses
import errno
import shutil
import subprocess
import sys
import zipfile
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from msgspec.structs import replace
from pypi_simple import DistributionPackage, ProjectPage
from tests.client.world import CLIENT, ONE, TWO, World
from tests.refusals import refusal
from tests.support import foldertree, packs, processes, publisher, tufindex, verdicts, wheels

from sparkwright.bench.server import wheel_identity
from sparkwright.client.records import FileEdit, TextChange
from sparkwright.core.files import sha256_file
from sparkwright.forks.stack import FileLock
from sparkwright.release import keys, locked_set, repository, staging


def test_same_wheels_are_published_once_and_restored(owner: publisher.IndexOwner, first: list[Path]) -> None:
    before = foldertree.tree(owner.root)
    damaged, lost = owner.index.entries["2026.11.1"].release.wheels[:2]
    (owner.root / damaged.path).write_bytes(b"a faulty disk")
    (owner.root / lost.path).unlink()
    done = owner.publish(first)
    assert (done.release, done.already) == ("2026.11.1", True)
    assert foldertree.tree(owner.root) == before


def test_dry_run_and_full_disk_write_nothing(
    owner: publisher.IndexOwner, new: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = foldertree.files(owner.folder)
    done = owner.publish(new, "candidate", dry_run=True)
    assert done.release == "2026.11.2"
    assert {entry.gate for entries in done.missing.values() for entry in entries} == {"G5"}
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfileobj", Mock(side_effect=OSError(errno.ENOSPC, "full")))
        with refusal("disk-full", match=r"under .*index\."):
            owner.publish(new, "candidate")
    owner.root = owner.folder / "nowhere"
    owner.publish(new, "candidate", dry_run=True)
    assert foldertree.files(owner.folder) == before


def test_rebuild_follows_a_release_by_its_label_alone(
    owner: publisher.IndexOwner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other inputs under one label sort by a digest: below that of the release they are refused, with what to raise, and a raised label is admitted."""
    monkeypatch.setattr(wheels, "BUILT", "p0a2b3c4d.cu130")
    with refusal("version-order", says="Raise `label` in forks/2026.11/stack.yaml above that of 2026.11.1 "):
        owner.publish(wheels.release(tmp_path / "same"), dry_run=True)
    raised = wheels.release(tmp_path / "raised", label="spark.2026.11.1")
    assert owner.publish(raised, dry_run=True).release == "2026.11.2"


def test_edit_of_a_package_that_the_set_lacks_is_refused(
    owner: publisher.IndexOwner, new: list[Path]
) -> None:
    edit = FileEdit("name", "absent", "a.py", "0" * 64, "1" * 64, (TextChange("a", "b"),), "it fails", "it works")
    rules = verdicts.release_policy()
    rule = replace(rules.file.sets[wheels.STACK], edits=(edit,))
    policy = replace(rules, file=replace(rules.file, sets={wheels.STACK: rule}))
    with refusal("set-mixed", match="lacks packages that are to be edited"):
        dataclasses.replace(owner.publisher(), policy=policy).publish(tuple(new), "candidate", url=owner.url)


def test_incomplete_release_is_a_candidate_until_new_verdicts_promote_it(
    owner: publisher.IndexOwner, new: list[Path]
) -> None:
    owner.publish(new, "candidate")
    assert owner.index.entries["2026.11.2"].state.missing == ("G5",)
    page = (owner.root / "releases" / "2026.11.2" / "index.html").read_text()
    assert "G5: not-run (not-climbed)" in page
    wheels.judge(new[-1], companions=new[:-1])
    owner.publisher().promote("2026.11.2", new[0].parent)
    entry = owner.index.entries["2026.11.2"]
    assert (entry.state.channel, entry.state.missing, entry.release.missing) == ("verified", (), {})
    page = (owner.root / "releases" / "2026.11.2" / "index.html").read_text()
    assert "Changes since 2026.11.1" in page
    assert "against the stock wheel: faster in 0, slower in 0 of" in page


def test_pruned_names_stay_taken(owner: publisher.IndexOwner, tmp_path: Path) -> None:
    """Yanked candidates do not count; each stack is pruned apart."""
    for name in ("2026.05.1", "2026.05.2"):
        tufindex.publish(owner.root, keys.load([owner.keys]), name)
    for number in (2, 3, 4):
        path = wheels.vllm(tmp_path / str(number), label=f"spark.2026.11.{number}")
        owner.publish([path], "candidate")
    owner.publisher().yank("2026.11.4", "bad")
    gone = owner.index.entries["2026.11.2"].release.wheels[0]
    done = owner.publisher().prune(1)
    assert done.releases == ("2026.05.1", "2026.11.2")
    assert f"files/{gone.sha256}" in done.removed
    assert not (owner.root / "releases" / "2026.11.2").exists()
    before = {path.name for path in (owner.root / "metadata").glob("*.targets.json")}
    assert owner.publisher().prune(1).releases == ()
    assert {path.name for path in (owner.root / "metadata").glob("*.targets.json")} - before, "targets are renewed, although nothing was to be removed"
    other = wheels.vllm(tmp_path / "other", label="spark.2026.11.2", size=10)
    with refusal("wheel-name-taken"):
        owner.publish([other], "candidate")


def test_slow_publisher_loses(
    owner: publisher.IndexOwner, new: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = locked_set.resolve

    def slow(*words: Any, **options: Any) -> Any:
        owner.publisher().refresh()
        return real(*words, **options)

    monkeypatch.setattr(locked_set, "resolve", slow)
    with refusal("index-moved"):
        owner.publish(new, "candidate")
    assert list(owner.index.entries) == ["2026.11.1"]


def test_pinned_root_forbids_a_second_index(owner: publisher.IndexOwner, new: list[Path]) -> None:
    rules = verdicts.release_policy()
    rules = replace(rules, file=replace(rules.file, root=owner.index.fingerprint))
    owner.root = owner.folder / "second"
    with refusal("index-missing"):
        dataclasses.replace(owner.publisher(), policy=rules).publish(
            new, "candidate", url=owner.url
        )
    assert not owner.root.exists()


def test_unwritable_pages_follow_with_the_next_refresh(
    owner: publisher.IndexOwner, new: list[Path]
) -> None:
    verified = owner.root / "simple" / "verified"
    (verified / "index.html").unlink()
    (verified / "index.html").mkdir()
    (verified / "gone").mkdir()
    with refusal("index-unwritable", says="release refresh"):
        owner.publish(new, "candidate")
    (verified / "index.html").rmdir()
    owner.publisher().refresh()
    assert "2026.11.2" in (owner.root / "index.html").read_text()
    assert not (verified / "gone").exists()


def links(owner: publisher.IndexOwner, channel: str, project: str) -> list[DistributionPackage]:
    """Return the links on a page of the simple API, as a parser of others reads them."""
    page = (owner.root / "simple" / channel / project / "index.html").read_text()
    return ProjectPage.from_html(project, page, publisher.URL).packages


def test_yank_keeps_the_files_and_says_why(owner: publisher.IndexOwner) -> None:
    """A parser of others reads hashes, METADATA, Pythons and the yank of the simple pages."""
    before, reason = foldertree.tree(owner.root / "files"), 'it "hangs" <b>'
    owner.publisher().yank("2026.11.1", reason)
    assert foldertree.tree(owner.root / "files") == before
    page = (owner.root / "releases/2026.11.1/index.html").read_text()
    assert "it &#34;hangs&#34; &lt;b&gt;" in page
    [vllm] = links(owner, "verified", "vllm")
    [wheel] = [wheel for wheel in owner.index.files if wheel.name == vllm.filename]
    metadata = owner.root / f"{wheel.path}.metadata"
    hashes = (vllm.digests["sha256"], (vllm.metadata_digests or {})["sha256"])
    assert hashes == (wheel.sha256, sha256_file(metadata))
    assert (vllm.is_yanked, vllm.yanked_reason, vllm.requires_python) == (True, reason, ">=3.9")
    assert links(owner, "candidate", "sparkwright-install")


def test_wheel_of_two_releases_is_one_file_and_yanked_with_both(
    owner: publisher.IndexOwner, first: list[Path], tmp_path: Path
) -> None:
    shared = next(path for path in first if "cutlass" in path.name)
    owner.publish([shared, wheels.vllm(tmp_path, label="spark.2026.11.2")], "candidate")
    for release, yanked in (("2026.11.1", False), ("2026.11.2", True)):
        owner.publisher().yank(release, "it hangs")
        pages_read = links(owner, "candidate", "sparkwright-cutlass")
        assert [link.is_yanked for link in pages_read] == [yanked]


def test_client_of_the_index_is_published_with_it(
    owner: publisher.IndexOwner, new: list[Path], tmp_path: Path
) -> None:
    """A new one is made only for a new root; the earlier ones stay."""
    owner.publish(new, "candidate")
    assert len(owner.index.facts.clients) == 1
    keys.make(tmp_path / "next", ["root"])
    owner.publisher().rotate(["root"], keys.load([tmp_path / "next"]))
    owner.publish([wheels.vllm(tmp_path / "third", label="spark.2026.11.3")], "candidate")
    for number, wheel in enumerate(owner.index.facts.clients, 1):
        root = owner.root / "metadata" / f"{number}.root.json"
        with zipfile.ZipFile(owner.root / wheel.path) as archive:
            assert archive.read("sparkwright/client/root.json") == root.read_bytes()
            carried = archive.read("sparkwright/client/index.txt").decode().split()
        assert carried == [publisher.URL, owner.index.fingerprint]
    assert number == 2
    assert f"sparkwright-install=={wheel.version}" in (owner.root / "index.html").read_text()


def test_wheels_on_another_host(owner: publisher.IndexOwner, new: list[Path]) -> None:
    """Lock and pages name their addresses there, and the index keeps none of them; a wheel keeps the address of its first release."""
    first = owner.index.entries["2026.11.1"].release.wheels
    owner.publish(new, "candidate", host="https://host.example/tag/")
    release = owner.index.entries["2026.11.2"].release
    for wheel in release.wheels:
        name = wheel.name.replace("+", "%2B")
        assert wheel.url == ("" if wheel.sha256 in {each.sha256 for each in first} else f"https://host.example/tag/{name}")
        assert (owner.root / wheel.path).exists() == (not wheel.url)
    for page in ("simple/candidate/vllm/index.html", release.locks[0].path):
        assert release.wheels[-1].url in (owner.root / page).read_text()
    (link,) = (link for link in links(owner, "candidate", "vllm") if link.filename == release.wheels[-1].name)
    assert not link.has_metadata


def test_gate_environments_are_reused_by_digest_and_made_again_if_changed(
    stock: publisher.IndexOwner, owner: publisher.IndexOwner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ours is the locked set; the stock one has the official wheel with the same other packages, by hash."""
    (ray,) = (stock.folder / "packages" / "files").glob("ray-*.whl")
    official = publisher.offer(
        stock.folder / "packages", wheels.plain(owner.folder / "made", "vllm", "0.33.0", requires=["ray"])
    )
    lock = FileLock("vllm", "0.33.0", official.name, sha256_file(official), official.stat().st_size)
    monkeypatch.setattr(staging, "official_wheel", lambda _: lock)
    context = dataclasses.replace(owner.publisher().context, offline=False)
    (wheel,) = (owner.folder / "next").glob("vllm-*.whl")

    for side, version in (("ours", "+spark.2026.11.2"), ("stock", "0.33.0")):
        # Killed in the middle, with a release that is not the current one.
        root, _ = staging.location(context, side, wheel)
        assert processes.killed(partial(staging.environment, context, side, wheel), (root / "releases").exists)
        assert not (root / "complete").exists()
        made = staging.environment(context, side, wheel)
        site = wheel_identity.site_packages(made.python)
        assert version in wheel_identity.version(made.python)
        assert not wheel_identity.mismatches(made.python, made.wheel)
        assert wheel_identity.version(made.python, "ray") == ray.name.split("-")[1]
        before = (site / "vllm" / "__init__.py").stat().st_ino
        assert staging.environment(context, side, wheel) == made
        assert (site / "vllm" / "__init__.py").stat().st_ino == before

        (site / "vllm" / "__init__.py").unlink()
        assert staging.environment(context, side, wheel) == made
        assert not wheel_identity.mismatches(made.python, made.wheel)


def test_packs_of_shown_recipes_and_of_the_sets_wheels_are_published_and_go_with_the_release(
    owner: publisher.IndexOwner, new: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A night leaves a record beside the verdicts; its archive must be the one of the record."""
    wheels.judge(new[-1], companions=new[:-1])
    stem, recipe = new[-1].name.removesuffix(".whl"), verdicts.RECIPE
    made, records = {"vllm": sha256_file(new[-1])}, {}
    for name, key in (
        ("shown", {"recipe": recipe, "wheels": made}),
        ("unshown", {"recipe": "no-such-recipe", "wheels": made}),
        ("other-wheel", {"recipe": recipe, "wheels": {**made, "torch": "b" * 64}}),
    ):
        (tmp_path / name).mkdir()
        archive, pack = packs.pack(tmp_path / name, key=replace(packs.KEY, **key))
        records[name] = replace(pack, name=f"{stem}.{name}.pack.tar.zst")
        shutil.copy(archive, new[-1].parent / records[name].name)
        record = new[-1].parent / f"{stem}.{name}.pack.json"
        record.write_bytes(msgspec.json.encode(records[name]))
    damaged = new[-1].parent / records["shown"].name
    data = damaged.read_bytes()
    damaged.write_bytes(data[:-1] + b"\0")
    with refusal("evidence-invalid"):
        owner.publish(new)
    damaged.write_bytes(data)
    owner.publish(new)
    said = " ".join(capsys.readouterr().err.split())
    assert "its recipe was not shown for the wheel" in said
    assert "it was made with another torch" in said
    release = owner.index.entries["2026.11.2"].release
    assert release.packs == (records["shown"],)
    path = owner.root / records["shown"].path
    assert path.read_bytes() == data
    assert "a start takes 63 s instead of 279" in (owner.root / "releases" / "2026.11.2" / "index.html").read_text()


# The script by which a stranger checks a release: python-tuf and the standard library alone.

def fingerprint(owner: publisher.IndexOwner) -> str:
    return sha256_file(owner.root / "metadata" / "1.root.json")


def verified(owner: publisher.IndexOwner, *words: str) -> tuple[int, str]:
    """Return the status and the output of the script, which is run without this program."""
    with tufindex.serve(owner.root) as url:
        command = [sys.executable, "-I", str(wheels.ROOT / "ci" / "verify_release.py"), url, *(words or (fingerprint(owner),))]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_every_file_of_a_release_is_checked(owner: publisher.IndexOwner, new: list[Path]) -> None:
    """The newest verified one, or a named candidate with what it lacks."""
    owner.publish(new, "candidate")
    status, said = verified(owner)
    assert (status, "every file is the one that was signed" in said) == (0, True), said
    assert "2026.11.1: signed, verified" in said
    assert all(file.sha256 in said for file in owner.index.entry("2026.11.1").release.files)
    status, said = verified(owner, fingerprint(owner), "2026.11.2")
    assert (status, "not shown: G5" in said) == (0, True), said
    owner.publisher().yank("2026.11.1", "it is slow")
    assert "no release in verified" in verified(owner)[1]
    assert "yanked: it is slow" in verified(owner, fingerprint(owner), "2026.11.1")[1]


@pytest.mark.parametrize(
    ("script", "words", "says"),
    [
        ("echo x | tee files/*/vllm-*.whl", (), "1 of "), ("rm files/*/vllm*.provenance.json", (), "1 of "),
        ("echo | tee -a targets/releases/*.json", (), "error: "), ("sed -i s/verified/verifiee/ metadata/1.targets.json", (), "error: "),
        ("true", ("0" * 64,), "the first root of"),
    ],
)  # fmt: skip
def test_what_was_not_signed_is_refused(owner: publisher.IndexOwner, script: str, words: tuple[str, ...], says: str) -> None:
    """Also where another root is stated than the first one of the index."""
    subprocess.run(script, shell=True, check=True, cwd=owner.root, stdout=subprocess.DEVNULL)
    status, said = verified(owner, *words)
    assert (status, says in said, "every file is" in said) == (1, True, False), said


# Clients and indexes of earlier days: each archive in ``older`` is an index as the code of that day published it, with two releases and the client's wheel.

@pytest.fixture(params=sorted(Path(__file__).with_name("older").glob("*.zip")), ids=lambda path: path.stem)
def older(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return the folder of an index of an earlier day."""
    shutil.unpack_archive(request.param, tmp_path / "older")
    return tmp_path / "older"


def test_client_of_an_earlier_day_uses_an_index_of_today(
    owner: publisher.IndexOwner, new: list[Path], older: Path, tmp_path: Path
) -> None:
    """It names a release whose state it cannot read, as a later format would have it, and keeps to the others."""
    owner.publish(new, "candidate")
    [client] = older.glob("files/*/sparkwright_install-*.whl")
    shutil.unpack_archive(client, tmp_path / "client", "zip")
    user = World(tmp_path / "world").user()
    user.environment |= {"PYTHONPATH": str(tmp_path / "client"), "SPARKWRIGHT_INDEX": str(owner.root)}

    def run(line: str) -> str:
        done = subprocess.run([*CLIENT, *line.split()], env=user.environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    run(f"install --channel candidate --version {ONE} --trust {owner.index.fingerprint}")
    run(f"install --channel candidate --version {TWO}")
    assert f"* {TWO}" in run("list --channel candidate")
    assert f"{new[0].name}: {TWO}, candidate" in run(f"verify {new[0]}")
    assert (f"{ONE} is current" in run("rollback"), user.current) == (True, ONE)
    assert run("doctor --deep").count("intact") == 2
    # No publisher of today could read it.
    with refusal("index-damaged"), owner.index.changing(keys.load([owner.keys]), tufindex.ROLES) as change:
        change.set_state(TWO, replace(owner.index.entry(TWO).state, channel="candidate.2"))
    assert f"need a newer client, such as {TWO}" in run("list")


def test_index_of_an_earlier_day_is_used_and_continued(older: Path, tmp_path: Path) -> None:
    assert list(repository.IndexFolder(older).entries) == [ONE, TWO]
    user = World(tmp_path / "world").user()
    user.environment["SPARKWRIGHT_INDEX"] = str(older)
    trusted = ("--trust", repository.IndexFolder(older).fingerprint)
    for words in (("install", "--version", ONE, *trusted), ("install",), ("list",), ("rollback",), ("doctor", "--deep")):
        outcome = user.run(*words)
        assert outcome.code == 0, outcome.said
    assert user.current == ONE
