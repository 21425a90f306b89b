"""
The canary: beginnings of texts whose distributions a gate recorded, for a server that serves.

A server whose ``/health`` says 200 may answer garbage: other weights, a kernel that is wrong on
this machine, damaged memory. G5 compared the wheel with a recorded reference on many texts. The
beginnings of `TEXTS` of them travel with the release, bound to the wheel, the recipe and the model
of a pass, and are compared by limits of the same policies.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
from msgspec.structs import replace

from sparkwright.bench.recipes import recipe as recipes
from sparkwright.bench.server.client import Client
from sparkwright.client.records import LARGEST_RELEASE
from sparkwright.core.files import read_json
from sparkwright.core.store import Store
from sparkwright.gates import logprobs
from sparkwright.gates.core import policy as gate_policies
from sparkwright.gates.core.builder import LOGPROBS
from sparkwright.gates.core.server_under_test import read_recorded
from sparkwright.gates.core.verdict import Ladder, Verdict
from sparkwright.gates.dirty_text import (
    NOT_NAMED,
    TEXT,
    DirtyText,
    StockText,
)

#: Texts, the tokens of each, and as many are generated after it: together as many positions as a
#: text of the policy has, whose limit they have.
TEXTS, TOKENS = 8, 64
#: Questions for text, asked at once; four times as many if an answer is dirty.
QUESTIONS = 8
#: Recorded answers that tell which scripts and languages are usual.
USUAL = 40


class Canary(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    What a server must answer.

    Attributes:
        reference: The beginnings of its texts. *stock*: sampled answers of the stock wheel.
        profile: The kind of model, of G4's policy.
    """

    reference: logprobs.Reference
    stock: StockText | None
    profile: str


def subject(wheel: str, recipe: str, model: str) -> str:
    """Return the name of a canary, by the digests of the wheel and of the model's files."""
    return f"{wheel} {model} {recipe}"


def passes(verdicts: Iterable[Verdict]) -> list[str]:
    """Return the names of the canaries that a pass of G5 among *verdicts* proves."""
    return [
        subject(each.wheel, each.recipe, each.model)
        for each in verdicts
        if (each.gate, each.state) == ("G5", "pass") and each.recipe and each.model
    ]


def read(path: Path) -> dict[str, Canary]:
    """Return the canaries in the file at *path*, if there is one; raise `file-invalid`."""
    return read_json(path, dict[str, Canary], limit=LARGEST_RELEASE) if path.exists() else {}


def proved(path: Path, verdicts: Iterable[Verdict]) -> bytes:
    """Return the canaries in the file at *path* that a pass of *verdicts* proves, as JSON."""
    names = passes(verdicts)
    return msgspec.json.encode({name: own for name, own in read(path).items() if name in names})


def write(store: Store, folder: Path, ladder: Ladder, against: Path, profile: str) -> None:
    """
    Write the canaries of *ladder* into *folder*, beside those of other recipes.

    A wheel that repairs what the stock wheel computes gets none: it differs from that on purpose.

    Args:
        against: The folder of the reference.

    Raises:
        ServerInvalid: The reference is no longer what was recorded.
    """
    names = passes(ladder.verdicts)
    if not (names and ladder.wheel) or (against / "precise").exists():
        return
    path = against / LOGPROBS
    recorded = read_recorded(path, logprobs.Reference, limit=logprobs.LARGEST)
    rows, first = list[logprobs.Row](), 0
    for text in recorded.texts[:TEXTS]:
        rows += recorded.rows[first:][: min(TOKENS, len(text)) - 1]
        first += len(text) - 1
    # What is published names no path of this machine, as flags may.
    served = replace(recorded.served, flags=None)
    reference = replace(
        recorded,
        served=served,
        texts=[text[:TOKENS] for text in recorded.texts[:TEXTS]],
        rows=rows,
    )
    stock, path = None, against / TEXT
    if path.exists():
        stock = read_recorded(path, StockText)
        stock = replace(stock, served=served, answers=stock.answers[:USUAL])
    path = folder / f"{ladder.wheel.file.removesuffix('.whl')}.canary.json"
    canaries = read(path) | dict.fromkeys(names, Canary(reference, stock, profile))
    store.write(path, msgspec.json.encode(canaries))


def differences(canary: Canary, client: Client, root: Path, recipe: str) -> Iterator[str]:
    """
    Yield in what the server's answers differ from those recorded, beyond the limits of the gates.

    Args:
        root: Of the reviewed data, which has the limits and the *recipe*.

    Raises:
        ServerInvalid: The server does not answer as it should.
    """
    policies = gate_policies.load(root)
    policy = replace(policies.logprobs, decode_tokens=TOKENS, decode_batch=TEXTS)
    texts, floors = canary.reference.texts, canary.reference.floors
    floor = max(max(kl) for name, kl in floors.items() if name != "best-token")
    limit = max(policy.text_max, policy.kl_floors * floor)
    expected = logprobs.sound(policy, canary.reference.rows)
    measured = logprobs.sound(policy, logprobs.score(policy, texts, client))
    distance = float(logprobs.lower_bound(expected, measured, policy.top).mean())
    kl, generated = logprobs.decode(policy, client, texts, (0.0, True))
    worse = float((generated.logprobs < generated.tops[:, 0]).sum())
    for what, value, most in (
        ("nat from the distributions", distance, limit),
        ("nat of generated tokens from prefill", float(kl.mean()), limit),
        ("greedy tokens that are not the most probable ones", worse, 0),
    ):
        if value > most:
            yield f"{value:.3g} {what}; the limit is {most:.3g}"
    generation = policies.generation
    if not (profile := generation.profiles[canary.profile]).no_dirty_text:
        rules = replace(generation.dirty_text, answers=QUESTIONS // 2, blocks=0)
        text = DirtyText(
            replace(generation, dirty_text=rules), client, profile.wrap, recipes.load(root, recipe)
        )
        text.cells = [(True, False)]
        check = next(text.judge(client, canary.stock or NOT_NAMED))
        if check.state != "pass":
            yield f"{check.message}, such as: {check.samples[0].actual}"
