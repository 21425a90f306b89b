"""The environment that vLLM is served from: asked once, in a quarter of a second, without importing anything of it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from sparkwright.core import process
from sparkwright.core.errors import CommandError, PythonError
from sparkwright.release.client import state
from sparkwright.release.client.state import Installed, Pinned
from sparkwright.release.environment import Environment

_ASK = """\
import importlib.metadata as metadata, importlib.util as util, json, platform, sys, sysconfig
def version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
found = util.find_spec("vllm")
folders = list(found.submodule_search_locations or []) if found else []
print(json.dumps({"prefix": sys.prefix, "site": sysconfig.get_path("purelib"), "version": sys.version_info[:2],
                  "full": platform.python_version(), "vllm": version("vllm"), "ray": version("ray"), "package": "".join(folders[:1])}))
"""


class _Answer(msgspec.Struct):
    prefix: str
    site: str
    version: tuple[int, int]
    full: str
    vllm: str
    ray: str
    package: str


class Place(msgspec.Struct, frozen=True):
    """
    An environment with vLLM.

    Attributes:
        python: Its Python. *vllm*: version of the distribution, as its metadata says. *ray*: likewise; empty without one.
        package: The folder ``vllm``.
        installed: The set that `sparkwright install` put there; None where something else did. *half*: an installation was cut off.
    """

    python: Path
    environment: Environment
    vllm: str
    ray: str
    package: Path
    installed: Installed | None
    half: bool = False

    @property
    def wheel(self) -> Pinned | None:
        """The wheel of vLLM that is installed; None where nobody recorded it."""
        found = self.installed.chosen.packages if self.installed else ()
        return next((one for one in found if one.project == "vllm"), None)


def ask(python: Path) -> Place:
    """
    Return what the environment of *python* holds.

    Raises:
        environment-unusable: It is no Python, or there is no vLLM in it. environment-broken: Its records are damaged.
    """
    python = python.absolute()
    try:
        # Whatever .pth files print comes before our line.
        said = process.output([python, "-I", "-c", _ASK], timeout=60).splitlines()
        answer = msgspec.json.decode(said[-1], type=_Answer)
    except (CommandError, OSError, IndexError, msgspec.DecodeError) as error:
        details = error.details if isinstance(error, CommandError) else [str(error)]
        raise PythonError("environment-unusable", f"{python} does not answer as a Python does.", details=details) from error
    if not answer.vllm or not answer.package:
        todo = "Install a release there (`sparkwright install --into VENV`), or name another environment with --into or --python."
        raise PythonError("environment-unusable", f"There is no vLLM in the environment of {python}.", details=[answer.prefix], todo=todo)
    abi = f"cp{answer.version[0]}{answer.version[1]}"
    made = Environment(Path(answer.prefix), Path(answer.site).resolve(), answer.version, abi, answer.full)
    half = state.installing(made) is not None
    return Place(python, made, answer.vllm, answer.ray, Path(answer.package), state.installed(made), half)


def changed(place: Place) -> tuple[str, ...]:
    """Return what is not as it was installed, in sentences; by sizes and times, so a second at the most where nothing is."""
    from sparkwright.release.client import health

    return tuple(str(one) for one in health.look(place.environment, place.installed)) if place.installed else ()
