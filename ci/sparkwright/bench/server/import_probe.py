"""
Compare what Python would import with the files of a wheel; runs in an environment, by path.

It is started with the variables of a server, so that ``.pth`` files, ``sitecustomize`` and import
hooks have done there what they do to the server. Nothing of the wheel is imported.

    python -P import_probe.py SITE_PACKAGES NAMES

NAMES is a file with the names of files below SITE_PACKAGES, a line each. Prints JSON: name → how an
import of it differs, of the first few.
"""

import sys

STARTED = frozenset(sys.modules)

import builtins  # noqa: E402
import json  # noqa: E402
import threading  # noqa: E402
from importlib.machinery import (  # noqa: E402
    EXTENSION_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    PathFinder,
    SourceFileLoader,
)
from importlib.util import cache_from_source  # noqa: E402
from pathlib import Path, PurePosixPath  # noqa: E402
from types import BuiltinFunctionType  # noqa: E402

#: Differences that are printed; one is enough to refuse.
MOST = 8


def machinery() -> str:
    """Return which part of Python's import system is replaced or added to; empty if none is."""
    loader = SourceFileLoader
    frozen = (loader.exec_module, loader.get_code, loader.get_data, loader.path_stats)
    for method in (*frozen, FileFinder.find_spec, PathFinder.find_spec):
        code = getattr(method, "__code__", None)
        if code is None or not code.co_filename.startswith("<frozen importlib"):
            return f"{method!r} is replaced"
    for function in (builtins.__import__, builtins.compile, builtins.exec):
        if not isinstance(function, BuiltinFunctionType):
            return f"{function!r} is replaced"
    if sys.gettrace() or sys.getprofile() or threading.active_count() > 1:
        return "a thread, a trace or a profile function runs"
    return ""


def difference(site: Path, name: str) -> str:
    """Return how an import of the file *name* below *site* differs; empty if it does not."""
    path = PurePosixPath(name)
    suffixes = [".py", *EXTENSION_SUFFIXES]
    suffix = next((suffix for suffix in suffixes if path.name.endswith(suffix)), "")
    stem = path.name.removesuffix(suffix)
    parts = path.parent.parts if stem == "__init__" else (*path.parent.parts, stem)
    if not suffix or not all(part.isidentifier() for part in parts):
        return ""  # no import can name this file
    module = ".".join(parts)
    if module in STARTED:
        return "it is loaded before anything imports it"
    places = [str(site.joinpath(*parts[:-1]))] if len(parts) > 1 else None
    specs = (finder.find_spec(module, places) for finder in sys.meta_path)
    spec = next(filter(None, specs), None)
    if spec is None or spec.origin != str(site / name):
        return f"{spec.origin if spec else 'nothing'} is imported for it"
    loader = spec.loader
    if type(loader) is ExtensionFileLoader and suffix != ".py":
        return ""
    if type(loader) is not SourceFileLoader:
        return f"{type(loader).__name__} imports it"
    try:
        source = compile((site / name).read_bytes(), str(site / name), "exec", dont_inherit=True)
        # Without a compiled file, this is the same again.
        same = not Path(cache_from_source(str(site / name))).exists()
        return "" if same or loader.get_code(module) == source else "other code is imported"
    except (SyntaxError, ValueError):
        return ""  # the source is for another Python


def main() -> None:
    """Print the differences."""
    sys.dont_write_bytecode = True
    site, names = Path(sys.argv[1]), Path(sys.argv[2]).read_text("utf-8").splitlines()
    faults = {"import": fault} if (fault := machinery()) else {}
    for name in names:
        if len(faults) < MOST and (fault := difference(site, name)):
            faults[name[:200]] = fault[:200]
    # Last, and on a line of its own: startup files may print something.
    print(f"\n{json.dumps(faults)}")  # noqa: T201  the program's output


if __name__ == "__main__":
    main()
