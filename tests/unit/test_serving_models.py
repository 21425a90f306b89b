"""A model is a folder or a name in the cache of models; whole, or refused with what it lacks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.refusals import refusal
from tests.support import standin

from sparkwright.serving import models

NAME, COMMIT, OTHER = "org/Toy-1", "a" * 40, "b" * 40


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    """Return a cache of models with one, as the hub's client lays it out: links into blobs."""
    place = tmp_path / "hub" / f"models--{NAME.replace('/', '--')}"
    standin.model(place / "blobs")
    (place / "snapshots" / COMMIT).mkdir(parents=True)
    for file in (place / "blobs").iterdir():
        (place / "snapshots" / COMMIT / file.name).symlink_to(Path("../../blobs") / file.name)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(COMMIT)
    return tmp_path / "hub"


def found(hub: Path, revision: str = "", *, download: bool = False) -> models.LocalModel:
    return models.find(NAME, revision, {"HF_HUB_CACHE": str(hub)}, download=download)


def test_a_folder_is_served_as_it_is(tmp_path: Path) -> None:
    """Its weights are counted from the headers; those in other forms are vLLM's affair."""
    one = models.find(str(standin.model(tmp_path / "toy")), "", {})
    assert (one.path, one.weights, one.commit) == (tmp_path / "toy", 8, "")
    (tmp_path / "toy" / "model.safetensors").rename(tmp_path / "toy" / "pytorch_model.bin")
    assert models.find(str(tmp_path / "toy"), "", {}).weights == 0


def test_a_name_is_resolved_in_the_cache(hub: Path) -> None:
    """The pinned commit, else the one that was fetched last."""
    assert found(hub).path == found(hub, COMMIT).path == hub / "models--org--Toy-1" / "snapshots" / COMMIT


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"HF_HUB_CACHE": "/a", "HF_HOME": "/b"}, "/a"), ({"HF_HOME": "/b", "XDG_CACHE_HOME": "/c"}, "/b/hub"),
        ({"XDG_CACHE_HOME": "/c"}, "/c/huggingface/hub"), ({}, "~/.cache/huggingface/hub"),
    ],
)  # fmt: skip
def test_the_cache_is_where_the_hubs_client_keeps_it(variables: dict[str, str], folder: str) -> None:
    assert models.cache_folder(variables) == Path(folder).expanduser()


@pytest.mark.parametrize("revision", [OTHER, "other", "../../../etc/passwd", "refs/\0"])
def test_a_commit_that_is_not_there_is_missing(hub: Path, revision: str) -> None:
    """Nothing is fetched, unless somebody allows vLLM to."""
    with refusal("model-missing", match="not in the model cache"):
        found(hub, revision)
    assert found(hub, revision, download=True).path == Path(NAME)


def test_a_half_downloaded_name_is_missing(hub: Path) -> None:
    place = hub / "models--org--Toy-1"
    (place / "blobs" / "model.safetensors").rename(place / "blobs" / "0123.incomplete")
    with refusal("model-missing", match=r"no model\.safetensors"):
        found(hub)
    assert found(hub, download=True).checkpoint is None


@pytest.mark.parametrize("name", ["nowhere", "./nowhere", "~/nowhere", "a/b/c", "org/not-here"])
def test_what_is_nowhere_is_missing(name: str, tmp_path: Path) -> None:
    """A path or a name."""
    with refusal("model-missing"):
        models.find(name, "", {"HF_HUB_CACHE": str(tmp_path)})


INDEX = {"weight_map": {"weight": "model.safetensors", "more": "model-00002-of-00002.safetensors"}}


@pytest.mark.parametrize(
    ("file", "text", "match"),
    [
        ("config.json", None, r"no config\.json"), ("model.safetensors", None, "safetensors"),
        ("model-00002-of-00002.safetensors.part", "", "half downloaded"), ("model.safetensors.index.json", json.dumps(INDEX), "model-00002"),
    ],
)  # fmt: skip
def test_a_folder_that_is_no_model_says_what_it_lacks(tmp_path: Path, file: str, text: str | None, match: str) -> None:
    folder = standin.model(tmp_path / "toy")
    (folder / file).unlink() if text is None else (folder / file).write_text(text)
    with refusal("model-missing", match=match):
        models.find(str(folder), "", {})
