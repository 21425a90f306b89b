"""Connections to the container engine, and the decisions of a build in a container before it asks one."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.refusals import refusal
from tests.unit.conftest import Mini

from sparkwright.builder import container, container_build
from sparkwright.cli import main
from sparkwright.core import process

ROOT = Path(__file__).parents[2]
ID = "sha256:" + "0123456789abcdef" * 4


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the path of the engine's socket, short because the kernel takes 107 bytes."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("DOCKER_HOST", f"unix://{folder}/engine.sock")
        yield Path(folder, "engine.sock")


def test_a_missing_or_remote_engine_is_refused(address: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with refusal("engine-missing"):
        container.connect()
    with socket.socket(socket.AF_UNIX) as stopped:
        stopped.bind(str(address))
    with refusal("engine-unreachable"):
        container.connect()
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:2375")
    with refusal("engine-unreachable", match="not on this machine"):
        container.connect()


@pytest.mark.skipif(os.getuid() != 0, reason="only root may become another user")
def test_a_socket_of_another_user_is_forbidden(address: Path) -> None:
    address.parent.chmod(0o755)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(address))
        listening.listen()
        address.chmod(0)
        os.seteuid(65534)
        try:
            with refusal("engine-forbidden"):
                container.connect()
        finally:
            os.seteuid(0)


@pytest.mark.parametrize(
    ("text", "reference"),
    [
        ("write /var/lib/dpkg/x: No space left on device", "disk-full"),
        ("OCI runtime create failed: exec /bin/sh: exec format error: unknown", "emulation-missing"),
        ("conflict: unable to delete", "engine-refused"),
    ],
)
def test_messages_of_the_engine_become_references(text: str, reference: str) -> None:
    assert container.translate_error(text).reference == reference


def test_only_a_process_that_certainly_exited_has_exited() -> None:
    """Not this one, nor one in a process namespace that cannot be seen from here."""
    script = "from sparkwright.builder import container; print(container.owner_id())"
    dead = process.output([sys.executable, "-c", script]).strip()
    boot, namespace, number = container.owner_id().split(".")
    owners = [container.owner_id(), f"{boot}.1.{number}", dead, f"another-boot.{namespace}.{number}"]

    assert [container.has_exited(owner) for owner in owners] == [False, False, True, True]


@pytest.mark.parametrize("name", ["debian:bookworm", "debian@sha256:12", "debian@unresolved", "sha256:0 1", f"{ID}@{ID}@x"])
def test_a_base_without_its_digest_is_refused(mini: Mini, name: str) -> None:
    with refusal("base-unresolved"):
        container_build.pinned_base(mini.context(), name)


@pytest.mark.parametrize("options", [["--base", ID], ["--container", "--target", "aarch64"]])
def test_options_that_do_not_go_together_are_refused(tmp_path: Path, options: list[str]) -> None:
    """A base is for a container, and the builder image has no cross compiler."""
    with refusal("usage"):
        main.run(["build", "--cache-dir", str(tmp_path), *options])
