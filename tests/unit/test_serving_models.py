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
    for commit in (COMMIT,):
        made = standin.model(place / "made")
        (place / "snapshots" / commit).mkdir(parents=True)
        (place / "blobs").mkdir(exist_ok=True)
        for file in made.iterdir():
            file.rename(place / "blobs" / file.name)
            (place / "snapshots" / commit / file.name).symlink_to(Path("../../blobs") / file.name)
        made.rmdir()
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(COMMIT)
    return tmp_path / "hub"


def found(hub: Path, revision: str = "", *, download: bool = False) -> models.LocalModel:
    return models.find(NAME, revision, {"HF_HUB_CACHE": str(hub)}, download=download)


def test_a_folder_is_served_as_it_is(tmp_path: Path) -> None:
    """Its weights are counted from the headers."""
    one = models.find(str(standin.model(tmp_path / "toy")), "", {})
    assert (one.checkpoint, one.weights, one.commit) == (tmp_path / "toy", 8, "")


def test_a_name_is_resolved_in_the_cache(hub: Path) -> None:
    """The pinned commit, else the one that was fetched last."""
    assert found(hub).path == found(hub, COMMIT).path == hub / "models--org--Toy-1" / "snapshots" / COMMIT
    (hub / "models--org--Toy-1" / "refs" / "main").unlink()
    assert found(hub).commit == COMMIT


def test_the_cache_is_where_the_hubs_client_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """HF_HUB_CACHE, HF_HOME, XDG_CACHE_HOME, home, in this order."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert models.cache_folder({"HF_HUB_CACHE": "/a", "HF_HOME": "/b"}) == Path("/a")
    assert models.cache_folder({"HF_HOME": "/b", "XDG_CACHE_HOME": "/c"}) == Path("/b/hub")
    assert models.cache_folder({"XDG_CACHE_HOME": "/c"}) == Path("/c/huggingface/hub")
    assert models.cache_folder({}) == tmp_path / ".cache" / "huggingface" / "hub"


@pytest.mark.parametrize("revision", [OTHER, "other", "../../../etc/passwd", "refs/\0"])
def test_a_commit_that_is_not_there_is_missing(hub: Path, revision: str) -> None:
    """Nothing is fetched, unless somebody allows vLLM to."""
    with refusal("model-missing", match="not in the model cache"):
        found(hub, revision)
    assert found(hub, revision, download=True).path == Path(NAME)


def test_a_half_downloaded_name_is_missing(hub: Path) -> None:
    """What is still on its way is named."""
    place = hub / "models--org--Toy-1"
    (place / "blobs" / "model.safetensors").rename(place / "blobs" / "0123.incomplete")
    with refusal("model-missing", match="cannot be used") as caught:
        found(hub)
    assert "half downloaded: 0123.incomplete" in caught.value.details
    assert found(hub, download=True).checkpoint is None


@pytest.mark.parametrize("name", ["nowhere", "./nowhere", "/nowhere/at/all", "~/nowhere", "a/b/c", "org/not-here"])
def test_what_is_nowhere_is_missing(name: str, tmp_path: Path) -> None:
    """A path or a name."""
    with refusal("model-missing"):
        models.find(name, "", {"HF_HUB_CACHE": str(tmp_path)})


def test_a_folder_that_is_no_model_says_what_it_lacks(tmp_path: Path) -> None:
    """An empty one, one without weights, one whose shards are on their way, one whose index names more than there is."""
    with refusal("model-missing", match=r"no config\.json"):
        models.find(str(tmp_path), "", {})
    (tmp_path / "config.json").write_text("{}")
    with refusal("model-missing", match="safetensors"):
        models.find(str(tmp_path), "", {})
    standin.model(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors.part").touch()
    with refusal("model-missing", match="half downloaded"):
        models.find(str(tmp_path), "", {})
    (tmp_path / "model-00002-of-00002.safetensors.part").unlink()
    index = {"weight_map": {"weight": "model.safetensors", "more": "model-00002-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with refusal("model-missing", match="model-00002"):
        models.find(str(tmp_path), "", {})


def test_a_shard_that_is_cut_off_is_damaged(tmp_path: Path) -> None:
    """Its header says more than there is."""
    folder = standin.model(tmp_path / "toy")
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-3])
    with refusal("checkpoint-invalid"):
        models.find(str(folder), "", {})


def test_weights_in_other_forms_are_vllms_affair(tmp_path: Path) -> None:
    """They are served; nobody here knows their size."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    assert models.find(str(tmp_path), "", {}).weights == 0
