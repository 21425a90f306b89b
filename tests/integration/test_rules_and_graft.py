"""Arch rules that upstream outgrew, a base wheel of another release, and what is in a grafted wheel."""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
from tests.integration.conftest import Demo

from sparkwright.builder.wheel import archive as wheelfile
from sparkwright.core import strict_yaml
from sparkwright.core.files import sha256_file
from sparkwright.forks.lock import FileLock, Lock

pytestmark = pytest.mark.toolchain

COMPILED = {"mini_vllm/_C_stable_libtorch.abi3.so", "mini_vllm/_moe_C_stable_libtorch.abi3.so"}
UNTOUCHED = "mini_vllm/_big_C.abi3.so"


def failure(stdout: str) -> dict[str, Any]:
    """Return the error in the one JSON document that *stdout* is."""
    error: dict[str, Any] = json.loads(stdout)["error"]
    return error


def locked_base(demo: Demo) -> FileLock:
    """Return what the demo's lock says of the base wheel of this machine."""
    (base,) = strict_yaml.load(demo.folder / "project" / "forks" / "demo" / "lock.yaml", Lock).forks["vllm"].bases.values()
    return base


def base_of(demo: Demo) -> Path:
    """Return the official wheel that the demo's lock names."""
    base = locked_base(demo)
    return demo.folder / "store" / "downloads" / base.sha256 / base.filename


def test_a_base_wheel_of_another_release_is_refused(demo: Demo) -> None:
    """A wheel that is what the lock names, but was built from other sources, is refused before anything is compiled; the file is named."""
    base, locked = base_of(demo), locked_base(demo)
    with zipfile.ZipFile(base) as archive:
        other = archive.read("mini_vllm/envs.py").replace(b'"512"', b'"256"')
    fresh = demo.folder / "other"
    fresh.mkdir()
    made = wheelfile.rewrite(base, fresh, version=locked.version, replace={"mini_vllm/envs.py": other})
    sha256 = sha256_file(made)
    # The folder of downloads is shared with the user's store, which this wheel must not get into.
    downloads = demo.folder / "store" / "downloads"
    downloads.unlink()
    (downloads / sha256).mkdir(parents=True)
    made.rename(downloads / sha256 / made.name)
    lock = demo.folder / "project" / "forks" / "demo" / "lock.yaml"
    lock.write_text(lock.read_text("utf-8").replace(locked.sha256, sha256), "utf-8")

    done = demo.run("build", "--fork", "vllm", "--json", status=1)

    error = failure(done.stdout)
    assert error["reference"] == "base-mismatch"
    assert locked.filename in error["what"]
    assert error["details"][1:] == ["mini_vllm/envs.py"]
    assert not demo.calls()


def test_a_graft_keeps_what_it_does_not_compile(undisturbed: Demo) -> None:
    """Libraries that are not compiled here, and files that no patch touches, are the base's to the byte; all others differ from it."""
    ours = undisturbed.members()
    with zipfile.ZipFile(base_of(undisturbed)) as archive:
        base = {name.replace("-0.33.0.", f"-{undisturbed.version}."): archive.read(name) for name in archive.namelist()}

    info = undisturbed.info
    assert set(ours) - set(base) == {f"{info}/sparkwright.json", f"{info}/sboms/sparkwright.cdx.json"}
    assert not set(base) - set(ours)
    patched, restated = {"mini_vllm/quantization/nvfp4_scales.py"}, {"mini_vllm/_version.py", f"{info}/METADATA"}
    # WHEEL is written anew, and may say the same.
    changed = {name for name in base if base[name] != ours[name]} - {f"{info}/WHEEL"}
    assert changed == COMPILED | patched | restated | {f"{info}/RECORD"}
    assert ours[UNTOUCHED] == base[UNTOUCHED]


def recorded(data: bytes) -> str:
    """Return the hash of *data* as RECORD writes it (PEP 376)."""
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")


def test_every_wheel_is_true_to_its_record_and_no_library_names_the_machine(undisturbed: Demo) -> None:
    """RECORD has the hash and size of each member; neither a folder of the build nor a temporary name of nvcc is in a library."""
    wheels, traces = sorted((undisturbed.folder / "dist").glob("*.whl")), [str(undisturbed.folder.parent).encode(), b"tmpxft"]
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
        record = next(name for name in members if name.endswith(".dist-info/RECORD"))
        rows = list(csv.reader(members.pop(record).decode().splitlines()))
        assert sorted(rows) == sorted([[record, "", ""], *([name, recorded(data), str(len(data))] for name, data in members.items())])
        libraries = {name: data for name, data in members.items() if name.endswith(".so")}
        assert not [(name, trace) for name, data in libraries.items() for trace in traces if trace in data]
        assert wheel != undisturbed.wheel() or libraries.keys() == COMPILED | {UNTOUCHED}
    assert len(wheels) == 3
