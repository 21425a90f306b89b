"""Failures of serving, with their references."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from sparkwright.core.errors import Advice, SparkwrightError


class ServeError(SparkwrightError):
    """A server cannot start, or does not serve."""

    references: ClassVar[Mapping[str, Advice]] = {
        "address-missing": Advice(
            "The address that is given for this machine is another one's.",
            "Give --node-address an address above, of the interface with the fast link; `ip -br "
            "address` lists them.",
        ),
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
        "flag-unknown": Advice(
            "The installed release of vLLM does not know the flag, or `serve` sets it itself.",
            "Correct or remove it; `vllm serve --help=all` of that environment lists its flags.",
        ),
        "library-left-out": Advice(
            "A graft holds no library whose code its GPU cannot load, and the flags ask for an "
            "attention backend that calls one.",
            "Leave the flag out: vLLM then chooses a backend that runs there. `sparkwright audit` "
            "lists what is left out, and `sparkwright build --keep NAME` keeps it.",
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
        "loader-missing": Advice(
            "--load-format names a loader whose package the environment does not have.",
            "Leave the flag out: it changes how fast the model loads, not how fast it answers. Or "
            "install a release: vLLM requires fastsafetensors, so its locked set should have it.",
        ),
        "memory-held": Advice(
            "The machine is large enough, but running programs hold so much memory that the "
            "server would not fit beside them.",
            "Take a remedy that is printed above: each was checked.",
        ),
        "port-taken": Advice(
            "Another program listens on that address and port, or this user may not.",
            "End that program (`ss -ltnp` names it), or choose another port with --port (in a "
            "container: PORT).",
        ),
        "peer-missing": Advice(
            "Not all machines that serve together came within half an hour, or one ended before "
            "all were compared.",
            "Start `serve` on each. --join names the address that the first one has as "
            "--node-address, --nodes and --node-port are the same, and no firewall is between.",
        ),
        "peers-differ": Advice(
            "The machines have not the same release, model, arguments or kind of link, so they "
            "would answer wrongly, or hang.",
            "Make equal what the lines above show: install the same release, copy the model "
            "(`rsync -aL MODEL/ HOST:MODEL/`), start with the same arguments, set the same MTU, "
            "use the interfaces of the fast link.",
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
