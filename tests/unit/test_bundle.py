"""A bundle for a host without a network: its wheels come out byte by byte, its commands run in their order, and what is foreign or cut is refused."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from tests.refusals import refusal
from tests.support import fatbins, processes, wheels
from tests.support.standin import alive

from sparkwright.builder.wheel import archive
from sparkwright.builder.wheel.archive import WheelName
from sparkwright.cli import main
from sparkwright.core import strict_yaml
from sparkwright.release import bundle, bundle_host
from sparkwright.release.bundle import BundleEnvironment, BundleSpec

#: The host's torch, which no machine of the tests has.
TORCH = """
from types import SimpleNamespace
__version__ = "2.11.0+cu130"
cuda = SimpleNamespace(is_available=lambda: True, get_device_capability=lambda: (9, 0), device_count=lambda: 2)
"""
SPEC = (
    f"python: {sysconfig.get_python_version()} {os.uname().machine}"
    + """
torch: "2.11.0"
capability: "9.0"
environments:
  candidate: {wheel: "dist/*.whl", folders: [sites/extra]}
commands:
  - {name: say, seconds: 60, words: ["{root}/environments/candidate/bin/python", "-c", "from package import WORD; import tiny; print(tiny.__version__, WORD)"]}
  - {name: fail, seconds: 60, words: [sh, "-c", "exit 3"], after: [say]}
  # It asks to be spared, and its child leaves its session.
  - {name: hang, seconds: 1, words: [sh, "-c", "trap '' TERM; setsid sleep 600 & echo $! > {root}/child; sleep 600"], alone: true}
"""
)


class Host(NamedTuple):
    """
    A host with a bundle.

    Attributes:
        script: Runs ``bundle_host.py`` there.
    """

    bundle: Path
    root: Path
    site: Path

    def start(self, *words: object) -> subprocess.Popen[str]:
        command = [sys.executable, self.bundle / "bundle_host.py", *words]
        variables = {**os.environ, "PYTHONPATH": str(self.site)}
        return subprocess.Popen(
            list(map(str, command)),
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def script(self, *words: object) -> tuple[int, str, str]:
        process = self.start(*words)
        output, errors = process.communicate()
        return process.returncode, output, errors

    def change(self, **facts: Any) -> None:
        path = self.bundle / "bundle.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **facts}))

    def set_up(self, *commands: dict[str, Any]) -> None:
        """Set the bundle up, with other commands if some are given."""
        plain = {"seconds": 60, "after": [], "gpu": 0, "alone": False}
        if commands:
            self.change(commands=[{**plain, **command} for command in commands])
        assert self.script("setup", self.bundle, self.root) == (0, "", "")


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a bundle of a wheel and a folder, what it was made of, and the host's torch."""
    folder = tmp_path_factory.mktemp("packed")
    wheel = wheels.plain(folder, "tiny", "1", files={"noise": os.urandom(70_000)})
    for name, text in (("extra/package/__init__.py", "WORD = 'extra'\n"), ("spec.yaml", SPEC), ("site/torch.py", TORCH)):
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_text(text)
    wheel.with_name(f"{wheel.stem}.attempts.jsonl").write_text("earlier attempts\n")
    contents = ("--add", f"dist/{wheel.name}={wheel}", "--add", f"sites/extra={folder}/extra")
    assert main.main(["release", "bundle", f"{folder}/spec.yaml", "--output", f"{folder}/bundle", "--part", "0.03", *contents]) == 0
    script = folder / "bundle" / "bundle_host.py"
    script.write_text(script.read_text().replace("GRACE = 30", "GRACE = 1"))
    return folder


@pytest.fixture
def host(tmp_path: Path, packed: Path) -> Host:
    """Return a host of the bundle's kind, with the bundle."""
    shutil.copytree(packed, tmp_path, dirs_exist_ok=True)
    return Host(tmp_path / "bundle", tmp_path / "root", tmp_path / "site")


def results(root: Path) -> dict[str, Any]:
    return {path.stem: json.loads(path.read_text()) for path in (root / "results").glob("*.json")}


def test_bundle_is_set_up_and_its_commands_run_once(host: Host, tmp_path: Path) -> None:
    """
    The wheel comes out byte by byte, with what the gates wrote beside it, a command with a result does not run again, and one that hangs ends with all that it started. A folder
    without its last mark is no bundle that is set up: setup is begun again.
    """
    assert len(json.loads((host.bundle / "bundle.json").read_text())["parts"]) > 2
    host.set_up()
    (host.root / "results").rmdir()
    (host.root / "sites" / "extra" / "package" / "__init__.py").unlink()
    assert host.script("run", host.root)[2].startswith("error: bundle-incomplete: ")
    host.set_up()
    name = "tiny-1-py3-none-any.whl"
    assert (host.root / "dist" / name).read_bytes() == (tmp_path / name).read_bytes()
    assert (host.root / "dist" / "tiny-1-py3-none-any.attempts.jsonl").read_text() == "earlier attempts\n"
    assert host.script("run", host.root) == (0, "", "")
    first = results(host.root)
    ended = {name: (each["status"], each["late"]) for name, each in first.items()}
    assert ended == {"say": (0, False), "fail": (3, False), "hang": (-9, True)}
    assert (host.root / "results" / "say.log").read_text() == "1 extra\n"
    assert not alive(int((host.root / "child").read_text()))
    (host.root / "results" / "fail.json").unlink()
    assert host.script("run", host.root)[0] == 0
    assert results(host.root)["say"] == first["say"]
    assert host.script("wait", host.root, 1)[1].count('"status"') == 3


def test_run_that_was_killed_continues(host: Host) -> None:
    """What has a result is not run again; what ran beside it is ended before it runs again."""
    marker = host.root / "second"
    wait = f"echo $$ >> {marker}; test $(wc -l < {marker}) = 2 || sleep 600"
    host.set_up(
        {"name": "first", "words": ["sh", "-c", "date +%N"]},
        {"name": "second", "words": ["sh", "-c", wait], "after": ["first"]},
    )
    process = host.start("run", host.root)
    processes.until(lambda: marker.exists() and marker.read_text().strip())
    busy = host.script("run", host.root)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    orphan, text = int(marker.read_text()), (host.root / "results" / "first.log").read_text()
    assert alive(orphan)
    assert (busy[0], busy[2].split(": ")[:2]) == (1, ["error", "bundle-busy"])
    assert "second: began" in host.script("wait", host.root, 0)[1]
    assert host.script("run", host.root)[0] == 0
    assert not alive(orphan)
    assert {name: each["status"] for name, each in results(host.root).items()} == {
        "first": 0,
        "second": 0,
    }
    assert (host.root / "results" / "first.log").read_text() == text


def test_named_commands_run_with_those_that_they_come_after(host: Host) -> None:
    """The others keep waiting; a name that is no command's runs nothing."""
    order = {"model": [], "other": [], "soak": ["model"], "last": ["soak"]}
    host.set_up(*({"name": name, "words": ["true"], "after": order[name]} for name in order))
    status, _, stderr = host.script("run", host.root, "soak", "sok")
    assert (status, stderr.split(": ")[1], results(host.root)) == (1, "command-unknown", {})
    assert host.script("run", host.root, "soak")[0] == 0
    assert set(results(host.root)) == {"model", "soak"}
    began = time.monotonic()
    assert "last: waits" in host.script("wait", host.root, 60, "soak")[1]
    assert time.monotonic() - began < 30
    assert host.script("run", host.root)[0] == 0
    assert set(results(host.root)) == {"model", "soak", "other", "last"}


@pytest.mark.parametrize(("allowed", "seen"), [("", ["0", "1", "0"]), ("5,7", ["5", "7", "5"])])
def test_commands_for_other_gpus_run_beside_one_that_runs_alone(
    host: Host, monkeypatch: pytest.MonkeyPatch, allowed: str, seen: list[str]
) -> None:
    """Each sees its own GPU of those that the user may take, and has its own processors; a third GPU is one of the two."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", allowed)
    shown = "echo $CUDA_VISIBLE_DEVICES; taskset --cpu-list --pid $$ | sed 's/.*: //'"
    meet = "touch {root}/$0; for i in $(seq 100); do test -e {root}/$1 && exit; sleep 0.1; done; exit 1"
    words = ["sh", "-c", f"{shown}; {meet}"]
    host.set_up(
        *(
            {"name": name, "words": [*words, name, other], "gpu": gpu, "alone": True}
            for name, other, gpu in (("a", "b", 0), ("b", "a", 1), ("c", "a", 2))
        )
    )
    assert host.script("run", host.root)[0] == 0
    assert {name: each["status"] for name, each in results(host.root).items()} == dict.fromkeys(
        "abc", 0
    )
    logs = [(host.root / "results" / f"{name}.log").read_text().split("\n") for name in "abc"]
    assert [log[0] for log in logs] == seen
    if len(os.sched_getaffinity(0)) > 1:
        assert logs[0][1] == logs[2][1] != logs[1][1]


def archive_of(name: str, kind: bytes = tarfile.REGTYPE) -> Callable[[Host], object]:
    """Return what replaces the parts by an archive of the one member *name*."""

    def replace(host: Host) -> None:
        member, stream = tarfile.TarInfo(name), io.BytesIO()
        member.type, member.linkname = kind, "/"
        with tarfile.open(fileobj=stream, mode="w:xz") as archive:
            archive.addfile(member)
        (host.bundle / "part-00001").write_bytes(stream.getvalue())
        host.change(parts=[["part-00001", sha256(stream.getvalue()).hexdigest(), len(stream.getvalue())]])

    return replace


def environment(**changed: object) -> dict[str, object]:
    """Return facts of a bundle with one environment."""
    return {"environments": {"x": {"wheel": None, "folders": [], "host": [], **changed}}}


@pytest.mark.parametrize(
    ("reference", "fault"),
    [
        ("host-other-torch", "sed -i s/2.11.0/2.12.0/ site/torch.py"),
        ("host-other-torch", "rm site/torch.py"),
        ("gpu-foreign", "sed -i 's/(9, 0)/(12, 1)/' site/torch.py"),
        ("bundle-root-taken", "mkdir root; touch root/own"),
        ("bundle-incomplete", "rm bundle/part-00002"),
        ("bundle-incomplete", "echo changed > bundle/part-00002"),
        ("bundle-incomplete", "rm bundle/bundle.json"),
        ("bundle-incomplete", "echo '{\"parts\": [' > bundle/bundle.json"),
        ("bundle-incomplete", {"parts": 7}),
        ("bundle-unsafe", {"parts": [["../part-00001", "", 0]]}),
        ("bundle-unsafe", {"environments": {"/etc": {"wheel": None, "folders": [], "host": []}}}),
        ("bundle-unsafe", environment(wheel="a/../../*")),
        ("bundle-unsafe", environment(folders=["../x"])),
        ("bundle-unsafe", environment(host=["../*"])),
        ("bundle-unsafe", {"commands": [{"name": "../x"}]}),
        ("host-other-python", {"python": "3.10 x86_64"}),
        ("host-other-python", {"python": f"{sysconfig.get_python_version()} riscv64"}),
        ("bundle-unsafe", archive_of("../escaped")),
        ("bundle-unsafe", archive_of("/escaped")),
        ("bundle-unsafe", archive_of("escaped", tarfile.SYMTYPE)),
    ],
)
def test_setup_refuses_another_host_and_another_bundle(
    host: Host, reference: str, fault: str | dict[str, Any] | Callable[[Host], object]
) -> None:
    """No environment is made then, nothing runs, and nothing is outside the folder."""
    if isinstance(fault, str):
        subprocess.run(fault, shell=True, check=True, cwd=host.root.parent)
    elif isinstance(fault, dict):
        host.change(**fault)
    else:
        fault(host)
    status, _, errors = host.script("setup", host.bundle, host.root)
    assert (status, errors.split(": ")[:2]) == (1, ["error", reference])
    assert bundle_host.REFUSALS[reference][1] in errors
    assert not (host.root / "environments").exists()
    assert not list(host.root.parent.rglob("escaped"))


def test_packer_refuses_what_the_host_would_lack(host: Host, tmp_path: Path) -> None:
    """A wheel or folder of an environment, a file that is not there, and a folder that holds a bundle."""
    spec = strict_yaml.load(tmp_path / "spec.yaml", BundleSpec)
    wheel, extra = tmp_path / "tiny-1-py3-none-any.whl", tmp_path / "extra"
    for contents in (
        {},
        {"dist/a.whl": wheel},
        {"dist/a.whl": tmp_path / "none.whl", "sites/extra": extra},
    ):
        with refusal("bundle-incomplete"):
            bundle.pack(spec, contents, tmp_path / "other", 1000)
    with refusal("bundle-root-taken"):
        bundle.pack(spec, {"dist/a.whl": wheel, "sites": extra}, host.bundle, 1000)
    assert (host.bundle / "bundle.json").exists()
    with refusal("file-invalid"):
        strict_yaml.parse(SPEC.replace("sites/extra", "../extra"), BundleSpec, "spec.yaml")


def test_bundle_brings_its_own_torch(host: Host, tmp_path: Path) -> None:
    """
    The host's torch is another; that of the bundle is in front of it, without the code of other GPUs. A wheel or a folder of another torch
    than the file states is refused before anything is packed.
    """
    site, wheel = tmp_path / "own", wheels.plain(tmp_path / "served", "served", "1", requires=["torch==2.14.0"])
    units = [fatbins.cubin(tmp_path, "sm_90a"), fatbins.cubin(tmp_path, "sm_120"), fatbins.ptx("sm_120")], [fatbins.ptx("sm_80")]
    library = fatbins.library(tmp_path, *units)
    (site / "torch-2.14.0.dist-info").mkdir(parents=True)
    (site / "torch.py").write_text(TORCH.replace("2.11.0", "2.14.0"))
    (site / "libkernels.so.1").write_bytes(library)
    text = SPEC.replace('"2.11.0"', '"2.14.0"\nown_torch: sites/own').replace("sites/extra", "sites/own")
    spec = strict_yaml.parse(text, BundleSpec, "spec.yaml")
    contents = {f"dist/{wheel.name}": wheel, "sites/own": site}

    shutil.rmtree(host.bundle)
    bundle.pack(spec, contents, host.bundle, 10_000_000, trim=True)
    assert host.script("setup", host.bundle, host.root) == (0, "", "")
    python, packed = host.root / "environments/candidate/bin/python", (host.root / "sites/own/libkernels.so.1").read_bytes()
    script = "import torch; print(torch.__version__)"
    assert subprocess.run([python, "-c", script], capture_output=True, text=True, check=True).stdout == "2.14.0+cu130\n"
    images = [[image[2] in data for unit in units for image in unit] for data in (library, packed)]
    assert images == [[True] * 4, [True, False, False, True]]

    for version, change in (("2.12.0", "2.14.0"), ("2.14.0", "2.13.0")):
        (site / "torch-2.14.0.dist-info").rename(site / f"torch-{change}.dist-info")
        with refusal("bundle-torch-differs"):
            bundle.pack(msgspec.structs.replace(spec, torch=version), contents, tmp_path / "other", 1000)
        (site / f"torch-{change}.dist-info").rename(site / "torch-2.14.0.dist-info")
        assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("file", ["ci/rehearsal/9.0a.yaml", "ci/rehearsal/2026.11.yaml", "docs/howto/airgapped.md"])
def test_documented_bundles_can_be_packed(tmp_path: Path, file: str) -> None:
    """With wheels that require the torch that the file states, and the folders that it names."""
    text = (wheels.ROOT / file).read_text()
    spec = strict_yaml.parse(text.partition("```yaml\n")[2].partition("```")[0] or text, BundleSpec, file)
    wheel = wheels.plain(tmp_path, "served", "1", requires=[f"torch=={spec.torch}"])
    folders = {folder for environment in spec.environments.values() for folder in environment.folders}
    for folder in folders:
        (tmp_path / folder).mkdir(parents=True)
    if spec.own_torch:
        (tmp_path / spec.own_torch / f"torch-{spec.torch}+cu130.dist-info").mkdir()
    globs = [environment.wheel for environment in spec.environments.values() if environment.wheel]
    contents = {glob.replace("*", "served"): wheel for glob in globs} | {folder: tmp_path / folder for folder in folders}

    assert bundle.pack(spec, contents, tmp_path / "out", 1_000_000)


MARKED = """\
Metadata-Version: 2.4
Name: served
Version: 1
Requires-Dist: torch==2.14.0; python_version == "3.14" and platform_machine == "riscv64"
Requires-Dist: Torch==2.11.0; python_version != "3.14" or platform_machine != "riscv64"
"""


def served(*folders: str) -> dict[str, Any]:
    """Return the environments of a specification: one, of the wheel and *folders*."""
    return {"environments": {"served": BundleEnvironment("dist/*.whl", folders)}}


@pytest.mark.parametrize(
    ("change", "reference", "detail"),
    [
        ({}, "", ""),
        ({"python": "3.13 riscv64"}, "bundle-torch-differs", "requires Torch==2.11.0"),
        ({"own_torch": "sites/absent"}, "bundle-incomplete", "own_torch: nothing holds sites/absent"),
        ({"own_torch": "sites/served"}, "bundle-torch-differs", "sites/served holds no torch"),
        ({"own_torch": "sites/own"}, "bundle-torch-differs", "environment served: dist/served.whl requires torch; its folders lack it"),
        ({"own_torch": "sites/own/", **served("sites/own")}, "", ""),
        ({"own_torch": "sites/own", **served("sites/other", "sites/own")}, "bundle-torch-differs", "sites/other holds torch-2.11.0.dist-info"),
        (served("sites/other"), "bundle-torch-differs", "sites/other holds torch-2.11.0.dist-info"),
        ("cut", "wheel-invalid", ""),
    ],
)
def test_packer_reads_what_each_wheel_asks_of_torch(tmp_path: Path, change: str | dict[str, Any], reference: str, detail: str) -> None:
    """For the bundle's kind of host, from its own metadata, and whether the environment of the wheel has the bundle's torch."""
    name = WheelName.of("served-1-py3-none-any.whl")
    wheel = archive.write(tmp_path, name, {"served/_vendor/other-2.dist-info/METADATA": b"Name: other\n"}, MARKED, pure=True)
    for folder in ("own/torch-2.14.0+cu130.dist-info", "other/torch-2.11.0.dist-info", "served"):
        (tmp_path / folder).mkdir(parents=True)
    if change == "cut":
        wheel.write_bytes(wheel.read_bytes()[:-30])
    spec = BundleSpec("3.14 riscv64", "2.14.0", "9.0", **served("sites/served"), commands=())
    spec = msgspec.structs.replace(spec, **change) if isinstance(change, dict) else spec
    contents = {"dist/served.whl": wheel, **{f"sites/{name}": tmp_path / name for name in ("own", "other", "served")}}

    with refusal(reference) if reference else contextlib.nullcontext() as caught:
        bundle.pack(spec, contents, tmp_path / "out", 1_000_000)
    assert caught is None or detail in " ".join(caught.value.details)
    assert (tmp_path / "out").exists() == (not reference)


def test_collected_results_are_small(tmp_path: Path) -> None:
    """Evidence comes whole, a log with its ends, another large record not at all; what is cut is stated."""
    sizes = {f"stores/rehearsal-bf16/logs/gate/{number}.log": 600_000 for number in range(40)}
    sizes |= {
        "stores/rehearsal-bf16/logs/gate/profiles/trace.json.gz": 30_000_000,
        "dist/tiny.verdicts.json": 2_000_000,
    }
    root, packed, back = (tmp_path / name for name in ("root", "back.tar.gz", "back"))
    for name, size in sizes.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"first\n" + os.urandom(size) + b"\nlast")
    bundle_host.collect(root, packed)
    assert packed.stat().st_size < 12_000_000
    shutil.unpack_archive(packed, back)
    cut = {name: stated for name, *stated in json.loads((back / "cut.json").read_text())}
    for name in sizes:
        before, after = ((folder / name).read_bytes() for folder in (root, back))
        assert cut.get(name, [len(before), len(before)]) == [len(before), len(after)]
        assert (name in cut) == ("logs" in name)
        assert (after[:6], after[-4:]) == ((b"", b"") if "trace" in name else (b"first\n", b"last"))
