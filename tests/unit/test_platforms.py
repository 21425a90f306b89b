"""Wheel tags of machines that are not this one."""

from __future__ import annotations

import platform
import sys

from packaging.tags import sys_tags

from sparkwright.builder.environment import platforms


def test_they_are_those_that_packaging_finds_here() -> None:
    """For this very machine they are packaging's own, less what names no manylinux."""
    newest = int(platform.libc_ver()[1].split(".")[1])
    own = [str(tag) for tag in sys_tags() if "linux" not in tag.platform or "manylinux" in tag.platform]

    assert [str(tag) for tag in platforms.tags(sys.version_info[:2], platform.machine(), newest)] == own


def test_an_arm_machine_knows_nothing_older_than_manylinux2014() -> None:
    """Its first policy was 2.17; x86-64 goes back to manylinux1."""
    assert platforms.manylinux("aarch64", 18) == ["manylinux_2_18_aarch64", "manylinux_2_17_aarch64", "manylinux2014_aarch64"]
    assert platforms.manylinux("x86_64", 39)[-2:] == ["manylinux_2_5_x86_64", "manylinux1_x86_64"]
