"""The job that signs, with what its requirements pin and nothing else."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from tests.support import publisher, wheels
from tests.support.publisher import IndexOwner

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
    stock: IndexOwner, tmp_path: Path
) -> None:
    pins = (wheels.ROOT / ".github" / "signing.txt").read_text()
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
