"""What would run is decided from what is here, and said with what it rests on: the set, the wheel, the figures, the plan."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import yaml
from tests.refusals import refusal
from tests.support import standin

from sparkwright.client import environment as client
from sparkwright.core.files import sha256_bytes
from sparkwright.serving import environment as environments
from sparkwright.serving import shown
from sparkwright.serving.resolve import Ready, resolved
from sparkwright.serving.wish import Where, Wish

ROOT = Path(__file__).parents[2]
WHEEL, OTHER = "a" * 64, "b" * 64
FIGURE = {"cell": "32/64 c1", "metric": "tpot", "value": 50.0, "unit": "tok/s", "runs": [49.0, 51.0]}
REPORT = {"source": "the gate", "host": "h", "stack": "s", "times": 5, "wheel": WHEEL, "figures": [FIGURE]}


class World:
    """An environment, a model, and reviewed data that may be edited."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.environment = folder, folder / "prefix" / "releases" / "spark.1"
        self.python = standin.environment(self.environment)
        self.model = standin.model(folder / "toy")
        for part in ("recipes", "gates"):
            shutil.copytree(ROOT / "ci" / part, folder / "data" / "ci" / part)

    @property
    def site(self) -> Path:
        return next(self.environment.glob("lib/python3.*/site-packages"))

    def ready(self, recipe: str = "toy-cpu", **said: object) -> Ready:
        wish = Wish(recipe=recipe, model=str(self.model), **said)  # type: ignore[arg-type]
        return resolved(wish, Where(self.python, self.folder / "data"))

    def too_large(self, recipe: str) -> Ready:
        """Ask for a recipe whose cache is larger than the memory of any machine."""
        plan = yaml.safe_load((self.folder / "data" / "ci" / "recipes" / f"{recipe}.yaml").read_text())["plan"]
        self.edit(recipe, plan={**plan, "cache": 4000})
        return self.ready(recipe)

    def edit(self, recipe: str, **changes: object) -> None:
        """Change fields of a recipe's file."""
        path = self.folder / "data" / "ci" / "recipes" / f"{recipe}.yaml"
        path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), **changes}))

    def install(self, channel: str = "verified", version: str = standin.VERSION) -> None:
        """Mark the stand-in as a release that `install` made."""
        listing = msgspec.json.encode(client.describe(self.environment))
        marker = client.Marker(
            name="spark.1",
            folder=str(self.environment.resolve()),
            index="https://example.org/",
            python="3.11.2",
            key="c" * 64,
            packages={"vllm": version},
            channel=channel,  # type: ignore[arg-type]
            wheels={"vllm": WHEEL},
            listing=sha256_bytes(listing),
        )
        (self.environment / client.LISTING).write_bytes(listing)
        (self.environment / client.MARKER).write_bytes(msgspec.json.encode(marker))


@pytest.fixture(name="world")
def _world(tmp_path: Path) -> World:
    return World(tmp_path)


def says(ready: Ready, text: str) -> bool:
    return any(text in warning for warning in ready.warnings)


def test_stock_vllm_is_served_and_called_unproved(world: World) -> None:
    """Nothing is known of its wheel, so nothing is claimed."""
    ready = world.ready()
    assert says(ready, "nothing about it is proved")
    assert shown.document(ready, "log")["wheel"] == ""
    assert ("release", "not installed by sparkwright: unproved") in shown.rows(ready, "log")


def test_an_installed_set_is_told_by_its_digest(world: World) -> None:
    """Release, channel and wheel; a candidate is called one."""
    world.install("candidate")
    ready = world.ready()
    assert shown.document(ready, "log")["wheel"] == WHEEL
    assert shown.document(ready, "log")["release"] == "spark.1"
    assert says(ready, "spark.1 is a candidate")
    assert not says(ready, "nothing about it is proved")


def test_figures_count_for_the_wheel_that_they_were_measured_with(world: World) -> None:
    """With another digest, or with one that nobody recorded, it is said that they were not measured with it."""
    ours = [REPORT]
    world.edit("toy-cpu", ours=ours)
    assert says(world.ready(), f"were measured with wheel {WHEEL[:12]}; nobody recorded which wheel is installed: not measured here")
    world.install()
    assert not says(world.ready(), "measured")
    world.edit("toy-cpu", ours=[{**REPORT, "wheel": OTHER}])
    assert says(world.ready(), f"were measured with wheel {OTHER[:12]}; {WHEEL[:12]} is installed: not measured here")
    world.edit("toy-cpu", ours=[])
    assert says(world.ready(), "was not measured by this project")


def test_changed_release_is_reported(world: World) -> None:
    """An edited file, another version over it; an environment without its marker is nobody's."""
    world.install()
    assert environments.changes(environments.examine(world.python)) == []
    (world.site / "vllm" / "__init__.py").write_text("edited = True\n")
    found = environments.changes(environments.examine(world.python))
    assert any(text.endswith("vllm/__init__.py") for text in found)
    world.install(version="0.32.0")
    assert says(world.ready(), "installed 0.32.0: something replaced it")
    (world.environment / client.MARKER).write_text("{")
    assert says(world.ready(), "nothing about it is proved")


def test_what_is_said_on_top_changes_the_plan_and_is_held_against_the_machine(world: World) -> None:
    """A share that leaves no floor is refused like one of the recipe's own."""
    ready = world.ready(length=512, requests=2, share=0.5)
    assert ready.launch.flags[:3] == ("--max-model-len=512", "--max-num-seqs=2", "--gpu-memory-utilization=0.5")
    with refusal("recipe-unfit", match="cannot be served here as it is") as caught:
        world.ready(share=1.0)
    assert any(line.startswith("memory-utilization: ") for line in caught.value.details)


def test_a_plain_model_keeps_a_tenth_free(world: World) -> None:
    """Three quarters of the memory are vLLM's, where nobody says otherwise or pins the cache."""
    assert world.ready("").launch.flags == ("--gpu-memory-utilization=0.75",)
    assert world.ready("", share=0.6, length=64).launch.flags == ("--gpu-memory-utilization=0.6", "--max-model-len=64")
    assert world.ready("", flags=("--kv-cache-memory-bytes=1000000",)).launch.flags == ("--kv-cache-memory-bytes=1000000",)
    assert says(world.ready("", share=0.95), "memory-utilization")
    assert world.ready("").name == "toy"


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        (lambda world: world.ready("no-such-recipe"), "usage"),
        (lambda world: resolved(Wish(), Where(world.python, world.folder / "data")), "usage"),
        (lambda world: resolved(Wish(recipe="toy-cpu"), Where(world.python, world.folder / "data")), "usage"),
        (lambda world: world.ready("qwen3-vl-235b-nvfp4"), "usage"),
        (lambda world: world.ready("", nodes=2), "usage"),
        (lambda world: world.ready("", name="-x"), "usage"),
        (lambda world: world.too_large("qwen3-next-80b-nvfp4-marlin"), "recipe-unfit"),
        (lambda world: resolved(Wish(recipe="qwen3-next-80b-nvfp4-marlin"), Where(world.python, world.folder / "data")), "model-missing"),
        (lambda world: resolved(Wish(model="x"), Where(world.folder / "python", world.folder / "data")), "environment-unusable"),
    ],
)
def test_what_cannot_be_served_is_refused(said: Callable[[World], Ready], kind: str, world: World) -> None:
    """Each with a failure of its own."""
    with refusal(kind):
        said(world)


def test_an_environment_of_another_release_is_refused_by_the_recipe(tmp_path: Path) -> None:
    """A recipe knows releases, and guesses nothing about others; without vLLM there is nothing to serve with."""
    world = World(tmp_path)
    (world.site / f"vllm-{standin.VERSION}.dist-info").rename(world.site / "vllm-0.12.0.dist-info")
    (world.site / "vllm-0.12.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.12.0\n")
    with refusal("recipe-unfit", match=r"does not know vLLM '0\.12\.0'"):
        world.ready()
    shutil.rmtree(world.site / "vllm-0.12.0.dist-info")
    with refusal("environment-unusable", match="no vLLM"):
        world.ready()
