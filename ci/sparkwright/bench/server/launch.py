"""
How a vLLM server is started: from a given environment, with known variables.

vLLM ignores a ``VLLM_`` variable that its release does not read, so a server with one would run
otherwise than intended and is refused.
"""

import json
import os
import pwd
import re
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import msgspec

from sparkwright.bench.server import wheel_identity
from sparkwright.bench.server.peers import Machines
from sparkwright.core import config, strict_yaml
from sparkwright.core.errors import Advice, SparkwrightError, UsageError
from sparkwright.core.files import read_text, sha256_bytes
from sparkwright.core.memory import MachineMemory
from sparkwright.core.process import cache_variables

#: Variables that pass from the caller to a server. Only a recipe changes how vLLM computes;
#: LD_LIBRARY_PATH and PYTHONPATH would replace code of the wheel.
PASSED = (
    "PATH", "HOME", "USER", "LOGNAME", "LANG", "TMPDIR", "TZ", "XDG_CACHE_HOME", "XDG_CONFIG_HOME",
    "HF_HOME", "HF_HUB_CACHE", "CUDA_HOME", "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES",
    "NVIDIA_DRIVER_CAPABILITIES",
    # A rehearsal finds a server that outlived its gate by these variables.
    "SPARKWRIGHT_REHEARSAL_STEP", "SPT_NOENV",
)  # fmt: skip

#: Variables of every server: nothing is fetched or reported, and the log comes line by line.
ALWAYS = {
    "LC_ALL": "C.UTF-8",
    "PYTHONNOUSERSITE": "1",
    "PYTHONUNBUFFERED": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_COLOR": "0",
}

#: Variables of a gate's servers: vLLM counts the requests with logits that are not numbers.
GATED = {"VLLM_COMPUTE_NANS_IN_LOGITS": "1"}


#: Variables of patches: GiB that vLLM leaves free when it sizes the KV cache, and whether a process
#: that waits for another one sleeps.
RESERVE, SLEEP = "VLLM_MEMORY_RESERVE_GIB", "VLLM_SHM_READER_SLEEP"


class VariableError(SparkwrightError):
    """A server is started with a variable that it does not read as intended."""

    references: ClassVar[Mapping[str, Advice]] = {
        "variable-refused": Advice(
            "A variable has a wrong value, or a name that nothing reads, so the server would run "
            "otherwise than intended.",
            "Correct or remove it as the lines above say; docs/reference/commands.md lists "
            "the variables.",
        ),
    }


#: A draft vocabulary of a recipe in ``--speculative-config``.
_VOCABULARY = re.compile(r'(?<="draft_vocabulary":")([a-z0-9][a-z0-9._-]*\.json)@[0-9a-f]{64}(?=")')


def vocabulary_file(name: str) -> Path:
    """Return the file of the draft vocabulary *name* of a recipe."""
    return config.root() / "ci" / "recipes" / name


def _vocabulary_path(match: re.Match[str]) -> str:
    return json.dumps(str(vocabulary_file(match[1])))[1:-1]


def read_variables(package: Path) -> list[str]:
    """Return the ``VLLM_`` variables that the installed *package* reads, by its ``envs.py``."""
    table = package / "envs.py"
    return re.findall(r"""["'](VLLM_\w+)["']\s*:""", read_text(table) if table.exists() else "")


def shared_variables(machine: MachineMemory, floor: float, package: Path) -> dict[str, str]:
    """
    Return the variables by which the vLLM in *package* leaves to the CPU what it shares with the
    GPU of *machine*: *floor* GiB of memory, and power. Those that it does not read are left out.
    """
    if not machine.unified:
        return {}
    derived = {RESERVE: f"{floor:g}", SLEEP: "1"}
    return {name: derived[name] for name in read_variables(package) if name in derived}


def check_variables(variables: Mapping[str, str], package: Path) -> None:
    """
    Check the ``VLLM_`` *variables* against the table in ``envs.py`` of the installed *package*.

    Raises:
        variable-refused: vLLM does not read one, so it would change nothing.
    """
    read = read_variables(package)
    unread = sorted(name for name in variables if name.startswith("VLLM_") and name not in read)
    if not read or not unread:
        return
    removed = strict_yaml.load(config.root() / "ci" / "variables.yaml", dict[str, str])
    raise VariableError(
        "variable-refused",
        f"The installed vLLM does not read {', '.join(unread)}.",
        details=[f"{name}: {removed.get(name, 'unknown')}" for name in unread],
    )


class LaunchPlan(msgspec.Struct, frozen=True):
    """
    How a server is started.

    Attributes:
        python: The Python of the environment that vLLM is installed in.
        model: Folder of the model.
        flags: Further arguments of ``vllm serve``.
        variables: Variables beside `PASSED`, `ALWAYS` and those of the caches of a virtual
            environment; an empty value removes one.
        name: The name under which the model is served.
        timeout: Seconds until it must be ready.
        kept_free: Megabytes that must stay available on the machine, else the server is killed,
            whatever the caller does meanwhile; 0 for no floor.
        grace: Seconds between the request to end and the kill.
        user: The user that it runs as; empty for that of the caller.
        machines: The machines of one server; None for this one alone, or if others join them.
        caches: The folder for `cache_variables`; None for that of the environment or the user.
    """

    python: Path
    model: Path
    flags: tuple[str, ...] = ()
    variables: dict[str, str] = {}
    name: str = "model"
    timeout: float = 1800.0
    kept_free: int = 0
    grace: float = 20.0
    user: str = ""
    machines: Machines | None = None
    caches: Path | None = None

    def check(self) -> None:
        """
        Check that the environment reads the variables, and that there is the user.

        Raises:
            environment-unusable: There is no such Python.
            variable-refused: The installed vLLM does not read a variable.
            UsageError: There is no such user.
        """
        check_variables(self.variables, wheel_identity.site_packages(self.python) / "vllm")
        self.environment()

    def environment(self) -> dict[str, str]:
        """
        Return all variables of the server.

        Raises:
            UsageError: There is no such user.
        """
        passed = {name: os.environ[name] for name in PASSED if name in os.environ}
        environment, caches = self.python.absolute().parent.parent, dict[str, str]()
        if self.user:
            home = _home(self.user)
            passed |= {"HOME": str(home), "USER": self.user, "LOGNAME": self.user}
            passed |= dict.fromkeys(("TMPDIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "HF_HOME"), "")
            caches = cache_variables(home / ".cache" / sha256_bytes(bytes(environment))[:16])
        elif (environment / "pyvenv.cfg").is_file() and os.access(environment, os.W_OK):
            caches = cache_variables(environment)
        caches |= cache_variables(self.caches) if self.caches else {}
        variables = {**passed, **ALWAYS, **caches, **self.variables}
        return {name: value for name, value in variables.items() if value}

    def command(self, port: int, host: str = "127.0.0.1") -> list[str]:
        """Return the command line, in which a draft vocabulary of a recipe is a file."""
        flags = [_VOCABULARY.sub(_vocabulary_path, flag) for flag in self.flags]
        return [
            str(self.python), "-P", "-m", "vllm.entrypoints.cli.main", "serve", str(self.model),
            "--served-model-name", self.name, "--host", host, "--port", str(port), *flags,
        ]  # fmt: skip


def _home(user: str) -> Path:
    try:
        return Path(pwd.getpwnam(user).pw_dir)
    except KeyError:
        raise UsageError(
            "usage", f"There is no user {user!r:.80} on this machine.", todo="Make it: useradd."
        ) from None
