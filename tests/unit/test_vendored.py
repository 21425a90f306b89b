"""Vendored sources: submodules from ``.gitmodules``, declarations from traced CMake calls, and both against the lock."""

from __future__ import annotations

import pytest
from tests.refusals import refusal
from tests.unit.conftest import Repository

from sparkwright.builder import configure
from sparkwright.builder.configure import Call, Declaration
from sparkwright.core.git import Objects
from sparkwright.forks import resolve
from sparkwright.forks.lock import ForkLock, VendoredLock
from sparkwright.forks.stack import SourceError

COMMIT = "1" * 40
URL = "https://host.example/part.git"
BASE = "https://host.example/group/fork.git"


def superproject(repository: Repository, modules: str | None, *paths: str) -> str:
    """Commit *modules* as .gitmodules and a link to `COMMIT` at each path; return the tree."""
    repository.commit({".gitmodules": modules.encode()} if modules is not None else {"file": b""})
    for path in paths:
        repository.git("update-index", "--add", "--cacheinfo", f"160000,{COMMIT},{path}")
    return repository.git("write-tree")


def section(path: str, url: str, name: str = "") -> str:
    return f'[submodule "{name or path}"]\n\tpath = {path}\n\turl = {url}\n'


def submodules(repository: Repository, tree: str) -> dict[str, tuple[str, str]]:
    return resolve.submodules(Objects(repository.path / ".git"), tree, BASE)


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
    tree = superproject(repository, modules, "a", "b/c")
    assert submodules(repository, tree) == {path: (url, COMMIT) for path, url in expected}


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
        submodules(repository, superproject(repository, modules, "a"))


@pytest.mark.parametrize("base", [BASE, "https://host.example/g/f/", "ssh://git@host.example/g/f", "file:///srv/g/f"])
@pytest.mark.parametrize("address", ["../x.git", "./x", "../../x", "https://other.example/x", "./../x"])
def test_relative_addresses_are_those_of_git(repository: Repository, base: str, address: str) -> None:
    superproject(repository, section("a", address), "a")
    repository.git("remote", "add", "origin", base)
    repository.git("submodule", "init")
    assert resolve.absolute(address, base) == repository.git("config", "submodule.a.url")


def call(command: str, *arguments: str) -> Call:
    return Call("CMakeLists.txt", 7, command, arguments)


def declared(*calls: Call) -> list[tuple[str, str, str, bool]]:
    return [(found.name, found.url, found.ref, found.pinnable) for found in configure.declarations(calls)]


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
    assert declared(traced) == expected


@pytest.mark.parametrize("option", ["GIT_REPOSITORY", "GIT_TAG", "URL"])
@pytest.mark.parametrize("value", ["ext::sh -c x", "--upload-pack=x", "https://a.example/\x1b"])
def test_unsafe_declaration_is_refused(option: str, value: str) -> None:
    repository = ("GIT_REPOSITORY", URL) if option == "GIT_TAG" else ()
    with refusal("declaration-unsafe"):
        declared(call("fetchcontent_declare", "part", *repository, option, value))


PART = VendoredLock(URL, COMMIT, COMMIT, "2" * 40, kind="fetchcontent")
DECLARED = Declaration("part", URL, COMMIT, "CMakeLists.txt:7")


def faults(*sources: Declaration, ignored: dict[str, str] | None = None, complete: bool = True) -> tuple[str, ...]:
    locked = ForkLock(vendored={"part": PART, "third/party": VendoredLock(URL, COMMIT, COMMIT, "2" * 40, kind="submodule")})
    try:
        configure.check_vendored("mini", sources, locked, ignored or {}, complete=complete)
    except SourceError as error:
        if error.reference != "source-unlocked":
            raise
        return error.details
    return ()


def test_source_that_the_lock_pins_otherwise_is_refused() -> None:
    """Another address, another ref, a source of no entry, a kind that cannot be pinned; a password is not shown."""
    secret = "https://user:secret@host.example/other.git"
    assert "in the lock" not in faults(Declaration("part", secret, COMMIT, "x:1"))[0]
    assert "secret" not in faults(Declaration("part", secret, COMMIT, "x:1"))[0]
    assert faults(Declaration("part", URL, "3" * 40, "x:1")) != ()
    assert faults(DECLARED, Declaration("more", URL, "v1", "x:1")) == (f"x:1: more: {URL} at v1 is not in the lock",)
    assert "cannot pin" in faults(DECLARED, Declaration("more", URL, "", "x:1", pinnable=False))[0]


def test_entry_without_effect_is_refused() -> None:
    """Only a configure of every target can show that."""
    assert faults() == ("lock: part: CMake asks for no such source",)
    assert faults(DECLARED, ignored={"gone": "once"}) == ("ignored: gone: CMake asks for no such source",)
