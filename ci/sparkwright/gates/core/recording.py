"""What a reference server says, kept in a folder, so that a candidate can be compared with it when it no longer runs."""

from __future__ import annotations

from pathlib import Path

from sparkwright.bench.server.client import ServerInvalid
from sparkwright.core import strict_yaml
from sparkwright.core.console import console
from sparkwright.forks.context import RunContext
from sparkwright.gates.accuracy import gate as tasks
from sparkwright.gates.accuracy import result as results
from sparkwright.gates.accuracy import runner
from sparkwright.gates.accuracy.gate import AccuracyPolicy
from sparkwright.gates.accuracy.runner import HarnessFailed
from sparkwright.gates.core.athand import Inputs
from sparkwright.gates.core.errors import GateError
from sparkwright.gates.core.ready import Ready
from sparkwright.gates.logprobs import gate as distributions
from sparkwright.gates.logprobs import reference
from sparkwright.gates.logprobs.gate import LogprobsPolicy
from sparkwright.gates.logprobs.reference import ReferenceInvalid


def record(context: RunContext, ready: Ready, inputs: Inputs, folder: Path) -> tuple[Path, ...]:
    """
    Write the distributions and the answers of the server of *ready* into *folder* and return the files.

    Raises:
        measurement-invalid: The server does not answer as it should, or does not agree with itself.
        offline, source-unreachable, command-failed: The harness of the tasks cannot be installed.
    """
    gates = context.project.root / "ci" / "gates"
    folder.mkdir(parents=True, exist_ok=True)
    scored, asked = folder / "logprobs.json", folder / f"{inputs.task}.json"
    try:
        with console.step("record the distributions"):
            policy = strict_yaml.load(gates / "logprobs.yaml", LogprobsPolicy)
            reference.save(distributions.record(policy, ready.paragraphs(), ready.server.client(), ready.server.served), scored)
        with console.step(f"record the answers to {inputs.task}"):
            python = runner.obtain(context)
            wanted = strict_yaml.load(gates / "accuracy.yaml", AccuracyPolicy)
            here = ready.server
            results.save(tasks.answer(wanted, inputs.task, context, python, here.url, here.served, here.name), asked)
    except (ServerInvalid, ReferenceInvalid, HarnessFailed) as error:
        raise GateError("measurement-invalid", f"The reference cannot be recorded: {error.says}.", details=[error.reference]) from None
    return scored, asked
