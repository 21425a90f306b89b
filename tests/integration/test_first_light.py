"""``first-light`` on a machine without a GPU, on the demo's real wheels: what runs, what does not, and what is not repeated."""

from __future__ import annotations

import json
import os
import re
import tarfile
import zipfile
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.conftest import running
from tests.integration.conftest import Demo

from sparkwright.lab import first_light

pytestmark = pytest.mark.toolchain


@pytest.fixture(name="machine")
def _machine(built_demo: Demo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Demo:
    """
    Return the built demo on a machine without a GPU; G1 keeps the one converter whose source is not in a tree, as the mini upstreams
    have none of them.
    """
    path = built_demo.folder / "project" / "ci" / "gates" / "numerics.yaml"
    policy = yaml.safe_load(path.read_text())
    [header] = [unit for unit in policy["units"] if not unit["fork"]]
    header["converters"] = [
        converter for converter in header["converters"] if converter["name"] == "cuda-fp4-value"
    ]
    path.write_text(yaml.safe_dump({**policy, "units": [header]}))
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return built_demo


def run(demo: Demo, *words: str) -> tuple[dict[str, Any], set[str]]:
    """Run the command, which is incomplete, and return its steps and the names of those that were not repeated."""
    done = demo.run("first-light", "--json", *words, status=4)
    document = json.loads(done.stdout)
    assert document["error"]["reference"] == "first-light-incomplete"
    names = "|".join(document["steps"])
    parts = re.split(rf"^({names}):", done.stderr, flags=re.MULTILINE)[1:]
    return document["steps"], {
        name for name, text in zip(parts[::2], parts[1::2], strict=True) if "not repeated: " in text
    }


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
    assert {steps[name]["state"] for name in ("install", "device", "serve", "quick")} == {"not-run"}
    assert "GPU: none" in steps["quick"]["message"]
    assert [verdict["gate"] for verdict in steps["audit"]["verdicts"]] == ["G0"] * 3
    assert {steps[name]["state"] for name in ("doctor", "build", "audit", "numerics")} == {"pass"}
    again, reused = run(machine)
    assert reused == {"build", "audit", "numerics"}
    assert again["audit"] == steps["audit"]

    with tarfile.open(folder / first_light.BUNDLE) as archive:
        archive.extractall(machine.folder, filter="data")
    data = {
        path.name: path.read_bytes()
        for path in (machine.folder / "first-light").rglob("*")
        if path.is_file()
    }
    listed = dict(
        line.split("  ")[::-1] for line in data.pop(first_light.MANIFEST).decode().splitlines()
    )
    assert {Path(name).name: digest for name, digest in listed.items()} == {
        name: sha256(content).hexdigest() for name, content in data.items()
    }
    assert {first_light.PAGE, first_light.RESULTS, "doctor.json"} < data.keys()


def test_another_wheel_of_the_same_name_is_not_taken_for_the_old_one(machine: Demo) -> None:
    """Its gates run, and the earlier wheel keeps its own results."""
    wheel = machine.wheel()
    steps, reused = run(machine, str(wheel))
    assert not reused

    before = wheel.read_bytes()
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.comment = b"other bytes"
    changed, reused = run(machine, str(wheel))
    assert not reused
    assert changed["audit"]["verdicts"][0]["wheel"] == machine.sha256()

    wheel.write_bytes(before)
    restored, reused = run(machine, str(wheel))
    assert "audit" in reused
    assert restored["audit"] == steps["audit"]
