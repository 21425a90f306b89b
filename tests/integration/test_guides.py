"""Every command of the guides, run as it stands in them: by bash, with the real program, on the demo's upstreams or on a small index."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest
from tests.support import guides, indexserver, publishing, standin, wheels
from tests.support.publishing import Place
from tests.support.workflows import checkout, git
from tests.unit.conftest import Host

from sparkwright.core import strict_yaml
from sparkwright.core.github import ADDRESS
from sparkwright.demo import upstreams
from sparkwright.forks.context import RunContext

pytestmark = [pytest.mark.toolchain, pytest.mark.workflows]

DOCS = Path(__file__).parents[2] / "docs" / "guides"


@pytest.fixture(name="environment")
def _environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return the environment of a reader: this program is on the path, and git knows who they are."""
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "gitconfig"))
    (tmp_path / "gitconfig").write_text("[user]\n\tname = Reader\n\temail = reader@example.org\n")
    made = {name: value for name, value in os.environ.items() if not name.startswith(("SPARKWRIGHT_", "PYTEST_"))}
    return made | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "SPARKWRIGHT_STATE_DIR": str(tmp_path / "state"),
        "SPARKWRIGHT_CACHE_DIR": str(tmp_path / "cache"),
    }  # fmt: skip


@pytest.fixture(name="lab")
def _lab(demo_session: RunContext, environment: dict[str, str], tmp_path: Path) -> Path:
    """Return a checkout whose only stack is the demo, with all that it needs in the store."""
    demo = demo_session.project.root.parent
    work = tmp_path / "checkout"
    git(tmp_path, "clone", "--quiet", str(checkout(tmp_path / "made", demo / "project")), str(work))
    (tmp_path / "config.yaml").write_text(strict_yaml.dump({"mirrors": {upstreams.HOST: f"{demo}/upstreams/"}}))
    environment |= {"SPARKWRIGHT_CONFIG": str(tmp_path / "config.yaml"), "SPARKWRIGHT_CACHE_DIR": str(demo / "store")}
    return work


DEMO = {"2026.11.1": "demo.1", "2026.11": "demo", "toy-cpu": "toy-cpu"}


@pytest.mark.timeout(1500)
def test_build_and_then_run_a_lab(lab: Path, environment: dict[str, str]) -> None:
    """Wheels are built and proved as far as this machine can; then the same checkout publishes them, looks after them, and makes a site."""
    (lab / "model").mkdir()
    # The gates that serve look for a distribution named vllm, and the demo's is mini-vllm.
    guides.run(DOCS / "build.md", lab, environment, {**DEMO, "MODEL": "model"}, here={"--recipe": "environment-unusable"})
    said = guides.run(DOCS / "lab.md", lab, environment, {**DEMO, "OWNER/NAME": "acme/wheels", "https://INDEX/": "https://releases.example/"})

    assert (lab / "site" / "index.html").is_file()
    assert any("systemd" in one for one in said)


def test_add_a_patch_and_take_it_out(lab: Path, environment: dict[str, str], tmp_path: Path) -> None:
    """A commit becomes a patch of the series that applies exactly, and goes again."""
    (tmp_path / "message").write_text("Mine\n\nAs told.\n\nUpstream-Status: Pending\nReason: the test wants it\nDrop-When: the test ends\n")
    editor = tmp_path / "editor"
    editor.write_text('#!/bin/sh\nsed -i "1s|^|// mine\\n|" "$1"\n')
    editor.chmod(0o755)
    environment |= {"EDITOR": str(editor), "MESSAGE": str(tmp_path / "message")}
    source = next(path for path in sorted((Path(upstreams.__file__).parent / "upstreams" / "vllm").rglob("*.cu")))
    name = source.relative_to(Path(upstreams.__file__).parent / "upstreams" / "vllm").as_posix()
    guides.run(DOCS / "patch.md", lab, environment, {**DEMO, "csrc/cache_kernels.cu": name})

    assert git(lab, "status", "--porcelain", "forks") == ""


def test_pick_a_pull_request(environment: dict[str, str], tmp_path: Path) -> None:
    """A pull request is pinned, carried, looked at, pinned anew after it moved, and dropped."""
    host = Host(tmp_path / "host")
    host.work.commit({"a.txt": b"one\n", "b.txt": b"b\n"}, "Begin")
    host.lock()
    host.pull(7, {"a.txt": b"one\ntwo\n"}, start="v1")
    (rules := host.root / "build" / host.stack / "archs.yaml").parent.mkdir(parents=True)
    rules.write_text("rules: []\n")
    mirrors = {host.url: str(host.path), ADDRESS: "http://127.0.0.1:9"}
    (tmp_path / "config.yaml").write_text(strict_yaml.dump({"mirrors": mirrors}))
    environment |= {"SPARKWRIGHT_CONFIG": str(tmp_path / "config.yaml"), "SPARKWRIGHT_CACHE_DIR": str(host.cache)}
    places = {"vllm#40082": f"{host.fork}#7", "--fork vllm": f"--fork {host.fork}", "2026.05": host.stack}
    found = guides.commands(DOCS / "pick.md")
    page = DOCS / "pick.md"
    guides.run(page, host.root, environment, places, only=found[:4])
    host.pull(7, {"a.txt": b"one\nthree\n"}, start="v1")
    guides.run(page, host.root, environment, places, only=found[4:])

    assert not [one for one in host.ledger.records if one.stacks]


@pytest.fixture(name="place")
def _place(tmp_path: Path, environment: dict[str, str]) -> Iterator[Place]:
    """Return a publisher with two verified releases, served where their manifest says."""
    (tmp_path / "served").mkdir()
    with publishing.bare_index(tmp_path / "bare") as packages, indexserver.serve(tmp_path / "served") as served:
        os.environ["SPARKWRIGHT_INDEX_URL"] = packages
        made = Place(tmp_path / "served", f"{served.url}index/")
        made.publish(wheels.release(tmp_path / "1"))
        made.publish(wheels.release(tmp_path / "2", label=f"{wheels.LABEL}.1"))
        yield made


def test_use_the_wheels(place: Place, environment: dict[str, str], tmp_path: Path) -> None:
    """Somebody without a checkout installs the newest set, sees what would be served, looks after it, goes back and leaves."""
    home = tmp_path / "reader"
    home.mkdir()
    (home / "models").mkdir()
    standin.model(home / "models" / "qwen")
    installer = next(iter((place.root / "verified" / "simple" / "sparkwright").glob("*.html"))).read_text()
    version = unquote(installer.partition("sparkwright-")[2].partition("-py3")[0])
    places = {"https://INDEX/": place.url, "sparkwright==0.1.0+1": f"sparkwright=={version}", "qwen3.6-35b-a3b-nvfp4-mtp3": "toy-cpu"}
    said = guides.run(DOCS / "use.md", home, environment, places)

    assert "2026.11.2" in said[2]
    assert not list((home / "spark").glob("lib/python*/site-packages/vllm*"))
