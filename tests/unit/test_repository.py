"""What holds for the repository as a whole: its layers, its pages, and what must not stand in it."""

import ast
import functools
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import write_pages as pages
from sparkwright.bench.recipes import preflight, recipe
from sparkwright.cli.main import COMMANDS, parsers
from sparkwright.gates.core import ladder, server_under_test

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "ci" / "sparkwright"

#: From the bottom up, as CONTRIBUTING.md draws them.
LAYERS = ("core", "client", "forks", "cherry_picks", "builder", "audit", "bench", "gates", "release", "serving", "cli")

#: The demo's miniature upstreams lie in folders that are not packages: they are data.
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if (path.parent / "__init__.py").exists() and "upstreams" not in path.parts)


def name_of(path: Path) -> str:
    """Return the path below the repository, which names a failing case."""
    return path.relative_to(ROOT).as_posix()


def tracked() -> list[Path]:
    """Return the files that git tracks; without git, those of the folders that hold reviewed files."""
    # From a source distribution, or where the checkout belongs to another user, git has no answer.
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if names := [name for name in listed.stdout.decode().split("\0") if name]:
        return [ROOT / name for name in names if (ROOT / name).is_file()]
    folders = ("ci", "forks", "cherry_picks", "build", "tests", "docs")
    return [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts]


def layer(parts: tuple[str, ...]) -> str:
    """Return the layer of a module of the package, given the parts of its name below it."""
    if not parts or parts[0] not in LAYERS:
        return "core" if parts in ((), ("__init__",), ("__version__",)) else "cli"
    return parts[0]


@functools.cache
def tree(path: Path) -> ast.Module:
    """Return the syntax of *path*; the rules share one reading of each file, since there are some hundred."""
    return ast.parse(path.read_bytes())


def imports(path: Path) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yield the modules of the package that *path* imports, anywhere in it: the line, and the parts of its name below the package."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}:{node.lineno}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from ((node.lineno, tuple(name.split(".")[1:])) for name in names if name.split(".")[0] == "sparkwright")


def test_imports_run_one_way() -> None:
    """A module imports from its own layer and from those below it."""
    found = []
    for path in MODULES:
        own = LAYERS.index(layer(path.relative_to(PACKAGE).with_suffix("").parts))
        above = [(line, ".".join(parts)) for line, parts in imports(path) if LAYERS.index(layer(parts)) > own]
        found += [f"{name_of(path)}:{line}: {name}" for line, name in above]

    assert not found


@pytest.mark.parametrize(
    ("pattern", "users"),
    [
        # Only the console writes to the standard streams.
        (r"\bsys\.std(out|err)\b", ["ci/sparkwright/core/console.py"]),
        # It runs handlers of ours around the fork, and loses a Ctrl-C with its lock; `process.wrap_with_limits` does its work.
        ("preexec_fn=", []),
    ],
)
def test_a_module_uses_only_what_it_may(pattern: str, users: list[str]) -> None:
    assert [name_of(path) for path in MODULES if re.search(pattern, path.read_text("utf-8"))] == users


def test_build_holds_reviewed_inputs_only() -> None:
    """A package named build would hide PyPA's, and output there would be taken for a reviewed file."""
    assert [name_of(path) for path in (ROOT / "build").rglob("*") if path.suffix in (".py", ".pyc", ".whl", ".o", ".so", ".log")] == []


def test_no_file_names_a_registry_or_a_machine() -> None:
    """Registries are the user's choice, and a path of one machine means nothing on another."""
    # Put together here, so that this file does not name them either.
    hosts = ["py" + "pi.org", "python" + "hosted.org", "py" + "pi.nvidia.com", "download.py" + "torch.org", "ana" + "conda.org"]
    folders = ["/" + name + "/" for name in ("home", "Users", "work", "root")]
    pattern = re.compile("|".join([*map(re.escape, hosts), *(rf"(?<![\w.}}]){re.escape(folder)}" for folder in folders)]).encode())
    found = [
        f"{name_of(path)}:{number}"
        for path in tracked()
        for number, line in enumerate(path.read_bytes().splitlines(), 1)
        if pattern.search(line)
    ]

    assert not found


@pytest.mark.parametrize("page", pages.PAGES, ids=name_of)
def test_generated_page_is_up_to_date(page: Path) -> None:
    """`python ci/write_pages.py` writes it anew."""
    assert page.read_text("utf-8") == pages.PAGES[page]()


def test_the_page_of_the_architecture_names_what_is_there() -> None:
    """Each file, folder and reference that docs/explanation/architecture.md names exists, and no room of the program is left out."""
    page = (ROOT / "docs" / "explanation" / "architecture.md").read_text("utf-8")
    made = {"dist/", "lock.yaml", "releases/NAME/", "trust/"}
    places = [name for name in re.findall(r"`([\w/.-]+(?:/|\.py|\.yaml))`", page) if "STACK" not in name and name not in made]
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir() and (path / "__init__.py").exists()}

    assert len(places) > 20
    assert [name for name in places if not ((ROOT / name).exists() or (PACKAGE / name).exists())] == []
    assert [name for name in sorted(rooms) if f"| `{name}` |" not in page] == []


def anchors(page: Path) -> set[str]:
    """Return the names by which GitHub links to the headings of *page*."""
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.M | re.S)
    headings = (heading.replace("`", "").strip().lower() for heading in re.findall(r"^#+ (.*)", text, re.M))
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in headings}


def test_links_between_pages_resolve() -> None:
    """Every link to a file or a heading of this repository leads to one."""
    broken = []
    # Templates are filled in elsewhere.
    for page in (path for path in tracked() if path.suffix == ".md" and "templates" not in path.parts):
        for target in re.findall(r"\]\(([^()\s]+)\)", page.read_text("utf-8")):
            name, _, anchor = target.partition("#")
            path = page.parent / name if name else page
            if not target.startswith(("https:", "http:")) and not (
                path.exists() and (not anchor or anchor in anchors(path))
            ):
                broken.append(f"{name_of(page)}: {target}")

    assert broken == []


def test_references_are_stable_names_that_are_declared_once_and_used() -> None:
    """Each is in kebab-case, with what it means and what to do, and stands in the package outside the tables."""
    declared = pages.entries()
    references = [reference for _, reference, advice in declared if advice.means and advice.todo]
    used = {
        node.value
        for path in MODULES
        if path.name != "errors.py"
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }

    assert len(set(references)) == len(declared)
    assert [name for name in references if name not in used or not re.fullmatch(r"[a-z]+(-[a-z]+)*", name)] == []


# docs/failures.md is short, docs/seed-systems.md has a state for every system, and neither names what the program does not have.

FAILURES, SYSTEMS = ((ROOT / "docs" / name).read_text("utf-8") for name in ("failures.md", "seed-systems.md"))
#: A reference has a hyphen; a command, a flag and a message of vLLM do not look like one.
REFERENCE = re.compile(r"`([a-z0-9]+(?:-[a-z0-9]+)+|emulation|repetition)`")
#: A command as a page writes it: its name, and the words after it.
COMMAND = re.compile(r"`(?:sparkwright )?((?:(?:model|patch|release) )?[a-z]+)((?: [^`]+)?)`")


def command_references() -> set[str]:
    """Return every reference of an error of a command, and of a rule of `serve`."""
    rules = re.findall(r'Reason\(\s*"([a-z0-9-]+)"', Path(preflight.__file__).read_text())
    return {reference for _, reference, _ in pages.entries()} | {*preflight.REASONS, *rules, *(trap.id for trap in preflight.load_traps())}


def test_each_failure_names_a_check_of_the_command_or_gate_that_has_it() -> None:
    """A part of the last column, up to a semicolon, is of the gates that it names, or of commands if it names none."""
    rows, wrong = re.findall(r"^\| (?!symptom)(.+) \| (.+) \| (.+) \|$", FAILURES, re.MULTILINE), []
    assert len(rows) > 20
    for _, _, caught in rows:
        assert REFERENCE.search(caught)
        for part in caught.split(";"):
            gates = re.findall(r"\bG\d\b", part)
            assert set(gates) <= set(ladder.GATES)
            owners = [pages.reasons(gate).keys() | server_under_test.REASONS for gate in gates] or [command_references()]
            wrong += [(part, name) for name in REFERENCE.findall(part) if not all(name in owner for owner in owners)]
    assert wrong == []
    known = command_references().union(server_under_test.REASONS, *map(pages.reasons, ladder.GATES))
    named = re.findall(r"`([a-z]+-(?:refused|unpinned|headless|b12x|slower))`", SYSTEMS)
    assert {*REFERENCE.findall(FAILURES), *named} <= known
    assert len(FAILURES.split()) <= 600


@pytest.mark.parametrize(("page", "least"), [(FAILURES, {"plan", "serve"}), (SYSTEMS, {"build", "model inspect", "patch pick"})])
def test_every_command_option_recipe_and_workload_of_the_pages_exists(page: str, least: set[str]) -> None:
    workloads, recipes = (ROOT / "ci" / "gates" / "workloads.yaml").read_text(), recipe.files(ROOT)
    found = [(name, shlex.split(text)) for name, text in COMMAND.findall(page) if name in COMMANDS]
    assert least <= {name for name, _ in found}
    for name, words in found:
        options = {option for action in parsers(COMMANDS[name].module)[name]._actions for option in action.option_strings}
        assert {word for word in words if word.startswith("--")} <= options, (name, words)
        assert name != "serve" or not words or words[0].startswith("-") or words[0] in recipes, words
        # A workload, or a cell of its texts.
        assert "--workload" not in words or f"\n  {words[words.index('--workload') + 1].split()[0]}:" in workloads, words
