"""Publications that are refused, by the command line: each has its reference, and neither the index nor anything beside it changes."""

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support import foldertree, publisher, wheels

from sparkwright.cli import main

#: A command line of the program, a shell script, or a function of the wheels of the next release.
Step = str | Callable[[list[Path]], object]

OWN = "--at index --keys keys"
PUBLISH = f"publish next/*.whl {OWN}"
CANDIDATE = f"{PUBLISH} --channel candidate"
ODD = f"publish odd/*.whl {OWN} --channel candidate"
PROMOTE = f"release promote 2026.11.2 {OWN} --verdicts next"
YANK = f"release yank 2026.11.1 {OWN}"
REFRESH = "release refresh --at index --keys"
VLLM = "vllm=$(ls next/vllm-*.whl)"


def judged(**changed: object) -> Step:
    """Return what writes other verdicts beside vLLM's wheel."""
    return lambda paths: wheels.judge(paths[-1], **changed)  # type: ignore[arg-type]


def odd(**changed: object) -> Step:
    """Return what makes a wheel of vLLM in the folder ``odd``."""
    return lambda paths: wheels.vllm(Path("odd"), **changed)


def run(line: str) -> str:
    """Run a command line of the program, and return the reference of its failure, or nothing."""
    words = [
        name for word in shlex.split(line) for name in sorted(map(str, Path().glob(word))) or [word]
    ]
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        main.main([*words, "--root", str(wheels.ROOT), "--json"])
    return str(json.loads(out.getvalue() or "{}").get("error", {}).get("reference", ""))


#: Reference, command, and the steps before it.
CASES: dict[str, tuple[str, str, *tuple[Step, ...]]] = {
    # Verdicts.
    "a gate was not run": ("verified-refused", PUBLISH, judged(without=["G7"])),
    "a gate failed": ("verified-refused", PUBLISH, judged(worse={"G4": "fail"})),
    "verdicts of other bytes": ("verdict-foreign", PUBLISH, judged(sha256="0" * 64)),
    # Wheels.
    "a stray file in the place of a wheel": ("wheel-invalid", CANDIDATE, f"{VLLM}; echo stray > $vllm"),
    "a folder in the place of a wheel": ("usage", CANDIDATE, f"{VLLM}; rm $vllm; mkdir $vllm"),
    "a pipe in the place of a wheel": ("usage", CANDIDATE, f"{VLLM}; rm $vllm; mkfifo $vllm"),
    "no wheel": ("usage", f"publish nowhere.whl {OWN}"),
    "wheels of another stack": ("usage", ODD, odd(stack="2026.05", label="spark.2026.12")),
    "a file name of other bytes": ("wheel-name-taken", ODD, odd(size=1000)),
    "a version that pip would pass over": ("version-order", ODD, odd(label="spark.2026.10")),
    "a requirement that nothing satisfies": (
        "set-unresolved", ODD, odd(label="spark.2026.11.2", requires=["nothing-has-this-name==1"]),
    ),
    "two wheels that own one file": (
        "wheel-unsafe", ODD, odd(label="spark.2026.11.2", files={"shared.py": b"1"}),
        lambda paths: wheels.cutlass(Path("odd"), label="spark.2026.11.2", files={"shared.py": b"2"}),
    ),
    "a member with an empty part of its path": (
        "archive-unsafe", ODD, odd(label="spark.2026.11.2", files={"vllm//x.py": b"1"}),
    ),
    "a member without a name": ("archive-unsafe", ODD, odd(label="spark.2026.11.2", files={"": b"1"})),
    "the wheels of a yanked release": (
        "release-yanked", f"publish first/*.whl {OWN} --channel candidate", f"{YANK} --reason hangs",
    ),
    "the wheels of a candidate, for verified": ("release-name-taken", PUBLISH, CANDIDATE),
    # Other commands.
    "promote without verdicts": ("verified-refused", PROMOTE.replace("next", "nowhere"), CANDIDATE),
    "promote what is verified": ("release-unknown", PROMOTE.replace("11.2", "11.1")),
    "promote what does not exist": ("release-unknown", PROMOTE),
    "promote a yanked candidate": (
        "release-yanked", PROMOTE, CANDIDATE, f"release yank 2026.11.2 {OWN} --reason hangs",
    ),
    "promote below a verified version": (
        "version-order", PROMOTE, CANDIDATE,
        lambda paths: wheels.release(Path("later"), label="spark.2026.11.3"), PUBLISH.replace("next", "later"),
    ),
    "promote a wheel that was damaged": (
        "index-damaged", PROMOTE, CANDIDATE, "echo other | tee index/files/*/vllm*.2026.11.2.*.whl",
    ),
    "yank without a reason": ("usage", YANK),
    "yank with two lines": ("usage", f"{YANK} --reason 'two\nlines'"),
    "yank twice": ("release-yanked", f"{YANK} --reason again", f"{YANK} --reason hangs"),
    "yank without an index": ("index-missing", f"{YANK} --at nowhere --reason x"),
    "a wheel of the index was damaged": (
        "index-damaged", "release verify --at index", "echo other | tee index/files/*/vllm*.whl",
    ),
    "METADATA beside a wheel was damaged": (
        "index-damaged", "release verify --at index", "echo other | tee index/files/*/vllm*.metadata",
    ),
    # Words.
    "no keys": ("usage", "publish next/*.whl --at index"),
    "wheels to nowhere": ("usage", f"{PUBLISH} --files ftp"),
    "no identity in the policy": ("usage", f"{REFRESH} keys --identity"),
    "no folder for keys": ("usage", "release key make"),
    "no new keys": ("usage", f"release key rotate --role root {OWN}"),
    "keys of another role": ("usage", "release key make others --name mine"),
    "keys of another folder": ("usage", "release key make others --name root/../../mine"),
    "another address": ("usage", f"{PUBLISH} --url https://other.example/"),
    "no address": ("usage", f"{PUBLISH} --at nowhere"),
    "an address of another kind": ("usage", f"{PUBLISH} --at nowhere --url ftp://wheels.example/"),
    # Keys.
    "a publication with others' keys": (
        "key-missing", PUBLISH.replace("keys keys", "keys others"), "release key make others",
    ),
    "a refresh with others' keys": ("key-missing", f"{REFRESH} others", "release key make others"),
    "no such key": ("key-invalid", f"{REFRESH} keys/nowhere.pem"),
    "a pipe in the place of a key": ("key-invalid", f"{REFRESH} pipe.pem", "mkfifo -m 600 pipe.pem"),
    "a key that is open to others": (
        "key-invalid", f"{REFRESH} keys/targets.pem", "chmod 644 keys/targets.pem",
    ),
    "a key of another kind": (
        "key-invalid", f"{REFRESH} ec.pem",
        "umask 77; openssl genpkey -quiet -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out ec.pem",
    ),
    "a folder without keys": ("key-invalid", f"{REFRESH} empty", "mkdir empty"),
    "a text in the place of a key": ("key-invalid", f"{REFRESH} x.pem", "umask 77; echo hello > x.pem"),
    "a key that is there": ("key-invalid", "release key make keys"),
    # The index.
    **{
        f"a changed {name}": ("index-damaged", PUBLISH, f"sed -i '0,/20/s/20/30/' index/{path}")
        for name, path in (
            ("timestamp", "metadata/timestamp.json"),
            ("root", "metadata/1.root.json"),
            ("snapshot", "metadata/1.snapshot.json"),
            ("targets", "metadata/1.targets.json"),
            ("release", "targets/releases/*.json"),
        )
    },
    # One key holds both, so its signature is valid.
    "the snapshot in the place of the timestamp": ("index-damaged", PUBLISH, "cp index/metadata/1.snapshot.json index/metadata/timestamp.json"),
    "a file in the place of the index": ("index-damaged", f"{PUBLISH} --at x --url https://a.example/", "echo x > x"),
    "the folder of something else": (
        "index-damaged", f"{PUBLISH} --at x --url https://a.example/", "mkdir -p x/releases/mine",
    ),
    **{
        f"a file in the place of {name}": (
            "index-damaged", PUBLISH, f"mv index/{name} before; echo x > index/{name}",
        )
        for name in ("metadata", "targets", "files", "releases", "simple")
    },
    **{
        f"a link in the place of {name}": (
            "index-damaged", PUBLISH, f"path=$(ls -d index/{name} | head -n 1); mv $path moved; ln -s $PWD/moved $path",
        )
        for name in ("metadata", "targets", "targets/releases", "files", "releases", "simple", "files/*")
    },
    "a link in the place of the lock": (
        "index-unwritable", PUBLISH, "mv index/.lock moved; ln -s $PWD/moved index/.lock",
    ),
    "a pipe in the place of the timestamp": (
        "index-damaged", PUBLISH, "rm index/metadata/timestamp.json; mkfifo index/metadata/timestamp.json",
    ),
    "a folder in the place of the front page": (
        "index-damaged", PUBLISH, "rm index/index.html; mkdir index/index.html",
    ),
    "a pipe in the place of the front page": (
        "index-damaged", PUBLISH, "rm index/index.html; mkfifo index/index.html",
    ),
}  # fmt: skip


@pytest.mark.timeout(60)
@pytest.mark.parametrize("case", CASES)
def test_hostile_publication_is_refused_and_nothing_changes(
    owner: publisher.IndexOwner, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(owner.folder)
    monkeypatch.setenv("SPARKWRIGHT_CACHE_DIR", str(owner.folder.with_name("cache")))
    expected, line, *steps = CASES[case]
    for step in steps:
        if not isinstance(step, str):
            step(sorted(Path("next").glob("*.whl")))
        elif step.startswith(("publish", "release")):
            assert run(step) == ""
        else:
            subprocess.run(step, shell=True, check=True)
    before = foldertree.tree(owner.folder)
    assert (run(line), foldertree.tree(owner.folder)) == (expected, before)


def test_commands_without_a_fault_work_once_nobody_else_is_at_work(
    owner: publisher.IndexOwner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(owner.folder)
    with owner.index.locked():
        assert run(PUBLISH) == "store-busy"
    for line in (
        PUBLISH,
        f"{YANK} --reason hangs",
        f"release prune --keep 1 {OWN}",
        "release key make new --name online",
        f"release key rotate --role online --new new {OWN}",
        f"{REFRESH} keys --keys new",
        "release key show --at index",
        "release verify --at index",
    ):
        assert (line, run(line)) == (line, "")
    assert owner.index.entries["2026.11.2"].state.channel == "verified"


#: Runs the commands of the job that signs where only what its requirements pin can be imported.
SIGNING = """
import importlib.metadata, json, sys
pinned, commands = set(json.loads(sys.argv[1])), json.loads(sys.argv[2])
normal = lambda name: name.lower().replace("_", "-").replace(".", "-")
owners = importlib.metadata.packages_distributions()
class Pinned:
    def find_spec(self, name, path=None, target=None):
        owned = {normal(owner) for owner in owners.get(name.partition(".")[0], [])}
        if owned - {"sparkwright"} and not owned & pinned:
            raise ModuleNotFoundError(f"{name} of {owned} is not pinned")
sys.meta_path.insert(0, Pinned())
from sparkwright.cli import main
sys.exit([main.main(words) for words in commands] != [0, 0, 0, 1, 0])
"""


def test_job_that_signs_imports_what_its_requirements_pin(
    stock: publisher.IndexOwner, tmp_path: Path
) -> None:
    pins = (wheels.ROOT / ".github" / "requirements.txt").read_text()
    pinned = re.findall(r"^([a-z0-9-]+)(?:\[.*\])?==", pins, re.MULTILINE)
    keys = str(tmp_path / "keys")
    owner = ["--root", str(wheels.ROOT), "--at", str(tmp_path / "index"), "--keys", keys]
    candidate = ["--channel", "candidate", "--url", publisher.URL]
    commands = [
        ["release", "key", "make", keys],
        ["publish", str(wheels.vllm(tmp_path / "a")), *candidate, *owner],
        ["release", "prune", *owner],
        ["release", "promote", "2026.11.1", "--verdicts", str(tmp_path / "a"), *owner],
        ["release", "yank", "2026.11.1", "--reason", "it hangs", *owner],
    ]
    words = [sys.executable, "-c", SIGNING, json.dumps(pinned), json.dumps(commands)]
    environment = {
        **os.environ,
        **stock.environment,
        "SPARKWRIGHT_CACHE_DIR": str(tmp_path / "store"),
    }
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "verified-refused" in done.stderr
