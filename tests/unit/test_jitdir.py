"""The folder of what is compiled at run time: another one for every build, the same one for the same build."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from sparkwright.release import jitdir
from sparkwright.release.environment import Environment


@pytest.fixture(autouse=True)
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep this machine's own nvcc out."""
    for name in ("CUDA_HOME", "CUDA_PATH", *(cache.variable for cache in jitdir.CACHES)):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")


@pytest.fixture(name="site")
def _site(tmp_path: Path) -> Path:
    """Return the site-packages of an environment with two distributions."""
    site = tmp_path / "venv" / "lib" / "site-packages"
    for name, record in {"vllm-0.33.0+spark.2026.11.p1a2b3c4d.cu130": "vllm,1\n", "triton-3.8.0": "triton,1\n"}.items():
        (site / f"{name}.dist-info").mkdir(parents=True)
        (site / f"{name}.dist-info" / "RECORD").write_text(record)
    return site


def at(site: Path, version: tuple[int, int] = (3, 12)) -> Environment:
    return Environment(site.parent, site, version, f"cp{version[0]}{version[1]}")


def test_an_upgrade_gets_another_folder_and_a_rollback_the_first_one(site: Path, tmp_path: Path) -> None:
    """A new release of one package, though the versions of all others stay, leaves the old entries aside; going back finds them."""
    first = jitdir.folder(tmp_path, at(site))
    (site / "triton-3.8.0.dist-info").rename(site / "triton-3.8.1.dist-info")
    second = jitdir.folder(tmp_path, at(site))
    (site / "triton-3.8.1.dist-info").rename(site / "triton-3.8.0.dist-info")

    assert second != first
    assert jitdir.folder(tmp_path, at(site)) == first


@pytest.mark.parametrize("file", ["vllm-0.33.0+spark.2026.11.p1a2b3c4d.cu130", "triton-3.8.0"])
def test_other_bytes_of_the_same_version_get_another_folder(site: Path, tmp_path: Path, file: str) -> None:
    """What FlashInfer #4489 is about: the version is the same, the files are not."""
    first = jitdir.folder(tmp_path, at(site))
    (site / f"{file}.dist-info" / "RECORD").write_text("changed,2\n")

    assert jitdir.folder(tmp_path, at(site)) != first


def test_python_and_nvcc_count_too(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler that FlashInfer calls is often the system's, which no installed package names."""
    seen = {jitdir.folder(tmp_path, at(site)), jitdir.folder(tmp_path, at(site, (3, 13)))}
    for release in ("13.0", "13.1"):
        home = tmp_path / f"cuda-{release}"
        (home / "bin").mkdir(parents=True)
        (home / "bin" / "nvcc").write_text(f"#!/bin/sh\necho 'release {release}'\n")
        (home / "bin" / "nvcc").chmod(0o755)
        monkeypatch.setenv("CUDA_HOME", str(home))
        seen.add(jitdir.folder(tmp_path, at(site)))
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.setenv("PATH", f"{tmp_path / 'cuda-13.0' / 'bin'}{os.pathsep}/usr/bin:/bin")

    assert len(seen) == 4
    assert jitdir.folder(tmp_path, at(site)) in seen


def test_an_nvcc_that_does_not_run_counts_as_none(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA_HOME that leads nowhere, and an nvcc that fails, are no error here; FlashInfer will say so when it needs one."""
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "nowhere"))
    without = jitdir.folder(tmp_path, at(site))
    for text in ("", "#!/bin/sh\nexit 1\n", "not a program"):
        home = tmp_path / "cuda"
        shutil.rmtree(home, ignore_errors=True)
        if text:
            (home / "bin").mkdir(parents=True)
            (home / "bin" / "nvcc").write_text(text)
            (home / "bin" / "nvcc").chmod(0o755)
        monkeypatch.setenv("CUDA_HOME", str(home))
        assert jitdir.folder(tmp_path, at(site)) == without


def test_every_cache_is_in_the_folder_unless_the_user_chose_a_place(site: Path, tmp_path: Path) -> None:
    """The variables lead below the build's folder, each to a place of its own; one that is set already stays the user's."""
    made = jitdir.variables(tmp_path, at(site), {"TRITON_CACHE_DIR": "/mine", "VLLM_CACHE_ROOT": ""})
    place = jitdir.folder(tmp_path, at(site))

    assert "TRITON_CACHE_DIR" not in made
    assert made["FLASHINFER_WORKSPACE_BASE"] == str(place)
    assert made["VLLM_CACHE_ROOT"] == str(place / "vllm")
    assert len(set(made.values())) == len(made) == len(jitdir.CACHES) - 1


def test_the_folders_of_other_builds_are_named(site: Path, tmp_path: Path) -> None:
    """They may be removed by hand; what is not a build's folder is not among them."""
    base = tmp_path / "caches"
    mine = jitdir.folder(base, at(site))
    for name in (mine.name, "0123456789abcdef", "notes", "0123"):
        (base / name).mkdir(parents=True)

    assert jitdir.others(base, at(site)) == [base / "0123456789abcdef"]
