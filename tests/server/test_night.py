"""One night with the real vLLM on the CPU, killed in each step: what was finished stays, and the page has every gate."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from tests.support import processes, refserved

from sparkwright.gates.core import ladder

pytestmark = [pytest.mark.server, pytest.mark.network]

#: Lines that a night prints while it is in a step, in their order; it is killed at each.
STEPS = ("  start the server: ", "record logprobs.json", "record observed.json", "G3: ", "G4: ", "G5: ", "G7: ")
GATES = ("G3", "G4", "G5", "G7")


def edited_copy(python: Path, folder: Path) -> tuple[Path, Path]:
    """Return the Python of a copy of its environment in which a module of vLLM has a further line, and the wheel that holds that."""
    environment = python.parents[1]
    # Links: an environment has gigabytes.
    shutil.copytree(environment, folder, symlinks=True, copy_function=lambda old, new: Path(new).hardlink_to(old))
    (official,) = (environment / "wheel").glob("*.whl")
    (site,) = folder.glob("lib/python3.*/site-packages")
    wheel = folder / "dist" / official.name
    wheel.parent.mkdir()
    with zipfile.ZipFile(official) as old, zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as new:
        for member in old.infolist():
            data = old.read(member)
            if member.filename == "vllm/__init__.py":
                data += b"# ours\n"
                (site / member.filename).unlink()
                (site / member.filename).write_bytes(data)
            new.writestr(member, data)
    return folder / "bin" / "python", wheel


def test_a_night_that_is_killed_in_each_step_ends_with_all_its_verdicts(vllm_python: Path, toy: Path, tmp_path: Path) -> None:
    """Each run continues behind what was finished: each gate has one verdict, the reference is recorded once, and nothing half-written is taken for whole."""
    project = refserved.project(tmp_path / "project")
    refserved.edit(project / "ci" / "gates" / "soak.yaml", seconds=20, interval=5)
    # Still more at once than fits into one step.
    words = project / "ci" / "gates" / "generation.yaml"
    words.write_text(words.read_text("utf-8").replace("\n  answers: 400\n", "\n  answers: 40\n"), "utf-8")
    refserved.edit(words, rounds=1)
    refserved.edit(project / "ci" / "gates" / "logprobs.yaml", texts=16, tokens=256, decode_texts=8, decode_prompt=64)
    python, wheel = edited_copy(vllm_python, tmp_path / "ours")
    (stock,) = (vllm_python.parents[1] / "wheel").glob("*.whl")
    only = [word for gate in GATES for word in ("--only", gate)]
    command = [
        sys.executable, "-m", "sparkwright", "gate", str(wheel), "--recipe", "toy-cpu", "--model-folder", str(toy), "--root", str(project),
        "--cache-dir", str(tmp_path / "cache"), "--output", str(tmp_path / "out"), "--python", str(python), "--baseline", str(stock),
        "--baseline-python", str(vllm_python), "--keep-going", *only,
    ]  # fmt: skip
    for step in STEPS:
        with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, preexec_fn=processes.heard) as night:  # noqa: PLW1509
            assert night.stderr
            assert any(line.startswith(step) for line in night.stderr), step
            night.kill()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr

    (document,) = (tmp_path / "out").glob("*.verdicts.json")
    verdicts = ladder.read_verdicts(document.read_bytes())
    assert [verdict.gate for verdict in verdicts.verdicts] == list(GATES)
    ended = [line.gate for line in verdicts.attempts if line.state]
    assert ended == list(GATES)
    assert "record logprobs.json" not in done.stderr
    (html,) = (tmp_path / "out").glob("*.toy-cpu.html")
    assert all(f"<summary>{gate} toy-cpu" in html.read_text("utf-8") for gate in GATES)
