"""
What a server made of a model: as far as its API tells, and module by module, by loading the model in the server's own Python.

The second is the diagnosis that explains a slow model: a projection whose method is ``UnquantizedLinearMethod`` is read with all its bytes,
whatever the name of the checkpoint says.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from pathlib import Path

import msgspec

from sparkwright.core import process
from sparkwright.core.console import console, size
from sparkwright.core.errors import CommandError
from sparkwright.forks.context import RunContext
from sparkwright.gates.errors import ModelError
from sparkwright.gates.model import checkpoint
from sparkwright.gates.model import names as modulenames
from sparkwright.gates.model.modules import Audit
from sparkwright.gates.model.names import GROUPS
from sparkwright.gates.server.client import Client, ServerInvalid

#: Of a model with some ten thousand modules.
LARGEST = 64 << 20
#: A part of a model that has grown by this when it was loaded was unpacked.
GROWN = 1.1
SCRIPT = Path(__file__).parent / "inside" / "listmodules.py"


class Served(msgspec.Struct, frozen=True):
    """What a server says that it serves, and what of that does not fit the folder."""

    model: str = ""
    version: str = ""
    limit: int = 0
    cache: str = ""
    wrong: tuple[str, ...] = ()


class LoadedTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor of a loaded module; its *bytes* are 0 where another module has it, too."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int


class LoadedModule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A module in a server: its class, and the class of its quantisation method; empty for a module without one."""

    name: str
    kind: str
    method: str
    tensors: tuple[LoadedTensor, ...]


class Loaded(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model in a server of that *version* of vLLM."""

    version: str
    modules: tuple[LoadedModule, ...]


class LoadedRow(msgspec.Struct, frozen=True):
    """Loaded modules that are alike."""

    group: str
    modules: str
    method: str
    dtypes: tuple[str, ...]
    count: int
    bytes: int


def served(url: str, folder: Path, found: Audit) -> Served:
    """Return what the server at *url* says, held against the model in *folder*; what it answers is as little believed as the folder."""
    client = Client(url, timeout=20, deadline=60)
    try:
        name, limit, version, told = client.model(), client.limit(), client.version(), client.metrics()
    except ServerInvalid as error:
        return Served(wrong=(f"{error.reference}: {error.says}",))
    cache = next((match[1] for one in told if (match := re.search(r'cache_config_info\{.*\bcache_dtype="([\w.]{1,40})"', one))), "")
    wrong = []
    if name.rstrip("/").rpartition("/")[2] != folder.resolve().name:
        console.note(f"the server calls its model {name[:200]!r}; by the API nobody can tell whether that is {folder.resolve().name}")
    config = checkpoint.read_config(folder)
    most = config.get("max_position_embeddings")
    if isinstance(most, int) and limit > most:
        wrong.append(f"the server takes {limit:,} tokens; the model was made for {most:,}")
    if cache:
        console.note(f"the server keeps its cache as {cache!r}; the audit counts {size(found.kept)} for a token (--kv-cache-dtype)")
    return Served(name, version, limit, cache, tuple(wrong))


def show_served(said: Served) -> None:
    """Print what a server says."""
    if said.model:
        cache = f", cache as {said.cache!r}" if said.cache else ""
        console.note(f"served by vLLM {said.version}: {said.model}, {said.limit:,} tokens{cache}")


def listed(context: RunContext, python: Path, folder: Path) -> Loaded:
    """
    Return the modules of the model in *folder* as the vLLM of *python* loads them.

    Raises:
        command-failed: vLLM does not load it; the error holds its last words. checkpoint-invalid: What it wrote is no list of modules.
    """
    if not python.is_file():
        raise CommandError(
            "tool-missing", f"There is no Python {python}.", todo="Name the Python of an environment with vLLM, such as VENV/bin/python."
        )
    with console.step(f"load {folder.resolve().name} in {python}"), context.store.building(context.store.root / "work" / "modules") as work:
        # Its path as it is named: a link into the environment is what makes a Python that environment's.
        command: list[str | Path] = [python.absolute(), "-I", SCRIPT, folder.absolute(), work / "answer.json"]
        process.run(command, log=context.store.folder("logs") / "modules.log", what="vLLM does not load the model.")
        with (work / "answer.json").open("rb") as stream:
            data = stream.read(LARGEST + 1)
    try:
        if len(data) > LARGEST:
            raise ValueError(f"more than {LARGEST:,} bytes")
        return msgspec.json.decode(data, type=Loaded)
    except ValueError as error:
        raise ModelError("checkpoint-invalid", "What vLLM wrote of its modules cannot be read.", details=[str(error)[:300]]) from error


def rows(found: Loaded, layers: int) -> list[LoadedRow]:
    """Return the modules of a model of so many decoder *layers*, those that are alike together."""
    alike: dict[tuple[str, str, str], list[LoadedModule]] = defaultdict(list)
    for module in found.modules:
        name = modulenames.of(f"{module.name}.weight", layers)
        alike[name.group, name.short, module.method].append(module)
    made = [
        LoadedRow(
            group, short, method, tuple(sorted({tensor.dtype for one in members for tensor in one.tensors})), len(members),
            sum(tensor.bytes for one in members for tensor in one.tensors),
        )
        for (group, short, method), members in alike.items()
    ]  # fmt: skip
    return sorted(made, key=lambda row: (GROUPS.index(row.group), row.modules))


def grown(found: Loaded, audit: Audit) -> list[str]:
    """Return, for people, the parts of a model that take more bytes loaded than stored."""
    before, after = Counter[str](), Counter[str]()
    for stored in audit.rows:
        before[_part(stored.group)] += stored.bytes
    for row in rows(found, audit.layers):
        # Tables of angles and the like are made when a model is loaded, and belong to no method.
        after[_part(row.group)] += row.bytes if row.method else 0
    parts = [part for part, size_ in before.items() if size_ > 1e5 and after[part] > GROWN * size_]
    return [f"{part}: {size(before[part])} stored, {size(after[part])} loaded" for part in parts]


def _part(group: str) -> str:
    # A server joins projections that a checkpoint keeps apart.
    return group.partition(" ")[0] if group.startswith("attention") else group


def show_listed(found: Loaded, audit: Audit) -> None:
    """Print what a server made of the model: each kind of module with its method, and what has grown."""
    shown = [row for row in rows(found, audit.layers) if row.bytes]
    cells = [
        [row.group, row.modules, row.method or "–", " + ".join(row.dtypes), f"{row.count:,}", size(row.bytes)]
        for row in sorted(shown, key=lambda row: -row.bytes)[:24]
    ]
    console.table(f"loaded by vLLM {found.version}", ["group", "modules", "method", "types", ">count", ">bytes"], cells, result=True)
    for says in grown(found, audit):
        console.warn(f"larger in the server than in the checkpoint: {says}")
