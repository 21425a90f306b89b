"""Arch rules and the plan: exactly the places they were written for, every unit for the arch or with a reason; what CMake is asked, and asks for."""

from __future__ import annotations

import shlex
from pathlib import Path

import msgspec
import pytest
from tests.refusals import refusal
from tests.unit.conftest import Repository

from sparkwright.builder import configure, plan
from sparkwright.builder import workspace as archs
from sparkwright.builder.configure import Call, Declaration, TranslationUnit
from sparkwright.builder.plan import ArchPlan, PlanComparison
from sparkwright.builder.sandbox import Sandbox
from sparkwright.builder.workspace import (
    ArchException,
    ArchRule,
    ArchRules,
    DroppedUnit,
    Site,
)
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
    name="supported", fork="mini", file="CMakeLists.txt", before='SUPPORTED "7.5;12.0"', after='SUPPORTED "7.5;12.0;12.1"',
    reason="folds", drop_when="listed",
)  # fmt: skip


def test_one_place_is_changed_and_no_other_byte() -> None:
    files, sites = archs.rewrite({"CMakeLists.txt": TEXT.encode()}.get, [RULE])
    assert files["CMakeLists.txt"].decode() == TEXT.replace('"7.5;12.0")\nelse()', '"7.5;12.0;12.1")\nelse()')
    assert sites == (Site("supported", "CMakeLists.txt", 4, RULE.before, RULE.after),)


TWICE = TEXT.replace('  set(SUPPORTED "7.5;12.0")\n', '  set(SUPPORTED "7.5;12.0")\n' * 2)


@pytest.mark.parametrize(
    ("text", "rules", "line"),
    [
        (TEXT.replace('"7.5;12.0")\nelse', '"7.5;9.0;12.0")\nelse'), [RULE], 'CMakeLists.txt:4: set(SUPPORTED "7.5;9.0;12.0")'),
        (TWICE, [RULE], 'CMakeLists.txt:5: set(SUPPORTED "7.5;12.0")'),
        (TEXT, [RULE, RULE], 'CMakeLists.txt:4: set(SUPPORTED "7.5;12.0;12.1")'),
        (TEXT, [msgspec.structs.replace(RULE, file="gone.cmake")], "gone.cmake does not hold SUPPORTED"),
    ],
    ids=["other", "twice", "again", "gone"],
)
def test_a_rule_that_does_not_match_one_place_lists_the_near_misses(text: str, rules: list[ArchRule], line: str) -> None:
    with refusal("rule-mismatch") as caught:
        archs.rewrite({"CMakeLists.txt": text.encode()}.get, rules)
    assert line in caught.value.details


NATIVE = ("compute_121f:sm_121f",)
PTX80 = ("compute_80:compute_80", "compute_80:sm_80")


def plans(*units: tuple[str, ...], rules: ArchRules | None = None, calls: tuple[Call, ...] = ()) -> ArchPlan:
    """Examine units of the target ``t`` whose gencodes are *units*; their sources are a.cu, b.cu, …"""
    listed = tuple(TranslationUnit("t", f"{letter}.cu", gencode) for letter, gencode in zip("abcdefgh", units, strict=False))
    return plan.examine(listed, calls, arch="12.1f", rules=rules or ArchRules(), fork="mini")


def kept(unit: str, gencode: str = "compute_80") -> ArchRules:
    return ArchRules(kept=(ArchException("mini", unit, "why not", gencode),))


DROPPED = ArchRules(dropped=(DroppedUnit("mini", "b.cu", "a trap on this device"),))


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
        ([NATIVE], kept("gone/a.cu"), "kept: gone/a.cu matches no CUDA unit"),
        ([NATIVE], kept("a.cu"), "but CMake gives it compute_121f:sm_121f"),
        ([NATIVE, NATIVE], DROPPED, "dropped: b.cu is compiled"),
        ([], ArchRules(), "a.cu (compute_121f:sm_121f)"),
    ],
)  # fmt: skip
def test_a_plan_that_breaks_the_rules_is_refused(units: list[tuple[str, ...]], rules: ArchRules, detail: str) -> None:
    with refusal("arch-mismatch", match=r"of mini would|wrong for mini") as caught:
        plan.check(PlanComparison("", plans(*units, rules=rules), plans(NATIVE)))
    assert any(detail in line for line in caught.value.details)


ALL = (1, "set", "CMAKE_CUDA_ARCHITECTURES", "120f")
TARGET = (2, "set_target_properties", "t", "PROPERTIES", "CUDA_ARCHITECTURES", "120f")


@pytest.mark.parametrize(
    ("calls", "deciding"),
    [
        ([ALL, TARGET, (3, "give", "b.cu;a.cu", "-arch=sm_120f;12.0"), (4, "give", "b.cu", "12.1f")], "3: give(-arch=sm_120f;12.0)"),
        ([ALL, TARGET, (3, "give", "a.cu")], "2: set_target_properties(120f)"),
        ([ALL, (2, "set", "OTHER", "12.0")], "1: set(120f)"),
        ([], ""),
    ],
    ids=["source", "target", "all", "none"],
)  # fmt: skip
def test_the_call_that_decided_an_arch_is_named(calls: list[tuple[int | str, ...]], deciding: str) -> None:
    traced = tuple(Call("CMakeLists.txt", int(line), str(name), tuple(map(str, values))) for line, name, *values in calls)
    (unit,) = plans(("compute_120f:sm_120f",), calls=traced).units
    assert unit.call == (deciding and f"CMakeLists.txt:{deciding}")


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
