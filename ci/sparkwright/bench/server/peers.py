"""
Machines that serve one model together, by vLLM's own processes: found, compared and measured before
any of them loads weights.

The others connect to the first one. Each states what must be equal, and each compares all the
statements, so that all refuse the same; the arguments of vLLM are the first one's. The connections
stay open: one that closes ends the servers of all machines, since vLLM itself waits for a lost one.
"""

import contextlib
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import msgspec
import psutil

from sparkwright.bench.model.checkpoint import model_digest
from sparkwright.bench.server import flags, wheel_identity
from sparkwright.client.environment import installed_at
from sparkwright.core.console import console
from sparkwright.core.errors import Advice, SparkwrightError, UsageError
from sparkwright.core.process import Limits, run_limited

#: Seconds within which all machines must be there, and the link must be measured. Proposed.
PATIENCE, MEASURING = 1800.0, 120.0
#: Bytes of a message of statements.
LARGEST = 1 << 20
#: The least share of the speed that the interfaces state. A fast link has 200 Gb/s; an all-reduce
#: that takes a network of 10 Gb/s instead is below this share. Proposed.
SLOWEST = 0.05
#: Arguments of vLLM for several machines.
EXECUTOR, HOSTS = "--distributed-executor-backend", "--nnodes"
PLACE = ("--node-rank", "--master-addr", "--master-port", "--headless")
#: Arguments that each machine decides for itself.
OWN = ("--kv-cache-memory-bytes", "--gpu-memory-utilization", "--node-rank", "--headless")
#: Run by the Python that serves: prints the bytes that an all-reduce moves in a second. NCCL uses
#: what vLLM will use.
_LINK = """\
import datetime, os, sys, time
import torch, torch.distributed as dist
host, port, rank, nodes, seconds = sys.argv[1:]
gpu, rank, nodes, size, rounds = torch.cuda.is_available(), int(rank), int(nodes), 32 << 20, 4
dist.init_process_group(
    "nccl" if gpu else "gloo", init_method=f"tcp://{host}:{port}", rank=rank, world_size=nodes,
    timeout=datetime.timedelta(seconds=float(seconds)))
numbers = torch.ones(size // 4, device="cuda" if gpu else "cpu")
def wait():
    return float(numbers[0])
dist.all_reduce(numbers)
wait()
begin = time.perf_counter()
for _ in range(rounds):
    dist.all_reduce(numbers)
wait()
print(2 * (nodes - 1) / nodes * rounds * size / (time.perf_counter() - begin), flush=True)
os._exit(0)
"""


class PeerError(SparkwrightError):
    """Machines cannot serve together."""

    references: ClassVar[Mapping[str, Advice]] = {
        "address-missing": Advice(
            "The address that is given for this machine is another one's.",
            "Give --node-address an address above, of the interface with the fast link; `ip -br "
            "address` lists them.",
        ),
        "link-failed": Advice(
            "The machines found each other, and the torch that would serve cannot compute over "
            "them.",
            "Read its lines above; NCCL_DEBUG=INFO shows more. A firewall must let all ports "
            "between the machines pass, and `sparkwright doctor` names kernels that break NCCL.",
        ),
        "link-slow": Advice(
            "An all-reduce has less than a twentieth of the speed that the interfaces state, so "
            "it takes another way or the cable is faulty.",
            "Check NCCL_SOCKET_IFNAME and NCCL_IB_HCA, the cable and `ethtool INTERFACE`; the "
            "--node-address of all machines belongs to the fast link.",
        ),
        "peer-missing": Advice(
            "Not all machines that serve together came within half an hour, or one ended before "
            "all were compared.",
            "Start `serve` on each. --join names the address that the first one has as "
            "--node-address, --nodes and --node-port are the same, and no firewall is between.",
        ),
        "peers-differ": Advice(
            "The machines have not the same release, model or kind of link, so they would answer "
            "wrongly, or hang.",
            "Make equal what the lines above show: install the same release, copy the model "
            "(`sparkwright serve --copy-model HOST`), set the same MTU, use the interfaces of the "
            "fast link.",
        ),
    }


class Machines(msgspec.Struct, frozen=True):
    """
    The machines of a server, as this one sees them.

    Attributes:
        nodes: How many they are.
        address: Of this machine on their network; empty if it is not known.
        join: Address of the first one; empty if this is the first.
        rank: The number of this machine; 0 for the first.
        port: Where they meet; vLLM's processes do at the next one.
    """

    nodes: int
    address: str = ""
    join: str = ""
    rank: int = 0
    port: int = 29501

    @property
    def first(self) -> str:
        return self.join or self.address

    def words(self) -> list[str]:
        """
        Return vLLM's own arguments for them.

        Raises:
            UsageError: The address of this machine is not known.
        """
        if not self.address:
            raise UsageError(
                "usage",
                f"It is served by {self.nodes} machines, and the address of this one is missing.",
                todo="Start `serve` on each, with --node-address and that machine's address on "
                "their network, and on all but the first with --join and the first one's address. "
                "`gate` and `bench` take their own as --variable VLLM_HOST_IP=ADDRESS.",
            )
        words = [
            f"--node-rank={self.rank}", f"--master-addr={self.first}", f"{EXECUTOR}=mp",
            f"{HOSTS}={self.nodes}", f"--master-port={self.port + 1}",
        ]  # fmt: skip
        return words + ["--headless"] * (self.rank > 0)

    def variables(self) -> dict[str, str]:
        """
        Return the variables by which all libraries speak over the interface of this machine.

        Raises:
            address-missing: As `interface`.
        """
        card = interface(self.address)
        return {
            "NCCL_SOCKET_IFNAME": card, "GLOO_SOCKET_IFNAME": card, "VLLM_HOST_IP": self.address
        }  # fmt: skip


def taken_over(words: Sequence[str]) -> bool:
    """Return whether the user's *words* spread the server: over Ray, or by all of vLLM's flags."""
    return flags.value(words, EXECUTOR) == "ray" or bool(flags.value(words, HOSTS))


class Statement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    What a machine states to the others.

    Attributes:
        address, rank: Its own.
        release: The installed release and the digest of its lock; vLLM's version without one.
        model: The digest of the model's files.
        arguments: Of vLLM.
        mtu: Bytes of a packet of its interface. *rdma*: whether that reads memory by itself.
        speed: Gb/s that the interface states; 0 if it states none.
    """

    address: str
    rank: int
    release: str
    model: str
    arguments: tuple[str, ...]
    mtu: int
    rdma: bool
    speed: float


#: What must be equal on all machines.
EQUAL = ("release", "model", "mtu", "rdma")


def interface(address: str) -> str:
    """
    Return the interface of this machine that has *address*.

    Raises:
        address-missing: None has.
    """
    addresses = dict[str, str]()
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            addresses[entry.address] = name
    if address in addresses:
        return addresses[address]
    raise PeerError(
        "address-missing",
        f"No interface of this machine has the address {address}.",
        details=[f"{name}: {own}" for own, name in addresses.items()],
    )


def state(machines: Machines, python: Path, model: Path, words: Sequence[str]) -> Statement:
    """
    Return what this machine states, whose *python* runs vLLM with the arguments *words*.

    Raises:
        address-missing: As `interface`.
    """
    name, marker = interface(machines.address), installed_at(python.absolute().parents[1])
    card = psutil.net_if_stats()[name]
    return Statement(
        machines.address,
        machines.rank,
        f"{marker.name}, {marker.key}" if marker else f"vLLM {wheel_identity.version(python)}",
        model_digest(model),
        tuple(words),
        card.mtu,
        Path("/sys/class/net", name, "device", "infiniband").is_dir(),
        card.speed / 1000,
    )


def gather(
    machines: Machines,
    python: Path,
    model: Path,
    words: Sequence[str],
    variables: Mapping[str, str],
) -> tuple[list[socket.socket], tuple[str, ...]]:
    """
    Wait for the other machines, and check that they fit.

    Returns:
        The connections to them, and the arguments of vLLM here: the first machine's, with `OWN` of
        *words*.

    Raises:
        peer-missing, peers-differ, link-failed, link-slow: They do not serve together.
        address-missing: As `interface`.
    """
    nodes, first, port = machines.nodes, machines.first, machines.port
    if not machines.join:
        console.note(
            "waiting for the other machines; on each: sparkwright serve … "
            f"--join {first} --node-address ADDRESS"
        )
    own = state(machines, python, model, words)
    links, statements = meet(own, nodes, first, port)
    compare(statements, nodes)
    rate = measure(python, own, nodes, first, port + 1, variables)
    console.note(f"{nodes} machines are equal, and their link gives {rate:.2f} GB/s")
    judge(rate, statements)
    head = next(statement for statement in statements if not statement.rank)
    arguments = list[str]()
    for argument in flags.parse(words):
        arguments += argument.words if argument.name in OWN else ()
    for argument in flags.parse(head.arguments):
        arguments += () if argument.name in OWN else argument.words
    return links, tuple(arguments)


def meet(
    own: Statement, nodes: int, head: str, port: int
) -> tuple[list[socket.socket], list[Statement]]:
    """
    Wait until all *nodes* have stated what they are, and return their statements.

    The first machine (rank 0) listens, collects a statement from each other one, and sends all of
    them back. Its connections to the others are returned with them; another machine has one
    connection, to the first.

    Raises:
        peer-missing: They are not all there within `PATIENCE`.
    """
    end, peers, statements = time.monotonic() + PATIENCE, [], [own]
    try:
        if own.rank:
            peers = [_connect(head, port, end)]
            peers[0].sendall(msgspec.json.encode([own]) + b"\n")
            return peers, _receive(peers[0], end)
        with socket.create_server((own.address, port)) as listener:
            while len(peers) < nodes - 1:
                listener.settimeout(max(0.01, end - time.monotonic()))
                peer, _ = listener.accept()
                # A connection that sends no statement, such as that of a port scanner, is ignored.
                with contextlib.suppress(OSError, msgspec.MsgspecError):
                    statements += _receive(peer, time.monotonic() + 10)
                    peers.append(peer)
        for peer in peers:
            peer.sendall(msgspec.json.encode(statements) + b"\n")
    except (OSError, msgspec.MsgspecError) as error:
        where = f"asked {head}" if own.rank else f"waited at {own.address}"
        raise PeerError(
            "peer-missing",
            f"{1 if own.rank else len(peers) + 1} of {nodes} machines are there.",
            details=[f"{where}, port {port}: {error}"],
        ) from None
    return peers, statements


def _connect(head: str, port: int, end: float) -> socket.socket:
    while True:
        try:
            return socket.create_connection((head, port), timeout=10)
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.5)


def _receive(peer: socket.socket, end: float) -> list[Statement]:
    """Return the statements that *peer* sends until *end*; its loss closes the connection."""
    for option, value in (
        (socket.TCP_KEEPIDLE, 2),
        (socket.TCP_KEEPINTVL, 2),
        (socket.TCP_KEEPCNT, 3),
    ):
        peer.setsockopt(socket.IPPROTO_TCP, option, value)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    peer.settimeout(max(0.01, end - time.monotonic()))
    with peer.makefile("rb") as stream:
        return msgspec.json.decode(stream.readline(LARGEST), type=list[Statement])


def compare(statements: Sequence[Statement], nodes: int) -> None:
    """
    Check that the machines have all in common that one server needs.

    Raises:
        peers-differ: They do not.
    """
    wrong = []
    for name in EQUAL:
        if len({getattr(each, name) for each in statements}) > 1:
            wrong += [f"{name} at {each.address}: {getattr(each, name)}" for each in statements]
    if sorted(each.rank for each in statements) != list(range(nodes)):
        wrong += [f"--node-rank of {each.address}: {each.rank}" for each in statements]
    if wrong:
        raise PeerError("peers-differ", "The machines cannot serve together.", details=wrong)


def measure(
    python: Path, own: Statement, nodes: int, head: str, port: int, variables: Mapping[str, str]
) -> float:
    """
    Return the GB/s that an all-reduce over all machines moves, by the torch that will serve.

    Raises:
        link-failed: It did not end.
    """
    words = map(str, (head, port, own.rank, nodes, MEASURING / 2))
    # CUDA reserves addresses without bounds.
    limits = Limits(MEASURING, 1 << 40, 1)
    ended = run_limited([str(python), "-P", "-c", _LINK, *words], limits, env=variables)
    lines = ended.tail.splitlines()
    with contextlib.suppress(ValueError, IndexError):
        return float(lines[-1]) / 1e9
    raise PeerError(
        "link-failed", f"An all-reduce over {nodes} machines failed.", details=lines[-20:]
    )


def judge(rate: float, statements: Sequence[Statement]) -> None:
    """
    Check the *rate* of the link, in GB/s.

    Raises:
        link-slow: It is far below what the interfaces state.
    """
    stated = min(each.speed for each in statements) / 8
    if rate < SLOWEST * stated:
        raise PeerError(
            "link-slow",
            f"The link gives {rate:.3f} GB/s, and its interfaces state {stated:.1f}.",
        )
