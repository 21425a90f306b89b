"""An image into a registry, and the digest by which the registry then has it: asked from it again, and not taken from what was sent."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from docker import DockerClient
from docker.errors import APIError

from sparkwright.builder import container
from sparkwright.core.console import console
from sparkwright.core.errors import SparkwrightError, UsageError
from sparkwright.operate.errors import ImageError
from sparkwright.operate.image.installed import patient
from sparkwright.operate.image.made import Made

_HOST = r"(?:(?=[^/]*[.:]|localhost[:/])[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?(?::[0-9]+)?/)?"
_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
#: As engines name a repository (distribution/reference), without tag or digest.
REPOSITORY = re.compile(rf"{_HOST}{_PART}(?:/{_PART})*")
TAG = re.compile(r"\w[\w.-]{0,127}", re.ASCII)
#: What engines and registries say where the line is the fault, and where the user is.
_UNREACHED = re.compile(
    r"connection refused|no such host|timeout|timed out|http response to https|no route|unreachable|certificate|EOF", re.I
)


def checked(repository: str) -> str:
    """Return *repository*; raise `UsageError` where it is not the name of one."""
    if not REPOSITORY.fullmatch(repository) or len(repository) > 255:
        todo = "Say HOST/NAME, in small letters and without a tag: the tag is the release's name."
        raise UsageError("usage", f"--push {repository!r:.200} is no repository.", todo=todo)
    return repository


def tag_of(release: str, platform: str) -> str:
    """Return the tag of a release's image in a registry: ``2026.11.3-arm64``."""
    return re.sub(r"[^A-Za-z0-9_.-]", "-", f"{release}-{platform.rpartition('/')[2]}")[:128]


def push(made: Made, repository: str, tag: str) -> str:
    """
    Push *made* to ``repository:tag``, and return the digest (``sha256:…``) by which the registry has it; credentials are docker's own.

    Raises:
        registry-unreachable, registry-refused: The registry did not take it. image-tag-taken: The tag is another image's there.
        image-digest-differs: Afterwards the registry names other bytes. engine-unreachable, engine-refused, disk-full: See there.
    """
    name = f"{repository}:{tag}"
    with container.connected() as reached, patient(reached), console.step(f"push {name}"):
        image = reached.images.get(made.id)
        _check_free(reached, name, repository, made.id)
        image.tag(repository, tag)
        sent = _send(reached, repository, tag)
        found = _asked(reached, name)
        if found != sent:
            raise ImageError(
                "image-digest-differs", f"{name} is another image than was pushed.", details=[f"pushed: {sent}", f"there:  {found}"]
            )
    return sent


def _check_free(reached: DockerClient, name: str, repository: str, id_: str) -> None:
    """Raise `image-tag-taken` where *name* is an image in the registry that is not this one."""
    there = _asked(reached, name)
    ours = reached.images.get(id_).attrs.get("RepoDigests") or []
    if there and f"{repository}@{there}" not in ours:
        raise ImageError("image-tag-taken", f"{name} is there already, as another image.", details=[f"there: {there}"])


def _asked(reached: DockerClient, name: str) -> str:
    """Return the digest of *name* in its registry; empty where the registry has no such name."""
    try:
        said: dict[str, Any] = reached.api.inspect_distribution(name)  # type: ignore[no-untyped-call]
        return str(said["Descriptor"]["digest"])
    except APIError as error:
        text = str(error.explanation or error)
        if re.search(r"manifest unknown|name unknown|not found|not known to registry", text, re.I):
            return ""
        raise _meaning(name, text) from error


def _send(reached: DockerClient, repository: str, tag: str) -> str:
    sizes: dict[str, tuple[int, int]] = {}
    digested = ""
    with console.progress("layers", 0, "bytes") as line:
        for news in reached.api.push(repository, tag=tag, stream=True, decode=True):
            if "error" in news:
                raise _meaning(f"{repository}:{tag}", str(news["error"]))
            digested = str((news.get("aux") or {}).get("Digest", "")) or digested
            _count(sizes, news)
            line.total = sum(total for _, total in sizes.values())
            line.update(sum(done for done, _ in sizes.values()))
    if not digested:
        raise ImageError("registry-refused", f"{repository}:{tag} was pushed, and the engine does not say as what.")
    return digested


def _count(sizes: dict[str, tuple[int, int]], news: Mapping[str, Any]) -> None:
    if total := (detail := news.get("progressDetail") or {}).get("total"):
        sizes[news.get("id", "")] = (detail.get("current", 0), total)


def _meaning(name: str, text: str) -> SparkwrightError:
    if _UNREACHED.search(text):
        return ImageError("registry-unreachable", f"The registry of {name} is not reached.", details=text.splitlines()[-5:])
    return container.translate_error(text, partial(ImageError, "registry-refused"), f"The registry does not take {name}.")
