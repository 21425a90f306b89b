"""pip and uv, the real ones, against the index as a static host serves it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import uv
from tests.support import indexdata, indexserver, wheels
from tests.support.indexdata import LACK, Made
from tests.support.indexserver import Served

TOOLS = ("pip", "uv")


class Shop:
    """
    An index with four releases of vllm, of which the third is yanked and the fourth a candidate; served.

    Attributes:
        served: By a host that knows files only; *negotiating*: by one that sends JSON to those who accept it.
    """

    def __init__(self, folder: Path) -> None:
        self.made = Made(folder / "index")
        for number in range(1, 5):
            own = wheels.plain(folder, "vllm", f"0.33.0+spark.{number}", requires=["flashinfer-python>=0.7"])
            kernels = wheels.plain(folder, "flashinfer-python", f"0.7.2+spark.{number}")
            self.made.publish(f"s.{number}", [kernels, own], missing=[LACK])
        for number in (1, 2, 3):
            self.made.promote(f"s.{number}")
        self.made.yank("s.3", "wrong answers at <batch 1>")
        self.root = self.made.live()

    def wheel(self, project: str, number: int) -> str:
        """Return the file name of the wheel of *project* in the release *number*."""
        return next(one.filename for one in self.made.releases[f"s.{number}"].wheels if one.project == project)


@pytest.fixture(scope="module", name="shop")
def _shop(tmp_path_factory: pytest.TempPathFactory) -> Shop:
    return Shop(tmp_path_factory.mktemp("shop"))


@pytest.fixture(name="served")
def _served(shop: Shop) -> Iterator[Served]:
    with indexserver.serve(shop.root) as served:
        yield served


@pytest.fixture(name="negotiating")
def _negotiating(shop: Shop) -> Iterator[Served]:
    with indexserver.serve(shop.root, negotiate=True) as served:
        yield served


def run(tool: str, *words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run pip, or uv's pip, without anybody's configuration, cache or other index."""
    program = [sys.executable, "-m", "pip"] if tool == "pip" else [uv.find_uv_bin(), "pip"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))}
    environment |= {"PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "UV_NO_CONFIG": "1"}
    environment |= {"PIP_NO_CACHE_DIR": "1", "UV_NO_CACHE": "1", "UV_PYTHON": sys.executable, "NO_COLOR": "1"}
    return subprocess.run([*program, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False)


def install(tool: str, index: str, *words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Install *words* from the simple API at *index* into ``site`` below *folder*."""
    folder.mkdir(exist_ok=True)
    return run(tool, "install", "--target", str(folder / "site"), "--index-url", index, *words, folder=folder)


def installed(folder: Path) -> dict[str, str]:
    """Return what lies in ``site``: project → version."""
    found = [path.name.removesuffix(".dist-info").split("-") for path in (folder / "site").glob("*.dist-info")]
    return {name.replace("_", "-"): version for name, version in found}


@pytest.mark.parametrize("tool", TOOLS)
def test_the_newest_verified_set_is_installed(tool: str, shop: Shop, served: Served, tmp_path: Path) -> None:
    """From ``verified``, a name alone gives the newest that is not yanked; its METADATA is read first, and no other wheel is fetched."""
    done = install(tool, f"{served.url}verified/simple/", "vllm", folder=tmp_path)

    assert done.returncode == 0, done.stderr
    assert installed(tmp_path) == {"vllm": "0.33.0+spark.2", "flashinfer-python": "0.7.2+spark.2"}
    fetched = [Path(path).name for path in served.paths if path.endswith(".whl")]
    assert sorted(set(fetched)) == sorted([shop.wheel("vllm", 2), shop.wheel("flashinfer-python", 2)])
    first = [Path(path).name for path in served.paths if path.startswith("/files/")]
    assert first.index(f"{shop.wheel('vllm', 2)}.metadata") < first.index(shop.wheel("vllm", 2))


@pytest.mark.parametrize("tool", TOOLS)
def test_a_yanked_version_is_taken_only_by_its_name(tool: str, served: Served, tmp_path: Path) -> None:
    """A range passes over it; the exact version is installed (PEP 592), and pip shows the reason."""
    index = f"{served.url}verified/simple/"
    ranged = install(tool, index, "vllm>=0.33,<0.34", "--no-deps", folder=tmp_path / "range")
    exact = install(tool, index, "vllm==0.33.0+spark.3", "--no-deps", folder=tmp_path / "exact")

    assert ranged.returncode == 0, ranged.stderr
    assert installed(tmp_path / "range") == {"vllm": "0.33.0+spark.2"}
    assert exact.returncode == 0, exact.stderr
    assert installed(tmp_path / "exact") == {"vllm": "0.33.0+spark.3"}
    if tool == "pip":
        assert "wrong answers at <batch 1>" in exact.stdout + exact.stderr


@pytest.mark.parametrize("tool", TOOLS)
def test_candidates_come_from_their_own_root(tool: str, served: Served, tmp_path: Path) -> None:
    """What is not proved is installed by nobody who did not ask for ``candidate``."""
    wanted = "vllm==0.33.0+spark.4"
    refused = install(tool, f"{served.url}verified/simple/", wanted, "--no-deps", folder=tmp_path / "verified")
    taken = install(tool, f"{served.url}candidate/simple/", wanted, "--no-deps", folder=tmp_path / "candidate")

    assert refused.returncode != 0
    assert taken.returncode == 0, taken.stderr
    assert installed(tmp_path / "candidate") == {"vllm": "0.33.0+spark.4"}


@pytest.mark.parametrize("tool", TOOLS)
def test_json_is_taken_where_the_host_offers_it(tool: str, shop: Shop, negotiating: Served, tmp_path: Path) -> None:
    """A host that negotiates sends PEP 691 to both, and both install from it, by the metadata that it names."""
    done = install(tool, f"{negotiating.url}verified/simple/", "vllm", folder=tmp_path)

    assert done.returncode == 0, done.stderr
    assert installed(tmp_path)["vllm"] == "0.33.0+spark.2"
    asked = next(one for one in negotiating.asked if one.path == "/verified/simple/vllm/")
    assert indexserver.JSON in asked.headers["accept"]
    assert any(path.endswith(f"{shop.wheel('vllm', 2)}.metadata") for path in negotiating.paths)


def test_uv_resolves_without_a_wheel(served: Served, tmp_path: Path) -> None:
    """`uv pip compile` reads METADATA files only, and pins both with their hashes."""
    (tmp_path / "in.txt").write_text("vllm\n")
    index = f"{served.url}verified/simple/"
    done = run("uv", "compile", "--generate-hashes", "--no-header", "--index-url", index, "in.txt", folder=tmp_path)

    assert done.returncode == 0, done.stderr
    assert "vllm==0.33.0+spark.2" in done.stdout
    assert done.stdout.count("--hash=sha256:") == 2
    assert not [path for path in served.paths if path.endswith(".whl")]


def test_pip_resolves_without_a_wheel(served: Served, tmp_path: Path) -> None:
    """So does a dry run of pip, whose report has the hashes of the index."""
    words = ["--dry-run", "--quiet", "--ignore-installed", "--report", "report.json"]
    done = run("pip", "install", *words, "--index-url", f"{served.url}verified/simple/", "vllm", folder=tmp_path)

    assert done.returncode == 0, done.stderr
    report = msgspec.json.decode((tmp_path / "report.json").read_bytes())
    assert {one["metadata"]["name"] for one in report["install"]} == {"vllm", "flashinfer-python"}
    assert all(one["download_info"]["archive_info"]["hashes"]["sha256"] in one["download_info"]["url"] for one in report["install"])
    assert [path for path in served.paths if path.endswith(".metadata")]
    assert not [path for path in served.paths if path.endswith(".whl")]


@pytest.mark.parametrize("tool", TOOLS)
def test_the_requirements_of_a_release_install_it(tool: str, shop: Shop, served: Served, tmp_path: Path) -> None:
    """A release is installed from its own root by its requirements, by hash, as the pages tell people; even one that is yanked."""
    release = next(one.release for one in shop.made.manifest.entries if one.name == "s.3")
    requirements = f"{served.url}b/{release}/requirements.aarch64.txt"
    done = install(tool, f"{served.url}b/{release}/simple/", "--require-hashes", "-r", requirements, folder=tmp_path)

    assert done.returncode == 0, done.stderr
    assert installed(tmp_path) == {"vllm": "0.33.0+spark.3", "flashinfer-python": "0.7.2+spark.3"}
    assert not [path for path in served.paths if path.startswith(("/verified", "/candidate"))]


@pytest.mark.parametrize("tool", TOOLS)
def test_a_changed_wheel_is_refused_by_its_hash(tool: str, shop: Shop, tmp_path: Path) -> None:
    """Other bytes under the name of a wheel are refused by pip and uv alone, without anything of ours."""

    other = wheels.plain(tmp_path / "other", "vllm", "0.33.0+spark.2", files={"vllm/more.py": b"import this\n"})
    assert other.name == shop.wheel("vllm", 2)
    with indexserver.serve(shop.root, fault=lambda path: other.read_bytes() if path.endswith(other.name) else None) as served:
        done = install(tool, f"{served.url}verified/simple/", "vllm==0.33.0+spark.2", "--no-deps", folder=tmp_path)

    assert done.returncode != 0
    assert "hash" in done.stderr.lower()
    assert installed(tmp_path) == {}


@pytest.mark.parametrize("tool", TOOLS)
def test_changed_metadata_is_refused(tool: str, shop: Shop, tmp_path: Path) -> None:
    """A METADATA file that is not the one that the page names is refused, and nothing is installed."""
    name = f"{shop.wheel('vllm', 2)}.metadata"
    other = wheels.metadata("vllm", "0.33.0+spark.2", ["flashinfer-python==0.7.2+spark.1"]).encode()
    with indexserver.serve(shop.root, fault=lambda path: other if path.endswith(name) else None) as served:
        done = install(tool, f"{served.url}verified/simple/", "vllm==0.33.0+spark.2", folder=tmp_path)

    assert done.returncode != 0
    assert "sha256" in done.stderr
    assert installed(tmp_path) == {}


def test_every_page_is_read_by_the_reference_parser(shop: Shop, served: Served) -> None:
    """pypi-simple reads the same from the HTML and the JSON page: names, hashes, sizes where there are any, yanks, and metadata."""
    from pypi_simple import ProjectPage

    for channel in ("verified", "candidate"):
        folder, url = shop.root / channel / "simple/vllm", f"{served.url}{channel}/simple/vllm/"
        html = ProjectPage.from_html("vllm", (folder / "index.html").read_text(), base_url=url)
        json = ProjectPage.from_json_data(msgspec.json.decode((folder / "index.json").read_bytes()), base_url=url)

        assert html.repository_version == json.repository_version == "1.4"
        for one, other in zip(html.packages, json.packages, strict=True):
            for field in ("filename", "url", "digests", "requires_python", "is_yanked", "yanked_reason", "metadata_digests"):
                assert getattr(one, field) == getattr(other, field), field
            assert other.size
            assert other.upload_time
    assert indexdata.manifest_of(shop.root) == shop.made.manifest
