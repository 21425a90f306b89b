"""What a backend did is read from its log, its commands and its wheel."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from tests.refusals import refusal

from sparkwright.builder.arch import effects
from sparkwright.builder.environment.toolchain import FullEnvironment
from sparkwright.builder.wheel import archive
from sparkwright.builder.wheel.archive import WheelName

NINJA = """\
[1/4] Building CUDA object CMakeFiles/_core.dir/csrc/kernel.cu.o
[2/4] Building CXX object CMakeFiles/_extra.dir/csrc/extra.cpp.o
FAILED: [code=1] CMakeFiles/_extra.dir/csrc/extra.cpp.o
/tools/bin/python -IS /w/launch.py /usr/bin/c++ -O3 -c /w/csrc/extra.cpp
/w/csrc/extra.cpp:1:40: error: 'missing' was not declared in this scope
[3/4] Linking CXX shared module _core.abi3.so
ninja: build stopped: subcommand failed.
building extension widget._extra failed; it is optional
""".splitlines()


def made(folder: Path, *members: str) -> Path:
    """Return a wheel with these libraries."""
    name = WheelName("widget", "1.5", "py3-none-any")
    metadata = "Metadata-Version: 2.4\nName: widget\nVersion: 1.5\n"
    archive.write(folder / name.filename, name, dict.fromkeys(members, b"\x7fELF"), metadata, pure=False)
    return folder / name.filename


def test_a_missing_library_is_named_with_what_its_compiler_said(tmp_path: Path) -> None:
    """The block of its own failure, without the command and without other units' lines."""
    log = tmp_path / "log"
    log.write_text("\n".join(NINJA))
    settings = FullEnvironment(extensions=("widget/_core.*.so", "widget/_extra.abi3.so"))

    with refusal("extension-missing") as caught:
        effects.check_extensions(made(tmp_path, "widget/_core.abi3.so"), settings, log)

    assert caught.value.data == {"missing": ["widget/_extra.abi3.so"]}
    assert caught.value.details == (
        "missing: widget/_extra.abi3.so",
        "  FAILED: [code=1] CMakeFiles/_extra.dir/csrc/extra.cpp.o",
        "  /w/csrc/extra.cpp:1:40: error: 'missing' was not declared in this scope",
        f"full log: {log}",
    )
    effects.check_extensions(made(tmp_path, "widget/_core.abi3.so", "widget/_extra.abi3.so"), settings, log)


def test_without_a_compilers_failure_the_lines_about_it_are_shown() -> None:
    """CMake may have left the target out, and say so."""
    log = ["-- _flashmla_C will not compile: unsupported CUDA architecture 12.1f", "-- _flashmla_C is nice", "error: of somebody else"]

    assert effects.last_words(log, "vllm/_flashmla_C.abi3.so") == [f"  {log[0]}"]
    assert effects.last_words(["nothing of it"], "vllm/_flashmla_C.abi3.so") == []


def test_every_library_of_the_wheel_is_accounted_for(tmp_path: Path) -> None:
    """None is from elsewhere."""
    account = effects.account(made(tmp_path, "widget/_core.abi3.so", "widget/libx.so.1", "widget/a.py"), {"a": "a>=2"})

    assert sorted(account.libraries) == ["widget/_core.abi3.so", "widget/libx.so.1"]
    assert (account.base, account.replaced, account.requires) == ({}, (), {"a": "a>=2"})


def test_a_unit_that_is_compiled_otherwise_than_planned_is_shown_both_ways() -> None:
    """Another gencode is a planned unit that is gone and a compiled one that nobody planned."""
    native: effects.Command = ("a.cu", ("compute_121f:sm_121f",))
    other: effects.Command = ("a.cu", ("compute_80:sm_80",))
    planned = Counter([native, native])
    effects.check_commands("widget", planned, planned)

    with refusal("arch-mismatch") as caught:
        effects.check_commands("widget", planned, Counter([native, other]))

    assert caught.value.details == ("planned: a.cu compute_121f:sm_121f", "compiled: a.cu compute_80:sm_80")
