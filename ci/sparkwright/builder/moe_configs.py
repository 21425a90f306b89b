"""
Tuned configurations of vLLM's Triton kernels for experts: reviewed files that a build adds.

``build/<stack>/moe`` (``moe-9.0a`` for another architecture) holds files as vLLM's tuner names
them, each with its record beside it: ``NAME.json`` and ``NAME.yaml``. `sparkwright model tune`
writes both. A build adds the files to the source tree, so that its tree counts them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from statistics import median
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from sparkwright.core import strict_yaml
from sparkwright.core.errors import Advice, SparkwrightError
from sparkwright.core.files import Sha256, read_json, sha256_file
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import MOE_CONFIGS, capability

_NAME = re.compile(
    r"E=\d+,N=\d+,device_name=(?P<device>[\w.+-]+)(,dtype=\w+)?(,block_shape=\[\d+,\d+\])?\.json"
)
Microseconds = Annotated[float, Meta(gt=0)]


class TuningError(SparkwrightError):
    """A configuration of experts cannot be tuned or packed."""

    references: ClassVar[Mapping[str, Advice]] = {
        "tuning-failed": Advice(
            "vLLM's tuner ended without the file that the served release would read for this "
            "checkpoint.",
            "Read the tuner's last lines in the log named above.",
        ),
        "tuning-foreign": Advice(
            "A tuned configuration is for another device or another release of vLLM, or is not "
            "the file that its record describes; a kernel may be slower with it, or not compile.",
            "Tune again on the stack's device with the stack's wheel (`sparkwright model tune`), "
            "or remove the file and its record.",
        ),
        "tuning-slower": Advice(
            "A tuned configuration was slower than the one that vLLM takes without it.",
            "Tune again without --configurations, or remove the file and its record. `model tune` "
            "leaves a slower file in the output folder.",
        ),
    }


class BatchLatency(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    Latency of a layer of experts for a batch of so many tokens, in microseconds, of each round.

    Attributes:
        before: With the configuration that vLLM takes without the file.
    """

    tokens: Annotated[int, Meta(ge=1)]
    before: Annotated[tuple[Microseconds, ...], Meta(min_length=1)]
    tuned: Annotated[tuple[Microseconds, ...], Meta(min_length=1)]

    @property
    def faster(self) -> bool:
        """Whether the median is at most that without the file."""
        return median(self.tuned) <= median(self.before)


class TuningRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    How a file was made.

    Attributes:
        sha256: Of the file.
        vllm: The version of the tuned environment; *wheel*: its wheel's sha256.
        tuner: The sha256 of ``benchmark_moe.py``.
        capability: The compute capability of the GPU, ``12.1``.
        host: Facts of the machine.
        date: Of the measurement.
        configurations: How many were tried for each batch; 0 for all of the tuner's.
    """

    sha256: Sha256
    vllm: str
    wheel: Sha256
    tuner: Sha256
    device: str
    capability: Annotated[str, Meta(pattern=r"^\d+\.\d$")]
    host: dict[str, str]
    date: Annotated[str, Meta(pattern=r"^\d{4}-\d\d-\d\d$")]
    configurations: Annotated[int, Meta(ge=0)]
    latencies: Annotated[tuple[BatchLatency, ...], Meta(min_length=1)]


def faults(context: RunContext, version: str, gpu_capability: str) -> dict[str, bool]:
    """Return whether a file for that vLLM *version* and GPU is not for the stack, by the reason."""
    locked, arch = context.lock.forks["vllm"], context.project.spec.arch
    releases = {file.version for file in (locked.sdist, *locked.bases.values()) if file}
    releases |= {locked.git.ref.removeprefix("v")} if locked.git else set()
    return {
        f"it is for SM {gpu_capability}, and the stack is for {arch}": (
            gpu_capability != capability(arch)
        ),
        f"it is for vLLM {version}, and the stack has {', '.join(sorted(releases))}": (
            version.partition("+")[0] not in releases
        ),
    }


def members(context: RunContext, fork: str, package: str) -> dict[str, bytes]:
    """
    Return the files of the stack by their paths in the source tree of *fork*, where they replace
    upstream's.

    Args:
        package: The folder of its package.

    Raises:
        file-invalid: A file or record does not have its form.
        tuning-foreign: A file is for another device or release, or its record is another file's.
        tuning-slower: A batch was slower with the file, by the medians of its record.
    """
    result: dict[str, bytes] = {}
    for path in context.tuned_files(fork):
        if path.suffix != ".json":
            continue
        record = strict_yaml.load(path.with_suffix(".yaml"), TuningRecord)
        read_json(path, dict[str, str | dict[str, int]])
        match = _NAME.fullmatch(path.name)
        wrong = {
            **faults(context, record.vllm, record.capability),
            f"its name is no file of {record.device}": (
                not match or match["device"] != record.device
            ),
            "its record states another sha256": record.sha256 != sha256_file(path),
        }
        if details := [fault for fault, present in wrong.items() if present]:
            raise TuningError(
                "tuning-foreign",
                f"{path.name} is not a file for stack {context.project.stack}.",
                details=details,
            )
        if slower := [row.tokens for row in record.latencies if not row.faster]:
            raise TuningError(
                "tuning-slower",
                f"{path.name} is slower for batches of {', '.join(map(str, slower))} tokens.",
            )
        result[f"{package}/{MOE_CONFIGS}/{path.name}"] = path.read_bytes()
    return result
