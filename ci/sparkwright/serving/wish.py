"""What somebody wants served, as the command line or the environment of a container says it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

#: What vLLM may take of the memory where nobody says: as seed report 001 has it, a quarter is left to everything else.
SHARE = 0.75
HOST, PORT = "127.0.0.1", 8000
RAY_PORT = 6379

Role = Literal["", "head", "worker"]


class Wish(msgspec.Struct, frozen=True):
    """
    What is wanted; what nobody said is None or empty.

    Attributes:
        recipe, model: A recipe, a model (its folder, or its name on the hub), or both: the recipe with the checkpoint in that folder.
        revision: Commit or branch of the model, where *model* is a name.
        name: Under which the model is served.
        share: Of the memory, for ``--gpu-memory-utilization``. *length*: ``--max-model-len``. *requests*: ``--max-num-seqs``.
        parallel: ``--tensor-parallel-size``.
        flags: Further arguments of ``vllm serve``, each a word. *variables*: of its environment.
        passed: Variables of our own environment that go on to the server.
        floor: GiB that stay free.
        download: Whether vLLM may fetch the model.
        role: Of this machine among several. *head*: the address of the head, ``HOST:PORT``. *nodes*: how many there are.
        address: Of this machine on the network that the nodes share.
        patience: Seconds until the server must be ready; for the head also until all nodes are there.
    """

    recipe: str = ""
    model: str = ""
    revision: str = ""
    host: str = HOST
    port: int = PORT
    name: str = ""
    share: float | None = None
    length: int | None = None
    requests: int | None = None
    parallel: int | None = None
    flags: tuple[str, ...] = ()
    variables: dict[str, str] = {}
    passed: dict[str, str] = {}
    floor: float | None = None
    download: bool = False
    role: Role = ""
    head: str = ""
    nodes: int | None = None
    address: str = ""
    ray_port: int = RAY_PORT
    patience: float | None = None


class Where(msgspec.Struct, frozen=True):
    """
    With what it is served.

    Attributes:
        python: Of the environment. *root*: of the reviewed data.
        log: What vLLM prints goes there; None for a file in the store.
    """

    python: Path
    root: Path
    log: Path | None = None
