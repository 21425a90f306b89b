"""Serving a model from a release: preflight, start, other machines, health; and its failures."""

from collections.abc import Mapping
from typing import ClassVar

from sparkwright.core.errors import Advice, SparkwrightError


class ServeError(SparkwrightError):
    """A server cannot start, or does not serve."""

    references: ClassVar[Mapping[str, Advice]] = {
        "answers-differ": Advice(
            "The server answers, and not as the gate recorded for its release, recipe and model: "
            "other weights, a kernel that is wrong on this machine, or damaged memory.",
            "Do not use its answers. Restart it; if they still differ, run `sparkwright gate` on "
            "this machine, and take another release meanwhile (`sparkwright rollback`).",
        ),
        "canary-not-run": Advice(
            "The server's answers were not compared: `serve` did not start it here, no gate "
            "recorded any for its release, recipe and model, or it refuses the questions.",
            "Serve a recipe of the release for which G5 passed, with the model that it names; "
            "`sparkwright gate` records what to answer.",
            exit_code=4,
        ),
        "memory-held": Advice(
            "The machine is large enough, but running programs hold so much memory that the "
            "server would not fit beside them.",
            "Take a remedy that is printed above: each was checked.",
        ),
        "model-differs": Advice(
            "The copy of the model on the other machine has other bytes than the model here, which "
            "may have changed meanwhile, or a disk or a cable is faulty.",
            "Copy it again; if it differs again, check the disk and the link.",
        ),
        "port-taken": Advice(
            "Another program listens on that address and port, or this user may not.",
            "End that program (`ss -ltnp` names it), or choose another port with --port (in a "
            "container: PORT).",
        ),
        "serve-unfit": Advice(
            "The model cannot be served here with these flags: vLLM would end at its start, "
            "or use memory that must stay free. A Spark without memory stops answering.",
            "Change what the lines above name; a remedy for the memory was checked.",
        ),
        "server-dead": Advice(
            "Nothing serves there: it still loads, it ended, or its engine states that it is dead.",
            "Read its log (journalctl, docker logs): the first line with ERROR gives the reason.",
        ),
        "server-garbage": Advice(
            "The server answers with exclamation marks alone, token 0 of most vocabularies: its "
            "logits are not numbers, because a kernel, a scale or a weight is wrong.",
            "Do not use its answers. Run `sparkwright gate` on the wheel and the model; G2 to G4 "
            "find the part.",
        ),
        "server-stuck": Advice(
            "The server accepts connections, gives no token, and none of its counters moves: it "
            "hangs, although /health may say 200.",
            "Ask again; if it stays so, keep its log and restart it.",
        ),
    }
