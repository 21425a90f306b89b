"""A bundle for a host without a network: its wheels come out byte by byte, its commands run in their order, and what is foreign or cut is refused."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sparkwright.core.files import sha256_file
from sparkwright.operate import bundle, bundle_host
from sparkwright.operate.bundle import BundleSpec

ROOT = Path(__file__).parents[2]


def wheel(path: Path, **members: bytes) -> Path:
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(f"tiny/{name}.py", content)
    return path


def spec(*commands: dict[str, Any]) -> BundleSpec:
    environments = {"candidate": {"wheel": "dist/*.whl", "folders": ["sites/extra"]}}
    document = {"torch": "2.11.0", "capability": "9.0", "environments": environments, "commands": commands}
    return msgspec.convert(document, BundleSpec)


def command(name: str, *words: str, **facts: Any) -> dict[str, Any]:
    return {"name": name, "words": words, "seconds": 20, **facts}


@pytest.fixture(name="packed")
def _packed(tmp_path: Path) -> Path:
    """Return a bundle of two wheels that share a large member, and of a folder."""
    shared = bytes(range(256)) * 300
    ours = wheel(tmp_path / "ours" / "tiny-1+spark-py3-none-any.whl", shared=shared, own=b"NAME = 'ours'\n")
    theirs = wheel(tmp_path / "theirs" / "tiny-1-py3-none-any.whl", before=b"a", shared=shared, after=b"b" * 9000)
    extra = tmp_path / "extra" / "package"
    extra.mkdir(parents=True)
    (extra / "__init__.py").write_text("WORD = 'extra'\n")
    say = "from package import WORD; from tiny.own import NAME; print(NAME, WORD)"
    commands = (
        command("say", "{root}/environments/candidate/bin/python", "-c", say),
        command("fail", sys.executable, "-c", "raise SystemExit(3)", after=("say",)),
        command("hang", sys.executable, "-c", "import time; time.sleep(60)", seconds=1, alone=True),
    )
    files = {f"dist/{ours.name}": ours, f"stock/{theirs.name}": theirs}
    bundle.pack(spec(*commands), files, {"sites/extra": extra.parent}, tmp_path / "bundle", 30_000)
    return tmp_path / "bundle"


@pytest.fixture(name="host")
def _host(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return torch's version and the GPU's capability, as the host reports them."""
    facts = ["2.11.0", "9.0"]
    ended = subprocess.CompletedProcess[str]([], 0)
    real = subprocess.run

    def run(words: list[str], **options: Any) -> Any:
        if bundle_host.PROBE not in words:
            return real(words, **options)
        ended.stdout = " ".join(facts)
        return ended

    monkeypatch.setattr(subprocess, "run", run)
    return facts


def test_bundle_is_set_up_and_its_commands_run_once(packed: Path, host: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Shared members travel once, wheels keep their bytes, and a command with a result does not run again."""
    assert host
    root, about = tmp_path / "root", json.loads((packed / "bundle.json").read_text())
    assert len(about["parts"]) > 1
    assert sum(size for _, _, size in about["parts"]) < 120_000
    bundle_host.setup(packed, root)
    for name in ("ours", "theirs"):
        (before,) = (tmp_path / name).iterdir()
        (after,) = root.glob(f"*/{before.name}")
        assert sha256_file(after) == sha256_file(before)
    bundle_host.run(root)
    results = {path.stem: json.loads(path.read_text()) for path in (root / "results").glob("*.json")}
    assert {name: (each["status"], each["late"]) for name, each in results.items()} == {"say": (0, False), "fail": (3, False), "hang": (-15, True)}
    assert (root / "results" / "say.log").read_text() == "ours extra\n"
    (root / "results" / "fail.json").unlink()
    bundle_host.run(root)
    assert json.loads((root / "results" / "say.json").read_text()) == results["say"]
    bundle_host.wait(root, 1)
    assert capfd.readouterr().out.count('"status"') == 3
    bundle_host.collect(root, tmp_path / "back.tar.gz")
    with tarfile.open(tmp_path / "back.tar.gz") as archive:
        assert "results/say.log" in archive.getnames()


@pytest.mark.parametrize(
    ("torch", "capability", "damage", "reference"),
    [
        ("2.12.0", "9.0", None, "host-other-torch"),
        ("2.11.0", "12.1", None, "gpu-foreign"),
        ("2.11.0", "9.0", lambda part: part.unlink(), "bundle-incomplete"),
        ("2.11.0", "9.0", lambda part: part.write_bytes(part.read_bytes()[:-1]), "bundle-incomplete"),
    ],
)
def test_bundle_refuses_another_host_and_damaged_parts(
    packed: Path, host: list[str], tmp_path: Path, torch: str, capability: str, damage: Any, reference: str
) -> None:
    """Nothing is unpacked then."""
    host[:] = [torch, capability]
    if damage:
        damage(packed / "part-2")
    with pytest.raises(SystemExit, match=f"error: {reference}: "):
        bundle_host.setup(packed, tmp_path / "root")
    assert not (tmp_path / "root").exists()


def test_rehearsal_names_steps_and_recipes_that_are_there() -> None:
    """Its file follows the record, and every step of it is one of the script."""
    from sparkwright.core import strict_yaml

    script = (ROOT / "ci" / "rehearsal" / "rehearse.sh").read_text()
    commands = strict_yaml.load(ROOT / "ci" / "rehearsal" / "9.0a.yaml", BundleSpec).commands
    for each in commands:
        _, root, step, *names = each.words
        assert root == "{root}"
        assert f"  {step})" in script or f"{step} |" in script or f"| {step})" in script
        assert not names or (ROOT / "ci" / "recipes" / f"rehearsal-{names[0]}.yaml").exists()
