"""Vendored sources: every form in which a tree names one is found, read right or not at all, and must be locked."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.refusals import refusal

from sparkwright.core import cmake_file
from sparkwright.core.git import LINK, REGULAR
from sparkwright.core.git_store import Objects
from sparkwright.forks import vendored
from sparkwright.forks.errors import SourceError
from sparkwright.forks.lock import VendoredLock
from sparkwright.forks.vendored import fetchcontent, gitmodules
from sparkwright.forks.vendored.cmakevalues import Reading
from sparkwright.forks.vendored.declared import Vendored

if TYPE_CHECKING:
    from tests.unit.conftest import Repository

URL = "https://host.example/part.git"
PIN, OTHER = "1" * 40, "2" * 40

Find = Callable[..., "tuple[Vendored, ...]"]


@pytest.fixture
def find(tmp_path: Path) -> Find:
    """Return a function that stores files as a real tree and returns what `vendored.find` finds there."""
    objects = Objects(tmp_path / "objects.git")

    def found(files: Mapping[str, str] | str, url: str = "") -> tuple[Vendored, ...]:
        named = {"CMakeLists.txt": files} if isinstance(files, str) else files
        tree = objects.store_files((path, REGULAR, text.encode("utf-8", "surrogateescape")) for path, text in named.items())
        return vendored.find(objects, tree, url)

    return found


def pins(found: tuple[Vendored, ...]) -> list[tuple[str, str, str]]:
    return [(one.name, one.url, one.ref) for one in found]


# ---- CMake: the forms


@pytest.mark.parametrize(
    ("text", "url", "ref"),
    [
        (f"FetchContent_Declare(part GIT_REPOSITORY {URL} GIT_TAG v1)", URL, "v1"),
        (f'fetchcontent_DECLARE(part\n  GIT_TAG "v1" # why\n  GIT_SHALLOW TRUE\n  GIT_REPOSITORY "{URL}")', URL, "v1"),
        (f"FetchContent_Declare(part GIT_REPOSITORY [[{URL}]] GIT_TAG [==[v1]==])", URL, "v1"),
        (f"FetchContent_Declare(part GIT_REPOSITORY {URL})", URL, "master"),
        (f"FetchContent_Declare(part GIT_REPOSITORY {URL} GIT_TAG RELEASE)", URL, "RELEASE"),
        (f"FetchContent_Populate(part SUBBUILD_DIR s SOURCE_DIR d GIT_REPOSITORY {URL} GIT_TAG v1)", URL, "v1"),
        (f"ExternalProject_Add(part PREFIX ${{X}} GIT_REPOSITORY {URL} GIT_TAG v1)", URL, "v1"),
        ("FetchContent_Declare(part URL https://a.example/x https://b.example/x URL_HASH SHA256=ab)", "https://a.example/x", "SHA256=ab"),
        ("FetchContent_Declare(part URL https://a.example/x.tgz)", "https://a.example/x.tgz", ""),
        ("ExternalProject_Add(part SVN_REPOSITORY https://a.example/s SVN_REVISION -r4)", None, None),
        ("ExternalProject_Add(part HG_REPOSITORY https://a.example/h HG_TAG t)", "https://a.example/h", "t"),
        (f"ExternalProject_Add(part DOWNLOAD_COMMAND fetch it GIT_REPOSITORY {URL})", "", ""),
        ("file(DOWNLOAD https://a.example/part d EXPECTED_HASH SHA256=ab)", "https://a.example/part", "SHA256=ab"),
        ("file(DOWNLOAD https://a.example/part d EXPECTED_MD5 ab)", "https://a.example/part", "MD5=ab"),
        ("file(DOWNLOAD https://a.example/part)", "https://a.example/part", ""),
    ],
)  # fmt: skip
def test_every_form_is_read(find: Find, text: str, url: str | None, ref: str) -> None:
    """Git, archives, other systems and single files; a ref that looks like an option is refused."""
    if url is None:
        with refusal("declaration-unsafe", match=r"CMakeLists\.txt:1"):
            find(text)
    else:
        assert pins(find(text)) == [("part", url, ref)]


@pytest.mark.parametrize(
    "text",
    [
        f"# FetchContent_Declare(part GIT_REPOSITORY {URL})",
        f"#[[ FetchContent_Declare(part GIT_REPOSITORY {URL}) ]]",
        f'message("FetchContent_Declare(part GIT_REPOSITORY {URL})")',
        f"set(TEXT [[FetchContent_Declare(part GIT_REPOSITORY {URL})]])",
        "include(FetchContent)\nFetchContent_MakeAvailable(part)\nFetchContent_Populate(part)\nFetchContent_GetProperties(part)",
        "FetchContent_Declare(part SOURCE_DIR ${PART_SRC_DIR})",
        'ExternalProject_Add(part DOWNLOAD_COMMAND "" SOURCE_DIR ${HERE})',
        "find_package(Git)\nexecute_process(COMMAND git describe --tags)\nexecute_process(COMMAND pip list)",
    ],
)
def test_what_downloads_nothing_is_not_found(find: Find, text: str) -> None:
    assert find(text) == ()


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (f"execute_process(COMMAND ${{GIT_EXECUTABLE}} -C x clone {URL})", "CMakeLists.txt ${git_executable} clone"),
        (f'add_custom_command(OUTPUT x COMMAND sh -c "git clone {URL}")', "CMakeLists.txt git clone"),
        ("add_custom_target(x COMMAND /usr/bin/curl -O https://a.example/x)", "CMakeLists.txt curl"),
        ("execute_process(COMMAND ${Python_EXECUTABLE} -m pip install part)", "CMakeLists.txt pip install"),
        ('CPMAddPackage("gh:a/b#1")', "CMakeLists.txt cpmaddpackage gh:a/b#1"),
        (f"cmake_language(CALL FetchContent_Declare part GIT_REPOSITORY {URL})", "CMakeLists.txt cmake_language"),
        ("FetchContent_Declare(part ${ARGN})", "part"),
        ("if(A)\nFetchContent_Declare(part", "CMakeLists.txt"),
    ],
)
def test_what_cannot_be_read_is_not_silent(find: Find, text: str, name: str) -> None:
    """Programs that fetch, other systems and broken files are found without an address, which no lock can satisfy."""
    (one,) = find(text)
    assert (one.name, one.url, one.ref) == (name, "", "")
    with refusal("source-unlocked", match="mini") as raised:
        vendored.check("mini", [one], {}, {})
    assert raised.value.details[0].startswith("CMakeLists.txt")
    vendored.check("mini", [one], {}, {name: "not part of the build"})


def test_files_are_named_and_conditions_kept(find: Find) -> None:
    """All CMake files of the tree are read, whatever their folder, and nothing else is."""
    declare = f"FetchContent_Declare(part GIT_REPOSITORY {URL} GIT_TAG v1)"
    found = find({
        "CMakeLists.txt": f"if(A AND (B OR C))\n elseif(D)\n  if(E)\n   {declare}\n  endif()\nendif()\n",
        "cmake/x.cmake": f"\nfunction(f x)\n  if(A)\n  else()\n    {declare}\n  endif()\nendfunction()\n",
        "tests/CMakeLists.txt.in": declare,
        "docs/CMakeLists.md": declare,
        "cmake/x.py": declare,
    })  # fmt: skip
    assert [(one.place, one.condition) for one in found] == [
        ("CMakeLists.txt:4", "NOT (A AND (B OR C)) AND (D) AND (E)"),
        ("cmake/x.cmake:5", "function(f x) AND NOT (A)"),
        ("tests/CMakeLists.txt.in:1", ""),
    ]


@pytest.mark.parametrize(
    ("text", "variable"),
    [
        ("if(V)\nFetchContent_Declare(part SOURCE_DIR ${V})\nelse()\n{}\nendif()", "V"),
        ("if(DEFINED ENV{V})\nFetchContent_Declare(part SOURCE_DIR $ENV{V})\nelse()\n{}\nendif()", "ENV{V}"),
        ('if(V)\nset(part_SOURCE_DIR "${V}")\nelse()\nset(part_SOURCE_DIR "${W}")\n{}\nendif()', "V"),
        ("{}", "FETCHCONTENT_SOURCE_DIR_PART"),
        ("FetchContent_Declare(part SOURCE_DIR ${V}/sub)\n{}", "FETCHCONTENT_SOURCE_DIR_PART"),
        ("FetchContent_Declare(other SOURCE_DIR ${V})\n{}", "FETCHCONTENT_SOURCE_DIR_PART"),
    ],
)
def test_the_variable_that_hands_over_a_folder_is_known(find: Find, text: str, variable: str) -> None:
    """What the file itself asks comes first, then FetchContent's own; a call that says all asks no variable of CMake's."""
    declared = text.replace("{}", f"FetchContent_Declare(part GIT_REPOSITORY {URL} GIT_TAG v1)")
    populated = text.replace("{}", f"FetchContent_Populate(part SOURCE_DIR x GIT_REPOSITORY {URL} GIT_TAG v1)")
    assert [one.variable for one in find(declared)] == [variable]
    assert [one.variable for one in find(populated)] == [variable.removeprefix("FETCHCONTENT_SOURCE_DIR_PART")]


@pytest.mark.parametrize(("words", "submodules"), [("", None), ("GIT_SUBMODULES a b/c", ("a", "b/c")), ('GIT_SUBMODULES ""', ())])
def test_its_own_submodules_are_named(find: Find, words: str, submodules: tuple[str, ...] | None) -> None:
    """CMake takes all submodules unless it is told which."""
    assert [one.submodules for one in find(f"FetchContent_Declare(part GIT_REPOSITORY {URL} {words} GIT_PROGRESS ON)")] == [submodules]


# ---- CMake: values


@pytest.mark.parametrize(
    ("before", "ref"),
    [
        ("set(T v1)\nset(${P}_TAG v2)", "v1"),
        ("set(T v1)\nset(${P}T v2)", ""),
        ("set(T v1)", "v1"),
        ('SET(T "v1")', "v1"),
        ("set(N 1)\nset(T v${N})", "v1"),
        ("set(T v0)\nset(T v1)", "v1"),
        ('set(T v1 CACHE STRING "the tag")', "v1"),
        ("if(A)\nset(T v1)\nelse()\nset(T v1)\nendif()", "v1"),
        ("", ""),  # never set
        ("# set(T v1)", ""),
        ("set(T v1)\nunset(T)", ""),
        ("set(T v1;v2)", ""),
        ("set(T v1)\nlist(APPEND T v2)", ""),
        ("set(T v1)\nstring(REPLACE 1 2 T v1)", ""),
        ("set(T v1)\nsome_function(T)", ""),
        ("set(T v1)\nforeach(x a b)\nset(T v2)\nendforeach()", ""),
        ("set(T v1)\nmacro(m)\nset(T v2)\nendmacro()\nm()", ""),
        ("set(T v1)\nforeach(x T U)\nset(${x} v2)\nendforeach()", ""),
        ("set(T v1)\nset(T v2 CACHE STRING why)", ""),
        ("set(T v1 PARENT_SCOPE)", ""),
        ("set(T $ENV{TAG})", ""),
        ("set(T $<IF:1,v1,v2>)", ""),
        ("set(T ${U})", ""),
        ("set(T @TAG@)", ""),
        ("set(T v\\;1)", ""),
        ("set(T v1)\nset(U T)\nset(${U} v2)", ""),
    ],
)
def test_a_variable_is_followed_only_where_there_is_no_doubt(find: Find, before: str, ref: str) -> None:
    found = find(f"{before}\nFetchContent_Declare(part GIT_REPOSITORY {URL} GIT_TAG ${{T}})")
    assert pins(found) == [("part", URL, ref)]


@pytest.mark.parametrize("expression", ["$<IF:1,a,b>", "$ENV{T}", "${${T}}", "v$CACHE{T}"])
def test_an_expression_is_not_evaluated(find: Find, expression: str) -> None:
    assert pins(find(f'FetchContent_Declare(part GIT_REPOSITORY {URL} GIT_TAG "{expression}")')) == [("part", URL, "")]


def test_values_in_branches_stay_together(find: Find) -> None:
    """The url of one branch is never paired with the tag of another."""
    text = """\
if(DEVICE STREQUAL "rocm")
  set(REPO https://host.example/a.git)
  set(TAG v1)
else()
  set(REPO https://host.example/b.git)
  set(TAG v2)
endif()
if(UNRELATED)
  set(OTHER x)
endif()
FetchContent_Declare(part GIT_REPOSITORY ${REPO} GIT_TAG ${TAG})
"""
    assert [(one.url, one.ref, one.condition) for one in find(text)] == [
        ("https://host.example/a.git", "v1", "(DEVICE STREQUAL rocm)"),
        ("https://host.example/b.git", "v2", "NOT (DEVICE STREQUAL rocm)"),
    ]


def test_a_branch_that_does_not_set_leaves_a_doubt(find: Find) -> None:
    text = f"if(A)\nset(T v1)\nendif()\nFetchContent_Declare(part GIT_REPOSITORY {URL} GIT_TAG ${{T}})"
    assert [(one.ref, one.condition) for one in find(text)] == [("v1", "(A)"), ("", "NOT (A)")]


def test_one_name_in_two_branches_is_two_sources(find: Find) -> None:
    declare = f"FetchContent_Declare(part GIT_REPOSITORY {URL} GIT_TAG %s)"
    found = find(f"if(A)\n{declare % 'v1'}\nelse()\n{declare % 'v2'}\nendif()")
    assert [(one.ref, one.condition) for one in found] == [("v1", "(A)"), ("v2", "NOT (A)")]


def test_a_body_that_runs_later_sees_only_what_never_changes(find: Find) -> None:
    declare = f"FetchContent_Declare(part GIT_REPOSITORY {URL} GIT_TAG ${{T}})"
    assert pins(find(f"set(T v1)\nfunction(f)\n{declare}\nendfunction()\nf()")) == [("part", URL, "v1")]
    assert pins(find(f"set(T v1)\nfunction(f)\n{declare}\nendfunction()\nset(T v2)\nf()")) == [("part", URL, "")]
    assert pins(find(f"set(T v1)\nfunction(f T)\n{declare}\nendfunction()\nf(v2)")) == [("part", URL, "")]
    assert pins(find(f"set(T v1)\nforeach(x a b)\n{declare}\nset(T v2)\nendforeach()")) == [("part", URL, "")]


def test_a_variable_that_another_file_sets_is_doubtful(find: Find) -> None:
    declare = f"set(T v1)\ninclude(versions.cmake)\nFetchContent_Declare(part GIT_REPOSITORY {URL} GIT_TAG ${{T}})"
    assert pins(find({"CMakeLists.txt": declare, "versions.cmake": "Set( T\n v2)"})) == [("part", URL, "")]
    assert pins(find({"CMakeLists.txt": declare, "versions.cmake": "set(TT v2)\nmessage(${T})"})) == [("part", URL, "v1")]


def test_too_many_ways_are_not_followed(find: Find) -> None:
    """A tree cannot make the reader run forever: 2^40 ways through a file count as not readable."""
    branches = "".join(f"if(A{number})\nset(T v{number})\nendif()\n" for number in range(40))
    assert pins(find(f"{branches}FetchContent_Declare(part GIT_REPOSITORY {URL} GIT_TAG ${{T}})")) == [("part", URL, "")]


def test_a_variable_that_doubles_itself_fills_no_memory(find: Find) -> None:
    doubled = "set(T v1)\n" + 60 * 'set(T "${T}${T}")\n' + "set(U ${T};${T})\n"
    assert pins(find(f"{doubled}FetchContent_Declare(part GIT_REPOSITORY {URL} GIT_TAG ${{U}})")) == [("part", URL, "")]


def chain(arms: list[tuple[str, list[str]]], rest: list[str] | None) -> str:
    """Return a chain of branches; any of them may be empty."""
    lines = "\nelse".join("\n".join([f"if({flag})", *body]) for flag, body in arms)
    return "\n".join([lines, *(["else()", *rest] if rest is not None else []), "endif()"])


def branches(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    body = st.lists(inner, max_size=3)
    return st.builds(chain, st.lists(st.tuples(st.sampled_from("ABC"), body), min_size=1, max_size=2), st.none() | body)


SETS = st.tuples(st.sampled_from("TU"), st.sampled_from(["1", "2", "${U}x", "${T}"])).map(lambda drawn: f"set({drawn[0]} {drawn[1]})")
STATEMENTS = st.recursive(SETS, branches, max_leaves=8)


@pytest.mark.skipif(not shutil.which("cmake"), reason="compares with CMake itself, which is not installed")
@settings(max_examples=60)
@given(st.lists(STATEMENTS, min_size=1, max_size=5))
def test_whatever_cmake_would_do_is_among_the_answers(program: list[str]) -> None:
    """For every setting of its options, CMake itself gives a tag that was found, or one of which the reader says that it is unknown."""
    text = "\n".join(["set(T 0)", *program, ""])
    commands = cmake_file.parse(f'{text}declare(part [[T=]] "${{T}}")'.encode(), "x")
    answers = {expansion.values[2] for expansion in Reading(commands, lambda _: False).expand(len(commands) - 1)}
    bodies = [
        "".join(f"set({flag} {value})\n" for flag, value in zip("ABC", values, strict=True)) + text
        for values in itertools.product(("ON", "OFF"), repeat=3)
    ]
    script = "".join(f'function(f{number})\n{body}message("<${{T}}>")\nendfunction()\nf{number}()\n' for number, body in enumerate(bodies))
    with tempfile.NamedTemporaryFile("w", suffix=".cmake") as file:
        file.write(script)
        file.flush()
        done = subprocess.run(["cmake", "-P", file.name], capture_output=True, text=True, check=True)
    real = {line[1:-1] for line in done.stderr.splitlines()}
    assert real <= answers or None in answers


# ---- submodules


def superproject(repository: Repository, modules: str | None, *paths: str) -> str:
    """Commit *modules* as .gitmodules and a link to the commit `PIN` at each path; return the tree."""
    repository.commit({".gitmodules": modules.encode("utf-8", "surrogateescape")} if modules is not None else {"file": b""})
    for path in paths:
        repository.git("update-index", "--add", "--cacheinfo", f"160000,{PIN},{path}")
    return repository.git("write-tree")


def section(path: str, url: str, name: str = "") -> str:
    return f'[submodule "{name or path}"]\n\tpath = {path}\n\turl = {url}\n'


def submodules(repository: Repository, tree: str, url: str = "") -> tuple[Vendored, ...]:
    return vendored.find(Objects(repository.path / ".git"), tree, url)


def test_submodules_have_their_commit_and_address(repository: Repository) -> None:
    tree = superproject(repository, section("a", URL, "x") + section("b/c", URL), "a", "b/c")
    assert submodules(repository, tree) == (
        Vendored("a", "submodule", URL, PIN, ".gitmodules", 2),
        Vendored("b/c", "submodule", URL, PIN, ".gitmodules", 5),
    )


def test_a_link_that_gitmodules_does_not_name_has_no_address(repository: Repository) -> None:
    tree = superproject(repository, section("gone", URL), "a")
    assert pins(submodules(repository, tree)) == [("a", "", PIN)]


def test_a_section_without_a_link_is_nothing(repository: Repository) -> None:
    """git would not read it either."""
    assert submodules(repository, superproject(repository, section("gone", "ext::x"))) == ()


def test_a_tree_without_gitmodules_still_has_its_links(repository: Repository) -> None:
    found = submodules(repository, superproject(repository, None, "a"))
    assert pins(found) == [("a", "", PIN)]
    with refusal("source-unlocked") as raised:
        vendored.check("mini", found, {}, {})
    assert raised.value.details == (".gitmodules: a: the tree does not say where from in a way that can be read",)


def test_a_linked_gitmodules_is_none(tmp_path: Path) -> None:
    """git itself does not follow a .gitmodules that is a symbolic link."""
    objects = Objects(tmp_path / "objects.git")
    tree = objects.store_files([(".gitmodules", LINK, b"elsewhere"), ("elsewhere", REGULAR, section("a", URL).encode())])
    assert vendored.find(objects, tree) == ()


@pytest.mark.parametrize(
    "address",
    ["ext::sh -c x", "fd::17", "-u./run", "--upload-pack=x", "https://a.example/\a", '"a\\tb"', "../../../../b.example/x", "x" * 3000],
)
def test_an_address_that_could_do_something_is_refused(repository: Repository, address: str) -> None:
    tree = superproject(repository, section("a", address), "a")
    with refusal("declaration-unsafe"):
        submodules(repository, tree, "https://host.example/group/fork.git")


@pytest.mark.parametrize(
    "modules",
    [
        "[submodule",
        '[submodule "a"]\n\tpath = a\n\turl = https://a.example\n\turl = https://b.example\n',
        section("a", "https://a.example", "x") + section("a", "https://b.example", "y"),
    ],
)
def test_a_gitmodules_that_git_could_read_in_two_ways_is_refused(repository: Repository, modules: str) -> None:
    with refusal("declaration-unsafe"):
        submodules(repository, superproject(repository, modules, "a"))


def test_gitmodules_includes_nothing(repository: Repository, tmp_path: Path) -> None:
    """An include in it cannot make git read a file of this machine."""
    (tmp_path / "secret").write_text(section("a", "https://secret.example"))
    tree = superproject(repository, f"[include]\n\tpath = {tmp_path / 'secret'}\n", "a")
    assert pins(submodules(repository, tree)) == [("a", "", PIN)]


@pytest.mark.parametrize(
    "base",
    ["https://host.example/g/f.git", "https://host.example/g/f/", "ssh://git@host.example/g/f", "git@host.example:g/f", "file:///srv/g/f"],
)
@pytest.mark.parametrize("address", ["../x.git", "./x", "../../x", "../x/../y", "https://other.example/x", "../x/", "./../x", "/srv/x"])
def test_relative_addresses_are_those_of_git(repository: Repository, tmp_path: Path, base: str, address: str) -> None:
    """`git submodule init` gives the same."""
    superproject(repository, section("a", address), "a")
    repository.git("remote", "add", "origin", base)
    repository.git("submodule", "init")
    theirs = repository.git("config", "submodule.a.url")
    assert gitmodules.resolved(address, base) == theirs


def test_a_relative_address_without_a_base_is_unknown() -> None:
    assert gitmodules.resolved("../x", "") == ""


@given(st.text(max_size=60), st.sampled_from(["", "https://host.example/a/b.git", "git@host.example:a/b"]))
def test_any_address_is_refused_or_plain(address: str, base: str) -> None:
    try:
        result = gitmodules.resolved(address, base)
    except SourceError as error:
        if error.reference != "declaration-unsafe":
            raise
        return
    assert result.isprintable()
    assert not result.startswith("-")
    assert not result.startswith(("ext::", "fd::"))


# ---- evil CMake, and cargo


@pytest.mark.parametrize("address", ["ext::sh -c x", "-u./run", "https://a.example/\a"])
def test_cmake_cannot_name_a_program_as_an_address(find: Find, address: str) -> None:
    for text in (f'"{address}" GIT_TAG v1', f'{URL} GIT_TAG "-{address}"'):
        with refusal("declaration-unsafe", match=r"CMakeLists\.txt:1"):
            find(f"FetchContent_Declare(part GIT_REPOSITORY {text})")


@given(st.binary(max_size=200))
def test_no_file_breaks_the_reader(text: bytes) -> None:
    for prefix in (b"", b"FetchContent_Declare(part GIT_REPOSITORY ", b"set(T x)\nif(", b"file(DOWNLOAD "):
        try:
            found = fetchcontent.read("x.cmake", prefix + text, lambda _: False)
        except SourceError as error:
            if error.reference != "declaration-unsafe":
                raise
            continue
        assert all((one.url + one.ref).isprintable() for one in found)


def test_cargo_sources_are_those_of_its_own_lock(find: Find) -> None:
    text = f"""\
[[package]]
name = "here"
[[package]]
name = "crate"
source = "registry+https://registry.example/index"
checksum = "ab"
[[package]]
name = "part"
source = "git+{URL}?rev=v1#{PIN}"
"""
    found = find({"rust/Cargo.lock": text, "broken/Cargo.lock": "[[package"})
    assert [(one.name, one.kind, one.url, one.ref) for one in found] == [
        ("broken/Cargo.lock", "cargo", "", ""),
        ("part", "cargo", URL, PIN),
        ("rust/Cargo.lock", "cargo", "https://registry.example/index", "in the file"),
    ]


# ---- the lock


FOUND = Vendored("part", "fetchcontent", URL, "v1", "CMakeLists.txt", 3, "PART_SRC_DIR", "(A)")
LOCKED = VendoredLock(url=URL, ref="v1", commit=PIN, tree=OTHER, kind="fetchcontent", variable="PART_SRC_DIR")


def faults(found: list[Vendored], locked: Mapping[str, VendoredLock], ignored: Mapping[str, str]) -> list[str]:
    """Return the lines of the error, or none where there is no error."""
    try:
        vendored.check("mini", found, locked, ignored)
    except SourceError as error:
        if error.reference != "source-unlocked":
            raise
        return list(error.details)
    return []


def test_what_is_locked_or_ignored_passes() -> None:
    assert faults([FOUND], {"part": LOCKED}, {}) == []
    assert faults([FOUND], {}, {"part": "only tests use it"}) == []
    assert faults([FOUND], {"part": msgspec.structs.replace(LOCKED, commit="unresolved", tree="unresolved")}, {}) == []
    assert faults([], {}, {}) == []


def test_a_source_that_the_lock_does_not_name_is_an_error() -> None:
    assert faults([FOUND], {}, {}) == [f"CMakeLists.txt:3: part: {URL} at v1 is not in the lock, under (A)"]
    assert len(faults([FOUND], {}, {"part": "  "})) == 1


@pytest.mark.parametrize("field", ["url", "ref", "kind"])
def test_a_lock_that_names_another_state_is_an_error(field: str) -> None:
    entry = msgspec.structs.replace(LOCKED, **{field: "submodule" if field == "kind" else "else"})
    (line,) = faults([FOUND], {"part": entry}, {})
    assert line.startswith("CMakeLists.txt:3: part: the tree says")


def test_a_commit_in_the_tree_is_the_one_in_the_lock() -> None:
    found = msgspec.structs.replace(FOUND, ref=PIN)
    assert faults([found], {"part": msgspec.structs.replace(LOCKED, ref=PIN)}, {}) == []
    assert len(faults([found], {"part": msgspec.structs.replace(LOCKED, ref=PIN, commit=OTHER)}, {})) == 1


def test_one_of_two_by_the_same_name_can_be_ignored_by_its_ref() -> None:
    other = msgspec.structs.replace(FOUND, ref="v2", condition="NOT (A)")
    assert len(faults([FOUND, other], {"part": LOCKED}, {})) == 1
    assert faults([FOUND, other], {"part": LOCKED}, {"part@v2": "another machine"}) == []


def test_an_entry_without_effect_is_an_error() -> None:
    assert faults([FOUND], {"part": LOCKED, "gone": LOCKED}, {}) == ["lock: gone: the tree names no such source"]
    assert faults([FOUND], {"part": LOCKED}, {"gone": "why"}) == ["ignored: gone: the tree names no such source"]
    assert faults([FOUND], {"part": LOCKED, "part/nested": LOCKED}, {}) == []


def test_an_sdist_may_carry_what_git_has_as_submodules() -> None:
    entry = msgspec.structs.replace(LOCKED, kind="submodule")
    assert faults([], {"3rdparty/part": entry}, {"3rdparty/other": "not built"}) == []


def test_a_password_in_an_address_is_not_shown() -> None:
    found = msgspec.structs.replace(FOUND, url="https://me:secret@host.example/x")
    assert "secret" not in "".join(faults([found], {}, {}) + faults([found], {"part": LOCKED}, {}))


@pytest.mark.parametrize("kind", ["externalproject", "download", "cargo"])
def test_what_no_lock_can_name_must_be_ignored(kind: str) -> None:
    found = msgspec.structs.replace(FOUND, kind=kind)
    assert len(faults([found], {"part": LOCKED}, {})) == 1
    assert faults([found], {}, {"part": "why"}) == []


def test_the_files_to_bring_are_those_that_are_read(repository: Repository) -> None:
    """A store that has only the tree can fetch the files by these ids, and no others are needed."""
    repository.commit({"CMakeLists.txt": b"x()", "a/b.cmake": b"y()", "a/b.cu": b"", "rust/Cargo.lock": b""})
    tree = superproject(repository, section("a", URL))
    objects = Objects(repository.path / ".git")
    needed = vendored.files(objects, tree)
    assert sorted(needed) == [".gitmodules", "CMakeLists.txt", "a/b.cmake", "rust/Cargo.lock"]
    assert all(objects.has(blob) for blob in needed.values())
