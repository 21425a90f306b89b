"""``first-light`` on a machine without a GPU, on the demo's real wheels: what runs, what does not, and what is not repeated."""

from __future__ import annotations

import json
import os
import shutil
import tarfile
import zipfile
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from tests.conftest import running

from sparkwright.lab import first_light

if TYPE_CHECKING:
    from tests.integration.conftest import Demo

pytestmark = pytest.mark.toolchain

#: What a machine without a GPU cannot do.
ON_A_GPU = ("install", "device", "serve", "quick")


@pytest.fixture(name="machine")
def _machine(built_demo: Demo) -> Demo:
    """Return the built demo; G1 keeps the one converter whose source is not in a tree, as the mini upstreams have none of them."""
    path = built_demo.folder / "project" / "ci" / "gates" / "numerics.yaml"
    policy = yaml.safe_load(path.read_text())
    [header] = [unit for unit in policy["units"] if not unit["fork"]]
    header["converters"] = [one for one in header["converters"] if one["name"] == "cuda-fp4-value"]
    path.write_text(yaml.safe_dump({**policy, "units": [header]}))
    return built_demo


@pytest.fixture(autouse=True)
def _without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide a GPU that this machine may have."""
    folder = tmp_path / "no-gpu"
    folder.mkdir()
    (folder / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    (folder / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def run(demo: Demo, *words: str) -> tuple[dict[str, Any], set[str]]:
    """Run the command, which is incomplete, and return its steps and the names of those that were not repeated."""
    done = demo.run("first-light", "--json", *words, status=4)
    document = json.loads(done.stdout)
    assert document["error"]["reference"] == "first-light-incomplete"
    reused, step = set(), ""
    for line in done.stderr.splitlines():
        name = line.partition(":")[0]
        step = name if name in document["steps"] else step
        if "not repeated: " in line:
            reused.add(step)
    return document["steps"], reused


def test_a_machine_without_a_gpu_runs_the_rest_and_resumes_after_a_kill(machine: Demo) -> None:
    """GPU steps are not-run with the reason, a killed run continues, a finished one repeats nothing, and the bundle is what its manifest says."""
    folder = machine.folder / "project" / "dist" / "first-light"
    with running(machine.command("first-light"), machine.environment(), machine.folder) as child:
        assert child.stderr is not None
        assert any(line.startswith("audit:") for line in child.stderr)
        child.kill()
    assert not (folder / first_light.PAGE).exists()

    steps, reused = run(machine)
    assert reused == {"build"}
    assert {
        name: step["state"] for name, step in steps.items() if name in ON_A_GPU
    } == dict.fromkeys(ON_A_GPU, "not-run")
    assert "GPU: none" in steps["quick"]["message"]
    assert [verdict["gate"] for verdict in steps["audit"]["verdicts"]] == ["G0"] * 3
    assert {steps[name]["state"] for name in ("doctor", "build", "audit", "numerics")} == {"pass"}
    page = (folder / first_light.PAGE).read_text()
    assert page.count("not-run</span>") > 5
    assert "Every step passed" not in page

    again, reused = run(machine)
    assert reused == {"build", "audit", "numerics"}
    assert again["audit"] == steps["audit"]

    with tarfile.open(folder / first_light.BUNDLE) as archive:
        members = {
            name.removeprefix("first-light/"): archive.extractfile(name)
            for name in archive.getnames()
        }
        data = {name: stream.read() for name, stream in members.items() if stream}
    listed = dict(
        line.split("  ")[::-1] for line in data.pop(first_light.MANIFEST).decode().splitlines()
    )
    assert listed == {name: sha256(content).hexdigest() for name, content in data.items()}
    assert {first_light.PAGE, first_light.RESULTS, "doctor.json"} < data.keys()
    assert sum(name.endswith(".verdicts.json") for name in data) == 3


def test_another_wheel_of_the_same_name_is_not_taken_for_the_old_one(
    machine: Demo, tmp_path: Path
) -> None:
    """Its gates run, and the earlier wheel keeps its own results."""
    wheel = Path(shutil.copy(machine.wheel(), tmp_path))
    before = wheel.read_bytes()
    steps, reused = run(machine, str(wheel))
    assert "build" not in steps
    assert not reused

    wheel.chmod(0o644)
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.comment = b"other bytes"
    changed, reused = run(machine, str(wheel))
    assert not reused
    assert changed["audit"]["verdicts"][0]["wheel"] == sha256(wheel.read_bytes()).hexdigest()

    wheel.write_bytes(before)
    restored, reused = run(machine, str(wheel))
    assert "audit" in reused
    assert restored["audit"] == steps["audit"]
