"""Arch rules, guards and the plan: exactly the places they were written for, every unit for the arch or with a reason; what CMake is asked, and asks for."""

from __future__ import annotations

import shlex
import time
from pathlib import Path

import msgspec
import pytest
from tests.refusals import refusal
from tests.unit.conftest import Repository

from sparkwright.builder import configure
from sparkwright.builder.arch import plan
from sparkwright.builder.arch import rules as archs
from sparkwright.builder.arch.plan import ArchPlan, PlanComparison
from sparkwright.builder.arch.rules import (
    ArchException,
    ArchRule,
    ArchRules,
    DroppedUnits,
    Site,
    parse_cmake,
)
from sparkwright.builder.configure import Call, Declaration, TranslationUnit
from sparkwright.builder.sandbox import Sandbox
from sparkwright.core import process
from sparkwright.core.git import Objects
from sparkwright.forks import resolve
from sparkwright.forks.stack import ForkLock, VendoredLock

TEXT = """\
if(TOOLKIT VERSION_GREATER_EQUAL 13.4)
  set(SUPPORTED "7.5;10.7;12.0")
elseif(TOOLKIT VERSION_GREATER_EQUAL 13.0)
  set(SUPPORTED "7.5;12.0")
else()
  set(SUPPORTED "7.5;12.0;12.1")
endif()
pick(REPACK_ARCHS "8.0+PTX" "${ARCHS}")
"""

RULE = ArchRule(
    name="supported", fork="mini", file="CMakeLists.txt", command="set", where=("SUPPORTED",), argument=1,
    expect="7.5;12.0", append=("12.1",),
    under=("TOOLKIT VERSION_GREATER_EQUAL 13.0",), reason="folds", drop_when="listed",
)  # fmt: skip


def rewrite(text: str, *rules: ArchRule) -> tuple[dict[str, bytes], tuple[Site, ...]]:
    return archs.rewrite({"CMakeLists.txt": text.encode()}.get, rules)


def change(**fields: object) -> ArchRule:
    return msgspec.structs.replace(RULE, **fields)


def test_one_branch_is_changed_and_no_other_byte() -> None:
    files, sites = rewrite(TEXT, RULE)
    assert files["CMakeLists.txt"].decode() == TEXT.replace('"7.5;12.0")\nelse()', '"7.5;12.0;12.1")\nelse()')
    assert sites == (Site("supported", "CMakeLists.txt", 4, "7.5;12.0", "7.5;12.0;12.1"),)


UNEXPECTED = TEXT.replace('"7.5;12.0")\nelse', '"7.5;9.0;12.0")\nelse')
EXTENDED = TEXT.replace('"7.5;12.0")\nelse', '"7.5;12.0;12.1")\nelse')
TWICE = TEXT.replace('  set(SUPPORTED "7.5;12.0")\n', '  set(SUPPORTED "7.5;12.0")\n' * 2)


@pytest.mark.parametrize(
    ("text", "fields", "lines"),
    [
        (UNEXPECTED, {}, ["CMakeLists.txt:4: holds '7.5;9.0;12.0', the rule expects '7.5;12.0'"]),
        (UNEXPECTED, {}, ["CMakeLists.txt:2: lies in if(TOOLKIT VERSION_GREATER_EQUAL 13.4)"]),
        (EXTENDED, {}, ["CMakeLists.txt:4: holds 12.1 already"]),
        (EXTENDED, {"expect": "7.5;12.0;12.1"}, ["CMakeLists.txt:4: holds 12.1 already"]),
        (TWICE, {}, ["CMakeLists.txt:4: matches", "CMakeLists.txt:5: matches"]),
        ("project(x)\n", {}, ["no set(SUPPORTED …) in CMakeLists.txt"]),
        (TEXT, {"file": "cmake/gone.cmake"}, ["cmake/gone.cmake"]),
    ],
)
def test_a_rule_that_does_not_match_one_place_lists_the_near_misses(text: str, fields: dict[str, object], lines: list[str]) -> None:
    with refusal("rule-mismatch") as caught:
        rewrite(text, change(**fields))
    assert set(lines) <= set(caught.value.details)


def test_two_rules_have_lists_of_their_own() -> None:
    with refusal("rule-mismatch", match="Rule again matches 0 places"):
        rewrite(TEXT, RULE, change(name="again", append=("12.2",)))


# CMake.

BRANCHES = b"""\
# set(LIST "0") in a comment is no command
IF(A VERSION_GREATER_EQUAL
   2.0)
  Set(LIST "1;2")
elseif(B)
  foreach(x IN LISTS LIST)
    set(LIST 3;4 [=[a]b]=] "q\\"uote" $<$<CONFIG:Debug>:5>)
  endforeach()
else()
  set(LIST ${OTHER})
endif()
function(f OUT)
  set(${OUT} "set(LIST \\"no\\")" PARENT_SCOPE)
endfunction()
"""


def test_commands_have_their_scopes_and_arguments_their_bytes() -> None:
    commands = [command for command in parse_cmake(BRANCHES, "CMakeLists.txt") if command.name == "set"]
    assert [(command.line, command.scopes) for command in commands] == [
        (4, ("if(A VERSION_GREATER_EQUAL 2.0)",)),
        (7, ("elseif(B)", "foreach(x IN LISTS LIST)")),
        (10, ("else()",)),
        (13, ("function(f OUT)",)),
    ]
    assert commands[1].texts == ("LIST", "3;4", "a]b", 'q\\"uote', "$<$<CONFIG:Debug>:5>")
    assert tuple(BRANCHES[argument.start : argument.end].decode() for argument in commands[1].arguments) == commands[1].texts


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (b'project(x)\nset(A "b"\nset(C d)\n', 2),
        (b"set(A b)\nset(A b))\n", 2),
        (b'set(A "b)\n', 1),
        (b"set(A [[b)\n" * 90_000, 1),
        (b"if(A)\n" * 150_000, 101),
    ],
    ids=range(5),
)
def test_malformed_text_names_the_line(text: bytes, line: int) -> None:
    with refusal("rule-mismatch", match=f"sub/CMakeLists.txt is not well-formed CMake at line {line}\\."):
        parse_cmake(text, "sub/CMakeLists.txt")


def test_the_work_of_reading_is_bounded() -> None:
    """Brackets that nothing closes, commands in commands, and many short commands cost no more than their bytes; 8 MB are refused."""
    began = time.process_time()
    assert parse_cmake(b"a()\n" * 200_000, "CMakeLists.txt")[-1].line == 200_000
    with refusal("rule-mismatch", match="is larger than"):
        parse_cmake(b"set(" + b"a " * 4_000_000 + b")", "CMakeLists.txt")
    assert time.process_time() - began < 8


NATIVE = ("compute_121f:sm_121f",)
PTX80 = ("compute_80:compute_80", "compute_80:sm_80")


def plans(*units: tuple[str, ...], rules: ArchRules | None = None, calls: tuple[Call, ...] = (), text: str = "") -> ArchPlan:
    """Examine units of the target ``t`` whose gencodes are *units*; their sources are a.cu, b.cu, …"""
    listed = tuple(TranslationUnit("t", f"{letter}.cu", gencode) for letter, gencode in zip("abcdefgh", units, strict=False))
    return plan.examine(listed, calls, arch="12.1f", rules=rules or ArchRules(), fork="mini", read={"CMakeLists.txt": text.encode()}.get)


def kept(unit: str, gencode: str = "compute_80") -> ArchRules:
    return ArchRules(kept=(ArchException("mini", unit, "why not", gencode),))


DROPPED = ArchRules(dropped=(DroppedUnits("mini", "b.cu", "a trap on this device"),))


@pytest.mark.parametrize(
    ("gencode", "rules", "verdict"),
    [
        (NATIVE, ArchRules(), "native"),
        (("compute_120f:sm_120f",), ArchRules(), "folded"),
        (("compute_121:sm_121",), ArchRules(), "folded"),
        (("compute_121a:sm_121a",), ArchRules(), "folded"),
        (("compute_121:compute_121", "compute_121f:compute_121f", "compute_121f:sm_121f"), ArchRules(), "folded"),
        (PTX80, ArchRules(), "foreign"),
        (("compute_80:compute_80",), ArchRules(), "foreign"),
        (("compute_90a:sm_90a",), ArchRules(), "foreign"),
        (("native:native",), ArchRules(), "foreign"),
        ((), ArchRules(), "none"),
        (PTX80, kept("a.cu"), "kept"),
        ((), kept("a.cu", "default"), "kept"),
    ],
)
def test_verdicts(gencode: tuple[str, ...], rules: ArchRules, verdict: str) -> None:
    plans_made = plans(gencode, NATIVE, rules=rules)
    assert (plans_made.units[0].verdict, plans_made.units[0].reason) == (verdict, "why not" if rules.kept else "")


def test_units_that_are_dropped_pass_with_their_reason(capsys: pytest.CaptureFixture[str]) -> None:
    comparison = PlanComparison("", plans(NATIVE, rules=DROPPED), plans(NATIVE, PTX80, rules=DROPPED))
    plan.check(comparison)
    plan.show(comparison)
    assert "a trap on this device" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("units", "rules", "detail"),
    [
        *(
            ([gencode], kept("a.cu"), "kept: a.cu is listed at compute_80")
            for gencode in (("compute_80:sm_80",), ("compute_90:compute_90",), (*PTX80, "compute_90:sm_90"), ())
        ),
        ([PTX80], ArchRules(), "a.cu"),
        ([PTX80], kept("a.cu", "default"), "kept: a.cu is listed at default"),
        ([NATIVE], kept("gone/*.cu"), "kept: gone/*.cu matches no CUDA unit"),
        ([NATIVE], kept("?.cu"), "but CMake gives it compute_121f:sm_121f"),
        ([NATIVE, NATIVE], DROPPED, "dropped: b.cu is compiled"),
        ([], ArchRules(), "a.cu (compute_121f:sm_121f)"),
    ],
)  # fmt: skip
def test_a_plan_that_breaks_the_rules_is_refused(units: list[tuple[str, ...]], rules: ArchRules, detail: str) -> None:
    with refusal("arch-mismatch", match=r"of mini would|wrong for mini") as caught:
        plan.check(PlanComparison("", plans(*units, rules=rules), plans(NATIVE)))
    assert any(detail in line for line in caught.value.details)


SET = (1, "set", "MINE", "120f")


@pytest.mark.parametrize(
    ("text", "calls", "deciding"),
    [
        (
            'set(MINE "120f")\nset_target_properties(t PROPERTIES CUDA_ARCHITECTURES "${MINE}")\n',
            [SET, (2, "set_target_properties", "t", "PROPERTIES", "CUDA_ARCHITECTURES", "120f")],
            ["2: set_target_properties(t 120f)", "1: set(MINE 120f)"],
        ),
        (
            'set(CMAKE_CUDA_ARCHITECTURES "120f")\n',
            [(1, "set", "CMAKE_CUDA_ARCHITECTURES", "120f")],
            ["1: set(CMAKE_CUDA_ARCHITECTURES 120f)"],
        ),
        ("", [], []),
        (
            'set(MINE "120f")\nlist(APPEND MINE ${ALL})\nset(OTHER 120f)\ngive(a.cu ${MINE})\n',
            [SET, (2, "list", "APPEND", "MINE", "12.0"), (3, "set", "OTHER", "120f"), (4, "give", "a.cu", "-arch=sm_120f;12.0")],
            ["4: give(a.cu -arch=sm_120f;12.0)", "2: list(APPEND 12.0)", "1: set(MINE 120f)"],
        ),
    ],
)  # fmt: skip
def test_the_calls_that_decided_an_arch_are_named(text: str, calls: list[tuple[int | str, ...]], deciding: list[str]) -> None:
    traced = tuple(Call("CMakeLists.txt", int(line), str(name), tuple(map(str, values))) for line, name, *values in calls)
    (unit,) = plans(("compute_120f:sm_120f",), calls=traced, text=text).units
    assert unit.calls == tuple(f"CMakeLists.txt:{line}" for line in deciding)


# What nvcc will be given.

@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("nvcc -gencode arch=compute_121f,code=sm_121f -c a.cu", ("compute_121f:sm_121f",)),
        ("nvcc -gencode=arch=compute_121f,code=sm_121f -gencode arch=compute_121f,code=sm_121f a.cu", ("compute_121f:sm_121f",)),
        ("nvcc '--generate-code=arch=compute_80,code=[compute_80,sm_80]' a.cu", PTX80),
        ('nvcc --generate-code arch=compute_80,code=\\"sm_80,compute_80\\" a.cu', PTX80),
        ("nvcc --gpu-architecture sm_121f a.cu", ("sm_121f:sm_121f",)),
        ("nvcc -arch=native a.cu", ("native:native",)),
        ("nvcc -Xcompiler -arch=sm_90 -Xcompiler=-march=native -DX=-arch=sm_80 a.cu", ()),
        ("nvcc -c a.cu -arch", ()),
    ],
)
def test_every_spelling(command: str, expected: tuple[str, ...]) -> None:
    assert configure.gencode(shlex.split(command)) == expected


def test_a_failed_configure_shows_the_words_of_cmake(tmp_path: Path) -> None:
    """A compiler that upstream refuses, for example, with the advice to name another."""
    (tmp_path / "cmake").write_text("#!/bin/sh\necho 'GCC >= 13 is required (found 12.2.0)'\nexit 1\n")
    (tmp_path / "cmake").chmod(0o755)
    with refusal("configure-failed") as caught:
        configure.configure(
            tmp_path, tmp_path / "build", defines={}, env=process.clean_environment(), log=tmp_path / "log",
            cmake=tmp_path / "cmake", sandbox=Sandbox("none"),
        )  # fmt: skip
    assert "GCC >= 13 is required (found 12.2.0)" in caught.value.details
    assert "CXX and CC" in caught.value.todo


COMMIT = "1" * 40
URL = "https://host.example/part.git"
BASE = "https://host.example/group/fork.git"


def submodules(repository: Repository, modules: str | None, *paths: str) -> dict[str, tuple[str, str]]:
    """Return the submodules of a tree with *modules* as .gitmodules and a link to `COMMIT` at each path."""
    repository.commit({".gitmodules": modules.encode()} if modules is not None else {"file": b""})
    for path in paths:
        repository.git("update-index", "--add", "--cacheinfo", f"160000,{COMMIT},{path}")
    return resolve.submodules(Objects(repository.path / ".git"), repository.git("write-tree"), BASE)


def section(path: str, url: str, name: str = "") -> str:
    return f'[submodule "{name or path}"]\n\tpath = {path}\n\turl = {url}\n'


@pytest.mark.parametrize(
    ("modules", "expected"),
    [
        (section("a", URL, "x") + section("b/c", "../part.git"), [("a", URL), ("b/c", "https://host.example/group/part.git")]),
        (section("gone", "ext::x"), [("a", ""), ("b/c", "")]),
        (None, [("a", ""), ("b/c", "")]),
        ("[include]\n\tpath = /etc/passwd\n", [("a", ""), ("b/c", "")]),
    ],
)
def test_submodules_are_links_with_the_address_of_gitmodules(
    repository: Repository, modules: str | None, expected: list[tuple[str, str]]
) -> None:
    """A section without a link counts for nothing, and an include reads no file of this machine."""
    assert submodules(repository, modules, "a", "b/c") == {path: (url, COMMIT) for path, url in expected}


@pytest.mark.parametrize(
    "modules",
    [
        *(
            section("a", url)
            for url in ("ext::sh -c x", "fd::17", "-u./run", "https://a.example/\a", "../../../../b.example/x", "x" * 3000)
        ),
        "[submodule",
    ],
)
def test_unsafe_gitmodules_are_refused(repository: Repository, modules: str) -> None:
    with refusal("declaration-unsafe"):
        submodules(repository, modules, "a")


@pytest.mark.parametrize("base", [BASE, "https://host.example/g/f/", "ssh://git@host.example/g/f", "file:///srv/g/f"])
@pytest.mark.parametrize("address", ["../x.git", "./x", "../../x", "https://other.example/x", "./../x"])
def test_relative_addresses_are_those_of_git(repository: Repository, base: str, address: str) -> None:
    submodules(repository, section("a", "../x"), "a")
    (repository.path / ".gitmodules").write_text(section("a", address))
    repository.git("remote", "add", "origin", base)
    repository.git("submodule", "init")
    assert resolve.absolute(address, base) == repository.git("config", "submodule.a.url")


def call(command: str, *arguments: str) -> Call:
    return Call("CMakeLists.txt", 7, command, arguments)


@pytest.mark.parametrize(
    ("traced", "expected"),
    [
        (call("fetchcontent_declare", "Part", "GIT_REPOSITORY", URL, "GIT_TAG", "v1", "GIT_SHALLOW", "TRUE"), [("Part", URL, "v1", True)]),
        (call("fetchcontent_declare", "part", f"GIT_REPOSITORY;{URL};GIT_TAG;V1"), [("part", URL, "V1", True)]),
        (call("fetchcontent_declare", "part", "GIT_REPOSITORY", URL), [("part", URL, "master", True)]),
        (call("fetchcontent_declare", "part", "SOURCE_DIR", "/here"), []),
        (call("fetchcontent_declare", "part", "DOWNLOAD_COMMAND", ""), []),
        (call("fetchcontent_populate", "part"), []),
        (call("fetchcontent_populate", "part", "GIT_REPOSITORY", URL, "GIT_TAG", "v1"), [("part", URL, "v1", False)]),
        (call("externalproject_add", "part", "URL", URL, "URL_HASH", "SHA256=0"), [("part", URL, "", False)]),
        (call("file", "DOWNLOAD", URL, "here"), [(URL, URL, "", False)]),
        (call("file", "WRITE", "here", "text"), []),
        (call("warn_if_ptx", "-gencode arch=compute_121f,code=sm_121f"), []),
    ],
)  # fmt: skip
def test_traced_calls_declare_sources(traced: Call, expected: list[tuple[str, str, str, bool]]) -> None:
    assert [(found.name, found.url, found.ref, found.pinnable) for found in configure.declarations([traced])] == expected


@pytest.mark.parametrize("option", ["GIT_REPOSITORY", "GIT_TAG", "URL"])
@pytest.mark.parametrize("value", ["ext::sh -c x", "--upload-pack=x", "https://a.example/\x1b"])
def test_unsafe_declaration_is_refused(option: str, value: str) -> None:
    repository = ("GIT_REPOSITORY", URL) if option == "GIT_TAG" else ()
    with refusal("declaration-unsafe"):
        list(configure.declarations([call("fetchcontent_declare", "part", *repository, option, value)]))


PART = VendoredLock(URL, COMMIT, COMMIT, "2" * 40, kind="fetchcontent")
DECLARED = Declaration("part", URL, COMMIT, "CMakeLists.txt:7")


@pytest.mark.parametrize(
    ("sources", "fault"),
    [
        ([Declaration("part", "https://user:secret@host.example/other.git", COMMIT, "x:1")], "; the lock names "),
        ([Declaration("part", URL, "3" * 40, "x:1")], "; the lock names "),
        ([DECLARED, Declaration("more", URL, "v1", "x:1")], f"x:1: more: {URL} at v1 is not in the lock"),
        ([DECLARED, Declaration("more", URL, "", "x:1", pinnable=False)], "cannot pin"),
    ],
)
def test_source_that_the_lock_pins_otherwise_is_refused(sources: list[Declaration], fault: str) -> None:
    """Another address, another ref, a source of no entry, a kind that cannot be pinned; a password is not shown."""
    locked = ForkLock(vendored={"part": PART, "third/party": msgspec.structs.replace(PART, kind="submodule")})
    with refusal("source-unlocked") as caught:
        configure.check_vendored("mini", sources, locked, {})
    (line,) = caught.value.details
    assert (fault in line, "secret" in line) == (True, False)
