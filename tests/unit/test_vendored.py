"""Vendored sources: submodules from ``.gitmodules``, declarations from traced CMake calls, and both against the lock."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import pytest
from tests.refusals import refusal
from tests.unit.conftest import Repository

from sparkwright.builder import configure
from sparkwright.builder.configure import Call, Declaration
from sparkwright.core.git import Objects
from sparkwright.forks import resolve
from sparkwright.forks.lock import ForkLock, VendoredLock

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
        '[submodule "a"]\n\tpath = a\n\turl = https://a.example\n\turl = https://b.example\n',
        section("a", "https://a.example", "x") + section("a", "https://b.example", "y"),
    ],
)
def test_unsafe_or_contradictory_gitmodules_is_refused(repository: Repository, modules: str) -> None:
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


SUBMODULE = msgspec.structs.replace(PART, kind="submodule")


@pytest.mark.parametrize(
    ("sources", "ignored", "fault"),
    [
        ([Declaration("part", "https://user:secret@host.example/other.git", COMMIT, "x:1")], (), "; the lock names "),
        ([Declaration("part", URL, "3" * 40, "x:1")], (), "; the lock names "),
        ([DECLARED, Declaration("more", URL, "v1", "x:1")], (), f"x:1: more: {URL} at v1 is not in the lock"),
        ([DECLARED, Declaration("more", URL, "", "x:1", pinnable=False)], (), "cannot pin"),
        # Only a configure of every target shows an entry without effect.
        ([], (), "lock: part: CMake asks for no such source"),
        ([DECLARED], ["gone"], "ignored: gone: CMake asks for no such source"),
    ],
)
def test_source_that_the_lock_pins_otherwise_is_refused(sources: list[Declaration], ignored: Iterable[str], fault: str) -> None:
    """Another address, another ref, a source of no entry, a kind that cannot be pinned; a password is not shown."""
    locked = ForkLock(vendored={"part": PART, "third/party": SUBMODULE})
    with refusal("source-unlocked") as caught:
        configure.check_vendored("mini", sources, locked, dict.fromkeys(ignored, "once"), complete=True)
    (line,) = caught.value.details
    assert (fault in line, "secret" in line) == (True, False)
