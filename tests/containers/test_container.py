"""What one container may do, and the base of an image, or a reason why there is none."""

from __future__ import annotations

import dataclasses

import pytest
from docker import DockerClient
from tests.containers.conftest import OWN, ROOT
from tests.refusals import refusal

from sparkwright.builder import container
from sparkwright.forks.context import RunContext

pytestmark = pytest.mark.containers


# One container.


def test_a_program_inside_has_no_network_and_no_rights(engine: DockerClient, base: str) -> None:
    """It has no capabilities, cannot gain any, and cannot write to the image; nothing of it stays."""
    script = "ls /sys/class/net; grep -E '^(CapEff|CapBnd|NoNewPrivs)' /proc/self/status | cut -f2; touch /etc/x || echo refused; exit 7"
    status, output, messages = container.run(engine, base, ["/bin/sh", "-c", script])

    assert (status, output.split()) == (7, ["lo", "0" * 16, "0" * 16, "1", "refused"])
    assert "Read-only file system" in messages
    assert not engine.containers.list(all=True)


def test_a_program_that_takes_too_much_memory_is_ended(engine: DockerClient, base: str) -> None:
    """The limit is the kernel's, and that it was met is known."""
    with refusal("container-killed") as caught:
        container.run(engine, base, ["python3", "-c", "held = bytearray(10**9)"], mem_limit=200 * 10**6, memswap_limit=200 * 10**6)

    assert caught.value.details == ("status: 137", "killed for lack of memory: True")


# The base of an image, which is named by digest.

DIGEST = "sha256:" + "0123456789abcdef" * 4


def test_a_base_that_the_engine_lacks(demo_session: RunContext, engine: DockerClient) -> None:
    """It is pulled, unless there is no network or nobody who has it."""
    words = demo_session, engine, f"127.0.0.1:9/debian@{DIGEST}", f"linux/{OWN}", "serve-system"
    files = {"Dockerfile": b"ARG BASE\nFROM ${BASE} AS serve-system\n"}
    with refusal("image-build-failed"):
        container.system_image(*words, files)
    with refusal("offline"):
        container.system_image(dataclasses.replace(demo_session, offline=True), *words[1:], files)


def test_what_a_base_lacks_is_named_without_a_network(demo_session: RunContext, engine: DockerClient, plain_base: str) -> None:
    files = {name: (ROOT / "build" / name).read_bytes() for name in ("entrypoint.sh",)}
    files["Dockerfile"] = (ROOT / "build" / "serve.Dockerfile").read_bytes()
    with refusal("image-build-failed") as caught:
        container.system_image(
            dataclasses.replace(demo_session, offline=True), engine, plain_base, f"linux/{OWN}", "serve-system", files
        )

    assert any("the base lacks" in line and "python3-venv" in line for line in caught.value.details)
