"""What one container may do, and that none is left: on a real engine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from docker import DockerClient
from tests.refusals import refusal

from sparkwright.builder import container
from sparkwright.builder.container import BindMount

pytestmark = pytest.mark.containers


def said(engine: DockerClient, image: str, script: str, folders: Sequence[BindMount] = ()) -> tuple[int, list[str]]:
    """Return the status of a shell script in a container, and the lines that it printed."""
    lines: list[str] = []
    return container.run(engine, image, ["/bin/sh", "-c", script], folders=folders, on_out=lines.append, on_err=lines.append), lines


def test_a_program_inside_has_no_network_and_no_rights(engine: DockerClient, base: str) -> None:
    """It is the caller, without capabilities, cannot gain any, and cannot write to the image."""
    script = "ls /sys/class/net; id -u; grep -E '^(CapEff|CapBnd|NoNewPrivs)' /proc/self/status | cut -f2; touch /etc/x 2>/dev/null || echo refused"

    assert said(engine, base, script)[1] == ["lo", str(os.getuid()), "0" * 16, "0" * 16, "1", "refused"]


def test_a_folder_is_written_only_where_it_may_be(engine: DockerClient, base: str, tmp_path: Path) -> None:
    """A folder is to be read unless it was lent for writing, and files made there belong to the caller."""
    (tmp_path / "read").mkdir()
    (tmp_path / "write").mkdir()
    folders = [BindMount(tmp_path / "read", Path("/one")), BindMount(tmp_path / "write", Path("/two"), writable=True)]
    status, _ = said(engine, base, "touch /two/made && touch /one/made", folders=folders)

    assert status != 0
    assert not (tmp_path / "read" / "made").exists()
    assert (tmp_path / "write" / "made").stat().st_uid == os.getuid()


def test_streams_and_status_come_through(engine: DockerClient, base: str) -> None:
    """Standard output and error arrive apart, in whole lines, with the program's own exit status."""
    out: list[str] = []
    err: list[str] = []
    script = "for i in 1 2 3; do echo out $i; echo Fehlermeldung ü $i >&2; done; printf end; exit 7"
    ended = container.run(engine, base, ["/bin/sh", "-c", script], on_out=out.append, on_err=err.append)

    assert out == ["out 1", "out 2", "out 3", "end"]
    assert err == ["Fehlermeldung ü 1", "Fehlermeldung ü 2", "Fehlermeldung ü 3"]
    assert ended == 7


def test_a_program_that_takes_too_much_memory_is_ended(engine: DockerClient, base: str) -> None:
    """The limit is the kernel's, and that it was met is known."""
    command = ["python3", "-c", "held = bytearray(10**9)"]
    with refusal("container-killed") as caught:
        container.run(engine, base, command, memory=200 * 10**6, on_err=lambda _line: None)

    assert caught.value.details == ("status: 137", "killed for lack of memory: True")
