"""The builder image: from a base that is named by digest, with a network or without one, or a reason why not."""

from __future__ import annotations

import dataclasses

import pytest
from docker import DockerClient
from tests.refusals import refusal

from sparkwright.builder import container, container_build
from sparkwright.forks.context import RunContext

pytestmark = pytest.mark.containers

DIGEST = "sha256:" + "0123456789abcdef" * 4


def test_a_complete_base_needs_no_network(contained_demo: RunContext, engine: DockerClient, base: str) -> None:
    """With the files of the package index in the store, the image is made offline; equal inputs give the same image."""
    first = container_build.builder_image(contained_demo, engine, base)
    engine.images.remove(first[1], force=True)
    offline = dataclasses.replace(contained_demo, offline=True)
    again = container_build.builder_image(offline, engine, base)

    assert again[0] == first[0]
    assert again == container_build.builder_image(offline, engine, base)


def test_what_a_base_lacks_is_installed(contained_demo: RunContext, engine: DockerClient, plain_base: str) -> None:
    """A bare base gets compilers and Python from its own archive; offline it is refused, with what it lacks."""
    with refusal("image-build-failed") as caught:
        container_build.builder_image(dataclasses.replace(contained_demo, offline=True), engine, plain_base)

    assert any("the base lacks" in line and "python3-venv" in line for line in caught.value.details)
    assert container_build.builder_image(contained_demo, engine, plain_base)[2].machine


def test_a_base_that_the_engine_lacks(contained_demo: RunContext, engine: DockerClient) -> None:
    """An id that the engine does not have is unresolved; a digest is pulled, unless there is no network or nobody who has it."""
    with refusal("base-unresolved"):
        container_build.builder_image(contained_demo, engine, DIGEST)
    with refusal("offline"):
        container_build.builder_image(dataclasses.replace(contained_demo, offline=True), engine, f"127.0.0.1:9/debian@{DIGEST}")
    with refusal("source-unreachable"):
        container_build.builder_image(contained_demo, engine, f"127.0.0.1:9/debian@{DIGEST}")


def test_a_base_of_another_platform_is_refused(contained_demo: RunContext, engine: DockerClient, base: str, other: str) -> None:
    with refusal("image-mismatch"):
        container.prepare_base(contained_demo, engine, base, other)
