"""Every command of the guides, run as it stands in them: by bash, with the real program, on the demo's upstreams or on a small index."""

import os
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from tests.support import guides, processes, publisher, standin, tufindex, wheels
from tests.unit.conftest import Host, Repository
from tests.unit.test_repository import ROOT, tracked

from sparkwright.cli.demo import SHARED
from sparkwright.client.environment import Prefix
from sparkwright.core import store, strict_yaml
from sparkwright.demo import upstreams
from sparkwright.forks.context import RunContext
from sparkwright.release.repository import IndexFolder

pytestmark = [pytest.mark.toolchain, pytest.mark.guides]

DOCS = ROOT / "docs" / "howto"


@pytest.fixture(name="environment")
def _environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return the environment of a reader: this program is on the path, and git knows who they are."""
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "gitconfig"))
    (tmp_path / "gitconfig").write_text("[user]\n\tname = Reader\n\temail = reader@example.org\n")
    # With the tests' own PYTHONPATH, an installed client would be this checkout, which carries no index.
    made = {name: value for name, value in os.environ.items() if not name.startswith(("SPARKWRIGHT_", "PYTEST_", "PYTHONPATH"))}
    call = f"import sys; sys.path.insert(0, {str(DOCS.parents[1] / 'ci')!r}); from sparkwright.cli.main import main; sys.exit(main())"
    program = processes.script(tmp_path / "bin" / "sparkwright", f"exec {sys.executable} -P -c {shlex.quote(call)} \"$@\"")
    return made | {
        "PATH": f"{program.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}", "SPARKWRIGHT_STATE_DIR": str(tmp_path / "state"),
        "SPARKWRIGHT_CACHE_DIR": str(tmp_path / "cache"),
    }  # fmt: skip


@pytest.fixture(name="lab")
def _lab(demo_session: RunContext, environment: dict[str, str], tmp_path: Path) -> Path:
    """Return a checkout whose only stack is the demo, with all that it needs in the store."""
    demo = demo_session.project.root.parent
    work = tmp_path / "checkout"
    for path in tracked():
        name = path.relative_to(ROOT)
        reviewed = name.parts[0] in ("forks", "build", "cherry_picks") or name.parts[:2] == ("ci", "audit")
        if name.parts[0] not in ("tests", "docs") and not (reviewed and len(name.parts) > 2):
            (work / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, work / name)
    shutil.copytree(demo / "project", work, dirs_exist_ok=True)
    Repository(work).commit({}, "The lab's checkout")
    configure(environment, tmp_path, demo / "store", {upstreams.HOST: f"{demo}/upstreams/"})
    return work


def configure(environment: dict[str, str], folder: Path, cache: Path, mirrors: dict[str, str]) -> None:
    """Let the reader's configuration name *mirrors*, and the environment *cache*."""
    (folder / "config.yaml").write_text(strict_yaml.dump({"mirrors": mirrors}))
    environment |= {"SPARKWRIGHT_CONFIG": str(folder / "config.yaml"), "SPARKWRIGHT_CACHE_DIR": str(cache)}


def test_the_first_hour(user_store: store.Store, environment: dict[str, str], tmp_path: Path) -> None:
    """The demo runs; a reader publishes a second release from it, installs both, and rolls back."""
    (home := tmp_path / "reader").mkdir()
    (cache := tmp_path / "cache").mkdir()
    for name in SHARED:
        (cache / name).symlink_to(user_store.folder(name), target_is_directory=True)
    environment |= {"HOME": str(home), "XDG_CACHE_HOME": str(home / ".cache")}
    root = "$(sha256sum <releases/metadata/1.root.json | head -c 64)"
    said = guides.run(
        DOCS.parent / "tutorial.md",
        DOCS.parents[1],
        environment,
        {"~/.cache/sparkwright": str(cache), "FINGERPRINT": root},
    )

    for number, text in ((0, "fails as expected: verified-refused"), (6, "demo.2 is installed"), (8, "demo.1 was yanked"), (9, "demo.2 is current")):
        assert text in said[number]
    assert not (home / "spark-demo").exists()


DEMO = {"2026.11.1": "demo.1", "2026.11": "demo", "toy-cpu": "toy-cpu"}


@pytest.mark.timeout(1500)
def test_build_and_then_run_a_lab(lab: Path, environment: dict[str, str]) -> None:
    """Wheels are built and proved as far as this machine can; then the same checkout publishes them."""
    (lab / "model").mkdir()
    # Model and data set of the recipe are not on this machine.
    guides.run(
        DOCS / "build.md",
        lab,
        environment,
        {**DEMO, "MODEL": "model"},
        here={"--recipe": "gate-unprepared"},
    )
    guides.run(
        DOCS / "run-a-lab.md",
        lab,
        environment,
        {
            **DEMO,
            "OWNER/NAME": "acme/wheels",
            "https://INDEX/": "https://releases.example/",
            # The wheels stay in the folder, where the test reads them.
            " --files https://github.com/OWNER/WHEELS/releases/download/TAG": "",
            "FINGERPRINT": "$(sha256sum <published/index/metadata/1.root.json | head -c 64)",
        },
        here={"release promote": "verified-refused"},
    )

    assert (lab / "published" / "index" / "index.html").is_file()


def test_add_a_patch_and_take_it_out(
    lab: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    """A commit becomes a patch of the series that applies exactly, and goes again."""
    (tmp_path / "message").write_text(
        "Mine\n\nAs told.\n\nUpstream-Status: Pending\nReason: the test wants it\nDrop-When: the test ends\n"
    )
    editor = processes.script(tmp_path / "editor", 'sed -i "1s|^|// mine\\n|" "$1"')
    environment |= {"EDITOR": str(editor), "MESSAGE": str(tmp_path / "message")}
    tree = Path(upstreams.__file__).parent / "upstreams" / "vllm"
    name = min(tree.rglob("*.cu")).relative_to(tree).as_posix()
    guides.run(DOCS / "write-a-patch.md", lab, environment, {**DEMO, "csrc/cache_kernels.cu": name})

    assert Repository(lab).git("status", "--porcelain", "forks") == ""


def test_pick_a_pull_request(environment: dict[str, str], tmp_path: Path) -> None:
    """A pull request is pinned, carried, looked at, pinned anew after it moved, and dropped."""
    host = Host(tmp_path / "host")
    host.work.commit({"a.txt": b"one\n", "b.txt": b"b\n"}, "Begin")
    host.lock()
    host.pull(7, {"a.txt": b"one\ntwo\n"}, start="v1")
    (host.root / "build" / host.stack / "archs.yaml").write_text("rules: []\n")
    configure(environment, tmp_path, host.cache, {host.url: str(host.path)})
    places = {
        "vllm#40082": f"{host.fork}#7",
        "--fork vllm": f"--fork {host.fork}",
        "2026.05": host.stack,
    }
    page = DOCS / "carry-a-pull-request.md"
    found = guides.commands(page)
    guides.run(page, host.root, environment, places, only=found[:3])
    host.pull(7, {"a.txt": b"one\nthree\n"}, start="v1")
    guides.run(page, host.root, environment, places, only=found[3:])

    assert not [one for one in host.ledger.records if one.stacks]


def test_use_the_wheels(environment: dict[str, str], tmp_path: Path) -> None:
    """A user without a checkout installs one of two releases with the client, pip and uv, and goes back."""
    home = tmp_path / "reader"
    (home / "models").mkdir(parents=True)
    standin.model(home / "models" / "qwen")
    environment |= {"HOME": str(home), "XDG_DATA_HOME": str(home / ".local" / "share")}
    (tmp_path / "index").mkdir()
    with tufindex.serve(tmp_path / "index") as url, publisher.index_owner(tmp_path, url) as owner:
        environment |= owner.environment
        owner.publish(wheels.release(tmp_path / "1"))
        owner.publish(wheels.release(tmp_path / "2", label=f"{wheels.LABEL}.1"))
        release = owner.index.entries["2026.11.2"].release
        [wheel] = [wheel for wheel in release.wheels if wheel.project == "vllm"]
        [client] = owner.index.facts.clients
        said = guides.run(
            DOCS / "install.md",
            home,
            environment,
            {
                "https://INDEX/files/SHA256/pylock.aarch64.toml": owner.url + release.locks[0].path,
                "https://INDEX/": owner.url,
                "sparkwright-install==0.1.0+1": f"sparkwright-install=={client.version}",
                "FINGERPRINT": owner.index.fingerprint,
                "qwen3.6-35b-a3b-nvfp4-mtp3": "toy-cpu",
                "vllm==0.33.0+spark.2026.11.pf71f110a.cu130": f"vllm=={wheel.version}",
            },
            # The small wheel of vLLM has no program.
            here={"vllm serve": "tool-missing", "--warm": "pack-unknown"},
        )

    assert "2026.11.2" in said[2]
    prefix = Prefix(home / ".local" / "share" / "sparkwright")
    assert (prefix.current, [*prefix.installed()]) == ("2026.11.2", ["2026.11.2"])


@pytest.mark.skipif(not shutil.which("rsync"), reason="rsync is not here")
def test_publish_and_rotate(environment: dict[str, str], tmp_path: Path) -> None:
    """Wheels become a candidate, are promoted and yanked; keys are rotated; a copy is made."""
    wheels.release(tmp_path / "dist")
    with publisher.bare_index(tmp_path / "packages") as address:
        environment |= {"SPARKWRIGHT_INDEX_URL": address, "UV_CACHE_DIR": str(tmp_path / "uv")}
        places = {
            "https://INDEX/": publisher.URL,
            "HOST:INDEX/metadata/": "copy/metadata/",
            "HOST:INDEX/": "copy/",
            "INDEX": "index",
        }
        guides.run(DOCS / "publish.md", tmp_path, environment, places)

    index = IndexFolder(tmp_path / "copy")
    assert (index.entries["2026.11.1"].state.yanked != "", index.root and index.root.signed.version) == (True, 3)
