"""``first-light`` on a machine without a GPU, on the demo's real wheels: what runs, what does not, and what is not repeated."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import zipfile
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.conftest import running
from tests.integration.conftest import Demo

from sparkwright.cli import first_light

pytestmark = pytest.mark.toolchain


@pytest.fixture(name="machine")
def _machine(built_demo: Demo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Demo:
    """Return the built demo without a GPU; G1 keeps the one converter whose source is not in a tree, as the mini upstreams have none of them."""
    path = built_demo.folder / "project" / "ci" / "gates" / "numerics.yaml"
    policy = yaml.safe_load(path.read_text())
    [header] = [unit for unit in policy["units"] if not unit["fork"]]
    header["converters"] = [converter for converter in header["converters"] if converter["name"] == "cuda-fp4-value"]
    path.write_text(yaml.safe_dump({**policy, "units": [header]}))
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return built_demo


def run(demo: Demo, *words: str) -> tuple[dict[str, Any], list[str]]:
    """Run the command, which is incomplete, and return its steps and the names of those that were not repeated."""
    done = demo.run("first-light", "--json", *words, status=4)
    document = json.loads(done.stdout)
    assert document["error"]["reference"] == "first-light-incomplete"
    said = re.split(rf"^({'|'.join(document['steps'])}): .*$", done.stderr, flags=re.MULTILINE)
    return document["steps"], [name for name, text in zip(said[1::2], said[2::2], strict=True) if "not repeated: " in text]


def test_a_machine_without_a_gpu_runs_the_rest_and_resumes_after_a_kill(machine: Demo, tmp_path: Path) -> None:
    """GPU steps are not-run with the reason, a killed run continues, a finished one repeats nothing, and the bundle has the evidence."""
    folder = machine.folder / "project" / "dist" / "first-light"
    with running(machine.command("first-light"), machine.environment(), machine.folder) as child:
        assert child.stderr is not None
        assert any(line.startswith("audit:") for line in child.stderr)
        child.kill()
    assert not (folder / first_light.PAGE).exists()

    steps, reused = run(machine)
    assert reused == ["build"]
    assert {name for name, step in steps.items() if step["state"] == "not-run"} == {"install", "device", "serve", "quick"}
    assert {name for name, step in steps.items() if step["state"] == "pass"} == {"doctor", "build", "audit", "numerics"}
    assert "GPU: none" in steps["quick"]["message"]
    assert [verdict["gate"] for verdict in steps["audit"]["verdicts"]] == ["G0"] * 3
    page = (folder / first_light.PAGE).read_text()
    assert (page.count("not-run</span>") > 5, "Every step passed" in page) == (True, False)

    again, reused = run(machine)
    assert (reused, again["audit"]) == (["build", "audit", "numerics"], steps["audit"])

    (bundle := tmp_path / "bundle").mkdir()
    subprocess.run(["tar", "-C", bundle, "-xf", folder / first_light.BUNDLE], check=True)
    files = {path.relative_to(bundle / "first-light").as_posix() for path in bundle.rglob("*") if path.is_file()}
    assert {first_light.PAGE, first_light.RESULTS, "doctor.json"} < files
    assert sum(name.endswith(".verdicts.json") for name in files) == 3


def test_another_wheel_of_the_same_name_is_not_taken_for_the_old_one(machine: Demo, tmp_path: Path) -> None:
    """Its gates run, and the earlier wheel keeps its own results."""
    wheel = Path(shutil.copy(machine.wheel(), tmp_path))
    steps, _ = run(machine, str(wheel))
    wheel.chmod(0o644)
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.comment = b"other bytes"
    changed, reused = run(machine, str(wheel))
    assert (reused, changed["audit"]["verdicts"][0]["wheel"]) == ([], sha256(wheel.read_bytes()).hexdigest())

    shutil.copy(machine.wheel(), wheel)
    restored, reused = run(machine, str(wheel))
    assert ("audit" in reused, restored["audit"]) == (True, steps["audit"])
