"""
G3: what a server says it runs, held against what the recipe expects, and against what a profiler saw.

A log states what was meant, not what happened; so a recipe also names kernels that a profile must show, and what the log cannot tell (a
variable that nobody reads, other memory than planned) is looked at where it lies.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sparkwright.bench.recipes import vllm_flags
from sparkwright.bench.server import environment_variables, openai_schema
from sparkwright.bench.server.openai_schema import ServerInvalid
from sparkwright.bench.server.server_log import Found, LogInvalid, Scanner, scan
from sparkwright.gates.contract import kernel_trace as profiled
from sparkwright.gates.contract.policy import ContractPolicy, Recipe, Running
from sparkwright.gates.core.verdict import (
    Check,
    Figure,
    Sample,
    declare,
    failed,
    invalid,
    not_run,
    passed,
)

if TYPE_CHECKING:
    from sparkwright.bench.server.client import Client

__all__ = ["CHECKS", "REASONS", "TITLE", "ContractPolicy", "Recipe", "Running", "run"]

TITLE = "what the server says it runs"

CHECKS = (
    *declare("server", "stream", "version", "no-unknown-variable", "no-emulation", "no-refusal", "no-fallback", "kv-counters"),
    *declare("variables", "flags", "variables-set", "kernels", "wheel-served"),
    *declare("line-*", "kv-cache", "graph-memory", measured=True),
    *declare("errors", role="informs"),
    *declare("log", role="reports"),
)

REASONS: Mapping[str, str] = {
    **openai_schema.REASONS,
    "server-died": "The server ended by itself before it answered. Read the last lines of its log.",
    "server-late": "The server did not answer in time. Read its log, and give it more time where it only loads.",
    "memory-low": "The machine's free memory fell below the reserve, and the server was ended. Lower --gpu-memory-utilization.",
    "graph-memory-negative": "vLLM believes that CUDA graphs give memory back, and plans more KV cache than there is memory; the server "
    "gets no traffic. Pin --kv-cache-memory-bytes and watch MemAvailable (vllm #44740).",
    "graph-memory-unseen": "The log does not say what CUDA graphs take: they are off, or the cache is pinned, or it is worded otherwise.",
    "log-unreadable": "The log is missing, is no text, or is too large. Save what the server prints, from its first line.",
    "log-foreign": "No line of the log tells the release of vLLM. It is another program's, or its beginning is lost.",
    "version-unknown": "Nobody has read what this release of vLLM prints. Read its sources, then add it to ci/gates/contract.yaml.",
    "version-differs": "The log is of another release than the one that answers. It is another server's.",
    "backend-wrong": "The server chose something else than the recipe says. What it measures is not what the recipe promises.",
    "backend-refused": "The server refused the backend that it was told to use, and took another without more words.",
    "line-missing": "The log never says what the recipe expects it to. The part was not used, or the release words it otherwise.",
    "emulation": "The server computes by emulation: right numbers, far too slowly, and not by the kernels of the wheel.",
    "fallback-unlisted": "The server fell back to something, and the recipe does not list that as harmless. Look what it means.",
    "kv-outside-plan": "The KV cache has not the size that the recipe plans. Other programs hold memory, or the flags differ.",
    "kv-uncounted": "The counters of this release do not tell the size of the KV cache; the log alone does.",
    "kv-differs": "Log and counters disagree about the size of the KV cache: the log is another server's, or of an earlier start.",
    "flag-missing": "The server was started without a flag of the recipe, or with another value.",
    "variable-unknown": "A variable is set that this release of vLLM does not read. Remove it, or use what replaced it.",
    "variable-differs": "A variable of the recipe is not set, or has another value.",
    "variables-unseen": "The environment of a server that was not started here cannot be seen. Start it with sparkwright.",
    "envs-unreadable": "vllm/envs.py is missing or is not what vLLM has there. The environment is damaged; install the wheel again.",
    "flags-unseen": "The command line of a server that was not started here cannot be seen. Start it with sparkwright.",
    "kernel-unseen": "No kernel of the profile is the one that the recipe names: whatever the log says, it did not run.",
    "kernel-forbidden": "The profile has a kernel that the recipe excludes.",
    "profile-missing": "No profile was given, so nothing but the log's words tells what ran.",
    "profile-unreadable": "The profile is none that torch's profiler or nsys makes.",
    "errors-logged": "The server logged errors. They may be answers to bad questions; read them.",
}


def run(policy: ContractPolicy, recipe: Recipe, running: Running, client: Client | None = None) -> tuple[Check, ...]:
    """Return the checks of a server; *client* asks it, where it serves."""
    checks = [_serves(running, client), _answers(client)]
    try:
        log = scan(running.log, policy.all_lines())
    except LogInvalid as error:
        checks.append(invalid("log", f"the log cannot be used: {error.says}", "log-unreadable"))
    else:
        checks += _of_log(policy, recipe, log, client)
    version = next((check.message.split()[1] for check in checks if check.name == "version" and check.state == "pass"), "")
    checks.append(_variables(running, version or "here"))
    return (*checks, *_started(recipe, running), _kernels(recipe, running.profile))


def _variables(running: Running, version: str) -> Check:
    """Return whether vLLM reads every ``VLLM_`` variable that is set for the server."""
    if running.variables is None or running.package is None:
        missing = "its environment" if running.variables is None else "where vLLM is installed"
        message = f"{missing} is not known, as the server was not started here"
        return not_run("variables", message, "variables-unseen")
    try:
        unread = environment_variables.unread(running.variables, running.package)
    except environment_variables.SourceInvalid as error:
        message = f"the variables that vLLM reads are not known: {error}"
        return invalid("variables", message, "envs-unreadable")
    if not unread:
        return passed("variables", f"vLLM {version} reads all VLLM_ variables that are set")
    samples = [
        Sample(name, _advice(name, similar), f"set to {running.variables[name]!r:.60}")
        for name, similar in unread.items()
    ]
    message = f"vLLM {version} does not read {', '.join(unread)}; it changes nothing"
    return failed("variables", message, "variable-unknown", samples=samples)


def _advice(name: str, similar: str) -> str:
    if replaced := vllm_flags.REPLACED.get(name):
        return f"gone since {replaced.since}" + (f"; now {replaced.use}" if replaced.use else "")
    return f"perhaps {similar}" if similar else ""


def _serves(running: Running, client: Client | None) -> Check:
    if running.ended:
        return failed("server", f"the server was ended before traffic: {running.ended}", running.reference or "server-died")
    if client is None:
        return not_run("server", "no server was given, only a log", "server-unreachable", required=False)
    try:
        return passed("server", f"it serves {client.model()} with room for {client.max_model_len()} tokens")
    except ServerInvalid as error:
        return invalid("server", error.says, error.reference)


def _answers(client: Client | None) -> Check:
    """Return whether a short completion comes whole and counted right."""
    if client is None:
        return not_run("stream", "no server was given, only a log", "server-unreachable", required=False)
    try:
        answer = client.complete("One, two, three,", max_tokens=16, ignore_eos=True)
    except ServerInvalid as error:
        return invalid("stream", error.says, error.reference)
    return passed("stream", f"a completion of {len(answer.tokens)} tokens came whole, in {len(answer.chunk_seconds)} events")


def _of_log(policy: ContractPolicy, recipe: Recipe, log: Scanner, client: Client | None) -> list[Check]:
    """Return the checks that the log decides."""
    return [
        _version(policy, log.found["version"], client),
        *(_line(name, wanted, log.found[name]) for name, wanted in recipe.lines.items()),
        _none("no-unknown-variable", "variable-unknown", "it complains of no unknown variable", log.found["unknown"], ()),
        _none("no-emulation", "emulation", "it computes nothing by emulation", log.found["emulation"], ()),
        _none("no-refusal", "backend-refused", "it refused no backend that it was told to use", log.found["refused"], ()),
        _none("no-fallback", "fallback-unlisted", "it fell back to nothing unlisted", log.found["fallback"], recipe.harmless),
        _graphs(recipe, log.found["graph-gib"]),
        _kv(recipe, log.found["kv-gib"], log.found["kv-tokens"]),
        _kv_told(log.found["kv-tokens"], client),
        _errors(log.found["error"]),
    ]


def _samples(found: Found) -> list[Sample]:
    return [Sample("log", actual=text) for text in found.texts[:5]]


def _version(policy: ContractPolicy, found: Found, client: Client | None) -> Check:
    from packaging.version import InvalidVersion, Version

    if not found.values:
        return invalid("version", "no line of the log tells the release of vLLM", "log-foreign")
    values, (oldest, beyond) = list(found.values), map(Version, policy.releases)
    try:
        told = client.version() if client else values[0]
        known = all(oldest <= Version(Version(one).base_version) < beyond for one in [*values, told])
    except ServerInvalid as error:
        return invalid("version", error.says, error.reference)
    except InvalidVersion as error:
        return invalid("version", f"no release of vLLM: {error}", "log-foreign")
    if len(values) > 1 or told != values[0]:
        return invalid("version", f"the log is of vLLM {', '.join(values)}, and vLLM {told} answers", "version-differs")
    if not known:
        return invalid("version", f"vLLM {told} is outside {policy.releases[0]} to {policy.releases[1]}", "version-unknown")
    return passed("version", f"vLLM {told} wrote the log" + (" and answers" if client else ""))


def _line(name: str, wanted: str, found: Found) -> Check:
    """Return whether every value of a line is the one that the recipe wants."""
    if not found.values:
        return failed(f"line-{name}", f"the log never says {name}; the recipe wants {wanted}", "line-missing")
    wrong = [value for value in found.values if not re.fullmatch(wanted, value)]
    if wrong:
        says = f"{name} is {', '.join(wrong)}; the recipe wants {wanted}"
        return failed(f"line-{name}", says, "backend-wrong", samples=_samples(found))
    return passed(f"line-{name}", f"{name} is {', '.join(found.values)}", samples=_samples(found)[:1])


def _none(name: str, reference: str, says: str, found: Found, harmless: Sequence[str]) -> Check:
    """Return whether no line of a kind is there, but for harmless ones."""
    texts = [text for text in found.texts if not any(re.search(pattern, text) for pattern in harmless)]
    # Beyond the lines that are kept, nobody knows which ones are harmless.
    if texts or found.count > len(found.texts):
        shown = [Sample("log", actual=text) for text in texts or found.texts]
        return failed(name, f"{found.count} lines of the log, such as: {shown[0].actual[-200:]}", reference, samples=shown)
    return passed(name, says)


def _numbers(found: Found) -> list[float]:
    # A pattern gives digits, commas and dots; anything else is not its number.
    return [float(value.replace(",", "")) for value in found.values if re.fullmatch(r"-?[\d,]{1,20}(\.\d{1,9})?", value)]


def _graphs(recipe: Recipe, found: Found) -> Check:
    values = _numbers(found)
    figures = [Figure("estimated CUDA graph memory", value, "GiB", bound=0.0) for value in values]
    if any(value < 0 for value in values):
        says = f"the memory of CUDA graphs is estimated as {min(values):g} GiB"
        return failed("graph-memory", says, "graph-memory-negative", figures=figures, samples=_samples(found))
    if values:
        return passed("graph-memory", f"the memory of CUDA graphs is estimated as {max(values):g} GiB", figures=figures)
    if recipe.graphs:
        return failed("graph-memory", "the log has no estimate of the memory of CUDA graphs", "graph-memory-unseen")
    return not_run("graph-memory", "the recipe captures no CUDA graphs", "graph-memory-unseen", required=False)


def _kv(recipe: Recipe, gib: Found, tokens: Found) -> Check:
    sizes, counts = _numbers(gib), _numbers(tokens)
    low, high = recipe.kv_gib or (0.0, float("inf"))
    figures = [Figure("KV cache", size, "GiB", bound=low or None) for size in sizes]
    figures += [Figure("tokens in the KV cache", count, bound=recipe.kv_tokens or None) for count in counts]
    if not counts or (recipe.kv_gib and not sizes):
        return failed("kv-cache", "the log does not say how large the KV cache is", "line-missing", figures=figures)
    if not all(low <= size <= high and size > 0 for size in sizes) or min(counts) < max(1, recipe.kv_tokens):
        says = f"KV cache of {', '.join(f'{size:g} GiB' for size in sizes)}, {min(counts):,.0f} tokens; planned {low:g} to {high:g} GiB"
        return failed("kv-cache", f"{says}, {recipe.kv_tokens:,} tokens", "kv-outside-plan", figures=figures)
    return passed("kv-cache", f"the KV cache holds {min(counts):,.0f} tokens", figures=figures)


def _kv_told(found: Found, client: Client | None) -> Check:
    """Return whether the server's counters tell the same size of the KV cache as its log."""
    if client is None:
        return not_run("kv-counters", "no server was given, only a log", "server-unreachable", required=False)
    try:
        names = list(client.metrics())
    except ServerInvalid as error:
        return invalid("kv-counters", error.says, error.reference)
    infos = [name for name in names if name.startswith("vllm:cache_config_info{")]
    told = {size for name in infos for size in re.findall(r'kv_cache_size_tokens="(\d{1,15})"', name)}
    if not told:
        return not_run("kv-counters", "this release counts no tokens of the KV cache", "kv-uncounted", required=False)
    if {float(size) for size in told} != set(_numbers(found)):
        says = f"the log says {', '.join(found.values) or 'nothing'} tokens of KV cache, the counters say {', '.join(told)}"
        return failed("kv-counters", says, "kv-differs")
    return passed("kv-counters", "log and counters tell the same size of the KV cache")


def _errors(found: Found) -> Check:
    if not found.count:
        return passed("errors", "the log has no errors", required=False)
    return failed("errors", f"the log has {found.count} lines of errors", "errors-logged", samples=_samples(found), required=False)


def _started(recipe: Recipe, running: Running) -> list[Check]:
    """Return the checks of how the server was started."""
    checks = []
    if recipe.flags:
        if running.flags is None:
            checks.append(not_run("flags", "the server was not started here", "flags-unseen"))
        else:
            line = f" {' '.join(running.flags)} ".replace("=", " ")
            lacking = [flag for flag in recipe.flags if f" {flag} ".replace("=", " ") not in line]
            says = f"the server was started without {', '.join(lacking)}"
            good = passed("flags", f"it has the recipe's flags: {', '.join(recipe.flags)}")
            checks.append(failed("flags", says, "flag-missing") if lacking else good)
    if recipe.variables and running.variables is not None:
        has = {name: running.variables.get(name) for name in recipe.variables}
        says = ", ".join(f"{name} is {has[name]!r}, not {value!r}" for name, value in recipe.variables.items() if has[name] != value)
        good = passed("variables-set", "it has the recipe's variables")
        checks.append(failed("variables-set", says, "variable-differs") if says else good)
    return checks


def _kernels(recipe: Recipe, profile: Path | None) -> Check:
    if not recipe.kernels and not recipe.forbidden:
        return not_run("kernels", "the recipe names no kernels", "profile-missing", required=False)
    if profile is None:
        return not_run("kernels", "no profile was given, so only the log's words tell what ran", "profile-missing")
    try:
        seen = profiled.kernels(profile, frozenset({recipe.events}))
    except profiled.ProfileInvalid as error:
        return invalid("kernels", f"the profile cannot be used: {error.says}", "profile-unreadable")
    unseen = [pattern for pattern in recipe.kernels if not any(re.search(pattern, name) for name in seen)]
    banned = [name for name in seen for pattern in recipe.forbidden if re.search(pattern, name)]
    shown = [Sample("kernel", actual=f"{name[:200]} ({count} times)") for name, count in seen.most_common(10)]
    if unseen:
        return failed("kernels", f"none of {len(seen)} kernels is {', '.join(unseen)}", "kernel-unseen", samples=shown)
    if banned:
        return failed("kernels", f"the profile has {banned[0][:200]}", "kernel-forbidden", samples=shown)
    return passed("kernels", f"the profile has every kernel of the recipe, among {len(seen)}", samples=shown)
